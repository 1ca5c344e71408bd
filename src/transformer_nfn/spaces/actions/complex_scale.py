"""One complex scale for each pair of entries: what commutes with rotary position embeddings."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from transformer_nfn.spaces.actions.base import Drawing, Pieces, Solution, cut
from transformer_nfn.spaces.actions.matrix import MatrixAction, geometric, normal
from transformer_nfn.spaces.actions.solvers import least_squares_complex, rounding_weights

Pairing = Literal["neighbours", "halves"]


class ComplexScale(MatrixAction):
    """``(x_a + i x_b) → (x_a + i x_b) z`` for each pair, z any complex number but zero.

    Args:
        pairing: which entries are a pair: ``neighbours`` (2j, 2j + 1), or ``halves``
            (j, j + n/2) as in Llama's files.
    """

    word: ClassVar[str] = "linear"

    def __init__(self, pairing: Pairing) -> None:
        self.pairing = pairing

    def misfit(self, name: str, size: int, of: str | None) -> str | None:
        """Pairs need an even size, and the axis an owner."""
        if size % 2:
            return (
                f"axis '{name}' of complex form must be linear and of even size, "
                f"found kind linear and size {size}"
            )
        if of is None:
            return f"linear axis '{name}' must say which perm axis it belongs to"
        return None

    def describe(self, size: int) -> str:
        """``8 complex scales``, and the pairs where they are no neighbours."""
        return f"{size // 2} complex scales" + " on halves" * (self.pairing == "halves")

    def dimension(self, size: int) -> int:
        """Two for each pair."""
        return size

    def pieces(self, size: int) -> Pieces:
        """Each frequency on its own, with its quarter turn."""
        return Pieces(size // 2, 2, 2)

    def split(self, x: Tensor, dim: int) -> Tensor:
        """``[n/2, 2]`` for ``[n]``: frequency, then the two entries of the pair."""
        if self.pairing == "neighbours":
            return cut(x, dim, x.shape[dim] // 2, 2)
        return cut(x, dim, 2, x.shape[dim] // 2).transpose(dim, dim + 1)

    def join(self, x: Tensor, dim: int) -> Tensor:
        """Undoes `split`."""
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

    def scales(self, matrix: Tensor) -> Tensor:
        """The complex scales nearest to a real matrix; exact for one of the group."""
        both = self.split(self.split(matrix, matrix.ndim - 2), matrix.ndim)
        own = both.diagonal(dim1=-4, dim2=-2)  # [*sites, 2, 2, n/2]
        real = (own[..., 0, 0, :] + own[..., 1, 1, :]) / 2
        imag = (own[..., 0, 1, :] - own[..., 1, 0, :]) / 2
        return torch.complex(real, imag)

    def sample(self, count: int, size: int, how: Drawing) -> Tensor:
        """Real and imaginary parts independent."""
        x = normal((count, size), how)
        return self.matrix(torch.view_as_complex(x.reshape(count, -1, 2)))

    def sample_conditioned(self, count: int, size: int, how: Drawing, condition: float) -> Tensor:
        """Absolute values geometric, phases uniform."""
        size //= 2
        turn = torch.rand((count, size), generator=how.generator, device=how.device).double()
        return self.matrix(torch.polar(geometric(count, size, how, condition), 2 * torch.pi * turn))

    def belongs(self, matrix: Tensor) -> str | None:
        """The matrix must be made of complex scales."""
        if torch.allclose(matrix, self.matrix(self.scales(matrix)), rtol=1e-6, atol=1e-12):
            return None
        return (
            "the axis takes one complex scale for each pair of entries; "
            "the matrix given is of no such form"
        )

    def solve(
        self, plain: tuple[Tensor, Tensor], dual: tuple[Tensor, Tensor], unit: float
    ) -> Solution | None:
        """By least squares on both; pairs that nothing determines stay as they are."""
        P, D = ((self.as_complex(x), self.as_complex(y)) for x, y in (plain, dual))
        z = least_squares_complex(P, D, rounding_weights(P, D))
        z = torch.where(z == 0, torch.ones_like(z), z)
        return Solution(self.matrix(z), self.matrix(1 / z))

    def balance(self, plain: Tensor, dual: Tensor) -> tuple[Tensor, Tensor]:
        """Both factors of each frequency at one norm, the largest plain entry positive."""
        q, k = self.as_complex(plain), self.as_complex(dual)
        q_norm, k_norm = (z.abs().square().sum(-2, keepdim=True).sqrt() for z in (q, k))
        dead = (q_norm == 0) | (k_norm == 0)
        scale = torch.where(dead, 0.0, (k_norm / q_norm.clamp_min(1e-300)).sqrt())
        turn = torch.ones_like(scale, dtype=q.dtype)
        if q.shape[-2]:
            top = q.gather(-2, q.abs().argmax(-2, keepdim=True))
            turn = torch.where(dead, turn, top.conj() / top.abs().clamp_min(1e-300))
        inverse = torch.where(dead, 0.0, 1 / scale.clamp_min(1e-300))
        return self.as_real(q * scale * turn), self.as_real(k * inverse * turn)
