"""A block's input: read from memory, or for the first block made from the stored samples."""

from __future__ import annotations

import triton
import triton.language as tl

from transformer_nfn.zoo.training.backends.kernels.shared import hash_word

# Where a block's input comes from.
MEMORY = tl.constexpr(0)
IMAGES = tl.constexpr(1)
WORDS = tl.constexpr(2)


@triton.jit
def row_patches(
    image_ptr, order_ptr, pattern_ptr, n, t, here, crop_ptr, WIDE, white, P: tl.constexpr,
    PP: tl.constexpr, PADDING: tl.constexpr, CROP: tl.constexpr,
):  # fmt: skip
    """Patches ``t`` of images ``n``, moved by their random crop, white as 1 and black as −1."""
    p = tl.arange(0, PP)
    inside = here[:, None] & (p < P)[None, :]
    start = tl.load(order_ptr + n, mask=here, other=0).to(tl.int64) * (WIDE * WIDE)
    if CROP:
        word = hash_word(n, tl.load(crop_ptr), tl.load(crop_ptr + 1))
        shifts: tl.constexpr = 2 * PADDING + 1
        start += (((word & 0xFFFF) * shifts) >> 16).to(tl.int64) * WIDE
        start += (((word >> 16) * shifts) >> 16).to(tl.int64)
    else:
        start += PADDING * (WIDE + 1)
    # A pixel lies where its patch begins, plus where it is within any patch.
    start += tl.load(pattern_ptr + t * P, mask=here, other=0)
    within = tl.load(pattern_ptr + p, mask=p < P, other=0)
    pixels = tl.load(image_ptr + start[:, None] + within[None, :], mask=inside, other=0)
    return tl.where(inside, pixels.to(tl.float32) * (2.0 / white) - 1.0, 0.0)


@triton.jit
def row_words(token_ptr, order_ptr, vector_ptr, n, t, here, LONGEST, D: tl.constexpr):
    """The frozen vectors of words ``t`` of texts ``n``; past a text's end those of no word."""
    sample = tl.load(order_ptr + n, mask=here, other=0).to(tl.int64)
    there = here & (t < LONGEST)
    token = tl.load(token_ptr + sample * LONGEST + t, mask=there, other=0).to(tl.int64)
    at = token[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(vector_ptr + at, mask=here[:, None], other=0.0)
