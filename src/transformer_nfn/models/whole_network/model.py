"""How good is this network? Asked by learned probes, and by numbers no symmetry can change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from transformer_nfn.architectures.zoo_network import sinusoids
from transformer_nfn.errors import SpaceError
from transformer_nfn.models.invariants import invariant_features
from transformer_nfn.models.pretrained import Pretrained
from transformer_nfn.models.signed_log import signed_log
from transformer_nfn.models.whole_network.answers import Answers, answers
from transformer_nfn.models.whole_network.probes import Probes
from transformer_nfn.spaces import WeightSpace

INVARIANTS = "invariants"
"""The part of a network that holds its invariants, where they were computed before."""
FARTHEST = 8.0
"""In standard deviations: beyond what was seen a line is no guide."""
SURE = 0.02
"""Accuracies that differ by less count for less when two networks are ordered."""


class WholeNetwork(Pretrained):
    """Probes pushed through each network and what it answers, beside invariants of its weights.

    Exactly invariant under everything that leaves a network's function alone, because the first
    part reads the function itself; the second reads invariants of the paper's group.

    Args:
        space: of one block of the networks it learns from.
        invariants: how many invariants a network has; None leaves them out.
        tokens: of a probe.
        width: of a token of a probe: pixels of a patch, or of a word vector.
        classes: of the networks' task.
        probes: how many; 0 leaves them out.
        rank: of the matrix of all probes.
        hidden: neurons that read the answers.
    """

    weight_decay = 0.1
    mean: Tensor
    scale: Tensor

    def __init__(
        self,
        space: WeightSpace,
        *,
        tokens: int,
        width: int,
        classes: int,
        invariants: int | None = None,
        probes: int = 64,
        rank: int = 32,
        hidden: int = 64,
    ) -> None:
        super().__init__()
        if not probes and invariants is None:
            raise SpaceError("a model needs at least one of probes and invariants")
        self.space = space
        self._config: dict[str, Any] = dict(
            tokens=tokens,
            width=width,
            classes=classes,
            invariants=invariants,
            probes=probes,
            rank=rank,
            hidden=hidden,
        )
        self._positions: dict[tuple[int, torch.device], Tensor] = {}
        self.probes = Probes(probes, tokens, width, classes, rank) if probes else None
        self.reader = _reader(answer_width(probes, classes), hidden) if probes else None
        self.register_buffer("mean", torch.zeros(invariants or 0))
        self.register_buffer("scale", torch.ones(invariants or 0))
        self.judge = _reader(invariants, hidden // 4) if invariants is not None else None

    def undecayed(self, name: str) -> bool:
        """Whether weight decay leaves a parameter alone: probes are inputs, not weights."""
        return name.startswith("probes.")

    def prepared(self, network: Mapping[str, Any]) -> dict[str, Any]:
        """The network with its invariants beside its weights, so that they are computed once."""
        if self.judge is None or INVARIANTS in network:
            return dict(network)
        weights = {part: w for part, w in network.items() if part != INVARIANTS}
        found = signed_log(invariant_features(_on_cpu(weights), self.space))
        place = network["classifier"]["W_1"]
        return {**network, INVARIANTS: found.to(place)}

    def standardise(self, network: Mapping[str, Any]) -> None:
        """Learns from these networks what is usual for an invariant."""
        if self.judge is None:
            return
        x = self.prepared(network)[INVARIANTS].double()
        mean, std = x.mean(0), x.std(0, correction=0)
        # What is the same everywhere in training says nothing elsewhere either.
        scale = torch.where(std > 1e-6, 1 / std.clamp(min=1e-6), torch.zeros_like(std))
        self.mean.copy_(mean)
        self.scale.copy_(scale)

    def answers(self, network: Mapping[str, Any], positions: Tensor | None = None) -> Answers:
        """What the networks answer to the probes."""
        if self.probes is None:
            raise SpaceError("this model has no probes")
        inputs = self.probes()
        if positions is None:
            positions = self._where(network["classifier"]["W_1"].shape[1], inputs)
        return answers(network, inputs, positions)

    def _where(self, width: int, inputs: Tensor) -> Tensor:
        """The fixed positions for networks of this width, made once on each device."""
        key = (width, inputs.device)
        if key not in self._positions:
            self._positions[key] = sinusoids(inputs.shape[1], width).to(inputs)
        return self._positions[key]

    def logits(self, network: Mapping[str, Any], positions: Tensor | None = None) -> Tensor:
        """The number before the Sigmoid, ``[batch]``."""
        out = torch.zeros((), device=self.mean.device)
        if self.reader is not None:
            out = out + self.reader(read_answers(self.answers(network, positions))).squeeze(-1)
        if self.judge is not None:
            x = self.prepared(network)[INVARIANTS]
            near = ((x - self.mean) * self.scale).clamp(-FARTHEST, FARTHEST)
            out = out + self.judge(near).squeeze(-1)
        return out

    def forward(self, network: Mapping[str, Any]) -> Tensor:
        """The predicted accuracy of each network, ``[batch]``, between 0 and 1."""
        return torch.sigmoid(self.logits(network))

    @staticmethod
    def loss(logits: Tensor, accuracy: Tensor) -> Tensor:
        """Cross-entropy, and a price for every pair of networks in the wrong order."""
        return binary_cross_entropy_with_logits(logits, accuracy) + 0.3 * order_loss(
            logits, accuracy
        )

    @property
    def config(self) -> dict[str, Any]:
        """The arguments that build this model, as JSON values."""
        return {"space": self.space.to_json(), **self._config}


def answer_width(probes: int, classes: int) -> int:
    """How many numbers `read_answers` gives, whatever the width, heads and depth of networks."""
    return 2 * probes * classes + 2 * probes + 1


def read_answers(given: Answers) -> Tensor:
    """Answers as numbers of middling size: probabilities, logits at scale 1, that scale, tokens."""
    logits = given.logits - given.logits.mean(-1, keepdim=True)
    size = (logits.square().mean((1, 2), keepdim=True) + 1e-12).sqrt()
    usual = given.logits.softmax(-1) - 1 / logits.shape[-1]
    return torch.cat(
        [
            3 * usual.flatten(1),
            (logits / size).flatten(1),
            size[:, 0].log().clamp(-FARTHEST, FARTHEST),
            given.alike.mean(-1),
            given.alike[..., -1],
        ],
        -1,
    )


def order_loss(logits: Tensor, accuracy: Tensor) -> Tensor:
    """How wrongly networks are ordered: a smooth count of the pairs that Kendall's τ counts."""
    ahead = logits[:, None] - logits
    truly = accuracy[:, None] - accuracy
    weight = (truly.abs() / SURE).clamp(max=1)
    wrong = softplus(-4 * ahead * truly.sign())
    return (weight * wrong).sum() / weight.sum().clamp(min=1)


def _reader(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, hidden),
        nn.SiLU(),
        nn.Linear(hidden, hidden // 2),
        nn.SiLU(),
        nn.Linear(hidden // 2, 1),
    )


def _on_cpu(network: Mapping[str, Any]) -> dict[str, Any]:
    def move(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.cpu()
        if isinstance(part, Mapping):
            return {name: move(w) for name, w in part.items()}
        return [move(block) for block in part]

    return {name: move(part) for name, part in network.items()}
