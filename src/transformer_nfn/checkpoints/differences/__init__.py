"""Differences of two checkpoints: what was changed, tensor by tensor, whatever the disguise."""

from transformer_nfn.checkpoints.differences.change import Change
from transformer_nfn.checkpoints.differences.difference import diff
from transformer_nfn.checkpoints.differences.result import Difference, Merge, draw_difference

__all__ = ["Change", "Difference", "Merge", "diff", "draw_difference"]
