"""One basis for two tensors that share it, fitted on what was not changed.

Queries and keys, values and outputs, what a neuron reads and what it writes: an invertible matrix
may stand between the two. Where one of them fits alone within rounding, it determines the matrix.
Where neither does, the matrix and a change of low rank of both tensors are fitted together, by
turns, with the smallest rank that leaves nothing. Where no rank does, the change is dense, and the
matrix is the one that brings both tensors nearest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from transformer_nfn.checkpoints.differences.change import spectrum, unwhitened, whitened
from transformer_nfn.checkpoints.reduced import Piece
from transformer_nfn.checkpoints.symmetries import QueryKeyBasis, Site, ValueOutputBasis

ROUNDS = 200
"""Largest number of turns between a basis and a change of low rank."""
SLOW, SETTLED = 0.96, 1e-18
"""They end when a turn leaves more than this share of the squares that the last one left, or when
so little is left of the change."""
NOTHING = 1e-2
"""Share of a change up to which what its low-rank part leaves counts as nothing."""
LARGEST = 0.5
"""Largest rank that is tried, as a share of the smaller size of a tensor."""
DIRECT = 256
"""Smaller sizes up to which all singular values are computed."""


@dataclass(frozen=True)
class Matched:
    """One tensor of both models in one basis.

    Attributes:
        name: canonical name without the block.
        a: of A, ``[n, rows, d]``: heads, the stream (and a bias), coordinates of a head; neurons
            and vectors have ``d = 1``.
        b: of B, likewise.
        noise: covariance of one row of ``b − a`` from rounding, ``[n, d, d]``.
        units: heads or neurons of A, ``[n]``, where B does not have all of them.

    Example:
        >>> a = torch.ones(1, 4, 1)
        >>> Matched("W_Q", a, 1.5 * a, torch.full((1, 1, 1), 0.01)).relative
        0.5
    """

    name: str
    a: Tensor
    b: Tensor
    noise: Tensor
    units: Tensor | None = None

    @property
    def relative(self) -> float:
        """``‖b − a‖ / ‖a‖``."""
        return float((self.b - self.a).norm() / self.a.norm().clamp_min(1e-300))

    @property
    def rounding(self) -> float:
        """The same, expected of rounding alone."""
        squares = self.noise.diagonal(dim1=-2, dim2=-1).sum() * self.a.shape[-2]
        return float(squares.sqrt() / self.a.norm().clamp_min(1e-300))

    @property
    def is_vector(self) -> bool:
        """Whether it has one column, and so no rank."""
        return self.a.shape[0] * self.a.shape[2] == 1

    def white(self) -> Tensor:
        """The difference with noise of variance one, ``[rows, n · d]``."""
        return whitened(self.b - self.a, self.noise)

    def unchanged(self, allowed: float) -> bool:
        """Whether a multiple of the rounding error explains the difference."""
        white = self.white()
        small = float(white.square().mean()) <= allowed**2
        return small and spectrum(white, allowed).rank == 0


@dataclass(frozen=True)
class Side:
    """A tensor of both models, ``[n, rows, d]``, each in its own basis.

    Attributes:
        a: of A. b: of B.
        error_a: expected squares of the rounding error of one entry, ``[n, d]``.
        error_b: likewise of B.
    """

    a: Tensor
    b: Tensor
    error_a: Tensor
    error_b: Tensor

    @staticmethod
    def of(a: Piece, b: Piece, bias_a: Piece | None = None, bias_b: Piece | None = None) -> Side:
        """From pieces ``[n, rows, d]`` with errors ``[n, d]``; biases ``[n, d]`` are one more row.

        The bias is scaled to the rounding error of the weights, which changes no rank.
        """
        rows = a.value.shape[-2]
        values = [a.value.double(), b.value.double()]
        biases = [x for x in (bias_a, bias_b) if x is not None]
        if biases:
            errors = [float(x.error.double().mean()) for x in biases]
            weights = float((a.error + b.error).double().mean()) / (2 * rows)
            scale = min((weights / max(*errors, 1e-300)) ** 0.5, 1.0)
            for i, bias in enumerate((bias_a, bias_b)):
                row = torch.zeros_like(values[i][:, :1])
                if bias is not None:
                    row = scale * bias.value.double().unsqueeze(-2)
                values[i] = torch.cat([values[i], row], -2)
        errors_a, errors_b = (x.error.double() / rows for x in (a, b))
        return Side(values[0], values[1], errors_a, errors_b)

    def moved(self, name: str, back: Tensor) -> Matched:
        """Both in A's basis: ``b · back`` against ``a``, ``back [n, d, d]``."""
        noise = back.mT @ (self.error_b.unsqueeze(-1) * back) + torch.diag_embed(self.error_a)
        return Matched(name, self.a, self.b @ back, noise)


@dataclass(frozen=True)
class SharedBasis:
    """Two tensors that share a basis G: ``plain_B = plain_A G`` and ``dual_A = dual_B Gᵀ``.

    Attributes:
        symmetry: that fits G.
        site: with the number of groups, each of which has a matrix.
        names: of both tensors.
        plain: queries, values, or what neurons read.
        dual: keys, outputs, or what neurons write.
        allowed: multiple of the rounding error up to which a tensor is unchanged.
    """

    symmetry: QueryKeyBasis | ValueOutputBasis
    site: Site
    names: tuple[str, str]
    plain: Side
    dual: Side
    allowed: float

    def best(self, inputs: Tensor | None = None) -> tuple[Matched, Matched]:
        """Both tensors in A's basis, which is fitted on what was not changed.

        Args:
            inputs: orthonormal columns ``[D, r]`` along which a third tensor changed that reads
                the same input. An adapter of a fused matrix changes all of its parts along the
                same directions: where both tensors changed, the others are tried.
        """
        found = self.matched(self._fit())
        if all(m.unchanged(self.allowed) for m in found):
            return found
        for only, side in enumerate((self.plain, self.dual)):
            if side.a.shape[-2] > side.a.shape[-1]:  # else any change is a change of basis
                alone = self._matched_by_one(only)
                if alone[only].unchanged(self.allowed):
                    return alone
        if inputs is not None and inputs.shape[1]:
            found = self.matched(self._without(inputs)._fit())
            ranks = [spectrum(m.white(), self.allowed).rank for m in found]
            if max(rank or 0 for rank in ranks) <= inputs.shape[1] and None not in ranks:
                return found
        return self.matched(self._with_low_rank())

    def _without(self, inputs: Tensor) -> SharedBasis:
        """Both tensors on the other inputs alone, without biases."""
        D = len(inputs)
        sides = []
        for side in (self.plain, self.dual):
            a, b = (w[:, :D] - inputs @ (inputs.mT @ w[:, :D]) for w in (side.a, side.b))
            sides.append(replace(side, a=a, b=b))
        return replace(self, plain=sides[0], dual=sides[1])

    def matched(self, G: Tensor) -> tuple[Matched, Matched]:
        """Both tensors in A's basis."""
        inverse = torch.linalg.pinv(G)
        plain = self.plain.moved(self.names[0], _spread(inverse, self.plain))
        return plain, self.dual.moved(self.names[1], _spread(G.mT, self.dual))

    def _matched_by_one(self, only: int) -> tuple[Matched, Matched]:
        """Both tensors in A's basis, fitted on one of them, whose rounding errors reach the other.

        A basis G that is fitted on rows X with noise of covariance C has columns with errors of
        covariance ``(XᵀX)⁻¹``, and rows with C.
        """
        G = self._fit(only=only)
        plain, dual = self.matched(G)
        P, D = self.plain, self.dual
        groups = len(G)

        def gram(x: Tensor) -> Tensor:
            total: Tensor = (x.mT @ x).unflatten(0, (groups, -1)).sum(1)
            return total

        def reached(fitted: Tensor, noise: Tensor, other: Tensor) -> Tensor:
            noise = noise.unflatten(0, (groups, -1)).mean(1)
            rows = other.shape[-2] * (len(other) // groups)
            size = (noise * gram(other)).sum((-2, -1)) / rows
            inverse: Tensor = torch.linalg.pinv(gram(fitted))
            return inverse * size[:, None, None]

        if only == 0:
            back = _spread(G, P)
            noise = back.mT @ plain.noise @ back  # in B's basis
            more = _spread(reached(P.a, noise, D.b), D)
            return plain, replace(dual, noise=dual.noise + more)
        back = torch.linalg.pinv(G)
        more = back.mT @ reached(D.b, dual.noise, P.a) @ back
        return replace(plain, noise=plain.noise + _spread(more, P)), dual

    def _fit(self, low: tuple[Tensor, Tensor] | None = None, only: int | None = None) -> Tensor:
        """G ``[g, d, d]`` by least squares.

        Args:
            low: changes to take away first: of the plain tensor in B's basis, of the dual in A's.
            only: fit to one of the two tensors alone, 0 or 1.
        """
        P, D = self.plain, self.dual
        if low is not None:
            P, D = replace(P, b=P.b - low[0]), replace(D, a=D.a - low[1])
        groups = self.site.detail.groups
        noise = []
        for error, rows in ((P.error_b, P.b.shape[-2]), (D.error_a, D.a.shape[-2])):
            by_group = error.unflatten(0, (groups, -1)).sum((1, 2)) * rows
            noise.append(by_group.clamp_min(1e-300))
        if only is not None:
            noise[1 - only] = torch.full_like(noise[1 - only], torch.inf)
        names = self._symmetry_names()
        return self.symmetry.fit(
            self.site, *self._tensors(P, D), dict(zip(names, noise, strict=True))
        )

    def _symmetry_names(self) -> tuple[str, str]:
        queries = isinstance(self.symmetry, QueryKeyBasis)
        return ("W_Q", "W_K") if queries else ("W_V", "W_O")

    def _tensors(self, P: Side, D: Side) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Both models' tensors as the symmetry takes them."""
        first, second = self._symmetry_names()
        dual = [w.mT if second == "W_O" else w for w in (D.a, D.b)]
        return {first: P.a, second: dual[0]}, {first: P.b, second: dual[1]}

    def _with_low_rank(self) -> Tensor:
        """G under the smallest rank of both changes that leaves nothing, or the nearest G."""
        sizes = [min(s.a.shape[-2], s.a.shape[0] * s.a.shape[-1]) for s in (self.plain, self.dual)]
        limit = max(int(LARGEST * min(sizes)), 1)

        def leaves_nothing(rank: int) -> bool:
            return self._alternate(rank, settled=False)[1]

        if not leaves_nothing(limit):
            return self.symmetry.fit(self.site, *self._tensors(self.plain, self.dual))
        high = 1
        while high < limit and not leaves_nothing(high):
            high = min(2 * high, limit)
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if leaves_nothing(middle) else (middle, high)
        return self._alternate(high, settled=True)[0]

    def _alternate(self, rank: int, *, settled: bool) -> tuple[Tensor, bool]:
        """G under changes of a rank, and whether these leave nothing.

        ``settled`` goes on from there, until G settles.
        """
        G, last = self._fit(), float("inf")
        for _ in range(ROUNDS):
            parts = [_truncated(m, rank, self.allowed) for m in (self._plain(G), self._dual(G))]
            share, nothing = sum(p.left for p in parts), all(p.nothing for p in parts)
            if share > SLOW * last or share < SETTLED or (nothing and not settled):
                break
            last = share
            G = self._fit((parts[0].change, parts[1].change))
        return G, nothing

    def _plain(self, G: Tensor) -> Matched:
        """The plain tensor, ``P_B`` against ``P_A G``."""
        P, G = self.plain, _spread(G, self.plain)
        noise = G.mT @ (P.error_a.unsqueeze(-1) * G) + torch.diag_embed(P.error_b)
        return Matched("", P.a @ G, P.b, noise)

    def _dual(self, G: Tensor) -> Matched:
        """The dual tensor, ``D_A`` against ``D_B Gᵀ``."""
        matched = self.dual.moved("", _spread(G, self.dual).mT)
        return replace(matched, a=matched.b, b=matched.a)


def _spread(G: Tensor, side: Side) -> Tensor:
    """The matrix of each head; heads of one group share it."""
    return G.repeat_interleave(len(side.a) // len(G), dim=0)


@dataclass(frozen=True)
class _Truncated:
    """A change of a given rank.

    Attributes:
        change: ``[n, rows, d]``.
        left: share of the squares of the difference that it leaves.
        nothing: whether that is rounding, or a share of at most `NOTHING`.
    """

    change: Tensor
    left: float
    nothing: bool


def _truncated(matched: Matched, rank: int, allowed: float) -> _Truncated:
    """The change of a rank, over all heads together, that is nearest to a difference."""
    white = matched.white()
    m, n = white.shape
    if min(m, n) <= DIRECT:
        U, S, Vh = torch.linalg.svd(white, full_matrices=False)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            U, S, V = torch.svd_lowrank(white, q=rank + 8, niter=2)
        Vh = V.mT
    low = (U[:, :rank] * S[:rank]) @ Vh[:rank]
    left = float((white - low).square().sum() / white.square().sum().clamp_min(1e-300))
    noise = rank >= len(S) or float(S[rank]) <= allowed * (m**0.5 + n**0.5)
    return _Truncated(unwhitened(low, matched.noise), left, noise or left <= NOTHING**2)
