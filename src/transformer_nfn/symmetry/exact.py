"""Are two networks equal to the bit, as they are or reordered? That no rounding can hide."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from transformer_nfn.spaces import Element, Weights, WeightSpace


def exact_element(
    space: WeightSpace,
    u: Weights,
    v: Weights,
    perms: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> Element | None:
    """The identity or the reordering that takes ``u`` to ``v`` to the bit; None if neither does.

    Args:
        space: of both networks.
        u: weights ``[*axes]`` in float64.
        v: those of the other network.
        perms: how the permuted axes of ``u`` should be gathered, as far as that is known.
        dtype: the narrower one of the two networks: one may be the other, rounded to it.
    """
    base = space.group.identity(device=next(iter(u.values())).device)
    reordered = Element(space, {**base.perms, **perms}, base.linears, base.inverses, base.shifts)
    for element in (base, reordered):
        moved = element.act(u)
        if all(torch.equal(moved[name].to(dtype), w.to(dtype)) for name, w in v.items()):
            return element
    return None
