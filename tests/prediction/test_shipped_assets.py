"""What the repository ships by name is whole, and ranks networks it never saw."""

import json

import pytest
from typer.testing import CliRunner

from transformer_nfn.cli.app import app
from transformer_nfn.io.assets import CHECKOUT, read_index, resolve


@pytest.mark.parametrize("name", sorted(read_index(CHECKOUT / "index.json")))
def test_every_shipped_asset_is_whole(name):
    asset = read_index(CHECKOUT / "index.json")[name]
    assert resolve(name, asset.kind).is_dir()


@pytest.mark.parametrize(
    ("predictor", "sample", "least"),
    [
        ("mnist-whole", "mnist-sample", 0.93),
        ("mnist-nfn", "mnist-sample", 0.5),
        ("mnist-boosting", "mnist-sample", 0.83),
        ("ag-news-boosting", "ag-news-sample", 0.65),
    ],
)
def test_a_shipped_predictor_ranks_networks_it_never_saw(predictor, sample, least):
    found = CliRunner().invoke(app, ["evaluate", predictor, sample, "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["tau"] > least
