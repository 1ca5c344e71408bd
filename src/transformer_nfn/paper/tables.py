"""The paper's tables, a learning curve and the table of a mixed zoo, from any zoo."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformer_nfn.io.files import write_parquet, write_text
from transformer_nfn.known_tasks import KNOWN_TASKS, task_title
from transformer_nfn.models.predictor import known_variants
from transformer_nfn.paper.cells import Cell, Told, fill_cells
from transformer_nfn.paper.numbers import (
    ALL_KINDS,
    HOME,
    INVARIANTS,
    LEARNING_CURVE,
    LEFT_OUT,
    MIXED,
    NFN,
    TABLE_1,
    TABLE_3,
    TABLE_5,
    TABLE_6,
    TABLE_7,
    TARGETS,
    TRANSFER,
    WHOLE,
    table_named,
    table_of,
)
from transformer_nfn.paper.paired import paired_rows
from transformer_nfn.paper.rows import as_columns, result_rows
from transformer_nfn.paper.table_text import ALL_NETWORKS, check_topic, markdown_table
from transformer_nfn.paper.transfer import other_zoos, transferred
from transformer_nfn.prediction.data import PERCENT, Selection, count_training
from transformer_nfn.prediction.runs import RUN_FILE, RunError, RunRecord, find_runs
from transformer_nfn.prediction.target import Target, target_columns, target_values
from transformer_nfn.zoo import Zoo
from transformer_nfn.zoo.store import check_outside_zoos

PAPER_MODELS = ("xgboost", "lightgbm", "random_forest", "mlp", "statnn", "transformer_nfn")
EXTRA_MODELS = ("invariant_boosting", "invariant_mlp", "whole_network")
TRANSFERRED = ("whole_network:invariants", "invariant_boosting:whole", "invariant_mlp:whole")
"""Predictors that read networks of any patch, number of tokens and classes."""
SMALLEST = 64
"""Fewest training networks of a learning curve."""


def model_cell(topic: str, row: str, column: str, **facts: Any) -> Cell:
    """A cell of the predictor, or variant of one, that the key of its row names."""
    variant = known_variants().get(row)
    if variant is None:
        return Cell(topic, row, column, row, **facts)
    cell = Cell(topic, row, column, row.partition(":")[0], variant.options, **facts)
    return cell.with_selection(all_checkpoints=variant.every_checkpoint)


def zoo_cells(
    name: str,
    zoo_path: Path,
    models: Iterable[str] | None = None,
    sizes: Sequence[int | None] | None = None,
    leave_out: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    **selection: Any,
) -> list[Cell]:
    """The cells of a table for a zoo, see `table_cells`.

    Of a mixed zoo: all sizes, invariants alone, and sizes left out.

    Args:
        name: see `table_cells`.
        zoo_path: of the zoo; for ``transfer`` there are no cells of a folder of runs.
        models: see `table_cells`.
        sizes: see `table_cells`.
        leave_out: sizes left out in turn.
        columns: the columns to keep; all by default.
        selection: fields of the `Selection` of all cells.
    """
    table = table_named(name)
    if table is TRANSFER and not (zoo_path / "zoo.json").is_file():
        return []
    zoo = Zoo.open(zoo_path)
    if (table is MIXED) is not zoo.mixed:
        kinds = "a mixed zoo", "networks of one size"
        expected, found = kinds if table is MIXED else kinds[::-1]
        raise RunError(f"{name} is about {expected}, '{zoo.path}' holds {found}")
    if zoo.mixed:
        weights = {n: each.sizes.num_weights for n, each in zoo.parts.items()}
        topic, model = MIXED.topic, "whole_network"
        cells = [
            Cell(topic, ALL_KINDS, WHOLE, model),
            Cell(topic, ALL_KINDS, INVARIANTS, model, {"probes": 0}),
        ]
        for kind in kinds_to_leave_out(weights, leave_out):
            cell = Cell(topic, kind, LEFT_OUT, model)
            cells.append(cell.with_selection(leave_out=(kind,)))
    else:
        if zoo.named:
            if table not in (LEARNING_CURVE, TARGETS):
                raise RunError(
                    f"'{zoo.path}' holds networks of a user: {LEARNING_CURVE.name} and "
                    f"{TARGETS.name} are the tables for them"
                )
            selection["percent"] = None
        if table is TARGETS:
            if sizes is not None and len(sizes) > 1:
                raise RunError(f"{name} are learned from one number of networks, not {len(sizes)}")
            learners = models or ("whole_network", "invariant_mlp")
            cells = [model_cell(TARGETS.topic, model, model) for model in learners]
            chosen = {**selection, "max_train": sizes and sizes[0]}
            return [
                replace(cell.with_selection(**{**chosen, "target": column}), row=column)
                for column in _learnable(zoo, Selection(**selection))
                for cell in cells
            ]
        train = count_training(zoo, Selection(**selection)) if table is LEARNING_CURVE else 0
        cells = table_cells(name, zoo.task, models, train, sizes)
    there = list(dict.fromkeys(cell.column for cell in cells))
    for column in columns or ():
        if column not in there:
            raise RunError(f"{name} has no column '{column}' here: it has {', '.join(there)}")
    return [
        cell.with_selection(**selection)
        for cell in cells
        if columns is None or cell.column in columns
    ]


def _learnable(zoo: Zoo, selection: Selection) -> list[str]:
    """Columns of a zoo that say how its networks were trained, and what came of it."""
    found = []
    for column in target_columns(zoo):
        with contextlib.suppress(RunError):  # one value only, a class of one network
            rows = replace(selection, target=column).rows(zoo)
            Target.of(column, target_values(zoo, column, rows))
            found.append(column)
    return [column for column in found if column not in ("seed", "percent", "best", "run")]


def table_cells(
    name: str,
    task: str,
    models: Iterable[str] | None = None,
    train: int = 0,
    sizes: Sequence[int | None] | None = None,
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
    text = task in KNOWN_TASKS and not KNOWN_TASKS[task].patch
    if table is TABLE_3:
        rows = [row for row in table.rows if not (text and "embedding" in row)]
        return [Cell(topic, row, task, NFN, {"components": row.split("+")}) for row in rows]
    if table is TABLE_5:
        return [Cell(topic, row, "tau", NFN, {"channels": json.loads(row)}) for row in table.rows]
    if table is TABLE_6:
        return [Cell(topic, model, task, model, trained=False) for model in table.rows]
    chosen = tuple(models) if models is not None else (*PAPER_MODELS, *EXTRA_MODELS)
    if table is TRANSFER:
        learners = (*chosen, *TRANSFERRED) if models is None else chosen
        return [model_cell(topic, row, HOME, keep=True) for row in learners]
    columns: dict[str, dict[str, Any]] = {column: {} for column in table.columns}
    bounds: dict[str, float | None] = {}
    if topic == TABLE_1.topic:
        columns = {c: {"min_accuracy": float(c.replace("all", "0"))} for c in columns}
    elif table is TABLE_7:
        bounds = dict(zip(columns, (None, 0.0, 1.0, 10.0, 100.0), strict=True))
    elif table is LEARNING_CURVE:
        columns = {c: {"max_train": size} for c, size in curve_sizes(train, sizes).items()}
    else:
        raise RunError(f"'{name}' has the cells of a mixed zoo, see zoo_cells")
    return [
        model_cell(topic, model, c, bound=bounds.get(c)).with_selection(**changes)
        for c, changes in columns.items()
        for model in chosen
    ]


def curve_sizes(train: int, only: Sequence[int | None] | None = None) -> dict[str, int | None]:
    """Columns of a learning curve: 64, 128, 256, … networks, and all (None).

    Args:
        train: number of training networks.
        only: these numbers of networks in place of them, each from 64 to ``train``; None is all.
    """
    if not only:
        if train < SMALLEST:
            raise RunError(
                f"a learning curve needs at least {SMALLEST} networks to train on, "
                f"the training part of the zoo has {train}"
            )
        doubled = (SMALLEST << i for i in range(train.bit_length()))
        only = [*(size for size in doubled if size < train), None]
    for size in only:
        if size is not None and not SMALLEST <= size <= train:
            raise RunError(
                f"the sizes of a learning curve are at least {SMALLEST} and at most the {train} "
                f"networks of the training part, found {size}"
            )
    numbers = sorted({size for size in only if size is not None})
    every = {ALL_NETWORKS: None} if None in only else {}
    return {**{str(size): size for size in numbers}, **every}


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
    seeds: Sequence[int],
    epochs: int | None = None,
    models: Iterable[str] | None = None,
    sizes: Sequence[int | None] | None = None,
    leave_out: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    splits: Sequence[int] = (0,),
    to: Sequence[Path | str] = (),
    told: Told | None = None,
    how: Mapping[str, Any] | None = None,
    **selection: Any,
) -> list[RunRecord]:
    """Fill every cell of a table and write it as Parquet and Markdown beside the paper's.

    NAME-paired.parquet has the difference of every two predictors, see `paired_rows`.

    Finished cells are read, not trained again, so an interrupted call resumes.

    Args:
        name: see `table_cells`.
        zoo_path: any zoo; for ``mixed`` a mixed one; for ``transfer`` also a folder of runs.
        out: folder for cells and tables.
        seeds: random seeds of every cell.
        epochs: epochs of neural predictors; by default those of each model.
        models: see `table_cells`.
        sizes: see `table_cells`.
        leave_out: sizes left out in turn (mixed); by default a small, a medium and a large one.
        columns: see `zoo_cells`.
        splits: seeds of splits; every cell is filled on each.
        to: zoos whose networks are ranked (transfer).
        told: called with the cell and its events, of which the last has its ``result``.
        how: device, jobs and other arguments of `fill_cells`.
        selection: see `zoo_cells`.
    """
    others = other_zoos(zoo_path, to) if name == TRANSFER.name else []
    check_outside_zoos(out)
    cells = [
        replace(cell, seeds=tuple(seeds), epochs=epochs)
        for split in splits
        for cell in zoo_cells(
            name, zoo_path, models, sizes, leave_out, columns, **selection, split_seed=split
        )
    ]
    for path in sorted(out.glob(f"cells/*/{RUN_FILE}")):
        check_topic(RunRecord.read(path.parent), path.parent)
    records = fill_cells(zoo_path, cells, out, told=told, **(how or {}))
    if others:
        filled = [out / "cells" / cell.folder for cell in cells]
        done = [folder for folder in filled if (folder / RUN_FILE).is_file()]
        folders = done if cells else find_runs([zoo_path])
        records = transferred(folders, others, selection.get("percent", PERCENT))
    rows = result_rows(records)
    write_text(out / f"{name}.md", markdown_table(name, rows))
    write_parquet(out / f"{name}.parquet", as_columns(rows), RunError)
    if table_named(name).quantity == "tau" and not others:
        pairs = paired_rows(out / "cells" / cell.folder for cell in cells)
        write_parquet(out / f"{name}-paired.parquet", as_columns(pairs), RunError)
    return records
