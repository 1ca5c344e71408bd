"""A predictor that reads whole networks: their outputs on learned probes, and invariants."""

from transformer_nfn.models.whole_network.checkpoint import WholeCheckpoint
from transformer_nfn.models.whole_network.checkpoint_probes import ProbeFormat
from transformer_nfn.models.whole_network.invariants import whole_invariants
from transformer_nfn.models.whole_network.model import WholeNetwork
from transformer_nfn.models.whole_network.probes import Probes, probe_outputs

__all__ = [
    "ProbeFormat",
    "Probes",
    "WholeCheckpoint",
    "WholeNetwork",
    "probe_outputs",
    "whole_invariants",
]
