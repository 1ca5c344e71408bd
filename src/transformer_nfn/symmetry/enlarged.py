"""The larger group of the paper's block: what its LayerNorms and its ReLU do not notice either.

Beside the paper's group: ``W_O → λ W_O R + n 1ᵀ`` with ``W_A → Rᵀ W_A + 1 v`` for R orthogonal
with ``1 R = 1`` and λ > 0 (the permutation π_O is one such R); a scale s > 0 for each neuron
between (W_A, b_A) and W_B; and ``(W_B, b_B) → μ (W_B, b_B) + (c, c_0) 1ᵀ`` with μ > 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.errors import GroupError
from transformer_nfn.spaces import Element, Weights, WeightSpace
from transformer_nfn.spaces.actions.linear import solve_general
from transformer_nfn.spaces.actions.permutation import match_rows
from transformer_nfn.symmetry.block_function import centred
from transformer_nfn.symmetry.layer_norm import hyperplane, random_commuting


@dataclass(frozen=True)
class EnlargedElement:
    """An element of the enlarged group: one of the paper's, then what only the block allows.

    Attributes:
        paper: of the paper's group, with π_O the identity (R takes its place).
        R: ``[D, D]``. lam: λ > 0. n: ``[h, D_v]``. v: ``[D_A]``.
        s: ``[D_A]``, positive. mu: μ > 0. c: ``[D_A]``. c_0: a number.
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
    """The enlarged group is worked out for the paper's block alone."""
    if space.architecture != "attention_block":
        raise GroupError(
            f"the enlarged group is known for spaces.attention_block only, not '{space.name}'"
        )


def random_enlarged(
    space: WeightSpace, generator: torch.Generator | None = None, *, max_condition: float = 1e4
) -> EnlargedElement:
    """A random element of the enlarged group of the paper's block, in float64."""
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
    """The enlarged element that takes ``U`` to ``V``, as well as it can be read off; or None.

    Args:
        space: the paper's block.
        U: one network, ``[*axes]`` in float64.
        V: the other.
        unit: relative error to expect in one weight.
    """
    check_block(space)
    products = [w["W_Q"] @ w["W_K"].mT for w in (U, V)]
    tau = match_rows(products[1].flatten(1), products[0].flatten(1)).index
    moved = {name: U[name][tau] for name in ("W_Q", "W_K", "W_V", "W_O")}
    qk, vo = [], []
    for i in range(len(tau)):
        first = solve_general(moved["W_Q"][i], V["W_Q"][i], moved["W_K"][i], V["W_K"][i], unit=unit)
        # W_O is not comparable yet, so W_V alone must tell N.
        none = moved["W_V"].new_zeros(0, moved["W_V"].shape[-1])
        second = solve_general(moved["W_V"][i], V["W_V"][i], none, none, unit=unit)
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
    R = _rotation(S_U, S_V)
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


def _rotation(S_U: Tensor, S_V: Tensor) -> Tensor:
    """The orthogonal R with ``1 R = 1`` that brings the rows of ``S_U`` nearest to ``S_V``."""
    D = S_U.shape[-1]
    H = hyperplane(D, dtype=S_U.dtype, device=S_U.device)
    X, _, Y = torch.linalg.svd((S_U @ H).T @ (S_V @ H))
    R: Tensor = H @ (X @ Y) @ H.T
    return R + 1 / D
