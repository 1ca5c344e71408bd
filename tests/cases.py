"""The spaces every contract test runs over, and random ones for property tests."""

from __future__ import annotations

import os

import torch
from hypothesis import strategies as st

from transformer_nfn import spaces
from transformer_nfn.spaces import Weights, WeightSpace

SIX = {
    "attention_block": spaces.attention_block(8, 3, 3, 4, 10),
    "biased_block": spaces.biased_block(8, 3, 3, 4, 10),
    "residual_stack": spaces.residual_stack(2, 8, 3, 3, 4, 10, d_in=5, d_out=3),
    "grouped_query_block": spaces.grouped_query_block(8, 3, 2, 3, 4, 10),
    "rope_block": spaces.rope_block(8, 3, 6, 4, 10),
    "swiglu_block": spaces.swiglu_block(8, 3, 3, 4, 10),
}
ALL = {
    **SIX,
    "decoder_stack": spaces.decoder_stack(2, 6, 2, 2, 4, 3, 7, d_in=5, d_out=3),
    "decoder_stack, neighbours, no biases": spaces.decoder_stack(
        1, 6, 2, 3, 4, 3, 7, d_in=5, d_out=3, biases=False, rotary="neighbours"
    ),
    "multi_head": spaces.multi_head(7, 3, 4, 5),
    "stack, fixed between": spaces.stack(spaces.attention_block(6, 2, 3, 4, 9), 2),
    "stack, permuted between": spaces.stack(
        spaces.attention_block(6, 2, 3, 4, 9), 3, between="permuted"
    ),
    "stack of biased blocks": spaces.stack(spaces.biased_block(6, 2, 3, 4, 9), 2),
}


def trials(quick: int, nightly: int) -> int:
    """How many random cases a test tries: few in `make test`, all in `make nightly`."""
    return nightly if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else quick


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(space: WeightSpace, seed: int = 0, batch: int = 1, channels: int = 1) -> Weights:
    return space.randn(batch, channels, generator=gen(seed), dtype=torch.float64)


def perturbed(weights: Weights, size: float, seed: int = 0) -> Weights:
    """Every weight multiplied by 1 + size·normal."""
    source = gen(seed)
    return {
        name: w
        * (1 + size * torch.randn(w.shape, generator=source, dtype=torch.float64)).to(w.dtype)
        for name, w in weights.items()
    }


def worst(found: Weights, expected: Weights) -> float:
    """Largest relative error over the tensors; tensors of norm zero must be met absolutely."""
    errors = []
    for name, want in expected.items():
        size = float(want.norm())
        errors.append(float((found[name] - want).norm()) / (size if size > 0 else 1.0))
    return max(errors)


@st.composite
def blocks(draw_from: st.DrawFn, min_width: int = 2) -> WeightSpace:
    """Paper blocks of any shape: h from 1 to 5, Dk ≠ Dv, D to 24, DA from 1."""
    integer = st.integers
    d_k = draw_from(integer(1, 6))
    d_v = draw_from(integer(1, 6).filter(lambda n: n != d_k))
    return spaces.attention_block(
        draw_from(integer(min_width, 24)),
        draw_from(integer(1, 5)),
        d_k,
        d_v,
        draw_from(integer(1, 24)),
    )


seeds = st.integers(0, 2**31 - 1)
