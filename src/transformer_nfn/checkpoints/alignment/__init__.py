"""Alignment: bring one network as close to another as its symmetries allow."""

from transformer_nfn.checkpoints.alignment.checkpoint import Aligned, Alignment, align
from transformer_nfn.checkpoints.alignment.network import NetworkAlignment, align_networks

__all__ = ["Aligned", "Alignment", "NetworkAlignment", "align", "align_networks"]
