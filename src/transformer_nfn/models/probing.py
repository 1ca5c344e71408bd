"""Rivals that only run networks on generated inputs: `ProbeGen` and `HiddenProbe`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_nfn.functional.zoo_network import EPS
from transformer_nfn.models.network import in_chunks
from transformer_nfn.models.predictor import OUTPUTS, predictor
from transformer_nfn.models.task_reader import TaskReader
from transformer_nfn.models.whole_network.probes import (
    CHUNK,
    INITIAL_SIZE,
    observed_logits,
    probe_outputs,
)
from transformer_nfn.spaces import WeightSpace


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


@predictor("probegen")
class ProbeGen(TaskReader):
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
        more: further sizes of a subclass.
    """

    reads = OUTPUTS
    title = "ProbeGen"
    invariant = True
    protocol: ClassVar[Mapping[str, Any]] = {"batch": 32, "lr": 5e-4}

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
        more: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(
            space, images, tokens=tokens, width=width, classes=classes, probes=probes,
            latent=latent, channels=channels, hidden=hidden, layers=layers, **(more or {}),
        )  # fmt: skip
        self.generator = ProbeGenerator(
            probes, tokens, width, images=images, latent=latent, channels=channels
        )
        widths = [self._num_features(), *[hidden] * (layers - 1)]
        inner = [layer for n, m in pairwise(widths) for layer in (nn.Linear(n, m), nn.ReLU())]
        self.head = nn.Sequential(*inner, nn.Linear(widths[-1], 1))

    def _num_features(self) -> int:
        return int(self._config["probes"] * self._config["classes"])

    def features(self, network: Mapping[str, Any]) -> Tensor:
        """Input of the MLP, ``[batch, F]``; F is the same for networks of any size."""
        where = self._where(network)
        return probe_outputs(network, self.generator(), where).logits.flatten(1)


@predictor("hidden_probe")
class HiddenProbe(ProbeGen):
    """`ProbeGen` that also reads hidden responses (after HiddenProbe, Sverdlov et al., 2026).

    Behind every block, the responses of one channel to all probes and tokens are encoded by a
    linear map that all channels share. The published model reads the channels by a transformer;
    here second moments over channels are taken, which no rotation of the stream changes either.

    >>> sum(p.numel() for p in HiddenProbe().parameters())
    1394050

    Args:
        arguments: weight space, as in `ProbeGen`.
        codes: numbers that encode the responses of a channel.
        options: of `ProbeGen`.
    """

    title = "After HiddenProbe"

    def __init__(self, *arguments: Any, codes: int = 24, **options: Any) -> None:
        super().__init__(*arguments, more={"codes": codes}, **options)
        responses = self._config["probes"] * self._config["tokens"]
        self.encoder = nn.Parameter(torch.randn(codes, responses) / responses**0.5)

    def _num_features(self) -> int:
        return super()._num_features() + 2 * int(self._config["codes"]) ** 2

    def features(self, network: Mapping[str, Any]) -> Tensor:
        """Input of the MLP, ``[batch, F]``; F is the same for networks of any size."""
        inputs, where = self.generator(), self._where(network)
        if torch.is_grad_enabled():
            return self._responses(network, inputs, where)
        return torch.cat([self._responses(x, inputs, where) for x in in_chunks(network, CHUNK)])

    def _responses(self, network: Mapping[str, Any], inputs: Tensor, where: Tensor) -> Tensor:
        codes: list[Tensor] = []
        logits = observed_logits(
            network, inputs, where, lambda x: codes.append(self.encoder @ channel_responses(x))
        )
        return torch.cat([logits.flatten(1), second_moments(codes)], -1)


def channel_responses(x: Tensor) -> Tensor:
    """What the next layer reads of a stream ``[n, inputs, T, D]``, as ``[n, inputs · T, D]``."""
    return F.layer_norm(x, x.shape[-1:], eps=EPS).flatten(1, 2)


def second_moments(codes: Sequence[Tensor]) -> Tensor:
    """Second moments over channels of the codes ``[n, K, D]`` behind each block.

    Returns:
        Their mean over blocks and those of the last, ``[n, 2 K²]``.

    >>> second_moments([torch.ones(1, 2, 3)])
    tensor([[1., 1., 1., 1., 1., 1., 1., 1.]])
    """
    moments = torch.stack([(x @ x.mT / x.shape[-1]).flatten(1) for x in codes], 1)
    return torch.cat([moments.mean(1), moments[:, -1]], -1)
