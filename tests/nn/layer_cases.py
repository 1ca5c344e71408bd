"""The spaces every layer test runs over, small, and the layers of each kind."""

from typing import Any

from transformer_nfn import spaces

BLOCK = spaces.attention_block(4, 2, 3, 2, 5)
SPACES = {
    "multi_head": spaces.multi_head(4, 2, 3, 2),
    "attention_block": BLOCK,
    "biased_block": spaces.biased_block(4, 2, 3, 2, 5),
    "residual_stack": spaces.residual_stack(2, 4, 2, 3, 2, 5, d_in=3, d_out=2),
    "grouped_query_block": spaces.grouped_query_block(4, 2, 3, 3, 2, 5),
    "rope_block": spaces.rope_block(4, 2, 4, 2, 5),
    "swiglu_block": spaces.swiglu_block(4, 2, 3, 2, 5),
    "decoder_stack": spaces.decoder_stack(1, 4, 2, 2, 4, 2, 3, d_in=2, d_out=2),
    "stack": spaces.stack(BLOCK, 2),
    "permuted stack": spaces.stack(spaces.biased_block(4, 2, 3, 2, 5), 2, between="permuted"),
    "permuted rope": spaces.stack(spaces.rope_block(4, 2, 4, 2, 5), 2, between="permuted"),
}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "sums": {"pool": "sum", "init": "xavier"},
    "low rank": {"rank": 2},
    "gated": {"gated": True, "quadratic": True},
    "gated low rank": {"rank": 2, "gated": True, "quadratic": True},
}


def invariant_options(options: dict[str, Any]) -> dict[str, Any]:
    """The same options for an invariant layer, which has no gates."""
    return {k: v for k, v in options.items() if k != "gated"}
