"""The paper's figures in files: SVG, every mark with a title, whole or not at all."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from run_folders import write_run

from transformer_nfn.prediction.runs import read_predictions
from transformer_nfn.report.figures import histogram, symbol, write_figures
from transformer_nfn.report.plot import Plot, PlotAxis, round_ticks
from transformer_nfn.zoo import BuildOptions, Zoo, build

SVG = "{http://www.w3.org/2000/svg}"


def titles(path, kind):
    """Titles of the marks of a kind in a file."""
    marks = (each for each in ElementTree.parse(path).iter() if kind in each.get("class", ""))
    return [mark.findtext(f"{SVG}title") for mark in marks]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    settings = BuildOptions(task="digits", runs=4, epochs=1, samples=200, workers=1)
    folder = tmp_path_factory.mktemp("zoo") / "zoo"
    build(folder, settings)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for model in ("transformer_nfn", "statnn", "xgboost"):
        for train in (30, 90):
            write_run(root / f"{model}-{train}", model, networks=120, seeds=2, train=train,
                      zoo_seeds="one", same_parts=True)  # fmt: skip
    return root


def test_figures_of_a_zoo_and_the_runs_beside_it(zoo, runs, tmp_path):
    written = write_figures(zoo, runs)
    assert [path.name for path in written] == ["accuracies.svg", "predictions.svg", "sizes.svg"]
    for path in written[1:]:
        assert "MNIST, 120 networks, one seed for all" in path.read_text()
    columns = read_predictions(runs / "statnn-90")
    tested = {*columns["row"][columns["split"] == "test"].tolist()}
    points = titles(written[1], "point")
    assert len(points) == 3 * len(tested)
    assert {int(re.match(r"mnist#(\d+): true ", title)[1]) for title in points} == tested
    assert len(titles(written[2], "dot")) == 6
    alone = write_figures(zoo, tmp_path)
    assert [path.name for path in alone] == ["accuracies.svg"]
    assert "checkpoints, a seed each" in alone[0].read_text()
    assert sum(int(title.split()[4]) for title in titles(alone[0], "bar")) == len(Zoo.open(zoo))


def test_a_file_has_colours_of_its_own(zoo, tmp_path):
    (path,) = write_figures(zoo, tmp_path)
    assert "var(" not in path.read_text()


def test_several_zoos_have_files_of_their_own(zoo, tmp_path):
    for kind in ("one", "each"):
        write_run(tmp_path / kind, "mlp", networks=60, zoo_seeds=kind)
    names = {path.name for path in write_figures(zoo, tmp_path)}
    assert names == {"accuracies.svg", "predictions-1.svg", "predictions-2.svg"}


def test_runs_that_cannot_be_read_leave_no_figure(zoo, tmp_path):
    write_run(tmp_path / "r", "mlp", networks=60)
    (tmp_path / "r" / "predictions.parquet").write_bytes(b"")
    with pytest.raises(Exception, match="predictions"):
        write_figures(zoo, tmp_path)
    assert not (tmp_path / "figures").exists()


def test_bars_are_as_high_as_their_counts():
    rng = np.random.default_rng(0)
    accuracy = np.concatenate([rng.random(300), [0.05, 0.1, 1.0, np.nan]])
    root = ElementTree.fromstring(histogram(accuracy, "of drawn numbers").svg())
    bars = [each for each in root.iter(f"{SVG}rect")]
    heights = np.array([float(bar.get("height")) for bar in bars])
    counts = np.array([int(bar.findtext(f"{SVG}title").split()[4]) for bar in bars])
    assert counts.sum() == 303
    assert heights / heights.max() == pytest.approx(counts / counts.max(), abs=2e-3)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.6123, 0.6124), (0, 0), (-3.2, 871.0)])
def test_ticks_are_few_and_inside(low, high):
    ticks = round_ticks(low, high, 5)
    assert 1 <= len(ticks) <= 12
    assert all(low - 1e-6 <= tick <= high + 1e-6 or low == high for tick in ticks)


def test_scales_end_where_the_axes_end():
    axes = PlotAxis(10, 1000, log=True), PlotAxis(-1, 1)
    plot = Plot("t", "d", *axes, 200, 100, (10, 20, 30, 40))
    assert [plot.across(v) for v in (10, 100, 1000)] == pytest.approx([40, 110, 180])
    assert [plot.down(v) for v in (-1, 0, 1)] == pytest.approx([70, 40, 10])


def test_every_shape_is_drawn_around_its_place():
    for kind in range(5):
        mark = ElementTree.fromstring(symbol(kind, 50.0, 40.0, 3.0, "<title>t</title>"))
        assert mark.findtext("title") == "t"
        assert mark.get("transform") == "translate(50.0 40.0) scale(3)"


def test_models_have_colours_of_their_own(zoo, runs):
    *_, path = write_figures(zoo, runs)
    text = path.read_text()
    assert len({*re.findall(r'class="line (m\d)"', text)}) == 3
