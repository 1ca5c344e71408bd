"""What a predictor reads of a whole network."""

from transformer_nfn.models.whole_network.invariants import whole_invariants

__all__ = ["whole_invariants"]
