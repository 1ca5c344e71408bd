"""Equivariant and invariant layers of any weight space, by levels."""

from transformer_nfn.nn.activation import Activation
from transformer_nfn.nn.equivariant import Equivariant
from transformer_nfn.nn.invariant import Invariant
from transformer_nfn.nn.level_map import Block
from transformer_nfn.nn.read_through import ReadThrough

__all__ = ["Activation", "Block", "Equivariant", "Invariant", "ReadThrough"]
