"""How much farther off are predictions for sizes never seen? Sizes are left out to measure it.

Training anew for every size left out would cost as many trainings. What the trained model reads of
networks is judged by a quick regression instead, which errs about as much as the model itself;
how much more it errs on networks of a size that it did not learn from is measured in seconds.
The model's probes have seen that size, so this is a little too kind; therefore the worst of the
sizes left out counts, and a margin is added. Held against trainings without these sizes: see
docs/results.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.prediction.intervals import LEVEL, rank_quantile
from transformer_nfn.prediction.kinds import Kinds
from transformer_nfn.prediction.known_sizes import COMBINATION, WORDS
from transformer_nfn.zoo import NetworkSizes

FOLDS = 10
RIDGE = 0.1
MARGIN = 1.25
FEWEST = 9
"""Networks left out at once, at least: fewer have no 90 % quantile."""


@torch.no_grad()
def measure_widening(
    module: Any, kinds: Kinds, sizes: Mapping[str, NetworkSizes]
) -> dict[str, float]:
    """How many times the error grows where a size was never seen, at least 1.

    The 90 % quantile of the error on networks left out because of a size, over that on networks
    left out at random; the largest over all values of the size, and a quarter more.

    Args:
        module: has ``features(network)``.
        kinds: networks as the module reads them, on its device.
        sizes: of the kinds, by name.

    Returns:
        For each of `WORDS` that the kinds differ in, and for `COMBINATION`; empty for one kind.
    """
    if len(kinds.names) < 2:
        return {}
    own = [sizes[name] for name in kinds.names]
    parts = [*kinds.train, *kinds.val, *kinds.test]
    features = torch.cat([module.features(part.network).double().cpu() for part in parts])
    accuracy = torch.cat([part.accuracy for part in parts]).double().cpu()
    which = np.repeat(np.tile(np.arange(len(own)), 3), [len(part) for part in parts])
    usual = _error(_left_out_errors(features, accuracy, _folds(len(which))))
    found = {}
    for name, values in _labels(own).items():
        groups = np.asarray(values)[which]
        errors = _left_out_errors(features, accuracy, groups)
        worst = max(_error(errors[groups == value]) for value in set(values))
        found[name] = max(1.0, MARGIN * worst / usual)
    # Leaving out more is never easier.
    return {name: max(factor, found[COMBINATION]) for name, factor in found.items()}


def _labels(kinds: Sequence[NetworkSizes]) -> dict[str, list[int]]:
    """For every size they differ in its value in each kind; for `COMBINATION` their numbers."""
    by_size = {name: [int(getattr(kind, name)) for kind in kinds] for name in WORDS}
    differing = {name: values for name, values in by_size.items() if len(set(values)) > 1}
    return {COMBINATION: list(range(len(kinds))), **differing}


def _folds(count: int) -> np.ndarray:
    """Random groups of networks."""
    return np.random.default_rng(0).permutation(count) % min(FOLDS, count)


def _left_out_errors(features: Tensor, accuracy: Tensor, groups: np.ndarray) -> np.ndarray:
    """The error on each network by a regression that learned from the other groups."""
    errors = np.zeros(len(groups))
    for group in np.unique(groups):
        out = torch.from_numpy(groups == group)
        said = _regression(features[~out], accuracy[~out], features[out])
        errors[out.numpy()] = (said - accuracy[out]).abs().numpy()
    return errors


def _regression(features: Tensor, accuracy: Tensor, asked: Tensor) -> Tensor:
    """Ridge regression from as many features as there may be, each of mean 0 and variance 1."""
    mean, std = features.mean(0), features.std(0).clamp(min=1e-6)
    x, y = (features - mean) / std, (asked - mean) / std
    alike = x @ x.mT / x.shape[1]
    centre = accuracy.mean()
    ridge = RIDGE * torch.eye(len(x), dtype=x.dtype)
    weights = torch.linalg.solve(alike + ridge, accuracy - centre)
    said: Tensor = (y @ x.mT / x.shape[1] @ weights + centre).clamp(0, 1)
    return said


def _error(errors: np.ndarray) -> float:
    """The 90 % quantile, the largest where they are too few for one."""
    found = rank_quantile(errors, LEVEL) if len(errors) >= FEWEST else np.inf
    return float(max(1e-6, min(found, errors.max())))
