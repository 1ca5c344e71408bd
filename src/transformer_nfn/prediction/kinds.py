"""Networks of several kinds to learn from: a mixed zoo in memory, one data set for each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from transformer_nfn.prediction.dataset import (
    PERCENT,
    Dataset,
    Parts,
    joined,
    load_parts,
    load_rows,
    select_rows,
)
from transformer_nfn.prediction.records import RunError
from transformer_nfn.zoo import MixedZoo, Zoo

PLAIN = ""
"""The name of the kind where there is only one, and nobody has to tell it from others."""


@dataclass(frozen=True)
class Kinds:
    """Data sets of unequal networks: each list has one for each of ``names``, in that order.

    Attributes:
        names: the kinds that a predictor learns from, such as ``w16-h2-d1``.
        train: networks to learn from.
        val: others, on which the best epoch is chosen.
        test: others still; no run has networks in two parts.
        left_out: kinds of which a predictor sees no network before it is tested on all of them.
        more: further networks to learn from, see `dataset.Parts`; empty where none were asked for.
    """

    names: tuple[str, ...]
    train: list[Dataset]
    val: list[Dataset]
    test: list[Dataset]
    left_out: Mapping[str, Dataset] = field(default_factory=dict)
    more: list[Dataset | None] = field(default_factory=list)

    @property
    def learned(self) -> list[Dataset]:
        """Of each kind everything there is to learn from, further networks too."""
        more = self.more or [None] * len(self.names)
        pairs = zip(self.train, more, strict=True)
        return [data if rest is None else joined(data, rest) for data, rest in pairs]

    @property
    def named(self) -> bool:
        """Whether they come from a mixed zoo, whose kinds are told apart."""
        return self.names != (PLAIN,)

    @property
    def selection(self) -> dict[str, Any]:
        """What a record says of them: how many in each part, of each kind if there are kinds."""
        parts = {"train": self.train, "val": self.val, "test": self.test}
        totals = {part: sum(map(len, sets)) for part, sets in parts.items()}
        if not self.named:
            return totals
        return {**totals, "kinds": self.counts, "left_out": list(self.left_out)}

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """How many networks of each kind each part has."""
        parts = {"train": self.train, "val": self.val, "test": self.test}
        counts = {
            name: {part: len(sets[i]) for part, sets in parts.items()}
            for i, name in enumerate(self.names)
        }
        left = {name: {"left out": len(data)} for name, data in self.left_out.items()}
        return counts | left

    def to(self, device: torch.device | str) -> Kinds:
        """The same networks on another device."""
        return replace(
            self,
            train=[data.to(device) for data in self.train],
            val=[data.to(device) for data in self.val],
            test=[data.to(device) for data in self.test],
            left_out={name: data.to(device) for name, data in self.left_out.items()},
            more=[data if data is None else data.to(device) for data in self.more],
        )


def as_kinds(parts: Parts | Kinds) -> Kinds:
    """Parts of a zoo of one kind as what they are a case of: a list of one, which needs no name."""
    if isinstance(parts, Kinds):
        return parts
    return Kinds((PLAIN,), [parts.train], [parts.val], [parts.test], more=[parts.more])


def load_kinds(
    mixed: MixedZoo,
    *,
    percent: int | None = PERCENT,
    min_accuracy: float = 0.0,
    split_seed: int = 0,
    max_train: int | None = None,
    subset_seed: int = 0,
    all_checkpoints: bool = False,
    leave_out: str | Sequence[str] = (),
) -> Kinds:
    """Selects, splits by run 70/15/15 within each kind, and reads.

    What is not named below is as in `dataset.load_parts`.

    Args:
        mixed: an open mixed zoo; kinds that are still being built count as far as they are.
        max_train: at most this many networks of each kind to train on.
        leave_out: one kind or several that are not trained on, such as ``w48-h4-d3``.
    """
    left_out = (leave_out,) if isinstance(leave_out, str) else tuple(leave_out)
    unseen = {}
    for name in left_out:
        rows = select_rows(mixed[name], percent=percent, min_accuracy=min_accuracy)
        unseen[name] = load_rows(mixed[name], rows)
    names = tuple(name for name in mixed.zoos if name not in unseen)
    if not names:
        raise RunError(f"'{mixed.path}' has no kind left to train on: {len(unseen)} are left out")
    parts = []
    for name in names:
        try:
            parts.append(
                load_parts(
                    mixed[name],
                    percent=percent,
                    min_accuracy=min_accuracy,
                    split_seed=split_seed,
                    max_train=max_train,
                    subset_seed=subset_seed,
                    all_checkpoints=all_checkpoints,
                )
            )
        except RunError as error:
            raise RunError(f"{name}: {error}") from error
    return Kinds(
        names,
        [p.train for p in parts],
        [p.val for p in parts],
        [p.test for p in parts],
        unseen,
        [p.more for p in parts] if all_checkpoints else [],
    )


def load_networks(
    zoo: Zoo | MixedZoo, *, leave_out: Sequence[str] = (), **selection: Any
) -> Parts | Kinds:
    """`load_parts` of a zoo, `load_kinds` of a mixed one; only of these kinds can be left out."""
    if isinstance(zoo, MixedZoo):
        return load_kinds(zoo, leave_out=leave_out, **selection)
    if leave_out:
        raise RunError(f"'{zoo.path}' has networks of one kind: there is none to leave out")
    return load_parts(zoo, **selection)


def describe_mixed(mixed: MixedZoo) -> dict[str, Any]:
    """What a record says of a mixed zoo; see `runs.describe_zoo` for a zoo of one kind."""
    return {
        "name": mixed.path.name,
        "task": mixed.task,
        "networks": len(mixed),
        "runs": sum(len(np.unique(zoo.table["run"].astype(str))) for zoo in mixed),
        "seeds": mixed.seeds,
        "architectures": {name: zoo.sizes.to_json() for name, zoo in mixed.zoos.items()},
    }
