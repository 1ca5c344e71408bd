"""In which manner is a module trained? As the paper trains, or as its own kind asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from transformer_nfn.models import StatNN, WholeNetwork
from transformer_nfn.models.baselines import STATISTICS
from transformer_nfn.prediction.dataset import Dataset, in_batches
from transformer_nfn.prediction.kinds import Kinds
from transformer_nfn.prediction.probe_search import find_probes, group_asks, search_steps
from transformer_nfn.prediction.scale import fit_scale

SHORTEST_EPOCH = 192
"""Networks that an epoch of the model of whole networks takes at least."""


@dataclass(frozen=True)
class AsRead:
    """The networks of each kind as one module reads them: to learn from, and to be chosen by."""

    train: Sequence[Mapping[str, Any]]
    val: Sequence[Mapping[str, Any]]

    @staticmethod
    def plain(kinds: Kinds) -> AsRead:
        """As they are."""
        return AsRead([data.network for data in kinds.train], [data.network for data in kinds.val])


class Manner:
    """As the paper trains: Adam, binary cross-entropy, every network once an epoch.

    Attributes:
        stacked: whether seeds can share each step, as one pass over stacked parameters.
        beginning: what `begin` does, in words, where it takes long.
    """

    stacked = True
    beginning = ""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def read(self, kinds: Kinds) -> Kinds:
        """The networks as the module reads them, see `prepared`."""
        train, val = ([prepared(self.module, d) for d in part] for part in (kinds.train, kinds.val))
        return replace(kinds, train=train, val=val)

    def per_epoch(self, train: Sequence[Dataset]) -> list[int]:
        """How many networks of each kind an epoch takes."""
        return [len(data) for data in train]

    def begin(
        self, module: nn.Module, kinds: Kinds, seed: int, epochs: int, fresh: bool
    ) -> AsRead:
        """What a module does before it is trained; ``fresh`` unless a killed training goes on."""
        return AsRead.plain(kinds)

    def finish(self, module: nn.Module, kinds: Kinds, own: AsRead) -> None:
        """What a module does when it is trained and at its best epoch."""

    def loss(self, logits: Tensor, accuracy: Tensor) -> Tensor:
        """Of one seed on one batch."""
        return binary_cross_entropy_with_logits(logits, accuracy)

    def optimiser(
        self, state: Mapping[str, Tensor], rate: float, device: torch.device
    ) -> torch.optim.Optimizer:
        """Over the parameters of all seeds, by their names behind the number of the seed."""
        return torch.optim.Adam(list(state.values()), **_means(rate, device))


class StatisticsManner(Manner):
    """As the paper trains, on statistics that are computed once."""

    def begin(
        self, module: nn.Module, kinds: Kinds, seed: int, epochs: int, fresh: bool
    ) -> AsRead:
        """Leaves the weights aside."""
        plain = AsRead.plain(kinds)
        train, val = (
            [{STATISTICS: network[STATISTICS]} for network in part]
            for part in (plain.train, plain.val)
        )
        return AsRead(train, val)


class WholeNetworkManner(Manner):
    """Probes first, which stay; then readers of what all checkpoints answer."""

    stacked = False  # each seed has probes of its own
    beginning = "finds probes, and what all networks answer to them"

    module: WholeNetwork

    def read(self, kinds: Kinds) -> Kinds:
        """With further checkpoints to learn from."""
        return super().read(replace(kinds, train=kinds.learned, more=[]))

    def per_epoch(self, train: Sequence[Dataset]) -> list[int]:
        """One checkpoint a run; of a few runs more, or it is over after a handful of steps."""
        runs = [_runs(data) for data in train]
        total = sum(runs)
        return [-(-n * max(total, SHORTEST_EPOCH) // total) for n in runs]

    def begin(
        self, module: nn.Module, kinds: Kinds, seed: int, epochs: int, fresh: bool
    ) -> AsRead:
        """Learns what invariants are usual, finds where good networks agree, and asks all there."""
        assert isinstance(module, WholeNetwork)
        module.standardise(*(data.network for data in kinds.train))
        if fresh and module.search:
            runs = sum(_runs(data) for data in kinds.train)
            steps, asked = search_steps(epochs, runs), group_asks(runs)
            find_probes(module, kinds.train, seed, steps=steps, asked=asked)
        train, val = (
            [module.head_inputs(d.network) for d in part] for part in (kinds.train, kinds.val)
        )
        return AsRead(train, val)

    @torch.no_grad()
    def finish(self, module: nn.Module, kinds: Kinds, own: AsRead) -> None:
        """Brings what it says to the scale of the validation networks; their order stays."""
        assert isinstance(module, WholeNetwork)
        said = [
            in_batches(module.logits, network, data)
            for data, network in zip(kinds.val, own.val, strict=True)
        ]
        truth = np.concatenate([data.truth for data in kinds.val])
        module.rescale(*fit_scale(torch.cat(said).double().cpu().numpy(), truth))

    def loss(self, logits: Tensor, accuracy: Tensor) -> Tensor:
        """The model's own."""
        return self.module.loss(logits, accuracy)

    def optimiser(
        self, state: Mapping[str, Tensor], rate: float, device: torch.device
    ) -> torch.optim.Optimizer:
        """Adam with decoupled weight decay of the readers; probes are not learned any further."""
        learned = [v for name, v in state.items() if not self.module.is_frozen(_within(name))]
        decay = self.module.weight_decay
        return torch.optim.AdamW(learned, weight_decay=decay, **_means(rate, device))


def manner_of(module: nn.Module) -> Manner:
    """How this module is trained."""
    if isinstance(module, WholeNetwork):
        return WholeNetworkManner(module)
    return StatisticsManner(module) if isinstance(module, StatNN) else Manner(module)


def prepared(module: Any, data: Dataset) -> Dataset:
    """The networks with what every seed would have to compute of them, where it is much."""
    own = getattr(module, "prepared", None)
    return data if own is None else replace(data, network=own(data.network))


def _runs(data: Dataset) -> int:
    """How many runs the networks are of."""
    return len(np.unique(data.columns["run"].astype(str)))


def _within(name: str) -> str:
    """The name of a parameter within its module."""
    return name.split(".", 1)[1]


def _means(rate: float, device: torch.device) -> dict[str, Any]:
    fused = device.type in ("cpu", "cuda")
    return dict(lr=rate, fused=fused, capturable=device.type == "cuda")
