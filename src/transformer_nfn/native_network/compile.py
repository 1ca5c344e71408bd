"""C code about networks of one size: compiled once for each size, kept in the user's cache."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformer_nfn.known_tasks import BLOCKS, HEADS, HIDDEN, WIDTH
from transformer_nfn.native_code import load

HEADERS = ("block.h", "layers.h", "vectors.h")
FLAGS = ("-fno-schedule-insns",)
"""GCC would load so much ahead of the products that registers run out."""


@dataclass(frozen=True)
class CompiledSizes:
    """The constants the C code is compiled with."""

    width: int = WIDTH
    heads: int = HEADS
    neurons: int = HIDDEN
    blocks: int = BLOCKS
    classes: int = 16

    @property
    def flags(self) -> list[str]:
        """For the compiler; classes are padded, so that several tasks share one library."""
        constants = {
            "WIDTH": self.width,
            "HEADS": self.heads,
            "NEURONS": self.neurons,
            "BLOCKS": self.blocks,
            "LOGITS": -(-self.classes // 16) * 16,
        }
        return [f"-DTNFN_{name}={size}" for name, size in constants.items()]


def load_for(
    sizes: CompiledSizes,
    sources: Sequence[Path],
    what: str,
    declare: Callable[[ctypes.CDLL], ctypes.CDLL],
    tries: Sequence[Sequence[str]] = ((),),
) -> tuple[ctypes.CDLL | None, str]:
    """As `native_code.load`, for networks of one size; sources may include `HEADERS`."""
    here = Path(__file__).parent
    headers = [here / name for name in HEADERS]
    flags = [[*sizes.flags, *FLAGS, *more] for more in tries]
    return load([*sources, *headers], what, declare, flags)
