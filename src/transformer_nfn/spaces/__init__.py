"""Weight spaces: axes, actions, the symmetry group, invariant products, ready-made spaces."""

from transformer_nfn.spaces.actions import Action
from transformer_nfn.spaces.axis import Axis, Shift, TensorSpec, Weights, under_prefix
from transformer_nfn.spaces.group import Element, Group
from transformer_nfn.spaces.layout import Product
from transformer_nfn.spaces.parts import (
    Part,
    attention_part,
    axis_part,
    compose,
    map_part,
    mlp_part,
    norm_part,
)
from transformer_nfn.spaces.ready import (
    READY,
    attention_block,
    biased_block,
    decoder_stack,
    grouped_query_block,
    multi_head,
    residual_stack,
    rope_block,
    stack,
    swiglu_block,
)
from transformer_nfn.spaces.space import WeightSpace
from transformer_nfn.spaces.weights import fold, product, products

__all__ = [
    "READY",
    "Action",
    "Axis",
    "Element",
    "Group",
    "Part",
    "Product",
    "Shift",
    "TensorSpec",
    "WeightSpace",
    "Weights",
    "attention_block",
    "attention_part",
    "axis_part",
    "biased_block",
    "compose",
    "decoder_stack",
    "fold",
    "grouped_query_block",
    "map_part",
    "mlp_part",
    "multi_head",
    "norm_part",
    "product",
    "products",
    "residual_stack",
    "rope_block",
    "stack",
    "swiglu_block",
    "under_prefix",
]
