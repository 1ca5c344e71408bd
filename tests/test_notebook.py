"""Spaces, comparisons and runs as tables in a notebook; zoos: tests/zoo/test_zoo_tables.py."""

from pathlib import Path
from xml.etree import ElementTree

import torch

from transformer_nfn import spaces, symmetry
from transformer_nfn.checkpoints import open_model, relate
from transformer_nfn.prediction.runs import RunRecord
from transformer_nfn.testing import write_example_checkpoint


def cells(html: str) -> list[list[str]]:
    """The rows of all tables, as text."""
    rows = ElementTree.fromstring(f"<div>{html}</div>").iter("tr")
    return [["".join(cell.itertext()) for cell in row] for row in rows]


def test_a_space_shows_its_tensors_and_axes() -> None:
    shown = cells(spaces.multi_head(8, 2, 3, 4)._repr_html_())
    assert shown[0] == ["tensor", "shape", "axes (* = dual)"]
    assert ["W_Q", "2 × 8 × 3", "head input qk"] in shown
    assert ["head", "2", "perm"] in [row[:3] for row in shown]


def test_comparisons_show_their_verdict(tmp_path: Path) -> None:
    space = spaces.multi_head(4, 2, 2, 2)
    U = space.randn(1, dtype=torch.float64)
    assert ["same function", "yes"] in cells(symmetry.compare(space, U, U)._repr_html_())
    folders = [write_example_checkpoint(tmp_path / str(i), i) for i in range(2)]
    with open_model(folders[0]) as A, open_model(folders[1]) as B:
        relation = relate(A, B)
    html = relation._repr_html_()
    assert f"<caption>{relation.verdict} (score" in html
    shown = {row[0]: row[1:] for row in cells(html)}
    assert shown["reason"] == [relation.reason]
    assert len(shown["0"]) == len(shown["block"]) > 1


def test_a_run_shows_its_scores_and_escapes_names() -> None:
    record = RunRecord(
        "invariant_mlp", {"name": "<b>"}, {"train": 70, "val": 15, "test": 15}, {},
        [{"seed": 0}], {"tau": 0.8125, "tau_se": None, "mae": 0.02},
    )  # fmt: skip
    shown = cells(record._repr_html_())
    assert ["zoo", "<b>"] in shown
    assert ["networks", "70 train, 15 val, 15 test"] in shown
    assert ["tau", "0.812"] in shown
