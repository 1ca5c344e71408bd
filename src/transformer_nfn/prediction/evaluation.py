"""How does a trained run do on another zoo?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from transformer_nfn.io.assets import resolve
from transformer_nfn.prediction.acceptance import check_sizes
from transformer_nfn.prediction.dataset import load_rows, select_rows
from transformer_nfn.prediction.guard import Guard
from transformer_nfn.prediction.known_sizes import KnownSizes
from transformer_nfn.prediction.metrics import scores
from transformer_nfn.prediction.predict import load_predictors
from transformer_nfn.prediction.predictors import Predictor, mean_prediction
from transformer_nfn.prediction.records import RunError, RunRecord
from transformer_nfn.prediction.trained_on import Standing, standings
from transformer_nfn.zoo import MixedZoo, Zoo, open_zoo

FEWEST = 2


@dataclass(frozen=True)
class Tested:
    """What a run says of networks of one kind, whether its intervals hold, and what they are to it.

    ``[n]`` each.
    """

    accuracy: np.ndarray
    predicted: np.ndarray
    held: np.ndarray
    standing: list[Standing]

    @staticmethod
    def joined(parts: Sequence[Tested]) -> Tested:
        """Networks of several kinds, one after the other."""
        return Tested(
            np.concatenate([part.accuracy for part in parts]),
            np.concatenate([part.predicted for part in parts]),
            np.concatenate([part.held for part in parts]),
            [word for part in parts for word in part.standing],
        )

    def figures(self) -> dict[str, Any]:
        """Scores of all networks, and of those never seen."""
        unseen = np.array([kind == "unseen" for kind in self.standing])
        counts = Counter(self.standing)
        rest = (self.accuracy[unseen], self.predicted[unseen], self.held[unseen])
        return {
            **_figures(self.accuracy, self.predicted, self.held),
            "trained_on": counts["trained"],
            "selected_by": counts["selected"],
            "unseen": _figures(*rest) if int(unseen.sum()) >= FEWEST else None,
            "note": _note(counts),
        }


def evaluate(
    run: Path | str, zoo_path: Path | str, *, percent: int | None = 75, min_accuracy: float = 0.0
) -> dict[str, Any]:
    """τ, R², error and the share of networks within the interval, for the mean over seeds.

    ``trained_on`` counts the networks that the run was trained on, ``selected_by`` those that
    chose its best epoch, and ``note`` says so in a sentence. ``unseen`` has the same figures for
    the other networks alone; None if these are too few. ``zoo_seeds`` tells what seeds the
    networks have, see `Zoo.seeds`. Of sizes that the run has not learned from, ``warning`` says
    so. For a mixed zoo ``kinds`` has the same for each kind with networks enough.

    Args:
        run: a run folder that keeps its predictors, or its name.
        zoo_path: networks of an architecture that the predictors read: a zoo or a mixed one; a
            folder or a name.
        percent: which checkpoint of each run.
        min_accuracy: only networks at least this accurate.
    """
    run = resolve(run, "predictor")
    record = RunRecord.read(run)
    record.check_finished(run)
    opened = open_zoo(resolve(zoo_path, "zoo"))
    zoos = opened.zoos if isinstance(opened, MixedZoo) else {str(zoo_path): opened}
    predictors, known = load_predictors(run, record), KnownSizes.of(record)
    for name, zoo in zoos.items():
        check_sizes(name, zoo.sizes, known.like, predictors)
    rows = {
        name: select_rows(zoo, percent=percent, min_accuracy=min_accuracy)
        for name, zoo in zoos.items()
    }
    total = sum(map(len, rows.values()))
    if total < FEWEST:
        raise RunError(f"not enough networks: {total} of '{zoo_path}' are selected")
    tested = {
        name: _test(run, zoo, rows[name], predictors, known)
        for name, zoo in zoos.items()
        if len(rows[name])
    }
    warnings = {name: known.warning(zoos[name].sizes) for name in tested}
    found = {
        "zoo_seeds": opened.seeds,
        **Tested.joined(list(tested.values())).figures(),
        "warning": _size_warning(warnings),
    }
    if isinstance(opened, MixedZoo):
        found["kinds"] = {
            name: {**part.figures(), "warning": warnings[name]}
            for name, part in tested.items()
            if len(part.accuracy) >= FEWEST
        }
    return found


def _size_warning(warnings: Mapping[str, str | None]) -> str | None:
    """One sentence about sizes that a run has not learned from."""
    unseen = [name for name, warning in warnings.items() if warning is not None]
    if len(warnings) == 1 or not unseen:
        return next(iter(warnings.values()))
    return (
        f"{len(unseen)} of {len(warnings)} kinds of networks were never seen in training "
        f"({', '.join(unseen)}): their intervals are wider"
    )


def _test(
    run: Path, zoo: Zoo, rows: np.ndarray, predictors: Sequence[Predictor], known: KnownSizes
) -> Tested:
    data = load_rows(zoo, rows)
    mean = mean_prediction(predictors, data)
    held = np.abs(data.truth - mean.numpy()) <= known.reach(zoo.sizes)
    guard = Guard.load(run)
    if guard is not None and guard.reads(zoo.sizes, known.like):
        judged = guard.judge(data, zoo.sizes, mean)
        mean, held = judged.accuracy, judged.holds(data.accuracy.double()).numpy()
    standing = standings(run, data, zoo.metadata["task"]["name"])
    return Tested(data.truth, mean.numpy(), held, standing)


def _figures(accuracy: np.ndarray, predicted: np.ndarray, held: np.ndarray) -> dict[str, Any]:
    return {
        "networks": len(accuracy),
        **scores(accuracy, predicted),
        "coverage": float(held.mean()),
    }


def _note(counts: Counter[Any]) -> str | None:
    """What is not fair about the figures of all networks."""
    told = [
        f"{counts[kind]} {words}"
        for kind, words in (
            ("trained", "are those the predictor was trained on"),
            ("selected", "chose its best epoch"),
        )
        if counts[kind]
    ]
    if not told:
        return None
    left = counts["unseen"]
    fair = f"the {left} it never saw give the fair figures" if left >= FEWEST else (
        "too few are left for fair figures"
    )
    return f"of the {counts.total()} networks {' and '.join(told)}; {fair}"
