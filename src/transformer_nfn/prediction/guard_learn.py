"""What a guard learns from training networks, healthy and damaged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.models.coupling import coupling_features
from transformer_nfn.prediction.dataset import Dataset
from transformer_nfn.prediction.guard_parts import Distance, Harm, Opinion
from transformer_nfn.prediction.responses import responses
from transformer_nfn.zoo import NetworkSizes

HARM = 0.1
"""A network is harmed that lost this much accuracy, and good that has this much above chance."""
FOLDS = 5
FEWEST = 20
"""Networks without which nothing is concluded."""


@dataclass(frozen=True)
class Read:
    """What a guard reads of networks, and their accuracy; ``[n, …]`` each."""

    answers: Tensor
    fit: Tensor
    accuracy: Tensor

    @staticmethod
    def of(data: Dataset, arch: NetworkSizes, agreed: Tensor) -> Read:
        answers = responses(data, arch, agreed)
        return Read(answers, coupling_features(data.network), data.accuracy.double())

    def take(self, index: Tensor) -> Read:
        return Read(self.answers[index], self.fit[index], self.accuracy[index])

    def __len__(self) -> int:
        return len(self.accuracy)


@dataclass(frozen=True)
class Harmed:
    """Damaged networks that were read, ``[n, …]`` each.

    Attributes:
        read: what was read.
        kinds: what was done to each.
        predicted: what the predictor says of it.
    """

    read: Read
    kinds: np.ndarray
    predicted: Tensor

    def take(self, index: Tensor) -> Harmed:
        """Some of them, by booleans."""
        return Harmed(self.read.take(index), self.kinds[index.numpy()], self.predicted[index])

    def of_kind(self, kind: str) -> Tensor:
        """Which are of a kind, ``[n]`` of booleans."""
        return torch.from_numpy(self.kinds == kind)


@dataclass(frozen=True)
class Models:
    """The three small models, and what two of them say."""

    opinion: Opinion
    harm: Harm
    distance: Distance

    @staticmethod
    def of(healthy: Read, harmed: Read, drop: Tensor, chance: float) -> Models:
        good, worse = healthy.accuracy > chance + HARM, drop > HARM
        opinion = Opinion.of(
            torch.cat([healthy.answers, harmed.answers]),
            torch.cat([healthy.accuracy, harmed.accuracy]),
            even_weights(len(healthy), len(harmed)),
        )
        harm = Harm.of(healthy.answers[good], harmed.answers[worse])
        return Models(opinion, harm, Distance.of(healthy.fit[good]))

    def signs(self, read: Read) -> Tensor:
        """The signs of strangeness that need no predictor, ``[n, 2]``."""
        return torch.stack([self.harm(read.answers), self.distance(read.fit)], -1)


@dataclass(frozen=True)
class Learned:
    """Training networks that a guard learns from.

    Attributes:
        healthy: as they were trained.
        harmed: their damaged relatives.
        drop: how much accuracy these lost.
        chance: the accuracy of guessing.
        folds: of the healthy ones, and of their relatives, see `folds_of_runs`.
    """

    healthy: Read
    harmed: Read
    drop: Tensor
    chance: float
    folds: tuple[Tensor, Tensor]

    @cached_property
    def models(self) -> Models:
        """What all of them teach."""
        return Models.of(self.healthy, self.harmed, self.drop, self.chance)

    def of_some(self, rows: Tensor) -> Learned:
        """The same with these of the damaged networks alone, ``[harmed]`` of booleans."""
        healthy_fold, fold = self.folds
        return replace(
            self, harmed=self.harmed.take(rows), drop=self.drop[rows],
            folds=(healthy_fold, fold[rows]),
        )  # fmt: skip

    def unseen_signs(self) -> Tensor:
        """Signs ``[n, 2]`` of the healthy ones, by models that never saw their folds.

        More networks than validation has tell better what is usual.
        """
        at, harmed_at = self.folds
        signs = torch.zeros(len(self.healthy), 2, dtype=torch.float64)
        for i in range(FOLDS):
            rest = self.of_some(harmed_at != i)
            models = replace(rest, healthy=self.healthy.take(at != i)).models
            signs[at == i] = models.signs(self.healthy.take(at == i))
        return signs


def folds_of_runs(networks: Dataset, relatives: Dataset) -> tuple[Tensor, Tensor]:
    """For each healthy and each damaged training network its fold; relatives share theirs."""
    runs, own = (d.columns["run"].astype(str).tolist() for d in (networks, relatives))
    fold = {run: i % FOLDS for i, run in enumerate(dict.fromkeys(runs))}
    return torch.tensor([fold[run] for run in runs]), torch.tensor([fold.get(r, -1) for r in own])


def even_weights(healthy: int, harmed: int) -> Tensor:
    """Weights of so many of each, with which both count the same in all."""
    both = [torch.ones(healthy), torch.full((harmed,), healthy / max(harmed, 1))]
    return torch.cat(both).double()
