"""Cells of a table: a model on a choice of networks, trained here or on a Ray cluster.

On a cluster workers read the zoo and write their cells themselves, so both folders must be on a
disk that every node sees. A worker that dies is replaced and resumes from its saved state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from transformer_nfn.models import map_network
from transformer_nfn.prediction.data import (
    Dataset,
    Parts,
    Selection,
    SizeGroups,
    describe_zoo,
    joined,
    load_networks,
)
from transformer_nfn.prediction.experiment import Experiment, train_run
from transformer_nfn.prediction.predictors import ALL_CHECKPOINTS, NEURAL, Predictor, module_builder
from transformer_nfn.prediction.runs import RunError, RunRecord
from transformer_nfn.prediction.strategies import Protocol
from transformer_nfn.prediction.training import Execution
from transformer_nfn.ray_cluster import one_core_task, ray_cluster, task_result
from transformer_nfn.zoo import open_task_zoo

NOT_ENOUGH = "not enough networks"
RETRIES = 2
MAX_CONDITION = 1e4
TRAIN_PART, VAL_PART, TEST_PART = range(3)
"""Seeds of each part's group elements."""


@dataclass(frozen=True)
class Cell:
    """One cell of a table: a model on a choice of networks.

    Attributes:
        topic, row, column: its place: topic of the table, and the keys of row and column.
        model: name of the predictor.
        options: options of the model.
        min_accuracy: smallest accuracy of a network.
        bound: bound on the entries of the augmenting group elements; 0 for every network twice
            unchanged, None for no augmentation.
        max_train: most networks to train on; None for all.
        leave_out: sizes of a mixed zoo that are left out of training.
        trained: False where the cell only counts parameters.
    """

    topic: str
    row: str
    column: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    min_accuracy: float = 0.0
    bound: float | None = None
    max_train: int | None = None
    leave_out: tuple[str, ...] = ()
    trained: bool = True

    def selection(self, percent: int | None) -> Selection:
        """The networks that it uses."""
        return Selection(
            percent,
            self.min_accuracy,
            max_train=self.max_train,
            all_checkpoints=self.model in ALL_CHECKPOINTS,
            leave_out=self.leave_out,
        )

    @property
    def folder(self) -> str:
        """Name of its run folder."""
        words = f"{self.row}-{self.column}".replace("+", "-").replace(" ", "")
        safe = "".join(c if c.isalnum() or c in "-._" else "_" for c in words)
        return f"{self.topic}-{safe}"


class PartsCache:
    """The networks of the last selection, so that all models of a column read them once."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._parts: Parts | SizeGroups | None = None

    def get(self, path: Path, cell: Cell, percent: int | None, device: str) -> Parts | SizeGroups:
        """The networks of a cell, on the device."""
        selection = cell.selection(percent)
        key = (path, selection, cell.bound, device)
        if key != self._key or self._parts is None:
            parts = load_networks(open_task_zoo(path), selection)
            if cell.bound is not None and isinstance(parts, Parts):
                parts = augmented(parts, cell.bound)
            self._key, self._parts = key, parts.to(device)
        return self._parts


def fill_cell(
    zoo_path: Path,
    cell: Cell,
    out: Path,
    *,
    seeds: list[int],
    epochs: int | None,
    percent: int | None,
    device: str,
    cache: PartsCache | None = None,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> RunRecord:
    """Train and measure one cell, or read it if it is finished."""
    protocol = Protocol.of(cell.model, epochs)
    folder = out / "cells" / cell.folder
    table = {"table": cell.topic, "row": cell.row, "column": cell.column}
    about = describe_zoo(open_task_zoo(zoo_path))
    selection = cell.selection(percent).to_json(augment=cell.bound)
    try:
        parts = (cache or PartsCache()).get(zoo_path, cell, percent, device)
    except RunError as error:
        if not str(error).startswith(NOT_ENOUGH):
            raise
        record = RunRecord(
            cell.model, about, selection, protocol.to_json(), status=str(error), table=table
        )
        return record.write(folder)
    if not cell.trained:
        module = module_builder(cell.model, SizeGroups.of(parts).train[0], cell.options)()
        count = sum(p.numel() for p in module.parameters())
        record = RunRecord(
            cell.model, about, selection, protocol.to_json(), num_parameters=count, table=table
        )
        return record.write(folder)
    # Trees are fitted on the CPU.
    if cell.model not in NEURAL:
        parts = parts.to("cpu")

    def measure(predictors: list[Predictor]) -> dict[str, Any]:
        if not cell.bound:
            return {}
        return {"agreement": agreement(predictors, SizeGroups.of(parts).test[0], cell.bound)}

    return train_run(
        about,
        parts,
        Experiment(cell.model, seeds, protocol, cell.options, selection, table, keep=False),
        folder,
        measure=measure,
        execution=Execution(report=report),
    )


def fill_cells_on_ray(
    zoo_path: Path,
    cells: Sequence[Cell],
    out: Path,
    how: dict[str, Any],
    *,
    address: str | None = None,
    progress: Callable[[Cell, dict[str, Any]], None] | None = None,
) -> list[RunRecord]:
    """Fill every cell, as many at once as the cluster has room for; in the order of ``cells``.

    Args:
        zoo_path, cells, out: see `fill_cell`.
        how: its other arguments.
        address: address of the cluster; None starts one on this machine, unless Ray runs already.
        progress: called with each finished cell.
    """
    with ray_cluster(address, RunError) as ray:
        task = one_core_task(ray, fill_cell, int("cuda" in how["device"]), RETRIES)
        where = zoo_path.resolve(), out.resolve()
        waiting = {task.remote(where[0], cell, where[1], **how): cell for cell in cells}
        records: dict[str, RunRecord] = {}
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            cell = waiting.pop(done)
            lost = f"cell '{cell.folder}' was lost on the cluster"
            records[cell.folder] = task_result(ray, done, RunError, lost)
            if progress is not None:
                progress(cell, {"done": True, "record": records[cell.folder]})
        return [records[cell.folder] for cell in cells]


def disguised(data: Dataset, bound: float, seed: int) -> Dataset:
    """Move every block of every network by a random group element.

    Elements are drawn and act in float64; the result is rounded to the dtype of the weights.

    Args:
        data: the networks.
        bound: matrix entries are uniform on ``[-bound, bound]`` (Table 7: 1, 10, 100).
        seed: random seed of the elements.
    """
    assert data.block_space is not None
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for block in data.network["blocks"]:
        element = data.block_space.group.random(
            generator,
            batch=len(data),
            entries=(-bound, bound),
            max_condition=MAX_CONDITION,
            device=data.accuracy.device,
        )
        blocks.append(element.act(block))
    return replace(data, network={**data.network, "blocks": blocks})


def augmented(parts: Parts, bound: float) -> Parts:
    """Two-fold augmentation of every part; the originals are kept.

    With ``bound`` 0 the second half repeats the first: as many steps, no new networks.
    """
    train, val, test = (
        joined(part, disguised(part, bound, which) if bound else part)
        for which, part in (
            (TRAIN_PART, parts.train),
            (VAL_PART, parts.val),
            (TEST_PART, parts.test),
        )
    )
    return Parts(train, val, test, parts.more)


def agreement(predictors: Sequence[Predictor], test: Dataset, bound: float) -> dict[str, Any]:
    """Largest difference between predictions for gU and U, over networks and predictors.

    In float32 the rounding of gU is included. In float64 the weights are cast before the same group
    elements act, so the difference is that of the model alone; None for predictors that always
    compute in float32.

    Args:
        predictors: fitted, in main memory.
        test: test part from `augmented`: every network, then each one moved.
        bound: argument of `augmented`.
    """
    test = test.to("cpu")
    half = len(test) // 2
    plain, moved = (test.take(torch.arange(half) + start) for start in (0, half))
    wide = replace(plain, network=map_network(plain.network, lambda w: w.double()))
    wide_moved = disguised(wide, bound, TEST_PART)
    largest: dict[str, float | None] = {"float32": 0.0, "float64": 0.0}
    for predictor in predictors:
        _update(largest, "float32", predictor, plain, moved)
        if predictor.name in NEURAL:
            exact = Predictor(predictor.name, copy.deepcopy(predictor.inner).double())
            _update(largest, "float64", exact, wide, wide_moved)
        else:
            largest["float64"] = None
    return {**largest, "networks": half, "max_condition": MAX_CONDITION}


def _update(
    largest: dict[str, float | None], key: str, predictor: Predictor, U: Dataset, gU: Dataset
) -> None:
    difference = float((predictor.predict(gU) - predictor.predict(U)).abs().max())
    largest[key] = max(largest[key] or 0.0, difference)
