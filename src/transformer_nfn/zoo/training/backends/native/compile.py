"""The C step on this machine: compiled once per kind of network, kept in the user's cache."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from transformer_nfn.known_tasks import BLOCKS, HEADS, HIDDEN, WIDTH
from transformer_nfn.native_network.compile import CompiledSizes, load_for

SOURCES = ("step.c", "pass.h")


@functools.cache
def library(
    width: int = WIDTH, heads: int = HEADS, neurons: int = HIDDEN, blocks: int = BLOCKS
) -> tuple[ctypes.CDLL | None, str]:
    """The step compiled for networks of these sizes, or None and why there is none."""
    here = Path(__file__).parent
    sizes = CompiledSizes(width, heads, neurons, blocks)
    return load_for(sizes, [here / name for name in SOURCES], "step", _declare)


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    i, long, pointer = ctypes.c_int, ctypes.c_long, ctypes.c_void_p
    lib.tnfn_pass.argtypes = [
        i, i, i, i, i, pointer, pointer, pointer, pointer, i, pointer,
        pointer, i, pointer, pointer, pointer, pointer, pointer,
    ]
    lib.tnfn_pass.restype = i
    lib.tnfn_update.argtypes = [i, long, pointer, pointer, pointer, pointer, pointer]
    lib.tnfn_update.restype = None
    return lib
