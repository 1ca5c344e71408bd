"""The larger symmetry group of the paper's block: LayerNorm rotations and ReLU scales.

In addition to the paper's group: ``W_O → λ W_O R + n 1ᵀ`` with ``W_A → Rᵀ W_A + 1 v`` for R
orthogonal with ``1 R = 1`` and λ > 0 (the permutation π_O is one such R); a scale s > 0 for each
neuron between (W_A, b_A) and W_B; and ``(W_B, b_B) → μ (W_B, b_B) + (c, c_0) 1ᵀ`` with μ > 0.
Appendix B of the paper describes the matrices that commute with LayerNorm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.errors import GroupError
from transformer_nfn.spaces import Element, Weights, WeightSpace
from transformer_nfn.spaces.actions import Drawing
from transformer_nfn.spaces.actions.matrix import orthogonal
from transformer_nfn.spaces.actions.permutation import match_rows
from transformer_nfn.spaces.actions.solvers import exact_matrix, polar_fixing_ones
from transformer_nfn.symmetry.normal_forms import centred


@dataclass(frozen=True)
class EnlargedElement:
    """An element of the enlarged group: one of the paper's group, then the further symmetries.

    Attributes:
        paper: of the paper's group, with π_O the identity (R takes its place).
        R: ``[D, D]``. lam: λ > 0. n: ``[h, D_v]``. v: ``[D_A]``.
        s: ``[D_A]``, positive. mu: μ > 0. c: ``[D_A]``. c_0: a number.

    >>> from transformer_nfn import spaces
    >>> space = spaces.attention_block(4, 2, 2, 2, 3)
    >>> g = random_enlarged(space, torch.Generator().manual_seed(0))
    >>> sorted(g.act(space.randn(1))) == sorted(space.tensors)
    True
    """

    paper: Element
    R: Tensor
    lam: Tensor
    n: Tensor
    v: Tensor
    s: Tensor
    mu: Tensor
    c: Tensor
    c_0: Tensor

    def act(self, weights: Mapping[str, Tensor]) -> Weights:
        """New weights of the same function; ``[*lead, *axes]``."""
        dtype = next(iter(weights.values())).dtype
        w = {name: t.to(self.R.dtype) for name, t in self.paper.act(weights).items()}
        w["W_O"] = self.lam * w["W_O"] @ self.R + self.n[..., None]
        w["W_A"] = (self.R.T @ w["W_A"] + self.v) * self.s
        w["b_A"] = w["b_A"] * self.s
        w["W_B"] = self.mu * w["W_B"] / self.s[:, None] + self.c[:, None]
        w["b_B"] = self.mu * w["b_B"] + self.c_0
        return {name: t.to(dtype) for name, t in w.items()}


def check_block(space: WeightSpace) -> None:
    """Raise `GroupError` for any space but the paper's block."""
    if space.architecture != "attention_block":
        raise GroupError(
            f"the enlarged group is known for spaces.attention_block only, not '{space.name}'"
        )


def random_enlarged(
    space: WeightSpace, generator: torch.Generator | None = None, *, max_condition: float = 1e4
) -> EnlargedElement:
    """A random element of the enlarged group of the paper's block, in float64.

    >>> from transformer_nfn import spaces
    >>> random_enlarged(spaces.attention_block(4, 2, 2, 2, 3)).R.shape
    torch.Size([4, 4])
    """
    check_block(space)
    paper = space.group.random(generator, max_condition=max_condition)
    D, d_ff = (space.axes[a].size for a in ("feature", "neuron"))
    paper = Element(
        space,
        {**paper.perms, "feature": torch.arange(D)},
        paper.linears,
        paper.inverses,
    )

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return EnlargedElement(
        paper=paper,
        R=random_commuting(D, generator=generator, sign=1),
        lam=normal().exp(),
        n=normal(space.axes["head"].size, space.axes["vo"].size),
        v=normal(d_ff),
        s=normal(d_ff).exp(),
        mu=normal().exp(),
        c=normal(d_ff),
        c_0=normal(),
    )


def recover_enlarged(
    space: WeightSpace, U: Weights, V: Weights, unit: float
) -> EnlargedElement | None:
    """The enlarged element that takes ``U`` closest to ``V``; None if none can be determined.

    Args:
        U: one network, ``[*axes]`` in float64. V: the other.
        unit: expected relative error of one weight.
    """
    check_block(space)
    products = [w["W_Q"] @ w["W_K"].mT for w in (U, V)]
    tau = match_rows(products[1].flatten(1), products[0].flatten(1)).index
    moved = {name: U[name][tau] for name in ("W_Q", "W_K", "W_V", "W_O")}
    qk, vo = [], []
    for i in range(len(tau)):
        first = exact_matrix(moved["W_Q"][i], V["W_Q"][i], moved["W_K"][i], V["W_K"][i], unit=unit)
        # W_O is not comparable yet, so W_V alone determines N.
        none = moved["W_V"].new_zeros(0, moved["W_V"].shape[-1])
        second = exact_matrix(moved["W_V"][i], V["W_V"][i], none, none, unit=unit)
        if first is None or second is None:
            return None
        qk.append(first)
        vo.append(second)
    back = torch.argsort(tau)
    M, M_inv, N, N_inv = (
        torch.stack([pair[k] for pair in part]) for part in (qk, vo) for k in (0, 1)
    )
    O_U = N_inv @ moved["W_O"]
    S_U, S_V = (
        centred(x).flatten(0, 1) for x in (moved["W_V"] @ moved["W_O"], V["W_V"] @ V["W_O"])
    )
    if float(S_U.norm()) == 0 or float(S_V.norm()) == 0:
        return None
    lam = S_V.norm() / S_U.norm()
    R = polar_fixing_ones(S_U.T @ S_V)
    n = (V["W_O"] - lam * O_U @ R).mean(-1)
    turned = R.T @ U["W_A"]
    rows_U, rows_V = (
        torch.cat([centred(a.T), b[:, None]], 1)
        for a, b in ((turned, U["b_A"]), (V["W_A"], V["b_A"]))
    )
    size_U, size_V = rows_U.norm(dim=1, keepdim=True), rows_V.norm(dim=1, keepdim=True)
    if float(size_U.min()) == 0 or float(size_V.min()) == 0:
        return None
    pi_A = match_rows(rows_V / size_V, rows_U / size_U).index
    s = size_V[:, 0] / size_U[pi_A, 0]
    v = (V["W_A"] / s - turned[:, pi_A]).mean(0)
    W_B = U["W_B"][pi_A] / s[:, None]
    sizes = [
        torch.cat([centred(a), centred(b)[None]]).norm()
        for a, b in ((W_B, U["b_B"]), (V["W_B"], V["b_B"]))
    ]
    mu = sizes[1] / sizes[0]
    identity = space.group.identity(device=tau.device)
    paper = Element(
        space,
        {**identity.perms, "head": tau, "neuron": pi_A},
        {"qk": M[back], "vo": N[back]},
        {"qk": M_inv[back], "vo": N_inv[back]},
    )
    return EnlargedElement(
        paper=paper,
        R=R,
        lam=lam,
        n=n,
        v=v,
        s=s,
        mu=mu,
        c=(V["W_B"] - mu * W_B).mean(-1),
        c_0=(V["b_B"] - mu * U["b_B"]).mean(),
    )


def hyperplane(D: int) -> Tensor:
    """Orthonormal basis of the hyperplane orthogonal to the ones vector, ``[D, D−1]``."""
    basis = torch.eye(D, dtype=torch.float64)
    basis[:, 0] = 1.0
    Q: Tensor = torch.linalg.qr(basis).Q
    return Q[:, 1:]


def random_commuting(
    D: int, *, generator: torch.Generator | None = None, sign: int | None = None
) -> Tensor:
    """A random matrix that commutes with both steps of LayerNorm: centring and scaling.

    These are the orthogonal matrices whose rows and columns all have the same sum, which is then
    ±1 (the appendix's first theorem). They are ``Q diag(±1, X) Qᵀ`` with X orthogonal of size D−1
    and the first column of Q equal to ``1/√D`` (the paper's remark omits the conjugation by Q).
    ``LayerNorm(x M) = LayerNorm(x) M`` for every such M.

    Args:
        sign: the common row sum, +1 or −1; random by default.

    >>> M = random_commuting(5)
    >>> x = torch.randn(3, 5, dtype=torch.float64)
    >>> norm = lambda x: torch.nn.functional.layer_norm(x, (5,), eps=0)
    >>> torch.allclose(norm(x @ M), norm(x) @ M)
    True
    """
    if D < 1:
        raise GroupError(f"D must be positive, found {D}")
    if sign not in (None, 1, -1):
        raise GroupError(f"sign must be 1, -1 or None, found {sign}")
    if sign is None:
        sign = 1 if torch.rand((), generator=generator) < 0.5 else -1
    ones = torch.full((D, D), sign / D, dtype=torch.float64)
    if D == 1:
        return ones
    H = hyperplane(D)
    return ones + H @ orthogonal(1, D - 1, Drawing(generator))[0] @ H.T
