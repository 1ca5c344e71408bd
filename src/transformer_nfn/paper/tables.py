"""The paper's tables, a learning curve and the table of a mixed zoo, from any zoo."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from transformer_nfn.io.files import write_parquet, write_text
from transformer_nfn.known_tasks import KNOWN_TASKS, task_title
from transformer_nfn.paper.cells import Cell, cell_networks, fill_cell, fill_cells_on_ray
from transformer_nfn.paper.numbers import (
    ALL_KINDS,
    INVARIANTS,
    LEARNING_CURVE,
    LEFT_OUT,
    MIXED,
    TABLE_1,
    TABLE_2,
    TABLE_3,
    TABLE_5,
    TABLE_6,
    TABLE_7,
    WHOLE,
    table_named,
    table_of,
)
from transformer_nfn.paper.table_text import (
    ALL_NETWORKS,
    check_topic,
    markdown_table,
    table_columns,
)
from transformer_nfn.prediction.data import PERCENT, count_training
from transformer_nfn.prediction.runs import RUN_FILE, RunError, RunRecord
from transformer_nfn.zoo.store import check_outside_zoos

PAPER_MODELS = ("xgboost", "lightgbm", "random_forest", "mlp", "statnn", "transformer_nfn")
EXTRA_MODELS = ("invariant_boosting", "invariant_mlp", "whole_network")
SMALLEST = 64
"""Fewest training networks of a learning curve."""

Progress = Callable[[Cell, dict[str, Any]], None]


def zoo_cells(
    name: str,
    zoo_path: Path,
    models: Iterable[str] | None = None,
    percent: int | None = PERCENT,
    sizes: Sequence[int] | None = None,
    leave_out: Sequence[str] | None = None,
) -> list[Cell]:
    """The cells of a table for a zoo, see `table_cells`.

    Of a mixed zoo: all sizes, invariants alone, and sizes left out.
    """
    from transformer_nfn.zoo import MixedZoo, Zoo

    if table_named(name) is MIXED:
        weights = {n: zoo.sizes.num_weights for n, zoo in MixedZoo.open(zoo_path).zoos.items()}
        topic, model = MIXED.topic, "whole_network"
        return [
            Cell(topic, ALL_KINDS, WHOLE, model),
            Cell(topic, ALL_KINDS, INVARIANTS, model, {"probes": 0}),
            *(
                Cell(topic, kind, LEFT_OUT, model, leave_out=(kind,))
                for kind in kinds_to_leave_out(weights, leave_out)
            ),
        ]
    zoo = Zoo.open(zoo_path)
    train = count_training(zoo, percent=percent) if name == LEARNING_CURVE.name else 0
    return table_cells(name, zoo.task, models, train, sizes)


def table_cells(
    name: str,
    task: str,
    models: Iterable[str] | None = None,
    train: int = 0,
    sizes: Sequence[int] | None = None,
) -> list[Cell]:
    """The cells of a table for a zoo of this task.

    Args:
        name: ``table1`` and on, as the paper numbers them, or ``learning-curve``.
        task: task of the zoo; networks on text have no embedding.
        models: which predictors (tables 1, 2 and 7, learning curve); the paper's six and our three
            by default.
        train: number of training networks of the zoo (learning curve).
        sizes: numbers of networks in place of 64, 128, … and all (learning curve).
    """
    table = table_named(name)
    home = table_of(table.topic, task) or table
    if home is not table:
        raise RunError(
            f"{name} is '{table.title}', and the zoo has networks on {task_title(task)}: name "
            f"{home.name}"
        )
    topic = table.topic
    chosen = tuple(models) if models is not None else (*PAPER_MODELS, *EXTRA_MODELS)
    text = task in KNOWN_TASKS and not KNOWN_TASKS[task].patch
    if table in (TABLE_1, TABLE_2):
        return [
            Cell(topic, model, column, model, min_accuracy=float(column.replace("all", "0")))
            for column in table.columns
            for model in chosen
        ]
    if table is TABLE_3:
        rows = [row for row in TABLE_3.rows if not (text and "embedding" in row)]
        return [
            Cell(topic, row, task, "transformer_nfn", {"components": row.split("+")})
            for row in rows
        ]
    if table is TABLE_5:
        return [
            Cell(topic, row, "tau", "transformer_nfn", {"channels": json.loads(row)})
            for row in table.rows
        ]
    if table is TABLE_6:
        return [Cell(topic, model, task, model, trained=False) for model in table.rows]
    if table is TABLE_7:
        bounds = [None, 0.0, 1.0, 10.0, 100.0]
        return [
            Cell(topic, model, column, model, bound=bound)
            for column, bound in zip(table.columns, bounds, strict=True)
            for model in chosen
        ]
    if table is LEARNING_CURVE:
        return [
            Cell(topic, model, column, model, max_train=size)
            for column, size in curve_sizes(train, sizes).items()
            for model in chosen
        ]
    raise RunError(f"'{name}' has the cells of a mixed zoo, see zoo_cells")


def curve_sizes(train: int, only: Sequence[int] | None = None) -> dict[str, int | None]:
    """Columns of a learning curve: 64, 128, 256, … networks, and all (None).

    Args:
        train: number of training networks.
        only: these numbers of networks in place of them, each at least 64 and fewer than ``train``.
    """
    if train < SMALLEST:
        raise RunError(
            f"a learning curve needs at least {SMALLEST} networks to train on, "
            f"the training part of the zoo has {train}"
        )
    for size in only or ():
        if not SMALLEST <= size < train:
            raise RunError(
                f"the sizes of a learning curve are at least {SMALLEST} and less than the "
                f"{train} networks of the training part, found {size}"
            )
    if only:
        return {str(size): size for size in sorted(set(only))}
    doubled = (SMALLEST << i for i in range(train.bit_length()))
    return {**{str(size): size for size in doubled if size < train}, ALL_NETWORKS: None}


def kinds_to_leave_out(weights: Mapping[str, int], chosen: Sequence[str] | None) -> list[str]:
    """Sizes that are left out in turn: those chosen, else a small, a medium and a large one.

    Args:
        weights: number of weights of a network of each size.
        chosen: names of sizes; None for a default.
    """
    for name in chosen or ():
        if name not in weights:
            raise RunError(
                f"there are no networks of the kind '{name}' to leave out, only of "
                f"{', '.join(weights)}"
            )
    if len(weights) < 2:
        raise RunError("a table of kinds needs a mixed zoo of at least two kinds")
    if chosen is not None:
        return list(dict.fromkeys(chosen))
    by_size = sorted(weights, key=lambda name: weights[name])
    return list(dict.fromkeys([by_size[0], by_size[len(by_size) // 2], by_size[-1]]))


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
    """Fill every cell of a table and write it as Parquet and Markdown beside the paper's.

    Finished cells are read, not trained again, so an interrupted call resumes.

    Args:
        name: see `table_cells`.
        zoo_path: any zoo; for ``mixed`` a mixed one.
        out: folder for cells and tables.
        seeds: random seeds of every cell.
        epochs: epochs of neural predictors; by default those of each model.
        models: see `table_cells`.
        percent: the checkpoint of each run, in percent of training.
        sizes: see `table_cells`.
        leave_out: sizes left out in turn (mixed); by default a small, a medium and a large one.
        device: device of neural predictors.
        progress: called with the cell and its events, of which the last has its ``result``.
        engine: ``local``, or ``ray`` for one task per cell on a cluster.
        address: address of the Ray cluster; None starts one here.
    """
    check_outside_zoos(out)
    cells = zoo_cells(name, zoo_path, models, percent, sizes, leave_out)
    for path in sorted(out.glob(f"cells/*/{RUN_FILE}")):
        check_topic(RunRecord.read(path.parent), path.parent)
    how: dict[str, Any] = dict(seeds=seeds, epochs=epochs, percent=percent, device=device)
    filled: Iterable[tuple[Cell, RunRecord]]
    if engine == "ray":
        filled = fill_cells_on_ray(zoo_path, cells, out, how, address=address)
    elif engine == "local":
        how["read"] = lru_cache(maxsize=1)(cell_networks)
        told = progress or (lambda cell, line: None)
        filled = (
            (cell, fill_cell(zoo_path, cell, out, report=partial(told, cell), **how))
            for cell in cells
        )
    else:
        raise RunError(f"engine must be 'local' or 'ray', found '{engine}'")
    found: dict[str, RunRecord] = {}
    for cell, record in filled:
        found[cell.folder] = record
        if progress is not None:
            tau = f"τ {record.summary['tau']:.3f}" if record.summary else record.status
            progress(cell, {"result": tau})
    records = [found[cell.folder] for cell in cells]
    write_text(out / f"{name}.md", markdown_table(name, records))
    write_parquet(out / f"{name}.parquet", table_columns(name, records), RunError)
    return records
