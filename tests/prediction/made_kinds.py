"""Networks of two kinds made up for tests; see `made_networks`."""

from __future__ import annotations

from dataclasses import replace

from made_networks import ARCH, made

from transformer_nfn.prediction.kinds import Kinds

WIDE, DEEP = "w8-h2-d2", "w6-h3-d3"
# The second is none that the compiled pass takes, so both passes are in one training.
SIZES = {WIDE: ARCH, DEEP: replace(ARCH, d_model=6, heads=3, d_ff=10, blocks=3)}
ABOUT = {
    "name": "made",
    "task": "digits",
    "networks": 100,
    "architectures": {name: sizes.to_json() for name, sizes in SIZES.items()},
}


def networks(name: str, count: int, seed: int):
    """Of one kind, with the positions their sizes have."""
    return replace(made(count, seed, SIZES[name]), tokens=ARCH.tokens)


def kinds(*, left_out: tuple[str, ...] = ()) -> Kinds:
    """Twice as many networks of the first kind as of the second."""
    names = tuple(name for name in SIZES if name not in left_out)
    return Kinds(
        names,
        [networks(name, 40 if name == WIDE else 20, 0) for name in names],
        [networks(name, 12, 1) for name in names],
        [networks(name, 12, 2) for name in names],
        {name: networks(name, 15, 3) for name in left_out},
    )
