"""What is kept of one trained predictor: a folder that says everything about it, read and written.

RUN/
  run.json             what was trained on what, how, and how well it does
  predictions.parquet  one row for each seed and network of the validation and test parts
  log.jsonl            one line an epoch (neural predictors)
  seed-K/              the predictor itself, for each seed
  seen.safetensors     what the training networks look like
  trained_on.safetensors  marks by which they are known again
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from transformer_nfn.errors import TransformerNFNError, missing_extra
from transformer_nfn.io.files import atomic_file, read_parquet, write_text
from transformer_nfn.io.json_fields import read_object
from transformer_nfn.prediction.record_check import check_record
from transformer_nfn.zoo.store.index import CONFIGURATION

FORMAT = 1
RUN_FILE = "run.json"
PREDICTIONS_FILE = "predictions.parquet"
LOG_FILE = "log.jsonl"
__all__ = [
    "CONFIGURATION", "FORMAT", "LOG_FILE", "PREDICTIONS_FILE", "RUN_FILE", "RunError", "RunRecord",
    "find_runs", "read_predictions", "write_predictions",
]  # fmt: skip


class RunError(TransformerNFNError):
    """A run folder that cannot be read, or an experiment that cannot be run."""


@dataclass(frozen=True)
class RunRecord:
    """What ``run.json`` holds.

    Attributes:
        model: name of the predictor, as in `transformer_nfn.prediction.predictors.PREDICTORS`.
        zoo: task, name, number of networks, architecture (of a mixed zoo ``architectures``, by
            the name of their kind), and ``seeds``: ``one`` for all its networks, one ``each``, or
            ``unknown``; records from before that lack it.
        selection: which networks: ``percent``, ``min_accuracy``, counts ``train``, ``val``,
            ``test``, ``augment`` (None, or the range of the entries), and ``max_train`` where
            those to train on are a subset; of a mixed zoo also the counts by ``kinds``, and the
            names of those ``left_out``.
        protocol: how it was trained.
        seeds: for each seed a dict with ``seed, tau, tau_low, tau_high, r2, mae, val_tau,
            best_epoch, seconds``.
        summary: ``tau, tau_se, r2, mae, coverage`` over the seeds; ``tau_together`` of the mean
            of all seeds' predictions, which older records lack; with augmentation also
            ``agreement``, see `transformer_nfn.paper.cells`; of a mixed zoo the same by
            ``kinds``, for kinds ``left_out`` of training, and ``widening``, see `known_sizes`.
        num_parameters: of the predictor, None for trees.
        status: ``done``, or why there is no result (``not enough networks: …``).
        table: which table and cell this belongs to, if any: ``table, row, column``.
        format: version of this file.
    """

    model: str
    zoo: Mapping[str, Any]
    selection: Mapping[str, Any]
    protocol: Mapping[str, Any]
    seeds: list[dict[str, Any]] = field(default_factory=list)
    summary: Mapping[str, Any] = field(default_factory=dict)
    num_parameters: int | None = None
    status: str = "done"
    table: Mapping[str, Any] | None = None
    format: int = FORMAT

    def check_finished(self, where: object) -> None:
        """Refuses a run without predictors; ``where`` is what the error calls it."""
        if self.status != "done" or not self.seeds:
            raise RunError(f"'{where}' holds no predictor: {self.status}")

    @property
    def architectures(self) -> list[Mapping[str, Any]]:
        """The kinds of networks it was trained on, often one; refuses a record without them."""
        if "architectures" in self.zoo:
            left_out = self.selection.get("left_out", [])
            every = self.zoo["architectures"].items()
            kinds = [sizes for name, sizes in every if name not in left_out]
        else:
            kinds = [self.zoo["architecture"]] if "architecture" in self.zoo else []
        if not kinds:
            raise RunError("the run's record lacks 'zoo.architecture', the networks it can read")
        return kinds

    @property
    def radius(self) -> float:
        """Half the width of its intervals; refuses a record without it."""
        if "radius" not in self.summary:
            raise RunError("the run's record lacks 'summary.radius', the width of its intervals")
        return float(self.summary["radius"])

    def write(self, folder: Path) -> None:
        """Writes ``run.json``, beside first and then renamed."""
        write_text(folder / RUN_FILE, json.dumps(asdict(self), indent=1, sort_keys=True))

    @staticmethod
    def read(folder: Path | str) -> RunRecord:
        """Reads a run folder; says what is wrong with anything else."""
        path = Path(folder) / RUN_FILE
        if not path.is_file():
            raise RunError(f"'{folder}' is not a run folder: there is no {RUN_FILE} in it")
        data = read_object(path, RunError)
        if data.get("format") != FORMAT:
            raise RunError(
                f"'{path}' has format {data.get('format')!r}, expected {FORMAT}: another version"
            )
        check_record(data, str(path), RunError)
        try:
            return RunRecord(**data)
        except TypeError as error:
            raise RunError(f"'{path}' is malformed: {error}") from error


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise missing_extra(RunError, "pyarrow", "zoo", "reading predictions") from error
    return pa, pq


def write_predictions(folder: Path, columns: Mapping[str, np.ndarray]) -> None:
    """Writes ``predictions.parquet``.

    Columns: ``seed, split`` (val, test, or left_out for kinds left out of training)``, row, run,
    accuracy, predicted, low, high``, the configuration of the run (``optimizer, learning_rate, l2,
    init_std, dropout, train_fraction``), and for a mixed zoo ``kind``.
    """
    pa, pq = _arrow()
    with atomic_file(folder / PREDICTIONS_FILE) as beside:
        pq.write_table(pa.table(dict(columns)), beside)


def read_predictions(folder: Path) -> dict[str, np.ndarray]:
    """Reads ``predictions.parquet`` as columns."""
    pa, _ = _arrow()
    path = folder / PREDICTIONS_FILE
    try:
        table = read_parquet(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise RunError(f"'{path}' is not readable: {error}") from error
    return {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}


def find_runs(folders: list[Path]) -> Iterator[Path]:
    """Every run folder in or below the given ones, in order."""
    for folder in folders:
        if not folder.is_dir():
            raise RunError(f"there is no folder '{folder}'")
        found = sorted(path.parent for path in folder.rglob(RUN_FILE))
        if not found:
            raise RunError(f"there are no runs in '{folder}'")
        yield from found
