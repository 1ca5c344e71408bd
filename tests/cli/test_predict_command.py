"""`tnfn predict` reads everything that is named, or says what it leaves out."""

import io
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random
from unittest import mock

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from tnfn_command import as_json, assert_refused, printed, tnfn
from transformer_nfn.cli.experiment_progress import networks_bar
from transformer_nfn.cli.network_tables import predictions_table, rows_table
from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.io.assets import CHECKOUT
from transformer_nfn.models import Batch
from transformer_nfn.models.predictor import Predictor
from transformer_nfn.networks import resolve_networks
from transformer_nfn.prediction.evaluate import evaluate
from transformer_nfn.prediction.guard import GUARD_FILE
from transformer_nfn.prediction.predict import load_network, predict
from transformer_nfn.prediction.runs import RunRecord
from transformer_nfn.zoo import BuildOptions, NetworkSizes, Zoo, build_mixed, size_groups
from transformer_nfn.zoo.export import export_zoo
from transformer_nfn.zoo.module import to_state_dict

RUN, ROW = "mnist-boosting", 3


@pytest.fixture(scope="module")
def zoo() -> Zoo:
    return Zoo.open("mnist-sample")


@pytest.fixture
def state(zoo: Zoo) -> dict[str, Tensor]:
    """One network under the authors' names, in float32; every test has its own."""
    named = {name: w[0].float() for name, w in zoo.weights([ROW]).items()}
    return to_state_dict(zoo.sizes, named)


def best_row(zoo: Zoo) -> int:
    return int(zoo.table["test_accuracy"].argmax())


def shuffled(zoo: Zoo, row: int) -> dict[str, Tensor]:
    """A network with the entries of every tensor but the positions in another order."""
    draw = torch.Generator().manual_seed(0)
    named = {name: w[0].float() for name, w in zoo.weights([row]).items()}
    state = to_state_dict(zoo.sizes, named)
    for name, w in state.items():
        if "pos" not in name:
            state[name] = w.flatten()[torch.randperm(w.numel(), generator=draw)].view_as(w)
    return state


def predicted(*words: object) -> list[dict[str, object]]:
    found: list[dict[str, object]] = as_json("predict", RUN, *words)
    return found


def test_rows_ranges_and_whole_zoos_are_named(zoo: Zoo) -> None:
    found = predicted("mnist-sample#3-5", "mnist-sample#0,9,11-12")
    assert [p["name"] for p in found] == [f"mnist-sample#{i}" for i in (3, 4, 5, 0, 9, 11, 12)]
    whole = predicted("mnist-sample")
    assert len(whole) == len(zoo)
    assert [p["value"] for p in whole[3:6]] == pytest.approx([p["value"] for p in found[:3]])
    config = zoo.config(4)
    recorded = found[1]["recorded"]
    assert isinstance(recorded, dict)
    assert recorded["test_accuracy"] == config["test_accuracy"]
    for key in ("run", "optimizer", "learning_rate", "l2", "init_std", "dropout"):
        assert recorded[key] == config[key]


def test_patterns_name_files_and_rows_that_are_none_are_one_sentence(
    state: dict[str, Tensor], tmp_path: Path
) -> None:
    for name in ("b", "a"):
        torch.save(state, tmp_path / f"{name}.pt")
    found = predicted(tmp_path / "*.pt")
    assert [p["name"] for p in found] == [str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]
    assert found[0]["recorded"] is None
    for text, words in (
        (tmp_path / "*.safetensors", "no file or folder matches"),
        ("mnist-sample#9-3", "rows count upwards, as in mnist-sample#3-9"),
        ("mnist-sample#3-", "a row is a whole number, as in mnist-sample#12, or a range"),
        ("mnist-sample#150-160", "the zoo has 160 rows, counted from 0"),
        ("mnist-sample#" + "9" * 5000, "a row is a whole number"),
    ):
        assert_refused(words, "predict", RUN, text)


def test_predictions_are_readable_on_a_terminal_of_80_columns(
    state: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / f"{'long-name-' * 12}.pt"
    torch.save(state, long)
    found = predict(RUN, ["mnist-sample#0-9", long])
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(predictions_table(found, console))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == [
        "network", "recorded", "predicted", "interval", "coverage", "novelty"
    ]  # fmt: skip
    for line, p in zip(lines[2:12], found, strict=False):
        assert p.recorded is not None
        shown = (p.name, f"{p.recorded['test_accuracy']:.3f}", f"{p.value:.3f}")
        assert line.split()[:3] == list(shown)
        assert f"{p.low:.3f} to {p.high:.3f}" in line
    assert "".join(line.split()[0] for line in lines[12:]) == str(long)


def test_the_best_checkpoint_of_a_run_has_no_percentage() -> None:
    row = {"name": "zoo#3", "run": "7", "epoch": 8, "percent": 0, "best": True}
    console = Console(width=120, file=io.StringIO())
    console.print(rows_table([{**row, "test_accuracy": 0.5}], "zoo", console))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "best, epoch 8" in text
    assert "%" not in text


def test_one_seed_has_no_spread() -> None:
    """0.000 would claim that seeds agree."""
    assert predicted("mnist-sample#0")[0]["spread"] is None
    (row,) = [line for line in tnfn("predict", RUN, "mnist-sample#0").stdout.splitlines()
              if "mnist-sample#0" in line]  # fmt: skip
    assert row.split("│")[-3].strip() == "–"


def test_the_interval_of_a_warned_prediction_claims_no_coverage(zoo: Zoo, tmp_path: Path) -> None:
    """Here of a network with shuffled entries."""
    torch.save(shuffled(zoo, best_row(zoo)), tmp_path / "broken.pt")
    found = predicted("mnist-sample#0-9", tmp_path / "broken.pt")
    warned = [p for p in found if p["warning"] is not None]
    assert 0 < len(warned) < len(found)
    for p in found:
        assert p["coverage"] == (0.9 if p["warning"] is None else None)
    assert "has no known coverage" in str(warned[0]["warning"])
    code, out, err = tnfn("predict", RUN, warned[0]["name"])
    assert code == 0
    assert "unknown" in out
    assert "90 %" not in out + err
    assert "90 %" in printed("predict", RUN, "mnist-sample#3")


def test_where_no_guard_stands_behind_a_prediction_it_is_said(tmp_path: Path) -> None:
    shown = "note: 2 of 2 predictions have no guard: a damaged network may pass for a good"
    source = CHECKOUT / "ag-news-boosting"
    shutil.copytree(source, tmp_path / "run", ignore=shutil.ignore_patterns(GUARD_FILE))
    RunRecord.read(source).write(tmp_path / "run")
    code, _, err = tnfn("predict", tmp_path / "run", "ag-news-sample#0-1")
    assert code == 0
    assert [line for line in err.splitlines() if line.startswith(shown)]
    code, _, err = tnfn("predict", RUN, "mnist-sample#3")
    assert code == 0
    assert "no guard" not in err
    assert predicted("mnist-sample#3")[0]["guarded"] is True


def test_a_shuffled_network_has_the_accuracy_of_its_answers_and_is_explained(
    zoo: Zoo, tmp_path: Path
) -> None:
    """Weights that look like training, and no function: accuracy 0.097 where it was measured."""
    best = best_row(zoo)
    torch.save(shuffled(zoo, best), tmp_path / "net.pt")
    (found,) = predicted(tmp_path / "net.pt")
    assert found["by_weights"] > 0.5
    assert found["value"] < 0.2
    assert found["low"] <= 0.1 <= found["high"]
    code, _, err = tnfn("predict", RUN, tmp_path / "net.pt")
    assert code == 0
    assert f"note: {tmp_path / 'net.pt'}: by its weights alone it would have " in err
    (healthy,) = predicted(f"mnist-sample#{best}")
    assert healthy["by_weights"] == healthy["value"] > 0.9
    assert "by its weights" not in tnfn("predict", RUN, f"mnist-sample#{best}")[2]


def test_what_is_left_out_is_said(state: dict[str, Tensor], tmp_path: Path) -> None:
    for extra in (
        {"encoder.1.norm.weight": torch.full((32,), 2.0), "encoder.1.norm.bias": torch.ones(32)},
        {"steps": torch.tensor(7), "unused": torch.full((3,), float("nan"))},
        {"mask": torch.ones(49, 49) > 0, "phase": torch.ones(4, dtype=torch.complex64)},
    ):
        torch.save({**state, **extra}, tmp_path / "net.pt")
        (found,) = predicted(tmp_path / "net.pt")
        assert found["left_out"] == list(extra)
        code, _, err = tnfn("predict", RUN, tmp_path / "net.pt")
        assert (code, len(err.splitlines())) == (0, 1)
        assert "left out" in err
        assert all(f"'{name}'" in err for name in extra)


def test_what_the_zoo_has_leaves_nothing_out(
    zoo: Zoo, state: dict[str, Tensor], tmp_path: Path
) -> None:
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        torch.save({name: w.to(dtype) for name, w in state.items()}, tmp_path / "net.pt")
        (found,) = predicted(tmp_path / "net.pt")
        assert found["left_out"] == []
        (row,) = predicted(f"mnist-sample#{ROW}")
        assert found["value"] == pytest.approx(row["value"], abs=0.02)


def _three_blocks(zoo: Zoo) -> dict[str, Tensor]:
    sizes = NetworkSizes(**{**zoo.sizes.to_json(), "blocks": 3})
    return to_state_dict(sizes, {name: torch.randn(s) for name, s in sizes.space.shapes.items()})


def test_another_network_is_refused_in_one_sentence(
    zoo: Zoo, state: dict[str, Tensor], tmp_path: Path
) -> None:
    fc1, bias = state["encoder.0.fc1.weight"], state["encoder.1.fc2.bias"]
    for change, words in (
        (_three_blocks(zoo), "expected 2 blocks, found 3"),
        (
            {"encoder.2.fc1.weight": torch.ones(64, 32)},
            "'encoder.2.fc1.weight' is of a block that a network of 2 blocks does not have",
        ),
        (
            {"embedding.pos_embedding": torch.zeros(49, 32)},
            "'embedding.pos_embedding' is not the fixed sinusoidal table",
        ),
        (
            {"embedding.pos_embedding": torch.zeros(50, 32)},
            "'embedding.pos_embedding' expected shape [49, 32], found [50, 32]",
        ),
        (
            {"encoder.0.fc1.weight": fc1.long()},
            "'encoder.0.fc1.weight' holds int64, weights are float64, float32",
        ),
        ({"encoder.0.fc1.weight": fc1 > 0}, "'encoder.0.fc1.weight' holds bool"),
        (
            {"encoder.1.fc2.bias": bias.double() * 1e300},
            "'blocks.1.b_B' holds values that are not finite in float32",
        ),
    ):
        torch.save({**state, **change}, tmp_path / "net.pt")
        assert_refused(words, "predict", RUN, tmp_path / "net.pt")
    assert_refused(words, "predict", RUN, tmp_path / "net.pt", "--json")


def test_predict_takes_names_strings_and_zoos(zoo: Zoo) -> None:
    (one,) = predict(RUN, f"mnist-sample#{ROW}")
    assert predict(RUN, [f"mnist-sample#{ROW}"]) == [one]
    assert predict(RUN, zoo)[ROW].value == one.value


@pytest.mark.nightly
def test_batches_are_reported_and_change_nothing() -> None:
    reported: list[tuple[int, int]] = []
    in_batches = predict(
        RUN, "mnist-sample#0-6", batch=3, report=lambda *counts: reported.append(counts)
    )
    assert in_batches == predict(RUN, "mnist-sample#0-6")
    assert reported == [(3, 7), (6, 7), (7, 7)]
    figures = evaluate(RUN, "mnist-sample", batch=50)
    assert figures == evaluate(RUN, "mnist-sample")


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_device_and_batch_are_checked(command: str) -> None:
    networks = (command, RUN, "mnist-sample")
    assert_refused("--device must be auto, cpu or cuda, found 'tpu'", *networks, "--device", "tpu")
    assert tnfn(*networks, "--batch", 0)[0] == 2
    if not torch.cuda.is_available():
        assert_refused("there is no CUDA device here", *networks, "--device", "cuda")


def test_progress_is_shown_on_a_terminal_only(capsys: pytest.CaptureFixture[str]) -> None:
    with networks_bar("predict") as report:
        report(1, 2)
    assert capsys.readouterr().err == ""
    with mock.patch.dict("os.environ", {"FORCE_COLOR": "1"}), networks_bar("predict") as report:
        report(1, 2)
    shown = capsys.readouterr()
    assert "1/2 networks" in shown.err
    assert shown.out == ""
    with (
        mock.patch.dict("os.environ", {"FORCE_COLOR": "1"}),
        networks_bar("predict", quiet=True) as report,
    ):
        report(1, 2)
    assert capsys.readouterr().err == ""


def test_the_record_of_a_run_is_valid_json_too() -> None:
    assert as_json("evaluate", RUN)["summary"]["tau_se"] is None


def test_rows_of_a_zoo_are_listed_with_filters(zoo: Zoo) -> None:
    words = ("zoo", "rows", "mnist-sample", "--optimizer", "adam", "--min-accuracy", 0.93)
    found = as_json(*words)
    expected = zoo.select(optimizer="adam", min_accuracy=0.93).tolist()
    assert [row["row"] for row in found] == expected
    assert found[0]["name"] == f"mnist-sample#{expected[0]}"
    assert found[0]["run"] == zoo.config(expected[0])["run"]
    out = printed(*words)
    assert f"10 of {len(zoo)} rows" in out
    assert all(row["name"] in out for row in found)
    one = as_json("zoo", "rows", "mnist-sample", "--run", found[0]["run"])
    assert [row["run"] for row in one] == [found[0]["run"]]
    for filters, words in (
        (("--percent", 50), "no rows of percent '50': it has 75"),
        (("--optimizer", "adm"), "no rows of optimizer 'adm': it has adam, rmsprop, sgd, sgdm"),
        (("--run", "00084", "--run", "x"), "no rows of run 'x': it has 00084, "),
        (("--min-accuracy", "nan"), "--min-accuracy must lie between 0 and 1, found nan"),
    ):
        assert_refused(words, "zoo", "rows", "mnist-sample", *filters)


def test_networks_of_other_sizes_are_listed_and_refused_in_a_sentence(tmp_path: Path) -> None:
    options = BuildOptions("digits", runs=4, epochs=1, samples=32, batch=16, workers=1)
    mixed = build_mixed(tmp_path / "mixed", options, size_groups([16, 32], [4], [1]))
    listed = as_json("zoo", "rows", mixed.path)
    assert len(listed) == len(mixed)
    assert listed[0]["name"] == f"{mixed.path}/w16-h4-d1#0"
    words = "w16-h4-d1#0' is of another architecture: expected 2 blocks, found 1"
    assert_refused(words, "predict", RUN, mixed.path)
    assert [n.name for n in resolve_networks([mixed.path])] == [row["name"] for row in listed]
    zoo = mixed.parts["w32-h4-d1"]
    export_zoo(zoo, tmp_path / "out")
    file = next((tmp_path / "out" / "digits").iterdir())
    (network,) = resolve_networks([file])
    found = load_network(network, zoo.sizes, [Predictor()])
    assert (found.sizes, found.left_out) == (zoo.sizes, ())


FEW = (1e6, 1e12, math.nan)
MANY = (1.0, 1e3, 1e6, 1e8, 1e12, 1e16, 1e19, 1e25, 1e38, math.inf, math.nan)


@pytest.mark.parametrize(
    ("run", "guarded", "scales"),
    [
        ("mnist-boosting", True, FEW),
        ("ag-news-boosting", False, FEW),
        *(
            pytest.param(run, guarded, MANY, marks=pytest.mark.nightly)
            for run in ("mnist-boosting", "ag-news-boosting", "mnist-nfn", "mnist-whole")
            for guarded in (True, False)
        ),
    ],
)
def test_no_scale_of_weights_gives_numbers_that_are_not_finite(
    run: str, guarded: bool, scales: tuple[float, ...], tmp_path: Path
) -> None:
    """All tensors, or one: either a finite prediction in its interval, or a refusal by name."""
    source = CHECKOUT / run
    if not guarded:
        shutil.copytree(source, tmp_path / "run", ignore=shutil.ignore_patterns(GUARD_FILE))
        RunRecord.read(source).write(tmp_path / "run")
        source = tmp_path / "run"
    zoo = Zoo.open("ag-news-sample" if run.startswith("ag") else "mnist-sample")
    named = {name: w[0].float() for name, w in zoo.weights([ROW]).items()}
    chance, refused = Random(run), 0
    for scale in scales:
        for chosen in (set(named), {chance.choice([*named])}):
            scaled = {name: w * scale if name in chosen else w for name, w in named.items()}
            save_file(scaled, path := tmp_path / "net.safetensors")
            done = tnfn("predict", source, path, "--json")
            if done.returncode:
                assert done.returncode == 2
                assert f"'{path}'" in json.loads(done.stdout)["error"]
                refused += 1
                continue
            (found,) = json.loads(done.stdout)
            numbers = [found[key] for key in ("low", "value", "high", "novelty", "by_weights")]
            assert all(isinstance(x, float) and math.isfinite(x) for x in numbers), (scale, numbers)
            assert numbers[:3] == sorted(numbers[:3])
    assert len(scales) < refused < 2 * len(scales)


def test_a_network_of_huge_weights_is_refused_by_name_and_tensor(
    state: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = {name: w.double() * 1e12 if "pos" not in name else w for name, w in state.items()}
    torch.save(huge, tmp_path / "net.pt")
    assert_refused(
        "holds values beyond 1e+06, with which the network overflows single precision",
        "predict", RUN, tmp_path / "net.pt",
    )  # fmt: skip
    with pytest.raises(TransformerNFNError, match=r"net\.pt': .* beyond 1e\+06"):
        predict(RUN, tmp_path / "net.pt")
    batch = Zoo.batch

    def with_a_huge_one(zoo: Zoo, rows: Sequence[int]) -> Batch:
        found = batch(zoo, rows)
        found.views["blocks.0.W_A"][ROW] *= 1e19
        return found

    monkeypatch.setattr(Zoo, "batch", with_a_huge_one)
    sentence = f"mnist-sample#{ROW}': 'blocks.0.W_A' holds values beyond 1e+06"
    assert_refused(sentence, "evaluate", RUN, "mnist-sample")
    assert_refused(sentence, "predict", RUN, "mnist-sample", "--json")
