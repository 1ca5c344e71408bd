"""Prediction of the accuracy of networks by a trained run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.io.assets import resolve
from transformer_nfn.models import network_of
from transformer_nfn.networks import Network, resolve_networks, zoo_rows
from transformer_nfn.prediction.acceptance import FittingNetwork, read_fitting
from transformer_nfn.prediction.dataset import Dataset
from transformer_nfn.prediction.guard import Guard
from transformer_nfn.prediction.intervals import LEVEL
from transformer_nfn.prediction.known_sizes import KnownSizes
from transformer_nfn.prediction.novelty import Seen
from transformer_nfn.prediction.predictors import Predictor, seed_predictions
from transformer_nfn.prediction.records import RunError, RunRecord
from transformer_nfn.zoo import NetworkSizes, Zoo

# Networks in memory at once: a zoo may have tens of thousands.
AT_ONCE = 512

UNLIKE = "unlike any network of the training set ({:.1f} times the usual distance)"
STRANGE = (
    "its outputs, or how its tensors fit each other, are unlike those of healthy networks "
    "({:.1f} times the limit)"
)
FAR = 0.1
"""A number that is so much below what the weights alone say is explained."""


@dataclass(frozen=True)
class Prediction:
    """Prediction for one checkpoint.

    Attributes:
        name: of the checkpoint.
        accuracy: predicted, the mean over the run's seeds.
        low: lower end of the conformal interval.
        high: its upper end.
        spread: standard deviation over the seeds.
        novelty: distance to what the predictor has seen, or with a guard how strange the network
            is; above 1 is outside.
        warning: a sentence where the number is not to be trusted, else None.
        left_out: tensors of the file that were not read, because the zoo's networks have none such.
        note: one sentence about them, else None.
        recorded: what a zoo says of the network: run, epoch, configuration and the test accuracy
            that was measured; None for files.
        guarded: whether a guard against broken networks has judged it.
        by_weights: what the predictor alone says, which reads weights; a guard, which asks the
            network, may lower it.
        coverage: share of networks like those of the training set whose accuracy such an interval
            holds; None where there is a warning, since nothing is known of other networks.
    """

    name: str
    accuracy: float
    low: float
    high: float
    spread: float
    novelty: float
    warning: str | None
    left_out: tuple[str, ...] = ()
    note: str | None = None
    recorded: Mapping[str, Any] | None = None
    guarded: bool = False
    by_weights: float | None = None
    coverage: float | None = None

    @property
    def explanation(self) -> str | None:
        """Why the number is not what the weights say, in a sentence; None where it is."""
        if self.by_weights is None or self.by_weights - self.accuracy <= FAR:
            return None
        return (
            f"by its weights alone it would have {self.by_weights:.1%}, but it answers inputs "
            "that healthy networks agree on as one that has less"
        )


Networks = str | Path | Zoo | Iterable[str | Path]


def predict(run: Path | str, networks: Networks) -> list[Prediction]:
    """Predicts the accuracy of networks from their weights.

    Args:
        run: a run folder that keeps its predictors, or its name.
        networks: an open zoo, or words that mean networks, see
            `transformer_nfn.networks.resolve_networks`; one, or several.
    """
    run = resolve(run, "predictor")
    record = RunRecord.read(run)
    record.check_finished(run)
    named = _named(networks)
    predictors = load_predictors(run, record)
    seen, guard = Seen.load(run), Guard.load(run)
    known = KnownSizes.of(record)
    found: list[Prediction] = []
    for start in range(0, len(named), AT_ONCE):
        chunk = named[start : start + AT_ONCE]
        read = [_read(network, known.like, predictors) for network in chunk]
        found += _predict(chunk, read, predictors, seen, known, guard)
    return found


def load_predictors(run: Path, record: RunRecord) -> list[Predictor]:
    """The predictor of every seed of a run."""
    return [Predictor.load(record.model, run / f"seed-{row['seed']}") for row in record.seeds]


def _named(networks: Networks) -> list[Network]:
    if isinstance(networks, Zoo):
        return zoo_rows(networks)
    return resolve_networks([networks] if isinstance(networks, str | Path) else networks)


def _read(
    network: Network, trained: NetworkSizes, predictors: Sequence[Predictor]
) -> FittingNetwork:
    return read_fitting(network, trained, predictors)


def _predict(
    named: Sequence[Network],
    read: Sequence[FittingNetwork],
    predictors: Sequence[Predictor],
    seen: Seen,
    known: KnownSizes,
    guard: Guard | None,
) -> list[Prediction]:
    """Predictions in the order of the networks; those of one size are read together."""
    out: dict[int, Prediction] = {}
    for sizes, places in _by_sizes(read):
        data = as_dataset(sizes, [read[i].weights for i in places])
        each = seed_predictions(predictors, data)
        by_weights = mean = each.mean(0)
        spread = each.std(0) if len(each) > 1 else torch.zeros_like(mean)
        size_warning = known.warning(sizes)
        if size_warning is not None and not seen.any_size:
            raise RunError(
                f"'{named[places[0]].name}' is of another architecture: the run keeps nothing by "
                "which other sizes can be judged, as it was trained by an older version"
            )
        novelty = seen.novelty(data)
        reach, words = known.reach(sizes), UNLIKE
        low, high = (mean - reach).clamp(min=0.0), (mean + reach).clamp(max=1.0)
        guarded = guard is not None and guard.reads(sizes, known.like)
        if guard is not None and guarded:
            words = STRANGE
            judged = guard.judge(data, sizes, mean)
            mean, novelty = judged.accuracy, judged.strangeness
            low, high = judged.low, judged.high
        for at, i in enumerate(places):
            warning = _warning(float(novelty[at]), words, size_warning)
            out[i] = Prediction(
                named[i].name,
                float(mean[at]),
                float(low[at]),
                float(high[at]),
                float(spread[at]),
                float(novelty[at]),
                warning,
                read[i].left_out,
                read[i].note,
                named[i].recorded,
                guarded,
                float(by_weights[at]),
                LEVEL if warning is None else None,
            )
    return [out[i] for i in range(len(named))]


def _by_sizes(read: Sequence[FittingNetwork]) -> Iterator[tuple[NetworkSizes, list[int]]]:
    places: dict[NetworkSizes, list[int]] = {}
    for i, network in enumerate(read):
        places.setdefault(network.sizes, []).append(i)
    yield from places.items()


def _warning(novelty: float, words: str, size_warning: str | None) -> str | None:
    """What is strange about the sizes of a network, and about the network itself."""
    told = [] if size_warning is None else [size_warning]
    if novelty > 1:
        told.append(
            f"{words.format(novelty)}: the prediction may be far off and its interval has no known "
            "coverage"
        )
    return "; ".join(told) or None


def as_dataset(arch: NetworkSizes, named: list[dict[str, Tensor]]) -> Dataset:
    """Checkpoints as a data set; their accuracy is unknown."""
    stacked = {name: torch.stack([n[name] for n in named]).float() for name in arch.space.tensors}
    accuracy, columns = torch.zeros(len(named)), {"row": np.arange(len(named))}
    return Dataset(arch.block_space, network_of(stacked), accuracy, columns, arch.tokens)
