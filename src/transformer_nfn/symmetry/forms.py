"""Which invertible matrices may act along a linear axis: all of them, or complex scales."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_nfn.spaces.axis import Form


def as_complex(x: Tensor) -> Tensor:
    """Neighbouring pairs along the last axis as complex numbers: ``[…, n] → […, n/2]``."""
    return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())


def as_real(z: Tensor) -> Tensor:
    """The inverse of `as_complex`."""
    return torch.view_as_real(z).flatten(-2)


def complex_matrix(z: Tensor) -> Tensor:
    """The real matrix ``G`` with ``x G = as_real(as_complex(x) · z)``: ``[…, n/2] → […, n, n]``."""
    blocks = torch.stack(
        [torch.stack([z.real, z.imag], -1), torch.stack([-z.imag, z.real], -1)], -2
    )
    pairs = z.shape[-1]
    out = torch.zeros(*z.shape[:-1], pairs, 2, pairs, 2, dtype=blocks.dtype, device=z.device)
    j = torch.arange(pairs, device=z.device)
    out[..., j, :, j, :] = blocks.movedim(-3, 0)
    return out.reshape(*z.shape[:-1], 2 * pairs, 2 * pairs)


def complex_scales(matrix: Tensor) -> Tensor:
    """The complex scales nearest to a real matrix; exact for one of complex form."""
    pairs = matrix.shape[-1] // 2
    j = torch.arange(pairs, device=matrix.device)
    blocks = matrix.reshape(*matrix.shape[:-2], pairs, 2, pairs, 2)[..., j, :, j, :].movedim(0, -3)
    real = (blocks[..., 0, 0] + blocks[..., 1, 1]) / 2
    imag = (blocks[..., 0, 1] - blocks[..., 1, 0]) / 2
    return torch.complex(real, imag)


def nearest(matrix: Tensor, form: Form) -> Tensor:
    """The nearest matrix that has the form."""
    return matrix if form == "general" else complex_matrix(complex_scales(matrix))


def draw(
    shape: tuple[int, ...],
    form: Form,
    *,
    entries: tuple[float, float] | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Random float64 matrices of shape ``[*sites, n, n]``: normal, or uniform on ``entries``."""
    size = shape if form == "general" else (*shape[:-2], shape[-1])
    place = generator.device if generator is not None else None
    if entries is None:
        x = torch.randn(size, generator=generator, dtype=torch.float64, device=place)
    else:
        low, high = entries
        x = torch.rand(size, generator=generator, dtype=torch.float64, device=place)
        x = low + (high - low) * x
    return x if form == "general" else complex_matrix(as_complex(x))
