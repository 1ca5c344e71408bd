"""Tables of networks: numbers of each network in a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.models.checkpoint_batch import WEIGHTS, by_size
from transformer_nfn.models.learner import PredictorError
from transformer_nfn.models.network import same_batch, tensors_of
from transformer_nfn.models.statistics import sorted_statistics


def tensor_statistics(network: Mapping[str, object]) -> np.ndarray:
    """Seven statistics of every tensor, names in alphabetical order, ``[n, F]`` in float64.

    >>> tensor_statistics({"classifier": {"b_1": torch.ones(2, 5)}}).shape
    (2, 7)
    """
    named = only_size(network) if WEIGHTS in network else tensors_of(network)
    weights = same_batch([named[name].detach().cpu().double().flatten(1) for name in sorted(named)])
    out: np.ndarray = torch.cat([sorted_statistics(w) for w in weights], 1).numpy()
    return out


def only_size(network: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors ``[n, *axes]`` of a batch of checkpoints; several sizes are refused."""
    groups = list(by_size(network))
    if len(groups) != 1:
        raise PredictorError(
            f"a predictor on tensors reads networks of one size, found {len(groups)} sizes"
        )
    return groups[0][2]


def flattened(network: Mapping[str, Any]) -> np.ndarray:
    """Embedding, blocks and classifier side by side, names in alphabetical order, ``[n, all]``.

    Of checkpoints all tensors, in the order of their names in the file.
    """
    if WEIGHTS in network:
        tensors = only_size(network).values()
        return torch.cat([w.flatten(1).detach().cpu().float() for w in tensors], 1).numpy()
    parts = [network.get("embedding"), *network.get("blocks", []), network.get("classifier")]
    rows: list[Tensor] = []
    for part in parts:
        if isinstance(part, Mapping):
            rows += [part[name].flatten(1) for name in sorted(part)]
        elif part is not None:
            rows.append(part.flatten(1))
    if len({x.shape[0] for x in rows}) != 1:
        sizes = ", ".join(str(x.shape[0]) for x in rows) or "none"
        raise PredictorError(f"the parts of a network must have one batch size, found {sizes}")
    return torch.cat([x.detach().cpu().float() for x in rows], 1).numpy()
