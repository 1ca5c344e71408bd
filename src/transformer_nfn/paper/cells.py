"""Cells of a table: a model on a choice of networks, trained here or on a Ray cluster.

On a cluster workers read the zoo and write their cells themselves, so both folders must be on a
disk that every node sees. A worker that dies is replaced and resumes from its saved state.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from transformer_nfn.models import map_network
from transformer_nfn.models.predictor import Predictor, find
from transformer_nfn.models.pretrained import Pretrained
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
from transformer_nfn.prediction.predictors import predictor_builder
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.runs import RunError, RunRecord
from transformer_nfn.prediction.training import Execution
from transformer_nfn.ray_cluster import one_core_task, ray_cluster, task_result
from transformer_nfn.zoo import open_task_zoo

NOT_ENOUGH = "not enough networks"
RETRIES = 2
MAX_CONDITION = 1e4
TEST_PART = 2
"""Seed of the group elements of test networks; those of the other parts are 0 and 1."""


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
        keep: whether its predictors are kept.
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
    keep: bool = False

    def selection(self, percent: int | None) -> Selection:
        """The networks that it uses."""
        return Selection(
            percent,
            self.min_accuracy,
            max_train=self.max_train,
            all_checkpoints=find(self.model).every_checkpoint,
            leave_out=self.leave_out,
        )

    @property
    def folder(self) -> str:
        """Name of its run folder."""
        words = f"{self.topic}-{self.row}-{self.column}".replace("+", "-").replace(" ", "")
        return re.sub(r"[^\w.-]", "_", words)


def cell_networks(
    path: Path, selection: Selection, bound: float | None, device: str
) -> Parts | SizeGroups:
    """The networks of a cell, on the device."""
    parts = load_networks(open_task_zoo(path), selection)
    if bound is not None and isinstance(parts, Parts):
        parts = augmented(parts, bound)
    return parts.to(device)


def fill_cell(
    zoo_path: Path,
    cell: Cell,
    out: Path,
    *,
    seeds: list[int],
    epochs: int | None,
    percent: int | None,
    device: str,
    read: Callable[..., Parts | SizeGroups] = cell_networks,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> RunRecord:
    """Train and measure one cell, or read it if it is finished.

    Args:
        read: `cell_networks`, or a cached form of it, so that cells of a column read once.
    """
    protocol = Protocol.of(cell.model, epochs)
    folder = out / "cells" / cell.folder
    table = {"table": cell.topic, "row": cell.row, "column": cell.column}
    about = describe_zoo(open_task_zoo(zoo_path))
    chosen = cell.selection(percent)
    selection = chosen.to_json(augment=cell.bound)
    untrained = RunRecord(cell.model, about, selection, protocol.to_json(), table=table)
    try:
        parts = read(zoo_path, chosen, cell.bound, device)
    except RunError as error:
        if not str(error).startswith(NOT_ENOUGH):
            raise
        return replace(untrained, status=str(error)).write(folder)
    if not cell.trained:
        model = predictor_builder(cell.model, SizeGroups.of(parts).train[0], cell.options)()
        return replace(untrained, num_parameters=model.num_parameters).write(folder)

    def measure(predictors: list[Predictor]) -> dict[str, Any]:
        if not cell.bound:
            return {}
        return {"agreement": agreement(predictors, SizeGroups.of(parts).test[0], cell.bound)}

    return train_run(
        about,
        parts,
        Experiment(cell.model, seeds, protocol, cell.options, selection, table, keep=cell.keep),
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
) -> Iterator[tuple[Cell, RunRecord]]:
    """Fill every cell, as many at once as the cluster has room for; as they are finished.

    Args:
        zoo_path, cells, out: see `fill_cell`.
        how: its other arguments.
        address: address of the cluster; None starts one on this machine, unless Ray runs already.
    """
    with ray_cluster(address, RunError) as ray:
        task = one_core_task(ray, fill_cell, int("cuda" in how["device"]), RETRIES)
        where = zoo_path.resolve(), out.resolve()
        waiting = {task.remote(where[0], cell, where[1], **how): cell for cell in cells}
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            cell = waiting.pop(done)
            lost = f"cell '{cell.folder}' was lost on the cluster"
            yield cell, task_result(ray, done, RunError, lost)


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
        for which, part in enumerate((parts.train, parts.val, parts.test))
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
    exact = [copy.deepcopy(p).double() for p in predictors if isinstance(p, Pretrained)]
    return {
        "float32": _largest_difference(predictors, plain, moved),
        "float64": _largest_difference(exact, wide, wide_moved) if exact else None,
        "networks": half,
        "max_condition": MAX_CONDITION,
    }


def _largest_difference(predictors: Sequence[Predictor], U: Dataset, gU: Dataset) -> float:
    ends = ((each.predict(gU.network), each.predict(U.network)) for each in predictors)
    return max(float((moved - plain).abs().max()) for moved, plain in ends)
