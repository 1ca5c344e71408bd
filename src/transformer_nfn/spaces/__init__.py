"""What a weight space is, and ready-made ones."""

from transformer_nfn.spaces.axis import Axis
from transformer_nfn.spaces.product import Product
from transformer_nfn.spaces.ready import (
    READY,
    attention_block,
    biased_block,
    grouped_query_block,
    multi_head,
    residual_stack,
    rope_block,
    stack,
    swiglu_block,
)
from transformer_nfn.spaces.space import Weights, WeightSpace
from transformer_nfn.spaces.tensors import Shift, TensorSpec

__all__ = [
    "READY",
    "Axis",
    "Product",
    "Shift",
    "TensorSpec",
    "WeightSpace",
    "Weights",
    "attention_block",
    "biased_block",
    "grouped_query_block",
    "multi_head",
    "residual_stack",
    "rope_block",
    "stack",
    "swiglu_block",
]
