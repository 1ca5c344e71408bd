"""How a permutation or a matrix moves a tensor along one axis: the arithmetic of the action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from transformer_nfn.spaces import WeightSpace
from transformer_nfn.symmetry.small_products import matmul


def permute(
    space: WeightSpace,
    x: Tensor,
    axes: Sequence[str],
    perms: Mapping[str, Tensor],
    *,
    lead: int,
    batched: bool,
) -> Tensor:
    """``x`` with every perm axis in ``axes`` gathered by its permutation, ``x[..., π, ...]``.

    Inner axes move before the axes they belong to, so that each still stands at the index its
    own permutation was given for: ``(gx)[i, a] = x[τ(i), π_τ(i)(a)]``.

    Args:
        x: shape ``[*lead, *axes, *rest]``.
        axes: the names of the axes after the leading ones.
        perms: for each perm axis ``[*batch, *ancestors, n]``.
        lead: how many axes stand before ``axes``.
        batched: whether the permutations have a batch axis, matched with the first of ``lead``.
    """
    depth = {a: len(space.ancestors(a)) for a in axes}
    for d in sorted(range(len(axes)), key=lambda i: -depth[axes[i]]):
        name = axes[d]
        if space.axes[name].kind != "perm":
            continue
        index = perms[name]
        dim = lead + d
        if not batched and depth[name] == 0:
            x = x.index_select(dim, index)
        else:
            x = _gather(space, x, axes, name, dim, index, lead=lead, batched=batched)
    return x


def _gather(
    space: WeightSpace,
    x: Tensor,
    axes: Sequence[str],
    name: str,
    dim: int,
    index: Tensor,
    *,
    lead: int,
    batched: bool,
) -> Tensor:
    if batched and x.shape[0] == 1 and index.shape[0] > 1:
        x = x.expand(index.shape[0], *x.shape[1:])
    n = x.shape[dim]
    if batched and not space.ancestors(name) and all(s == 1 for s in x.shape[1:dim]):
        # Whole rows move: one index_select over the flattened batch copies them contiguously.
        start = torch.arange(x.shape[0], device=x.device).unsqueeze(1) * n
        rows = x.reshape(x.shape[0] * n, -1)
        flat = (start + index.expand(x.shape[0], n)).reshape(-1)
        return rows.index_select(0, flat).reshape(x.shape)
    shape = _site_shape(space, x, axes, name, lead=lead, batched=batched)
    shape[dim] = n
    return torch.gather(x, dim, index.reshape(shape).expand(x.shape))


def _site_shape(
    space: WeightSpace,
    x: Tensor,
    axes: Sequence[str],
    name: str,
    *,
    lead: int,
    batched: bool,
) -> list[int]:
    """Shape that lines the sites of ``name`` (batch, ancestors) up with ``x``; 1 elsewhere."""
    shape = [1] * x.ndim
    if batched:
        shape[0] = x.shape[0]
    for parent in space.ancestors(name):
        at = lead + list(axes).index(parent)
        shape[at] = x.shape[at]
    return shape


def rebase(
    space: WeightSpace,
    x: Tensor,
    axes: Sequence[str],
    name: str,
    matrix: Tensor,
    *,
    dual: bool,
    lead: int,
    batched: bool,
) -> Tensor:
    """``x`` with the linear axis ``name`` multiplied: plain ``x G``, dual ``G⁻¹ x``.

    Args:
        x: shape ``[*lead, *axes]``.
        matrix: ``G`` for a plain axis, ``G⁻¹`` for a dual one, ``[*batch, *ancestors, n, n]``.
        dual: which of the two it is.
        lead: how many axes stand before ``axes``.
        batched: whether ``matrix`` has a batch axis, matched with the first of ``lead``.
    """
    if batched and x.shape[0] == 1 and matrix.shape[0] > 1:
        x = x.expand(matrix.shape[0], *x.shape[1:])
    n = matrix.shape[-1]
    dim = lead + list(axes).index(name)
    sites = _site_shape(space, x, axes, name, lead=lead, batched=batched)
    if dual and dim == x.ndim - 2 and sites[-1] == 1:
        return matmul(matrix.reshape(*sites[:-2], n, n), x)
    # A row vector times the matrix; a dual axis takes the inverse from the left: its transpose.
    right = matrix.mT if dual else matrix
    if dim == x.ndim - 1 and x.ndim >= 2 and sites[-2] == 1:
        return matmul(x, right.reshape(*sites[:-2], n, n))
    moved = x.movedim(dim, -1).unsqueeze(-2)
    del sites[dim]
    return (moved @ right.reshape(*sites, n, n)).squeeze(-2).movedim(-1, dim)
