"""One basis for two tensors that share it, fitted on what was not changed.

Queries and keys, values and outputs, what a neuron reads and what it writes: an invertible matrix
may stand between the two. Where one of them fits alone within rounding, it determines the matrix.
Where neither does, the matrix is the one that leaves changes of low rank of both. Where a change is
dense, it is the one that brings both tensors nearest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from transformer_nfn.checkpoints.differences.change import FULL, spectrum, whitened
from transformer_nfn.checkpoints.pieces import Piece
from transformer_nfn.checkpoints.symmetries import QueryKeyBasis, Site, ValueOutputBasis
from transformer_nfn.symmetry.comparison import relative_error

START = 8
"""The level of a change starts where one singular value in so many stands above."""
FALL, ROOM = (0.5, 0.95), 4.0
"""Least and largest factor by which the level of a change falls from fit to fit. Between the two it
falls to this multiple of what stands below."""
MOMENTUM = 0.7
"""Share of a step that is repeated with the next one."""
DIRECT, SKETCHED = 256, 160
"""Smaller sizes up to which all singular values are computed; beyond, so many of the largest."""


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
        """``‖b − a‖ / ‖a‖``; infinite where only ``a`` is zero."""
        difference, size = float((self.b - self.a).norm()), float(self.a.norm())
        return difference / size if size else math.inf if difference else 0.0

    @property
    def distance(self) -> float:
        """``‖b − a‖`` over the larger of both norms."""
        return relative_error(self.a, self.b)

    @property
    def rounding(self) -> float:
        """The same, expected of rounding alone."""
        squares = self.noise.diagonal(dim1=-2, dim2=-1).sum() * self.a.shape[-2]
        size = float(self.a.norm())
        return float(squares.sqrt()) / size if size else 0.0

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

    def best(self) -> tuple[Matched, Matched]:
        """Both tensors in A's basis, which is fitted on what was not changed."""
        found = self.matched(self._fit())
        if all(m.unchanged(self.allowed) for m in found):
            return found
        for only, side in enumerate((self.plain, self.dual)):
            if side.a.shape[-2] > side.a.shape[-1]:  # else any change is a change of basis
                alone = self._matched_by_one(only)
                if alone[only].unchanged(self.allowed):
                    return alone
        return self.matched(self._with_low_rank())

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

    def _fit(self, only: int | None = None) -> Tensor:
        """G ``[g, d, d]`` by least squares, to both tensors or to one alone, 0 or 1."""
        P, D = self.plain, self.dual
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
        """G that leaves changes of low rank of both tensors, or the nearest G.

        ``P_B − P_A G`` and ``D_A − D_B Gᵀ`` are linear in G. Iteratively reweighted least squares
        bring their ranks down (Mohan and Fazel, 2012): inputs along which the last G leaves a
        singular value s count ``1 / (s² + ε²)``, so that what stands above the level ε comes to
        count nothing. The level falls to rounding, slowly where much stands just below it.
        """
        G, level = self._fit(), 0.0
        step = torch.zeros_like(G)
        while True:
            plain, dual = self._plain(G), self._dual(G)
            left = [_Left.of(m) for m in (plain, dual)]
            level = level or max(float(x.values[len(x.values) // START]) for x in left)
            if any(x.is_dense(level) for x in left):
                return self.symmetry.fit(self.site, *self._tensors(self.plain, self.dual))
            if level <= self.allowed:
                return G
            below = max(x.below(level) for x in left)
            level = max(min(max(ROOM * below, FALL[0] * level), FALL[1] * level), self.allowed)
            w, v = (partial(x.weighted, level=level) for x in left)
            P = replace(self.plain, a=w(self.plain.a), b=w(plain.b - plain.a))
            D = replace(self.dual, a=v(dual.b - dual.a), b=v(self.dual.b))
            step = replace(self, plain=P, dual=D)._fit() + MOMENTUM * step
            G = G + step

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
class _Left:
    """What a basis leaves of a tensor.

    Attributes:
        vectors: its left singular vectors, ``[rows, k]``.
        values: its singular values, relative to the largest one of rounding.
        small: the smaller size of the tensor.
    """

    vectors: Tensor
    values: Tensor
    small: int

    @staticmethod
    def of(matched: Matched) -> _Left:
        white = matched.white()
        m, n = white.shape
        if min(m, n) <= DIRECT:
            U, S, _ = torch.linalg.svd(white, full_matrices=False)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                U, S, _ = torch.svd_lowrank(white, q=SKETCHED, niter=2)
        return _Left(U, S / (m**0.5 + n**0.5), min(m, n))

    def _above(self, level: float) -> int:
        return int((self.values > level).sum())

    def is_dense(self, level: float) -> bool:
        """Whether too many singular values stand above a level for a change of low rank."""
        return self._above(level) > min(FULL * self.small, len(self.values) - 1)

    def below(self, level: float) -> float:
        """The largest singular value that does not."""
        return float(self.values[self._above(level)])

    def weighted(self, w: Tensor, level: float) -> Tensor:
        """Rows times the square roots of the weights of inputs, 1 for one without a change."""
        U = self.vectors
        less = 1 - level / (self.values.square() + level**2).sqrt()
        return w - (U * less) @ (U.mT @ w)
