"""Reproduced tables beside the paper's: its numbers as printed, our cells where they belong."""

import pytest
from run_folders import write_run

from tnfn_command import assert_refused
from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.io.files import read_parquet, write_parquet
from transformer_nfn.paper.numbers import PAPER_TABLES
from transformer_nfn.paper.rows import as_columns, result_rows
from transformer_nfn.paper.table_text import (
    curve_lines,
    lay_out,
    markdown_table,
)
from transformer_nfn.paper.tables import table_cells
from transformer_nfn.prediction.runs import RunError, RunRecord


def record(table, row, column, tau=0.8, **changes):
    values = {
        "model": "transformer_nfn",
        "zoo": {"task": "mnist", "name": "mnist", "runs": 512, "networks": 2048},
        "selection": {"train": 358, "val": 77, "test": 77},
        "protocol": {},
        "seeds": [{"seed": 0, "tau": tau - 0.01}, {"seed": 1, "tau": tau + 0.01}],
        "summary": {"r2": 0.9, "mae": 0.02, "coverage": 0.9},
        "num_parameters": 1_812_301,
        "table": {"table": table, "row": row, "column": column},
    }
    return RunRecord(**values | changes)


def test_numbers_of_the_paper():
    printed = {
        ("table1", "transformer_nfn", "all"): (0.905, 0.002),
        ("table2", "mlp", "0.4"): (0.841, 0.012),
        ("table3", "classifier", "ag_news"): (0.795, 0.008),
        ("table5", "[15,15]", "parameters"): (38_101_000, None),
        ("table6", "statnn", "ag_news"): (168_000, None),
        ("table7", "statnn", "[-100,100]"): (0.771, 0.013),
    }
    for (table, row, column), (value, error) in printed.items():
        cell = PAPER_TABLES[table].cell(row, column)
        assert (cell.value, cell.error) == (pytest.approx(value), error)


def test_tables_have_the_numbers_of_the_paper_and_records_their_topics():
    topics = {name: table.topic for name, table in PAPER_TABLES.items()}
    assert topics == {
        "table1": "thresholds",
        "table2": "thresholds",
        "table3": "components",
        "table5": "channels",
        "table6": "parameters",
        "table7": "augmentation",
    }
    for name, topic in topics.items():
        task = "ag_news" if name == "table2" else "mnist"
        cells = table_cells(name, task, ["mlp"])
        assert {cell.topic for cell in cells} == {topic}
        assert all(cell.folder.startswith(f"{topic}-") for cell in cells)
        heading = markdown_table(name, []).splitlines()[0]
        assert heading.startswith(f"**Table {name[-1]}. ")


def test_thresholds_stand_in_the_table_of_their_task():
    cells = [
        record("thresholds", "mlp", "all", tau, model="mlp", zoo=zoo_of("one", task))
        for task, tau in (("mnist", 0.8), ("ag_news", 0.7), ("digits", 0.6))
    ]
    found = {
        name: {view.zoo.split(",")[0]: view.ours["mlp", "all"].value for view in views}
        for name in ("table1", "table2")
        if (views := lay_out(name, result_rows(cells)))
    }
    assert found == {"table1": {"MNIST": 0.8, "Digits": 0.6}, "table2": {"AG News": 0.7}}
    for name, task, other in (("table1", "ag_news", "table2"), ("table2", "digits", "table1")):
        with pytest.raises(RunError, match=f"name {other}"):
            table_cells(name, task)


def test_the_grid_of_the_paper_names_the_table_of_the_channels(tmp_path):
    sentence = (
        "table 4 of the paper is the grid of its networks and has no results to reproduce; the "
        "channels of Transformer-NFN are table5"
    )
    assert_refused(sentence, "reproduce", "table4", "mnist-sample", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(TransformerNFNError, match=sentence):
        table_cells("table4", "mnist")


@pytest.mark.parametrize("number", [1, 4, 5])
def test_cells_under_old_numbers_are_refused_by_name(number, tmp_path):
    folder = tmp_path / "cells" / "a-cell"
    write_run(folder, table={"table": f"table{number}", "row": "[3]", "column": "tau"})
    before = sorted(tmp_path.rglob("*"))
    sentence = (
        f"'{folder / 'run.json'}': 'table.table' expected one of thresholds, components, channels, "
        "parameters, augmentation, learning-curve, mixed, targets, transfer, found "
        f"'table{number}': numbers of tables have changed, so reproduce it in a new folder"
    )
    for words in (
        ("report", tmp_path, "--out", tmp_path / "report.html"),
        ("reproduce", "table6", "mnist-sample", "--out", tmp_path),
        ("reproduce", "figures", "mnist-sample", "--out", tmp_path),
    ):
        assert_refused(sentence, *words)
    assert sorted(tmp_path.rglob("*")) == before


def test_markdown_has_ours_over_the_papers_and_the_best_bold():
    cells = [
        record("thresholds", "transformer_nfn", "all", 0.71),
        record("thresholds", "statnn", "all", 0.83, model="statnn"),
    ]
    text = markdown_table("table1", result_rows(cells))
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("| StatNN"))
    assert lines[at].startswith("| StatNN | here | **0.830 ± 0.010** |")
    assert lines[at + 1].startswith("|  | paper | *0.881 ± 0.001* |")
    assert "MNIST, 512 networks" in text
    widths = {line.count("|") for line in lines if line.startswith("|")}
    assert widths == {8}


def test_largest_change_under_augmentation():
    cells = [
        record("augmentation", "mlp", column, tau)
        for column, tau in (("original", 0.8), ("[-1,1]", 0.75), ("[-10,10]", 0.78))
    ]
    (view,) = lay_out("table7", result_rows(cells))
    assert view.ours["mlp", "change"].text == "−0.050"
    assert view.paper.cell("mlp", "change").text == "−0.049"
    assert view.paper.cell("transformer_nfn", "change").text == "+0.003"
    assert "change" not in {row["column"] for row in result_rows(cells)}
    (view,) = lay_out("table7", result_rows([*cells, record("augmentation", "mlp", "twice", 0.82)]))
    assert view.ours["mlp", "change"].text == "−0.070", "counted from as many steps"


def curve_cell(model, column, train, tau=0.8, **changes):
    chosen = {"selection": {"train": train, "val": 77, "test": 77}}
    return record("learning-curve", model, column, tau, model=model, **chosen | changes)


def test_learning_curve_has_rising_numbers_and_no_paper():
    # As a folder lists them.
    cells = [
        curve_cell("invariant_mlp", "all", 1358, 0.91),
        curve_cell("mlp", "1024", 1024, 0.82),
        curve_cell("mlp", "128", 128, 0.7),
        curve_cell("mlp", "64", 64, status="not enough networks: 2 in the test part", seeds=[]),
        curve_cell("mlp", "all", 1358, 0.85),
    ]
    text = markdown_table("learning-curve", result_rows(cells))
    lines = text.splitlines()
    assert lines[0].startswith("**Learning curve. Kendall’s τ by number of networks to train on.**")
    assert "Here: MNIST, 512 networks." in lines[0]
    assert "aper" not in text
    assert lines[2:6] == [
        "| Model | 64 | 128 | 1,024 | All 1,358 |",
        "|---|--:|--:|--:|--:|",
        "| MLP | not enough networks | 0.700 ± 0.010 | 0.820 ± 0.010 | 0.850 ± 0.010 |",
        "| MLP on invariants | – | – | – | **0.910 ± 0.010** |",
    ]
    assert "- MLP, 64: not enough networks: 2 in the test part" in text
    rows = result_rows(cells)
    assert {row["train"] for row in rows} == {1358, 1024, 128, 64}
    assert {row["paper"] for row in rows} == {None}


def test_rows_of_a_file_give_the_same_table(tmp_path):
    def through_a_file(cells):
        write_parquet(tmp_path / "rows.parquet", as_columns(result_rows(cells)), RunError)
        return read_parquet(tmp_path / "rows.parquet").to_pylist()

    seeds = [{"seed": seed, "tau": tau, "r2": 0.9} for seed, tau in enumerate((0.81, 0.84, 0.9))]
    kind, zoo = "thresholds", {"task": "mnist", "name": "mine", "runs": 512, "seeds": "one"}
    selected = {"train": 358, "test": 77, "percent": 75}
    cells = [
        record(kind, "mlp", "all", seeds=seeds, zoo=zoo, selection=selected,
               summary={"tau": 0.85, "tau_se": 0.02645751311, "tau_together": 0.87}),
        record(kind, "mlp", "all", seeds=seeds[:1], zoo=zoo,
               selection={**selected, "split_seed": 1}, summary={"tau": 0.81}),
        record(kind, "statnn:authors", "0.8", zoo=zoo, seeds=[], summary={},
               status="not enough networks: 3"),
    ]  # fmt: skip
    text = markdown_table("table1", result_rows(cells))
    assert "StatNN, authors' layers" in text
    assert markdown_table("table1", through_a_file(cells)) == text
    disguised = record(
        "augmentation",
        "mlp",
        "[-1,1]",
        0.84,
        zoo={**zoo, "task": "ag_news"},
        seeds=seeds[1:2],
        summary={"tau": 0.84, "agreement": {"float32": 0.25}},
    )
    text = markdown_table("table7", result_rows([disguised]))
    assert "float32 max 2.5e-01" in text
    assert markdown_table("table7", through_a_file([disguised])) == text


def test_lines_of_a_learning_curve_have_the_points_there_are():
    cells = [
        curve_cell("mlp", "all", 300, 0.6),
        curve_cell("mlp", "64", 64, 0.5),
        curve_cell("statnn", "64", 64, 0.4),
        curve_cell("statnn", "128", 128, float("nan")),
        curve_cell("statnn", "all", 300, 0.7, seeds=[{"seed": 0, "tau": 0.7}]),
        curve_cell("xgboost", "64", 64, status="not enough networks", seeds=[]),
    ]
    (view,) = lay_out("learning-curve", result_rows(cells))
    lines = {
        row: [
            (cell.train, pytest.approx(cell.value), cell.error and pytest.approx(cell.error))
            for cell in cells
        ]
        for row, cells in curve_lines(view).items()
    }
    assert lines == {
        "statnn": [(64, 0.4, 0.01), (300, 0.7, None)],
        "mlp": [(64, 0.5, 0.01), (300, 0.6, 0.01)],
    }
    assert list(lines) == ["statnn", "mlp"], "the highest end comes first"


def zoo_of(seeds, task="mnist"):
    return {"task": task, "name": task, "runs": 512, "seeds": seeds}


@pytest.mark.parametrize(("table", "row"), [("table1", "mlp"), ("table3", "encoder")])
def test_zoos_of_both_kinds_are_two_tables(table, row):
    column = "all" if table == "table1" else "mnist"
    topic = PAPER_TABLES[table].topic
    cells = [record(topic, row, column, 0.9, zoo=zoo_of("one"))]
    cells += [record(topic, row, column, 0.3, zoo=zoo_of("each"))]
    views = lay_out(table, result_rows(cells))
    assert [view.ours[row, column].value for view in views] == [0.9, 0.3]
    assert [view.zoo.rpartition(", ")[2] for view in views] == ["one seed for all", "a seed each"]


def test_no_records_still_give_the_papers_table():
    assert "*0.905 ± 0.002*" in markdown_table("table1", [])
    assert result_rows([]) == []
    with pytest.raises(TransformerNFNError, match="there is no 'table9'"):
        markdown_table("table9", [])
