"""What does a network answer to inputs that nobody labelled? Numbers of its function, not weights.

Two kinds of inputs, neither of which needs data. Where accurate networks agree on a class
(`agreed_inputs`), a network that answers otherwise is wrong: how often is nearly an accuracy. And
to inputs drawn at random a broken network answers alike, or at random; a trained one tells them
apart and is sure of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, one_hot

from transformer_nfn.models import map_network
from transformer_nfn.models.whole_network.probes import (
    MAX_TOKENS,
    ProbeOutputs,
    Probes,
    probe_outputs,
)
from transformer_nfn.prediction.dataset import Dataset
from transformer_nfn.prediction.probe_search import STEPS, find_probes
from transformer_nfn.zoo import NetworkSizes

INPUTS = 48
SPOTS = 4
"""Sides of the coarse image that a drawn one is a smooth enlargement of."""
AGREED = 60
"""Inputs that accurate networks agree on; their classes are dealt out in turn."""
RANK = 32
COUNT = 17
"""Numbers that `responses` gives of each network."""


def input_shape(arch: NetworkSizes) -> tuple[int, int]:
    """Tokens of an input and numbers in each: pixels of a patch, or a word vector."""
    return min(arch.tokens, MAX_TOKENS), arch.patch or arch.d_model


def drawn_inputs(arch: NetworkSizes) -> Tensor:
    """The same smooth random images (or word vectors) for everyone, ``[inputs, tokens, width]``."""
    source = torch.Generator().manual_seed(0)
    if not arch.patch:
        return torch.randn((INPUTS, *input_shape(arch)), generator=source)
    side, across = round(arch.patch**0.5), round(arch.tokens**0.5)
    coarse = torch.rand(INPUTS, 1, SPOTS, SPOTS, generator=source)
    images = interpolate(coarse, size=(across * side, across * side), mode="bicubic")
    # Mostly black or white, as pen strokes are; pixels enter from -1 to 1.
    images = 2 * ((images.clamp(0, 1) - 0.5) * 3 + 0.35).clamp(0, 1) - 1
    patches = images.unfold(2, side, side).unfold(3, side, side)
    return patches.reshape(INPUTS, arch.tokens, arch.patch)


def agreed_inputs(
    train: Dataset, arch: NetworkSizes, seed: int = 0, steps: int = STEPS
) -> Tensor:
    """Inputs on whose class the accurate ones of these networks agree, ``[AGREED, tokens, width]``.

    Found on the device that the networks are on, from ``seed`` alone.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        asker = _Asker(arch).to(train.accuracy.device)
    find_probes(asker, [train], seed, steps=steps)
    found: Tensor = asker.probes()
    return found.detach().cpu()


class _Asker(nn.Module):
    """What `find_probes` moves: probes, and how networks are asked."""

    positions: Tensor

    def __init__(self, arch: NetworkSizes) -> None:
        super().__init__()
        self.probes = Probes(
            AGREED, *input_shape(arch), arch.classes, RANK, bounded=bool(arch.patch)
        )
        # On the device of the probes: a step on a GPU is captured as a graph, which copies nothing.
        self.register_buffer("positions", arch.positions(), persistent=False)

    def outputs(self, network: Mapping[str, Any], inputs: Tensor) -> ProbeOutputs:
        return probe_outputs(network, inputs, self.positions)


@torch.no_grad()
def responses(data: Dataset, arch: NetworkSizes, agreed: Tensor) -> Tensor:
    """How networks answer `agreed_inputs` and `drawn_inputs`: ``[n, COUNT]`` in float64.

    Args:
        data: the networks.
        arch: their sizes.
        agreed: inputs that `agreed_inputs` found.
    """
    if len(data) == 0:
        return torch.empty(0, COUNT, dtype=torch.float64)
    network = map_network(data.network, lambda w: w.float().cpu())
    inputs = torch.cat([agreed.float(), drawn_inputs(arch)])
    logits = probe_outputs(network, inputs, arch.positions()).logits.double()
    logits = logits - logits.mean(-1, keepdim=True)
    return torch.cat([_agreement(logits[:, : len(agreed)]), _variety(logits[:, len(agreed) :])], 1)


def _agreement(logits: Tensor) -> Tensor:
    """Of centred logits ``[n, inputs, classes]``, whose labels are 0, 1, …, 0, 1, ….

    How often the label is answered, its mean probability and logarithm of that, its logit and its
    lead at scale 1, how unevenly over the classes, and the logarithm of that scale.
    """
    classes = logits.shape[-1]
    labels = torch.arange(logits.shape[1]) % classes
    at = labels.expand(len(logits), -1)[..., None]
    size = logits.square().mean((1, 2)).clamp(min=1e-12).sqrt()
    sure = logits.log_softmax(-1).gather(-1, at)[..., 0]
    hit = (logits.argmax(-1) == labels).double()
    own = logits.gather(-1, at)[..., 0] / size[:, None]
    best_other = logits.scatter(-1, at, -torch.inf).amax(-1) / size[:, None]
    each_class = hit @ one_hot(labels, classes).double() / labels.bincount(minlength=classes)
    return torch.stack(
        [hit.mean(1), sure.exp().mean(1), sure.clamp(min=-6).mean(1), own.mean(1),
         (own - best_other).mean(1), each_class.std(-1), size.log()],
        -1,
    )  # fmt: skip


def _variety(logits: Tensor) -> Tensor:
    """Of centred logits ``[n, inputs, classes]``.

    Logarithms of how far logits vary between inputs and between classes, and their ratio; the
    entropy of the mean answer, the mean entropy, and what is between them; entropy and largest
    share of the classes answered; how many directions logits vary in; mean confidence.
    """
    mean = logits.mean(1)
    varying = logits - mean[:, None]
    between, bias = _log(varying.square().mean((1, 2))), _log(mean.square().mean(-1))
    answers = logits.softmax(-1)
    of_mean, mean_of = _entropy(answers.mean(1)), _entropy(answers).mean(1)
    shares = one_hot(logits.argmax(-1), logits.shape[-1]).double().mean(1)
    gram = varying.mT @ varying
    total = gram.diagonal(dim1=-2, dim2=-1).sum(-1).square()
    directions = _log(total / gram.square().sum((-2, -1)).clamp(min=1e-30))
    return torch.stack(
        [between, bias, between - bias, of_mean, mean_of, of_mean - mean_of,
         _entropy(shares), shares.amax(-1), directions, answers.amax(-1).mean(1)],
        -1,
    )  # fmt: skip


def _entropy(p: Tensor) -> Tensor:
    return -(p * p.clamp(min=1e-12).log()).sum(-1)


def _log(x: Tensor) -> Tensor:
    return x.clamp(min=1e-8).log()
