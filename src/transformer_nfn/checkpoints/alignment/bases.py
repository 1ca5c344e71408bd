r"""Bases of heads nearest to those of another network: matrices, complex and real scales.

A re-basing acts on two tensors at once, `P → P G` and `D → D G⁻ᵀ`, so it is no plain Procrustes
problem. `fit_matrices` minimises

\[ \|P_A G - P_B\|^2 + \|D_A G^{-\top} - D_B\|^2 \]

over all invertible G: both heads are balanced (`PᵀP = DᵀD`, which fixes a basis up to a turn), the
turn is Procrustes', and Gauss–Newton steps `G → G exp(X)` go on from there. Where the two heads are
one up to a basis, G is exact up to rounding, whatever the ranks of P and D.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = 4
NEWTON = 5
FLOOR = 1e-9
LOW = 1e-13
SIZES = (1e-8, 1e8)
"""Scales that are considered."""
EXACT = 1e-6
"""Heads are refined whose squared distance, relative to B's, is below this."""
LENGTHS = (1.0, 0.3)


@dataclass(frozen=True)
class Products:
    """All that the fit of a basis sees of two heads, ``[g, d, d]`` each.

    Attributes:
        a: ``P_Aᵀ P_A``.
        b: ``D_Aᵀ D_A``.
        r: ``P_Aᵀ P_B``.
        s: ``D_Aᵀ D_B``.
        a_B: ``P_Bᵀ P_B``.
        b_B: ``D_Bᵀ D_B``.
    """

    a: Tensor
    b: Tensor
    r: Tensor
    s: Tensor
    a_B: Tensor
    b_B: Tensor

    @staticmethod
    def of(plain: tuple[Tensor, Tensor], dual: tuple[Tensor, Tensor]) -> Products:
        """From P_A, P_B and D_A, D_B, each ``[g, rows, d]``."""
        (P_A, P_B), (D_A, D_B) = ([x.double() for x in pair] for pair in (plain, dual))
        pairs = ((P_A, P_A), (D_A, D_A), (P_A, P_B), (D_A, D_B), (P_B, P_B), (D_B, D_B))
        return Products(*(x.mT @ y for x, y in pairs))

    @property
    def size(self) -> Tensor:
        """Squares of P_B and D_B, ``[g]``."""
        return (self.a_B + self.b_B).diagonal(dim1=-2, dim2=-1).sum(-1)

    def away(self, G: Tensor) -> Tensor:
        """What is minimised, less `size`, ``[g]``."""
        H = torch.linalg.inv(G)
        plain = ((self.a @ G - 2 * self.r) * G).sum((-2, -1))
        dual = ((H @ self.b - 2 * self.s.mT) * H).sum((-2, -1))
        return torch.nan_to_num(plain + dual, nan=torch.inf)


def fit_matrices(
    plain: tuple[Tensor, Tensor], dual: tuple[Tensor, Tensor], *, dual_known: bool = True
) -> Tensor:
    """G ``[g, d, d]`` of every group; see the page.

    Args:
        plain: P_A, P_B ``[g, rows, d]``.
        dual: D_A, D_B ``[g, rows, d]``.
        dual_known: False where the rows of D_A and D_B are not yet in one basis: then only P
            tells the turn.
    """
    p = Products.of(plain, dual)
    balanced_A, balanced_B = _balance(p.a, p.b), _balance(p.a_B, p.b_B)
    back = torch.linalg.inv(balanced_B)
    cross = balanced_A.mT @ p.r @ balanced_B
    if not dual_known:
        only_plain: Tensor = balanced_A @ _polar(cross) @ back
        return only_plain
    right = cross + torch.linalg.inv(balanced_A) @ p.s @ back.mT
    turn = _polar(right)
    # Of exact copies of low rank the balanced heads differ by more than a turn: solved for as
    # `P_A G = P_B` and `D_A = D_B Gᵀ`, which is linear.
    plain_A, dual_B = balanced_A.mT @ p.a @ balanced_A, back @ p.b_B @ back.mT
    exact = turn + _sylvester(plain_A, dual_B, right - plain_A @ turn - turn @ dual_B, LOW)
    starts = [balanced_A @ turn @ back, _polar(p.r + p.s), balanced_A @ exact @ back]
    values = torch.stack([p.away(G) for G in starts])
    chosen = values.argmin(0).reshape(1, -1, 1, 1)
    G = torch.stack(starts).take_along_dim(chosen, 0)[0]
    G, value = _descend(p, G)
    near = value + p.size < EXACT * p.size
    return _refine(plain, dual, G) if bool(near.any()) else G


def _refine(plain: tuple[Tensor, Tensor], dual: tuple[Tensor, Tensor], G: Tensor) -> Tensor:
    """Gauss–Newton steps from differences of the heads themselves, where they almost agree.

    Products of heads cancel there: they tell a basis to half of the digits.
    """
    (P_A, P_B), (D_A, D_B) = ([x.double() for x in pair] for pair in (plain, dual))

    def moved(G: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        P, D = P_A @ G, D_A @ torch.linalg.inv(G).mT
        away = (P - P_B).square().sum((-2, -1)) + (D - D_B).square().sum((-2, -1))
        return P, D, torch.nan_to_num(away, nan=torch.inf)

    P, D, away = moved(G)
    for _ in range(STEPS):
        X = _sylvester(P.mT @ P, D.mT @ D, P.mT @ (P_B - P) - (D_B - D).mT @ D)
        tried = G + G @ X
        reached = moved(tried)[2]
        better = reached < away
        settled = bool((reached > 0.25 * away).all())
        G = torch.where(better[:, None, None], tried, G)
        if settled:
            break
        P, D, away = moved(G)
    return G


def _descend(p: Products, G: Tensor) -> tuple[Tensor, Tensor]:
    value = p.away(G)
    for _ in range(STEPS):
        H = torch.linalg.inv(G)
        A, B = G.mT @ p.a @ G, H @ p.b @ H.mT
        slope = A - G.mT @ p.r - B + (H @ p.s).mT
        X = -_sylvester(A, B, slope)
        size = torch.linalg.matrix_norm(X)[:, None, None]
        X = X * (2.0 / size.clamp_min(2.0))  # no step that turns everything round at once
        before = value
        for length in LENGTHS:
            tried = G @ torch.linalg.matrix_exp(length * X)
            reached = p.away(tried)
            better = reached < value
            G = torch.where(better[:, None, None], tried, G)
            value = torch.where(better, reached, value)
        if bool((before - value <= 1e-9 * before.abs()).all()):
            break
    return G, value


def _sylvester(A: Tensor, B: Tensor, right: Tensor, floor: float = FLOOR) -> Tensor:
    """X with ``A X + X B = right`` for symmetric A, B that are not negative."""
    a, U = torch.linalg.eigh(A)
    b, V = torch.linalg.eigh(B)
    below = a.unsqueeze(-1) + b.unsqueeze(-2)
    least = floor * below.amax((-2, -1), keepdim=True).clamp_min(1e-300)
    X: Tensor = U @ ((U.mT @ right @ V) / torch.maximum(below, least)) @ V.mT
    return X


def _balance(a: Tensor, b: Tensor) -> Tensor:
    """The symmetric G with ``Gᵀ a G = G⁻¹ b G⁻ᵀ``: ``(G Gᵀ) a (G Gᵀ) = b``."""
    root, back = _powers(a)
    middle, _ = _powers(root @ b @ root)
    G, _ = _powers(back @ middle @ back)
    return G


def _powers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Square root of a symmetric matrix, and the inverse of that."""
    values, U = torch.linalg.eigh((x + x.mT) / 2)
    floor = 1e-8 * values[..., -1:].clamp_min(1e-150)
    root = torch.maximum(values, floor).sqrt()
    return (U * root.unsqueeze(-2)) @ U.mT, (U / root.unsqueeze(-2)) @ U.mT


def _polar(x: Tensor) -> Tensor:
    U, _, Vh = torch.linalg.svd(x)
    out: Tensor = U @ Vh
    return out


def fit_turns(plain: tuple[Tensor, Tensor], dual: tuple[Tensor, Tensor]) -> Tensor:
    """The same where G is one complex scale per pair (i, i + d/2): complex ``[g, d/2]``."""
    (P_A, P_B), (D_A, D_B) = ([_complex(x) for x in pair] for pair in (plain, dual))
    a, b = (x.abs().square().sum(-2) for x in (P_A, D_A))
    r, s = (P_A.conj() * P_B).sum(-2), (D_A.conj() * D_B).sum(-2)
    # G⁻ᵀ turns as G does and scales the other way, so one phase serves both.
    size = _best_size(a, b, r, s)
    phase = r * size + s / size
    return size * phase / phase.abs().clamp_min(1e-300)


def fit_scales(
    plain: tuple[Tensor, Tensor], dual: tuple[Tensor, Tensor], *, positive: bool
) -> Tensor:
    """s ``[n]`` that minimises ``‖s p_A − p_B‖² + ‖d_A / s − d_B‖²`` for each row.

    Args:
        plain: p_A, p_B ``[n, entries]``.
        dual: d_A, d_B ``[n, entries]``.
        positive: negative scales do not act (ReLU).
    """
    (p_A, p_B), (d_A, d_B) = ([x.double() for x in pair] for pair in (plain, dual))
    a, b = p_A.square().sum(-1), d_A.square().sum(-1)
    r, s = (p_A * p_B).sum(-1), (d_A * d_B).sum(-1)
    return scales_from(a, b, r, s, positive=positive)


def scales_from(a: Tensor, b: Tensor, r: Tensor, s: Tensor, *, positive: bool) -> Tensor:
    """The same from sums ``[n]``: ``‖p_A‖²``, ``‖d_A‖²``, ``p_A · p_B``, ``d_A · d_B``."""
    size = _best_size(a, b, r, s, positive=positive)
    if positive:
        return size
    return torch.where(r * size + s / size < 0, -size, size)


def _best_size(a: Tensor, b: Tensor, r: Tensor, s: Tensor, *, positive: bool = False) -> Tensor:
    """z > 0 that minimises ``a z² + b / z² − 2 |r z + s / z|``, for real or complex r and s.

    The best of a range of powers and of the two scales that fit one side alone, then Newton's
    steps on the derivative, which rounding blurs far less than the minimum. Where ``positive``,
    without the absolute value.
    """

    def both(z: Tensor) -> Tensor:
        return r * z + s / z if positive else (r * z + s / z).abs()

    middle = ((b + 1e-300) / (a + 1e-300)).pow(0.25).clamp(*SIZES)
    sides = torch.stack([r.abs() / (a + 1e-300), b / (s.abs() + 1e-300)])
    sides = torch.where(sides > 0, sides, middle).clamp(*SIZES)
    best = middle
    for reach in (3.0, 0.15):
        steps = torch.linspace(-reach, reach, 61, dtype=a.dtype).exp()
        tried = best.unsqueeze(0) * steps.reshape(-1, *[1] * best.ndim)
        tried = torch.cat([tried, sides])
        values = a * tried.square() + b / tried.square() - 2 * both(tried)
        best = tried.gather(0, values.argmin(0, keepdim=True))[0]
    for _ in range(NEWTON):
        plain, dual, size = a * best.square(), b / best.square(), both(best)
        if positive:
            slope = r * best - s / best
        else:
            slope = (r.abs() * best).square() - (s.abs() / best).square()
            slope = slope / size.clamp_min(1e-300)
        curve = (2 * (plain + dual) - size).clamp_min(0.1 * (plain + dual) + 1e-300)
        best = best * ((slope - plain + dual) / curve).clamp(-0.01, 0.01).exp()
    return best


def _complex(x: Tensor) -> Tensor:
    first, second = x.double().chunk(2, -1)
    return torch.complex(first.contiguous(), second.contiguous())
