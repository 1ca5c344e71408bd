"""Equivariant and invariant layers of any weight space, by levels."""

from transformer_nfn.nn._activation import Activation
from transformer_nfn.nn._equivariant import Equivariant
from transformer_nfn.nn._invariant import Invariant
from transformer_nfn.nn._level_map import Block

__all__ = ["Activation", "Block", "Equivariant", "Invariant"]
