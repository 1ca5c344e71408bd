"""How well do the tensors of a network fit each other? Training makes one read what another wrote.

Two matrices that meet along an axis of size d multiply to a norm of about ``‖X‖‖Y‖/√d`` if they
know nothing of each other. In trained networks they do: the product is larger, and fewer of its
directions matter. Shuffling entries, exchanging a block or initialising a tensor anew leaves the
statistics of each tensor as they were or nearly, and takes this away.

Every number is one that the paper's group, scales of ReLU neurons and what LayerNorm discards leave
as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK = 256
"""Networks at a time: products of all heads lie in memory together."""
TINY = 1e-30


@torch.no_grad()
def tensor_fit(network: Mapping[str, Any]) -> Tensor:
    """Logarithms of how much larger products are than chance would have them, and how flat.

    Args:
        network: a `Network` of the paper's blocks with a classifier; an embedding if it has one.

    Returns:
        ``[n, F]`` in float64; F depends on the number of blocks and whether there is an embedding.
    """
    count = network["classifier"]["W_1"].shape[0]
    parts = [_chunk(network, slice(at, at + CHUNK)) for at in range(0, max(count, 1), CHUNK)]
    return torch.cat(parts)


def _chunk(network: Mapping[str, Any], cut: slice) -> Tensor:
    found: list[Tensor] = []
    before, chain = None, None
    if network.get("embedding") is not None:
        before = _centred(network["embedding"]["W"][cut].double())
        found.append(_bias(network["embedding"]["b"][cut].double(), before))
    for block in network["blocks"]:
        w = {name: x[cut, 0].double() for name, x in block.items()}
        features, before, chain = _block(w, before, chain)
        found += features
    last = {name: x[cut].double() for name, x in network["classifier"].items()}
    W_1, W_2 = _centred(last["W_1"].mT).mT, last["W_2"]
    assert before is not None
    assert chain is not None
    pairs: Sequence[tuple[Tensor, Tensor]] = ((before, W_1), (W_1, W_2), (before @ W_1, W_2))
    found += [_fit(x, y) for x, y in pairs] + [_flatness(x @ y) for x, y in pairs]
    found += [_fit(chain, W_1), _fit(chain @ W_1, W_2), _flatness(chain @ W_1 @ W_2)]
    found += [_bias(last["b_1"], W_1), _bias(last["b_2"], W_2)]
    return torch.stack(found, -1)


def _block(
    w: Mapping[str, Tensor], before: Tensor | None, chain: Tensor | None
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The numbers of one block; what it writes, and the product of all maps up to there."""
    Q, K, V = (_centred(w[name].mT).mT for name in ("W_Q", "W_K", "W_V"))
    QK, VO = Q @ K.mT, V @ w["W_O"]
    A, B, b_A = _balanced(w["W_A"], w["W_B"], w["b_A"])
    A, B = _centred(A.mT).mT, _centred(B)
    every = VO.sum(1)
    found = [*_over_heads(_flatness(QK)), *_over_heads(_flatness(VO)), _flatness(every)]
    found += _over_heads(_fit(QK, VO))
    found += _over_heads(_log(_square(QK + QK.mT) / (2 * _square(QK)).clamp(min=TINY)))
    found += _over_heads(_fit(_centred(VO), A[:, None]))
    written = _centred(every)
    found += [_fit(written, A), _fit(A, B), _fit(written @ A, B)]
    found += [_flatness(written @ A), _flatness(A @ B), _flatness(written @ A @ B)]
    found += [_bias(b_A, A), _bias(w["b_B"], A @ B)]
    if before is not None:
        x = before[:, None]
        for left, right in ((x, QK), (x, QK.mT), (x @ QK, x.mT), (x, VO)):
            found += _over_heads(_fit(left, right))
        found += [_fit(before, every), *_over_heads(_flatness(x @ QK @ x.mT))]
    first = every if chain is None and before is None else (chain if chain is not None else before)
    assert first is not None
    through = written if first is every else _centred(first @ every)
    if first is not every:
        found.append(_fit(first, every))
    found += [_fit(through, A), _fit(through @ A, B)]
    chain = _centred(through @ A @ B)
    return [*found, _flatness(chain)], B, chain


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


def _fit(x: Tensor, y: Tensor) -> Tensor:
    """``log(d ‖XY‖² / ‖X‖²‖Y‖²)``: 0 for strangers that meet along an axis of size d."""
    chance = (_square(x) * _square(y) / x.shape[-1]).clamp(min=TINY)
    return _log(_square(x @ y) / chance)


def _flatness(x: Tensor) -> Tensor:
    """``log`` of how many directions matter: ``(Σs²)² / Σs⁴`` over the singular values s."""
    gram = x.mT @ x if x.shape[-1] <= x.shape[-2] else x @ x.mT
    total = gram.diagonal(dim1=-2, dim2=-1).sum(-1).square()
    return _log(total / _square(gram).clamp(min=TINY))


def _bias(b: Tensor, matrix: Tensor) -> Tensor:
    """``log`` of the mean square of a bias over that of its matrix."""
    return _log(b.square().mean(-1) / matrix.square().mean((-2, -1)).clamp(min=TINY))


def _over_heads(x: Tensor) -> list[Tensor]:
    """Mean, least and largest ``[n]`` of ``[n, heads]``: in no order."""
    return [x.mean(1), x.amin(1), x.amax(1)]
