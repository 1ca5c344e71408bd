"""How an element of any space acts, entry by entry, with loops: the oracle of random spaces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.spaces import Element, Weights, WeightSpace


def act(g: Element, weights: Weights) -> Weights:
    """``gU`` for one network with tensors ``[*axes]``; shifts first, matrices, permutations."""
    space = g.space
    given = {name: w.numpy().copy() for name, w in weights.items()}
    moved = {name: w.copy() for name, w in given.items()}
    for shift in space.shifts:
        c = g.shifts[shift.tensor].numpy()
        moved[shift.tensor] = given[shift.tensor] + c
        if shift.through is not None and shift.into is not None:
            moved[shift.into] = given[shift.into] - _summed(
                space, (shift.tensor, shift.through, shift.into), c, given
            )
    out = {}
    for name, spec in space.tensors.items():
        x = moved[name]
        for axis in spec.axes:
            if axis in g.linears:
                x = _rebased(space, x, spec.axes, axis, g, dual=axis in spec.dual)
        out[name] = torch.as_tensor(permuted(space, g, x, spec.axes))
    return out


def _summed(
    space: WeightSpace, names: tuple[str, str, str], c: np.ndarray, given: dict[str, np.ndarray]
) -> np.ndarray:
    own, via, into = (space.tensors[name].axes for name in names)
    W = given[names[1]]
    out = np.zeros(space.shape(names[2]))
    for place in np.ndindex(*W.shape):
        at = dict(zip(via, place, strict=True))
        rest = tuple(at[a] for a in into)
        loose = [range(space.axes[a].size) if a not in at else (at[a],) for a in own]
        for index in itertools.product(*loose):
            out[rest] += c[index] * W[place]
    return out


def _rebased(
    space: WeightSpace, x: np.ndarray, axes: Sequence[str], axis: str, g: Element, *, dual: bool
) -> np.ndarray:
    dim = list(axes).index(axis)
    out = np.zeros_like(x)
    for place in np.ndindex(*x.shape):
        site = tuple(place[list(axes).index(a)] for a in space.ancestors(axis))
        G = g.linears[axis].numpy()[site]
        H = np.linalg.inv(G).T if dual else G
        for j in range(x.shape[dim]):
            source = (*place[:dim], j, *place[dim + 1 :])
            out[place] += x[source] * H[j, place[dim]]
    return out


def permuted(space: WeightSpace, g: Element, x: np.ndarray, axes: Sequence[str]) -> np.ndarray:
    """``x [*axes, *rest]`` with ``(gx)[i, a] = x[τ(i), π_τ(i)(a)]``."""
    perms = {name: perm.numpy() for name, perm in g.perms.items()}
    out = np.empty_like(x)
    for place in np.ndindex(*x.shape[: len(axes)]):

        def source(d: int, place: tuple[int, ...] = place) -> int:
            name = axes[d]
            if name not in perms:
                return place[d]
            owners = (source(list(axes).index(a)) for a in space.ancestors(name))
            return int(perms[name][(*owners, place[d])])

        out[place] = x[tuple(source(d) for d in range(len(axes)))]
    return out


def bare(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """``[1, 1, *axes] → [*axes]``."""
    return {name: w[0, 0] for name, w in weights.items()}
