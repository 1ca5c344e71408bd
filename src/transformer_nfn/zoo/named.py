"""Which networks do words mean? Files, folders, rows of zoos, whole zoos, patterns of names."""

from __future__ import annotations

import glob
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_nfn.errors import AssetError, CheckpointError
from transformer_nfn.io.assets import NAME, resolve
from transformer_nfn.io.checkpoint import Checkpoint
from transformer_nfn.zoo.checkpoints import ZooRow, open_checkpoint
from transformer_nfn.zoo.damage import damage_of
from transformer_nfn.zoo.store import MixedZoo, Zoo
from transformer_nfn.zoo.store.folder import KINDS_FILE
from transformer_nfn.zoo.store.index import CONFIGURATION

DIGITS = 18
PATTERN = frozenset("*?[")


@dataclass(frozen=True)
class NamedNetwork:
    """One network that a user named.

    Attributes:
        name: what it is called, such as ``mnist-sample#3``.
        zoo: the zoo it is a row of, else None.
        row: its number there.
    """

    name: str
    zoo: Zoo | None = None
    row: int | None = None

    def open(self) -> Checkpoint:
        """Opens it; reads no weights."""
        if self.zoo is None or self.row is None:
            return open_checkpoint(self.name)
        return Checkpoint(self.name, ZooRow(self.zoo, self.row))

    @property
    def about(self) -> dict[str, Any] | None:
        """What the zoo recorded of it: run, epoch, configuration, test accuracy; None for a file.

        What is not known of an imported network is None. Of a damaged one there is also
        ``damage``: what was done to which row.
        """
        if self.zoo is None or self.row is None:
            return None
        recorded = self.zoo.config(self.row)
        kept = ("run", "epoch", "percent", "best", *CONFIGURATION, "test_accuracy")
        told = {key: _known(recorded[key]) for key in kept}
        damage = damage_of(str(recorded["source"]))
        return told if damage is None else told | {"damage": damage.to_json()}


def _known(value: Any) -> Any:
    missing = value == "" or (isinstance(value, float) and not math.isfinite(value))
    return None if missing else value


def named_networks(texts: Iterable[str | Path]) -> list[NamedNetwork]:
    """Every network that some words mean, in their order.

    Args:
        texts: each a file or folder as `Checkpoint.open` takes it, a zoo by its path or name (all
            its rows; of a mixed zoo those of every kind), rows of it (``ZOO#3``, ``ZOO#3-9``,
            ``ZOO#0,4,7-9``), or a pattern such as ``nets/*.pt``. What exists under that very name
            is meant first.
    """
    zoos: dict[str, Zoo] = {}
    return [network for text in texts for network in _named(str(text), zoos)]


def _named(text: str, zoos: dict[str, Zoo]) -> Iterator[NamedNetwork]:
    path = Path(text)
    if _exists(path / "zoo.json"):
        yield from _rows(text, text, None, zoos)
    elif _exists(path / KINDS_FILE):
        for kind, opened in MixedZoo.open(path).zoos.items():
            zoos[f"{text}/{kind}"] = opened
            yield from _rows(text, f"{text}/{kind}", None, zoos)
    elif _exists(path):
        yield NamedNetwork(text)
    elif PATTERN & set(text):
        matches = sorted(glob.glob(text, recursive=True))
        if not matches:
            raise CheckpointError(f"no file or folder matches '{text}'")
        for match in matches:
            yield from _named(match, zoos)
    elif "#" in text:
        zoo, _, rows = text.rpartition("#")
        yield from _rows(text, zoo, rows, zoos)
    elif NAME.fullmatch(text):
        try:
            resolve(text, "zoo")
        except AssetError as error:
            raise CheckpointError(f"there is no file '{text}': {error}") from error
        yield from _rows(text, text, None, zoos)
    else:
        yield NamedNetwork(text)  # which says, when it is opened, that there is no such file


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name longer than the system allows
        return False


def _rows(text: str, zoo: str, rows: str | None, zoos: dict[str, Zoo]) -> Iterator[NamedNetwork]:
    wanted = None if rows is None else [_span(text, zoo, part) for part in rows.split(",")]
    if zoo not in zoos:
        zoos[zoo] = Zoo.open(zoo)
    opened = zoos[zoo]
    for first, last in [(0, len(opened) - 1)] if wanted is None else wanted:
        if last >= len(opened):
            raise CheckpointError(f"'{text}': the zoo has {len(opened)} rows, counted from 0")
        yield from (NamedNetwork(f"{zoo}#{row}", opened, row) for row in range(first, last + 1))


def _span(text: str, zoo: str, part: str) -> tuple[int, int]:
    """The first and the last row of ``3`` or ``3-9``."""
    first, dash, last = part.partition("-")
    ends = [first, last] if dash else [first, first]
    if not all(n.isascii() and n.isdecimal() and len(n) <= DIGITS for n in ends):
        raise CheckpointError(
            f"'{text}': a row is a whole number, as in {zoo}#12, or a range, as in {zoo}#3-9"
        )
    low, high = map(int, ends)
    if low > high:
        raise CheckpointError(f"'{text}': rows count upwards, as in {zoo}#{high}-{low}")
    return low, high
