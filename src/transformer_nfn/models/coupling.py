"""How well the tensors of a network match each other: a sign of training that damage removes.

Two independent matrices that meet along an axis of size d multiply to a norm of about
``‖X‖‖Y‖/√d``. In trained networks the product is larger, and fewer of its directions matter.
Shuffling entries, exchanging a block or re-initialising a tensor nearly keeps the statistics of
each tensor, and loses this.

Every feature is invariant under the paper's group, scales of ReLU neurons and what LayerNorm
discards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from transformer_nfn.models.batch import Batch
from transformer_nfn.processes import map_rows

CHUNK = 64
"""Networks at a time: products of all heads lie in memory together."""
TINY = 1e-30


def coupling_features(batch: Batch) -> Tensor:
    """Logarithms of the size of products relative to independent factors, and of their rank.

    >>> from transformer_nfn.functional import small_transformer
    >>> space = small_transformer(tokens=4, classes=3, patch=2, d_model=8).space
    >>> batch = Batch.of({name: w[:, 0] for name, w in space.randn(5).items()})
    >>> coupling_features(batch).shape
    torch.Size([5, 100])

    Args:
        batch: a `Batch` of the paper's blocks with a classifier; an embedding if it has one.

    Returns:
        ``[n, F]`` in float64; F depends on the number of blocks and whether there is an embedding.
    """
    return map_rows(lambda rows: _chunk(batch[rows].to(torch.float64)), batch.weights, CHUNK)


def _chunk(batch: Batch) -> Tensor:
    features: list[Tensor] = []
    before, chain = None, None
    if first := batch.part("embedding"):
        before = _centred(first["W"])
        features.append(_bias(first["b"], before))
    for block in batch.blocks():
        w = {name: x[:, 0] for name, x in block.items()}
        block_features, before, chain = _block(w, before, chain)
        features += block_features
    last = batch.part("classifier")
    W_1, W_2 = _centred(last["W_1"].mT).mT, last["W_2"]
    assert before is not None
    assert chain is not None
    pairs: Sequence[tuple[Tensor, Tensor]] = ((before, W_1), (W_1, W_2), (before @ W_1, W_2))
    features += [_coupling(x, y) for x, y in pairs] + [_log_rank(x @ y) for x, y in pairs]
    features += [_coupling(chain, W_1), _coupling(chain @ W_1, W_2), _log_rank(chain @ W_1 @ W_2)]
    features += [_bias(last["b_1"], W_1), _bias(last["b_2"], W_2)]
    return torch.stack(features, -1)


def _block(
    w: Mapping[str, Tensor], before: Tensor | None, chain: Tensor | None
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Features of one block; its output matrix, and the product of all maps up to there."""
    Q, K, V = (_centred(w[name].mT).mT for name in ("W_Q", "W_K", "W_V"))
    QK, VO = Q @ K.mT, V @ w["W_O"]
    A, B, b_A = _balanced(w["W_A"], w["W_B"], w["b_A"])
    A, B = _centred(A.mT).mT, _centred(B)
    every = VO.sum(1)
    features = [*_over_heads(_log_rank(QK)), *_over_heads(_log_rank(VO)), _log_rank(every)]
    features += _over_heads(_coupling(QK, VO))
    features += _over_heads(_log(_square(QK + QK.mT) / (2 * _square(QK)).clamp(min=TINY)))
    features += _over_heads(_coupling(_centred(VO), A[:, None]))
    written = _centred(every)
    features += [_coupling(written, A), _coupling(A, B), _coupling(written @ A, B)]
    features += [_log_rank(written @ A), _log_rank(A @ B), _log_rank(written @ A @ B)]
    features += [_bias(b_A, A), _bias(w["b_B"], A @ B)]
    if before is not None:
        x = before[:, None]
        for left, right in ((x, QK), (x, QK.mT), (x @ QK, x.mT), (x, VO)):
            features += _over_heads(_coupling(left, right))
        features += [_coupling(before, every), *_over_heads(_log_rank(x @ QK @ x.mT))]
    first = every if chain is None and before is None else (chain if chain is not None else before)
    assert first is not None
    through = written if first is every else _centred(first @ every)
    if first is not every:
        features.append(_coupling(first, every))
    features += [_coupling(through, A), _coupling(through @ A, B)]
    chain = _centred(through @ A @ B)
    return [*features, _log_rank(chain)], B, chain


def _centred(x: Tensor) -> Tensor:
    """Without the mean over the last axis, which LayerNorm discards."""
    return x - x.mean(-1, keepdim=True)


def _balanced(A: Tensor, B: Tensor, b_A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each neuron as strong in what it reads as in what it writes."""
    reads = A.square().sum(-2).clamp(min=TINY)
    writes = B.square().sum(-1).clamp(min=TINY)
    scale = (writes / reads) ** 0.25
    return A * scale[:, None], B / scale[..., None], b_A * scale


def _square(x: Tensor) -> Tensor:
    return x.square().sum((-2, -1))


def _log(x: Tensor) -> Tensor:
    return x.clamp(min=1e-8).log()


def _coupling(x: Tensor, y: Tensor) -> Tensor:
    """``log(d ‖XY‖² / ‖X‖²‖Y‖²)``: 0 for independent factors that meet along an axis of size d."""
    chance = (_square(x) * _square(y) / x.shape[-1]).clamp(min=TINY)
    return _log(_square(x @ y) / chance)


def _log_rank(x: Tensor) -> Tensor:
    """Logarithm of the effective rank ``(Σs²)² / Σs⁴`` over the singular values s."""
    gram = x.mT @ x if x.shape[-1] <= x.shape[-2] else x @ x.mT
    total = gram.diagonal(dim1=-2, dim2=-1).sum(-1).square()
    return _log(total / _square(gram).clamp(min=TINY))


def _bias(b: Tensor, matrix: Tensor) -> Tensor:
    """Logarithm of the mean square of a bias relative to its matrix."""
    return _log(b.square().mean(-1) / matrix.square().mean((-2, -1)).clamp(min=TINY))


def _over_heads(x: Tensor) -> list[Tensor]:
    """Mean, smallest and largest ``[n]`` of ``[n, heads]``: independent of their order."""
    return [x.mean(1), x.amin(1), x.amax(1)]
