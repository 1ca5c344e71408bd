"""What is in a checkpoint? Its blocks, its symmetries, its spectra, what is dead or there twice."""

from transformer_nfn.checkpoints.inspection.figure import draw_spectra
from transformer_nfn.checkpoints.inspection.repeats import DEAD, DUPLICATE, Repeats
from transformer_nfn.checkpoints.inspection.whole import (
    BlockReport,
    Inspection,
    inspect,
    inspect_network,
)

__all__ = [
    "DEAD",
    "DUPLICATE",
    "BlockReport",
    "Inspection",
    "Repeats",
    "draw_spectra",
    "inspect",
    "inspect_network",
]
