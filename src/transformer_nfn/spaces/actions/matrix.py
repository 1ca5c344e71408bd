"""What all actions by invertible matrices share: drawing, checking, inverting, multiplying."""

from __future__ import annotations

from abc import abstractmethod
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from transformer_nfn.errors import GroupError
from transformer_nfn.spaces.actions.base import Action, Drawing, Place, Pointwise
from transformer_nfn.spaces.actions.sites import line_up, spread
from transformer_nfn.spaces.small_products import matmul

MAX_DRAWS = 1000
SINGULAR = 1 / torch.finfo(torch.float64).eps


class MatrixAction(Action):
    """A group of invertible matrices ``G [*sites, n, n]``; a subgroup of GL(n)."""

    rebases: ClassVar[bool] = True

    @abstractmethod
    def sample(self, count: int, size: int, how: Drawing) -> Tensor:
        """``count`` random matrices ``[count, n, n]`` in float64, of any condition."""

    @abstractmethod
    def sample_conditioned(self, count: int, size: int, how: Drawing, condition: float) -> Tensor:
        """The same with a prescribed condition number (where the group allows it)."""

    @abstractmethod
    def belongs(self, matrix: Tensor) -> str | None:
        """Why an invertible float64 matrix is not in the group; None if it is."""

    def identity(
        self,
        size: int,
        sites: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> Tensor:
        """The identity matrix at every site."""
        eye = torch.eye(size, dtype=dtype, device=device)
        return eye.expand(*sites, size, size).contiguous()

    def draw(self, size: int, sites: tuple[int, ...], how: Drawing) -> Tensor:
        """Random matrices; those worse than ``how.max_condition`` are drawn again."""
        count = prod(sites)
        if how.condition is not None:
            flat = self.sample_conditioned(count, size, how, how.condition)
            return flat.reshape(*sites, size, size)
        flat = self.sample(count, size, how)
        limit = how.max_condition if how.max_condition is not None else SINGULAR
        for _ in range(MAX_DRAWS):
            bad = ~(torch.linalg.cond(flat) <= limit * (1 + 1e-12))
            again = int(bad.sum())
            if again == 0:
                return flat.reshape(*sites, size, size)
            flat[bad] = self.sample(again, size, how)
        raise GroupError(
            f"{MAX_DRAWS} draws gave no {size}×{size} matrix of condition at most {limit:g}"
        )

    def refuse(self, part: Tensor, max_condition: float | None) -> str | None:
        """Matrices must be finite, of the group, and well enough conditioned."""
        wide = part.double()
        if not bool(torch.isfinite(wide).all()):
            return "a matrix holds values that are not finite"
        stranger = self.belongs(wide)
        if stranger is not None:
            return stranger
        # 0/0 for the zero matrix, which is as singular as can be.
        condition = torch.linalg.cond(wide).nan_to_num(nan=float("inf"))
        worst = float(condition.max())
        at = (condition == condition.max()).nonzero()[0].tolist()
        if not worst < SINGULAR:
            return f"the matrix at {at} is singular"
        if max_condition is not None and worst > max_condition:
            return (
                f"the matrix at {at} has condition {worst:.3g}, over the limit {max_condition:g}"
            )
        return None

    def invert(self, part: Tensor) -> Tensor:
        """``G⁻¹``, computed in float64 whatever the dtype."""
        inverse: Tensor = torch.linalg.inv(part.double())
        return inverse.to(part.dtype)

    def compose(self, first: Tensor, then: Tensor) -> Tensor:
        """``G_first G_then``: rows are multiplied from the right."""
        return first @ then

    def act(self, x: Tensor, part: Tensor, place: Place, *, dual: bool = False) -> Tensor:
        """Plain ``x G``, dual ``G⁻¹ x``, the inverse being given for a dual axis."""
        x = spread(x, part, place)
        dim, last, sites = place.dim, x.ndim - 1, place.sites
        if dual and dim == last - 1 and last not in sites:
            return matmul(line_up(part, sites, last - 1), x)
        # A row vector times the matrix; a dual axis takes the inverse from the left: its transpose.
        right = part.mT if dual else part
        if dim == last and last >= 1 and last - 1 not in sites:
            return matmul(x, line_up(right, sites, last - 1))
        moved = x.movedim(dim, -1).unsqueeze(-2)
        rest = tuple(site - (site > dim) for site in sites)
        return (moved @ line_up(right, rest, last)).squeeze(-2).movedim(-1, dim)

    def reads_through(self, size: int) -> bool:
        """Only where the axis stays whole and plain and dual tensors are different things."""
        return self.pieces(size).whole and not self.self_dual

    def commutes_with(self, fn: Pointwise) -> bool:
        """None does, unless a group of scales knows better."""
        return False


def normal(shape: tuple[int, ...], how: Drawing) -> Tensor:
    """Standard normal float64 numbers, or uniform ones on ``how.entries``."""
    if how.entries is None:
        return torch.randn(shape, generator=how.generator, dtype=torch.float64, device=how.device)
    low, high = how.entries
    x = torch.rand(shape, generator=how.generator, dtype=torch.float64, device=how.device)
    return low + (high - low) * x


def geometric(count: int, size: int, how: Drawing, condition: float) -> Tensor:
    """Positive numbers ``[count, size]`` spread over a factor of ``condition``, in random order."""
    steps = torch.linspace(0.5, -0.5, size, dtype=torch.float64) if size > 1 else torch.zeros(1)
    values = (torch.log(torch.tensor(condition, dtype=torch.float64)) * steps).exp()
    noise = torch.rand((count, size), generator=how.generator, device=how.device)
    return values.to(noise.device)[noise.argsort(-1)]


def orthogonal(count: int, size: int, how: Drawing) -> Tensor:
    """Uniform over the orthogonal group, ``[count, n, n]``."""
    noise = torch.randn(
        (count, size, size), generator=how.generator, dtype=torch.float64, device=how.device
    )
    Q, R = torch.linalg.qr(noise)
    signs = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    uniform: Tensor = Q * signs.unsqueeze(-2)
    return uniform
