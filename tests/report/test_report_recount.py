"""Every number of the report, counted again in a browser from the page's own data.

``recount.js`` shares no code with the page: it reads the data element alone, works out each number
by its definition (Kendall's τ pair by pair), and knows each by the key that the page marks it with.
"""

import json
import math
import re
from inspect import signature
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from run_folders import write_curve, write_run, write_study
from runs_on_zoo import write_mixed, write_run_on

from transformer_nfn.io.assets import resolve
from transformer_nfn.paper.gather import gather
from transformer_nfn.prediction.runs import read_predictions
from transformer_nfn.report import write_report
from transformer_nfn.zoo import Zoo

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium (apt-get install chromium)")

RECOUNT = Path(__file__).with_name("recount.js").read_text()
# The page's values are rounded to the sixth decimal; records, from which some are quoted, are not.
ROUNDED = 2e-5
NUMBER = re.compile(r"(?<![\w.])[−-]?\d[\d,]*(?:\.\d+)?(?:e[−-]?\d+)?")
# Text with digits that nobody counted: names and records quoted, the paper's own numbers, axes.
NOT_COUNTED = "[data-quoted], .paper, svg, option, .why"
STRAY = f"""(() => {{
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {{
    const parent = walker.currentNode.parentElement;
    if (parent.closest("script, style, [data-n], {NOT_COUNTED}")) continue;
    const text = walker.currentNode.data;
    if (/[0-9]/.test(text.replace("L2", ""))) found.push(text);
  }}
  return found;
}})()"""
MARKED = """[...document.querySelectorAll("[data-n]")].map(node =>
  [node.dataset.n, node.textContent])"""
# What a chart says of each of its marks, one after the other as the arrow key reaches them.
SPOKEN = """((selector) => [...document.querySelectorAll(selector)].map((svg) => {
  const said = document.getElementById("said");
  const press = (key) => svg.dispatchEvent(new KeyboardEvent("keydown", { key }));
  const texts = [];
  let last = null;
  for (let i = 0; i < 20000; i++) {
    said.textContent = "";
    press(i ? "ArrowRight" : "Home");
    if (said.textContent === "") break;
    last = said.textContent;
    texts.push(last);
  }
  press("Escape");
  const tau = [...svg.querySelectorAll("text")].map((t) => t.textContent)
    .find((t) => t.startsWith("τ "));
  const bars = [...svg.querySelectorAll("rect.bar")]
    .map((bar) => Number(bar.getAttribute("height")));
  return { texts, tau, bars, description: svg.querySelector("desc").textContent };
}))"""


def parse(text):
    """The numbers of a text with the place of their last digit: (value, half a unit)."""
    found = []
    for match in NUMBER.findall(text):
        plain = match.replace(",", "").replace("−", "-")
        mantissa, _, exponent = plain.partition("e")
        decimals = len(mantissa.partition(".")[2])
        found.append((float(plain), 0.5 * 10 ** (int(exponent or 0) - decimals)))
    return found


def assert_says(text, expected, where, slack=ROUNDED):
    """A text holds exactly these numbers, each rounded as it is written there."""
    if isinstance(expected, str):
        assert text == expected, where
        return
    found = parse(text)
    assert len(found) == len(expected), (where, text, expected)
    for (value, half), true in zip(found, expected, strict=True):
        assert math.isfinite(true), (where, text, expected)
        # Percentages are a hundred times what is rounded.
        allowed = half + slack * (100 if "%" in text or "points" in text else 1)
        if half == 0.5 and true == round(true):
            allowed = 0.0
        assert abs(value - true) <= allowed, (where, text, expected)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def study(folder):
    write_study(folder / "runs", networks=120, seeds=3)
    return [folder / "runs"], []


def two_zoos_and_a_curve(folder):
    for kind in ("one", "each"):
        for model in ("mlp", "statnn", "random_forest"):
            write_run(folder / kind / model, model, networks=80, seeds=2, zoo_seeds=kind)
    write_curve(folder / "curve", ("mlp", "invariant_mlp"), task="ag_news")
    return [folder], []


def narrow_and_incomplete(folder):
    write_run(folder / "a", "mlp", networks=300, seeds=1, min_accuracy=0.8)
    write_run(folder / "b", "statnn", networks=300, min_accuracy=0.8, predictions=False)
    write_run(folder / "c", "xgboost", networks=300, min_accuracy=0.8, status="not enough: 3")
    return [folder], []


def variants_alone(folder):
    for i, row in enumerate(("encoder", "classifier")):
        table = {"table": "components", "row": row, "column": "mnist"}
        write_run(folder / str(i), networks=60, seeds=2, table=table)
    return [folder], []


def seeds_taken_together(folder):
    """Recorded, recorded without predictions, and of one seed."""
    same = {"networks": 120, "same_parts": True, "log": False}
    write_run(folder / "a", "mlp", **same)
    write_run(folder / "b", "statnn", predictions=False, **same)
    write_run(folder / "d", "lightgbm", seeds=1, **same)
    return [folder], []


def many_networks(folder):
    write_run(folder / "a", "mlp", networks=6800, seeds=2, log=False)
    return [folder], []


def with_its_zoo(folder):
    """Runs on a real zoo, which is given too: all of its networks are counted."""
    zoo = Zoo.open(resolve("mnist-sample", "zoo"))
    write_run_on(zoo, folder / "a", model="statnn")
    write_run_on(zoo, folder / "b", model="mlp", noise=0.2)
    return [folder], ["mnist-sample"]


def too_narrow(folder):
    """Intervals of the first model hold as they aim at, those of the others do not."""
    for model, reach in (("statnn", 3.0), ("mlp", 0.9), ("random_forest", 0.2)):
        write_run(folder / model, model, networks=200, seeds=2, reach=reach, same_parts=True)
    return [folder], []


def mixed_sizes(folder):
    return [folder / "runs"], [write_mixed(folder)]


def own_networks(folder, own):
    return [own.runs, own.others], [own.zoo.path]


def own_networks_alone(folder, own):
    return [own.runs], []


def shipped_predictors(folder):
    return ["mnist-nfn", "mnist-boosting", "ag-news-boosting"], []


@pytest.fixture(
    scope="module",
    params=[study, two_zoos_and_a_curve, narrow_and_incomplete, variants_alone,
            seeds_taken_together, many_networks, with_its_zoo, shipped_predictors, too_narrow,
            mixed_sizes, own_networks, own_networks_alone],
    ids=lambda make: make.__name__,
)  # fmt: skip
def opened(request, browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recount")
    needed = ["own"] if "own" in signature(request.param).parameters else []
    runs, zoos = request.param(folder / "r", *map(request.getfixturevalue, needed))
    write_report(runs, folder / "report.html", zoos=zoos)
    browser.open(folder / "report.html", 1400)
    assert browser.complaints() == []
    return browser, browser.value(RECOUNT), runs


def test_tables_sentences_and_captions(opened):
    browser, recounted, _ = opened
    shown = browser.value(MARKED)
    keys = [key for key, _ in shown]
    assert len(keys) == len(set(keys))
    assert set(keys) == set(recounted["numbers"])
    for key, text in shown:
        assert_says(text, recounted["numbers"][key], key)


def test_no_number_escapes_the_recount(opened):
    browser, _, _ = opened
    assert browser.value(STRAY) == []


def test_charts(opened):
    browser, recounted, _ = opened
    drawn = browser.value(
        "[...document.querySelectorAll('figure.chart')].map(f => [f.dataset.chart,"
        "Number(f.dataset.zoo)])"
    )
    assert sorted(drawn) == sorted([chart["kind"], chart["zoo"]] for chart in recounted["charts"])
    for chart in recounted["charts"]:
        kind, where = chart["kind"], f'figure.{chart["kind"]}[data-zoo="{chart["zoo"]}"]'
        found = browser.value(f"{SPOKEN}({json.dumps(f'{where} svg[role=application]')})")
        expected = chart.get("panels") or [chart]
        assert len(found) == len(expected), where
        for panel, true in zip(found, expected, strict=True):
            assert_says(panel["description"], true["described"], where)
            assert len(panel["texts"]) == len(true["marks"]), (where, true.get("name"))
            for text, mark in zip(panel["texts"], true["marks"], strict=True):
                assert text.startswith(f"{mark['title']}: "), (where, text, mark)
                rest = text.removeprefix(f"{mark['title']}: ")
                assert_says(rest, mark["numbers"], where)
            if kind == "scatter":
                assert_says(panel["tau"], [true["tau"]], where)
            if kind == "histogram":
                heights = [height / max(panel["bars"]) for height in panel["bars"]]
                counts = [count / max(true["bars"]) for count in true["bars"]]
                assert heights == pytest.approx(counts, abs=1e-6), "a linear scale from the start"


def test_the_data_is_that_of_the_run_folders(opened):
    """What the page carries, against the files it was made from."""
    browser, _, runs = opened
    data = browser.value("JSON.parse(document.getElementById('data').textContent)")
    read = gather([resolve(folder, "predictor") for folder in runs])
    assert [zoo["label"] for zoo in data["zoos"]] == [zoo.label for zoo in read.zoos]
    for zoo, true in zip(data["zoos"], read.zoos, strict=True):
        assert [model["name"] for model in zoo["models"]] == [run.name for run in true.finished]
        for model, run in zip(zoo["models"], true.finished, strict=True):
            if not len(run.predictions["row"]):
                continue
            columns = read_predictions(run.folder)
            for seed in model["seeds"]:
                mine = (columns["split"] == "test") & (columns["seed"] == seed["seed"])
                places = zoo["parts"][seed["part"]]
                names = [zoo["networks"]["name"][n] for n in places]
                # A run where runs on two packings of a zoo count its rows differently.
                pairs = zip(names, columns["row"][mine].tolist(), strict=True)
                assert all(name.startswith("run ") or name.endswith(f"#{row}")
                           for name, row in pairs)
                for key in ("predicted", "low", "high"):
                    assert seed[key] == pytest.approx(columns[key][mine].tolist(), abs=1e-6)
                accuracy = [zoo["networks"]["accuracy"][n] for n in places]
                assert accuracy == pytest.approx(columns["accuracy"][mine].tolist(), abs=1e-6)


def test_a_chosen_seed_is_that_seed(browser, tmp_path):
    write_run(tmp_path / "r" / "a", "mlp", networks=80, seeds=3)
    write_run(tmp_path / "r" / "b", "statnn", networks=80, seeds=3)
    write_report([tmp_path / "r"], tmp_path / "report.html")
    browser.open(tmp_path / "report.html", 1400)
    (zoo,) = browser.value("JSON.parse(document.getElementById('data').textContent)")["zoos"]
    browser.value(
        "(s => { s.value = '2'; s.dispatchEvent(new Event('change')) })"
        "(document.querySelector('.scatter select'))"
    )
    panels = browser.value(f"{SPOKEN}('.scatter svg[role=application]')")
    for panel, model in zip(panels, zoo["models"], strict=True):
        (seed,) = (seed for seed in model["seeds"] if seed["seed"] == 2)
        assert_says(panel["tau"], [seed["tau"]], "τ of the seed")
        said = dict(zip(zoo["parts"][seed["part"]], seed["predicted"], strict=True))
        order = sorted(said, key=lambda n: zoo["networks"]["accuracy"][n])
        assert len(panel["texts"]) == len(order)
        for text, n in zip(panel["texts"], order, strict=True):
            predicted = re.search(r"Predicted, seed 2 (\S+ %)", text)[1]
            assert_says(predicted, [100 * said[n]], text)


def test_the_recount_sees_a_wrong_number(browser, tmp_path):
    """A page whose table says something else than its data does not pass."""
    write_run(tmp_path / "r" / "a", "mlp", networks=80, seeds=2)
    write_run(tmp_path / "r" / "b", "statnn", networks=80, seeds=2)
    write_report([tmp_path / "r"], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    wrong = re.sub(
        r'(data-n="z0\.m0\.mae">0\.\d\d)(\d)', lambda m: m[1] + str((int(m[2]) + 1) % 10), text
    )
    (tmp_path / "wrong.html").write_text(wrong.replace("Trees have no", "7 trees have no"))
    browser.open(tmp_path / "wrong.html", 1400)
    recounted = browser.value(RECOUNT)["numbers"]
    shown = dict(browser.value(MARKED))
    with pytest.raises(AssertionError):
        assert_says(shown["z0.m0.mae"], recounted["z0.m0.mae"], "wrong")
    assert_says(shown["z0.m1.mae"], recounted["z0.m1.mae"], "right")
    assert len(browser.value(STRAY)) == 1
