"""Damaged relatives of the networks of an experiment, parted as the runs they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from transformer_nfn.prediction.dataset import Dataset, Parts, joined, load_rows
from transformer_nfn.prediction.records import RunError
from transformer_nfn.zoo.damage import Damage, damages

if TYPE_CHECKING:
    from transformer_nfn.zoo import Zoo

FEWEST = 20
"""Damaged networks that each part needs."""


@dataclass(frozen=True)
class Damaged:
    """Damaged networks with their measured accuracy.

    Attributes:
        train: relatives of networks to learn from.
        val: of those that calibrate. None of a run that tests.
        train_drop: by how much accuracy fell, from that of the network it was, ``[n]``.
        train_kinds: what was done to each of ``train``, ``[n]`` of words.
        val_kinds: to each of ``val``.
    """

    train: Dataset
    val: Dataset
    train_drop: torch.Tensor
    train_kinds: np.ndarray
    val_kinds: np.ndarray

    @property
    def counts(self) -> dict[str, int]:
        """How many there are in each part."""
        return {"train": len(self.train), "val": len(self.val)}

    def with_more(self, other: Damaged) -> Damaged:
        """These and others."""
        return Damaged(
            joined(self.train, other.train),
            joined(self.val, other.val),
            torch.cat([self.train_drop, other.train_drop]),
            np.concatenate([self.train_kinds, other.train_kinds]),
            np.concatenate([self.val_kinds, other.val_kinds]),
        )


def load_damaged(
    damaged: Zoo,
    zoo: Zoo,
    parts: Parts,
    hold_out: Mapping[str, tuple[float, ...]] | None = None,
) -> Damaged:
    """The relatives of the training and of the validation runs.

    What was exchanged counts where both its networks are: neither may be of a later part.

    Args:
        damaged: from `zoo damage`.
        zoo: what it was made from.
        parts: of that zoo.
        hold_out: kinds and strengths not to be looked at, see `damage_record.parse_damages`.
    """
    told = damages(damaged)
    if damaged.sizes != zoo.sizes:
        raise RunError(f"'{damaged.path}' holds networks of other sizes than '{zoo.path}'")
    _check_parents(damaged, zoo, told)
    part_of = {
        run: i
        for i, part in enumerate((parts.train, parts.val))
        for run in part.columns["run"].astype(str).tolist()
    }
    runs = damaged.table["run"].astype(str).tolist()
    chosen: tuple[list[int], list[int]] = ([], [])
    for row, (run, damage) in enumerate(zip(runs, told, strict=True)):
        if damage.strength in (hold_out or {}).get(damage.kind, ()):
            continue
        both = [part_of.get(r, 2) for r in (run, damage.other_run or run)]
        if both[0] < 2 and max(both) == both[0]:
            chosen[both[0]].append(row)
    for name, rows in zip(("training", "validation"), chosen, strict=True):
        if len(rows) < FEWEST:
            raise RunError(
                f"'{damaged.path}' has {len(rows)} damaged relatives of {name} runs, {FEWEST} are "
                "needed"
            )
    train, val = (load_rows(damaged, np.array(rows)) for rows in chosen)
    before = zoo.table["test_accuracy"][[told[row].row for row in chosen[0]]]
    drop = torch.as_tensor(before, dtype=torch.float32) - train.accuracy
    kinds = [np.array([told[row].kind for row in rows]) for rows in chosen]
    return Damaged(train, val, drop, *kinds)


def _check_parents(damaged: Zoo, zoo: Zoo, told: list[Damage]) -> None:
    rows = np.array([damage.row for damage in told])
    fits = rows.max() < len(zoo) and bool(
        (zoo.table["run"][rows] == damaged.table["run"]).all()
        and (zoo.table["seed"][rows] == damaged.table["seed"]).all()
    )
    if not fits:
        raise RunError(f"'{damaged.path}' was not made from the networks of '{zoo.path}'")
