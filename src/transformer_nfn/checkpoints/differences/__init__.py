"""Differences of two checkpoints: what was changed, tensor by tensor, whatever the disguise."""

from transformer_nfn.checkpoints.differences.difference import diff
from transformer_nfn.checkpoints.differences.result import Difference, draw_difference

__all__ = ["Difference", "diff", "draw_difference"]
