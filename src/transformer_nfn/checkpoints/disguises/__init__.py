"""The same function with other weights: every symmetry of a real transformer, at random."""

from transformer_nfn.checkpoints.disguises.rows import BLOCK_ROWS
from transformer_nfn.checkpoints.disguises.stream import Turn, draw_turn, stream_action
from transformer_nfn.checkpoints.disguises.whole import Disguise, disguise, untied

__all__ = ["BLOCK_ROWS", "Disguise", "Turn", "disguise", "draw_turn", "stream_action", "untied"]
