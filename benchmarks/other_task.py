"""A zoo of a second task in MNIST's format, without a download: scikit-learn's digits, enlarged.

Images of 28 x 28 pixels in patches of 4 x 4, ten classes, so that a predictor of MNIST networks
reads networks of this task too. With --turn the images are turned by a quarter and the classes
renamed, so that neither looks nor names are those of MNIST's digits. Training stops at 75 % of the
epochs, where predictors read:

    python benchmarks/other_task.py ZOO [--turn] [--runs 128] [--epochs 20] [--device auto]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest.mock import patch

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import interpolate, pad

from transformer_nfn.zoo import BuildOptions, build
from transformer_nfn.zoo.training.tasks import ImageOptions, ImageTask, image_task

TESTED = 400
INNER = 20
"""Sides of the digit itself; the frame around it is black, as MNIST's is."""


def main() -> None:
    """Builds the zoo in this process, or goes on with it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("zoo", type=Path)
    parser.add_argument("--turn", action="store_true")
    parser.add_argument("--runs", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    task = enlarged_digits(given.turn)
    settings = BuildOptions(
        task.name, given.runs, given.epochs, dtype="float16", until=75,
        device=given.device, workers=1,
    )  # fmt: skip
    # A build loads a task by its name, and knows those of the paper and of scikit-learn alone.
    with patch("transformer_nfn.zoo.training.plan.load_task", lambda *_, **__: task):
        zoo = build(given.zoo, settings)
    accuracy = zoo.table["test_accuracy"][zoo.select(percent=75)]
    print(f"{len(accuracy)} networks, accuracies {accuracy.min():.3f} to {accuracy.max():.3f}")


def enlarged_digits(turn: bool) -> ImageTask:
    """The 1,797 digits in MNIST's format; the last 400 are for testing, of other writers."""
    found = load_digits()
    images = enlarged(torch.from_numpy(found.images))
    labels = torch.from_numpy(found.target).long()
    if turn:
        images, labels = images.rot90(1, (1, 2)).contiguous(), (labels + 3) % 10
    return image_task(
        "digits28-turned" if turn else "digits28",
        (images[:-TESTED], labels[:-TESTED]),
        (images[-TESTED:], labels[-TESTED:]),
        ImageOptions(
            side=4,
            padding=2,
            epochs=20,
            held=0.05,
            provenance={"source": "sklearn.datasets.load_digits"},
            batch_size=16,
        ),
    )


def enlarged(small: Tensor) -> Tensor:
    """Images of 8 x 8 pixels, 0 to 16, as bytes ``[n, 28, 28]``."""
    large = interpolate(small.float()[:, None] / 16, size=(INNER, INNER), mode="bicubic")
    framed = pad(large.clamp(0, 1), [(28 - INNER) // 2] * 4)
    return (255 * framed[:, 0]).round().byte()


if __name__ == "__main__":
    main()
