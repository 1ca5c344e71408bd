"""Run folders: the record, predictions and log of one trained predictor.

RUN/
  run.json             model, zoo, selection, protocol and results
  predictions.parquet  one row for each seed and network of the validation and test parts
  log.jsonl            one line per epoch (neural predictors)
  seed-K/              the predictor of each seed
  training_distance.safetensors  features of the training networks
  trained_on.safetensors         digests by which training networks are recognised
  guard.safetensors    guard against damaged networks, if one was fitted
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from transformer_nfn.errors import TransformerNFNError, needs_extra
from transformer_nfn.io.files import (
    import_arrow,
    read_parquet,
    read_regular,
    write_parquet,
    write_text,
)
from transformer_nfn.io.json_fields import Fields, read_object
from transformer_nfn.notebook import to_html
from transformer_nfn.prediction.metrics import kendall_tau
from transformer_nfn.zoo.sizes import check_sizes
from transformer_nfn.zoo.store.index import CONFIGURATION

FORMAT = 1
RUN_FILE = "run.json"
PREDICTIONS_FILE = "predictions.parquet"
LOG_FILE = "log.jsonl"
LOG_NUMBERS = ("loss", "val_tau", "lr")
ENSEMBLE_TAU = "tau_together"
"""Key of a record's summary: τ of the mean prediction over seeds."""
IDENTITY = "identity"
"""Key of a record's protocol: digest of the training, see `experiment.training_identity`."""
SCORES = ("tau", "tau_together", "r2", "mae", "accuracy", "auroc", "calibration_error", "coverage")
"""Numbers of a record's summary that notebooks show."""
MAX_WIDENING = 1e6
SHIFT = ("usual", "unusual", "factor", "low", "high")
"""Numbers of a record's ``summary.shift``, see `recipe_shift.RecipeShift`."""
NULLABLE = ("best_epoch", "tau_se", "accuracy_se")
"""Numbers of a record that trees, and runs of one seed, do not have."""
__all__ = [
    "CONFIGURATION", "ENSEMBLE_TAU", "FORMAT", "IDENTITY", "LOG_FILE", "PREDICTIONS_FILE",
    "RUN_FILE", "RunError", "RunRecord", "ensemble_tau", "find_runs", "predictions_on_test",
    "read_log", "read_predictions", "write_events", "write_predictions",
]  # fmt: skip


class RunError(TransformerNFNError):
    """A run folder that cannot be read, or an experiment that cannot be run."""


@dataclass(frozen=True)
class RunRecord:
    """Contents of ``run.json``.

    Attributes:
        model: name of the predictor, one of `transformer_nfn.prediction.predictors.PREDICTORS`.
        zoo: task, name, number of networks, ``architecture`` (of a mixed zoo ``architectures``, by
            size name), and ``seeds``: ``one`` for all networks, one ``each``, or ``unknown``; of
            checkpoints of any family ``families``, with the number of each, and no architecture.
        selection: ``percent``, ``min_accuracy``, the counts ``train``, ``val`` and ``test``,
            ``augment`` (None, or the bound on the entries), ``max_train`` for a subset; of a mixed
            zoo also the counts by ``kinds`` (sizes) and the names ``left_out``.
        protocol: training protocol, model options and training identity.
        seeds: for each seed ``seed, tau, tau_low, tau_high, r2, mae, val_tau, best_epoch,
            seconds``.
        summary: ``tau, tau_se, r2, mae, coverage`` over the seeds; ``tau_together`` of the mean
            prediction; with augmentation ``agreement`` (`transformer_nfn.paper.cells`); of a
            mixed zoo figures by ``kinds``, for the sizes ``left_out``, and ``widening``
            (`transformer_nfn.prediction.uncertainty`).
        num_parameters: of the predictor, None for trees.
        status: ``done``, or why there is no result (``not enough networks: …``).
        table: cell that this run fills, if any: topic of the ``table`` (`paper.numbers.TOPICS`),
            ``row`` and ``column``.
        target: what is predicted, `transformer_nfn.prediction.target.Target.to_json`; None for the
            test accuracy. For classes, seeds and summary have ``accuracy, auroc,
            calibration_error`` and the folder holds a run for each class, ``class-0`` and on.
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
    target: Mapping[str, Any] | None = None
    format: int = FORMAT

    def check_finished(self, where: object) -> None:
        """Reject a run without predictors; ``where`` names it in the error."""
        if self.status != "done" or not self.seeds:
            raise RunError(f"'{where}' holds no predictor: {self.status}")

    @property
    def architectures(self) -> list[Mapping[str, Any]]:
        """Network sizes in the training set."""
        if "architectures" in self.zoo:
            left_out = self.selection.get("left_out", [])
            architectures = self.zoo["architectures"].items()
            sizes = [values for name, values in architectures if name not in left_out]
        else:
            sizes = [self.zoo["architecture"]] if "architecture" in self.zoo else []
        if not sizes:
            raise RunError("the run's record lacks 'zoo.architecture', the networks it can read")
        return sizes

    @property
    def radius(self) -> float:
        """Half the width of the prediction intervals."""
        if "radius" not in self.summary:
            raise RunError("the run's record lacks 'summary.radius', the width of its intervals")
        return float(self.summary["radius"])

    def _repr_html_(self) -> str:
        """What notebooks show."""
        target = "test_accuracy" if self.target is None else self.target.get("column", "")
        parts = [name for name in ("train", "val", "test") if name in self.selection]
        counts = [f"{self.selection[name]} {name}" for name in parts]
        facts = {"status": self.status, "zoo": self.zoo.get("name", ""), "target": target}
        facts |= {"networks": ", ".join(counts), "seeds": str(len(self.seeds))}
        scores = {
            name: f"{self.summary[name]:.3g}"
            for name in SCORES
            if isinstance(self.summary.get(name), float)
        }
        return to_html(f"Run of {self.model}", {**facts, **scores})

    def write(self, folder: Path) -> None:
        """Write ``run.json`` atomically."""
        write_text(folder / RUN_FILE, json.dumps(asdict(self), indent=1, sort_keys=True))

    @staticmethod
    def read(folder: Path | str) -> RunRecord:
        """Read and validate the record of a run folder."""
        path = Path(folder) / RUN_FILE
        if not path.is_file():
            raise RunError(f"'{folder}' is not a run folder: there is no {RUN_FILE} in it")
        data = read_object(path, RunError)
        if data.get("format") != FORMAT:
            raise RunError(
                f"'{path}' has format {data.get('format')!r}, expected {FORMAT}: another version"
            )
        _check_record(data, str(path))
        try:
            return RunRecord(**data)
        except TypeError as error:
            raise RunError(f"'{path}' is malformed: {error}") from error


def _check_record(data: Mapping[str, Any], where: str) -> None:
    """Validate the types of all fields documented in `RunRecord`."""
    fields = Fields(data, where, RunError)
    fields.text("model")
    if "status" in data:
        fields.text("status")
    fields.inner("protocol")
    selection, zoo = fields.inner("selection"), fields.inner("zoo")
    for name in ("name", "task"):
        if name in zoo.data:
            zoo.text(name)
    if "families" in zoo.data:
        families = zoo.inner("families")
        for name in families.data:
            families.whole(name)
    if "architecture" in zoo.data:
        check_sizes(zoo.inner("architecture"))
    if "architectures" in zoo.data:
        architectures = zoo.inner("architectures")
        for name in architectures.data:
            check_sizes(architectures.inner(name))
        if "left_out" in selection.data:
            selection.items("left_out")
    if fields.has("num_parameters"):
        fields.whole("num_parameters")
    for name in ("table", "target"):
        if fields.has(name):
            fields.inner(name)
    for row in fields.inner_items("seeds") if "seeds" in data else []:
        row.whole("seed")
        _check_numbers(row, "tau tau_low tau_high r2 mae seconds val_tau best_epoch")
        _check_numbers(row, "accuracy auroc calibration_error")
    if "summary" in data:
        widest = math.inf if fields.has("target") else 1.0
        _check_summary(fields.inner("summary"), widest)


def _check_summary(summary: Fields, widest: float) -> None:
    _check_numbers(summary, "tau tau_se tau_together r2 mae coverage")
    _check_numbers(summary, "accuracy accuracy_se auroc calibration_error chance")
    for name, most in (("level", 1.0), ("radius", widest)):
        if name in summary.data:
            summary.number(name, 0.0, most)
    for name in ("kinds", "left_out"):
        if name in summary.data:
            by_size = summary.inner(name)
            for figures in map(by_size.inner, by_size.data):
                figures.whole("networks")
                _check_numbers(figures, "tau tau_se r2 mae coverage")
    if "widening" in summary.data:
        widening = summary.inner("widening")
        for name in widening.data:
            widening.number(name, 1.0, MAX_WIDENING)
    if "shift" in summary.data:
        shift = summary.inner("shift")
        shift.number("usual", 0.0, shift.number("unusual"))
        shift.number("low", most=shift.number("high"))
        shift.number("factor", 1.0)


def _check_numbers(fields: Fields, names: str) -> None:
    """Check numbers that may be missing; a single seed has NaN or null as its standard error."""
    for name in names.split():
        value = fields.data.get(name)
        missing = value is None if name in NULLABLE else name not in fields.data
        if not missing and not (isinstance(value, float) and math.isnan(value)):
            fields.number(name)


def find_runs(folders: list[Path]) -> Iterator[Path]:
    """Yield every run folder in or below the given ones, sorted; none inside another."""
    for folder in folders:
        if not folder.is_dir():
            raise RunError(f"there is no folder '{folder}'")
        runs = sorted(path.parent for path in folder.rglob(RUN_FILE))
        if not runs:
            raise RunError(f"there are no runs in '{folder}'")
        # The runs of classes lie in the run of all of them.
        yield from (run for run in runs if not {*run.parents} & {*runs})


def write_predictions(folder: Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write ``predictions.parquet``.

    Columns: ``seed, split`` (val, test or left_out)``, row, run, accuracy, predicted, low, high``,
    the hyperparameters of the run (`CONFIGURATION`), and for a mixed zoo ``kind`` (the size).
    """
    write_parquet(folder / PREDICTIONS_FILE, columns, RunError)


def read_predictions(folder: Path) -> dict[str, np.ndarray]:
    """Read ``predictions.parquet`` as columns."""
    pa, _ = import_arrow(RunError, "reading predictions")
    path = folder / PREDICTIONS_FILE
    try:
        table = read_parquet(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise RunError(f"'{path}' is not readable: {error}") from error
    return {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}


def predictions_on_test(columns: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return true accuracies ``[n]`` and predictions ``[seeds, n]`` of the test networks.

    Args:
        columns: of ``predictions.parquet``; every seed has the same networks in the same order.
    """
    for name in ("seed", "split", "accuracy", "predicted"):
        if name not in columns:
            raise RunError(f"predictions have no column '{name}'")
    tested = columns["split"] == "test"
    seeds = list(dict.fromkeys(columns["seed"][tested]))
    if not seeds:
        raise RunError("predictions have no rows of the split 'test'")
    try:
        accuracy, predicted = (
            [columns[name][tested & (columns["seed"] == seed)].astype(float) for seed in seeds]
            for name in ("accuracy", "predicted")
        )
    except (TypeError, ValueError) as error:
        raise RunError(f"predictions are not all numbers ({error})") from error
    if any(not np.array_equal(accuracy[0], other) for other in accuracy):
        raise RunError("predictions of the seeds are not of the same test networks")
    return accuracy[0], np.stack(predicted)


def ensemble_tau(columns: Mapping[str, np.ndarray]) -> float:
    """Kendall's τ of the mean prediction over seeds on the test set, see `predictions_on_test`."""
    accuracy, predicted = predictions_on_test(columns)
    return kendall_tau(accuracy, predicted.mean(0))


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read a training log: one object per line with ``seed``, ``epoch`` and `LOG_NUMBERS`.

    An incomplete last line, as a killed run leaves it, is ignored.
    """
    try:
        lines = read_regular(path).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"'{path}' is not readable: {error}") from error
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise RunError(f"'{path}', line {number}: {error}") from error
        fields = Fields(entry, f"{path}, line {number}", RunError)
        for name in ("seed", "epoch"):
            fields.whole(name)
        for name in LOG_NUMBERS:
            if type(entry.get(name)) is not float:  # NaN where a training diverged
                fields.number(name)
        entries.append(entry)
    return entries


def write_events(run: Path) -> Path:
    """Write the log of a run as TensorBoard events, ``RUN/tensorboard/seed-K``."""
    with needs_extra(RunError, "tensorboard", "tensorboard", "writing TensorBoard events"):
        from torch.utils.tensorboard import SummaryWriter
    log = run / LOG_FILE
    if not log.is_file():
        raise RunError(f"'{run}' has no {LOG_FILE}: trees have no epochs to show")
    lines = read_log(log)
    out = run / "tensorboard"
    for seed in sorted({line["seed"] for line in lines}):
        with SummaryWriter(str(out / f"seed-{seed}")) as writer:
            for line in (x for x in lines if x["seed"] == seed):
                for key in LOG_NUMBERS:
                    writer.add_scalar(key, line[key], line["epoch"])
    return out
