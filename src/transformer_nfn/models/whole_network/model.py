"""`WholeNetwork`: accuracy from outputs on learned probes and from invariants of the weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from transformer_nfn.functional import sinusoids, small_transformer
from transformer_nfn.models.batch import Batch
from transformer_nfn.models.predictor import OUTPUTS as READS_OUTPUTS
from transformer_nfn.models.predictor import LearningSet, Variant, predictor
from transformer_nfn.models.pretrained import Inputs
from transformer_nfn.models.statistics import mean_and_scale, signed_log, standardised
from transformer_nfn.models.task_reader import TaskReader
from transformer_nfn.models.whole_network.curve import fit_curve, piecewise_linear
from transformer_nfn.models.whole_network.invariants import whole_invariants
from transformer_nfn.models.whole_network.probes import (
    ProbeOutputs,
    Probes,
    features_width,
    output_features,
    outputs_vary,
    probe_outputs,
)
from transformer_nfn.models.whole_network.search import (
    find_probes,
    networks_per_group,
    search_steps,
)
from transformer_nfn.spaces import WeightSpace

INVARIANTS, OUTPUTS = "invariants", "outputs"
"""Keys of a network that hold its invariants and output features, where they were computed."""
DISTINCT = 0.02
"""Pairs of accuracies that differ by less have less weight in the ranking loss."""
MOST_PROBES, MOST_OUTPUTS = 512, 5632
"""Bounds on the probes, and on probes times classes and one."""


MANY_NETWORKS = 1024
"""From so many training networks of a size on, probes learn with the heads."""
LEARNED_PROBES = {"probes": 128, "hidden": 64}
"""Sizes then: each step asks the probes, so there are fewer."""
MIN_EPOCH = 192
"""Minimal number of networks per epoch."""
MAX_EPOCH = 2560
"""Maximal number while probes learn: 30 epochs are 7 passes over 11,000 networks."""


@predictor("whole_network")
class WholeNetwork(TaskReader):
    """Predictor that reads a whole network, of any width, number of heads and depth.

    Two heads add up. One reads the outputs on probes: it depends on the function alone, so nothing
    that leaves the function unchanged can change it. The other reads `whole_invariants` of the
    weights. The defaults are those of the shipped predictor ``mnist-whole``.

    >>> model = WholeNetwork()
    >>> model.probes().shape
    torch.Size([512, 49, 16])
    >>> sum(p.numel() for p in model.parameters())
    277154

    Args:
        space: weight space of one block of the training networks; None for the paper's block.
        tokens: tokens of a probe.
        width: width of a token of a probe: pixels of a patch, or of a word vector.
        classes: classes of the networks' task.
        images: whether networks have an embedding of patches; then probes are images.
        probes: number of probes; 0 leaves them out, None takes as many as a small head can read.
        rank: rank of the matrix of the probes of a group.
        groups: number of groups of probes, see `Probes`.
        hidden: neurons of the head on outputs.
        curve: knots of the curve that calibrates logits; 0 without one.

    Attributes:
        search: whether training first moves probes to inputs on which good networks agree.
        learn_probes: whether probes go on learning with the heads.
        order: weight of the ranking loss.
    """

    reads = READS_OUTPUTS
    every_checkpoint = True
    protocol: ClassVar[Mapping[str, Any]] = {"epochs": 30, "batch": 32, "lr": 2e-3}
    title, place = "Whole network", 8
    variants: ClassVar = {
        "invariants": Variant("Whole network, invariants alone", {"probes": 0}),
        # Given the checkpoint that its rivals read, and no others of the training runs.
        "one": Variant("Whole network, one checkpoint a run", {}, every_checkpoint=False),
    }
    invariant = True
    start_note = "finds probes, and what all networks answer to them"
    weight_decay = 0.5
    search = True
    learn_probes = False
    order = 0.3
    mean: Tensor
    scale: Tensor
    probes: nn.Module | None
    output_head: Any  # modules, or None
    invariant_head: Any
    curve: Tensor | None

    def __init__(
        self,
        space: WeightSpace | None = None,
        *,
        tokens: int = 49,
        width: int = 16,
        classes: int = 10,
        images: bool = True,
        probes: int | None = None,
        rank: int = 32,
        groups: int = 2,
        hidden: int = 16,
        curve: int = 0,
    ) -> None:
        if probes is None:
            probes = 2 * max(32, min(MOST_PROBES, MOST_OUTPUTS // (classes + 1)) // 2)
        super().__init__(
            space, images, tokens=tokens, width=width, classes=classes, probes=probes, rank=rank,
            groups=groups, hidden=hidden,
        )  # fmt: skip
        self.probes = (
            Probes(probes, tokens, width, classes, rank, bounded=images, groups=groups)
            if probes
            else None
        )
        self.output_head = head(features_width(probes, classes), hidden) if probes else None
        invariants = count_invariants(images)
        self.register_buffer("mean", torch.zeros(invariants))
        self.register_buffer("scale", torch.ones(invariants))
        self.invariant_head = head(invariants, max(16, hidden // 4))
        self._add_curve(curve)

    @classmethod
    def of(cls, data: LearningSet, **options: Any) -> Self:
        """A model for networks like these; with many of them its probes learn."""
        many = len(data) >= MANY_NETWORKS
        model = super().of(data, **(LEARNED_PROBES if many else {}) | options)
        model.learn_probes = many and model.probes is not None
        return model

    @property
    def any_task(self) -> bool:
        """Whether networks of other patches, tokens and classes are read: without probes."""
        return self.probes is None

    def prepared(self, batch: Batch, positions: Tensor | None = None) -> Batch:
        """The networks with their invariants beside their weights."""
        if INVARIANTS in batch.computed:
            return batch
        invariants = signed_log(whole_invariants(batch, self._where(batch, positions)))
        return batch.plus(INVARIANTS, invariants.to(batch.weights))

    @torch.no_grad()
    def head_inputs(self, batch: Batch) -> Batch:
        """What the heads learn from, without the weights, for probes that do not change."""
        batch = self.prepared(batch)
        if self.probes is None:
            return batch.only(INVARIANTS)
        return self._with_outputs(batch, None).only(INVARIANTS, OUTPUTS)

    def standardise(self, *networks: Batch) -> None:
        """Set mean and scale of the invariants to those of these networks."""
        rows = [self.prepared(batch).computed[INVARIANTS].double() for batch in networks]
        mean, scale = mean_and_scale(torch.cat(rows))
        self.mean.copy_(mean)
        self.scale.copy_(scale)

    def outputs(
        self, batch: Batch, inputs: Tensor, positions: Tensor | None = None
    ) -> ProbeOutputs:
        """Outputs of the networks on inputs like the probes, ``[inputs, tokens, width]``."""
        return probe_outputs(batch, inputs, self._where(batch, positions))

    def logits(self, batch: Batch, positions: Tensor | None = None) -> Tensor:
        """The number before the Sigmoid, ``[batch]``."""
        batch = self._with_outputs(batch, positions)
        total = torch.zeros((), device=self.mean.device)
        for module, features in self._features(batch, positions):
            value = module(features).squeeze(-1)
            total = total + (value if module is self.output_head else self._share(batch) * value)
        return total if self.curve is None else piecewise_linear(total, self.curve)

    def features(self, batch: Batch, positions: Tensor | None = None) -> Tensor:
        """Inputs of all heads, ``[batch, F]``; F is the same for networks of any size."""
        batch = self._with_outputs(batch, positions)
        return torch.cat([features for _, features in self._features(batch, positions)], -1)

    def calibrate(self, curve: np.ndarray) -> None:
        """Let logits follow a rising curve from now on: its knots and values, ``[2, n]``."""
        self._add_curve(curve.shape[1])
        self.curve = torch.from_numpy(curve).to(self.mean)

    def _add_curve(self, knots: int) -> None:
        if knots:
            self._config["curve"] = knots
        self.register_buffer("curve", torch.zeros(2, knots) if knots else None)

    def networks_per_epoch(self, networks: Sequence[int], runs: Sequence[int]) -> list[int]:
        """One checkpoint per run; more if there are few runs, fewer while probes learn."""
        total = sum(runs)
        wanted = max(total, MIN_EPOCH)
        if self.learn_probes:
            wanted = min(wanted, MAX_EPOCH)
        return [-(-n * wanted // total) for n in runs]

    def start(
        self, train: Sequence[LearningSet], val: Sequence[LearningSet], seed: int, epochs: int, *,
        fresh: bool,
    ) -> Inputs:  # fmt: skip
        """Standardise invariants, search probes, compute the outputs of all networks on them."""
        self.standardise(*(data.network for data in train))
        if fresh and self.search:
            runs = sum(len(set(data.runs)) for data in train)
            self.search_probes(train, seed, search_steps(epochs, runs), networks_per_group(runs))
        if self.learn_probes:
            return super().start(train, val, seed, epochs, fresh=fresh)
        first, second = ([self.head_inputs(data.network) for data in part] for part in (train, val))
        return first, second

    def search_probes(
        self, train: Sequence[LearningSet], seed: int, steps: int, per_group: int
    ) -> None:
        """Move the probes to inputs on which good networks agree."""
        find_probes(self, train, seed, steps=steps, per_group=per_group)

    @torch.no_grad()
    def finish(self, val: Sequence[LearningSet], inputs: Sequence[Batch]) -> None:
        """Calibrate the outputs on the validation networks; the order does not change."""
        logits = torch.cat([batch.in_chunks(self.logits) for batch in inputs])
        truth = torch.cat([data.accuracy for data in val]).double().cpu().numpy()
        self.calibrate(fit_curve(logits.double().cpu().numpy(), truth))

    def optimiser(self, state: Mapping[str, Tensor], **options: Any) -> torch.optim.Optimizer:
        """AdamW on the heads; probes stay as found, or learn without decay."""
        probes, heads = (
            [value for name, value in state.items() if (".probes." in name) is of_probes]
            for of_probes in (True, False)
        )
        groups: list[dict[str, Any]] = [{"params": heads, "weight_decay": self.weight_decay}]
        if self.learn_probes:
            groups.append({"params": probes, "weight_decay": 0.0})
        return torch.optim.AdamW(groups, **options)

    def loss(self, logits: Tensor, accuracy: Tensor) -> Tensor:
        """Cross-entropy plus a ranking loss."""
        entropy = binary_cross_entropy_with_logits(logits, accuracy)
        return entropy + self.order * order_loss(logits, accuracy) if self.order else entropy

    def _features(
        self, batch: Batch, positions: Tensor | None
    ) -> Iterator[tuple[nn.Module, Tensor]]:
        """Each head and its inputs, for networks with output features."""
        if self.output_head is not None:
            yield self.output_head, self._output_inputs(batch.computed[OUTPUTS])
        if self.invariant_head is not None:
            x = self.prepared(batch, positions).computed[INVARIANTS]
            yield self.invariant_head, standardised(x, self.mean, self.scale)

    def _output_inputs(self, outputs: Tensor) -> Tensor:
        """What the head on outputs reads."""
        return outputs

    def _with_outputs(self, batch: Batch, positions: Tensor | None) -> Batch:
        """The networks with the features of their outputs on the probes."""
        if self.probes is None or OUTPUTS in batch.computed:
            return batch
        return batch.plus(OUTPUTS, output_features(self.outputs(batch, self.probes(), positions)))

    def _share(self, batch: Batch) -> Tensor | float:
        """Weight of what is read from weights: 0 where outputs are constant, for dead networks."""
        if self.probes is None:
            return 1.0
        outputs = batch.computed[OUTPUTS]
        return outputs_vary(outputs, self._config["probes"], self._config["classes"])


def order_loss(logits: Tensor, accuracy: Tensor) -> Tensor:
    """Ranking loss: a smooth count of the discordant pairs of Kendall's τ.

    >>> accuracy = torch.tensor([0.1, 0.9])
    >>> bool(order_loss(accuracy, accuracy) < order_loss(-accuracy, accuracy))
    True
    """
    predicted = logits[:, None] - logits
    actual = accuracy[:, None] - accuracy
    weight = (actual.abs() / DISTINCT).clamp(max=1)
    discordant = softplus(-4 * predicted * actual.sign())
    return (weight * discordant).sum() / weight.sum().clamp(min=1)


def head(width: int, hidden: int) -> nn.Sequential:
    """An MLP of two hidden layers, ``[…, width]`` to ``[…, 1]``."""
    return nn.Sequential(
        nn.Linear(width, hidden),
        nn.SiLU(),
        nn.Linear(hidden, hidden // 2),
        nn.SiLU(),
        nn.Linear(hidden // 2, 1),
    )


@functools.cache
def count_invariants(images: bool) -> int:
    """Number of `whole_invariants`, counted on the smallest network."""
    D, tokens = 4, 2
    patch = 4 if images else 0
    space = small_transformer(tokens, 2, patch, d_model=D, heads=1, d_ff=D, blocks=1).space
    made = {name: torch.ones(1, *shape) for name, shape in space.shapes.items()}
    return whole_invariants(Batch.of(made), sinusoids(tokens, D)).shape[1]
