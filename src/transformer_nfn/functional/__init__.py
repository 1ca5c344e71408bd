"""The maps that weights define: the paper's MultiHead and Attn, and the other references."""

from transformer_nfn.functional.attention import (
    grouped_query,
    layer_norm,
    multi_head,
    rms_norm,
    rotary,
)
from transformer_nfn.functional.blocks import (
    block,
    decoder_stack,
    gated_mlp,
    grouped_query_block,
    mlp,
    residual_stack,
    rope_block,
    swiglu_block,
)

__all__ = [
    "block",
    "decoder_stack",
    "gated_mlp",
    "grouped_query",
    "grouped_query_block",
    "layer_norm",
    "mlp",
    "multi_head",
    "residual_stack",
    "rms_norm",
    "rope_block",
    "rotary",
    "swiglu_block",
]
