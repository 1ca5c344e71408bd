"""The report in a real browser: drawn, quiet, alone, and as wide as the screen."""

import shutil
from importlib import resources
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from run_folders import write_run, write_study
from runs_on_zoo import write_mixed
from store_damage import sign_run

from transformer_nfn.paper.gather import gather
from transformer_nfn.prediction.runs import read_predictions, write_predictions
from transformer_nfn.report import write_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium (apt-get install chromium)")
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    write_study(folder / "runs", networks=120, seeds=2)
    write_report([folder / "runs"], folder / "report.html")
    return folder / "report.html"


@pytest.mark.parametrize(
    ("width", "dark"),
    [(380, False), pytest.param(380, True, marks=pytest.mark.nightly), (1400, True),
     pytest.param(1400, False, marks=pytest.mark.nightly)],
)  # fmt: skip
def test_quiet_alone_and_no_wider_than_the_screen(browser, page, width, dark):
    browser.open(page, width, dark=dark)
    assert browser.complaints() == []
    assert browser.requests() == [page.resolve().as_uri()]
    assert browser.value(OVERFLOW) <= 0
    browser.value("document.querySelectorAll('details').forEach(d => { d.open = true })")
    browser.settle()
    assert browser.value(OVERFLOW) <= 0
    ink, ground = browser.value(
        "['color', 'backgroundColor'].map(p => getComputedStyle(document.body)[p])"
        ".map(c => c.match(/[0-9]+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0))"
    )
    assert (ink > ground) == dark


# Marks of each figure: one counts if something of it is painted, and a pointer finds its title.
PAINTED = """[...document.querySelectorAll("figure.chart")].map(figure => {
  const marks = [...figure.querySelectorAll("svg :has(> title)")].filter(mark => mark.getBBox);
  const seen = marks.filter(mark => mark.tagName !== "svg").filter(node => {
    const box = node.getBBox();
    const middle = new DOMPoint(box.x + box.width / 2, box.y + box.height / 2);
    return node.isPointInFill(middle) && getComputedStyle(node).fill !== "none"
      && node.querySelector("title").textContent.includes(": ");
  });
  const count = (css) => figure.querySelectorAll(css).length;
  return [figure.dataset.chart, Number(figure.dataset.zoo), { marks: seen.length,
    panels: count("svg.plot"), seeds: count("circle.seed"), lines: count("polyline"),
    key: [...figure.querySelectorAll(".key > span")].map(n => n.textContent.slice(2)) }];
})"""


def expected_marks(kind, zoo):
    """What a figure must show, from the runs of a zoo."""
    models = [run for run in zoo.finished if len(run.part("test")["row"])]
    tests = [run.part("test") for run in models]
    names = [
        set(zip(*(part[key].tolist() for key in ("run", "accuracy") if key in part), strict=True))
        if not run.own
        else set(part["row"].tolist())
        for run, part in zip(models, tests, strict=True)
    ]
    optimizers = {name for part in tests for name in part["optimizer"].tolist()} - {None, ""}
    sizes = [len(records) for records in zoo.by_size().values()]
    logs = [{entry["seed"] for entry in run.log} for run in zoo.finished if run.log]
    epochs = sum(len({entry["epoch"] for entry in run.log}) for run in zoo.finished)
    lines = sum(len(found) + 1 if len(found) > 1 else 1 for found in logs)
    return {
        "taus": {"marks": len(zoo.finished),
                 "seeds": sum(len(run.record.seeds) for run in zoo.finished)},
        "scatter": {"marks": sum(map(len, names)), "panels": len(models), "key": optimizers},
        "histogram": {"panels": 1},
        "sizes": {"lines": len(sizes), "marks": sum(sizes)},
        "curve-val_tau": {"lines": lines, "marks": epochs + sum(map(len, logs))},
        "curve-loss": {"lines": lines, "marks": epochs},
    }[kind]  # fmt: skip


def study_page(folder, own):
    write_study(folder, networks=120, seeds=2)
    return [folder], []


def one_seed_page(folder, own):
    for model in ("mlp", "xgboost"):
        write_run(folder / model, model, networks=60, seeds=1)
    return [folder], []


def own_page(folder, own):
    return [own.runs], [own.zoo.path]


def own_page_without_optimisers(folder, own):
    shutil.copytree(own.runs, folder)
    for path in folder.iterdir():
        columns = read_predictions(path)
        del columns["optimizer"]
        write_predictions(path, columns)
        sign_run(path)
    return [folder], []


def mixed_page(folder, own):
    return [folder / "runs"], [write_mixed(folder)]


@pytest.mark.parametrize(
    "make",
    [study_page, one_seed_page, own_page, own_page_without_optimisers, mixed_page],
    ids=lambda make: make.__name__,
)
def test_every_figure_shows_every_network_model_and_seed(browser, tmp_path, own, make):
    runs, zoos = make(tmp_path / "r", own)
    write_report(runs, tmp_path / "report.html", zoos=zoos)
    browser.open(tmp_path / "report.html", 1400)
    assert browser.complaints() == []
    figures, read = browser.value(PAINTED), gather([Path(folder) for folder in runs]).zoos
    assert {"taus", "scatter", "histogram"} <= {kind for kind, *_ in figures}
    for kind, zoo, marks in figures:
        for name, number in expected_marks(kind, read[zoo]).items():
            found = set(marks[name]) if name == "key" else marks[name]
            assert found == number, (kind, zoo, name)
            assert name == "key" or number > 0, (kind, zoo, name)
    # No mark lies outside its plot, none has no number.
    assert not browser.value(
        "[...document.querySelectorAll('svg *')].some(node =>"
        "[...node.attributes].some(a => /NaN|nan|None|inf/.test(a.value)))"
    )


def test_a_pointer_finds_the_title_of_a_network(browser, page):
    browser.open(page, 1400)
    browser.value("document.documentElement.style.scrollBehavior = 'auto'")
    browser.value("document.querySelector('.scatter').scrollIntoView({block: 'center'})")
    browser.settle()
    told = browser.value(
        "(() => { const b = document.querySelector('.point').getBoundingClientRect();"
        "const at = document.elementFromPoint(b.x + b.width / 2, b.y + b.height / 2);"
        "return at.querySelector('title').textContent })()"
    )
    for word in ("true", "predicted", "interval", "run", "optimiser", "learning rate", "L2",
                 "init std", "dropout", "train fraction"):  # fmt: skip
        assert f" {word} " in told


def test_tables_are_sorted_filtered_and_chosen(browser, page):
    browser.open(page, 1400)
    column = (
        "[...document.querySelector('table.sorts').tBodies[0].rows]"
        ".map(r => parseFloat(r.cells[1].textContent)).filter(v => !isNaN(v))"
    )
    heading = "document.querySelector('table.sorts').tHead.rows[0].cells[1]"
    for _ in range(2):
        browser.value(f"{heading}.click()")
        order, values = browser.value(f"{heading}.getAttribute('aria-sort')"), browser.value(column)
        assert len(values) == 8
        assert values == sorted(values, reverse=order == "descending")
    assert order == "ascending"
    browser.value("document.querySelectorAll('details').forEach(d => { d.open = true })")
    shown = (
        "[...document.querySelectorAll('table.filters tbody tr')].filter(r => r.offsetHeight)"
        ".map(r => r.textContent)"
    )
    every = browser.value(shown)
    browser.value(
        "(i => { i.value = 'xgboost'; i.dispatchEvent(new Event('input')) })"
        "(document.querySelector('.filter input'))"
    )
    assert browser.value(shown) == [row for row in every if "XGBoost" in row] != every
    browser.value(
        "(s => { s.value = '1'; s.dispatchEvent(new Event('change')) })"
        "(document.querySelector('.chooser select'))"
    )
    assert browser.value("[...document.querySelectorAll('.choice')].findIndex(c => !c.hidden)") == 1
    assert browser.complaints() == []


def test_scripts_are_short():
    folder = resources.files("transformer_nfn.report")
    scripts = [each for each in folder.iterdir() if each.name.endswith(".js")]
    assert 0 < sum(len(each.read_bytes()) for each in scripts) <= 8 * 1024


def test_odd_runs_are_drawn_too(browser, tmp_path):
    bad = '</script><img src=x onerror="throw 1">&'
    write_run(tmp_path / "a", bad, networks=60, seeds=1, name=bad * 4)
    write_run(tmp_path / "b", "mlp", networks=60, name=bad * 4, predictions=False)
    write_run(tmp_path / "c", "statnn", networks=60, name=bad * 4, status=f"not enough: {bad}")
    write_report([tmp_path], tmp_path / "report.html")
    browser.open(tmp_path / "report.html", 380)
    assert browser.complaints() == []
    assert len(browser.requests()) == 1
    assert browser.value(OVERFLOW) <= 0
    assert browser.value("document.querySelectorAll('img').length") == 0


def test_the_watch_sees_what_it_is_for(browser, tmp_path):
    page = tmp_path / "bad.html"
    page.write_text(
        '<img src="http://example.invalid/x.png"><div style="width:999px">wide</div>'
        "<script>console.error('one'); undefinedName()</script>"
    )
    browser.open(page, 380)
    assert len(browser.complaints()) >= 2
    assert "http://example.invalid/x.png" in browser.requests()
    assert browser.value(OVERFLOW) > 0
