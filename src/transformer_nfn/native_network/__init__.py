"""The zoo's network in C: outputs on probes, compiled for each size of network."""

from transformer_nfn.native_network.probing import fits, probe_outputs, why_not

__all__ = ["fits", "probe_outputs", "why_not"]
