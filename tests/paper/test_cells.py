"""From a real zoo to the paper's tables: small, but every part is the one users run."""

import pytest

from transformer_nfn.paper.cells import fill_cell
from transformer_nfn.paper.table_text import markdown_table
from transformer_nfn.paper.tables import reproduce, table_cells
from transformer_nfn.prediction.data import load_parts
from transformer_nfn.prediction.runs import RunError, RunRecord, find_runs
from transformer_nfn.zoo import Settings, build

SHORT = 3


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    path = tmp_path_factory.mktemp("zoo") / "digits"
    return build(path, Settings(task="digits", runs=48, epochs=4), workers=1)


def test_tables_have_the_papers_cells():
    assert len(table_cells("table1", "mnist")) == 9 * 5
    assert [c.row for c in table_cells("table3", "ag_news")] == [
        "encoder",
        "classifier",
        "encoder+classifier",
    ]
    assert len(table_cells("table3", "mnist")) == 7
    assert [c.options["channels"] for c in table_cells("table4", "ag_news")][-1] == [15, 15]
    bounds = [c.bound for c in table_cells("table6", "mnist", ["mlp"])]
    assert bounds == [None, 0.0, 1.0, 10.0, 100.0]
    with pytest.raises(RunError, match="there is no 'table9'"):
        table_cells("table9", "mnist")


def test_a_table_is_filled_written_and_cached(zoo, tmp_path):
    records = reproduce(
        "table1", zoo.path, tmp_path, seeds=[0, 1], epochs=SHORT, models=["mlp", "lightgbm"]
    )
    assert len(records) == 10
    done = [r for r in records if r.status == "done"]
    empty = [r for r in records if r.status != "done"]
    assert done
    assert all(r.status.startswith("not enough networks") for r in empty)
    assert empty, "few digits networks reach 80 % in four epochs"
    text = (tmp_path / "table1.md").read_text()
    assert "0.866" in text, "the paper's own numbers stand beside ours"
    assert "not enough networks" in text
    stamp = {p: p.stat().st_mtime_ns for p in tmp_path.glob("cells/*/predictions.parquet")}
    again = reproduce(
        "table1", zoo.path, tmp_path, seeds=[0, 1], epochs=SHORT, models=["mlp", "lightgbm"]
    )
    assert [r.summary for r in again] == [r.summary for r in records]
    assert stamp == {p: p.stat().st_mtime_ns for p in tmp_path.glob("cells/*/predictions.parquet")}
    assert len(list(find_runs([tmp_path]))) == 10


def test_parameters_and_augmentation_tables(zoo, tmp_path):
    counts = {r.model: r.num_parameters for r in reproduce("table5", zoo.path, tmp_path, seeds=[0])}
    assert set(counts) == {"transformer_nfn", "mlp", "statnn"}
    assert all(n > 10_000 for n in counts.values())
    _, twice, _, moved, _ = table_cells("table6", "digits", ["transformer_nfn"])
    how = dict(seeds=[0], epochs=SHORT, percent=75, device="cpu")
    records = [fill_cell(zoo.path, cell, tmp_path, **how) for cell in (twice, moved)]
    assert [r.selection["augment"] for r in records] == [0.0, 10.0]
    for record in records:
        assert record.selection["train"] == 2 * load_parts(zoo).counts["train"]
    # As many steps on the same functions: the network cannot tell the two apart.
    assert records[0].summary["tau"] == pytest.approx(records[1].summary["tau"], abs=0.05)


def test_predictions_for_gU_and_U_are_compared(zoo, tmp_path):
    columns = ("[-1,1]", "[-100,100]")
    models = ["transformer_nfn", "mlp", "invariant_boosting"]
    cells = [c for c in table_cells("table6", "digits", models) if c.column in columns]
    how = dict(seeds=[0], epochs=2, percent=75, device="cpu")
    for cell in cells:
        found = fill_cell(zoo.path, cell, tmp_path, **how).summary["agreement"]
        assert found["networks"] == load_parts(zoo).counts["test"]
        assert found["max_condition"] == 1e4
        if cell.model == "transformer_nfn":
            assert found["float32"] <= 1e-4
            assert found["float64"] <= 1e-9
        elif cell.model == "mlp":
            assert found["float32"] > 1e-3
            assert found["float64"] > 1e-3
        else:
            assert found["float64"] is None, "trees have one precision"
    records = [RunRecord.read(run) for run in find_runs([tmp_path])]
    text = markdown_table("table6", records)
    assert "Transformer-NFN, predictions for gU and U: float32 max" in text
    plain = table_cells("table6", "digits", ["statnn"])[0]
    assert "agreement" not in fill_cell(zoo.path, plain, tmp_path, **how).summary
