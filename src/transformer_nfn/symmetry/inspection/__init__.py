"""What is in a checkpoint? Its blocks, its symmetries, its spectra, what is dead or there twice."""

from transformer_nfn.symmetry.inspection.actors import Acting, acting
from transformer_nfn.symmetry.inspection.figure import draw_spectra
from transformer_nfn.symmetry.inspection.repeats import DEAD, DUPLICATE, Repeats
from transformer_nfn.symmetry.inspection.whole import (
    BlockReport,
    Inspection,
    inspect,
    inspect_network,
)

__all__ = [
    "DEAD",
    "DUPLICATE",
    "Acting",
    "BlockReport",
    "Inspection",
    "Repeats",
    "acting",
    "draw_spectra",
    "inspect",
    "inspect_network",
]
