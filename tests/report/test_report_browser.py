"""The report in a real browser: drawn, quiet, alone, and as wide as the screen."""

import shutil

import pytest
from browser import CHROMIUM, Browser
from run_folders import write_run, write_study
from runs_on_zoo import write_mixed
from store_damage import sign_run

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


def test_every_figure_is_drawn(browser, page):
    browser.open(page, 1400)
    drawn = browser.value(
        "[...document.querySelectorAll('figure.chart')].map(f => [f.dataset.chart,"
        "f.dataset.zoo, f.querySelectorAll('.canvas > svg, .panel').length,"
        "f.querySelectorAll('.point, .bar, .mean, .line').length])"
    )
    kinds = {kind for kind, *_ in drawn}
    assert kinds == {"taus", "calibration", "scatter", "histogram", "sizes", "curve-val_tau",
                     "curve-loss"}  # fmt: skip
    for kind, zoo, charts, marks in drawn:
        assert charts >= 1, (kind, zoo)
        assert marks >= 4, (kind, zoo)
    panels, points, tested = browser.value(
        "[document.querySelectorAll('[data-zoo=\"0\"] .panel').length,"
        "document.querySelectorAll('[data-zoo=\"0\"] .point').length,"
        "scatterPanels(zoos[0], null, 1e9).reduce((n, panel) => n + panel.total, 0)]"
    )
    assert (panels, points) == (8, tested)
    # No mark lies outside its chart, none without a number.
    assert not browser.value(
        "[...document.querySelectorAll('svg *')].some(node =>"
        "[...node.attributes].some(a => /NaN|undefined|Infinity/.test(a.value)))"
    )
    assert browser.value(
        "[...document.querySelectorAll('svg[role=application]')].every(svg =>"
        "svg.querySelector('title').textContent && svg.querySelector('desc').textContent)"
    )


# Marks of each figure: a point counts if its middle is painted, whatever its shape.
PAINTED = """[...document.querySelectorAll("figure.chart")].map(figure => {
  const count = (css) => figure.querySelectorAll(css).length;
  const points = [...figure.querySelectorAll("path.point")].filter(node => {
    const box = node.getBBox();
    const middle = new DOMPoint(box.x + box.width / 2, box.y + box.height / 2);
    return node.isPointInFill(middle) && getComputedStyle(node).fill !== "none";
  });
  return [figure.dataset.chart, Number(figure.dataset.zoo), { points: points.length,
    means: count("circle.mean"), seeds: count("circle.seed"), bars: count("rect.bar"),
    lines: count("polyline"), dots: count("circle.dot"),
    legend: [...figure.querySelectorAll(".key button")].map(b => b.textContent) }];
})"""


def expected_marks(kind, zoo):
    """What a figure must show, from the data of the page."""
    models, tested = zoo["models"], [seed for m in zoo["models"] for seed in m["seeds"]]
    with_part = [[s for s in m["seeds"] if "part" in s] for m in models]
    held = sum(any(s["low"][0] is not None for s in seeds) for seeds in with_part)
    places = [{n for s in seeds for n in zoo["parts"][s["part"]]} for seeds in with_part]
    optimizer = zoo["networks"]["settings"].get("optimizer", [])
    sizes = [line["points"] for line in zoo["sizes"]]
    curves = [line["seeds"] for line in zoo["curves"]]
    found = {
        "taus": {"means": len(models), "seeds": len(tested)},
        "calibration": {"means": held, "seeds": sum(map(len, with_part))},
        "scatter": {
            "points": sum(map(len, places)),
            "legend": {optimizer[n] for n in set().union(*places)} if optimizer else set(),
        },
        "histogram": {"bars": sum(count > 0 for count in zoo["histogram"]["counts"])},
        "sizes": {"lines": len(sizes), "dots": sum(map(len, sizes))},
    }
    lines = sum(len(seeds) + 1 if len(seeds) > 1 else 1 for seeds in curves)
    found["curve-val_tau"] = {"lines": lines, "dots": sum(map(len, curves))}
    found["curve-loss"] = {"lines": lines, "dots": 0}
    return found[kind]


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
    data = browser.value("JSON.parse(document.getElementById('data').textContent)")
    figures = browser.value(PAINTED)
    assert {"taus", "calibration", "scatter", "histogram"} <= {kind for kind, *_ in figures}
    for kind, zoo, marks in figures:
        for name, number in expected_marks(kind, data["zoos"][zoo]).items():
            found = set(marks[name]) if name == "legend" else marks[name]
            assert found == number, (kind, zoo, name)
            assert name in ("legend", "dots") or number > 0, (kind, zoo, name)


def test_networks_are_reached_by_keyboard_and_by_pointer(browser, page):
    browser.open(page, 1400)
    browser.value("document.documentElement.style.scrollBehavior = 'auto'")
    browser.value("document.querySelector('.panel').scrollIntoView({block: 'center'})")
    browser.settle()
    browser.value("document.querySelector('.panel').focus()")
    browser.press("ArrowRight")
    told = browser.value("document.getElementById('said').textContent")
    shown = "[document.getElementById('tip').hidden, document.getElementById('tip').innerText]"
    assert not browser.value(shown)[0]
    for word in ("True accuracy", "Predicted", "Interval", "Optimiser", "Learning rate", "L2",
                 "Init std", "Dropout", "Train fraction"):  # fmt: skip
        assert word in told
        assert word in browser.value(shown)[1]
    browser.press("ArrowRight")
    assert browser.value("document.getElementById('said').textContent") != told
    browser.press("Escape")
    assert browser.value(shown)[0]
    x, y = browser.value(
        "(() => { const b = document.querySelector('.point').getBoundingClientRect();"
        "return [b.x + b.width / 2, b.y + b.height / 2] })()"
    )
    browser.move(x, y)
    assert not browser.value(shown)[0]
    assert browser.complaints() == []


def test_controls_work_and_a_turned_phone_is_drawn_again(browser, page):
    browser.open(page, 380)
    browser.value("document.querySelectorAll('.scatter .bar-of-controls button')[2].click()")
    browser.value("document.querySelector('.histogram button').click()")
    browser.value("document.querySelectorAll('.sizes .key button')[0].click()")
    browser.value(
        "(s => { s.value = '1'; s.dispatchEvent(new Event('change')) })"
        "(document.querySelector('.chooser select'))"
    )
    browser.settle()
    assert browser.value("document.querySelectorAll('[data-zoo=\"0\"] .panel').length") == 1
    assert browser.value("document.querySelectorAll('.sizes g.dim').length") == 7
    assert browser.value("[...document.querySelectorAll('.choice')].findIndex(c => !c.hidden)") == 1
    before = browser.value("document.querySelector('.panel').viewBox.baseVal.width")
    browser.resize(800, 380)
    browser.settle()
    assert browser.value("document.querySelector('.panel').viewBox.baseVal.width") > before
    assert browser.value(OVERFLOW) <= 0
    assert browser.complaints() == []


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
