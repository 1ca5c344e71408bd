"""The paper's figures: drawn from runs and zoos as PNG and SVG, whole or not at all."""

import builtins
import re

import pytest
from run_folders import write_run

from transformer_nfn.paper import figures
from transformer_nfn.prediction.runs import RunError
from transformer_nfn.zoo import BuildOptions, build


@pytest.fixture
def runs(tmp_path):
    root = tmp_path / "runs"
    for model in ("transformer_nfn", "statnn", "xgboost"):
        for train in (30, 90):
            write_run(root / f"{model}-{train}", model, networks=120, seeds=2, train=train)
    return root


def test_scatter_of_all_models_is_one_sheet_in_two_formats(runs, tmp_path):
    written = figures.prediction_scatter([runs], tmp_path / "figures" / "predictions")
    assert [path.name for path in written] == ["predictions.png", "predictions.svg"]
    assert written[0].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = written[1].read_text()
    assert text.startswith("<?xml")
    assert "</svg>" in text
    assert {path.name for path in written[0].parent.iterdir()} == {path.name for path in written}


@pytest.mark.parametrize("draw", [figures.prediction_scatter, figures.tau_by_size])
def test_figures_say_whose_seeds_the_networks_have(tmp_path, draw):
    for train in (20, 40):
        write_run(tmp_path / "r" / f"{train}", "mlp", networks=80, train=train, zoo_seeds="one")
    _, drawn = draw([tmp_path / "r"], tmp_path / "p")
    # Letters are drawn as curves; the text itself stands in comments, line by line.
    text = " ".join(re.findall(r"<!-- (.*?) -->", drawn.read_text()))
    assert "MNIST, 80 networks, one seed for all" in text


def test_missing_matplotlib_names_the_extra(runs, tmp_path, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RunError, match=r"transformer-nfn\[plot\]"):
        figures.prediction_scatter([runs], tmp_path / "p")


def test_figures_of_a_zoo_and_the_runs_beside_it(runs, tmp_path):
    settings = BuildOptions(task="digits", runs=4, epochs=1, samples=200, workers=1)
    build(tmp_path / "zoo", settings)
    names = {path.name for path in figures.write_figures(tmp_path / "zoo", runs)}
    assert names == {
        f"{stem}.{kind}"
        for stem in ("accuracies", "predictions", "sizes")
        for kind in ("png", "svg")
    }
    empty = tmp_path / "empty"
    written = figures.write_figures(tmp_path / "zoo", empty)
    assert len(written) == 2
    assert "checkpoints, a seed each -->" in written[1].read_text()
