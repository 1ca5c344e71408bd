"""Alignment: bring one network as close to another as its symmetries allow."""

from transformer_nfn.checkpoints.alignment.checkpoint import Aligned, align

__all__ = ["Aligned", "align"]
