"""Search for the nearest models of a database: all coarse copies first, then the likeliest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transformer_nfn.checkpoints.fingerprints.database import COARSE, SCALE, Database, coarse_copy
from transformer_nfn.checkpoints.fingerprints.distances import Likeness, distance, likeness
from transformer_nfn.checkpoints.fingerprints.stored import Print

SHORTLIST = 64
"""Prints that are compared in full, or four times as many as are asked for."""


@dataclass(frozen=True)
class Relative:
    """A model of the database, and how alike it is."""

    name: str
    print: Print
    likeness: Likeness


def search(database: Database, prints: Sequence[Print], most: int = 10) -> list[list[Relative]]:
    """The nearest relatives of each print, nearest first.

    Args:
        database: open.
        prints: to look for.
        most: how many relatives of each.
    """
    if not prints or len(database) == 0:
        return [[] for _ in prints]
    wanted = coarse_copy(prints).astype(np.float32).T / (COARSE * SCALE**2)
    near = np.concatenate([rows.astype(np.float32) @ wanted for rows in database.coarse()])
    count = min(len(near), max(SHORTLIST, 4 * most))
    out = []
    for i, asked in enumerate(prints):
        rows = np.argpartition(-near[:, i], count - 1)[:count]
        near_ones = sorted(
            database.rows([int(r) for r in rows]),
            key=lambda entry: (distance(asked, entry.print), entry.name),
        )
        out.append(
            [Relative(e.name, e.print, likeness(asked, e.print)) for e in near_ones[:most]]
        )
    return out
