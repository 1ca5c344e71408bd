"""Equivariant and invariant layers of any weight space."""

from transformer_nfn.nn.layers import Activation, Equivariant, Invariant
from transformer_nfn.nn.level_map import Block
from transformer_nfn.nn.read_through import ReadThrough

__all__ = ["Activation", "Block", "Equivariant", "Invariant", "ReadThrough"]
