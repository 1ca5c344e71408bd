"""What does a network answer to inputs that nobody labelled? Numbers of its function, not weights.

A broken network answers every input alike, or at random; a trained one tells inputs apart and is
sure of it. Inputs drawn at random show that as well as real ones, and need no data.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import interpolate, one_hot

from transformer_nfn.models import map_network
from transformer_nfn.models.whole_network.answers import answers
from transformer_nfn.models.whole_network.probes import LONGEST
from transformer_nfn.prediction.dataset import Dataset
from transformer_nfn.zoo import NetworkSizes

INPUTS = 48
SPOTS = 4
"""Sides of the coarse image that a drawn one is a smooth enlargement of."""
COUNT = 10
"""Numbers that `responses` gives of each network."""


def drawn_inputs(arch: NetworkSizes) -> Tensor:
    """The same smooth random images (or word vectors) for everyone, ``[inputs, tokens, width]``."""
    source = torch.Generator().manual_seed(0)
    if not arch.patch:
        shape = (INPUTS, min(arch.tokens, LONGEST), arch.d_model)
        return torch.randn(shape, generator=source)
    side, across = round(arch.patch**0.5), round(arch.tokens**0.5)
    coarse = torch.rand(INPUTS, 1, SPOTS, SPOTS, generator=source)
    images = interpolate(coarse, size=(across * side, across * side), mode="bicubic")
    # Mostly black or white, as pen strokes are; pixels enter from -1 to 1.
    images = 2 * ((images.clamp(0, 1) - 0.5) * 3 + 0.35).clamp(0, 1) - 1
    patches = images.unfold(2, side, side).unfold(3, side, side)
    return patches.reshape(INPUTS, arch.tokens, arch.patch)


@torch.no_grad()
def responses(data: Dataset, arch: NetworkSizes) -> Tensor:
    """How networks answer `drawn_inputs`: ``[n, COUNT]`` in float64.

    Logarithms of how far logits vary between inputs and between classes, and their ratio; the
    entropy of the mean answer, the mean entropy, and what is between them; entropy and largest
    share of the classes answered; how many directions logits vary in; mean confidence.
    """
    if len(data) == 0:
        return torch.empty(0, COUNT, dtype=torch.float64)
    network = map_network(data.network, lambda w: w.float().cpu())
    found = answers(network, drawn_inputs(arch), arch.positions())
    return _numbers(found.logits.double())


def _numbers(logits: Tensor) -> Tensor:
    """Of logits ``[n, inputs, classes]``."""
    logits = logits - logits.mean(-1, keepdim=True)
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
