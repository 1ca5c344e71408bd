"""Learned inputs, the outputs of networks on them, and features of these outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_nfn import native_network
from transformer_nfn.errors import SpaceError
from transformer_nfn.functional.zoo_network import EPS, zoo_logits
from transformer_nfn.models.batch import Batch

INITIAL_SIZE = 0.5
"""Size of the entries of a probe before any training."""
DARK = -1.5
"""Initial value of bounded probes before the tanh: nearly black."""
SMALLEST_TOKEN = 1e-8
"""Tokens of a smaller mean square count as zero."""
CHUNK = 16
"""Networks at a time where nothing is differentiated: their activations stay in the cache."""
RAREST = 8.0
"""Logarithms of probabilities and sizes are cut off here."""
SAME = 1e-3
"""Standard deviation over probes below which the outputs of a network count as constant."""


class Probes(nn.Module):
    """Learned inputs: ``count`` sequences of ``tokens`` vectors, each with a label.

    A product of three matrices makes probes that share their parts; entries learned one by one
    would overfit the few networks there are. Pixels of bounded probes lie between black and white;
    such probes come to look like the images that networks were trained on. Groups share nothing,
    so that their probes differ more.

    >>> Probes(10, tokens=4, width=3, classes=5, rank=2)().shape
    torch.Size([10, 4, 3])

    Args:
        count: number of probes.
        tokens: tokens of each.
        width: width of a token: pixels of a patch, or of a word vector.
        classes: labels are assigned in turn, 0, 1, …, 0, 1, ….
        rank: rank of the matrix of the probes of a group.
        bounded: whether entries lie between -1 and 1, as those of images do.
        groups: number of groups of probes, one after another.
    """

    labels: Tensor

    def __init__(
        self,
        count: int,
        tokens: int,
        width: int,
        classes: int,
        rank: int,
        *,
        bounded: bool = False,
        groups: int = 1,
    ) -> None:
        super().__init__()
        if groups < 1 or count % groups:
            raise SpaceError(f"{count} probes do not fall into {groups} groups of one size")
        self.tokens, self.width, self.bounded = tokens, width, bounded
        self.groups, size = groups, tokens * width
        self.codes = nn.Parameter(torch.randn(count, rank))
        self.mix = nn.Parameter(torch.randn(groups * rank, rank) / rank**0.5)
        self.pieces = nn.Parameter(torch.randn(groups * rank, size) * (INITIAL_SIZE / rank**0.5))
        self.base = nn.Parameter(torch.full((groups * size,), DARK if bounded else 0.0))
        self.register_buffer("labels", torch.arange(count) % classes, persistent=False)

    def forward(self) -> Tensor:
        """The probes, ``[count, tokens, width]``."""
        codes, mix, pieces, base = (
            stacked.unflatten(0, (self.groups, -1))
            for stacked in (self.codes, self.mix, self.pieces, self.base)
        )
        flat: Tensor = codes @ mix @ pieces + base[:, None]
        return (flat.tanh() if self.bounded else flat).reshape(-1, self.tokens, self.width)


class ProbeOutputs(NamedTuple):
    """Outputs of networks on probes.

    Attributes:
        logits: ``[networks, inputs, classes]``.
        similarity: ``[networks, inputs, blocks]``: mean cosine of pairs of tokens behind each
            block, 1 where all tokens have one direction.
    """

    logits: Tensor
    similarity: Tensor


def probe_outputs(batch: Batch, inputs: Tensor, positions: Tensor) -> ProbeOutputs:
    """Outputs of every network on every input; in float32 on a CPU by compiled C.

    Args:
        batch: the networks.
        inputs: ``[inputs, tokens, patch]``, or word vectors where the network has no embedding.
        positions: ``[≥ tokens, D]``.
    """
    tensors = batch.views
    if native_network.fits(tensors):
        return ProbeOutputs(*native_network.probe_outputs(tensors, inputs, positions))
    if torch.is_grad_enabled() or len(batch) <= CHUNK:
        return _outputs(batch, inputs, positions)
    chunks = [_outputs(part, inputs, positions) for part in batch.chunks(CHUNK)]
    return ProbeOutputs(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


def _outputs(batch: Batch, inputs: Tensor, positions: Tensor) -> ProbeOutputs:
    similarity: list[Tensor] = []
    logits = observed_logits(
        batch.views, inputs, positions, lambda x: similarity.append(_token_similarity(x.detach()))
    )
    return ProbeOutputs(logits, torch.stack(similarity, -1))


def observed_logits(
    tensors: Mapping[str, Tensor],
    inputs: Tensor,
    positions: Tensor,
    observe: Callable[[Tensor], None],
) -> Tensor:
    """Logits ``[networks, inputs, classes]`` of every network on every input, in PyTorch.

    Args:
        tensors: of the networks by name, ``[networks, *axes]``.
        inputs: as in `probe_outputs`.
        positions: as in `probe_outputs`.
        observe: called with the output ``[networks, inputs, tokens, D]`` of each block.
    """
    return zoo_logits(tensors, inputs[None], positions, observe=observe)


def _token_similarity(x: Tensor) -> Tensor:
    """Squared norm of the mean direction of tokens ``[n, inputs, T, D]``."""
    x = F.layer_norm(x, (x.shape[-1],), eps=EPS)
    size = x.square().mean(-1, keepdim=True).clamp(min=SMALLEST_TOKEN)
    return (x * size.rsqrt()).mean(2).square().mean(-1)


def class_width(probes: int, classes: int) -> int:
    """Number of `class_features`."""
    return 2 * probes * classes + 1


def class_features(logits: Tensor) -> list[Tensor]:
    """Class logits ``[n, P, C]`` as numbers of order 1: log-probabilities, logits at scale 1,
    and that scale."""
    centred = logits - logits.mean(-1, keepdim=True)
    size = (centred.square().mean((1, 2), keepdim=True) + 1e-12).sqrt()
    log_p = logits.log_softmax(-1).clamp(min=-RAREST) / 2 + 1
    scale = size[:, 0].log().clamp(-RAREST, RAREST)
    return [log_p.flatten(1), (centred / size).flatten(1), scale]


def features_width(probes: int, classes: int) -> int:
    """Number of `output_features`, for networks of any size."""
    return class_width(probes, classes) + 2 * probes


def output_features(outputs: ProbeOutputs) -> Tensor:
    """Outputs as numbers of order 1, ``[networks, features_width]``.

    The `class_features`, and the similarity of tokens: mean over blocks, and behind the last.
    Tokens of a network with constant outputs count as equal, because their directions are rounding.
    """
    features = class_features(outputs.logits)
    similarity = torch.cat([outputs.similarity.mean(-1), outputs.similarity[..., -1]], -1)
    varies = _varies(features[0].view_as(outputs.logits))
    return torch.cat([*features, 1 - varies[:, None] * (1 - similarity)], -1)


def outputs_vary(features: Tensor, probes: int, classes: int) -> Tensor:
    """Whether outputs differ between probes, ``[networks]``: 0 if they do not, near 1 if they do.

    Args:
        features: what `output_features` returned.
        probes: number of probes.
        classes: number of classes.
    """
    return _varies(features[:, : probes * classes].unflatten(1, (probes, classes)))


def _varies(log_probabilities: Tensor) -> Tensor:
    variance = log_probabilities.var(1, correction=0).mean(-1)
    return variance / (variance + SAME**2)
