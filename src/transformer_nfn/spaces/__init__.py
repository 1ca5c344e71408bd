"""What a weight space is, and ready-made ones."""

from transformer_nfn.spaces.actions import Action
from transformer_nfn.spaces.axis import Axis
from transformer_nfn.spaces.derivation import Product
from transformer_nfn.spaces.element import Element
from transformer_nfn.spaces.group import Group
from transformer_nfn.spaces.invariants import fold, product, products
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
from transformer_nfn.spaces.tensors import Shift, TensorSpec, Weights

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
]
