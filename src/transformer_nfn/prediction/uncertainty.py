"""Interval widths for network sizes that were not in the training set.

How much larger the error is there is measured by leaving out sizes. Instead of one training per
size, a ridge regression on the features of the trained model serves as a proxy. Its probes have
seen the left-out size, so the result is slightly optimistic; therefore the worst value of a size
counts and a margin is added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.models.predictor import SIZE_TEXTS
from transformer_nfn.prediction.data import SizeGroups
from transformer_nfn.prediction.metrics import LEVEL, highest_quantile
from transformer_nfn.prediction.runs import RunRecord
from transformer_nfn.prediction.target import ACCURACY, Target
from transformer_nfn.zoo import NetworkSizes

VARYING = ("d_model", "heads", "blocks", "d_ff")
"""Sizes in which networks of one task may differ."""
COMBINATION = "kind"
"""Key for networks of which each size was seen, but not in this combination."""
UNMEASURED = 3.0
"""Widening where nothing was measured.

For a predictor of digits networks of one size, the 90 % quantile of errors on 17 other sizes was
1.2 to 2.6 times that on its training size.
"""
FAR = 2.0
"""Sizes beyond the seen range by more than this factor count as unmeasured."""
FOLDS = 10
RIDGE = 0.1
MARGIN = 1.25


@dataclass(frozen=True)
class TrainedSizes:
    """Network sizes in the training set of a run, and interval widths for other sizes.

    Attributes:
        sizes: in the training set; none for networks of any family.
        radius: half the width of the intervals for these sizes.
        widening: factor by which intervals are wider where one of `VARYING`, or `COMBINATION`,
            was not in the training set; empty if there was only one size.
        target: what is predicted.
    """

    sizes: tuple[NetworkSizes, ...]
    radius: float
    widening: Mapping[str, float]
    target: Target = ACCURACY

    @staticmethod
    def of(record: RunRecord) -> TrainedSizes:
        """Read the sizes of a run from its record."""
        sizes = tuple(map(NetworkSizes.from_json, record.architectures))
        summary = record.summary
        return TrainedSizes(
            sizes, summary["radius"], summary.get("widening", {}), record.predicts
        )

    @property
    def first(self) -> NetworkSizes:
        """One of the sizes, for what all of them share: the task."""
        return self.sizes[0]

    def unseen(self, sizes: NetworkSizes | None) -> list[str]:
        """Names of the sizes outside the training set; `COMBINATION` if each was seen alone."""
        if sizes is None or sizes in self.sizes:
            return []
        new = [name for name in VARYING if getattr(sizes, name) not in self._seen(name)]
        if "d_model" in new and "d_ff" in new:
            new.remove("d_ff")  # the number of neurons follows the width
        return new or [COMBINATION]

    def factor(self, sizes: NetworkSizes | None) -> float:
        """Factor by which the interval of these sizes is wider."""
        measured = [self._measured(name, sizes) for name in self.unseen(sizes)]
        factor = math.prod(value for value in measured if value is not None)
        return max(factor, UNMEASURED) if None in measured else factor

    def interval_radius(self, sizes: NetworkSizes | None) -> float:
        """Half the width of the interval for networks of these sizes."""
        radius = self.factor(sizes) * self.radius
        return min(1.0, radius) if self.target.kind == "share" else radius

    def warning(self, sizes: NetworkSizes | None) -> str | None:
        """One sentence if these sizes were not in the training set, else None."""
        new = self.unseen(sizes)
        if not new:
            return None
        names = [name for name in VARYING if name != "d_ff"] if new == [COMBINATION] else new
        texts = [_size_text(name, getattr(sizes, name)) for name in names]
        listed = texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
        what = f"networks of {listed} were never seen in training"
        wider = f"the interval is {self.factor(sizes):.1f} times as wide"
        if all(self._measured(name, sizes) for name in new):
            return f"{what}: {wider}, as measured by leaving out sizes that were seen"
        return f"{what}, and how far off it is there was not measured: {wider}, a rule of thumb"

    def _seen(self, name: str) -> set[int]:
        return {getattr(sizes, name) for sizes in self.sizes}

    def _measured(self, name: str, sizes: NetworkSizes | None) -> float | None:
        """Measured widening of a size; None if it is far outside the seen range."""
        if name in VARYING:
            value, seen = getattr(sizes, name), self._seen(name)
            if not min(seen) / FAR <= value <= max(seen) * FAR:
                return None
        return self.widening.get(name)


def _size_text(name: str, value: int) -> str:
    text = SIZE_TEXTS[name].format(value)
    return text.removesuffix("s") if value == 1 else text


@torch.no_grad()
def measure_widening(
    module: Any, groups: SizeGroups, sizes: Mapping[str, NetworkSizes]
) -> dict[str, float]:
    """Measure how many times the error grows for an unseen size, at least 1.

    The 90 % quantile of the error on networks left out because of a size, over that on networks
    left out at random; the maximum over all values of the size, plus a quarter.

    Args:
        module: has ``features(network)``.
        groups: networks as the module reads them, on its device.
        sizes: of the groups, by name.

    Returns:
        For each of `VARYING` that differs, and for `COMBINATION`; empty for a single size.
    """
    if len(groups.names) < 2:
        return {}
    trained = [sizes[name] for name in groups.names]
    datasets = [*groups.train, *groups.val, *groups.test]
    features = torch.cat([module.features(data.network).double().cpu() for data in datasets])
    accuracy = torch.cat([data.accuracy for data in datasets]).double().cpu()
    group = np.repeat(np.tile(np.arange(len(trained)), 3), [len(data) for data in datasets])
    typical = _typical_error(left_out_errors(features, accuracy, random_folds(len(group))))
    widening = {}
    for name, values in _labels(trained).items():
        labels = np.asarray(values)[group]
        errors = left_out_errors(features, accuracy, labels)
        worst = max(_typical_error(errors[labels == value]) for value in set(values))
        widening[name] = max(1.0, MARGIN * worst / typical)
    # Leaving out more is never easier.
    return {name: max(factor, widening[COMBINATION]) for name, factor in widening.items()}


def _labels(trained: Sequence[NetworkSizes]) -> dict[str, list[int]]:
    """For every size that differs its value in each group; for `COMBINATION` the group number."""
    values = {name: [int(getattr(sizes, name)) for sizes in trained] for name in VARYING}
    differing = {name: each for name, each in values.items() if len(set(each)) > 1}
    return {COMBINATION: list(range(len(trained))), **differing}


def random_folds(networks: int) -> np.ndarray:
    """A random fold of each network, ``[networks]``."""
    return np.random.default_rng(0).permutation(networks) % min(FOLDS, networks)


def left_out_errors(features: Tensor, accuracy: Tensor, labels: np.ndarray) -> np.ndarray:
    """Error on each network of a regression fitted to the networks with other labels."""
    errors = np.zeros(len(labels))
    for label in np.unique(labels):
        out = torch.from_numpy(labels == label)
        predicted = _ridge(features[~out], accuracy[~out], features[out])
        errors[out.numpy()] = (predicted - accuracy[out]).abs().numpy()
    return errors


def _ridge(features: Tensor, accuracy: Tensor, queries: Tensor) -> Tensor:
    """Kernel ridge regression on standardised features."""
    mean, std = features.mean(0), features.std(0).clamp(min=1e-6)
    x, y = (features - mean) / std, (queries - mean) / std
    kernel = x @ x.mT / x.shape[1]
    centre = accuracy.mean()
    ridge = RIDGE * torch.eye(len(x), dtype=x.dtype)
    weights = torch.linalg.solve(kernel + ridge, accuracy - centre)
    predicted: Tensor = (y @ x.mT / x.shape[1] @ weights + centre).clamp(0, 1)
    return predicted


def _typical_error(errors: np.ndarray) -> float:
    """The 90 % quantile, not zero."""
    return max(1e-6, highest_quantile(errors, LEVEL))
