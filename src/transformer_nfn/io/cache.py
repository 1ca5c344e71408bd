"""Where is the user's cache? Compiled C, downloads and fetched assets lie in it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

CACHE_VARIABLE = "TNFN_CACHE"


def cache_folder(*parts: str) -> Path:
    """The folder for one kind of thing in the cache; it need not be there yet.

    The cache itself is the folder in ``TNFN_CACHE``, else ``transformer-nfn`` in the system's
    place for caches.

    Args:
        parts: folders within the cache, such as ``compiled``, ``assets``, ``mnist``.
    """
    named = os.environ.get(CACHE_VARIABLE)
    root = Path(named) if named else _system_caches() / "transformer-nfn"
    return root.joinpath(*parts)


def _system_caches() -> Path:
    found = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if found.is_absolute():  # the standard says to ignore a relative one
        return found
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
