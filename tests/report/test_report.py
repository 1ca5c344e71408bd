"""The report: what it says of runs, what it refuses, and that nothing in it is taken for code."""

import json
import re
from html import escape, unescape

import numpy as np
import pytest
from run_folders import MODELS, write_run, write_study
from scipy.stats import binomtest
from store_damage import sign_run

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.models.predictor import model_name
from transformer_nfn.paper.gather import gather
from transformer_nfn.prediction.metrics import worth_in_examples
from transformer_nfn.prediction.runs import (
    PREDICTIONS_FILE,
    RUN_FILE,
    RunError,
    RunRecord,
    predictions_on_test,
    read_predictions,
    write_predictions,
)
from transformer_nfn.report import write_report


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("study"), networks=120, seeds=2)


@pytest.fixture(scope="module")
def text(study):
    out = study.parent / "report.html"
    write_report([study], out)
    return out.read_text()


def plain(html):
    """Text as a reader sees it, numbers and names without their marks."""
    return unescape(re.sub(r"</?span[^>]*>|</?code>", "", html))


def shown(text, key):
    """The text of a number, by its key."""
    inside = re.search(rf'<span data-n="{re.escape(key)}">(.*?)</span>', text, re.S)
    return unescape(re.sub("<[^>]*>", "", inside[1]))


def test_every_model_and_section_is_there(text):
    for section in ("run", "models", "paper", "figures", "intervals", "failures", "runs"):
        assert f'<section id="{section}"' in text
    table = text.partition("How well each model ranks")[2].partition("</table>")[0]
    assert all(f">{model_name(model)}</span></th>" in table for model in MODELS)


def test_a_model_is_worth_so_many_labelled_examples(tmp_path):
    write_run(tmp_path / "runs", "statnn", networks=400, seeds=2, same_parts=True, skill=5.0)
    write_report([tmp_path], tmp_path / "report.html")
    page = plain((tmp_path / "report.html").read_text())
    table = page.partition("Worth examples</th>")[2].partition("</table>")[0]
    (row,) = re.findall(r'<tr><th scope="row">StatNN</th>(.*?)</tr>', table)
    worth = re.findall("<td>(.*?)</td>", row)[-1]
    accuracy, _ = predictions_on_test(read_predictions(tmp_path / "runs"))
    tau = RunRecord.read(tmp_path / "runs").summary["tau"]
    (count,) = worth_in_examples(np.sort(accuracy), [tau])
    assert float(worth.replace(",", "")) == pytest.approx(count, rel=0.15)


def test_every_caption_says_whose_seeds_the_networks_have(tmp_path):
    kind, words = "each", "a seed each"
    table = {"table": "thresholds", "row": "mlp", "column": "all"}
    write_run(tmp_path / "a", "mlp", networks=60, zoo_seeds=kind, table=table)
    write_run(tmp_path / "b", "statnn", networks=60, zoo_seeds=kind)
    write_report([tmp_path], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    text = plain(text)
    assert f"<dt>Their seeds</dt><dd>{words}</dd>" in text
    assert f"Here: MNIST, 60 networks, {words}." in text
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    assert len(captions) >= 4
    assert all(f"Zoo: MNIST, 60 networks, {words}." in caption for caption in captions)
    assert f"ranks the test networks · MNIST, 60 networks, {words}" in text
    assert f"<td>MNIST, 60 networks, {words}</td>" in text, "also in the list of all runs"


def test_zoos_of_both_kinds_are_never_compared_with_each_other(tmp_path):
    for kind in ("one", "each"):
        for model in ("mlp", "statnn"):
            write_run(tmp_path / kind / model, model, networks=60, zoo_seeds=kind)
    labels = [zoo.label for zoo in gather([tmp_path]).zoos]
    assert sorted(labels) == [
        "MNIST, 60 networks, a seed each",
        "MNIST, 60 networks, one seed for all",
    ]
    write_report([tmp_path], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    page = plain(page)
    lede = re.search(r'class="lede">(.*?)</p>', page, re.S)[1]
    for label in labels:
        assert f"Best on {label}: " in lede


def test_zoos_of_one_name_are_told_apart_by_their_checksum(tmp_path):
    for name in ("a", "b"):
        run = write_run(tmp_path / name, "mlp", networks=60)
        set_record(run, zoo__sha256=name * 64)
    with pytest.raises(RunError, match=r"several zoos called 'MNIST, .* a seed each': .*/a, .*/b"):
        write_report([tmp_path], tmp_path / "report.html")
    write_report([tmp_path / "a"], tmp_path / "report.html")


def test_text_of_a_record_is_never_code(tmp_path):
    bad = '</script><script>alert(1)</script><b onclick="x">&'
    write_run(tmp_path / "r", bad, networks=60, name=bad, log=False)
    write_run(tmp_path / "s", "mlp", networks=60, name=bad, status=f"no: {bad}")
    write_report([tmp_path], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "<script>alert" not in text
    assert "<b onclick" not in text
    assert text.count("</script>") == 1
    assert f"<title>{escape(bad)}: mean τ" in text


@pytest.mark.parametrize(
    "settings",
    [
        {"seeds": 1},
        {"predictions": False},
        {"status": "not enough networks: 3 of 20"},
        {"log": False, "model": "xgboost"},
        {"augment": 10.0},
    ],
)
def test_a_single_run_is_enough(tmp_path, settings):
    write_run(tmp_path / "r", **{"networks": 60} | settings)
    write_report([tmp_path], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    before_the_program = text.rpartition("<script>")[0]
    assert "nan" not in before_the_program.lower()
    assert settings.get("status", "Transformer-NFN") in text or "XGBoost" in text


def test_intervals_that_hold_for_less_than_they_aim_at_are_named(tmp_path):
    """For drawn widths, against the interval of a share (Wilson's) by SciPy."""
    seed = int(np.random.default_rng().integers(1 << 30))
    source = np.random.default_rng(seed)
    expected = {}
    for i, model in enumerate(MODELS):
        reach = (0.2, 4.0)[i] if i < 2 else source.uniform(0.3, 2.5)
        networks = int(source.integers(60, 600))
        run = write_run(
            tmp_path / model, model, networks=networks, seeds=1, reach=reach, name=model, log=False
        )
        columns = read_predictions(run)
        tested = columns["split"] == "test"
        truth, low, high = (columns[name][tested] for name in ("accuracy", "low", "high"))
        inside = int(((low <= truth) & (truth <= high)).sum())
        end = binomtest(inside, len(truth)).proportion_ci(0.95, "wilson").high
        expected[model_name(model)] = bool(end < 0.9)
    write_report([tmp_path], tmp_path / "report.html")
    text = plain((tmp_path / "report.html").read_text())
    for name, short in expected.items():
        sentence = f"the intervals of <b>{name}</b> are too narrow: they aim at 90.0 %"
        assert (sentence in text) == short, (seed, name)
    assert set(expected.values()) == {False, True}


def test_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(RunError, match="no runs in"):
        write_report([tmp_path], tmp_path / "report.html")
    with pytest.raises(RunError, match="at least one folder"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(RunError, match="there is no folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")


def set_record(run, **changes):
    record = json.loads((run / RUN_FILE).read_text())
    for name, value in changes.items():
        part, _, key = name.partition("__")
        if key:
            record[part][key] = value
        else:
            record[part] = value
    (run / RUN_FILE).write_text(json.dumps(record))


def set_predictions(run, **changes):
    columns = read_predictions(run)
    columns |= {name: change(columns[name]) for name, change in changes.items()}
    write_predictions(run, {name: values for name, values in columns.items() if values is not None})


BROKEN = {
    "predictions of no table": (
        lambda run: (run / PREDICTIONS_FILE).write_bytes(b"not a table"),
        r"predictions\.parquet' is not readable",
    ),
    "a missing column": (lambda run: set_predictions(run, accuracy=lambda x: None), "'accuracy'"),
    "rows that are no integers": (
        lambda run: set_predictions(run, row=lambda x: x + 0.5),
        "expected whole numbers in column 'row', found float",
    ),
    "seeds that are no integers": (
        lambda run: set_predictions(run, seed=lambda x: x + 0.5),
        "expected whole numbers in column 'seed', found float",
    ),
    "accuracies above 1": (
        lambda run: set_predictions(run, accuracy=lambda x: 0 * x + 1.5), "in column 'accuracy'"
    ),
    "huge bounds": (
        lambda run: set_predictions(run, low=lambda x: 0 * x + 1e300), "in column 'low', found"
    ),
    "a target of no kind": (
        lambda run: set_record(run, target={"column": "accuracy", "kind": "grade"}),
        r"run\.json.*'target\.kind' expected one of share, number, class",
    ),
    "a log that is no text": (
        lambda run: (run / "log.jsonl").write_bytes(b"\xff\xfe"), r"log\.jsonl' is not readable"
    ),
    "a log without losses": (
        lambda run: (run / "log.jsonl").write_text('{"seed": 0, "epoch": 1}\n'), "lacks 'loss'"
    ),
    "another version": (lambda run: set_record(run, format=99), "'format' expected 1, which this"),
    "a zoo that is a number": (
        lambda run: set_record(run, zoo=3), r"'zoo' (of its record|expected)"
    ),
    **{
        f"{name} {value}": (
            lambda run, name=name, value=value: set_record(run, **{f"selection__{name}": value}),
            f"'selection.{name}' expected",
        )
        for name, value in (
            ("percent", {}), ("min_accuracy", "x"), ("train", True), ("test", [None]),
            ("augment", [1.0]),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_runs_are_named(case, tmp_path):
    change, words = BROKEN[case]
    change(write_run(tmp_path / "r", networks=60, seeds=1))
    sign_run(tmp_path / "r")
    with pytest.raises(TransformerNFNError, match=words):
        write_report([tmp_path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
