"""A mixed zoo: a folder of zoos, one for each kind of network, and which kinds there are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformer_nfn import __version__
from transformer_nfn.zoo.errors import StoreError, ZooError
from transformer_nfn.zoo.kind import Kind
from transformer_nfn.zoo.store.about import read_about
from transformer_nfn.zoo.store.files import Checksums
from transformer_nfn.zoo.store.folder import KINDS_FILE
from transformer_nfn.zoo.store.zoo import Zoo

FORMAT = 1
KIND = "transformer-nfn mixed zoo"


class MixedZoo:
    """Zoos of one task whose networks differ in width, heads or depth.

    Attributes:
        path: the folder; every kind's zoo lies in it under the kind's name.
        about: what ``kinds.json`` says.
        zoos: the zoos by the name of their kind, such as ``w16-h2-d1``; while a mixed zoo is
            being built, those that have been begun.
    """

    def __init__(self, path: Path, about: dict[str, Any], kinds: Sequence[Kind]) -> None:
        self.path, self.about, self.kinds = path, about, tuple(kinds)
        self.zoos = {
            kind.name: _open_kind(path / kind.name, kind)
            for kind in self.kinds
            if (path / kind.name / "zoo.json").is_file()
        }

    @staticmethod
    def open(path: Path | str) -> MixedZoo:
        """Opens a mixed zoo, finished or still being built; reads indices, no weights."""
        path = Path(path)
        about = read_kinds(path)
        return MixedZoo(path, about, kinds_in(path, about))

    def __len__(self) -> int:
        """Networks of all kinds together."""
        return sum(len(zoo) for zoo in self)

    def __iter__(self) -> Iterator[Zoo]:
        return iter(self.zoos.values())

    def __getitem__(self, name: str) -> Zoo:
        if name not in self.zoos:
            raise ZooError(
                f"'{self.path}' has no networks of the kind '{name}': it has "
                f"{', '.join(self.zoos) or 'none yet'}"
            )
        return self.zoos[name]

    def __repr__(self) -> str:
        return f"MixedZoo('{self.path}': {len(self):,} networks of {len(self.zoos)} kinds)"

    @property
    def task(self) -> str:
        """The name of the task that all networks are trained on."""
        return str(self.about["task"])

    @property
    def rows(self) -> dict[str, int]:
        """How many networks there are of each kind."""
        return {name: len(zoo) for name, zoo in self.zoos.items()}

    @property
    def seeds(self) -> str:
        """``one`` if all runs of a kind share a seed, ``each`` if every run has its own."""
        return str(self.about["seeds"])

    @property
    def finished(self) -> bool:
        """Whether every kind is there and every shard of it."""
        return len(self.zoos) == len(self.kinds) and all(zoo.finished for zoo in self)


def open_zoo(path: Path | str) -> Zoo | MixedZoo:
    """Opens a zoo of one kind or a mixed one, whichever lies there."""
    return MixedZoo.open(path) if is_mixed(path) else Zoo.open(path)


def is_mixed(path: Path | str) -> bool:
    """Whether a folder says that it is a mixed zoo."""
    return (Path(path) / KINDS_FILE).is_file()


def write_kinds(path: Path, kinds: Sequence[Kind], about: dict[str, Any]) -> None:
    """Writes ``kinds.json``."""
    whole = {
        "format": FORMAT,
        "kind": KIND,
        "made_by": f"transformer-nfn {__version__}",
        **about,
        "kinds": [kind.name for kind in kinds],
    }
    Checksums(path).replace(KINDS_FILE, json.dumps(whole, indent=1).encode())


def read_kinds(path: Path) -> dict[str, Any]:
    """What ``kinds.json`` says, checked; refuses what is no mixed zoo, or a newer one."""
    if not is_mixed(path):
        raise StoreError(f"'{path}' is not a mixed zoo: it has no {KINDS_FILE}")
    return read_about(path / KINDS_FILE, KIND, FORMAT, "a mixed zoo")


def kinds_in(path: Path, about: dict[str, Any]) -> tuple[Kind, ...]:
    """The kinds that ``kinds.json`` names, in its order."""
    names = about.get("kinds")
    if not isinstance(names, list) or not names:
        raise StoreError(f"{path / KINDS_FILE}: expected a list of kinds, found {names!r}")
    try:
        return tuple(Kind.named(str(name)) for name in names)
    except ZooError as error:
        raise StoreError(f"{path / KINDS_FILE}: {error}") from error


def _open_kind(path: Path, kind: Kind) -> Zoo:
    zoo = Zoo.open(path)
    if zoo.arch.kind != kind:
        raise StoreError(f"'{path}' holds networks of {zoo.arch.kind}, expected {kind}")
    return zoo
