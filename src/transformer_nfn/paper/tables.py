"""The paper's tables, and a learning curve, from any zoo: which cells are there, how filled?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from transformer_nfn.io.files import atomic_file, write_text
from transformer_nfn.known_tasks import KNOWN_TASKS
from transformer_nfn.paper.cells import Cell, PartsCache, fill_cell
from transformer_nfn.paper.cells_on_ray import fill_cells_on_ray
from transformer_nfn.paper.learning_curve import curve_sizes
from transformer_nfn.paper.mixed_table import (
    ALL_KINDS,
    INVARIANTS,
    LEFT_OUT,
    MIXED,
    WHOLE,
    kinds_to_leave_out,
)
from transformer_nfn.paper.numbers import LEARNING_CURVE, TABLE_3, TABLE_4, TABLE_6
from transformer_nfn.paper.table_text import ALL_TABLES, markdown_table, table_columns
from transformer_nfn.prediction.data import PERCENT, count_training
from transformer_nfn.prediction.predictors import PAPER_MODELS
from transformer_nfn.prediction.runs import RunError, RunRecord

THRESHOLDS = {"all": 0.0, "0.2": 0.2, "0.4": 0.4, "0.6": 0.6, "0.8": 0.8}
EXTRA_MODELS = ("invariant_boosting", "invariant_mlp", "whole_network")
TABLES = tuple(ALL_TABLES)

Progress = Callable[[Cell, dict[str, Any]], None]


def zoo_cells(
    name: str,
    zoo_path: Path,
    models: Iterable[str] | None = None,
    percent: int | None = PERCENT,
    sizes: Sequence[int] | None = None,
    leave_out: Sequence[str] | None = None,
) -> list[Cell]:
    """The cells of a table for a zoo; see `table_cells` and `mixed_cells`."""
    from transformer_nfn.zoo import MixedZoo, Zoo

    if name == MIXED.name:
        weights = {n: zoo.arch.num_weights for n, zoo in MixedZoo.open(zoo_path).zoos.items()}
        return mixed_cells(kinds_to_leave_out(weights, leave_out))
    zoo = Zoo.open(zoo_path)
    train = count_training(zoo, percent=percent) if name == LEARNING_CURVE.name else 0
    return table_cells(name, str(zoo.about["task"]["name"]), models, train, sizes)


def mixed_cells(leave_out: Iterable[str]) -> list[Cell]:
    """The cells of the table of a mixed zoo: all kinds, invariants alone, and kinds left out."""
    name, model = MIXED.name, "whole_network"
    return [
        Cell(name, ALL_KINDS, WHOLE, model),
        Cell(name, ALL_KINDS, INVARIANTS, model, {"probes": 0}),
        *(Cell(name, kind, LEFT_OUT, model, leave_out=(kind,)) for kind in leave_out),
    ]


def table_cells(
    name: str,
    task: str,
    models: Iterable[str] | None = None,
    train: int = 0,
    sizes: Sequence[int] | None = None,
) -> list[Cell]:
    """The cells of a table for a zoo of this task.

    Args:
        name: ``table1`` to ``table6``, or ``learning-curve``.
        task: of the zoo; text has no embedding to read.
        models: which predictors (tables 1, 2 and 6, learning curve); the paper's six and our three
            by default.
        train: how many networks of the zoo there are to train on (learning curve).
        sizes: numbers of networks instead of 64, 128, … and all (learning curve).
    """
    chosen = tuple(models) if models is not None else (*PAPER_MODELS, *EXTRA_MODELS)
    text = task in KNOWN_TASKS and not KNOWN_TASKS[task].patch
    if name in ("table1", "table2"):
        return [
            Cell(name, model, column, model, min_accuracy=least)
            for column, least in THRESHOLDS.items()
            for model in chosen
        ]
    if name == "table3":
        rows = [row for row in TABLE_3.rows if not (text and "embedding" in row)]
        return [
            Cell(name, row, task, "transformer_nfn", {"components": row.split("+")}) for row in rows
        ]
    if name == "table4":
        return [
            Cell(name, row, "tau", "transformer_nfn", {"channels": json.loads(row)})
            for row in TABLE_4.rows
        ]
    if name == "table5":
        return [
            Cell(name, model, task, model, trained=False)
            for model in ("transformer_nfn", "mlp", "statnn")
        ]
    if name == "table6":
        bounds = [None, 0.0, 1.0, 10.0, 100.0]
        return [
            Cell(name, model, column, model, bound=bound)
            for column, bound in zip(TABLE_6.columns, bounds, strict=True)
            for model in chosen
        ]
    if name == LEARNING_CURVE.name:
        return [
            Cell(name, model, column, model, max_train=size)
            for column, size in curve_sizes(train, sizes).items()
            for model in chosen
        ]
    raise RunError(f"there is no '{name}'; there are {', '.join(TABLES)}")


def reproduce(
    name: str,
    zoo_path: Path,
    out: Path,
    *,
    seeds: list[int],
    epochs: int | None = None,
    models: Iterable[str] | None = None,
    percent: int | None = PERCENT,
    sizes: Sequence[int] | None = None,
    leave_out: Sequence[str] | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
    engine: str = "local",
    address: str | None = None,
) -> list[RunRecord]:
    """Fills every cell of a table and writes it as Parquet and Markdown beside the paper's.

    Finished cells are read, not trained again, so an interrupted call goes on.

    Args:
        name: see `table_cells`.
        zoo_path: any zoo; for ``mixed`` a mixed one.
        out: folder for cells and tables.
        seeds: of every cell.
        epochs: of neural predictors; each model's own by default.
        models: see `table_cells`.
        percent: which checkpoint of each run.
        sizes: see `table_cells`.
        leave_out: kinds left out in turn (mixed); a small, a middling and a large one by default.
        device: for neural predictors.
        progress: called with the cell and what happens in it.
        engine: ``local``, or ``ray`` for a cell a task on a cluster.
        address: of the Ray cluster; None starts one here.
    """
    cells = zoo_cells(name, zoo_path, models, percent, sizes, leave_out)
    how: dict[str, Any] = dict(seeds=seeds, epochs=epochs, percent=percent, device=device)
    if engine == "ray":
        records = fill_cells_on_ray(
            zoo_path, cells, out, how, address=address, progress=progress
        )
    elif engine == "local":
        cache, records = PartsCache(), []
        for cell in cells:
            said = None if progress is None else (lambda line, c=cell: progress(c, line))
            records.append(fill_cell(zoo_path, cell, out, cache=cache, report=said, **how))
            if progress is not None:
                progress(cell, {"done": True, "record": records[-1]})
    else:
        raise RunError(f"engine must be 'local' or 'ray', found '{engine}'")
    write_table(name, records, out)
    return records


def write_table(name: str, records: list[RunRecord], out: Path) -> None:
    """Writes ``NAME.parquet`` and ``NAME.md`` into a folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_text(out / f"{name}.md", markdown_table(name, records))
    with atomic_file(out / f"{name}.parquet") as beside:
        pq.write_table(pa.table(table_columns(name, records)), beside)
