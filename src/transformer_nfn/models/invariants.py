"""Numbers of a network that no symmetry of its blocks changes.

- Tensors without linear axes are only permuted: the statistics of their entries are invariant, and
  so are those of the norms along each axis and the singular values.
- Tensors with linear axes are read through their products (QK and VO in the paper's block), one
  matrix for each head; heads are taken in the order of their norms.
- Two matrices that share a permuted axis multiply into one that does not carry it (W_A·W_B).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError
from transformer_nfn.models.batch import Batch
from transformer_nfn.models.statistics import sorted_statistics
from transformer_nfn.models.whole_network.invariants import eigenvalues
from transformer_nfn.processes import map_rows
from transformer_nfn.spaces import Product, WeightSpace, attention_block, fold
from transformer_nfn.spaces.weights import tensor_value

FEATURES = "features"
"""Key of networks of any family that holds their invariants, where they were computed before."""
CHUNK = 64
"""Networks at a time: products of all heads lie in memory together."""
FLOOR = 1e-5
"""Share of the largest singular value below which they flatten out.

They are roots of eigenvalues, which is three times faster, and rounding would show in the root.
"""


def invariant_features(batch: Batch, space: WeightSpace) -> Tensor:
    """Features that the group of ``space`` leaves unchanged.

    >>> from transformer_nfn import spaces
    >>> space = spaces.attention_block(4, 2, 2, 2, 3)
    >>> weights = space.randn(5, dtype=torch.float64)
    >>> moved = space.group.random(batch=5).act(weights)
    >>> batches = [{f"blocks.0.{k}": w[:, 0] for k, w in each.items()} for each in (weights, moved)]
    >>> torch.allclose(*(invariant_features(Batch.of(each), space) for each in batches))
    True

    Args:
        batch: networks; parts they do not have are left out.
        space: weight space of one block.

    Returns:
        ``[batch, F]`` in float64; F depends on the space and the shapes of the other parts.
    """
    blocks = batch.blocks()
    for weights in blocks:
        space.check(weights, finite=False)
    parts = (batch.part(name) for name in ("classifier", "embedding"))
    others = [part[name] for part in parts for name in sorted(part)]
    if not blocks and not others:
        raise SpaceError("a network needs blocks, a classifier or an embedding, found none")

    def features(rows: slice) -> Tensor:
        found = []
        for weights in blocks:
            found += block_features(space, {k: w[rows, 0].double() for k, w in weights.items()})
        for x in others:
            found += _matrix_features(x[rows].double())
        return torch.cat(found, -1)

    return map_rows(features, batch.weights, CHUNK)


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
    """Features of X Yᵀ for each head, in descending norm; X and Y share the linear axis."""
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
    spectrum = _singular_values(small)
    features = [sorted_statistics(full.flatten(2)), spectrum]
    rest = product.axes[len(shared) :]
    if rest[: len(rest) // 2] == rest[len(rest) // 2 :]:  # the same axis twice, so a trace
        features.append(full.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True))
    heads = torch.cat(features, -1)
    descending = spectrum.square().sum(-1).argsort(-1, descending=True)
    return torch.take_along_dim(heads, descending[..., None], 1).flatten(1)


def _singular_values(x: Tensor) -> Tensor:
    """Singular values in descending order, as many as the shorter side."""
    gram = x.mT @ x if x.shape[-1] <= x.shape[-2] else x @ x.mT
    squares = eigenvalues(gram).flip(-1).clamp(min=0)
    out: Tensor = (squares + FLOOR**2 * squares[..., :1]).sqrt()
    return out


def space_of(batch: Batch) -> WeightSpace:
    """The paper's block with the sizes of the first block of the networks."""
    try:
        first = batch.blocks()[0]
        heads, d_model, d_k = first["W_Q"].shape[2:]
        space = attention_block(d_model, heads, d_k, first["W_V"].shape[-1], first["b_A"].shape[-1])
        space.check(first, finite=False)
    except (KeyError, IndexError, ValueError) as error:
        raise SpaceError(
            "these are not the paper's blocks, so the predictor needs their weight space "
            "(argument `space`)"
        ) from error
    return space
