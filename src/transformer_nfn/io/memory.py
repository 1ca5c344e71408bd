"""Is there room in memory for what a user asks for? Asked before the system would end us."""

from __future__ import annotations

import os

from transformer_nfn.errors import TransformerNFNError

GIB = 1 << 30


def check_memory(needed: int, what: str) -> None:
    """Refuses what is larger than this machine's memory.

    Args:
        needed: bytes.
        what: that needs them.
    """
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise TransformerNFNError(
            f"{what} needs {needed / GIB:,.0f} GiB of memory, this machine has {there / GIB:,.0f}"
        )
