"""Who is related to whom in a folder of checkpoints? All pairs, resumable, here or on Ray."""

from transformer_nfn.checkpoints.pairs.checkpoints import Found, read_folder
from transformer_nfn.checkpoints.pairs.figure import draw_pairs
from transformer_nfn.checkpoints.pairs.results import Pair, PairsError, groups
from transformer_nfn.checkpoints.pairs.run import AllPairs, relate_folder, relate_pair

__all__ = [
    "AllPairs",
    "Found",
    "Pair",
    "PairsError",
    "draw_pairs",
    "groups",
    "read_folder",
    "relate_folder",
    "relate_pair",
]
