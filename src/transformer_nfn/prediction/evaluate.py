"""Evaluation of a trained run on another zoo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from transformer_nfn.io.location import Location
from transformer_nfn.models.predictor import CHECKPOINTS, ZOO_TEXTS
from transformer_nfn.prediction.data import PERCENT, Dataset, Selection, load_rows
from transformer_nfn.prediction.metrics import class_scores, scores, worth_in_examples
from transformer_nfn.prediction.predict import (
    BATCH,
    Report,
    TrainedRun,
    check_layout,
    check_readable,
)
from transformer_nfn.prediction.predictors import class_folders
from transformer_nfn.prediction.runs import RunError
from transformer_nfn.prediction.training_set import Standing, TrainingDigests
from transformer_nfn.zoo import NetworkSizes, Zoo

MIN_NETWORKS = 2


@dataclass(frozen=True)
class Evaluated:
    """Predictions for networks of one size; ``[n]`` each.

    Attributes:
        accuracy: measured; of another target its value, of classes their number.
        predicted: by the run; of classes the probability of each, ``[classes, n]``.
        covered: whether the interval contains the accuracy.
        standing: whether the network was used in the training.
        shares: whether accuracies are predicted, which labelled examples measure, too.
    """

    accuracy: np.ndarray
    predicted: np.ndarray
    covered: np.ndarray
    standing: list[Standing]
    shares: bool

    @staticmethod
    def joined(parts: Sequence[Evaluated]) -> Evaluated:
        """Concatenate networks, of several sizes or batches."""
        return Evaluated(
            np.concatenate([part.accuracy for part in parts]),
            np.concatenate([part.predicted for part in parts], -1),
            np.concatenate([part.covered for part in parts]),
            [standing for part in parts for standing in part.standing],
            parts[0].shares,
        )

    def figures(self) -> dict[str, Any]:
        """Scores on all networks, and on those never seen."""
        unseen = np.array([standing == "unseen" for standing in self.standing])
        counts = Counter(self.standing)
        return {
            **self._scores(np.ones_like(unseen)),
            "trained_on": counts["trained"],
            "selected_by": counts["selected"],
            "unseen": self._scores(unseen) if int(unseen.sum()) >= MIN_NETWORKS else None,
            "note": _note(counts),
        }

    def _scores(self, chosen: np.ndarray) -> dict[str, Any]:
        accuracy, predicted = self.accuracy[chosen], self.predicted[..., chosen]
        measure = scores if predicted.ndim == 1 else class_scores
        found: dict[str, Any] = {**measure(accuracy, predicted)}
        if self.shares:
            taus = [found["tau"], found["tau_low"], found["tau_high"]]
            found["examples"] = worth_in_examples(accuracy, taus)
        return {
            "networks": len(accuracy),
            **found,
            "coverage": float(self.covered[chosen].mean()),
        }


def evaluate(
    run: Path | str,
    zoo_path: Path | str,
    *,
    percent: int | None = PERCENT,
    min_accuracy: float = 0.0,
    device: str = "cpu",
    batch: int = BATCH,
    report: Report | None = None,
    trust: bool = False,
    model: str | None = None,
) -> dict[str, Any]:
    """Evaluate the mean prediction of a run on a zoo: τ, R², error, coverage of the intervals.

    ``trained_on`` counts the networks that the run was trained on, ``selected_by`` those that
    chose its best epoch, and ``note`` says so in a sentence. ``unseen`` has the scores on the other
    networks; None if these are too few. ``examples`` are the `worth_in_examples` of τ and of the
    ends of its interval. ``zoo_seeds`` is `Zoo.seeds`. ``warning`` names sizes
    outside the training set. For a mixed zoo ``kinds`` has the same for each size.

    Args:
        run: a run folder that keeps its predictors, or its name.
        zoo_path: a zoo or a mixed zoo of an architecture that the predictors read, or its name.
        percent: which checkpoint of each run.
        min_accuracy: minimal accuracy of the networks.
        device: ``cpu`` or ``cuda``.
        batch: networks in memory at once.
        report: called after every batch.
        trust: see `transformer_nfn.prediction.predict.predict`.
        model: likewise.
    """
    run = Location.of(run).folder("predictor")
    trained = TrainedRun.open(run, device, trust=trust, model=model)
    folders = class_folders(run, trained.target)
    digests = TrainingDigests.load(folders[0] if folders else run)
    opened = Zoo.open(zoo_path)
    zoos = opened.parts
    for name, zoo in zoos.items():
        _check_readable(trained, zoo, name or str(zoo_path))
    selection = Selection(percent, min_accuracy, target=trained.target.column)
    rows = {name: selection.rows(zoo) for name, zoo in zoos.items()}
    total = sum(map(len, rows.values()))
    if total < MIN_NETWORKS:
        raise RunError(f"not enough networks: {total} of '{zoo_path}' are selected")
    parts: dict[str, list[Evaluated]] = {}
    done, text = 0, trained.predictors[0].text
    for name, zoo in zoos.items():
        for start in range(0, len(rows[name]), batch):
            some = rows[name][start : start + batch]
            data = load_rows(zoo, some, trained.target, trained.model, text).to(device)
            standing = digests.standings(data, zoo.task)
            found = _evaluate(trained, data, zoo.known_sizes, standing, zoo)
            parts.setdefault(name, []).append(found)
            done += len(some)
            if report is not None:
                report(done, total)
    evaluated = {name: Evaluated.joined(each) for name, each in parts.items()}
    warnings = {name: trained.sizes.warning(zoos[name].known_sizes) for name in evaluated}
    figures = {
        "target": trained.target.column,
        "zoo_seeds": opened.seeds,
        **Evaluated.joined(list(evaluated.values())).figures(),
        "warning": _size_warning(warnings),
    }
    if opened.mixed:
        figures["kinds"] = {
            name: {**part.figures(), "warning": warnings[name]}
            for name, part in evaluated.items()
            if len(part.accuracy) >= MIN_NETWORKS
        }
    return figures


def _check_readable(run: TrainedRun, zoo: Zoo, where: str) -> None:
    """Refuse a zoo whose networks a run does not read."""
    if (kind := zoo.kind) != run.kind:
        raise RunError(
            f"'{zoo.path}' holds {ZOO_TEXTS[kind]}: the predictor reads {ZOO_TEXTS[run.kind]}"
        )
    if zoo.known_sizes is not None:
        check_readable(where, zoo.sizes, run.sizes.first, run.predictors)
    elif run.layout is not None and zoo.layout is not None:
        check_layout(str(zoo.path), zoo.layout.shapes, run.layout)
    elif kind == CHECKPOINTS and (other := sorted({*zoo.families} - {*run.families})):
        raise RunError(
            f"'{zoo.path}' holds {other[0]} checkpoints: the predictor was trained on "
            f"{', '.join(run.families)}"
        )


def _evaluate(
    run: TrainedRun,
    data: Dataset,
    sizes: NetworkSizes | None,
    standing: list[Standing],
    zoo: Zoo,
) -> Evaluated:
    found = run.assess(data, sizes, [f"{zoo.path}#{row}" for row in data.columns["row"]])
    if found.probabilities is None:
        covered = (found.low.numpy() <= data.truth) & (data.truth <= found.high.numpy())
        shares = run.target.is_accuracy
        return Evaluated(data.truth, found.mean.numpy(), covered, standing, shares)
    truth = data.accuracy.cpu().numpy().astype(int)
    likely = found.probabilities.mean(0)
    doubt = 1 - likely[truth, np.arange(len(truth))]
    return Evaluated(truth, likely, doubt <= run.class_threshold(found.novelty), standing, False)


def _size_warning(warnings: Mapping[str, str | None]) -> str | None:
    """One sentence about sizes outside the training set."""
    unseen = [name for name, warning in warnings.items() if warning is not None]
    if len(warnings) == 1 or not unseen:
        return next(iter(warnings.values()))
    return (
        f"{len(unseen)} of {len(warnings)} kinds of networks were never seen in training "
        f"({', '.join(unseen)}): their intervals are wider"
    )


def _note(counts: Counter[Any]) -> str | None:
    """One sentence if some networks were used in the training."""
    used = [
        f"{counts[standing]} {text}"
        for standing, text in (
            ("trained", "are those the predictor was trained on"),
            ("selected", "chose its best epoch"),
        )
        if counts[standing]
    ]
    if not used:
        return None
    rest = counts["unseen"]
    fair = (
        f"the {rest} it never saw give the fair figures"
        if rest >= MIN_NETWORKS
        else ("too few are left for fair figures")
    )
    return f"of the {counts.total()} networks {' and '.join(used)}; {fair}"
