"""A training that is killed in the middle and taken up again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from transformer_nfn.prediction.dataset import Parts
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.training import train_seeds


class KilledError(Exception):
    """In place of the signal."""


def kill_in_epoch(
    epoch: int, build: Callable[[], nn.Module], data: Parts, protocol: Protocol, folder: Path
) -> None:
    """Trains seeds 0 and 1 under the identity ``x`` and leaves the state of that epoch."""

    def kill(line):
        if line.get("epoch") == epoch:
            raise KilledError

    with pytest.raises(KilledError):
        train_seeds(
            build,
            data,
            protocol,
            [0, 1],
            folder=folder,
            identity="x",
            report=kill,
            save_every=0,
        )
