"""Checks of tensors under a group element: residuals against expected rounding errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from transformer_nfn.checkpoints.pieces import Piece, filled
from transformer_nfn.checkpoints.reduced import ReducedBlock
from transformer_nfn.checkpoints.stream import BlockStreams
from transformer_nfn.checkpoints.symmetries import StreamMap
from transformer_nfn.spaces.actions.solvers import Pair
from transformer_nfn.symmetry.rounding import HALF, scatter, site_excess, tensor_excess

DUPLICATE = 0.999
"""Cosine from which on two neurons or heads count as one."""
INVERTIBLE = 1e4
"""Condition number up to which a change of basis is inverted."""
CORRELATED = 2.0
"""Times the variance of independent errors: both tensors read through one norm, whose rounded gains
move both bases the same way. Exact would be 1 to 1.5."""
FEW = 64
"""Fewer numbers than these scatter as a vector does."""


@dataclass(frozen=True)
class Tolerance:
    """Limits of a residual, in expected rounding errors.

    Attributes:
        same: up to this a tensor agrees.
        different: from this on it differs, whatever the other tensors do.

    Example:
        >>> Tolerance.of(torch.float32, torch.bfloat16)
        Tolerance(same=2.0, different=2.2)
    """

    same: float
    different: float

    @staticmethod
    def of(*dtypes: torch.dtype) -> Tolerance:
        """Limits for two files.

        In half precision two rounding errors are allowed: a disguise of condition 10 leaves one,
        a matrix changed by 1 % has three and more. In single and double precision there is
        room for what arithmetic adds to storing, and between 1e-6 and any deliberate change.
        """
        return Tolerance(2.0, 2.2) if any(d in HALF for d in dtypes) else Tolerance(16.0, 64.0)


@dataclass(frozen=True)
class Check:
    """One tensor of the reduced form under the element.

    Attributes:
        name: canonical name.
        residual: ``‖moved − other‖ / ‖other‖``.
        expected: the part of it that rounding explains, in the mean square.
        ratio: residual over expected, of the tensor as a whole.
        worst: the largest such ratio of one head, neuron, row or entry, divided by the scatter
            that few numbers may have.
        excess: the larger of the two, as `Tolerance` counts rounding errors. A sum of few rounding
            errors, such as a bias with others folded in, scatters more than a matrix does: its
            ``ratio`` counts half.
        observable: the same as ``excess``, of what the function can depend on: a change of an
            output matrix whose input is always zero does not change the function.
        hidden: the part of the tensor that a change of one rounding error as `Tolerance` counts
            them amounts to.
    """

    name: str
    residual: float
    expected: float
    ratio: float
    worst: float
    excess: float
    observable: float
    hidden: float

    def within(self, tolerance: Tolerance) -> bool:
        """Whether rounding explains the tensor and each of its parts."""
        return self.excess <= tolerance.same

    def beyond(self, tolerance: Tolerance) -> bool:
        """Whether rounding does not explain it, and the function depends on it."""
        return self.observable > tolerance.different


@dataclass(frozen=True)
class Squares:
    """Squares summed over each site of a tensor (heads, neurons, rows or entries), ``[sites]``.

    Attributes:
        residual: of the difference.
        error: expected, of the rounding error.
        size: of the tensor.
    """

    residual: Tensor
    error: Tensor
    size: Tensor

    @staticmethod
    def between(moved: Piece, other: Piece, *dims: int, larger: bool = False) -> Squares:
        """Of a tensor that was moved, and the one it should be, summed over some axes.

        Args:
            moved: of the first model; its error is that of each site, or of each entry.
            other: of the second model, likewise.
            larger: the size is that of the larger of the two, not of ``other``.
        """
        squares = [(moved.value - other.value).square(), other.value.square()]
        squares += [moved.value.square()] if larger else []
        error = moved.error + other.error
        if dims:
            error = error.sum(dims) if error.ndim == moved.value.ndim else error
            squares = [x.sum(dims) for x in squares]
        residual, *sizes = squares
        return Squares(residual, error, torch.maximum(*sizes) if larger else sizes[0])

    @staticmethod
    def join(parts: Sequence[Squares]) -> Squares:
        """The sites of several portions, one after the other."""
        fields = ("residual", "error", "size")
        return Squares(*(torch.cat([getattr(part, f) for part in parts]) for f in fields))


def check(
    name: str,
    squares: Squares,
    entries: int,
    *,
    sites: bool = True,
    observable: Tensor | None = None,
) -> Check:
    """Compare the residual of a tensor with its rounding error, as a whole and site by site.

    Args:
        name: of the tensor.
        squares: by site.
        entries: numbers that one site sums over; few of them scatter more.
        sites: whether single sites count too.
        observable: squares of how many rounding errors the change amounts to where it is used,
            ``[sites]``; as many as the tensor itself if None.
    """
    flat = (x.double().reshape(-1) for x in (squares.residual, squares.error, squares.size))
    residual, error, size = flat
    single = 1.0 if sites and entries > 1 else 2.0

    def excesses(residual: Tensor) -> tuple[float, float]:
        return (
            tensor_excess(residual, error),
            site_excess(residual, error, entries) if sites else 0.0,
        )

    ratio, worst = excesses(residual)
    excess = seen = max(ratio / single, worst)
    if observable is not None:
        # Through an ill-conditioned partner a change stands out half as far.
        limited = torch.minimum(residual, 4 * observable.reshape(-1) * error)
        seen_ratio, seen_worst = excesses(limited)
        seen = max(seen_ratio / single, seen_worst)
    # A tensor of zeros has no size to compare with: it is as large as what differs.
    norm = float(size.sum() or (residual + error).sum() or 1.0) ** 0.5
    relative, expected = (float(x.sum()) ** 0.5 / norm for x in (residual, error))
    return Check(name, relative, expected, ratio, worst, excess, seen, single * expected)


def has_duplicate(rows: Tensor) -> Tensor:
    """Rows ``[n, features]`` that have another in the same direction, ``[n]``.

    What two neurons with the same input write, or two heads with the same attention, can be
    shared between them at will: the function depends on the sum only.

    >>> has_duplicate(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])).tolist()
    [True, True, False]
    """
    length: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    unit = rows / length.clamp_min(1e-30)
    portions = []
    for start in range(0, len(unit), 1024):
        cosines = unit[start : start + 1024] @ unit.mT
        diagonal = torch.arange(len(cosines))
        cosines[diagonal, start + diagonal] = -1
        portions.append(cosines.amax(1) > DUPLICATE)
    return torch.cat(portions)


@dataclass
class BlockChecks:
    """Checks of two blocks, collected; ``streams`` take the first to the bases of the second."""

    a: ReducedBlock
    b: ReducedBlock
    streams: BlockStreams
    checks: list[Check] = field(default_factory=list)

    def add(
        self,
        name: str,
        squares: Squares,
        entries: int,
        *,
        sites: bool = True,
        observable: Tensor | None = None,
    ) -> None:
        """Add one tensor of the block; see `check`."""
        named = f"{self.a.name}.{name}"
        self.checks.append(check(named, squares, entries, sites=sites, observable=observable))

    def vector(
        self, name: str, stream: StreamMap, a: Piece | None, b: Piece | None, *, gain: bool = False
    ) -> None:
        """Add a vector of a stream. Gains are permuted with it, but take no sign."""
        pair = filled(a, b)
        if pair is None:
            return
        a, b = pair
        moved = Piece(stream(a.value, gain=gain), a.error)
        self.add(name, Squares.between(moved, b, 0, larger=True), 1, sites=False)

    def rebased(
        self,
        name: str,
        values: Pair,
        errors: Pair,
        G: Tensor,
        partners: tuple[Piece, Piece],
        duplicate: Tensor | None = None,
    ) -> None:
        """Check ``x G = y`` head by head.

        The rounding error of an ill-conditioned disguise spreads over all directions, and is
        smallest in the basis of its file; so the equation is read as ``x = y G⁻¹`` where that is
        the sharper test.

        The function depends on products with partners, ``x pᵀ = y qᵀ``. Where p and q alone
        determine G, their errors in the directions that G has are in ``x G − y`` too.

        Args:
            name: of the tensor.
            values: x, y ``[h, rows, d]``.
            errors: of both ``[h, d]``.
            G: ``[h, d, d]``.
            partners: Gram matrices ``[h, d, d]`` of p and q, with the errors ``[h, d]`` that a
                basis fitted to them takes over.
            duplicate: heads ``[h]`` whose single tensors the function does not determine.
        """
        sides = [(values, errors, G, partners)]
        if bool((torch.linalg.cond(G) < INVERTIBLE).all()):
            sides.append((values[::-1], errors[::-1], torch.linalg.inv(G), partners[::-1]))
        tried = []
        for (x, y), (e, f), matrix, (p, q) in sides:
            error = (e.unsqueeze(-2) @ matrix.square()).squeeze(-2) + f
            size = y.square().sum((-2, -1))
            relative = float(error.sum() / size.sum().clamp_min(1e-300))
            tried.append((relative, x, y, matrix, e, f, p, q, error.sum(-1), size))
        _, x, y, matrix, e, f, p, q, error, size = min(tried, key=lambda side: side[0])
        residual = x @ matrix - y
        noise = matrix.mT @ (e.unsqueeze(-1) * matrix) + torch.diag_embed(f)
        seen = ((residual.mT @ residual) * q.value).sum((-2, -1))
        products = noise @ q.value
        total = products.diagonal(dim1=-2, dim2=-1).sum(-1)
        # An ill-conditioned partner sees few directions of the noise: its square has few degrees.
        alike = (products * products.mT).sum((-2, -1)).clamp_min(1e-300)
        degrees = (y.shape[-2] * total.square() / alike).clamp_min(1)
        shares = error / error.sum().clamp_min(1e-300)
        allowed = scatter(1 / (shares.square() / degrees).sum().clamp(1e-12, 1))
        for z, partner in ((x, p), (y, q)):
            total = total + (z.square().sum(-2) * partner.error).sum(-1)
        observable = seen / (total * allowed.square()).clamp_min(1e-300)
        if duplicate is not None:
            observable = torch.where(duplicate, 0.0, observable)
        squares = Squares(residual.square().sum((-2, -1)), error, size)
        self.add(name, squares, y.shape[-2] * y.shape[-1], observable=observable)

    def bases_agree(self, name: str, bases: Bases, duplicate: Tensor | None = None) -> None:
        """Check that two tensors determine the same basis.

        A change within the group, such as a factor of 1.01 on all of ``W_Q``, fits either tensor
        perfectly; it shows only here, and with little noise, since each basis is a mean over all
        rows of a tensor. Which of the two was changed cannot be decided.

        Args:
            name: of the two tensors.
            bases: as determined by both tensors, and by each alone.
            duplicate: groups ``[g]`` whose single tensors the function does not determine.
        """
        G, rotary = bases.both, bases.rotary
        (P_A, _), (_, D_B) = bases.plain, bases.dual
        plain, dual = ([e.sum(-2) for e in pair] for pair in bases.errors)
        # What rounding leaves of Q_B − Q_A G and of K_A − K_B Gᵀ, per row and column.
        left = [
            ((plain[0].unsqueeze(-2) @ G.square()).squeeze(-2) + plain[1]) / P_A.shape[-2],
            ((dual[1].unsqueeze(-2) @ G.mT.square()).squeeze(-2) + dual[0]) / D_B.shape[-2],
        ]
        sides = [
            _basis_error(x, own, e, rotary)
            for x, own, e in zip((P_A, D_B), (plain[0], dual[1]), left, strict=True)
        ]
        residual = (bases.by_plain - bases.by_dual).square().sum((-2, -1))
        squares = Squares(
            residual, CORRELATED * (sides[0] + sides[1]), G.square().sum((-2, -1))
        )
        numbers = rotary + (G.shape[-1] - rotary) ** 2  # free in the basis of one group
        self.add(
            name,
            squares,
            numbers,
            sites=len(G) * numbers >= FEW,
            observable=None if duplicate is None else torch.where(duplicate, 0.0, torch.inf),
        )


@dataclass(frozen=True)
class Bases:
    """Least-squares bases that take the heads of one attention to another's.

    Attributes:
        plain: both sides of the plain tensor, ``[g, rows, d]``. dual: of the dual one.
        errors: of plain and dual ``[g, share, d]``, summed over rows.
        both: G from both tensors, ``[g, d, d]``.
        by_plain: G from the plain tensor alone. by_dual: from the dual one alone.
        rotary: leading coordinates that have a complex scale per pair instead of a matrix.
    """

    plain: Pair
    dual: Pair
    errors: tuple[Pair, Pair]
    both: Tensor
    by_plain: Tensor
    by_dual: Tensor
    rotary: int = 0


def _basis_error(x: Tensor, own: Tensor, error: Tensor, rotary: int) -> Tensor:
    """Expected square of the error of a least-squares basis, ``[g]``.

    Rounding moves large rows most, and least squares weigh them most again. Directions of ``x``
    that are no larger than its ``own`` rounding errors ``[g, d]`` determine nothing; the largest
    eigenvalue of these is Marchenko and Pastur's. In the others they shrink the basis.
    """
    rows, d = x.shape[-2:]
    total = torch.zeros(len(x), dtype=torch.float64)
    if rotary:
        squares = x[..., :rotary].square().unflatten(-1, (2, -1)).sum(-2)
        size = squares.sum(-2).clamp_min(1e-300)
        noise = error[..., :rotary].unflatten(-1, (2, -1)).sum(-2)
        total += (2 * noise * _concentration(squares) / size).sum(-1)
    if rotary < d:
        rest = x[..., rotary:]
        error = error * _concentration(rest.square().sum(-1, keepdim=True))
        own = own[..., rotary:] * (1 + ((d - rotary) / rows) ** 0.5) ** 2
        values = torch.linalg.eigvalsh(rest.mT @ rest - torch.diag_embed(own))
        floor = (1e-12 * values.amax(-1, keepdim=True)).clamp_min(1e-150)
        inverse = 1 / values.clamp_min(floor)
        shrunk = 1 + rows * own.mean(-1, keepdim=True) * inverse
        total += (inverse * shrunk).sum(-1) * error[..., rotary:].sum(-1)
    # A tensor of zeros does not determine its basis.
    zero = x.square().sum((-2, -1)) == 0
    return torch.where(zero, 1e100, total)


def _concentration(squares: Tensor) -> Tensor:
    """Weight of the largest of some squares ``[..., rows, n]`` against the mean: 1 to rows."""
    return len(squares[0]) * squares.square().sum(-2) / squares.sum(-2).square().clamp_min(1e-300)
