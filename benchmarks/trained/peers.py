"""Published measures of shared ancestry, written from their papers for models of one shape.

Each takes two open models and token ids ``[rows, length]``, and returns a number that is larger
for related models; None where the method does not apply. Weights are taken as the file holds
them, as the papers do.

====================  ============================================================================
AWM                   arXiv 2510.06738: signed assignment of the stream by embeddings, then
                      unbiased CKA of the query and key matrices
HuRef                 arXiv 2312.04828: cosine of the invariant terms of the last two blocks
GhostSpec             arXiv 2511.06390: squared distance of the singular values of the products
                      of queries and keys, and of values and outputs
CSU                   arXiv 2502.12292: neurons assigned by their weights, rank correlation of the
                      assignment with the identity; −log10 p
MATCH                 arXiv 2502.12292: neurons assigned by gate and by up activations, rank
                      correlation of the two assignments; −log10 p
REEF                  arXiv 2410.14273: linear CKA of the hidden states after every block
====================  ============================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import chi2, t
from torch import Tensor

from transformer_nfn.checkpoints.families import Model
from transformer_nfn.functional.transformer import affine_norm, attention, embed, mlp, run_block

Measure = Callable[[Model, Model, Tensor], float | None]


def awm(A: Model, B: Model, ids: Tensor) -> float:
    """Mean size of the unbiased CKA of queries and keys, streams aligned by embeddings."""
    C = _unit(A["token"].double(), 0).mT @ _unit(B["token"].double(), 0)
    order = _assign(C.abs())
    signs = torch.where(C.gather(1, order[:, None]) < 0, -1.0, 1.0).double()
    scores = []
    for a, b in _blocks(A, B):
        for name in ("W_Q", "W_K"):
            X, Y = (w[name].movedim(1, 0).flatten(1) for w in (a, b))  # [D, heads · d]
            scores.append(abs(_unbiased_cka(X @ X.mT, _kernel(Y[order] * signs))))
    return _mean(scores)


def huref(A: Model, B: Model, ids: Tensor) -> float | None:
    """Mean cosine of ``X W_Q W_Kᵀ Xᵀ``, ``X W_V W_O Xᵀ`` and ``X W_A W_B Xᵀ``, X the embeddings."""
    if _mixture(A, B):
        return None
    X, Y = (m["token"].double() for m in (A, B))
    scores = []
    for a, b in list(_blocks(A, B))[-2:]:
        for of in (_query_key, _value_output, lambda w: w["W_A"] @ w["W_B"]):
            scores.append(_cosine(X @ of(a) @ X.mT, Y @ of(b) @ Y.mT))
    return _mean(scores)


def ghostspec(A: Model, B: Model, ids: Tensor) -> float:
    """Minus the mean squared distance of singular values, each spectrum of length one."""
    scores = []
    for a, b in _blocks(A, B):
        for of in (_query_key, _value_output):
            s, r = (_unit(torch.linalg.svdvals(of(w)), 0) for w in (a, b))
            scores.append(-float((s - r).square().mean()))
    return _mean(scores)


def csu(A: Model, B: Model, ids: Tensor) -> float | None:
    """−log10 p of the order of neurons, assigned by what they read."""
    if _mixture(A, B):
        return None
    orders = []
    for a, b in _blocks(A, B):
        order = _assign(_unit(a["W_A"], 0).mT @ _unit(b["W_A"], 0))
        orders.append((order, torch.arange(len(order))))
    return _evidence(orders)


def match(A: Model, B: Model, ids: Tensor) -> float | None:
    """−log10 p of the agreement of two assignments of neurons, by gate and by up activations."""
    if _mixture(A, B) or not A.description.stacks[0].blocks[0].mlp.gated:
        return None
    orders = []
    for (_, a), (_, b) in zip(_run(A, ids), _run(B, ids), strict=True):
        gate, up = (_assign(_unit(a[n], 0).mT @ _unit(b[n], 0)) for n in ("W_G", "W_A"))
        orders.append((gate, up))
    return _evidence(orders)


def reef(A: Model, B: Model, ids: Tensor) -> float:
    """Mean over the blocks of the linear CKA of the hidden states of the last tokens."""
    scores = []
    for (x, _), (y, _) in zip(_run(A, ids), _run(B, ids), strict=True):
        scores.append(_cosine(*(_kernel(z[:, -1] - z[:, -1].mean(0)) for z in (x, y))))
    return _mean(scores)


PEERS: dict[str, Measure] = {
    "AWM": awm,
    "HuRef": huref,
    "GhostSpec": ghostspec,
    "CSU": csu,
    "MATCH": match,
    "REEF": reef,
}


def _blocks(A: Model, B: Model) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    for i in range(len(A.description.stacks[0].blocks)):
        yield A.block(i), B.block(i)


def _mixture(A: Model, B: Model) -> bool:
    """Whether one has experts: measures of single MLPs do not apply."""
    return any(m.description.stacks[0].blocks[0].mlp.experts for m in (A, B))


def _query_key(w: dict[str, Tensor]) -> Tensor:
    """``W_Q W_Kᵀ`` over all heads, ``[D, D]``."""
    share = len(w["W_Q"]) // len(w["W_K"])
    return torch.einsum("had,hbd->ab", w["W_Q"], w["W_K"].repeat_interleave(share, 0))


def _value_output(w: dict[str, Tensor]) -> Tensor:
    share = len(w["W_O"]) // len(w["W_V"])
    return torch.einsum("had,hdb->ab", w["W_V"].repeat_interleave(share, 0), w["W_O"])


def _run(model: Model, ids: Tensor) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """After each block: the stream, and of gated MLPs what gate and up give for every token."""
    about = model.description
    stack = about.stacks[0]
    x = embed(about, stack, model, ids, dtype=torch.float32)
    for i, block in enumerate(stack.blocks):
        w = model.block(i, stack.prefix, torch.float32)
        hidden = {}
        if block.mlp.gated and not block.mlp.experts:
            z = affine_norm(x, about.norm, about.eps, w["norm_1.g"], w.get("norm_1.b"))
            middle = x + attention(z, w, block.attention)
            z = affine_norm(middle, about.norm, about.eps, w["norm_2.g"], w.get("norm_2.b"))
            hidden = {n: (z @ w[n]).flatten(0, 1) for n in ("W_G", "W_A")}
            x = middle + mlp(z, w, block.mlp)
        else:
            x = run_block(about, block, w, x)
        yield x, hidden


def _assign(similarity: Tensor) -> Tensor:
    """For each row its column, so that the sum is largest."""
    return torch.from_numpy(linear_sum_assignment(similarity.numpy(), maximize=True)[1])


def _evidence(orders: list[tuple[Tensor, Tensor]]) -> float:
    """−log10 p of the rank correlations of several pairs of permutations, by Fisher's method."""
    total = 0.0
    for first, second in orders:
        n = len(first)
        r = float(torch.corrcoef(torch.stack([first, second]).double())[0, 1])
        r = min(max(r, -1 + 1e-12), 1 - 1e-12)
        total -= 2 * float(t.logsf(r * math.sqrt((n - 2) / (1 - r * r)), n - 2))
    return -float(chi2.logsf(total, 2 * len(orders))) / math.log(10)


def _unbiased_cka(K: Tensor, L: Tensor) -> float:
    products = _unbiased_hsic(K, K) * _unbiased_hsic(L, L)
    return _unbiased_hsic(K, L) / math.sqrt(products) if products > 0 else 0.0


def _unbiased_hsic(K: Tensor, L: Tensor) -> float:
    """Song et al. 2012, without the factor that cancels."""
    n = len(K)
    K, L = (M - M.diagonal().diag() for M in (K, L))
    k, m = K.sum(1), L.sum(1)
    return float((K * L).sum() + k.sum() * m.sum() / ((n - 1) * (n - 2)) - 2 * (k @ m) / (n - 2))


def _kernel(X: Tensor) -> Tensor:
    return X @ X.mT


def _unit(x: Tensor, dim: int) -> Tensor:
    return x / x.norm(dim=dim, keepdim=True).clamp_min(1e-30)


def _cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()).clamp_min(1e-30))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
