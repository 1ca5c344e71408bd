"""Image tasks: the digits of scikit-learn, MNIST and Fashion-MNIST."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.errors import needs_extra
from transformer_nfn.io.downloads import RemoteFile, fetch, file_md5
from transformer_nfn.known_tasks import KNOWN_TASKS
from transformer_nfn.zoo.errors import DataError
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.training.randomness import keys, permutation, words
from transformer_nfn.zoo.training.tasks.task import Batch, Split, Task, hold_out

IMAGE_CLASSES = KNOWN_TASKS["mnist"].classes
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
MD5 = {
    "mnist": (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    "fashion_mnist": (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
}


@dataclass(frozen=True)
class ImageTask(Task):
    """Grey images cut into patches.

    Attributes:
        images: ``uint8 [samples, height + 2·padding, width + 2·padding]`` per split.
        pattern: offsets of the pixels of each patch in an image.
        white: value of a white pixel; inputs are ``(x/white − 0.5)/0.5``.
        padding: maximum shift of a random crop of a training image.
    """

    name: str
    sizes: NetworkSizes
    images: dict[Split, Tensor]
    labels: dict[Split, Tensor]
    pattern: Tensor
    white: int
    padding: int
    epochs: int
    provenance: dict[str, Any]
    batch_size: int = 128
    random_subset: ClassVar[bool] = True

    def batch(self, split: Split, index: Tensor, crop: Tensor | None = None) -> Batch:
        """Patches ``[networks, batch, tokens, patch]``; see `Task.batch`."""
        if not self.padding:
            return Batch(self.inputs[split][index], self.labels[split][index])
        images = self.images[split]
        wide = images.shape[2]
        start = index * (images.shape[1] * wide)
        if crop is None:
            start = start + self.padding * (wide + 1)
        else:
            sample = torch.arange(index.shape[1], dtype=torch.int32, device=index.device)
            word = words(crop, sample).to(torch.int64)
            # 2·padding + 1 shifts in each direction, from separate 16-bit halves of one word.
            n = 2 * self.padding + 1
            down, right = ((word & 0xFFFF) * n) >> 16, (((word >> 16) & 0xFFFF) * n) >> 16
            start = start + down * wide + right
        pixels = images.view(-1)[start[..., None, None] + self.pattern]
        return Batch(self._scaled(pixels), self.labels[split][index])

    @cached_property
    def inputs(self) -> dict[Split, Tensor]:
        """Patches of all samples ``[samples, tokens, patch]``, for images that are not cropped."""
        return {k: self._scaled(v.flatten(1)[:, self.pattern]) for k, v in self.images.items()}

    def _scaled(self, pixels: Tensor) -> Tensor:
        return pixels * (2.0 / self.white) - 1.0

    def module_inputs(self, inputs: Tensor) -> Tensor:
        """Images ``[batch, 1, height, width]``; see `Task.module_inputs`."""
        side = round(self.sizes.patch**0.5)
        across = round(self.sizes.tokens**0.5)
        tiles = inputs.view(-1, across, across, side, side).transpose(2, 3)
        return tiles.reshape(-1, 1, across * side, across * side)


@dataclass(frozen=True)
class ImageOptions:
    """How images are cut into patches, split and trained on.

    Attributes:
        side: of a square patch, in pixels.
        white: value of a white pixel.
        padding: maximum shift of a random crop.
        epochs: default number of epochs.
        held: share of the training data to hold out.
        samples: maximum number of samples to train on.
        batch_size: default samples per step.
        provenance: source of the data, as JSON values.
    """

    side: int
    white: int = 255
    padding: int = 0
    epochs: int = 100
    held: float = 0.1
    samples: int | None = None
    batch_size: int = 128
    provenance: Mapping[str, Any] = field(default_factory=dict)


def image_task(
    name: str,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    options: ImageOptions,
) -> ImageTask:
    """An image task from ``(images, labels)`` pairs.

    >>> images, labels = torch.zeros(20, 8, 8, dtype=torch.uint8), torch.arange(20) % 10
    >>> task = image_task("mine", (images, labels), (images, labels), ImageOptions(side=2))
    >>> task.batch("train", torch.tensor([[0, 1, 2]])).inputs.shape
    torch.Size([1, 3, 16, 4])
    """
    (images, labels), (test_images, test_labels) = train, test
    side, padding = options.side, options.padding
    height, width = images.shape[1:]
    keep, out = hold_out(len(labels), options.held, options.samples)
    pad = torch.nn.ConstantPad2d(padding, 0)
    wide = width + 2 * padding
    top = torch.arange(0, height, side)[:, None] * wide + torch.arange(0, width, side)
    inside = torch.arange(side)[:, None] * wide + torch.arange(side)
    return ImageTask(
        name,
        NetworkSizes(tokens=math.prod(top.shape), classes=IMAGE_CLASSES, patch=side * side),
        images={
            "train": pad(images[keep]),
            "held": pad(images[out]),
            "test": pad(test_images),
        },
        labels={"train": labels[keep], "held": labels[out], "test": test_labels},
        pattern=top.flatten()[:, None] + inside.flatten(),
        white=options.white,
        padding=padding,
        epochs=options.epochs,
        provenance=dict(options.provenance),
        batch_size=options.batch_size,
    )


def digits(held: float | None, samples: int | None) -> ImageTask:
    """The 1,797 digits of scikit-learn, 8×8 in 2×2 patches; 400 fixed ones are for testing.

    The batch size is 16, because 128 as in the authors' code would give too few steps, and there
    is no crop.
    """
    with needs_extra(DataError, "scikit-learn", "zoo", "the task 'digits'"):
        from sklearn.datasets import load_digits
    data = load_digits()
    images = torch.from_numpy(data.images.astype(np.uint8))
    labels = torch.from_numpy(data.target.astype(np.int64))
    order = permutation(keys(torch.tensor([0]), 29, 0), len(labels))[0]
    train, test = order[:-400], order[-400:]
    return image_task(
        "digits",
        (images[train], labels[train]),
        (images[test], labels[test]),
        ImageOptions(
            side=KNOWN_TASKS["digits"].patch_side,
            white=16,
            epochs=18,
            batch_size=16,
            held=0.05 if held is None else held,
            samples=samples,
            provenance={"source": "sklearn.datasets.load_digits"},
        ),
    )


def idx_images(
    name: str, folder: Path | None, held: float | None, samples: int | None
) -> ImageTask:
    """MNIST or Fashion-MNIST from ``folder``, or downloaded into the user's cache."""
    base = {"mnist": _MNIST, "fashion_mnist": _FASHION}[name]
    files = [
        fetch(name, RemoteFile(base + file, md5), folder)
        for file, md5 in zip(FILES, MD5[name], strict=True)
    ]
    arrays = [read_idx(path) for path in files]
    for images, labels, path in (
        (arrays[0], arrays[1], files[1]),
        (arrays[2], arrays[3], files[3]),
    ):
        if len(images) != len(labels):
            raise DataError(f"{path}: expected {len(images)} labels, found {len(labels)}")
        last = IMAGE_CLASSES - 1
        if labels.max() > last:
            raise DataError(f"{path}: label {int(labels.max())} is out of range 0 to {last}")
    train_x, train_y, test_x, test_y = (torch.from_numpy(a) for a in arrays)
    return image_task(
        name,
        (train_x, train_y.long()),
        (test_x, test_y.long()),
        ImageOptions(
            side=KNOWN_TASKS[name].patch_side,
            padding=2,
            held=1 / 12 if held is None else held,
            samples=samples,
            provenance={path.name: file_md5(path) for path in files},
        ),
    )


def read_idx(path: Path) -> np.ndarray:
    """The array of an idx file (``.gz`` or plain) of unsigned bytes."""
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
        zero, dtype, dims = struct.unpack(">HBB", raw[:4])
        shape = struct.unpack(f">{dims}I", raw[4 : 4 + 4 * dims])
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise DataError(f"{path}: not a readable idx file ({error})") from error
    if zero != 0 or dtype != 8 or not dims:
        raise DataError(f"{path}: not an idx file of unsigned bytes")
    body = raw[4 + 4 * dims :]
    if len(body) != math.prod(shape):
        raise DataError(f"{path}: expected {math.prod(shape)} bytes of data, found {len(body)}")
    return np.frombuffer(body, dtype=np.uint8).reshape(shape).copy()
