"""The fused kernels beside the plain forward: one batch of many networks, with dropout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_nfn.functional import zoo_logits
from transformer_nfn.zoo import sample
from transformer_nfn.zoo.training.kernels.arguments import Clock
from transformer_nfn.zoo.training.kernels.runner import Pass
from transformer_nfn.zoo.training.randomness import CROP, DROPOUT, dropout_threshold, keys
from transformer_nfn.zoo.training.steps import dropout
from transformer_nfn.zoo.training.tasks import ImageTask, Task, TextTask, WordVectors, image_task
from transformer_nfn.zoo.training.trainer import initial_weights


def bright_images(side: int, patch: int, padding: int, n: int = 400) -> ImageTask:
    """Images whose brightness gives their class away."""
    draw = torch.Generator().manual_seed(side)
    labels = torch.randint(0, 10, (n,), generator=draw)
    noise = torch.randint(0, 60, (n, side, side), generator=draw)
    images = (noise + labels[:, None, None] * 18).to(torch.uint8)
    return image_task(
        "mnist", (images, labels), (images, labels), side=patch, white=255, padding=padding,
        epochs=2, held=0.1, samples=None, provenance={},
    )  # fmt: skip


def long_texts(n: int = 400, longest: int = 150) -> TextTask:
    """Random words; most texts are short and a few need a second and a third tile."""
    from transformer_nfn.zoo.sizes import NetworkSizes

    draw = torch.Generator().manual_seed(3)
    counts = (torch.rand(n, generator=draw) ** 6 * longest).long().clamp(min=1)
    counts[:2] = longest
    tokens = torch.randint(0, 50, (n, longest), generator=draw, dtype=torch.int32)
    tokens[torch.arange(longest) >= counts[:, None]] = 0
    labels = torch.randint(0, 4, (n,), generator=draw)
    vectors = torch.randn(50, 32, generator=draw)
    vectors[0] = 0
    words = WordVectors(tuple(map(str, range(49))), vectors[1:], "test")
    splits = ("train", "held", "test")
    return TextTask(
        "ag_news", NetworkSizes(tokens=512, classes=4, patch=0),
        tokens=dict.fromkeys(splits, tokens), counts=dict.fromkeys(splits, counts),
        labels=dict.fromkeys(splits, labels), words=words, vectors=vectors, epochs=1,
        provenance={},
    )  # fmt: skip


@dataclass
class Comparison:
    """Losses ``[networks]`` and gradients ``[networks, weights]`` of three ways."""

    fused: tuple[Tensor, Tensor]
    plain: tuple[Tensor, Tensor]
    exact: tuple[Tensor, Tensor]

    @staticmethod
    def _error(way: Tensor, exact: Tensor) -> float:
        """The typical network's relative error: the geometric mean, which no one outweighs."""
        way, exact = way.double().flatten(1), exact.flatten(1)
        size = exact.norm(dim=1)
        there = size > 0
        error = (way - exact)[there].norm(dim=1) / size[there]
        return float(error.clamp(min=1e-12).log().mean().exp())

    def errors(self, task: Task) -> dict[str, tuple[float, float]]:
        """Relative error of the fused and the plain way against float64, tensor by tensor."""
        ways = [
            {"loss": way[0][:, None]} | task.arch.views(way[1])
            for way in (self.fused, self.plain, self.exact)
        ]
        return {
            name: (self._error(ways[0][name], exact), self._error(ways[1][name], exact))
            for name, exact in ways[2].items()
        }


def compare(
    task: Task,
    *,
    networks: int,
    batch: int,
    precision: str,
    device: str,
    weights: Tensor | None = None,
    noise: float = 0.1,
) -> Comparison:
    """One batch by the kernels, by the plain forward in the same precision, and in float64.

    Args:
        weights: of trained networks; else initial ones with ``noise`` added.
    """
    task, arch = task.to(device), task.arch
    draw = torch.Generator().manual_seed(1)
    configs = sample(max(networks, 8))[:networks]
    if weights is None:
        weights = torch.stack([initial_weights(arch, c) for c in configs])
        weights = weights + noise * torch.randn(weights.shape, generator=draw)
    weights = weights.to(device)
    p = torch.tensor([c.dropout for c in configs])
    p[0] = 0.15
    threshold = dropout_threshold(p).to(device)
    scale = 65536 / (65536 - threshold.float())
    n = task.sizes["train"]
    order = torch.stack([torch.randperm(n, generator=draw)[: 2 * batch] for _ in configs])
    order = order.to(device)
    seeds = torch.arange(networks, device=device)[:, None]
    clock = torch.arange(2, device=device)
    crop = keys(seeds, CROP, clock)
    site = torch.arange(arch.dropout_sites, device=device)
    drop = keys(seeds[..., None], DROPOUT, clock[:, None] * len(site) + site)
    # The second of two batches, so that places in arrays of an epoch are tested too.
    here = task.batch("train", order[:, batch:], crop[:, 1])
    lengths = here.lengths
    if lengths is None:
        lengths = torch.full((networks,), arch.tokens, device=device)
    longest = int(lengths.max())
    both = torch.stack([lengths, lengths], 1)
    now = Clock(
        torch.ones(1, dtype=torch.int32, device=device),
        torch.full((networks,), 2, dtype=torch.int32, device=device),
        order.int().contiguous(), both.int().contiguous(), crop.contiguous(),
        drop.contiguous(), torch.zeros(networks, 2, 7, device=device),
    )  # fmt: skip
    one = Pass(
        task, networks, batch, longest=longest, train=True,
        dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        products="ieee" if precision == "float32" else "tf32",
    )  # fmt: skip
    one.gradients.weights.fill_(float("nan"))

    def differentiated(way: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = torch.autograd.grad(loss.sum(), way)
        return loss.detach(), grad

    def plain(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        way = weights.to(dtype).requires_grad_()
        views = {k: v.contiguous() for k, v in arch.views(way).items()}
        drops = dropout(drop[:, 1], threshold, scale, arch.tokens)
        low = dtype == torch.float32 and precision == "bf16"
        with torch.autocast(device, torch.bfloat16, enabled=low):
            logits = zoo_logits(
                views, here.inputs.to(dtype), arch.positions(device).to(dtype),
                heads=arch.heads, lengths=here.lengths, drop=drops,
            )  # fmt: skip
        logits = logits.to(dtype)
        loss = F.cross_entropy(logits.flatten(0, 1), here.labels.flatten(), reduction="none")
        return differentiated(way, loss.view_as(here.labels).mean(-1))

    exact = plain(torch.float64)
    if device == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    same = plain(torch.float32)
    torch.set_float32_matmul_precision("highest")
    one.draw(now, threshold)
    one.forward(weights, now, "train", scale)
    one.backward(weights, now, scale)
    fused = one.outcome.loss.sum(0) / batch, one.gradients.weights.sum(0)
    return Comparison(fused, same, exact)
