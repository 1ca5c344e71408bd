"""Storage of checkpoints of any family: a folder for each, as model hubs lay it out."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from torch import Tensor, nn

from transformer_nfn.checkpoints.families import Model, OpenOptions, open_model, read_model
from transformer_nfn.checkpoints.families.binding import with_settings
from transformer_nfn.io.checkpoint import CONFIG, WEIGHT_FILES, WEIGHTS, Checkpoint
from transformer_nfn.io.files import open_regular, sweep
from transformer_nfn.io.rewrite import write_folder
from transformer_nfn.io.tensor_files import InMemory
from transformer_nfn.zoo.errors import StoreError, ZooError
from transformer_nfn.zoo.module import HEADS_KEY, heads_in
from transformer_nfn.zoo.targets import RESERVED, Value, check_name

Source = str | Path | Model | nn.Module | Mapping[str, Tensor]
"""What `Zoo.add` takes."""


class Checkpoints:
    """Checkpoints in the subfolder ``networks`` of a zoo.

    The bytes of one are compared with their checksum when it is first opened.

    Args:
        path: folder of the zoo.
        table: index of the zoo; ``family``, ``checksum`` and ``bytes`` of each network.
    """

    def __init__(self, path: Path, table: Mapping[str, np.ndarray]) -> None:
        self.path, self.table = path, table
        self._verified: set[int] = set()

    def open(self, row: int) -> Model:
        """One network, open: its weights are read on access."""
        return open_model(self.folder(row), OpenOptions(family=self.table["family"][row]))

    def folder(self, row: int) -> Path:
        """The folder of a network, whose bytes were compared with their checksum."""
        path = self.place(row)
        if row not in self._verified:
            checksum, size = _checksum(path)
            expected = str(self.table["checksum"][row]), int(self.table["bytes"][row])
            if (checksum, size) != expected:
                raise StoreError(
                    f"'{path}' ('{self.table['network'][row]}'): damaged, expected sha256 "
                    f"{expected[0][:12]}… of {expected[1]:,} bytes, found {checksum[:12]}… of "
                    f"{size:,}"
                )
            self._verified.add(row)
        return path

    def place(self, row: int) -> Path:
        """The folder of a network, whose bytes may be damaged; see `folder`."""
        return self.path / "networks" / f"{row:05d}"

    def store(self, model: Model, row: int, name: str) -> dict[str, Value]:
        """Write the folder of a network; its part of the index."""
        check_name(name)
        if model.options.architecture is not None:
            raise ZooError(
                f"'{model.where}' is of the family of '{model.options.architecture}': a zoo holds "
                "families of the library (tnfn architectures)"
            )
        model.check_numbers()
        place = self.place(row)
        write_folder(model.checkpoint, place, with_settings(model.config, model.options.settings))
        checksum, size = _checksum(place)
        entry = name, model.binding.family.name, checksum, size
        return dict(zip(RESERVED, entry, strict=True))

    def sweep(self, rows: int) -> None:
        """Remove what writers left that were killed, such as folders behind the last row."""
        sweep(self.path)
        for place in (self.path / "networks").glob("*"):
            if place.name.isdecimal() and int(place.name) >= rows:
                shutil.rmtree(place, ignore_errors=True)


@contextmanager
def opened(model: Source, config: Mapping[str, Any] | None = None) -> Iterator[Model]:
    """Open a network of any source; see `Zoo.add`."""
    options = OpenOptions(settings={} if config is None else config)
    if isinstance(model, Model):
        yield model
    elif isinstance(model, str | Path):
        with open_network(model, options) as network:
            yield network
    elif hasattr(model, "save_pretrained"):
        # The names of a model's files are not always those of its modules.
        with tempfile.TemporaryDirectory() as scratch:
            with _without_progress_bars():
                model.save_pretrained(scratch)  # type: ignore[operator]
            with open_network(scratch, options) as network:
                yield network
    elif not isinstance(model, nn.Module | Mapping):
        raise ZooError(
            "a network expected a path, an open checkpoint, a module or tensors by name, found "
            f"{type(model).__name__}"
        )
    else:
        tensors = model.state_dict() if isinstance(model, nn.Module) else model
        for key, value in tensors.items():
            if not isinstance(value, Tensor):
                raise ZooError(
                    f"a network expected tensors by name, found {type(value).__name__} '{key}'"
                )
        held = {name: w.detach().cpu() for name, w in tensors.items()}
        yield read_model(Checkpoint("the network", InMemory(held), config), Path("the network"))


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Silence `transformers`, which shows a bar for every model that it saves."""
    logging = getattr(sys.modules.get("transformers"), "logging", None)
    if logging is None or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def open_network(path: str | Path, options: OpenOptions) -> Model:
    """Open a checkpoint; one of the zoo's own module states its number of heads in a tensor."""
    model = open_model(path, options)
    if HEADS_KEY in model.checkpoint and not options:
        with model:
            settings = {"heads": heads_in(model.checkpoint)}
        return open_model(path, OpenOptions(settings=settings))
    return model


def plain_name(file: str) -> str:
    """The name of a network by its file: without the suffix of files of weights."""
    path = PurePosixPath(file)
    return str(path.with_suffix("")) if path.suffix in WEIGHT_FILES else str(path)


def _checksum(folder: Path) -> tuple[str, int]:
    """SHA-256 of the config and the weights of a network, and their bytes."""
    digest, size = hashlib.sha256(), 0
    for name in (CONFIG, WEIGHTS[0]):
        try:
            with os.fdopen(open_regular(folder / name), "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
                    size += len(block)
        except OSError as error:
            raise StoreError(f"{folder / name}: cannot be read ({error.strerror})") from error
    return digest.hexdigest(), size
