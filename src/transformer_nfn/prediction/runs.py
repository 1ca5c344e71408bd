"""Run folders: the record, predictions and log of one trained predictor.

RUN/
  run.json             model, zoo, selection, protocol, results, and a checksum of every other file
  predictions.parquet  one row for each seed and network of the validation and test parts
  log.jsonl            one line per epoch (neural predictors)
  seed-K/              the predictor of each seed
  class-K/             the run of each class, where classes are predicted
  training_distance.safetensors  features of the training networks
  trained_on.safetensors         digests by which training networks are recognised
  guard.safetensors    guard against damaged networks, if one was fitted
  own_guard.safetensors          the same for checkpoints of any family
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn import __version__
from transformer_nfn.errors import CheckpointError, RunError
from transformer_nfn.io.files import (
    file_sha256,
    import_arrow,
    is_left_over,
    read_parquet,
    read_regular,
    write_parquet,
    write_text,
)
from transformer_nfn.io.json_fields import Fields, json_text, parse_object, read_object
from transformer_nfn.io.tensor_files import TensorInfo, read_tensors
from transformer_nfn.known_tasks import SEED_KINDS, UNKNOWN_SEEDS
from transformer_nfn.models.predictor import ARRAYS, BUILT, CHECKPOINTS
from transformer_nfn.models.stored_state import check_state
from transformer_nfn.notebook import to_html
from transformer_nfn.prediction.metrics import kendall_tau
from transformer_nfn.prediction.target import Target
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.sizes import check_sizes
from transformer_nfn.zoo.store.arrays import array_layout
from transformer_nfn.zoo.store.index import CONFIGURATION

FORMAT = 1
RUN_FILE = "run.json"
PREDICTIONS_FILE = "predictions.parquet"
LOG_FILE = "log.jsonl"
DISTANCE_FILE = "training_distance.safetensors"
DIGESTS_FILE = "trained_on.safetensors"
GUARD_FILE, OWN_GUARD_FILE = "guard.safetensors", "own_guard.safetensors"
_FILES = (PREDICTIONS_FILE, LOG_FILE, DISTANCE_FILE, DIGESTS_FILE, GUARD_FILE, OWN_GUARD_FILE)
_FOLDER = re.compile(r"(?:class-(\d+)/)?(?:seed-(\d+)/)?")
"""Folders of a class and of a seed, or nothing, before the name of a file."""
LOG_NUMBERS = ("loss", "val_tau", "lr")
ENSEMBLE_TAU = "tau_together"
"""Key of a record's summary: τ of the mean prediction over seeds."""
IDENTITY = "identity"
"""Key of a record's protocol: digest of the training, see `experiment.training_identity`."""
SCORES = ("tau", "tau_together", "r2", "mae", "accuracy", "auroc", "calibration_error", "coverage")
"""Numbers of a record's summary that notebooks show."""
PARTS = ("train", "val", "test")
MAX_WIDENING = 1e6
__all__ = [
    "CONFIGURATION", "DIGESTS_FILE", "DISTANCE_FILE", "ENSEMBLE_TAU", "FORMAT", "GUARD_FILE",
    "IDENTITY", "LOG_FILE", "OWN_GUARD_FILE", "PREDICTIONS_FILE", "RUN_FILE", "RunError",
    "RunRecord", "ensemble_tau", "find_runs", "predictions_on_test", "read_log",
    "read_predictions", "read_state", "write_predictions",
]  # fmt: skip


@dataclass(frozen=True)
class RunRecord:
    """Contents of ``run.json``.

    Attributes:
        model: name of the predictor, see `transformer_nfn.models.predictor`, or of a user's class.
        zoo: task, name, number of networks, ``sha256`` over its index, ``architecture`` (of a mixed
            zoo ``architectures``, by size name), and ``seeds``: ``one`` for all networks, one
            ``each``, or ``unknown``; of checkpoints of any family ``families``, with the number of
            each, of arrays their ``layout``, and no architecture.
        selection: ``percent``, ``min_accuracy``, the counts ``train``, ``val`` and ``test``,
            ``augment`` (None, or the bound on the entries), ``max_train`` for a subset,
            ``split_seed`` where it is not 0, ``split`` where it is not by run; of a mixed
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
        files: sha256 of every other file of the run, by its path in the folder.
        made: how: ``version`` of this package and ``commit`` of its checkout, ``device``, and the
            ``updates`` of a neural predictor.
        code: of a user's class, `transformer_nfn.models.own_code.Code`; None for ours.
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
    files: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, Any] | None = None
    code: Mapping[str, str] | None = None
    format: int = FORMAT

    def check_finished(self, where: object) -> None:
        """Reject a run without predictors; ``where`` names it in the error."""
        if self.status != "done" or not self.seeds:
            raise RunError(f"'{where}' holds no predictor: {self.status}")

    @property
    def kind(self) -> str:
        """Kind of the zoo, one of `models.predictor.ZOOS`."""
        if "families" in self.zoo:
            return CHECKPOINTS
        return ARRAYS if "layout" in self.zoo else BUILT

    @property
    def architectures(self) -> list[Mapping[str, Any]]:
        """Network sizes in the training set; none for networks of any family."""
        if "architecture" in self.zoo:
            return [self.zoo["architecture"]]
        left_out = self.selection.get("left_out", [])
        sizes = self.zoo.get("architectures", {}).items()
        return [values for name, values in sizes if name not in left_out]

    @property
    def predicts(self) -> Target:
        """What is predicted."""
        return Target.from_json(self.target, RUN_FILE)

    def _repr_html_(self) -> str:
        """What notebooks show."""
        target = "test_accuracy" if self.target is None else self.target.get("column", "")
        parts = [name for name in PARTS if name in self.selection]
        counts = [f"{self.selection[name]} {name}" for name in parts]
        facts = {"status": self.status, "zoo": self.zoo.get("name", ""), "target": target}
        facts |= {"networks": ", ".join(counts), "seeds": str(len(self.seeds))}
        scores = {
            name: f"{self.summary[name]:.3g}"
            for name in SCORES
            if isinstance(self.summary.get(name), float)
        }
        return to_html(f"Run of {self.model}", {**facts, **scores})

    def write(self, folder: Path) -> RunRecord:
        """Write ``run.json`` atomically, after all other files; the record as it is read."""
        data = asdict(self) | {"files": self._checksums(folder)}
        text = json_text(data, indent=1)  # tensors of a layout keep their order
        write_text(folder / RUN_FILE, text)
        return RunRecord(**json.loads(text))

    @staticmethod
    def read(folder: Path | str) -> RunRecord:
        """Read the record of a run folder; check it field by field, and all files it lists."""
        folder = Path(folder)
        path = folder / RUN_FILE
        if not path.is_file():
            raise RunError(f"'{folder}' is not a run folder: there is no {RUN_FILE} in it")
        data = read_object(path, RunError, strict=True)
        _check_record(data, str(path))
        record = RunRecord(**data)
        found = record._checksums(folder)
        for name, _ in sorted(record.files.items() ^ found.items()):
            if name not in found:
                raise RunError(f"'{folder / name}' is missing: it is in 'files' of '{path}'")
            if name not in record.files:
                raise RunError(f"'{folder / name}' is of another run: it is not in '{path}'")
            raise RunError(f"'{folder / name}' is damaged: another checksum is in '{path}'")
        return record

    def _checksums(self, folder: Path) -> dict[str, str]:
        """Checksum of every file of the run by its path, other than ``run.json``."""
        found, seeds = {}, {None, *(str(row["seed"]) for row in self.seeds)}
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            within = _FOLDER.match(name)
            assert within is not None
            known = (name in _FILES or within[0]) and within[2] in seeds
            if known and path.is_file() and not is_left_over(path.name):
                found[name] = file_sha256(path)
        return found


@cache
def commit() -> str:
    """Commit of the checkout that this package is imported from; empty for an installed one."""
    root = Path(__file__).resolve().parents[3]
    given = os.environ.get("TNFN_COMMIT", "")  # of a copy without its history
    if given or not (root / ".git").exists():
        return given
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def made_here(device: torch.device, updates: int | None) -> dict[str, Any]:
    """`RunRecord.made` of a training by this process."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"version": __version__, "commit": commit(), "device": name, "updates": updates}


def _check_record(data: Mapping[str, Any], where: str) -> None:
    """Check type, range and agreement of all fields that `RunRecord` documents."""
    fields = Fields(data, where, RunError)
    if fields.whole("format") != FORMAT:
        fields.refuse("format", f"{FORMAT}, which this version reads")
    if unknown := sorted({*data} - {*RunRecord.__dataclass_fields__}):
        raise RunError(f"'{where}' has the unknown field '{unknown[0]}'")
    fields.text("model")
    fields.text("status")
    _check_zoo(fields)
    if fields.known("num_parameters"):
        fields.whole("num_parameters")
    if fields.known("table"):
        for name in ("table", "row", "column"):
            fields.inner("table").text(name)
    if fields.known("made"):
        made = fields.inner("made")
        for name in ("version", "commit", "device"):
            made.text(name)
        if made.known("updates"):
            made.whole("updates")
    if fields.known("code"):
        for name in ("reference", "file", "sha256", "version"):
            fields.inner("code").text(name)
    target = Target.from_json(data["target"] if fields.known("target") else None, where)
    files, seeds = fields.inner("files"), fields.each("seeds", Fields.inner)
    for name in files.data:
        files.text(name)
    results = bool(fields.inner("summary").data)
    if results != bool(seeds):
        fields.refuse("seeds" if results else "summary", "the results of every seed")
    if results and data["status"] != "done":
        fields.refuse("status", "'done' of a run with results")
    _check_choices(fields, results)
    if results:
        numbers = [_check_seed(row, target) for row in seeds]
        if len({*numbers}) < len(numbers):
            fields.refuse("seeds", "different seeds")
        _check_kept(fields, numbers, target)
        _check_summary(fields, target)


def _check_zoo(fields: Fields) -> None:
    zoo = fields.inner("zoo")
    if len({"architecture", "architectures", "families", "layout"} & {*zoo.data}) != 1:
        names = "'zoo.architecture', 'zoo.architectures', 'zoo.families' and 'zoo.layout'"
        fields.refuse("zoo", f"an object with one of {names}")
    for name in ("name", "task", *(("sha256",) if "sha256" in zoo.data else ())):
        zoo.text(name)
    for name in ("networks", "runs"):
        zoo.whole(name)
    zoo.choice("seeds", (*SEED_KINDS, UNKNOWN_SEEDS))
    if "families" in zoo.data:
        families = zoo.inner("families")
        for name in families.data:
            families.whole(name, 1)
        if not families.data:
            zoo.refuse("families", "the families of its networks")
    elif "layout" in zoo.data:
        try:
            array_layout(zoo.inner("layout").data)
        except ZooError as error:
            zoo.refuse("layout", f"names of tensors with their shapes ({error})")
    elif "architectures" in zoo.data:
        architectures = zoo.inner("architectures")
        for name in architectures.data:
            check_sizes(architectures.inner(name))
    else:
        check_sizes(zoo.inner("architecture"))


def _check_choices(fields: Fields, results: bool) -> None:
    """Check how networks were selected and predictors trained."""
    selection, protocol, zoo = (fields.inner(name) for name in ("selection", "protocol", "zoo"))
    _check_numbers(selection, "min_accuracy", "augment")
    if selection.known("percent"):
        selection.whole("percent")
    if "split" in selection.data:
        selection.text("split")
    for name, least in (("max_train", 1), ("split_seed", 0)):
        if name in selection.data:
            selection.whole(name, least)
    for name in ("epochs", "batch"):
        protocol.whole(name, 1)
    for name in ("warmup", *({"updates", "patience"} & {*protocol.data})):
        protocol.whole(name)
    _check_numbers(protocol, "lr final_lr" + " clip" * ("clip" in protocol.data))
    if not results:
        return
    for name in PARTS:
        selection.whole(name, 1)
    protocol.inner("options")
    if protocol.known(IDENTITY):
        protocol.text(IDENTITY)
    if "architectures" in zoo.data:
        sizes, kinds = {*zoo.inner("architectures").data}, selection.inner("kinds")
        left_out = {*selection.each("left_out", Fields.text)}
        for size in kinds.data:
            for part in ("left out",) if size in left_out else PARTS:
                kinds.inner(size).whole(part)
        listed = f"'zoo.architectures', {', '.join(sorted(sizes))}"
        if sizes != {*kinds.data}:
            selection.refuse("kinds", f"the sizes of {listed}")
        if not left_out < sizes:
            selection.refuse("left_out", f"some of {listed}")


def _check_seed(row: Fields, target: Target) -> int:
    if target.kind == "class":
        _check_numbers(row, "accuracy calibration_error seconds", "auroc")
    else:
        _check_numbers(row, "tau tau_low tau_high mae seconds", "r2")
        if row.known("best_epoch"):
            row.whole("best_epoch", 1)
            row.number("val_tau")
    return row.whole("seed")


def _check_kept(fields: Fields, seeds: list[int], target: Target) -> None:
    """Check that predictors are kept of all seeds and classes, or of none."""
    found = map(_FOLDER.match, fields.inner("files").data)
    kept = {match.groups() for match in found if match is not None and match[2] is not None}
    outputs = [str(target.classes.index(name)) for name in target.outputs]
    classes: list[str | None] = [*outputs] or [None]
    if kept and kept != {(each, str(seed)) for each in classes for seed in seeds}:
        fields.refuse("seeds", "those of the predictors in 'files', of each class of the target")


def _check_summary(fields: Fields, target: Target) -> None:
    summary, files, zoo = (fields.inner(name) for name in ("summary", "files", "zoo"))
    if target.kind == "class":
        _check_numbers(summary, "accuracy calibration_error chance", "auroc accuracy_se")
        _check_numbers(summary.inner("together"), "accuracy calibration_error", "auroc")
    else:
        _check_numbers(summary, "tau tau_together mae", "r2 tau_se")
    summary.number("coverage", 0.0, 1.0)
    summary.number("level", 0.0, 1.0)
    summary.number("radius", 0.0, math.inf if target.kind == "number" else 1.0)
    if any(name.endswith(DISTANCE_FILE) for name in files.data):
        shift = summary.inner("shift")
        shift.number("usual", 0.0, shift.number("unusual"))
        shift.number("low", most=shift.number("high"))
        shift.number("factor", 1.0)
    if "guarded" in summary.data:
        guarded = summary.inner("guarded")
        _check_numbers(guarded, "tau mae coverage warned", "r2")
        for name in ("train", "val"):
            guarded.inner("damaged").whole(name)
        if "zoo" in guarded.data:
            guarded.text("zoo")
    if "agreement" in summary.data:
        agreement = summary.inner("agreement")
        _check_numbers(agreement, "max_condition", "float32 float64")
        agreement.whole("networks")
    if "architectures" in zoo.data:
        summary.number("tau_within")
        left_out = {*fields.data["selection"]["left_out"]}
        trained = zoo.inner("architectures").data.keys() - left_out
        for name, sizes in (("kinds", trained), ("left_out", left_out)):
            by_size = summary.inner(name)
            if {*by_size.data} != {*sizes}:
                summary.refuse(name, f"figures of {', '.join(sorted(sizes)) or 'no size'}")
            for figures in map(by_size.inner, by_size.data):
                figures.whole("networks")
                _check_numbers(figures, "tau mae", "r2 tau_se")
                if name == "left_out":
                    figures.number("coverage", 0.0, 1.0)
        widening = summary.inner("widening")
        for name in widening.data:
            widening.number(name, 1.0, MAX_WIDENING)


def _check_numbers(fields: Fields, names: str = "", null: str = "") -> None:
    """Check numbers, all of which must be there; those of ``null`` may be null."""
    for name in [*names.split(), *filter(fields.known, null.split())]:
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


def read_state(
    path: Path, shapes: Callable[[dict[str, Tensor]], Mapping[str, tuple[int, ...]]], dtype: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read and check a file of tensors of a run, and its metadata; half precision is widened.

    Args:
        path: the file.
        shapes: of all tensors, given those that are there, which decide the free sizes.
        dtype: of all tensors.
    """
    try:
        tensors, metadata = read_tensors(path)
    except CheckpointError as error:
        raise RunError(f"'{path}' is not readable: {error}") from error
    tensors = {k: w.float() if w.dtype == torch.float16 else w for k, w in tensors.items()}
    expected = {name: TensorInfo(shape, dtype) for name, shape in shapes(tensors).items()}
    check_state(tensors, expected, str(path), RunError)
    return tensors, metadata


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
        where = f"{path}, line {number}"
        try:
            entry = parse_object(line, where, RunError, strict=True)
        except RunError:
            if number == len(lines):
                break
            raise
        fields = Fields(entry, where, RunError)
        for name in ("seed", "epoch"):
            fields.whole(name)
        _check_numbers(fields, null=" ".join(LOG_NUMBERS))  # null where a training diverged
        entries.append(entry)
    return entries
