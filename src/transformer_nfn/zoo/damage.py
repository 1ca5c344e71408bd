"""Records of damage: its kinds and strengths, and how the rows of a zoo store them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from transformer_nfn.io.json_fields import Fields, parse_object
from transformer_nfn.zoo.errors import StoreError, ZooError

if TYPE_CHECKING:
    from transformer_nfn.zoo.store import Zoo

ORIGIN = "damage"
"""What ``zoo.json`` calls the origin of a zoo of damaged networks."""

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
"""Every kind of damage and how strong it comes, see `training.damage`."""


@dataclass(frozen=True)
class Damage:
    """What became of one network.

    Attributes:
        kind: one of `STRENGTHS`.
        strength: share of the entries, size of the noise, or bits; 1 where there is no choice.
        row: of the zoo that it came from.
        part: the tensor or block that was touched; empty for all of them.
        other_row: the network that a block came from, of the same zoo; -1 for none.
        other_run: its run; empty for none.
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
    def words(self) -> str:
        """Such as ``pruned:0.6``."""
        return damage_name(self.kind, self.strength)


def damage_name(kind: str, strength: float) -> str:
    """A kind and its strength in one word, ``noise:0.3``; the kind alone if it has one only."""
    return kind if len(STRENGTHS.get(kind, ())) == 1 else f"{kind}:{strength:g}"


def parse_damages(text: str | Iterable[str]) -> dict[str, tuple[float, ...]]:
    """Kinds with their strengths from ``shuffled,noise:0.3``; a kind alone has all of its own."""
    words = text.split(",") if isinstance(text, str) else list(text)
    found: dict[str, tuple[float, ...]] = {}
    for word in words:
        kind, colon, strength = word.strip().partition(":")
        if kind not in STRENGTHS:
            raise ZooError(
                f"there is no kind of damage '{kind}'; there are {', '.join(STRENGTHS)}"
            )
        chosen = (_strength(kind, strength),) if colon else STRENGTHS[kind]
        found[kind] = tuple(dict.fromkeys((*found.get(kind, ()), *chosen)))
    return found


def _strength(kind: str, text: str) -> float:
    """Refuses what cannot be: a share lies in (0, 1], noise is positive, bits are 2 to 16."""
    try:
        value = float(text)
    except ValueError:
        raise ZooError(f"'{kind}:{text}': a strength is a number, as in noise:0.3") from None
    if len(STRENGTHS[kind]) == 1:
        fits, words = value == 1, "has no strength but 1"
    elif kind == "quantised":
        fits, words = value in range(2, 17), "takes whole bits from 2 to 16"
    elif kind == "noise":
        fits, words = 0 < value <= 1000, "takes a size above 0 and at most 1000"
    else:
        fits, words = 0 < value <= 1, "takes a share above 0 and at most 1"
    if not fits:
        raise ZooError(f"damage '{kind}' {words}, found {text}")
    return value


def source_text(damage: Damage, file: str, seed: int) -> str:
    """What the column ``source`` of a zoo's index says of a damaged network.

    Args:
        file: the name under which `zoo export` writes it.
        seed: of the run it came from.
    """
    return json.dumps({"file": file, "seed": seed, "damage": damage.to_json()})


def damage_of(source: str) -> Damage | None:
    """What a row's ``source`` says of its damage; None for a network that has none."""
    if not source.startswith("{"):
        return None
    told = parse_object(source, "a row of the zoo", StoreError)
    if "damage" not in told:
        return None
    fields = Fields(told, "a row of the zoo", StoreError).inner("damage")
    return Damage(
        fields.text("kind"),
        fields.number("strength"),
        fields.whole("row", 0),
        fields.text("part"),
        fields.whole("other_row", -1),
        fields.text("other_run"),
    )


def damages(zoo: Zoo) -> list[Damage]:
    """The damage of every row of a zoo that `zoo damage` made."""
    if zoo.about["origin"] != ORIGIN:
        raise StoreError(
            f"'{zoo.path}' is no zoo of damaged networks: make one with tnfn zoo damage"
        )
    found = [damage_of(source) for source in zoo.table["source"].tolist()]
    if any(damage is None for damage in found):
        row = next(i for i, damage in enumerate(found) if damage is None)
        raise StoreError(f"'{zoo.path}': row {row} does not say what was done to it")
    return [damage for damage in found if damage is not None]


def rows_of(zoo: Zoo, kinds: Mapping[str, tuple[float, ...]]) -> np.ndarray:
    """The rows of a damaged zoo whose damage is of these kinds and strengths."""
    fits = [damage.strength in kinds.get(damage.kind, ()) for damage in damages(zoo)]
    return np.flatnonzero(np.array(fits, dtype=bool))
