"""One cell of a table: which model on which networks, and how it is filled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformer_nfn.paper.agreement import agreement
from transformer_nfn.paper.augmentation import augmented
from transformer_nfn.prediction.data import (
    Parts,
    Selection,
    SizeGroups,
    describe_zoo,
    load_networks,
)
from transformer_nfn.prediction.experiment import Experiment, train_run
from transformer_nfn.prediction.predictors import ALL_CHECKPOINTS, NEURAL, Predictor, module_builder
from transformer_nfn.prediction.runs import RunError, RunRecord
from transformer_nfn.prediction.strategies import Protocol
from transformer_nfn.prediction.training import Execution

NOT_ENOUGH = "not enough networks"


@dataclass(frozen=True)
class Cell:
    """One cell of a table: which model, on which networks.

    Attributes:
        table, row, column: where it stands.
        model: which predictor.
        options: of the model.
        min_accuracy: networks at least this accurate.
        bound: entries of the augmenting group elements; 0 for every network twice as it is,
            None for no augmentation.
        max_train: at most this many networks to train on; None for all.
        leave_out: kinds of a mixed zoo that are not trained on.
        trained: False where the cell is about the size of the model alone.
    """

    table: str
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
        """The name of its run folder."""
        words = f"{self.row}-{self.column}".replace("+", "-").replace(" ", "")
        safe = "".join(c if c.isalnum() or c in "-._" else "_" for c in words)
        return f"{self.table}-{safe}"


class PartsCache:
    """The networks of the last selection, so that all models of a column read them once."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._parts: Parts | SizeGroups | None = None

    def get(self, path: Path, cell: Cell, percent: int | None, device: str) -> Parts | SizeGroups:
        """The parts a cell speaks of, on the device."""
        from transformer_nfn.zoo import open_zoo

        selection = cell.selection(percent)
        key = (path, selection, cell.bound, device)
        if key != self._key or self._parts is None:
            parts = load_networks(open_zoo(path), selection)
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
    """Trains and measures one cell, or reads it if it is there already."""
    from transformer_nfn.zoo import open_zoo

    protocol = Protocol.of(cell.model, epochs)
    folder = out / "cells" / cell.folder
    table = {"table": cell.table, "row": cell.row, "column": cell.column}
    about = describe_zoo(open_zoo(zoo_path))
    selection = cell.selection(percent).to_json(augment=cell.bound)
    try:
        parts = (cache or PartsCache()).get(zoo_path, cell, percent, device)
    except RunError as error:
        if not str(error).startswith(NOT_ENOUGH):
            raise
        record = RunRecord(
            cell.model, about, selection, protocol.to_json(), status=str(error), table=table
        )
        record.write(folder)
        return record
    if not cell.trained:
        module = module_builder(cell.model, SizeGroups.of(parts).train[0], cell.options)()
        count = sum(p.numel() for p in module.parameters())
        record = RunRecord(
            cell.model, about, selection, protocol.to_json(), num_parameters=count, table=table
        )
        record.write(folder)
        return record
    # Trees do not know the GPU; what they read lies in main memory.
    if cell.model not in NEURAL:
        parts = parts.to("cpu")

    def measure(predictors: list[Predictor]) -> dict[str, Any]:
        if not cell.bound:
            return {}
        return {"agreement": agreement(predictors, SizeGroups.of(parts).test[0], cell.bound)}

    return train_run(
        about,
        parts,
        Experiment(
            cell.model, seeds, protocol, cell.options, selection, table, keep=False
        ),
        folder,
        measure=measure,
        execution=Execution(report=report),
    )
