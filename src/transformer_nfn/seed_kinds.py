"""How the networks of a zoo came by their random numbers, as a setting and in words."""

from __future__ import annotations

# What a build can be asked for.
SEED_KINDS = {"one": "one seed for all", "each": "a seed each"}
UNKNOWN = "unknown"


def seeds_text(kind: object) -> str:
    """A kind in words; those of files that do not tell are unknown."""
    return SEED_KINDS.get(str(kind), "seeds unknown")
