"""At what scale do the parameters start?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from transformer_nfn.nn.level_map import LevelMap

Scheme = Literal["unit", "xavier"]
Pool = Literal["mean", "sum"]
POOLS, SCHEMES = ("mean", "sum"), ("unit", "xavier")


@torch.no_grad()
def reset_maps(
    maps: Sequence[LevelMap], scheme: Scheme, rank: int | None, extra: float = 0.0
) -> None:
    """Draws the weights of a layer's maps anew.

    ``unit``: independent weights of unit scale give outputs of unit scale. A level l whose
    features have mean variance V_l gets a share V_l / Σ V of a target's variance, whatever
    its fan-in, so that the one entry of W_A is heard beside the D² numbers of QK.
    ``xavier``: the authors' scheme for sums, each Φ normal with variance 2 / (fan in + fan
    out) of its einsum, and that variance as deviation where a product is read or an axis is
    pooled.

    Args:
        maps: the maps of one layer.
        scheme: see above.
        rank: the rank of the layer's dictionaries, if it has any.
        extra: variance share of what is added besides the levels (the skip of low rank).
    """
    if scheme == "xavier":
        for linear in maps:
            for block in linear.blocks(rank):
                fan_in = block.term.features * linear.in_channels
                fan_out = block.target.features * linear.out_channels
                std = (2 / (fan_in + fan_out)) ** 0.5
                squared = len(block.term.source.factors) > 1 or block.term.pooled > 1
                block.weight.normal_(0, std**2 if squared else std)
        return
    shares: dict[str, float] = {}
    for linear in maps:
        for target in linear.level.targets:
            shares[target.name] = shares.get(target.name, extra) + _variance(linear)
    for linear in maps:
        for target, start, width in linear.offsets():
            std = (linear.fan_in * shares[target.name]) ** -0.5 if linear.fan_in else 0.0
            linear.weight[..., start : start + width, :].normal_(0, std)


def _variance(linear: LevelMap) -> float:
    terms = linear.level.terms
    total = sum(t.features for t in terms)
    return sum(t.features * t.variance for t in terms) / total if total else 0.0


def reset_dictionary(weight: nn.Parameter, fan: int) -> None:
    """Vectors that keep unit scale: entries of variance 1 / ``fan``."""
    nn.init.normal_(weight, 0, fan**-0.5)
