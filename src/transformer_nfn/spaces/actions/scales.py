"""Scales of single entries (nonzero, positive, a sign), and complex scales of pairs of entries."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from transformer_nfn.spaces.actions.base import (
    LOG10_2,
    Drawing,
    Pieces,
    Pointwise,
    Size,
    Solution,
    cut,
)
from transformer_nfn.spaces.actions.matrix import MatrixAction, column_signs, geometric, normal
from transformer_nfn.spaces.actions.solvers import (
    Pair,
    least_squares_scales,
    rounding_weights,
    signs,
)


class Diagonal(MatrixAction):
    """Diagonal matrices: one scale for each entry of the axis."""

    @abstractmethod
    def nearest(self, scales: Tensor) -> Tensor:
        """The scales of the group nearest to ``scales``; 0 where none is near."""

    def size(self, n: int) -> Size:
        return Size(n)

    def pieces(self, size: int) -> Pieces:
        return Pieces(size, 1, 1)

    def sample(self, count: int, size: int, how: Drawing) -> Tensor:
        return torch.diag_embed(self.nearest(normal((count, size), how)))

    def sample_conditioned(self, count: int, size: int, how: Drawing, condition: float) -> Tensor:
        noise = normal((count, size), how)
        signs = torch.where(noise < 0, -1.0, 1.0)
        return torch.diag_embed(self.nearest(geometric(count, size, how, condition) * signs))

    def invert(self, part: Tensor) -> Tensor:
        return torch.diag_embed(1 / part.diagonal(dim1=-2, dim2=-1))

    def solve(self, plain: Pair, dual: Pair, unit: float) -> Solution | None:
        """By least squares on both, then into the group."""
        s = least_squares_scales(plain, dual, rounding_weights(plain, dual))
        s = self.nearest(torch.where(s == 0, torch.ones_like(s), s))
        if bool((s == 0).any()):
            return None
        return Solution(torch.diag_embed(s), torch.diag_embed(1 / s))

    def balance(self, plain: Tensor, dual: Tensor) -> Pair:
        """Both factors of each entry at one norm."""
        scale, inverse = _even_scales(plain, dual)
        return plain * scale, dual * inverse


class Scale(Diagonal):
    """A nonzero number for each entry, as between W_U and W_D of a gated MLP.

    >>> Scale().describe(4), Scale().size(4).continuous
    ('4 nonzero scales', 4)
    """

    word: ClassVar[str] = "scale"

    def describe(self, size: int) -> str:
        return f"{size} nonzero scale{'s' * (size > 1)}"

    def size(self, n: int) -> Size:
        return Size(n, n * LOG10_2)

    def nearest(self, scales: Tensor) -> Tensor:
        return scales

    def balance(self, plain: Tensor, dual: Tensor) -> Pair:
        """Both factors of each entry at one norm, the largest plain entry positive."""
        plain, dual = super().balance(plain, dual)
        if plain.shape[-2] == 0:
            return plain, dual
        sign = column_signs(plain)
        return plain * sign, dual * sign


class PositiveScale(Diagonal):
    """A positive number for each entry: a symmetry of ReLU neurons.

    Products are also invariant when both factors change sign, so they do not separate orbits.

    >>> PositiveScale().commutes_with(torch.relu), PositiveScale().commutes_with(torch.tanh)
    (True, False)
    """

    word: ClassVar[str] = "positive"
    separating: ClassVar[bool] = False

    def describe(self, size: int) -> str:
        return f"{size} positive scale{'s' * (size > 1)}"

    def nearest(self, scales: Tensor) -> Tensor:
        return scales.clamp_min(0)

    def sample(self, count: int, size: int, how: Drawing) -> Tensor:
        """``exp`` of a normal number, or absolute values where entries are prescribed."""
        x = normal((count, size), how)
        return torch.diag_embed(x.exp() if how.entries is None else x.abs())

    def sample_conditioned(self, count: int, size: int, how: Drawing, condition: float) -> Tensor:
        return torch.diag_embed(geometric(count, size, how, condition))

    def reads_through(self, size: int) -> bool:
        """Never: an activation may be applied to the tensors that carry the axis."""
        return False

    def commutes_with(self, fn: Pointwise) -> bool:
        return _is_positively_homogeneous(fn)


class Sign(Diagonal):
    """+1 or −1 for each entry.

    >>> Sign().commutes_with(torch.tanh), Sign().commutes_with(torch.relu)
    (True, False)
    """

    word: ClassVar[str] = "sign"
    self_dual: ClassVar[bool] = True

    def describe(self, size: int) -> str:
        return f"{size} sign{'s' * (size > 1)}"

    def size(self, n: int) -> Size:
        return Size(finite=n * LOG10_2)

    def nearest(self, scales: Tensor) -> Tensor:
        return signs(scales)

    def balance(self, plain: Tensor, dual: Tensor) -> Pair:
        """The largest entry of each column positive."""
        rows = torch.cat([plain, dual], -2)
        sign = column_signs(rows) if rows.shape[-2] else 1.0
        return plain * sign, dual * sign

    def solve(self, plain: Pair, dual: Pair, unit: float) -> Solution | None:
        """The sign of the scalar product of all rows."""
        first, second = (torch.cat(pair, -2) for pair in zip(plain, dual, strict=True))
        s = torch.diag_embed(self.nearest((first * second).sum(-2)))
        return Solution(s, s)

    def commutes_with(self, fn: Pointwise) -> bool:
        return _is_odd(fn)


Pairing = Literal["neighbours", "halves"]


class ComplexScale(MatrixAction):
    """``(x_a + i x_b) → (x_a + i x_b) z`` for each pair, z any nonzero complex number.

    These are the matrices that commute with rotary position embeddings.

    Args:
        pairing: which entries form a pair: ``neighbours`` (2j, 2j + 1), or ``halves``
            (j, j + n/2) as in Llama's files.

    >>> ComplexScale("halves").as_complex(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([1.+3.j, 2.+4.j])
    """

    word: ClassVar[str] = "linear"

    def __init__(self, pairing: Pairing) -> None:
        self.pairing = pairing

    def axis_error(self, name: str, size: int, of: str | None) -> str | None:
        if size % 2:
            return (
                f"axis '{name}' of complex form must be linear and of even size, "
                f"found kind linear and size {size}"
            )
        if of is None:
            return f"linear axis '{name}' must say which perm axis it belongs to"
        return None

    def describe(self, size: int) -> str:
        return f"{size // 2} complex scales" + " on halves" * (self.pairing == "halves")

    def size(self, n: int) -> Size:
        return Size(n)

    def pieces(self, size: int) -> Pieces:
        """One piece for each frequency; its quarter turn commutes."""
        return Pieces(size // 2, 2, 2)

    def split(self, x: Tensor, dim: int) -> Tensor:
        """``[n/2, 2]`` for ``[n]``: frequency, then the two entries of the pair."""
        if self.pairing == "neighbours":
            return cut(x, dim, x.shape[dim] // 2, 2)
        return cut(x, dim, 2, x.shape[dim] // 2).transpose(dim, dim + 1)

    def join(self, x: Tensor, dim: int) -> Tensor:
        if self.pairing == "halves":
            x = x.transpose(dim, dim + 1)
        return x.flatten(dim, dim + 1)

    def vectors(self, x: Tensor, *, dual: bool) -> Tensor:
        """``[…, n/2, 1]``, complex; conjugated for a dual row."""
        z = self.as_complex(x).unsqueeze(-1)
        return z.conj() if dual else z

    def as_complex(self, x: Tensor) -> Tensor:
        """The pairs of the last axis as complex numbers: ``[…, n] → […, n/2]``."""
        real, imaginary = self.split(x, x.ndim - 1).unbind(-1)
        return torch.complex(real, imaginary)

    def as_real(self, z: Tensor) -> Tensor:
        """The inverse of `as_complex`."""
        return self.join(torch.view_as_real(z), z.ndim - 1)

    def matrix(self, z: Tensor) -> Tensor:
        """The real ``G [*sites, n, n]`` with ``x G`` the pairs of x times ``z [*sites, n/2]``."""
        n = 2 * z.shape[-1]
        eye = self.as_complex(torch.eye(n, dtype=z.real.dtype, device=z.device))
        return self.as_real(eye * z.unsqueeze(-2))

    def sample(self, count: int, size: int, how: Drawing) -> Tensor:
        x = normal((count, size), how)
        return self.matrix(torch.view_as_complex(x.reshape(count, -1, 2)))

    def sample_conditioned(self, count: int, size: int, how: Drawing, condition: float) -> Tensor:
        size //= 2
        turn = torch.rand((count, size), generator=how.generator, device=how.device).double()
        return self.matrix(torch.polar(geometric(count, size, how, condition), 2 * torch.pi * turn))

    def solve(self, plain: Pair, dual: Pair, unit: float) -> Solution | None:
        """By least squares on both; pairs that nothing determines stay as they are."""
        P, D = ((self.as_complex(x), self.as_complex(y)) for x, y in (plain, dual))
        z = least_squares_scales(P, D, rounding_weights(P, D))
        z = torch.where(z == 0, torch.ones_like(z), z)
        return Solution(self.matrix(z), self.matrix(1 / z))

    def balance(self, plain: Tensor, dual: Tensor) -> Pair:
        """Both factors of each frequency at one norm, the largest plain entry positive."""
        q, k = self.as_complex(plain), self.as_complex(dual)
        scale, inverse = _even_scales(q, k)
        turn = torch.ones_like(scale, dtype=q.dtype)
        if q.shape[-2]:
            top = q.gather(-2, q.abs().argmax(-2, keepdim=True))
            turn = torch.where(scale == 0, turn, top.conj() / top.abs().clamp_min(1e-300))
        return self.as_real(q * scale * turn), self.as_real(k * inverse * turn)


def _even_scales(plain: Tensor, dual: Tensor) -> Pair:
    """Scales of columns, ``[*sites, 1, n]``, that bring plain and dual to one norm, and their
    inverses; both 0 where either is zero."""
    p_norm, d_norm = (x.abs().square().sum(-2, keepdim=True).sqrt() for x in (plain, dual))
    dead = (p_norm == 0) | (d_norm == 0)
    scale = torch.where(dead, 0.0, (d_norm / p_norm.clamp_min(1e-300)).sqrt())
    return scale, torch.where(dead, 0.0, 1 / scale.clamp_min(1e-300))


TEST_POINTS = (0.0, 1e-3, 0.21, 0.5, 0.8, 1.0, 1.7, 3.0, 7.5, 40.0)
TEST_FACTORS = (0.3, 2.0, 11.0)


def _is_positively_homogeneous(fn: Pointwise) -> bool:
    """Whether ``fn(s x) = s fn(x)`` for s > 0, as for ReLU; tested on a few numbers."""
    x = _test_points()
    return all(_close(fn(s * x), s * fn(x)) for s in TEST_FACTORS)


def _is_odd(fn: Pointwise) -> bool:
    """Whether ``fn(−x) = −fn(x)``, as for tanh."""
    x = _test_points()
    return _close(fn(-x), -fn(x))


def _test_points() -> Tensor:
    x = torch.tensor(TEST_POINTS)
    return torch.cat([-x, x])


def _close(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x.detach(), y.detach(), rtol=1e-4, atol=1e-6)
