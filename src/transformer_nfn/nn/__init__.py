"""Equivariant and invariant layers of any weight space, by levels."""

from transformer_nfn.nn._activation import Activation
from transformer_nfn.nn._equivariant import Equivariant
from transformer_nfn.nn._invariant import Invariant
from transformer_nfn.nn._level_map import Block
from transformer_nfn.nn._read_through import ReadThrough

__all__ = ["Activation", "Block", "Equivariant", "Invariant", "ReadThrough"]
