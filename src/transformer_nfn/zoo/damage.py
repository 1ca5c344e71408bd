"""Records of damage: its kinds and strengths, and how the rows of a zoo store them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from transformer_nfn.io.json_fields import Fields, parse_object
from transformer_nfn.zoo.errors import StoreError, ZooError
from transformer_nfn.zoo.store.zoo import Zoo

ORIGIN = "damage"
"""Value of ``origin`` in the metadata of a zoo of damaged networks."""

STRENGTHS: Mapping[str, tuple[float, ...]] = {
    "shuffled": (0.5, 1.0),
    "tensor": (1,),
    "block": (1,),
    "exchanged": (1,),
    "untrained": (1,),
    "noise": (0.1, 0.3, 1.0, 3.0),
    "pruned": (0.3, 0.6, 0.9),
    "quantised": (4, 3, 2),
}
"""Kinds of damage with their default strengths; see `training.damage.damage`."""


@dataclass(frozen=True)
class Damage:
    """Damage to one network.

    Attributes:
        kind: one of `STRENGTHS`.
        strength: share of the entries, scale of the noise, or bits; 1 for other kinds.
        row: of the network in the original zoo.
        part: the damaged tensor or block; empty for all of them.
        other_row: row of the network that a block came from, or -1.
        other_run: its run, or empty.

    >>> Damage("pruned", 0.6, row=3).name
    'pruned:0.6'
    """

    kind: str
    strength: float
    row: int
    part: str = ""
    other_row: int = -1
    other_run: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @property
    def name(self) -> str:
        """Kind and strength, such as ``pruned:0.6``."""
        return damage_name(self.kind, self.strength)


def damage_name(kind: str, strength: float) -> str:
    """Kind and strength as one word; the kind alone if it has one strength.

    >>> damage_name("noise", 0.3), damage_name("untrained", 1)
    ('noise:0.3', 'untrained')
    """
    return kind if len(STRENGTHS.get(kind, ())) == 1 else f"{kind}:{strength:g}"


def parse_damages(text: str | Iterable[str]) -> dict[str, tuple[float, ...]]:
    """Kinds of damage with their strengths; a kind alone has its default strengths.

    >>> parse_damages("shuffled,noise:0.3")
    {'shuffled': (0.5, 1.0), 'noise': (0.3,)}
    """
    words = text.split(",") if isinstance(text, str) else list(text)
    damages: dict[str, tuple[float, ...]] = {}
    for word in words:
        kind, colon, strength = word.strip().partition(":")
        if kind not in STRENGTHS:
            raise ZooError(
                f"there is no kind of damage '{kind}'; there are {', '.join(STRENGTHS)}"
            )
        chosen = (_strength(kind, strength),) if colon else STRENGTHS[kind]
        damages[kind] = tuple(dict.fromkeys((*damages.get(kind, ()), *chosen)))
    return damages


def _strength(kind: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ZooError(f"'{kind}:{text}': a strength is a number, as in noise:0.3") from None
    if len(STRENGTHS[kind]) == 1:
        valid, rule = value == 1, "has no strength but 1"
    elif kind == "quantised":
        valid, rule = value in range(2, 17), "takes whole bits from 2 to 16"
    elif kind == "noise":
        valid, rule = 0 < value <= 1000, "takes a size above 0 and at most 1000"
    else:
        valid, rule = 0 < value <= 1, "takes a share above 0 and at most 1"
    if not valid:
        raise ZooError(f"damage '{kind}' {rule}, found {text}")
    return value


def source_text(damage: Damage, file: str, seed: int) -> str:
    """The ``source`` column of a damaged network.

    Args:
        file: the name under which `tnfn zoo export` writes it.
        seed: of the original run.
    """
    return json.dumps({"file": file, "seed": seed, "damage": damage.to_json()})


def read_source(source: str) -> Fields:
    """The fields of a ``source`` column: the file's name, empty for rows built here, and more."""
    where, bare = "a row of the zoo", not source.startswith("{")
    record = {"file": source} if bare else parse_object(source, where, StoreError)
    return Fields(record, where, StoreError)


def damage_of(source: str) -> Damage | None:
    """The damage in a ``source`` column, or None.

    >>> damage_of(source_text(Damage("noise", 1.0, row=3), "a.pt", 0)).row
    3
    """
    record = read_source(source)
    if "damage" not in record.data:
        return None
    fields = record.inner("damage")
    return Damage(
        fields.text("kind"),
        fields.number("strength"),
        fields.whole("row", 0),
        fields.text("part"),
        fields.whole("other_row", -1),
        fields.text("other_run"),
    )


def damages(zoo: Zoo) -> list[Damage]:
    """The damage of every row of a zoo that `tnfn zoo damage` made."""
    if zoo.metadata["origin"] != ORIGIN:
        raise StoreError(
            f"'{zoo.path}' is no zoo of damaged networks: make one with tnfn zoo damage"
        )
    records = []
    for row, source in enumerate(zoo.table["source"].tolist()):
        damage = damage_of(source)
        if damage is None:
            raise StoreError(f"'{zoo.path}': row {row} has no record of its damage")
        records.append(damage)
    return records
