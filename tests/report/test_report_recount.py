"""Every number of the report and of its figures, counted again from the run folders.

``recount`` shares no arithmetic with the report: it works out each number by its definition
(Kendall's τ pair by pair), and knows each by the key that the page marks it with.
"""

import math
import re
from html.parser import HTMLParser
from inspect import signature

import pytest
from recount import recount
from run_folders import write_curve, write_run, write_study
from runs_on_zoo import write_mixed, write_run_on

from transformer_nfn.report import write_report
from transformer_nfn.zoo import Zoo

# Values are shown from records, or from predictions rounded to the sixth decimal.
ROUNDED = 1e-9
NUMBER = re.compile(r"(?<![\w.])[−-]?\d[\d,]*(?:\.\d+)?(?:e[−-]?\d+)?")
# Elements that are never closed.
VOID = ("meta", "link", "br", "hr", "img", "input", "wbr", "col")
# Text with digits that nobody counted: names and records quoted, the paper's own numbers, axes.
NOT_COUNTED_TAGS = ("script", "style", "svg", "option")
NOT_COUNTED_ATTRIBUTES = ("data-n", "data-quoted")
NOT_COUNTED_CLASSES = ("paper", "why")


class Element:
    """An element of a page; its children are elements and texts."""

    def __init__(self, tag, attributes, parent):
        self.tag, self.attributes, self.parent = tag, attributes, parent
        self.children = []
        self.classes = (attributes.get("class") or "").split()

    @property
    def text(self):
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    def elements(self, tag=None):
        """Child elements."""
        found = [child for child in self.children if isinstance(child, Element)]
        return [child for child in found if tag in (None, child.tag)]

    def below(self, *, into=lambda element: True):
        """All elements below in document order; of those not entered, only the element."""
        for child in self.elements():
            yield child
            if into(child):
                yield from child.below(into=into)


class Page(HTMLParser):
    """Tree of a page, in which every element must be closed."""

    def __init__(self, text):
        super().__init__()
        self.root = self.open = Element("", {}, None)
        self.feed(text)
        self.close()
        assert self.open is self.root, f"<{self.open.tag}> is not closed"

    def handle_starttag(self, tag, attrs):
        element = Element(tag, dict(attrs), self.open)
        self.open.children.append(element)
        if tag not in VOID:
            self.open = element

    def handle_startendtag(self, tag, attrs):
        self.open.children.append(Element(tag, dict(attrs), self.open))

    def handle_endtag(self, tag):
        assert tag == self.open.tag, f"</{tag}> closes <{self.open.tag}>"
        self.open = self.open.parent

    def handle_data(self, data):
        self.open.children.append(data)

    def marked(self):
        """Key and text of every number."""
        marked = [e for e in self.root.below() if "data-n" in e.attributes]
        return [(element.attributes["data-n"], element.text) for element in marked]

    def strays(self):
        """Texts with digits under no key."""

        def counted(element):
            return not (
                element.tag in NOT_COUNTED_TAGS
                or element.attributes.keys() & {*NOT_COUNTED_ATTRIBUTES}
                or {*element.classes} & {*NOT_COUNTED_CLASSES}
            )

        (body,) = (element for element in self.root.below() if element.tag == "body")
        entered = [body, *(e for e in body.below(into=counted) if counted(e))]
        texts = [child for e in entered for child in e.children if isinstance(child, str)]
        return [text for text in texts if re.search("[0-9]", text.replace("L2", ""))]

    def figures(self):
        """Kind, number of the zoo and drawings of every figure."""
        found = []
        for figure in self.root.below():
            if figure.tag == "figure" and "data-chart" in figure.attributes:
                drawn = figure.below(into=lambda element: element.tag != "svg")
                kind, zoo = (figure.attributes[f"data-{name}"] for name in ("chart", "zoo"))
                assert {"chart", kind} <= {*figure.classes}
                found.append((kind, int(zoo), [Drawing(e) for e in drawn if e.tag == "svg"]))
        return found


class Drawing:
    """What an SVG says: its description, and the title of each mark in document order."""

    def __init__(self, svg):
        heading, described = svg.elements()[:2]
        assert (heading.tag, described.tag) == ("title", "desc")
        self.heading, self.description = heading.text, described.text
        below = list(svg.below())
        self.titles = [title.text for e in below for title in e.elements("title")]
        self.taus = [e.text for e in below if e.tag == "text" and "tau" in e.classes]
        bars = (e for e in below if e.tag == "rect" and "bar" in e.classes)
        self.bars = [float(bar.attributes["height"]) for bar in bars]


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
    zoo = Zoo.open("mnist-sample")
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
def opened(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recount")
    needed = ["own"] if "own" in signature(request.param).parameters else []
    runs, zoos = request.param(folder / "r", *map(request.getfixturevalue, needed))
    write_report(runs, folder / "report.html", zoos=zoos)
    return Page((folder / "report.html").read_text()), recount(runs, zoos)


def test_tables_sentences_and_captions(opened):
    page, recounted = opened
    shown = page.marked()
    keys = [key for key, _ in shown]
    assert len(keys) == len(set(keys))
    assert set(keys) == set(recounted["numbers"])
    for key, text in shown:
        assert_says(text, recounted["numbers"][key], key)


def test_no_number_escapes_the_recount(opened):
    page, _ = opened
    assert page.strays() == []


def test_charts(opened):
    page, recounted = opened
    figures = {(kind, zoo): drawings for kind, zoo, drawings in page.figures()}
    assert len(figures) == len(page.figures())
    assert sorted(figures) == sorted((c["kind"], c["zoo"]) for c in recounted["charts"])
    for chart in recounted["charts"]:
        where = chart["kind"], chart["zoo"]
        panels = chart.get("panels") or [chart]
        for drawing, true in zip(figures[where], panels, strict=True):
            assert_says(drawing.description, true["described"], where)
            assert len(drawing.titles) == len(true["marks"]), (where, true.get("name"))
            for text, mark in zip(drawing.titles, true["marks"], strict=True):
                assert text.startswith(f"{mark['title']}: "), (where, text, mark)
                rest = text.removeprefix(f"{mark['title']}: ")
                assert_says(rest, mark["numbers"], (where, text))
                assert all(f", {words}" in rest for words in mark.get("words", ())), (where, text)
            if chart["kind"] == "scatter":
                assert drawing.heading.startswith(true["name"])
                (tau,) = drawing.taus
                assert_says(tau, true["tau"], where)
            if chart["kind"] == "histogram":
                heights = [height / max(drawing.bars) for height in drawing.bars]
                counts = [count / max(true["bars"]) for count in true["bars"]]
                assert heights == pytest.approx(counts, abs=1e-3), "a linear scale from the start"


def test_the_recount_sees_a_wrong_number(tmp_path):
    """A page whose table says something else than its runs does not pass."""
    write_run(tmp_path / "r" / "a", "mlp", networks=80, seeds=2)
    write_run(tmp_path / "r" / "b", "statnn", networks=80, seeds=2)
    write_report([tmp_path / "r"], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    wrong = re.sub(
        r'(data-n="z0\.m0\.mae">0\.\d\d)(\d)', lambda m: m[1] + str((int(m[2]) + 1) % 10), text
    )
    assert Page(text).strays() == []
    page = Page(wrong.replace("Trees have no", "7 trees have no"))
    recounted = recount([tmp_path / "r"], [])["numbers"]
    shown = dict(page.marked())
    with pytest.raises(AssertionError):
        assert_says(shown["z0.m0.mae"], recounted["z0.m0.mae"], "wrong")
    assert_says(shown["z0.m1.mae"], recounted["z0.m1.mae"], "right")
    assert len(page.strays()) == 1
