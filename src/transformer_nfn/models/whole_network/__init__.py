"""A predictor that reads whole networks: their outputs on learned probes, and invariants."""

from transformer_nfn.models.whole_network.invariants import whole_invariants
from transformer_nfn.models.whole_network.model import WholeNetwork
from transformer_nfn.models.whole_network.probes import MAX_TOKENS, Probes, probe_outputs

__all__ = ["MAX_TOKENS", "Probes", "WholeNetwork", "probe_outputs", "whole_invariants"]
