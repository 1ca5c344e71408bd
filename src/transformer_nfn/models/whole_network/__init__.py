"""A predictor that reads whole networks: what they answer, and what no symmetry can change."""

from transformer_nfn.models.whole_network.invariants import whole_invariants
from transformer_nfn.models.whole_network.model import WholeNetwork

__all__ = ["WholeNetwork", "whole_invariants"]
