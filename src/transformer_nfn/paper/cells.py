"""Cells of tables: predictors on choices of networks, trained side by side.

Each cell is a run folder. A cell that is finished is read, one that was interrupted is resumed, so
a list of cells can be filled in several calls, on several machines that share a disk.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from transformer_nfn.models.own_module import declared
from transformer_nfn.models.predictor import CHECKPOINTS, Predictor, find
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
from transformer_nfn.prediction.runs import RUN_FILE, RunError, RunRecord
from transformer_nfn.prediction.training import Execution
from transformer_nfn.processes import worker_pool
from transformer_nfn.ray_cluster import one_core_task, ray_cluster, task_result
from transformer_nfn.zoo import Zoo

NOT_ENOUGH = "not enough networks"
RETRIES = 2
MAX_CONDITION = 1e4
TEST_PART = 2
"""Seed of the group elements of test networks; those of the other parts are 0 and 1."""
LIBRARIES = ("transformer_nfn.prediction.experiment",)
Told = Callable[["Cell", dict[str, Any]], None]
"""Called with a cell and its events, of which the last has its ``result``."""


@dataclass(frozen=True)
class Cell:
    """One cell of a table: a predictor on a choice of networks.

    Attributes:
        topic, row, column: its place: topic of the table, and the keys of row and column; without a
            topic it is in no table.
        model: name of the predictor.
        options: of the predictor.
        selection: which networks of the zoo; with ``all_checkpoints`` predictors that use other
            checkpoints of the training runs are given these.
        bound: bound on the entries of the augmenting group elements; 0 for every network twice
            unchanged, None for no augmentation.
        seeds: of the predictor.
        epochs: in place of the predictor's own.
        trained: False where the cell only counts parameters.
        keep: whether its predictors are kept.
    """

    topic: str
    row: str
    column: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    selection: Selection = field(default_factory=lambda: Selection(all_checkpoints=True))
    bound: float | None = None
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    epochs: int | None = None
    trained: bool = True
    keep: bool = False

    def with_selection(self, **changes: Any) -> Cell:
        """The same predictor on other networks."""
        return replace(self, selection=replace(self.selection, **changes))

    @property
    def networks(self) -> Selection:
        """Networks that the predictor reads."""
        every = self.selection.all_checkpoints and find(self.model).every_checkpoint
        return replace(self.selection, all_checkpoints=every)

    @property
    def folder(self) -> str:
        """Name of its run folder."""
        split = f"-split{self.selection.split_seed}" if self.selection.split_seed else ""
        words = "-".join(filter(None, (self.topic, self.row, self.column))) + split
        return re.sub(r"[^\w.-]", "_", words.replace("+", "-").replace(" ", ""))


def cell_networks(
    path: Path, selection: Selection, bound: float | None, model: str, device: str
) -> Parts | SizeGroups:
    """The networks of a cell, on the device."""
    parts = load_networks(Zoo.open(path), selection, model)
    if bound is not None and isinstance(parts, Parts):
        parts = augmented(parts, bound)
    return parts.to(device)


def fill_cell(
    zoo_path: Path,
    cell: Cell,
    out: Path,
    *,
    device: str = "cpu",
    read: Callable[..., Parts | SizeGroups] = cell_networks,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> RunRecord:
    """Train and measure one cell, or read it if it is finished.

    Args:
        zoo_path: of the zoo.
        cell: to fill.
        out: folder of all cells.
        device: to train on.
        read: `cell_networks`, or a cached form of it, so that cells of a column read once.
        report: progress callback.
    """
    declared(cell.model)  # in a process of its own nobody has imported a user's class
    zoo = Zoo.open(zoo_path)
    about, chosen = describe_zoo(zoo), cell.networks
    protocol = Protocol.of(cell.model, cell.epochs, zoo=about)
    folder = out / "cells" / cell.folder
    table = {"table": cell.topic, "row": cell.row, "column": cell.column} if cell.topic else None
    selection = chosen.to_json(augment=cell.bound)
    untrained = RunRecord(cell.model, about, selection, protocol.to_json(), table=table)
    try:
        # What built networks are read for does not depend on the predictor: all share them.
        reader = cell.model if zoo.kind == CHECKPOINTS else ""
        parts = read(zoo_path, chosen, cell.bound, reader, device)
    except RunError as error:
        if not str(error).startswith(NOT_ENOUGH):
            raise
        return replace(untrained, status=str(error)).write(folder)
    if not cell.trained:
        model = predictor_builder(cell.model, SizeGroups.of(parts).train[0], dict(cell.options))()
        return replace(untrained, num_parameters=model.num_parameters).write(folder)

    def measure(predictors: list[Predictor]) -> dict[str, Any]:
        if not cell.bound:
            return {}
        return {"agreement": agreement(predictors, SizeGroups.of(parts).test[0], cell.bound)}

    return train_run(
        about,
        parts,
        Experiment(cell.model, cell.seeds, protocol, cell.options, selection, table, cell.keep),
        folder,
        measure=measure,
        # On one core seeds that share their steps are no faster, those of the MLP slower.
        execution=Execution(report=report, together=device != "cpu" or torch.get_num_threads() > 1),
    )


def fill_cells(
    zoo_path: Path,
    cells: Sequence[Cell],
    out: Path,
    *,
    device: str = "cpu",
    jobs: int = 1,
    minutes: float | None = None,
    engine: str = "local",
    address: str | None = None,
    told: Told | None = None,
) -> list[RunRecord]:
    """Fill every cell; records in the order of the cells, without those left for want of time.

    Args:
        zoo_path: of the zoo.
        cells: to fill.
        out: folder of all cells.
        device: to train on.
        jobs: cells at a time, on one GPU or on cores; each in a process of its own if several.
        minutes: after which no other cell is begun.
        engine: ``local``, or ``ray`` for a task a cell on a cluster.
        address: of the Ray cluster; None starts one here.
        told: progress callback.
    """
    if engine not in ("local", "ray"):
        raise RunError(f"engine must be 'local' or 'ray', found '{engine}'")
    end = None if minutes is None else time.monotonic() + 60 * minutes
    found: dict[str, RunRecord] = {}
    if engine == "ray":
        filled = _on_ray(zoo_path, cells, out, device, address)
    else:
        filled = _here(zoo_path, cells, out, device, end, jobs, told)
    for cell, record in filled:
        found[cell.folder] = record
        if told is not None:
            tau = f"τ {record.summary['tau']:.3f}" if "tau" in record.summary else record.status
            told(cell, {"result": tau})
    return [found[cell.folder] for cell in cells if cell.folder in found]


Filled = Iterator[tuple[Cell, RunRecord]]
_read_once = lru_cache(maxsize=1)(cell_networks)


def _here(
    zoo_path: Path, cells: Sequence[Cell], out: Path, device: str, end: float | None, jobs: int,
    told: Told | None,
) -> Filled:  # fmt: skip
    """One after another in this process, or side by side in several."""
    fill = partial(_fill_in_time, zoo_path, out=out, device=device, end=end)
    with worker_pool(LIBRARIES, jobs) as pool:
        if pool is None:
            _read_once.cache_clear()  # the zoo may be another one by now
            for cell in cells:
                report = None if told is None else partial(told, cell)
                if (record := fill(cell, report=report)) is not None:
                    yield cell, record
            return
        waiting = {pool.submit(fill, cell): cell for cell in cells}
        for done in as_completed(waiting):
            if (record := done.result()) is not None:
                yield waiting[done], record


def _fill_in_time(
    zoo_path: Path, cell: Cell, out: Path, device: str, end: float | None,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> RunRecord | None:  # fmt: skip
    """Fill a cell if there is time for it, or it is there already."""
    there = (out / "cells" / cell.folder / RUN_FILE).is_file()
    if end is None or time.monotonic() < end or there:
        return fill_cell(zoo_path, cell, out, device=device, read=_read_once, report=report)
    return None


def _on_ray(
    zoo_path: Path, cells: Sequence[Cell], out: Path, device: str, address: str | None
) -> Filled:
    """As many at once as the cluster has room for; a worker that dies is replaced and resumes."""
    with ray_cluster(address, RunError) as ray:
        task = one_core_task(ray, fill_cell, int("cuda" in device), RETRIES)
        where = zoo_path.resolve(), out.resolve()
        waiting = {task.remote(where[0], cell, where[1], device=device): cell for cell in cells}
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
    moved: dict[str, torch.Tensor] = {}
    for i, block in enumerate(data.network.blocks()):
        element = data.block_space.group.random(
            generator,
            batch=len(data),
            entries=(-bound, bound),
            max_condition=MAX_CONDITION,
            device=data.accuracy.device,
        )
        moved |= {f"blocks.{i}.{name}": w[:, 0] for name, w in element.act(block).items()}
    return replace(data, network=data.network.with_weights(moved))


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
    wide = replace(plain, network=plain.network.to(torch.float64))
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
