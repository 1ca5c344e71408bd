"""Which numbers of a whole network can no symmetry change, whatever its sizes?

Read off the normal form (`nn.roles.normal`), so that neither scales nor means that LayerNorm
and ReLU discard are seen: statistics of entries and of norms, quantiles of the logarithms of
singular values; of the network's matrices, and of products along the axes between them, which hold
how one part fits the next. Heads come as their mean, the weakest and the strongest; blocks as
their mean, the first and the last. So networks of any width, number of heads and depth have
equally many numbers.

Not complete: networks with equal numbers need not be equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.models.statistics import COUNT, sorted_statistics
from transformer_nfn.nn.roles import NormalForm, evenly_sized, normal_form

CHUNK = 256
"""Networks at a time: products of all heads lie in memory together."""

SPECTRUM = 6
"""Quantiles of the logarithms of singular values, the largest and the smallest among them."""

FLOOR = 1e-3
"""Below this share of the largest, singular values flatten out, or rounding would show."""

IDLE = 1e-3
"""Entries of a product of this size do nothing: below it logarithms flatten out."""


@torch.no_grad()
def whole_invariants(network: Mapping[str, Any], positions: Tensor | None = None) -> Tensor:
    """Numbers that networks of the same function share, LayerNorm's ε aside.

    Args:
        network: a `Network` with blocks, classifier and, unless it reads word vectors, embedding.
        positions: the constant ``[tokens, D]`` added to the first stream, or one for each network
            ``[n, tokens, D]``; None where not known, and then nothing is said of them.

    Returns:
        ``[n, F]`` in float64. F depends on whether there are an embedding and positions, and on
        nothing else.
    """
    form = evenly_sized(normal_form(_double(network), positions))
    count = form.A.shape[0]
    rows = [
        torch.cat(_features(_cut(form, slice(start, start + CHUNK))), -1)
        for start in range(0, max(count, 1), CHUNK)
    ]
    return torch.cat(rows)


def _features(form: NormalForm) -> list[Tensor]:
    """Each ``[n, f]``."""
    found = [_over_blocks(_heads(x, y)) for x, y in _head_products(form)]
    found += [_over_blocks(x) for x in _mlp_features(form)]
    found += [_over_blocks(_heads(x, y)) for x, y in _products_between_blocks(form)]
    found += [_over_heads(_heads(x, y)[:, 0]) for x, y in _products_with_inputs(form)]
    return [*found, *_classifier_features(form)]


def _head_products(form: NormalForm) -> list[tuple[Tensor, Tensor]]:
    """QK, VO and VO·A of each head, as factors ``[n, L, h, I, d]`` and ``[n, L, h, J, d]``."""
    after = _times(form.O, form.A.unsqueeze(2))
    return [(form.Q, form.K), (form.V, form.O.mT), (form.V, after.mT)]


def _products_between_blocks(form: NormalForm) -> list[tuple[Tensor, Tensor]]:
    """What neurons of a block meet in the next: B·QK, B·KQ, B·QK·Bᵀ and B·VO."""
    B = form.B[:, :-1].unsqueeze(2)
    BQ, BK, BV = (_times(B, x[:, 1:]) for x in (form.Q, form.K, form.V))
    return [(BQ, form.K[:, 1:]), (BK, form.Q[:, 1:]), (BQ, BK), (BV, form.O[:, 1:].mT)]


def _products_with_inputs(form: NormalForm) -> list[tuple[Tensor, Tensor]]:
    """The same of the first block, for what stands before it: embedding and positions."""
    Q, K, V, O = (x[:, :1] for x in (form.Q, form.K, form.V, form.O))  # noqa: E741
    inputs = [x[:, None, None] for x in (form.embedding, form.positions) if x is not None]
    found = []
    for x in inputs:
        xQ, xK, xV = (_times(x, y) for y in (Q, K, V))
        found += [(xQ, xK), (xQ, K), (xK, Q), (xV, O.mT)]
    if len(inputs) == 2:  # what a patch asks of a place, and a place of a patch
        patch, place = inputs
        found += [(_times(patch, Q), _times(place, K)), (_times(place, Q), _times(patch, K))]
    return found


def _mlp_features(form: NormalForm) -> list[Tensor]:
    """Of the matrices of each MLP and their product, of its neurons and biases."""
    out_norm = form.B.square().mean(-1).sqrt()
    in_norm = form.A.square().mean(-1).sqrt()
    return [
        _matrix(form.A),
        _matrix(form.B),
        _matrix(_times(form.A, form.B)),
        *(sorted_statistics(x) for x in (form.b_A, form.b_B, out_norm, in_norm)),
        sorted_statistics(form.b_A * out_norm),
    ]


def _classifier_features(form: NormalForm) -> list[Tensor]:
    last = form.B[:, -1]
    hidden = _times(last, form.W_1)
    out_norm = form.W_2.square().mean(-1).sqrt()
    matrices = (form.W_1, form.W_2, _times(form.W_1, form.W_2), hidden, _times(hidden, form.W_2))
    bias = (form.b_B[:, -1:] @ form.W_1).squeeze(1)
    # Each class by itself: the smallest norm tells of a class that is never answered.
    class_norm = form.W_2.square().mean(-2).sqrt()
    vectors = (form.b_1, form.b_2, out_norm, class_norm, bias, form.b_1 * out_norm)
    found = [_matrix(x) for x in matrices] + [sorted_statistics(x) for x in vectors]
    if form.embedding is not None:
        found.append(_matrix(form.embedding))
        found.append(sorted_statistics(form.embedding[:, -1]))
    return found


def _heads(left: Tensor, right: Tensor) -> Tensor:
    """Features of X Yᵀ of each head ``[…, h, f]``, the logarithm of its norm first."""
    if left.numel() == 0:  # there is nothing between the blocks of a single one
        return left.new_zeros(*left.shape[:-2], 1 + COUNT + SPECTRUM)
    product = left @ right.mT
    norm = (product.square().mean((-2, -1)) + IDLE**2).log() / 2
    # Orthonormal columns on either side do not change the singular values.
    left, right = (torch.linalg.qr(x, mode="r").R for x in (left, right))
    spectrum = _spectrum(left @ right.mT, product.shape[-2] * product.shape[-1])
    return torch.cat([norm.unsqueeze(-1), _statistics(product), spectrum], -1)


def _matrix(x: Tensor) -> Tensor:
    """Statistics of the entries ``[…, I, J]``, and the spectrum."""
    return torch.cat([_statistics(x), _spectrum(x, x.shape[-2] * x.shape[-1])], -1)


def _statistics(x: Tensor) -> Tensor:
    return sorted_statistics(x.flatten(-2))


def _spectrum(x: Tensor, entries: int) -> Tensor:
    """Quantiles of the logarithms of singular values in falling order, ``[…, SPECTRUM]``.

    ``entries`` of the matrix that has these singular values: their squares sum to its entries'.
    """
    gram = x.mT @ x if x.shape[-1] <= x.shape[-2] else x @ x.mT
    squares = _eigenvalues(gram).flip(-1).clamp(min=0)
    least = FLOOR**2 * squares[..., :1] + IDLE**2 * entries
    logs = (squares + least).log() / 2
    last, found = logs.shape[-1] - 1, []
    for i in range(SPECTRUM):
        place = i / (SPECTRUM - 1) * last
        low = int(place)
        high, share = min(low + 1, last), place - low
        found.append(logs[..., low] * (1 - share) + logs[..., high] * share)
    return torch.stack(found, -1)


def _eigenvalues(gram: Tensor) -> Tensor:
    """Of symmetric matrices; a GPU's solver gives up on some that a CPU's does not."""
    values: Tensor
    try:
        values = torch.linalg.eigvalsh(gram)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        values = torch.linalg.eigvalsh(gram.cpu()).to(gram.device)
    return values


def _over_heads(x: Tensor) -> Tensor:
    """``[…, h, f]`` to ``[…, 3 f]``: the mean, the head of the smallest norm and of the largest."""
    order = x[..., 0].argsort(-1)
    ends = order[..., [0, -1]].unsqueeze(-1)
    weakest, strongest = torch.take_along_dim(x, ends, -2).unbind(-2)
    return torch.cat([x.mean(-2), weakest, strongest], -1)


def _over_blocks(x: Tensor) -> Tensor:
    """``[n, L, f]``, heads or not, to ``[n, 3 f]``: the mean, the first and the last.

    Between blocks there is nothing where there is only one: zeros.
    """
    x = _over_heads(x) if x.ndim == 4 else x
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0], 3 * x.shape[2])
    return torch.cat([x.mean(1), x[:, 0], x[:, -1]], -1)


def _times(x: Tensor, y: Tensor) -> Tensor:
    """The product, evenly sized in networks of any width."""
    out: Tensor = x @ y / x.shape[-1] ** 0.5
    return out


def _double(network: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors in float64, also inside lists and dicts."""

    def change(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.double()
        if isinstance(value, Mapping):
            return {name: change(x) for name, x in value.items()}
        return [change(x) for x in value] if isinstance(value, list | tuple) else value

    return {part: change(value) for part, value in network.items()}


def _cut(form: NormalForm, rows: slice) -> NormalForm:
    parts = {name: None if x is None else x[rows] for name, x in vars(form).items()}
    return NormalForm(**parts)  # type: ignore[arg-type]
