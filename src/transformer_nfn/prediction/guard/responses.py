"""Output features of networks on unlabelled probe inputs.

Two kinds of inputs, neither of which needs data. On inputs whose class accurate networks agree on
(`agreed_inputs`), the share of matching outputs is nearly an accuracy. On random inputs a damaged
network gives constant or random outputs, while a trained one separates them with confidence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, one_hot

from transformer_nfn.models import Batch
from transformer_nfn.models.task_reader import MAX_TOKENS
from transformer_nfn.models.whole_network.probes import (
    ProbeOutputs,
    Probes,
    probe_outputs,
)
from transformer_nfn.models.whole_network.search import find_probes
from transformer_nfn.prediction.data import Dataset
from transformer_nfn.zoo import NetworkSizes

INPUTS = 48
SPOTS = 4
"""Side of the coarse image that is enlarged smoothly."""
AGREED = 60
"""Inputs that accurate networks agree on; input i has class i modulo classes."""
RANK = 32
SEED = 0
COUNT = 17
"""Features of each network."""


def input_shape(sizes: NetworkSizes) -> tuple[int, int]:
    """Tokens of an input and width of a token: pixels of a patch, or of a word vector."""
    return min(sizes.tokens, MAX_TOKENS), sizes.patch or sizes.d_model


def drawn_inputs(sizes: NetworkSizes) -> Tensor:
    """Fixed smooth random images (or word vectors), ``[inputs, tokens, width]``."""
    source = torch.Generator().manual_seed(SEED)
    if not sizes.patch:
        return torch.randn((INPUTS, *input_shape(sizes)), generator=source)
    side, across = round(sizes.patch**0.5), round(sizes.tokens**0.5)
    coarse = torch.rand(INPUTS, 1, SPOTS, SPOTS, generator=source)
    images = interpolate(coarse, size=(across * side, across * side), mode="bicubic")
    # Mostly black or white, as pen strokes are; pixels enter from -1 to 1.
    images = 2 * ((images.clamp(0, 1) - 0.5) * 3 + 0.35).clamp(0, 1) - 1
    patches = images.unfold(2, side, side).unfold(3, side, side)
    return patches.reshape(INPUTS, sizes.tokens, sizes.patch)


def agreed_inputs(train: Dataset, sizes: NetworkSizes, steps: int) -> Tensor:
    """Search inputs on whose class accurate networks agree, ``[AGREED, tokens, width]``.

    Runs on the device of the networks, always from the same random numbers.
    """
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        module = _ProbeModule(sizes).to(train.accuracy.device)
    find_probes(module, [train], SEED, steps=steps)
    inputs: Tensor = module.probes()
    return inputs.detach().cpu()


class _ProbeModule(nn.Module):
    """Probes in the form that `find_probes` optimises."""

    positions: Tensor

    def __init__(self, sizes: NetworkSizes) -> None:
        super().__init__()
        self.probes = Probes(
            AGREED, *input_shape(sizes), sizes.classes, RANK, bounded=bool(sizes.patch)
        )
        # On the device of the probes: a captured step copies nothing to it.
        self.register_buffer("positions", sizes.positions(), persistent=False)

    def outputs(self, batch: Batch, inputs: Tensor) -> ProbeOutputs:
        return probe_outputs(batch, inputs, self.positions)


@torch.no_grad()
def responses(data: Dataset, sizes: NetworkSizes, agreed: Tensor) -> Tensor:
    """Features of the outputs on `agreed_inputs` and `drawn_inputs`, ``[n, COUNT]`` in float64.

    Computed on the device of the networks, returned on the CPU.

    Args:
        data: the networks.
        sizes: of the networks.
        agreed: from `agreed_inputs`.
    """
    if len(data) == 0:
        return torch.empty(0, COUNT, dtype=torch.float64)
    network, device = data.network.to(torch.float32), data.accuracy.device
    inputs = torch.cat([agreed.float(), drawn_inputs(sizes)]).to(device)
    logits = probe_outputs(network, inputs, sizes.positions().to(device)).logits.double()
    logits = logits - logits.mean(-1, keepdim=True)
    parts = [_agreement(logits[:, : len(agreed)]), _variety(logits[:, len(agreed) :])]
    return torch.cat(parts, 1).cpu()


def _agreement(logits: Tensor) -> Tensor:
    """Agreement of centred logits ``[n, inputs, classes]`` with the labels 0, 1, …, 0, 1, ….

    Accuracy, mean probability and log-probability of the label, its logit and margin at scale 1,
    the standard deviation of the accuracy over classes, and the logarithm of the scale.
    """
    classes = logits.shape[-1]
    labels = torch.arange(logits.shape[1], device=logits.device) % classes
    at = labels.expand(len(logits), -1)[..., None]
    scale = logits.square().mean((1, 2)).clamp(min=1e-12).sqrt()
    log_p = logits.log_softmax(-1).gather(-1, at)[..., 0]
    correct = (logits.argmax(-1) == labels).double()
    logit = logits.gather(-1, at)[..., 0] / scale[:, None]
    best_other = logits.scatter(-1, at, -torch.inf).amax(-1) / scale[:, None]
    by_class = correct @ one_hot(labels, classes).double() / labels.bincount(minlength=classes)
    return torch.stack(
        [correct.mean(1), log_p.exp().mean(1), log_p.clamp(min=-6).mean(1), logit.mean(1),
         (logit - best_other).mean(1), by_class.std(-1), scale.log()],
        -1,
    )  # fmt: skip


def _variety(logits: Tensor) -> Tensor:
    """Variety of centred logits ``[n, inputs, classes]`` over inputs.

    Logarithms of the variance between inputs and between classes, and their ratio; the entropy of
    the mean output, the mean entropy, and their difference; entropy and largest share of the
    predicted classes; effective number of directions; mean confidence.
    """
    mean = logits.mean(1)
    varying = logits - mean[:, None]
    between, bias = _log(varying.square().mean((1, 2))), _log(mean.square().mean(-1))
    p = logits.softmax(-1)
    of_mean, mean_of = _entropy(p.mean(1)), _entropy(p).mean(1)
    shares = one_hot(logits.argmax(-1), logits.shape[-1]).double().mean(1)
    gram = varying.mT @ varying
    total = gram.diagonal(dim1=-2, dim2=-1).sum(-1).square()
    directions = _log(total / gram.square().sum((-2, -1)).clamp(min=1e-30))
    return torch.stack(
        [between, bias, between - bias, of_mean, mean_of, of_mean - mean_of,
         _entropy(shares), shares.amax(-1), directions, p.amax(-1).mean(1)],
        -1,
    )  # fmt: skip


def _entropy(p: Tensor) -> Tensor:
    return -(p * p.clamp(min=1e-12).log()).sum(-1)


def _log(x: Tensor) -> Tensor:
    return x.clamp(min=1e-8).log()
