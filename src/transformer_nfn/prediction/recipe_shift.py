"""Interval widths for networks of training recipes that were not in the training set.

How much larger the error is there is measured by leaving out recipes: in turn the networks of each
optimiser, of each half of the numbers of steps, and so on for every column of the zoo, and each
third of the target. A ridge regression on invariants stands for the predictor, as in
`uncertainty`. A network that is farther from the training networks than most of these are from each
other gets an interval that is wider by that factor; one that is unlike all of them gets the range
of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.prediction.data import RECIPE_COLUMN, Dataset
from transformer_nfn.prediction.metrics import LEVEL, highest_quantile
from transformer_nfn.prediction.runs import CONFIGURATION
from transformer_nfn.prediction.training_set import TrainingSetDistance
from transformer_nfn.prediction.uncertainty import left_out_errors, random_folds

MOST_VALUES = 8
"""A number with more values is left out by halves, a word with more is no recipe."""
USUAL, UNUSUAL = 0.5, 0.75
"""Quantiles of the novelty of training networks: up to the first intervals have their own width,
from the second on that of left-out recipes."""
THIRDS = 3
MIN_NETWORKS = 9
"""Fewer errors have no 90 % quantile."""


@dataclass(frozen=True)
class RecipeShift:
    """Factor of interval widths by novelty, see the module.

    Attributes:
        usual: novelty up to which the factor is 1.
        unusual: novelty from which it is ``factor``, linear in between.
        factor: 90 % quantile of the error on networks of left-out recipes, over that on networks
            left out at random.
        low: lower end of the range of the target, as `Target.measured`.
        high: its upper end.

    >>> shift = RecipeShift(usual=0.2, unusual=0.4, factor=3.0)
    >>> shift.factors(torch.tensor([0.1, 0.3, 0.9])).round(decimals=3).tolist()
    [1.0, 2.0, 3.0]
    """

    usual: float = 1.0
    unusual: float = 1.0
    factor: float = 1.0
    low: float = 0.0
    high: float = 1.0

    def to_json(self) -> dict[str, float]:
        """As plain JSON values."""
        return asdict(self)

    def factors(self, novelty: Tensor) -> Tensor:
        """Factor of the interval of each network, ``[n]`` like ``novelty``."""
        width = max(self.unusual - self.usual, 1e-9)
        return 1 + (self.factor - 1) * ((novelty.double() - self.usual) / width).clamp(0, 1)

    def interval(self, mean: Tensor, radius: float, novelty: Tensor) -> tuple[Tensor, Tensor]:
        """Ends of the interval of each network, ``[n]`` each; above novelty 1 the whole range."""
        half, far = radius * self.factors(novelty), novelty > 1
        low = torch.where(far, mean.clamp(max=self.low), mean - half)
        return low, torch.where(far, mean.clamp(min=self.high), mean + half)


def measure_shift(distance: TrainingSetDistance, train: Sequence[Dataset]) -> RecipeShift:
    """Measure how many times the error grows for left-out recipes of the training networks."""
    nearest = distance.nearest / distance.limit
    usual, unusual = (float(nearest.quantile(q)) for q in (USUAL, UNUSUAL))
    data = distance.kept(train)
    target = torch.cat([each.accuracy for each in data]).double().cpu()
    truth = np.concatenate([each.truth for each in data])
    share = data[0].target.kind == "share"
    low, high = (0.0, 1.0) if share else (float(truth.min()), float(truth.max()))
    features = distance.rows.double()
    typical = left_out_errors(features, target, random_folds(len(target)))
    labels = [target_thirds(data), *recipe_labels(data)]
    errors = [left_out_errors(features, target, each) for each in labels]
    shifted, usually = (highest_quantile(x, LEVEL) for x in (np.concatenate(errors), typical))
    factor = max(1.0, shifted / max(usually, 1e-6))
    return RecipeShift(usual, unusual, factor, low, high)


def target_thirds(data: Sequence[Dataset]) -> np.ndarray:
    """Third of the target of each network, ``[n]``."""
    values = torch.cat([each.accuracy for each in data]).double().cpu().numpy()
    return values.argsort().argsort() * THIRDS // len(values)


def recipe_labels(data: Sequence[Dataset]) -> list[np.ndarray]:
    """Labels of networks by recipe, ``[n]`` each, of which each value is left out in turn."""
    labels = []
    for name in data[0].columns:
        if name not in CONFIGURATION and not name.startswith(RECIPE_COLUMN):
            continue
        column = np.concatenate([each.columns[name] for each in data])
        distinct, codes = np.unique(column.astype(str), return_inverse=True)
        if len(distinct) > MOST_VALUES:
            if column.dtype.kind not in "if":
                continue
            codes = (column >= np.median(column)).astype(int)
        if len(codes) - np.bincount(codes).max() >= MIN_NETWORKS:
            labels.append(codes)
    return labels
