"""The rows a network begins with: patches of stored images, vectors of stored words."""

from __future__ import annotations

import triton
import triton.language as tl

from transformer_nfn.zoo.training.backends.kernels.shared import hash_word


@triton.jit
def row_patches(samples, order_ptr, crop_ptr, n, t, here, CONST: tl.constexpr):
    """Patches ``t`` of images ``n``, in training cropped at random; white is 1, black −1."""
    P: tl.constexpr = CONST.P
    wide = samples.wide
    p = tl.arange(0, CONST.PP)
    inside = here[:, None] & (p < P)[None, :]
    start = tl.load(order_ptr + n, mask=here, other=0).to(tl.int64) * (wide * wide)
    if CONST.train:
        word = hash_word(n, tl.load(crop_ptr), tl.load(crop_ptr + 1))
        shifts: tl.constexpr = 2 * CONST.padding + 1
        start += (((word & 0xFFFF) * shifts) >> 16).to(tl.int64) * wide
        start += (((word >> 16) * shifts) >> 16).to(tl.int64)
    else:
        start += CONST.padding * (wide + 1)
    # A pixel lies where its patch begins, plus where it is within any patch.
    start += tl.load(samples.table + t * P, mask=here, other=0)
    within = tl.load(samples.table + p, mask=p < P, other=0)
    pixels = tl.load(samples.stored + start[:, None] + within[None, :], mask=inside, other=0)
    return tl.where(inside, pixels.to(tl.float32) * (2.0 / samples.white) - 1.0, 0.0)


@triton.jit
def row_words(samples, order_ptr, n, t, here, D: tl.constexpr):
    """The frozen vectors of words ``t`` of texts ``n``; past a text's end those of no word."""
    sample = tl.load(order_ptr + n, mask=here, other=0).to(tl.int64)
    there = here & (t < samples.wide)
    token = tl.load(samples.stored + sample * samples.wide + t, mask=there, other=0).to(tl.int64)
    at = token[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(samples.table + at, mask=here[:, None], other=0.0)
