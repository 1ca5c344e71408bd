"""The maps that weights define: the paper's MultiHead and Attn, and the other references."""

from transformer_nfn.functional.attention import (
    grouped_query,
    layer_norm,
    multi_head,
    rms_norm,
    rotary,
)
from transformer_nfn.functional.blocks import (
    FORWARDS,
    block,
    decoder_stack,
    forward_of,
    gated_mlp,
    grouped_query_block,
    input_width,
    mlp,
    residual_stack,
    rope_block,
    stack,
    swiglu_block,
)

__all__ = [
    "FORWARDS",
    "block",
    "decoder_stack",
    "forward_of",
    "gated_mlp",
    "grouped_query",
    "grouped_query_block",
    "input_width",
    "layer_norm",
    "mlp",
    "multi_head",
    "residual_stack",
    "rms_norm",
    "rope_block",
    "rotary",
    "stack",
    "swiglu_block",
]
