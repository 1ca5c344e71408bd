"""Bounds of the option `--seed`."""

from __future__ import annotations

from collections.abc import Callable

import typer

LARGEST = 2**63 - 1
"""The largest seed of PyTorch's generators."""


def seed_from(lowest: int) -> Callable[[int], int]:
    """Callback of an option that takes seeds from `lowest` up.

    Bounds of the option itself would be printed in its help, 40 characters wide.
    """

    def check(seed: int) -> int:
        if not lowest <= seed <= LARGEST:
            raise typer.BadParameter(f"{seed} is not in the range {lowest}<=x<={LARGEST}.")
        return seed

    return check
