"""Runs the kernels in Triton's interpreter and prints the errors as JSON (a process of its own).

The interpreter is chosen before Triton is imported, so a test cannot switch it on for itself.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
from kernel_cases import bright_images, compare, long_texts

from transformer_nfn.zoo import Kind, Recipe, sample
from transformer_nfn.zoo.training.kernels import arguments
from transformer_nfn.zoo.training.kernels.runner import FusedRunner
from transformer_nfn.zoo.training.tasks import ImageTask
from transformer_nfn.zoo.training.trainer import _Training

TASKS = {
    "images": lambda: bright_images(8, 2, 0),
    "cropped": lambda: bright_images(12, 4, 2),
    "tiled": lambda: bright_images(12, 2, 0),
    "texts": lambda: long_texts(60, 70),
    "shallow": lambda: sized(bright_images(8, 2, 0), Kind(depth=1)),
    "deep": lambda: sized(bright_images(8, 2, 0), Kind(depth=3)),
}


def sized(task: ImageTask, kind: Kind) -> ImageTask:
    """The same images for networks of another kind."""
    return replace(task, arch=task.arch.resized(kind))


def trained_beside_plain() -> dict[str, float]:
    """Two epochs of four runs, another optimiser each and not as many steps, by both runners."""
    task = bright_images(8, 2, 0, n=44)
    kinds = {c.optimizer: c for c in sample(8)}
    names = ("sgd", "sgdm", "adam", "rmsprop")
    counts = [36, 36, 30, 20]
    runs = [replace(kinds[name], train_fraction=1.0) for name in names]
    recipe = Recipe(epochs=2, batch=12)
    plain = _Training(task, runs, counts, recipe, "cpu", "torch", torch.float32)
    fused = _Training(task, runs, counts, recipe, "cpu", "torch", torch.float32)
    stepper = plain.runner.stepper  # type: ignore[attr-defined]
    weights = fused.runner.weights.clone()
    fused.runner = FusedRunner(task, weights, stepper.threshold, "float32", 12)
    hits = [[one._epoch(epoch) for epoch in range(2)] for one in (plain, fused)]
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
    """Of two runs that share a seed and one that does not: do they draw, and become, the same?"""
    task = bright_images(12, 4, 2, n=16)
    shared, own = (sample(2, seed=1, seeds=seeds) for seeds in ("one", "each"))
    alike = dict(optimizer="sgdm", learning_rate=1e-2, l2=1e-6, init_std=0.2, dropout=0.1)
    runs = [replace(c, **alike, train_fraction=1.0) for c in (*shared, own[1])]  # type: ignore
    recipe = Recipe(epochs=1, batch=6)
    training = _Training(task, runs, [12] * 3, recipe, "cpu", "torch", torch.float32)
    threshold = training.runner.stepper.threshold  # type: ignore[attr-defined]
    runner = FusedRunner(task, training.runner.weights.clone(), threshold, "float32", 6)
    training.runner = runner
    given = []
    train_epoch = runner.epoch
    runner.epoch = lambda epoch: given.append(epoch) or train_epoch(epoch)  # type: ignore
    start = runner.weights.clone()
    training._epoch(0)
    (epoch,) = given
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


def main() -> None:
    """One task, the training, or what runs share by their seeds."""
    what = sys.argv[1]
    if what == "training":
        print(json.dumps(trained_beside_plain()))
        return
    if what == "seeds":
        print(json.dumps(equal_runs()))
        return
    task = TASKS[what]()
    if what == "tiled":
        # As in bf16 on a GPU, a few keys at a time: 36 tokens, so one tile is cut and one empty.
        arguments.WIDE_ATTENTION[64] = arguments.ATTENTION[64]
        assert arguments.ATTENTION[64]["KEYS"] == 16
    found = compare(task, networks=3, batch=6, precision="float32", device="cpu")
    print(json.dumps(found.errors(task)))


if __name__ == "__main__":
    main()
