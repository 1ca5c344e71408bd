"""Small transformers in C: layers for training and for probing them, compiled for each size."""

from transformer_nfn.native_network.probing import fits, probe_answers, why_not

__all__ = ["fits", "probe_answers", "why_not"]
