"""How kernels divide their work: tiles, warps, stages and registers, as measured on an H200."""

from __future__ import annotations

from typing import NamedTuple

# Samples a program takes; one program's weight gradients are added up on the chip.
CHUNK = 32
ROW_TILE = 64
UPDATE_TILE = 1024
# Warps a program, stages of its pipeline and registers a thread; for attention by the number of
# tokens a tile holds, with the tokens (forward) or keys (backward) taken at a time.
Options = dict[str, int]
FORWARD: dict[int, Options] = {
    16: {"num_warps": 1, "num_stages": 2, "QUERIES": 16},
    32: {"num_warps": 2, "num_stages": 2, "QUERIES": 32},
    64: {"num_warps": 4, "num_stages": 3, "QUERIES": 64, "maxnreg": 128},
    128: {"num_warps": 8, "num_stages": 2, "QUERIES": 128},
    256: {"num_warps": 8, "num_stages": 1, "QUERIES": 128},
    512: {"num_warps": 8, "num_stages": 1, "QUERIES": 64},
}
ATTENTION: dict[int, Options] = {
    16: {"num_warps": 1, "num_stages": 2, "KEYS": 16},
    32: {"num_warps": 1, "num_stages": 2, "KEYS": 16},
    64: {"num_warps": 1, "num_stages": 2, "KEYS": 16},
    128: {"num_warps": 8, "num_stages": 1, "KEYS": 128},
    256: {"num_warps": 8, "num_stages": 1, "KEYS": 256},
    512: {"num_warps": 8, "num_stages": 1, "KEYS": 512},
}
# Numbers of 32 bits take twice the room, and more where each is split in two for three products.
WIDE_FORWARD = FORWARD | {
    64: {"num_warps": 4, "num_stages": 1, "QUERIES": 64, "maxnreg": 128},
    128: {"num_warps": 4, "num_stages": 1, "QUERIES": 64},
    256: {"num_warps": 4, "num_stages": 1, "QUERIES": 64},
    512: {"num_warps": 4, "num_stages": 1, "QUERIES": 32},
}
SPLIT_FORWARD = WIDE_FORWARD | {64: {"num_warps": 4, "num_stages": 1, "QUERIES": 64}}
WIDE_ATTENTION = ATTENTION | {
    32: {"num_warps": 2, "num_stages": 2, "KEYS": 32},
    64: {"num_warps": 4, "num_stages": 1, "KEYS": 64},
}
ROW: Options = {"num_warps": 4, "num_stages": 3}
PROJECTIONS: Options = {"num_warps": 4, "num_stages": 2, "maxnreg": 128}
EMBED: Options = {"num_warps": 4, "num_stages": 3}
SPREAD: Options = {"num_warps": 2, "num_stages": 3}


class Tile(NamedTuple):
    """For samples of at most ``tokens`` tokens; another takes those of ``shorter`` or fewer."""

    tokens: int
    shorter: int


def padded(count: int) -> int:
    """The least power of two that holds ``count`` and suits the tensor cores."""
    return max(16, 1 << (count - 1).bit_length())


def tiles(longest: int, alike: bool) -> list[Tile]:
    """Tiles that together serve samples of up to ``longest`` tokens.

    Samples that are all ``alike`` have ``longest`` tokens each.
    """
    if alike or longest <= 64:
        return [Tile(padded(longest), longest - 1 if alike else 0)]
    heights = [64 << i for i in range((longest - 1).bit_length() - 5)]
    return list(map(Tile, heights, [0, *heights]))
