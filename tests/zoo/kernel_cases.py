"""The fused kernels beside the plain forward: one batch of many networks, with dropout.

Run as a script, it prints the errors of a case as JSON (a process of its own for the interpreter).
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime import interpreter

from transformer_nfn.functional import zoo_logits
from transformer_nfn.zoo import Config, NetworkSizes, Recipe, SizeGroup, sample
from transformer_nfn.zoo.sizes import PAPER
from transformer_nfn.zoo.training.kernels import arguments
from transformer_nfn.zoo.training.kernels.arguments import Clock
from transformer_nfn.zoo.training.kernels.runner import FusedRunner, Pass
from transformer_nfn.zoo.training.randomness import CROP, DROPOUT, dropout_threshold, keys
from transformer_nfn.zoo.training.steps import dropout
from transformer_nfn.zoo.training.tasks import (
    ImageOptions,
    ImageTask,
    Task,
    TextTask,
    WordVectors,
    image_task,
)
from transformer_nfn.zoo.training.trainer import Training, initial_weights


def bright_images(side: int, patch: int, padding: int, n: int = 400) -> ImageTask:
    """Images whose brightness depends on their class."""
    draw = torch.Generator().manual_seed(side)
    labels = torch.randint(0, 10, (n,), generator=draw)
    noise = torch.randint(0, 60, (n, side, side), generator=draw)
    images = (noise + labels[:, None, None] * 18).to(torch.uint8)
    options = ImageOptions(side=patch, padding=padding, epochs=2)
    return image_task("mnist", (images, labels), (images, labels), options)


def long_texts(n: int = 400, longest: int = 150, group: SizeGroup = PAPER) -> TextTask:
    """Random words; most texts are short and a few need more blocks of queries and keys."""
    draw = torch.Generator().manual_seed(3)
    counts = (torch.rand(n, generator=draw) ** 6 * longest).long().clamp(min=1)
    counts[:2] = longest
    tokens = torch.randint(0, 50, (n, longest), generator=draw, dtype=torch.int32)
    tokens[torch.arange(longest) >= counts[:, None]] = 0
    labels = torch.randint(0, 4, (n,), generator=draw)
    vectors = torch.randn(50, group.width, generator=draw)
    vectors[0] = 0
    words = WordVectors(tuple(map(str, range(49))), vectors[1:], "test")
    splits = ("train", "held", "test")
    return TextTask(
        "ag_news", NetworkSizes(tokens=512, classes=4, patch=0).resized(group),
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
            {"loss": way[0][:, None]} | task.sizes.views(way[1])
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
    kind: type[Pass] = Pass,
) -> Comparison:
    """One batch by the kernels, by the plain forward in the same precision, and in float64.

    Args:
        weights: of trained networks; else initial ones with ``noise`` added.
        kind: the kernels.
    """
    task, sizes = task.to(device), task.sizes
    draw = torch.Generator().manual_seed(1)
    configs = sample(max(networks, 8))[:networks]
    if weights is None:
        weights = torch.stack([initial_weights(sizes, c) for c in configs])
        weights = weights + noise * torch.randn(weights.shape, generator=draw)
    weights = weights.to(device)
    p = torch.tensor([c.dropout for c in configs])
    p[0] = 0.15
    threshold = dropout_threshold(p).to(device)
    scale = 65536 / (65536 - threshold.float())
    n = task.num_samples["train"]
    order = torch.stack([torch.randperm(n, generator=draw)[: 2 * batch] for _ in configs])
    order = order.to(device)
    seeds = torch.arange(networks, device=device)[:, None]
    clock = torch.arange(2, device=device)
    crop = keys(seeds, CROP, clock)
    site = torch.arange(sizes.dropout_sites, device=device)
    drop = keys(seeds[..., None], DROPOUT, clock[:, None] * len(site) + site)
    # The second of two batches, so that places in arrays of an epoch are tested too.
    here = task.batch("train", order[:, batch:], crop[:, 1])
    lengths = here.lengths
    if lengths is None:
        lengths = torch.full((networks,), sizes.tokens, device=device)
    longest = int(lengths.max())
    both = torch.stack([lengths, lengths], 1)
    now = Clock(
        torch.ones(1, dtype=torch.int32, device=device),
        torch.full((networks,), 2, dtype=torch.int32, device=device),
        order.int().contiguous(), both.int().contiguous(),
        both.argsort(0).T.int().contiguous(), crop.contiguous(), drop.contiguous(),
        torch.zeros(networks, 2, 7, device=device),
    )  # fmt: skip
    one = kind(
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
        views = {k: v.contiguous() for k, v in sizes.views(way).items()}
        drops = dropout(drop[:, 1], threshold, scale, sizes.tokens)
        low = dtype == torch.float32 and precision == "bf16"
        with torch.autocast(device, torch.bfloat16, enabled=low):
            logits = zoo_logits(
                views, here.inputs.to(dtype), sizes.positions(device).to(dtype),
                heads=sizes.heads, lengths=here.lengths, drop=drops,
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


TASKS: dict[str, Callable[[SizeGroup], Task]] = {
    "images": lambda group: sized(bright_images(8, 2, 0), group),
    "cropped": lambda group: sized(bright_images(12, 4, 2), group),
    "tiled": lambda group: sized(bright_images(12, 2, 0), group),
    "texts": lambda group: long_texts(60, 40, group),
    "short": lambda group: long_texts(60, 20, group),
}


def sized(task: ImageTask, group: SizeGroup) -> ImageTask:
    """The same images for networks of other sizes."""
    return replace(task, sizes=task.sizes.resized(group))


def slow_runs(count: int) -> list[Config]:
    """Runs of different dropout and train fraction, in which rounding errors do not grow."""
    alike = dict(optimizer="sgd", learning_rate=7e-3, l2=1e-6, init_std=0.2)
    return [replace(config, **alike) for config in sample(count)]  # type: ignore[arg-type]


def moved_apart(start: Tensor, ours: Tensor, plain: Tensor) -> list[float]:
    """Relative error of what each network's training changed."""
    error: list[float] = ((ours - plain).norm(dim=1) / (plain - start).norm(dim=1)).tolist()
    return error


def trained_beside_plain() -> dict[str, float]:
    """Two epochs of four runs, another optimiser each and not as many steps, by both runners."""
    task = bright_images(8, 2, 0, n=44)
    by_name = {c.optimizer: c for c in sample(8)}
    names = ("sgd", "sgdm", "adam", "rmsprop")
    counts = [36, 36, 30, 20]
    runs = [replace(by_name[name], train_fraction=1.0) for name in names]
    recipe = Recipe(epochs=2, batch=12)
    plain = Training(task, runs, counts, recipe, "cpu", "torch", torch.float32)
    fused = Training(task, runs, counts, recipe, "cpu", "torch", torch.float32)
    threshold = plain.runner.threshold  # type: ignore[attr-defined]
    weights = fused.runner.weights.clone()
    fused.runner = FusedRunner(task, weights, threshold, "float32", 12)
    hits = [[one.train_epoch(epoch) for epoch in range(2)] for one in (plain, fused)]
    tested = [one.runner.evaluate(one.runner.weights, "held") for one in (plain, fused)]
    last = [one.runner.evaluate(plain.runner.weights, "test") for one in (plain, fused)]
    apart = (plain.runner.weights - fused.runner.weights).abs()
    return {
        "plain_rules": float(apart[:2].max()),
        # Where a gradient is all rounding, these two move a whole step by its sign.
        "adaptive_rules": float(apart[2:].mean()),
        "train_accuracy": float((torch.stack(hits[0]) - torch.stack(hits[1])).abs().max()),
        "held_loss": float((tested[0][0] / tested[1][0] - 1).abs().max()),
        "held_hits": float((tested[0][1] - tested[1][1]).abs().max()),
        "test_loss": float((last[0][0] / last[1][0] - 1).abs().max()),
        "test_hits": float((last[0][1] - last[1][1]).abs().max()),
    }


def equal_runs() -> dict[str, list[bool]]:
    """Whether runs draw and become the same: two with a shared seed, one with its own."""
    task = bright_images(12, 4, 2, n=16)
    shared, separate = (sample(2, seed=1, seeds=seeds) for seeds in ("one", "each"))
    alike = dict(optimizer="sgdm", learning_rate=1e-2, l2=1e-6, init_std=0.2, dropout=0.1)
    runs = [replace(c, **alike, train_fraction=1.0) for c in (*shared, separate[1])]  # type: ignore
    recipe = Recipe(epochs=1, batch=6)
    training = Training(task, runs, [12] * 3, recipe, "cpu", "torch", torch.float32)
    threshold = training.runner.threshold  # type: ignore[attr-defined]
    runner = FusedRunner(task, training.runner.weights.clone(), threshold, "float32", 6)
    training.runner = runner
    epochs = []
    train_epoch = runner.epoch
    runner.epoch = lambda epoch: epochs.append(epoch) or train_epoch(epoch)  # type: ignore
    start = runner.weights.clone()
    training.train_epoch(0)
    (epoch,) = epochs
    return {
        name: [torch.equal(part[0], part[other]) for other in (1, 2)]
        for name, part in (
            ("start", start),
            ("order", epoch.order),
            ("crops", epoch.crop),
            ("dropout", epoch.drop),
            ("weights", runner.weights),
        )
    } | {"moved": [not torch.equal(*pair) for pair in zip(start, runner.weights, strict=True)]}


def tensors_in(arguments: Any) -> list[Tensor]:
    """The tensors among nested arguments."""
    if isinstance(arguments, Tensor):
        return [arguments]
    if isinstance(arguments, list | tuple):
        return [tensor for part in arguments for tensor in tensors_in(part)]
    return []


def check_addresses() -> None:
    """Make the interpreter refuse loads and stores that leave a tensor of the launch."""
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    begin = executor._init_args_hst
    load, store = builder.create_masked_load, builder.create_masked_store
    held: list[Tensor] = []

    def launch(self: Any, *arguments: Any) -> Any:
        made = begin(self, *arguments)
        held[:] = tensors_in([made[0], *made[1].values()])
        return made

    def check(addresses: Any, mask: Any) -> None:
        used = addresses.data[mask.data]
        if used.size:
            low, high = int(used.min()), int(used.max())
            at = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in held]
            assert any(a <= low and high < b for a, b in at), "an address outside of the tensors"

    def checked_load(self: Any, addresses: Any, mask: Any, *rest: Any) -> Any:
        check(addresses, mask)
        return load(self, addresses, mask, *rest)

    def checked_store(self: Any, addresses: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(addresses, mask)
        return store(self, addresses, value, mask, *rest)

    executor._init_args_hst = launch
    builder.create_masked_load = checked_load
    builder.create_masked_store = checked_store


def main() -> None:
    """Print one task for networks of one size, the training, or the runs that share a seed."""
    what = sys.argv[1]
    check_addresses()
    if what == "training":
        print(json.dumps(trained_beside_plain()))
        return
    if what == "seeds":
        print(json.dumps(equal_runs()))
        return
    task = TASKS[what](SizeGroup.from_name(sys.argv[2]))
    if what == "tiled":
        # As in bf16 on a GPU, a few keys at a time: 36 tokens, so one tile is cut and one empty.
        arguments.WIDE_ATTENTION[64] = arguments.ATTENTION[64]
        assert arguments.ATTENTION[64]["KEYS"] == 16
    comparison = compare(task, networks=3, batch=6, precision="float32", device="cpu")
    print(json.dumps(comparison.errors(task)))


if __name__ == "__main__":
    main()
