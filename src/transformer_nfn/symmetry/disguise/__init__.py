"""The same function with other weights: every symmetry of a real transformer, at random."""

from transformer_nfn.symmetry.disguise.rows import BLOCK_ROWS
from transformer_nfn.symmetry.disguise.stream import Turn, draw_turn, stream_action
from transformer_nfn.symmetry.disguise.whole import Disguise, disguise, untied

__all__ = ["BLOCK_ROWS", "Disguise", "Turn", "disguise", "draw_turn", "stream_action", "untied"]
