"""Fingerprints of checkpoints, and their search among a hundred thousand."""

from transformer_nfn.checkpoints.fingerprints.database import (
    Database,
    Named,
    add_to_database,
    write_database,
)
from transformer_nfn.checkpoints.fingerprints.distances import Likeness, likeness
from transformer_nfn.checkpoints.fingerprints.nearest import Relative, search
from transformer_nfn.checkpoints.fingerprints.stored import FORMAT, Print, PrintError, from_bytes
from transformer_nfn.checkpoints.fingerprints.take import take_print

__all__ = [
    "FORMAT",
    "Database",
    "Likeness",
    "Named",
    "Print",
    "PrintError",
    "Relative",
    "add_to_database",
    "from_bytes",
    "likeness",
    "search",
    "take_print",
    "write_database",
]
