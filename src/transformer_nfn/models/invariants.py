"""Which numbers of a network can no symmetry change? Statistics and spectra, all derived.

- Tensors without linear axes are only permuted: the statistics of their entries stay, and so do
  those of the norms along each axis and, because permutations are orthogonal, singular values.
- Tensors with linear axes are read through their products (QK and VO in the paper's block), one
  matrix for each head; heads are taken in the order of their norms.
- Two matrices that share a permuted axis multiply into one that does not carry it (W_A·W_B).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError
from transformer_nfn.models.plain import same_batch
from transformer_nfn.models.statistics import sorted_statistics
from transformer_nfn.spaces import Product, WeightSpace, fold
from transformer_nfn.spaces.weights import tensor_value

# Networks at a time: products of all heads lie in memory together.
CHUNK = 256


# Singular values come as the roots of eigenvalues, three times faster than by themselves; below
# this share of the largest they flatten out, or rounding would show in the root.
FLOOR = 1e-5


@torch.no_grad()
def invariant_features(network: Mapping[str, object], space: WeightSpace) -> Tensor:
    """Numbers that every network of the same function shares, as far as `space` knows.

    Args:
        network: a `Network`; parts it does not have are left out.
        space: of one block.

    Returns:
        ``[batch, F]`` in float64; F depends on the space and the shapes of the other parts.
    """
    blocks = network.get("blocks") or []
    if not isinstance(blocks, Sequence):
        raise SpaceError(f"'blocks' must be a list of weight dicts, found {type(blocks).__name__}")
    for weights in blocks:
        space.check(weights, finite=False)
    others = [x for part in ("classifier", "embedding") for x in _part(network, part)]
    leaves = [x for weights in blocks for x in weights.values()] + others
    if not leaves:
        raise SpaceError("a network needs blocks, a classifier or an embedding, found none")
    count = same_batch(leaves)[0].shape[0]
    rows = []
    for start in range(0, max(count, 1), CHUNK):
        cut = slice(start, start + CHUNK)
        found = []
        for weights in blocks:
            found += block_features(space, {k: w[cut, 0].double() for k, w in weights.items()})
        for x in others:
            found += _matrix_features(x[cut].double())
        rows.append(torch.cat(found, -1))
    return torch.cat(rows)


def block_features(space: WeightSpace, weights: Mapping[str, Tensor]) -> list[Tensor]:
    """The features of one block with weights ``[batch, *axes]``, each ``[batch, f]``."""
    weights = fold(space, weights)
    kept = [space.tensors[name] for name in space.entry_tensors]
    out = []
    for spec in kept:
        out += _matrix_features(weights[spec.name])
    for first in kept:
        for second in kept:
            chained = len(first.axes) == len(second.axes) == 2 and first is not second
            if chained and first.axes[1] == second.axes[0]:
                out += _matrix_features(weights[first.name] @ weights[second.name], norms=False)
    for product in space.products:
        out.append(_product_features(space, weights, product))
    return out


def _matrix_features(x: Tensor, norms: bool = True) -> list[Tensor]:
    """Statistics of the entries and of the norms along each axis, and singular values."""
    out = [sorted_statistics(x.flatten(1))]
    if x.ndim < 3:
        return out
    if norms:
        for axis in range(1, x.ndim):
            rest = [a for a in range(1, x.ndim) if a != axis]
            out.append(sorted_statistics(torch.linalg.vector_norm(x, dim=rest)))
    return [*out, _singular_values(x.flatten(1, -2))]


def _product_features(
    space: WeightSpace, weights: Mapping[str, Tensor], product: Product
) -> Tensor:
    """The same of X Yᵀ for each head, by falling norm; X and Y share the linear axis."""
    # Along an axis of complex form this is the product at relative position zero.
    shared = space.ancestors(product.over)
    factors = []
    for name in (product.plain, product.dual):
        axes = space.spec(name).axes
        order = [axes.index(a) for a in shared]
        order += [i for i, a in enumerate(axes) if a not in shared and a != product.over]
        order.append(axes.index(product.over))
        x = tensor_value(space, weights, name).permute(0, *(i + 1 for i in order))
        x = x.flatten(1, len(shared))
        factors.append(x.reshape(*x.shape[:2], -1, x.shape[-1]))
    left, right = factors
    full = left @ right.mT
    # Y = Q R, and Q does not change the singular values of X Yᵀ = X Rᵀ Qᵀ.
    small = left @ torch.linalg.qr(right, mode="r").R.mT
    found = [sorted_statistics(full.flatten(2)), _singular_values(small)]
    rest = product.axes[len(shared) :]
    if rest[: len(rest) // 2] == rest[len(rest) // 2 :]:  # the same axis twice, so a trace
        found.append(full.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True))
    heads = torch.cat(found, -1)
    falling = found[1].square().sum(-1).argsort(-1, descending=True)
    return torch.take_along_dim(heads, falling[..., None], 1).flatten(1)


def _singular_values(x: Tensor) -> Tensor:
    """In falling order, as many as the shorter side."""
    gram = x.mT @ x if x.shape[-1] <= x.shape[-2] else x @ x.mT
    squares = torch.linalg.eigvalsh(gram).flip(-1).clamp(min=0)
    out: Tensor = (squares + FLOOR**2 * squares[..., :1]).sqrt()
    return out


def _part(network: Mapping[str, object], part: str) -> list[Tensor]:
    given = network.get(part)
    if given is None:
        return []
    tensors = [given[k] for k in sorted(given)] if isinstance(given, Mapping) else [given]
    found = [x for x in tensors if isinstance(x, Tensor) and x.ndim >= 2]
    if len(found) < len(tensors):
        raise SpaceError(f"'{part}' must hold tensors with a batch axis in front")
    return found
