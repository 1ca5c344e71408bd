"""Fingerprints of checkpoints, and their search among a hundred thousand."""

from transformer_nfn.checkpoints.fingerprints.database import (
    Database,
    Entry,
    Match,
    add_to_database,
    search,
    write_database,
)
from transformer_nfn.checkpoints.fingerprints.fingerprint import (
    FORMAT,
    MEANING,
    Fingerprint,
    FingerprintComparison,
    FingerprintError,
    compare_fingerprints,
)
from transformer_nfn.checkpoints.fingerprints.invariants import take_fingerprint

__all__ = [
    "FORMAT",
    "MEANING",
    "Database",
    "Entry",
    "Fingerprint",
    "FingerprintComparison",
    "FingerprintError",
    "Match",
    "add_to_database",
    "compare_fingerprints",
    "search",
    "take_fingerprint",
    "write_database",
]
