"""Rivals that only run networks on generated inputs: `ProbeGen` and `HiddenProbe`.

Both train by the recipe of the scripts published with HiddenProbe for zoos of transformers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_nfn.errors import RunError, SpaceError
from transformer_nfn.functional.zoo_network import normalised
from transformer_nfn.models.batch import Batch
from transformer_nfn.models.predictor import OUTPUTS, LearningSet, predictor
from transformer_nfn.models.pretrained import Inputs, seeded
from transformer_nfn.models.task_reader import TaskReader
from transformer_nfn.models.whole_network.probes import (
    CHUNK,
    INITIAL_SIZE,
    observed_logits,
    probe_outputs,
)
from transformer_nfn.spaces import WeightSpace

SMALLEST_SCALE = 1e-8
"""Of accuracies, so that equal ones can be standardised."""
STREAM_TOKENS = 17
"""Tokens of a probe behind the embedding."""
SMALL = 0.02
"""Standard deviation of initial types, identities and the summary token."""
RECIPE: Mapping[str, Any] = {
    "epochs": 40, "updates": 1000, "batch": 32, "lr": 5e-4, "final_lr": 0.0, "warmup": 0,
    "clip": 1.0,
}  # fmt: skip
"""40,000 updates, the last learning rate 0."""


class ProbeGenerator(nn.Module):
    """Deep linear generator: a learned code for each probe, and layers without activations.

    Images come from five transposed convolutions and a tanh, other inputs from two linear layers,
    as in the paper of `ProbeGen`. Only the initial size of the entries is ours.

    >>> ProbeGenerator(6, tokens=4, width=9, images=True, latent=3, channels=2)().shape
    torch.Size([6, 4, 9])

    Args:
        probes: number of probes.
        tokens: tokens of each.
        width: width of a token: pixels of a patch, or of a word vector.
        images: whether probes are images, with entries between -1 and 1.
        latent: width of a code.
        channels: of the last convolution but one.
    """

    def __init__(
        self, probes: int, tokens: int, width: int, *, images: bool, latent: int, channels: int
    ) -> None:
        super().__init__()
        self.tokens, self.width, self.images = tokens, width, images
        self.grid, self.side = math.isqrt(tokens), math.isqrt(width)
        self.convolves = images and self.grid**2 == tokens and self.side**2 == width
        self.codes = nn.Parameter(torch.randn(probes, latent))
        c, side = channels, self.side
        self.layers = (
            nn.Sequential(
                nn.ConvTranspose2d(latent, 8 * c, self.grid),
                nn.ConvTranspose2d(8 * c, 4 * c, 3, padding=1),
                nn.ConvTranspose2d(4 * c, 2 * c, side + 2, stride=side, padding=1),
                nn.ConvTranspose2d(2 * c, c, 3, padding=1),
                nn.ConvTranspose2d(c, 1, 3, padding=1),
            )
            if self.convolves
            else nn.Sequential(nn.Linear(latent, latent), nn.Linear(latent, tokens * width))
        )
        with torch.no_grad():
            self.layers[-1].get_parameter("weight").mul_(INITIAL_SIZE / self._raw().std())

    def forward(self) -> Tensor:
        """The probes, ``[probes, tokens, width]``."""
        raw = self._raw()
        return raw.tanh() if self.images else raw

    def _raw(self) -> Tensor:
        if not self.convolves:
            flat: Tensor = self.layers(self.codes)
            return flat.reshape(-1, self.tokens, self.width)
        images: Tensor = self.layers(self.codes[:, :, None, None])
        sides = (self.grid, self.side, self.grid, self.side)
        return images.reshape(-1, *sides).transpose(2, 3).reshape(-1, self.tokens, self.width)


class TokenGenerator(nn.Module):
    """Generator of `HiddenProbe`: a learned code for each token of each probe, and a residual MLP.

    >>> TokenGenerator(6, tokens=4, width=9)().shape
    torch.Size([6, 4, 9])

    Args:
        probes: number of probes.
        tokens: tokens of each.
        width: width of a token.
    """

    def __init__(self, probes: int, tokens: int, width: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(probes, tokens, width))
        last = nn.Linear(2 * width, width)
        nn.init.xavier_uniform_(last.weight, gain=0.1)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), last)

    def forward(self) -> Tensor:
        """The probes, ``[probes, tokens, width]``."""
        out: Tensor = self.codes + self.layers(self.codes)
        return out


class ProbingReader(TaskReader):
    """Base class of rivals that learn probes: the recipe that they are trained by.

    The squared error of accuracies, standardised by those of the training networks; AdamW with
    another learning rate and no decay for the probes. Subclasses set ``generator``.

    Attributes:
        probe_rate: learning rate of the probes, as a multiple of that of all else.
        weight_decay: of all else.
    """

    reads = OUTPUTS
    invariant = True
    probe_rate: ClassVar[float] = 1.0
    weight_decay: ClassVar[float] = 1e-3
    generator: Any  # a module
    accuracy_mean: Tensor
    accuracy_scale: Tensor

    def __init__(self, space: WeightSpace | None, images: bool, **sizes: int) -> None:
        super().__init__(space, images, **sizes)
        self.register_buffer("accuracy_mean", torch.zeros(()))
        self.register_buffer("accuracy_scale", torch.ones(()))

    def start(
        self, train: Sequence[LearningSet], val: Sequence[LearningSet], seed: int, epochs: int, *,
        fresh: bool,
    ) -> Inputs:  # fmt: skip
        """Standardise accuracies by those of the training networks."""
        accuracy = torch.cat([data.accuracy for data in train]).double()
        self.accuracy_mean.copy_(accuracy.mean())
        self.accuracy_scale.copy_(accuracy.std(correction=0).clamp(min=SMALLEST_SCALE))
        return super().start(train, val, seed, epochs, fresh=fresh)

    def loss(self, logits: Tensor, accuracy: Tensor) -> Tensor:
        """Mean squared error of standardised accuracies."""
        return F.mse_loss(logits, (accuracy - self.accuracy_mean) / self.accuracy_scale)

    def to_accuracy(self, logits: Tensor) -> Tensor:
        """Accuracies that standardised ones stand for; they may lie outside of 0 and 1."""
        return self.accuracy_mean.to(logits) + self.accuracy_scale.to(logits) * logits

    def optimiser(self, state: Mapping[str, Tensor], **options: Any) -> torch.optim.Optimizer:
        """AdamW; probes have a learning rate of their own, and no decay."""
        probes = {k: v for k, v in state.items() if ".generator." in k}
        others = [v for k, v in state.items() if k not in probes]
        lr = self.probe_rate * options["lr"]
        groups: list[dict[str, Any]] = [
            {"params": others, "weight_decay": self.weight_decay},
            {"params": [*probes.values()], "weight_decay": 0.0, "lr": lr},
        ]
        return torch.optim.AdamW(groups, **options)

    @contextlib.contextmanager
    def stepping(self, *seed: int) -> Iterator[None]:
        """Context of a training step: dropout from the seed alone, on a GPU products in TF32."""
        before = torch.get_float32_matmul_precision()
        if self.accuracy_mean.is_cuda:
            torch.set_float32_matmul_precision("high")
        try:
            with seeded(*seed):
                yield
        finally:
            torch.set_float32_matmul_precision(before)


@predictor("probegen")
class ProbeGen(ProbingReader):
    """An MLP on the outputs of networks on generated probes (ProbeGen, Kahana et al., 2024).

    It depends on the function of a network alone. Probes, code and MLP are learned together.

    >>> model = ProbeGen()
    >>> model.generator().shape
    torch.Size([128, 49, 16])

    Args:
        space: weight space of one block of the training networks; None for the paper's block.
        tokens: tokens of a probe.
        width: width of a token of a probe: pixels of a patch, or of a word vector.
        classes: classes of the networks' task.
        images: whether networks have an embedding of patches; then probes are images.
        probes: number of probes.
        latent: width of the code of a probe.
        channels: of the generator's last convolution but one.
        hidden: width of the MLP.
        layers: linear layers of the MLP.
    """

    title = "ProbeGen"
    protocol: ClassVar[Mapping[str, Any]] = RECIPE

    def __init__(
        self,
        space: WeightSpace | None = None,
        *,
        tokens: int = 49,
        width: int = 16,
        classes: int = 10,
        images: bool = True,
        probes: int = 128,
        latent: int = 32,
        channels: int = 16,
        hidden: int = 256,
        layers: int = 6,
    ) -> None:
        super().__init__(
            space, images, tokens=tokens, width=width, classes=classes, probes=probes,
            latent=latent, channels=channels, hidden=hidden, layers=layers,
        )  # fmt: skip
        self.generator = ProbeGenerator(
            probes, tokens, width, images=images, latent=latent, channels=channels
        )
        widths = [probes * classes, *[hidden] * (layers - 1)]
        inner = [layer for n, m in pairwise(widths) for layer in (nn.Linear(n, m), nn.ReLU())]
        self.head = nn.Sequential(*inner, nn.Linear(widths[-1], 1))

    def features(self, batch: Batch) -> Tensor:
        """Input of the MLP, ``[batch, F]``; F is the same for networks of any size."""
        where = self._where(batch)
        return probe_outputs(batch, self.generator(), where).logits.flatten(1)


@predictor("hidden_probe")
class HiddenProbe(ProbingReader):
    """A transformer on hidden responses to generated probes (HiddenProbe, Sverdlov et al., 2026).

    The trajectory of a channel is its responses to all tokens of all probes, behind one block. All
    trajectories are encoded by one MLP; that of the last block is joined with its form behind the
    last LayerNorm. A transformer reads a token for each trajectory, for the logits of each probe,
    and a summary token. Channels have no numbers, so their order does not matter.

    Networks on word vectors get all probes in place of the embedded text. Those on images get three
    quarters so, which fixes their width, and the others as images.

    >>> sum(p.numel() for p in HiddenProbe().parameters())
    1873169
    >>> sum(p.numel() for p in HiddenProbe(width=32, classes=4, images=False).parameters())
    1593441

    Args:
        space: as in `ProbeGen`.
        tokens: as in `ProbeGen`.
        width: as in `ProbeGen`.
        classes: as in `ProbeGen`.
        images: as in `ProbeGen`.
        d_model: width of the networks.
        probes: number of probes.
        stream: how many of them stand behind the embedding; None for three quarters, or for all of
            networks on word vectors.
        stream_tokens: tokens of each of these.
        codes: neurons of the encoder of trajectories.
        hidden: width of the transformer.
        heads: of each of its blocks.
        neurons: of each of its blocks.
        layers: number of its blocks.
    """

    title = "HiddenProbe"
    protocol: ClassVar[Mapping[str, Any]] = {**RECIPE, "patience": 5}
    image_protocol: ClassVar[Mapping[str, Any]] = {"lr": 2.5e-4}
    probe_rate = 2.0
    dropout: ClassVar[float] = 0.1

    def __init__(
        self,
        space: WeightSpace | None = None,
        *,
        tokens: int = 49,
        width: int = 16,
        classes: int = 10,
        images: bool = True,
        d_model: int = 32,
        probes: int = 256,
        stream: int | None = None,
        stream_tokens: int = STREAM_TOKENS,
        codes: int = 128,
        hidden: int = 192,
        heads: int = 6,
        neurons: int = 384,
        layers: int = 2,
    ) -> None:
        if stream is None:
            stream = probes - probes // 4 if images else probes
        super().__init__(
            space, images, tokens=tokens, width=width, classes=classes, d_model=d_model,
            probes=probes, stream=stream, stream_tokens=stream_tokens, codes=codes, hidden=hidden,
            heads=heads, neurons=neurons, layers=layers,
        )  # fmt: skip
        if stream > probes or (not images and stream < probes):
            expected = f"at most {probes}" if images else f"{probes}, of networks on word vectors"
            raise SpaceError(f"'stream' expected {expected}, found {stream}")
        if not (probes and heads) or hidden % heads:
            raise SpaceError(
                f"expected probes, and heads that divide 'hidden', found {probes} probes, {heads} "
                f"heads and 'hidden' {hidden}"
            )
        self.generator = nn.ModuleDict()
        if stream:
            self.generator["stream"] = TokenGenerator(stream, stream_tokens, d_model)
        if stream < probes:
            self.generator["images"] = TokenGenerator(probes - stream, tokens, width)
        responses = stream * stream_tokens + (probes - stream) * tokens
        self.encoder = nn.Sequential(
            nn.Linear(responses, codes), nn.GELU(), nn.Linear(codes, hidden), nn.LayerNorm(hidden)
        )
        self.join = nn.Sequential(
            nn.Linear(2 * hidden, hidden), nn.GELU(), nn.Linear(hidden, hidden),
            nn.LayerNorm(hidden),
        )  # fmt: skip
        self.logit_encoder = nn.Linear(classes, hidden)
        self.types = nn.Parameter(SMALL * torch.randn(3, hidden))
        self.identities = nn.Parameter(SMALL * torch.randn(probes, hidden))
        self.summary = nn.Parameter(SMALL * torch.randn(1, 1, hidden))
        self.blocks = nn.Sequential(*(
            nn.TransformerEncoderLayer(
                hidden, heads, neurons, self.dropout, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        ), nn.LayerNorm(hidden))  # fmt: skip
        self.head = nn.Sequential(nn.Linear(3 * hidden, hidden), nn.GELU(), nn.Linear(hidden, 1))

    @classmethod
    def of(cls, data: LearningSet, **options: Any) -> Self:
        """A model for networks like these."""
        width = data.network.layout.shapes["classifier.W_1"][0]
        return super().of(data, **({"d_model": width} | options))

    @classmethod
    def of_all(cls, data: Sequence[LearningSet], **options: Any) -> Self:
        """A model for networks of several depths; probes behind the embedding have one width."""
        model = cls.of(data[0], **options)
        widths = sorted({each.network.layout.shapes["classifier.W_1"][0] for each in data})
        if len(widths) > 1 and model._config["stream"]:
            raise RunError(
                "'hidden_probe' with probes behind the embedding expected networks of one width, "
                f"found {', '.join(map(str, widths))}: give --option stream=0 for images alone"
            )
        return model

    def misfit(self, sizes: Any, trained: Any) -> str | None:
        """Why networks of some sizes cannot be read, also for their width."""
        if self._config["stream"] and sizes.d_model != trained.d_model:
            return f"expected width {trained.d_model}, found {sizes.d_model}"
        return super().misfit(sizes, trained)

    def features(self, batch: Batch) -> Tensor:
        """Input of the head, ``[batch, F]``; F is the same for networks of any size."""
        if torch.is_grad_enabled():
            return self._summaries(batch)
        return torch.cat([self._summaries(part) for part in batch.chunks(CHUNK)])

    def _summaries(self, batch: Batch) -> Tensor:
        """Summary token, mean and maximum of the others behind the transformer."""
        logits, trajectories = self._responses(batch)
        last = self.join(torch.cat([self._encoded(x) for x in trajectories[-2:]], -1))
        tokens = [self._encoded(x) + self.types[0] for x in trajectories[:-2]]
        tokens += [last + self.types[1]]
        tokens += [self.logit_encoder(logits) + self.identities + self.types[2]]
        summary = self.summary.expand(len(logits), -1, -1)
        x: Tensor = self.blocks(torch.cat([summary, *tokens], 1))
        return torch.cat([x[:, 0], x[:, 1:].mean(1), x[:, 1:].amax(1)], -1)

    def _responses(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Logits ``[n, probes, classes]``, and ``[n, responses, D]`` behind each block and the last
        LayerNorm."""
        where, tensors = self._where(batch), batch.views
        inside = {name: w for name, w in tensors.items() if not name.startswith("embedding.")}
        seen: list[list[Tensor]] = []
        logits = []
        for kind, generator in self.generator.items():
            read, at = (inside, where.new_zeros(1)) if kind == "stream" else (tensors, where)
            seen.append([])
            logits.append(observed_logits(read, generator(), at, seen[-1].append))
        behind = [
            torch.cat([x.flatten(1, 2) for x in parts], 1) for parts in zip(*seen, strict=True)
        ]
        return torch.cat(logits, 1), [*behind, normalised(behind[-1])]

    def _encoded(self, trajectories: Tensor) -> Tensor:
        """Encoded channels ``[n, D, hidden]`` of trajectories ``[n, responses, D]``."""
        weight, bias = self.encoder[0].parameters()
        # As a batch of products, so that the responses are not transposed in memory.
        x = torch.bmm(weight.expand(len(trajectories), -1, -1), trajectories)
        encoded: Tensor = self.encoder[1:](x.mT + bias)
        return encoded
