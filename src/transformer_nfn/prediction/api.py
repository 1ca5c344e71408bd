"""Training a predictor on a zoo: what ``tnfn train`` does, as one function."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_nfn.errors import RunError
from transformer_nfn.models import Tabular
from transformer_nfn.models.own_module import declared
from transformer_nfn.models.predictor import (
    CHECKPOINTS,
    ZOO_TEXTS,
    find,
    known_variants,
    variant_of,
)
from transformer_nfn.prediction.data import (
    PERCENT,
    DamagedNetworks,
    Parts,
    Selection,
    describe_zoo,
    load_damaged,
    load_networks,
)
from transformer_nfn.prediction.evaluate import evaluate
from transformer_nfn.prediction.experiment import Experiment, check_networks, train_run
from transformer_nfn.prediction.predict import Networks, Prediction, predict
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.runs import RunRecord
from transformer_nfn.prediction.target import ACCURACY_COLUMN
from transformer_nfn.prediction.training import SAVE_SECONDS, Execution, Report
from transformer_nfn.zoo import Zoo
from transformer_nfn.zoo.damage import parse_damages

SEEDS = 5


@dataclass(frozen=True)
class RunFolder:
    """A trained predictor: its folder and record.

    Attributes:
        folder: as ``tnfn predict`` takes it.
        record: what `run.json` holds.
    """

    folder: Path
    record: RunRecord

    @property
    def tau(self) -> float:
        """Kendall's τ on the test part, the mean over seeds."""
        return float(self.record.summary["tau"])

    def predict(self, networks: Networks, **options: Any) -> list[Prediction]:
        """Predict networks, see `transformer_nfn.prediction.predict.predict`."""
        return predict(self.folder, networks, **options)

    def evaluate(self, zoo: Path | str, **options: Any) -> dict[str, Any]:
        """Measure on another zoo, see `transformer_nfn.prediction.evaluate.evaluate`."""
        return evaluate(self.folder, zoo, **options)


def train(
    zoo: Path | str | Zoo,
    predictor: str | type | Tabular = "whole_network",
    *,
    out: Path | str | None = None,
    seeds: int = SEEDS,
    variant: str | None = None,
    options: Mapping[str, Any] | None = None,
    target: str = ACCURACY_COLUMN,
    percent: int | None = PERCENT,
    split: str = "run",
    split_seed: int = 0,
    min_accuracy: float = 0.0,
    leave_out: Sequence[str] = (),
    damaged: Path | str | None = None,
    hold_out: str | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    device: str = "cpu",
    save_every: float = SAVE_SECONDS,
    report: Report | None = None,
) -> RunFolder:
    """Train a predictor of accuracy, or another target, on a zoo.

    Args:
        zoo: a zoo, its folder or its name.
        predictor: a name, ``FILE.py:CLASS``, ``MODULE:CLASS``, a class, or a `Tabular`.
        out: the run folder; None for a temporary one.
        seeds: how many to train.
        variant: of the predictor, such as ``authors``: options by name.
        options: of the predictor.
        target: column of the zoo's table to predict.
        percent: which checkpoint of each run; None for all.
        split: what stays in one part, a ``run`` or a ``checkpoint``.
        split_seed: of the split into parts.
        min_accuracy: of the networks.
        leave_out: sizes of a mixed zoo to test on only.
        damaged: damaged copies of the networks, to fit a guard to.
        hold_out: damage that the guard is not fitted to.
        epochs: in place of the predictor's own.
        batch: likewise.
        lr: likewise.
        device: to train on.
        save_every: seconds between two saved states.
        report: progress callback.
    """
    model = declared(predictor)
    opened = Zoo.open(zoo) if isinstance(zoo, str | Path) else zoo
    if opened.named and (damaged is not None or leave_out or min_accuracy):
        raise RunError(
            f"'{opened.path}' holds {ZOO_TEXTS[opened.kind]}: train on it without --damaged, "
            "--leave-out and --min-accuracy"
        )
    cls = find(model, opened.kind)
    check_networks(model, mixed=opened.mixed, damaged=damaged is not None)
    if hold_out is not None and damaged is None:
        raise RunError("--hold-out chooses among damaged networks: name --damaged DIR")
    about = describe_zoo(opened)
    protocol = Protocol.of(model, epochs, batch, lr, zoo=about)
    selection = Selection(
        None if opened.named else percent,
        min_accuracy,
        split_seed,
        target=target,
        all_checkpoints=cls.every_checkpoint,
        leave_out=tuple(leave_out),
        split=split,
    )
    given = {} if variant is None else known_variants()[variant_of(model, variant)].options
    experiment = Experiment(
        model, range(seeds), protocol, {**given, **(options or {})}, selection.to_json()
    )
    folder = Path(tempfile.mkdtemp(prefix="tnfn-run-")) / "run" if out is None else Path(out)
    execution = Execution(report=report, save_every=save_every)
    record = _train(
        opened, about, experiment, selection, folder, device, execution, damaged=damaged,
        hold_out=hold_out,
    )  # fmt: skip
    return RunFolder(folder, record)


def _train(
    zoo: Zoo,
    about: Mapping[str, Any],
    experiment: Experiment,
    selection: Selection,
    folder: Path,
    device: str,
    execution: Execution,
    *,
    damaged: Path | str | None,
    hold_out: str | None,
) -> RunRecord:
    """Load the networks and what is needed for a guard, and train on them."""
    networks = load_networks(zoo, selection, experiment.model, execution.report)
    copies: DamagedNetworks | Zoo | None = zoo if zoo.kind == CHECKPOINTS else None
    if damaged is not None and isinstance(networks, Parts):
        ignored = None if hold_out is None else parse_damages(hold_out)
        copies = load_damaged(Zoo.open(damaged), zoo, networks, ignored)
    networks = networks.to(device)
    return train_run(about, networks, experiment, folder, damaged=copies, execution=execution)
