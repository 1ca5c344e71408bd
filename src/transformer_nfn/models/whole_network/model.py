"""How good is this network? What it answers to learned probes, and what its weights say."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from transformer_nfn.errors import SpaceError
from transformer_nfn.functional.zoo_network import sinusoids
from transformer_nfn.models.network import network_of
from transformer_nfn.models.pretrained import Pretrained
from transformer_nfn.models.scales import signed_log, usual
from transformer_nfn.models.whole_network.answers import Answers, answers
from transformer_nfn.models.whole_network.invariants import whole_invariants
from transformer_nfn.models.whole_network.probes import Probes
from transformer_nfn.models.whole_network.reading import answer_width, read_answers, told_apart
from transformer_nfn.nn.roles import RoleLayers
from transformer_nfn.spaces import WeightSpace

INVARIANTS, ANSWERS = "invariants", "answers"
"""Parts of a network that hold its invariants and its answers, where they were computed before."""
FARTHEST = 8.0
"""In standard deviations: beyond what was seen a line is no guide."""
SURE = 0.02
"""Accuracies that differ by less count for less when two networks are ordered."""


class TaskSizes(Protocol):
    """What of a network's sizes its task decides, and its width."""

    @property
    def patch(self) -> int:
        """Pixels in a patch, 0 for word vectors."""

    @property
    def classes(self) -> int:
        """Logits."""

    @property
    def tokens(self) -> int:
        """Of an input at most."""

    @property
    def d_model(self) -> int:
        """The width."""


class WholeNetwork(Pretrained):
    """Up to three readers of a network, whose judgements add up.

    Probes are pushed through it and its answers read: that sees the function alone, so nothing
    that leaves the function as it is can change it. Invariants (`whole_invariants`) and layers
    over the whole network (`nn.RoleLayers`) read the weights, free of what permutations, bases of
    heads, and the scales that LayerNorm and ReLU discard can change. Networks of any width, number
    of heads and depth are read by the same parameters.

    Args:
        space: of one block of the networks it learns from, for the record.
        tokens: of a probe.
        width: of a token of a probe: pixels of a patch, or of a word vector.
        classes: of the networks' task.
        images: whether networks have an embedding of patches.
        probes: how many; 0 leaves them out.
        invariants: whether invariants are read.
        channels: of the layers over the whole network; 0 leaves them out.
        rank: of the matrix of the probes of a group.
        groups: of probes, see `Probes`.
        bounded: whether probes are images, of pixels between -1 and 1.
        logarithms: whether answers are read as logarithms of probabilities, see `read_answers`.
        answers_first: whether weights and tokens are read only of networks that answer different
            probes differently: of one that does nothing both are rounding.
        hidden: neurons that read the answers.
        search: whether training first moves probes to where good networks agree.
        order: price of pairs of networks in the wrong order; 0 leaves cross-entropy alone.
        standard: whether invariants are read relative to what is usual.
    """

    weight_decay = 0.5
    mean: Tensor
    scale: Tensor

    def __init__(
        self,
        space: WeightSpace,
        *,
        tokens: int,
        width: int,
        classes: int,
        images: bool = True,
        probes: int = 64,
        invariants: bool = True,
        channels: int = 0,
        rank: int = 32,
        groups: int = 1,
        bounded: bool = False,
        logarithms: bool = False,
        answers_first: bool = False,
        hidden: int = 64,
        search: bool = True,
        order: float = 0.3,
        standard: bool = True,
    ) -> None:
        super().__init__()
        sizes = dict(
            tokens=tokens, width=width, classes=classes, probes=probes, channels=channels,
            rank=rank, groups=groups, hidden=hidden,
        )  # fmt: skip
        for name, size in sizes.items():
            if type(size) is not int or size < 0:
                raise SpaceError(f"'{name}' expected a whole number, found {str(size)[:40]}")
        if not (probes or invariants or channels):
            raise SpaceError("a model needs at least one of probes, invariants and layers")
        self.space = space
        self._config: dict[str, Any] = dict(
            tokens=tokens,
            width=width,
            classes=classes,
            images=images,
            probes=probes,
            invariants=invariants,
            channels=channels,
            rank=rank,
            groups=groups,
            bounded=bounded,
            logarithms=logarithms,
            answers_first=answers_first,
            hidden=hidden,
            search=search,
            order=order,
            standard=standard,
        )
        self.search, self.order, self.standard = search, order, standard
        self.logarithms, self.answers_first = logarithms, answers_first
        self._positions: dict[tuple[int, torch.device], Tensor] = {}
        self.probes = (
            Probes(probes, tokens, width, classes, rank, bounded=bounded, groups=groups)
            if probes
            else None
        )
        self.reader = _reader(answer_width(probes, classes), hidden) if probes else None
        count = count_invariants(images) if invariants else 0
        self.register_buffer("mean", torch.zeros(count))
        self.register_buffer("scale", torch.ones(count))
        self.judge = _reader(count, max(16, hidden // 4)) if invariants else None
        patch = width if images else 0
        self.layers = (
            RoleLayers(channels, classes=classes, patch=patch, tokens=tokens) if channels else None
        )
        self.weigh = (
            _reader(self.layers.width, max(32, hidden // 2)) if self.layers is not None else None
        )

    @property
    def any_task(self) -> bool:
        """Whether networks of other patches, tokens and classes are read: by invariants alone."""
        return self.probes is None and self.layers is None

    def is_found(self, name: str) -> bool:
        """Whether a parameter is found before the readers learn and stays: that of a probe."""
        return name.startswith("probes.")

    def misfit(self, found: TaskSizes, trained: TaskSizes) -> str | None:
        """Why networks of some sizes cannot be read; None where they can.

        Any width, number of heads, depth and number of neurons can; what belongs to the task
        cannot change, and the width of networks that read word vectors does.

        Args:
            found: the sizes of the networks in question.
            trained: those of the networks it was trained on.
        """
        if bool(found.patch) != bool(trained.patch):
            names = {True: "images", False: "word vectors"}
            wanted, there = names[bool(trained.patch)], names[bool(found.patch)]
            return f"expected networks that read {wanted}, found some that read {there}"
        words = {"patch": "{} pixels in a patch", "classes": "{} classes", "tokens": "{} tokens"}
        if not trained.patch:
            words["d_model"] = "word vectors of width {}"
        for size, text in words.items():
            wanted, there = getattr(trained, size), getattr(found, size)
            if wanted != there:
                return f"expected {text.format(wanted)}, found {there}"
        return None

    def prepared(
        self, network: Mapping[str, Any], positions: Tensor | None = None
    ) -> dict[str, Any]:
        """The network with its invariants beside its weights, so that they are computed once."""
        if self.judge is None or INVARIANTS in network:
            return dict(network)
        found = signed_log(whole_invariants(network, self._where(network, positions)))
        return {**network, INVARIANTS: found.to(network["classifier"]["W_1"])}

    @torch.no_grad()
    def kept(self, network: Mapping[str, Any], positions: Tensor | None = None) -> dict[str, Any]:
        """All that the readers learn from: weights only where layers read them.

        Probes that stay as they are get the same answers in every epoch.
        """
        parts = self.prepared(network, positions)
        if self.layers is None:
            parts = {name: part for name, part in parts.items() if name == INVARIANTS}
        if self.probes is not None:
            parts[ANSWERS] = self._asked(network, positions)[ANSWERS]
        return parts

    def standardise(self, *networks: Mapping[str, Any]) -> None:
        """Learns from these networks, of one kind or several, what is usual for an invariant."""
        if self.judge is None or not self.standard:
            return
        rows = [self.prepared(network)[INVARIANTS].double() for network in networks]
        mean, scale = usual(torch.cat(rows))
        self.mean.copy_(mean)
        self.scale.copy_(scale)

    def answers(self, network: Mapping[str, Any], positions: Tensor | None = None) -> Answers:
        """What the networks answer to the probes."""
        if self.probes is None:
            raise SpaceError("this model has no probes")
        return self.ask(network, self.probes(), positions)

    def ask(
        self, network: Mapping[str, Any], inputs: Tensor, positions: Tensor | None = None
    ) -> Answers:
        """What the networks answer to inputs like its probes, ``[inputs, tokens, width]``."""
        return answers(network, inputs, self._where(network, positions))

    def _asked(self, network: Mapping[str, Any], positions: Tensor | None) -> Mapping[str, Any]:
        """The network with what it answers beside its weights, so that it is asked once."""
        if self.probes is None or ANSWERS in network:
            return network
        given = self.answers(network, positions)
        read = read_answers(given, logarithms=self.logarithms, answers_first=self.answers_first)
        return {**network, ANSWERS: read}

    def _share(self, network: Mapping[str, Any]) -> Tensor | float:
        """How much what weights say counts, of networks that were asked: ``[batch]``, or all."""
        if self.probes is None or not self.answers_first:
            return 1.0
        return told_apart(network[ANSWERS], self._config["probes"], self._config["classes"])

    def _where(self, network: Mapping[str, Any], given: Tensor | None) -> Tensor:
        """The fixed positions for networks of this width, made once on each device."""
        like = network["classifier"]["W_1"]
        if given is not None:
            return given.to(like)
        key = (like.shape[1], like.device)
        if key not in self._positions:
            self._positions[key] = sinusoids(self._config["tokens"], like.shape[1]).to(like)
        return self._positions[key].to(like.dtype)

    def logits(self, network: Mapping[str, Any], positions: Tensor | None = None) -> Tensor:
        """The number before the Sigmoid, ``[batch]``."""
        network = self._asked(network, positions)
        out = torch.zeros((), device=self.mean.device)
        for read, seen in self._readings(network, positions):
            said = read(seen).squeeze(-1)
            out = out + (said if read is self.reader else self._share(network) * said)
        return out

    def reading(self, network: Mapping[str, Any], positions: Tensor | None = None) -> Tensor:
        """Everything it judges networks by, ``[batch, F]``: as much of networks of any size."""
        network = self._asked(network, positions)
        return torch.cat([seen for _, seen in self._readings(network, positions)], -1)

    def _readings(
        self, network: Mapping[str, Any], positions: Tensor | None
    ) -> Iterator[tuple[nn.Module, Tensor]]:
        """Each reader, and what it reads of networks that were asked."""
        if self.reader is not None:
            yield self.reader, network[ANSWERS]
        if self.judge is not None:
            x = self.prepared(network, positions)[INVARIANTS]
            yield self.judge, ((x - self.mean) * self.scale).clamp(-FARTHEST, FARTHEST)
        if self.layers is not None and self.weigh is not None:
            yield self.weigh, self.layers(network, self._where(network, positions))

    @torch.no_grad()
    def rescale(self, stretch: float, shift: float) -> None:
        """From now on logits are ``stretch`` times what they were, and ``shift`` more."""
        readers = [r for r in (self.reader, self.judge, self.weigh) if r is not None]
        for reader in readers:
            for p in reader[-1].parameters():
                p.mul_(stretch)
        # What the first reader says counts of every network.
        readers[0][-1].get_parameter("bias").add_(shift)

    def forward(self, network: Mapping[str, Any]) -> Tensor:
        """The predicted accuracy of each network, ``[batch]``, between 0 and 1."""
        return torch.sigmoid(self.logits(network))

    def loss(self, logits: Tensor, accuracy: Tensor) -> Tensor:
        """Cross-entropy, and a price for every pair of networks in the wrong order."""
        entropy = binary_cross_entropy_with_logits(logits, accuracy)
        return entropy + self.order * order_loss(logits, accuracy) if self.order else entropy

    @property
    def config(self) -> dict[str, Any]:
        """The arguments that build this model, as JSON values."""
        return {"space": self.space.to_json(), **self._config}


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



@functools.cache
def count_invariants(images: bool) -> int:
    """How many invariants `whole_invariants` finds: as many in the smallest network as in any."""
    D, tokens = 4, 2
    named = {
        "classifier.W_1": (D, D), "classifier.b_1": (D,),
        "classifier.W_2": (D, 2), "classifier.b_2": (2,),
        "blocks.0.W_Q": (1, D, D), "blocks.0.W_K": (1, D, D), "blocks.0.W_V": (1, D, D),
        "blocks.0.W_O": (1, D, D), "blocks.0.W_A": (D, D), "blocks.0.b_A": (D,),
        "blocks.0.W_B": (D, D), "blocks.0.b_B": (D,),
    }  # fmt: skip
    if images:
        named |= {"embedding.W": (3, D), "embedding.b": (D,)}
    made = {name: torch.ones(1, *shape) for name, shape in named.items()}
    return whole_invariants(network_of(made), sinusoids(tokens, D)).shape[1]
