r"""Solvers for continuous group elements: matrices, orthogonal matrices, complex and real scales.

Rows of two networks are `P_A, P_B` (plain) and `D_A, D_B` (dual), `[*sites, rows, n]` each, as in
`Action`. Three problems occur, for each kind of element:

- *exact*: `P_A G = P_B` and `D_A G⁻ᵀ = D_B` hold up to rounding, G invertible (`Action.solve`);
- *least squares*: minimise \(w_1\|P_B - P_A G\|^2 + w_2\|D_A - D_B G^\top\|^2\), which is linear in
  G. Where both terms vanish, \(P_A D_A^\top = P_B D_B^\top\), even if G is singular: heads of low
  rank need no special case. Proofs use it, with weights from the rounding error;
- *nearest*: minimise \(\|P_A G - P_B\|^2 + \|D_A G^{-\top} - D_B\|^2\) over the group. Alignment
  uses it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
COMPLETION_DRAWS = 3
REFINEMENT_STEPS = 10  # at most; two or three suffice
NEAREST_STEPS = 4
NEWTON_STEPS = 5
FLOOR = 1e-9
LOW_FLOOR = 1e-13
SIZES = (1e-8, 1e8)
"""Range of scales that are considered."""
NEAR = 1e-6
"""Nearest matrices are refined where the squared distance relative to B's is below this."""
STEP_LENGTHS = (1.0, 0.3)


# Orthogonal matrices


def polar(cross: Tensor) -> Tensor:
    """Orthogonal T that maximises ``tr(Tᵀ cross)``, ``cross = AᵀB`` (orthogonal Procrustes).

    >>> cross = torch.tensor([[0.0, 2.0], [-3.0, 0.0]])
    >>> polar(cross).round().tolist()
    [[0.0, 1.0], [-1.0, 0.0]]
    """
    U, _, Vh = torch.linalg.svd(cross)
    T: Tensor = U @ Vh
    return T


def polar_fixing_ones(cross: Tensor) -> Tensor:
    """The same among orthogonal matrices that leave the all-ones vector in place.

    >>> T = polar_fixing_ones(torch.randn(4, 4, dtype=torch.float64))
    >>> torch.allclose(T.sum(1), torch.ones(4, dtype=torch.float64))
    True
    """
    centred = cross - cross.mean(0, keepdim=True)
    centred = centred - centred.mean(1, keepdim=True)
    size = torch.linalg.matrix_norm(centred).clamp_min(1e-300)
    return polar(centred + size / len(cross))  # nothing is larger than the direction of ones


# Invertible matrices


def sylvester(A: Tensor, B: Tensor, right: Tensor, floor: float) -> Tensor:
    """X with ``A X + X B = right`` for symmetric positive semidefinite A and B.

    Args:
        A: ``[*sites, n, n]``. B: likewise. right: likewise.
        floor: smallest sum of eigenvalues to divide by, relative to the largest.
    """
    a, U = torch.linalg.eigh(A)
    b, V = torch.linalg.eigh(B)
    below = a.unsqueeze(-1) + b.unsqueeze(-2)
    least = floor * below.amax((-2, -1), keepdim=True).clamp_min(1e-300)
    X: Tensor = U @ ((U.mT @ right @ V) / torch.maximum(below, least)) @ V.mT
    return X


def least_squares_matrix(plain: Pair, dual: Pair, weights: Pair) -> Tensor:
    """Least-squares G ``[*sites, n, n]``; weights ``[*sites]``."""
    (P_A, P_B), (D_A, D_B) = plain, dual
    w_1, w_2 = (w[..., None, None] for w in weights)
    right = w_1 * (P_A.mT @ P_B) + w_2 * (D_A.mT @ D_B)
    return sylvester(w_1 * (P_A.mT @ P_A), w_2 * (D_B.mT @ D_B), right, 1e-14)


def whitened_least_squares(
    plain: Pair, dual: Pair, errors: tuple[Pair, Pair], G: Tensor
) -> Tensor:
    """Least-squares G ``[*sites, n, n]`` under the rounding errors that an estimate of it implies.

    A row of ``P_A G − P_B`` has the covariance ``Gᵀ E_A G + E_B``, and a row of ``D_B Gᵀ − D_A``
    likewise. Where G has a large condition number, both are far from multiples of the identity.

    Args:
        plain: P_A, P_B ``[*sites, rows, n]``. dual: D_A, D_B.
        errors: expected squared errors ``[*sites, n]`` of an entry of P_A and P_B, D_A and D_B.
        G: the estimate.

    Example:
        >>> P, D, G = torch.randn(3, 1, 4, 4).double()
        >>> one = torch.ones(1, 4).double()
        >>> pairs = (P, P @ G), (D @ G.mT, D)
        >>> H = whitened_least_squares(*pairs, ((one, one), (one, one)), G)
        >>> bool((H - G).norm() < 1e-6)
        True
    """
    (P_A, P_B), (D_A, D_B) = plain, dual
    (e, f), (d, c) = errors
    S = G.mT @ (e.unsqueeze(-1) * G) + torch.diag_embed(f)
    T = G @ (c.unsqueeze(-1) * G.mT) + torch.diag_embed(d)
    floors = [1e-12 * x.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True) + 1e-300 for x in (S, T)]
    L, M = (
        torch.linalg.cholesky(x + torch.diag_embed(floor.expand(x.shape[:-1])))
        for x, floor in zip((S, T), floors, strict=True)
    )

    def divided(x: Tensor, L: Tensor) -> Tensor:
        """``x L⁻ᵀ``."""
        solved: Tensor = torch.linalg.solve_triangular(L, x.mT, upper=False)
        return solved.mT

    one = torch.ones(G.shape[:-2], dtype=G.dtype)
    X: Tensor = least_squares_matrix(
        (P_A @ M, divided(P_B, L)), (divided(D_A, M), D_B @ L), (one, one)
    )
    fitted: Tensor = M @ X @ L.mT
    return fitted


@dataclass(frozen=True)
class Products:
    """Gram matrices of two heads, ``[g, d, d]`` each: all that the distance depends on.

    Attributes:
        a: ``P_Aᵀ P_A``. b: ``D_Aᵀ D_A``. r: ``P_Aᵀ P_B``. s: ``D_Aᵀ D_B``.
        a_B: ``P_Bᵀ P_B``. b_B: ``D_Bᵀ D_B``.
    """

    a: Tensor
    b: Tensor
    r: Tensor
    s: Tensor
    a_B: Tensor
    b_B: Tensor

    @staticmethod
    def of(plain: Pair, dual: Pair) -> Products:
        """From P_A, P_B and D_A, D_B, each ``[g, rows, d]``."""
        (P_A, P_B), (D_A, D_B) = ([x.double() for x in pair] for pair in (plain, dual))
        pairs = ((P_A, P_A), (D_A, D_A), (P_A, P_B), (D_A, D_B), (P_B, P_B), (D_B, D_B))
        return Products(*(x.mT @ y for x, y in pairs))

    @property
    def size(self) -> Tensor:
        """Squared norm of P_B and D_B, ``[g]``."""
        return (self.a_B + self.b_B).diagonal(dim1=-2, dim2=-1).sum(-1)

    def objective(self, G: Tensor) -> Tensor:
        """Squared distance minus `size`, ``[g]``."""
        H = torch.linalg.inv(G)
        plain = ((self.a @ G - 2 * self.r) * G).sum((-2, -1))
        dual = ((H @ self.b - 2 * self.s.mT) * H).sum((-2, -1))
        return torch.nan_to_num(plain + dual, nan=torch.inf)


def nearest_matrix(plain: Pair, dual: Pair, *, dual_known: bool = True) -> Tensor:
    """Invertible G ``[g, d, d]`` that takes P_A, D_A nearest to P_B, D_B.

    Both heads are balanced (`PᵀP = DᵀD`, which fixes a basis up to an orthogonal matrix), that
    matrix is Procrustes', and Gauss–Newton steps `G → G exp(X)` follow. Where the two heads are
    equal up to a basis, G is exact up to rounding, whatever the ranks of P and D.

    Args:
        plain: P_A, P_B ``[g, rows, d]``.
        dual: D_A, D_B ``[g, rows, d]``.
        dual_known: False where the rows of D_A and D_B are not yet in one basis: then P alone
            determines the orthogonal matrix.
    """
    p = Products.of(plain, dual)
    balanced_A, balanced_B = _balance(p.a, p.b), _balance(p.a_B, p.b_B)
    back = torch.linalg.inv(balanced_B)
    cross = balanced_A.mT @ p.r @ balanced_B
    if not dual_known:
        only_plain: Tensor = balanced_A @ polar(cross) @ back
        return only_plain
    right = cross + torch.linalg.inv(balanced_A) @ p.s @ back.mT
    turn = polar(right)
    # Balanced heads of exact copies of low rank differ by more than an orthogonal matrix; that
    # difference solves the linear equations `P_A G = P_B` and `D_A = D_B Gᵀ`.
    plain_A, dual_B = balanced_A.mT @ p.a @ balanced_A, back @ p.b_B @ back.mT
    exact = turn + sylvester(plain_A, dual_B, right - plain_A @ turn - turn @ dual_B, LOW_FLOOR)
    starts = [balanced_A @ turn @ back, polar(p.r + p.s), balanced_A @ exact @ back]
    values = torch.stack([p.objective(G) for G in starts])
    chosen = values.argmin(0).reshape(1, -1, 1, 1)
    G = torch.stack(starts).take_along_dim(chosen, 0)[0]
    G, value = _descend(p, G)
    near = value + p.size < NEAR * p.size
    return _refine_nearest(plain, dual, G) if bool(near.any()) else G


def _refine_nearest(plain: Pair, dual: Pair, G: Tensor) -> Tensor:
    """Gauss–Newton steps on the heads themselves, where they almost agree.

    Gram matrices cancel there and determine a basis to half of the digits only.
    """
    (P_A, P_B), (D_A, D_B) = ([x.double() for x in pair] for pair in (plain, dual))

    def act(G: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        P, D = P_A @ G, D_A @ torch.linalg.inv(G).mT
        distance = (P - P_B).square().sum((-2, -1)) + (D - D_B).square().sum((-2, -1))
        return P, D, torch.nan_to_num(distance, nan=torch.inf)

    P, D, distance = act(G)
    for _ in range(NEAREST_STEPS):
        X = sylvester(P.mT @ P, D.mT @ D, P.mT @ (P_B - P) - (D_B - D).mT @ D, FLOOR)
        tried = G + G @ X
        reached = act(tried)[2]
        better = reached < distance
        settled = bool((reached > 0.25 * distance).all())
        G = torch.where(better[:, None, None], tried, G)
        if settled:
            break
        P, D, distance = act(G)
    return G


def _descend(p: Products, G: Tensor) -> Pair:
    value = p.objective(G)
    for _ in range(NEAREST_STEPS):
        H = torch.linalg.inv(G)
        A, B = G.mT @ p.a @ G, H @ p.b @ H.mT
        slope = A - G.mT @ p.r - B + (H @ p.s).mT
        X = -sylvester(A, B, slope, FLOOR)
        size = torch.linalg.matrix_norm(X)[:, None, None]
        X = X * (2.0 / size.clamp_min(2.0))  # bounds the step
        before = value
        for length in STEP_LENGTHS:
            tried = G @ torch.linalg.matrix_exp(length * X)
            reached = p.objective(tried)
            better = reached < value
            G = torch.where(better[:, None, None], tried, G)
            value = torch.where(better, reached, value)
        if bool((before - value <= 1e-9 * before.abs()).all()):
            break
    return G, value


def _balance(a: Tensor, b: Tensor) -> Tensor:
    """The symmetric G with ``Gᵀ a G = G⁻¹ b G⁻ᵀ``: ``(G Gᵀ) a (G Gᵀ) = b``."""
    root, back = _square_roots(a)
    middle, _ = _square_roots(root @ b @ root)
    G, _ = _square_roots(back @ middle @ back)
    return G


def _square_roots(x: Tensor) -> Pair:
    """Square root of a symmetric matrix, and its inverse."""
    values, U = torch.linalg.eigh((x + x.mT) / 2)
    floor = 1e-8 * values[..., -1:].clamp_min(1e-150)
    root = torch.maximum(values, floor).sqrt()
    return (U * root.unsqueeze(-2)) @ U.mT, (U / root.unsqueeze(-2)) @ U.mT


def exact_matrix(
    P_U: Tensor, P_V: Tensor, D_U: Tensor, D_V: Tensor, *, unit: float
) -> tuple[Tensor, Tensor] | None:
    """``G`` invertible with ``P_U G = P_V`` and ``D_V Gᵀ = D_U``, factors ``[rows, n]``.

    ``P_U`` fixes G on its row space (from the left), ``D_V`` on its row space (from the right).
    Where both factors lack rank, G is completed arbitrarily but well conditioned.
    """
    n = P_U.shape[-1]
    left, fixed_rows = _row_space(P_U, unit)
    right, fixed_columns = _row_space(D_V, unit)
    # Rows of G along the row space of P_U; columns of G along the row space of D_V.
    rows = _least_squares(P_U @ left[:, :fixed_rows], P_V) if fixed_rows else None
    columns = _least_squares(D_V @ right[:, :fixed_columns], D_U) if fixed_columns else None
    core = P_U.new_zeros(n, n)  # leftᵀ G right
    if columns is not None:
        core[:, :fixed_columns] = (columns @ left).T
    if rows is not None:
        core[:fixed_rows] = rows @ right
    G = left @ _completed(core, fixed_rows, fixed_columns) @ right.T
    if not bool(torch.isfinite(G).all()):
        return None
    if float(torch.linalg.cond(G)) > 0.01 / torch.finfo(G.dtype).eps:
        return None
    return _refine_exact(G, P_U, P_V, D_U, D_V)


def _refine_exact(
    G: Tensor, P_U: Tensor, P_V: Tensor, D_U: Tensor, D_V: Tensor
) -> tuple[Tensor, Tensor]:
    """Refine ``G`` so that both ``P_U G`` and ``D_U G⁻ᵀ`` fit best; return it and its inverse.

    Each column is weighted by its expected rounding error, so that the noise of neither factor
    is multiplied by the condition number of G. Gauss-Newton: with ``G → G (1 + E)`` the normal
    equations are a Sylvester equation for E.
    """
    inverse: Tensor = torch.linalg.inv(G)
    if 0 in (len(P_U), len(D_U)):
        return G, inverse
    sizes = [x.square().sum(0) for x in (P_U, P_V, D_U, D_V)]
    for _ in range(REFINEMENT_STEPS):
        P, D = P_U @ G, D_U @ inverse.mT
        weight_P = _weight(sizes[1] + sizes[0] @ G.square(), len(P))
        weight_D = _weight(sizes[3] + sizes[2] @ inverse.mT.square(), len(D))
        residuals = P - P_V, D - D_V
        cost = _cost(residuals, weight_P, weight_D)
        left, right = weight_D.rsqrt(), weight_P.rsqrt()
        a, X = torch.linalg.eigh(left[:, None] * (P.mT @ P) * left)
        b, Y = torch.linalg.eigh(right[:, None] * (D.mT @ D) * right)
        target = weight_D[:, None] * (residuals[1].mT @ D) - (P.mT @ residuals[0]) * weight_P
        scale = a[:, None] + b
        F = (X.mT @ (left[:, None] * target * right) @ Y) / scale
        F = torch.where(scale > 1e-14 * scale.abs().max(), F, 0.0)
        step = left[:, None] * (X @ F @ Y.mT) * right
        moved = G + G @ step
        if not bool(torch.isfinite(moved).all()):
            break
        undone, failed = torch.linalg.inv_ex(moved)
        new = _cost((P_U @ moved - P_V, D_U @ undone.mT - D_V), weight_P, weight_D)
        if int(failed) or not new < cost:
            break
        G, inverse = moved, undone
        if new > 0.999 * cost:
            break
    return G, inverse


def _weight(squares: Tensor, rows: int) -> Tensor:
    """Inverse expected squared error of an entry of each column, up to a common factor."""
    return rows / squares.clamp_min(1e-30 * float(squares.max().clamp_min(1e-200)))


def _cost(residuals: tuple[Tensor, Tensor], weight_P: Tensor, weight_D: Tensor) -> float:
    return float(
        (residuals[0].square() * weight_P).sum() + (residuals[1].square() * weight_D).sum()
    )


def _least_squares(A: Tensor, B: Tensor) -> Tensor:
    """``X`` with ``A X`` nearest to ``B``; A has full rank, so the fast driver suffices."""
    solution: Tensor = torch.linalg.lstsq(A, B, driver="gels").solution
    return solution


def _row_space(factor: Tensor, unit: float) -> tuple[Tensor, int]:
    """An orthogonal ``[n, n]`` whose first columns span the row space, and the rank."""
    n = factor.shape[-1]
    if factor.shape[0] == 0:
        return torch.eye(n, dtype=factor.dtype, device=factor.device), 0
    triangle = torch.linalg.qr(factor, mode="r").R
    _, values, vectors = torch.linalg.svd(triangle, full_matrices=True)
    # Four times the largest singular value expected of rounding errors alone.
    limit = float(values.norm()) * (factor.shape[0] ** -0.5 + n**-0.5) * unit * 4
    return vectors.T, int((values > limit).sum())


def _completed(core: Tensor, rows: int, columns: int) -> Tensor:
    """``core`` with its free corner filled by random directions at the scale of the rest.

    Random directions may be close to fixed ones, so the best conditioned of a few draws is taken.
    """
    n = core.shape[-1]
    shape = (n - rows, n - columns)
    if 0 in shape or not bool(torch.isfinite(core).all()):
        return core
    known = torch.linalg.matrix_norm(core, 2) if rows or columns else core.new_ones(())
    scale = known if float(known) > 0 else core.new_ones(())
    generator = torch.Generator().manual_seed(0)
    filled = []
    for _ in range(COMPLETION_DRAWS):
        noise = torch.randn(max(shape), max(shape), generator=generator, dtype=core.dtype)
        Q: Tensor = torch.linalg.qr(noise).Q
        whole = core.clone()
        whole[rows:, columns:] = scale * Q[: shape[0], : shape[1]].to(core.device)
        filled.append(whole)
    return min(filled, key=lambda whole: float(torch.linalg.cond(whole)))


# Scales, complex and real, and signs


def least_squares_scales(plain: Pair, dual: Pair, weights: Pair) -> Tensor:
    """Least-squares scale of each column, ``[*sites, n]``; 0 where nothing determines it.

    Args:
        plain: real or complex P_A, P_B ``[*sites, rows, n]``.
        dual: D_A, D_B, likewise; a complex scale z acts on them as 1/z̄.
        weights: broadcast to ``[*sites, n]``.
    """
    (P_A, P_B), (D_A, D_B) = plain, dual
    above = weights[0] * (P_A.conj() * P_B).sum(-2) + weights[1] * (D_A.conj() * D_B).sum(-2)
    below = weights[0] * P_A.abs().square().sum(-2) + weights[1] * D_B.abs().square().sum(-2)
    return above / below.clamp_min(1e-300)


def nearest_complex(plain: Pair, dual: Pair) -> Tensor:
    """Nearest complex scale of each column, ``[*sites, n]``; arguments as above."""
    (P_A, P_B), (D_A, D_B) = plain, dual
    a, b = (x.abs().square().sum(-2) for x in (P_A, D_A))
    r, s = (P_A.conj() * P_B).sum(-2), (D_A.conj() * D_B).sum(-2)
    # G⁻ᵀ has the phase of G and the inverse modulus, so one phase serves both.
    size = _nearest_modulus(a, b, r, s)
    phase = r * size + s / size
    return size * phase / phase.abs().clamp_min(1e-300)


def nearest_quarter_turns(plain: Pair, dual: Pair, free: Tensor) -> Pair:
    """Nearest complex scale among ±1 and ±i: what a norm on queries and keys leaves.

    Signs are free at every site; whether a pair makes a quarter turn is one choice for all sites,
    or one for each.

    Args:
        plain: complex P_A, P_B ``[g, rows, n]``.
        dual: complex D_A, D_B, likewise.
        free: pairs with equal gains, which each site may rotate by any angle; ``[1, n]`` for one
            choice, ``[g, n]`` for a choice at each site.

    Returns:
        Scales ``[g, n]``, and which pairs make a quarter turn, as ``free``.
    """
    inner = sum((x.conj() * y).sum(-2) for x, y in (plain, dual))
    assert isinstance(inner, Tensor)
    along, across = (
        x.abs().unflatten(0, (len(free), -1)).sum(1) for x in (inner.real, inner.imag)
    )
    turned = (across > along) & ~free
    real, imaginary = (signs(x) for x in (inner.real, inner.imag))
    zero = torch.zeros_like(real)
    scale = torch.complex(torch.where(turned, zero, real), torch.where(turned, imaginary, zero))
    return torch.where(free, inner / inner.abs().clamp_min(1e-300), scale), turned


def rounding_weights(plain: Pair, dual: Pair) -> Pair:
    """Least-squares weights ``[*sites, n]`` for errors relative to the size of a column."""
    sizes = (x.abs().square().sum(-2) for x in (plain[1], dual[0]))
    first, second = (torch.where(x > 0, 1 / x, 0.0) for x in sizes)
    return first, second


def signs(x: Tensor) -> Tensor:
    """−1 where negative, else 1, in the dtype of ``x``.

    >>> signs(torch.tensor([-0.5, 0.0, 2.0])).tolist()
    [-1.0, 1.0, 1.0]
    """
    return torch.where(x < 0, -1.0, 1.0).to(x.dtype)


def nearest_scales(plain: Pair, dual: Pair, *, positive: bool) -> Tensor:
    """Nearest scale of each column, ``[*sites, n]``.

    Args:
        plain: p_A, p_B ``[*sites, rows, n]``.
        dual: d_A, d_B, likewise.
        positive: only positive scales are in the group (ReLU).

    >>> p, d = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 1.0]])
    >>> s = torch.tensor([-2.0, 0.5])
    >>> nearest_scales((p, p * s), (d, d / s), positive=False).tolist()
    [-2.0, 0.5]
    """
    (p_A, p_B), (d_A, d_B) = ([x.double() for x in pair] for pair in (plain, dual))
    a, b = p_A.square().sum(-2), d_A.square().sum(-2)
    r, s = (p_A * p_B).sum(-2), (d_A * d_B).sum(-2)
    return nearest_scales_from_products(a, b, r, s, positive=positive)


def nearest_scales_from_products(
    a: Tensor, b: Tensor, r: Tensor, s: Tensor, *, positive: bool
) -> Tensor:
    """The same from sums ``[*sites, n]``: ``‖p_A‖²``, ``‖d_A‖²``, ``p_A · p_B``, ``d_A · d_B``."""
    size = _nearest_modulus(a, b, r, s, positive=positive)
    if positive:
        return size
    return torch.where(r * size + s / size < 0, -size, size)


def _nearest_modulus(
    a: Tensor, b: Tensor, r: Tensor, s: Tensor, *, positive: bool = False
) -> Tensor:
    """z > 0 that minimises ``a z² + b / z² − 2 |r z + s / z|``, for real or complex r and s.

    The best of a range of powers and of the two scales that fit one side alone, then Newton
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
    for _ in range(NEWTON_STEPS):
        plain, dual, size = a * best.square(), b / best.square(), both(best)
        if positive:
            slope = r * best - s / best
        else:
            slope = (r.abs() * best).square() - (s.abs() / best).square()
            slope = slope / size.clamp_min(1e-300)
        curve = (2 * (plain + dual) - size).clamp_min(0.1 * (plain + dual) + 1e-300)
        best = best * ((slope - plain + dual) / curve).clamp(-0.01, 0.01).exp()
    return best
