"""Networks by name: resolve what a user typed to files, rows of zoos and weights in a space.

Every command resolves its arguments here, once: a file, a folder as model hubs lay it out, a row
of a zoo (``ZOO#3``), ranges of rows, whole zoos, the name of an asset, a repository of a hub, or a
pattern.
"""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.checkpoints.families import (
    Model,
    OpenOptions,
    open_files,
    open_model,
    read_model,
)
from transformer_nfn.errors import (
    AssetError,
    CheckpointError,
    SpaceError,
    TransformerNFNError,
)
from transformer_nfn.functional.zoo_network import NAME
from transformer_nfn.io.adapter import Adapter
from transformer_nfn.io.assets import NAME as ASSET_NAME
from transformer_nfn.io.checkpoint import Checkpoint, check_plain
from transformer_nfn.io.location import Location
from transformer_nfn.io.rewrite import write_network
from transformer_nfn.io.tensor_files import InMemory
from transformer_nfn.spaces import Weights, WeightSpace
from transformer_nfn.zoo.damage import damage_of
from transformer_nfn.zoo.network_files import (
    AUTHORS,
    ZooNetwork,
    check_positions,
    zoo_sizes,
)
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.store import Zoo
from transformer_nfn.zoo.store.folder import GROUPS_FILE
from transformer_nfn.zoo.store.index import CONFIGURATION
from transformer_nfn.zoo.store.zoo import SPACE_KEY

__all__ = [
    "Network",
    "check_base",
    "read_network",
    "resolve_network",
    "resolve_networks",
    "save_network",
    "zoo_rows",
]

_DIGITS = 18
_PATTERN = frozenset("*?[")


@dataclass(frozen=True)
class Network:
    """One network that a user named; nothing of it is read yet.

    Attributes:
        name: as the user wrote it, such as ``mnist-sample#3``.
        zoo: the zoo it is a row of; None for a file.
        row: its index in the zoo.
    """

    name: str
    zoo: Zoo | None = None
    row: int = 0

    @property
    def location(self) -> Location:
        """Where its files are; those of a row of a zoo of checkpoints are verified first."""
        if self.zoo is None or not self.zoo.named:
            return Location.of(self.name)
        return Location.of(self.zoo.folder(self.row))

    def open_adapter(self) -> Adapter:
        """Open the adapter without its base."""
        return Adapter.open(self.location.checkpoint(), where=self.name)

    @property
    def recorded(self) -> dict[str, Any] | None:
        """Metadata in the zoo: run, epoch, configuration, test accuracy; None for a file.

        Fields that an imported zoo does not know are None. A damaged network also has
        ``damage``: what was done to which row.
        """
        if self.zoo is None:
            return None
        fields = self.zoo.config(self.row)
        if self.zoo.named:
            return fields
        kept = ("run", "epoch", "percent", "best", *CONFIGURATION, "test_accuracy")
        found = {key: _or_none(fields[key]) for key in kept}
        damage = damage_of(str(fields["source"]))
        return found if damage is None else found | {"damage": damage.to_json()}

    def open_model(self, options: OpenOptions | None = None) -> Model:
        """Open the network as a checkpoint of a known family.

        Args:
            options: what the files do not state, see `transformer_nfn.checkpoints.families`.
        """
        options = OpenOptions() if options is None else options
        chosen = options.architecture is not None or options.family is not None
        if self.zoo is not None and not (self.zoo.named and options):
            if self.zoo.named:
                return self.zoo.model(self.row)
            source = InMemory(self._row(), {SPACE_KEY: self.zoo.space.to_json()})
            family = options if chosen else replace(options, family=NAME)
            return read_model(Checkpoint(self.name, source), Path(self.name), family)
        location = self.location
        if chosen or location.is_adapter:
            return open_model(location, options)
        opened = open_files(location)
        try:
            checkpoint = opened.unwrapped()
            sizes = zoo_sizes(checkpoint)
            if sizes is None and SPACE_KEY in opened.metadata:
                raise CheckpointError(
                    f"'{self.name}' is a network of a weight space, which `networks.read_network` "
                    "reads in Python: expected a checkpoint of a transformer"
                )
            if sizes is not None:
                check_positions(self.name, checkpoint, sizes)
                if AUTHORS in checkpoint:
                    options = replace(options, settings={"heads": sizes.heads})
        except BaseException:
            opened.close()
            raise
        return read_model(opened, location.checkpoint(), options)

    def open_outline(self, options: OpenOptions | None = None) -> Model:
        """Open a repository of a hub by the headers of its files; its weights cannot be read."""
        checkpoint, folder = self.location.outline()
        return read_model(checkpoint, folder, options)

    def open_file(self) -> Checkpoint:
        """Open the file without wrappers around its names; reads no weights."""
        opened = Checkpoint.open(self.location.checkpoint(), where=self.name)
        if SPACE_KEY in opened.metadata:
            return opened
        check_plain(opened, opened.config, self.name)
        return opened.unwrapped()

    @contextmanager
    def as_zoo_network(self, like: NetworkSizes) -> Iterator[ZooNetwork]:
        """The network read as one of the zoo's, in either layout.

        Args:
            like: sizes that no shape states: tokens, and in the authors' layout heads.
        """
        if self.zoo is not None and not self.zoo.named:
            sizes = replace(self.zoo.sizes, tokens=like.tokens)
            yield ZooNetwork(self.name, sizes, self._row())
            return
        with self.open_file() as checkpoint:
            yield ZooNetwork(self.name, zoo_sizes(checkpoint, like) or like, checkpoint)

    def _row(self) -> Weights:
        assert self.zoo is not None
        return {name: w[0] for name, w in self.zoo.weights([self.row]).items()}


def _or_none(value: Any) -> Any:
    missing = value == "" or (isinstance(value, float) and not math.isfinite(value))
    return None if missing else value


def resolve_network(text: str | Path) -> Network:
    """The one network that a user named: a file, a folder, or a row of a zoo (``ZOO#12``).

    A file of that very name takes precedence over a row.
    """
    path, text = Path(text), str(text)
    if (path / "zoo.json").is_file():
        raise CheckpointError(f"'{text}' is a zoo of many networks: name one, as in {text}#0")
    if (path / GROUPS_FILE).is_file():
        raise CheckpointError(
            f"'{text}' is a mixed zoo: name one network of one kind, as in {text}/KIND#0"
        )
    zoo, mark, row = text.rpartition("#")
    if path.exists() or not mark:
        return Network(text)
    if not (row.isascii() and row.isdecimal()):
        raise CheckpointError(f"'{text}': a row is a whole number, as in {zoo}#12")
    return next(_rows(text, zoo, row, {}))


def resolve_networks(texts: Iterable[str | Path]) -> list[Network]:
    """Every network that a user named, in order.

    Args:
        texts: each a file or folder as `Checkpoint.open` takes it, a zoo by its path or name (all
            its rows; of a mixed zoo those of every kind), rows of it (``ZOO#3``, ``ZOO#3-9``,
            ``ZOO#0,4,7-9``), or a pattern such as ``nets/*.pt``. A file of that very name takes
            precedence.
    """
    zoos: dict[str, Zoo] = {}
    return [network for text in texts for network in _resolve(str(text), zoos)]


def check_base(networks: Iterable[Network], options: OpenOptions) -> None:
    """Reject a base where none of the networks is an adapter."""
    if options.base is not None and not any(network.location.is_adapter for network in networks):
        raise TransformerNFNError("--base is for adapters (LoRA), and none of the networks is one")


def zoo_rows(zoo: Zoo, rows: Iterable[int] | None = None, name: str = "") -> list[Network]:
    """Rows of an open zoo, all by default; of several sizes named by the folder of their size."""
    name = name or str(zoo.path)
    if zoo.mixed and rows is None:
        parts = (zoo_rows(part, name=f"{name}/{size}") for size, part in zoo.parts.items())
        return [network for networks in parts for network in networks]
    return [Network(f"{name}#{i}", zoo, i) for i in (range(len(zoo)) if rows is None else rows)]


def _resolve(text: str, zoos: dict[str, Zoo]) -> Iterator[Network]:
    path = Path(text)
    if os.path.exists(path / "zoo.json"):
        yield from _rows(text, text, None, zoos)
    elif os.path.exists(path / GROUPS_FILE):
        yield from zoo_rows(Zoo.open(path), name=text)
    elif os.path.exists(path):
        yield Network(text)
    elif _PATTERN & set(text):
        matches = sorted(glob.glob(text, recursive=True))
        if not matches:
            raise CheckpointError(f"no file or folder matches '{text}'")
        for match in matches:
            yield from _resolve(match, zoos)
    elif "#" in text:
        zoo, _, rows = text.rpartition("#")
        yield from _rows(text, zoo, rows, zoos)
    elif ASSET_NAME.fullmatch(text):
        try:
            Location.of(text).folder("zoo")
        except AssetError as error:
            raise CheckpointError(f"there is no file '{text}': {error}") from error
        yield from _rows(text, text, None, zoos)
    else:
        yield Network(text)  # opening it reports that there is no such file


def _rows(
    text: str, zoo: str, rows: str | None, zoos: dict[str, Zoo]
) -> Iterator[Network]:
    spans = None if rows is None else [_span(text, zoo, part) for part in rows.split(",")]
    if zoo not in zoos:
        zoos[zoo] = Zoo.open(zoo)
    opened = zoos[zoo]
    if opened.mixed and spans is not None:
        sizes = ", ".join(opened.parts) or "none yet"
        raise CheckpointError(
            f"'{text}': '{zoo}' holds networks of several sizes ({sizes}): name a row of one, as "
            f"in {zoo}/{next(iter(opened.parts), 'SIZE')}#0"
        )
    for first, last in [(0, len(opened) - 1)] if spans is None else spans:
        _check_row(text, opened, last)
        yield from zoo_rows(opened, range(first, last + 1), zoo)


def _check_row(text: str, zoo: Zoo, row: int) -> None:
    if row >= len(zoo):
        raise CheckpointError(f"'{text}': the zoo has {len(zoo)} rows, counted from 0")


def _span(text: str, zoo: str, part: str) -> tuple[int, int]:
    """The first and the last row of ``3`` or ``3-9``."""
    first, dash, last = part.partition("-")
    ends = [first, last] if dash else [first, first]
    if not all(n.isascii() and n.isdecimal() and len(n) <= _DIGITS for n in ends):
        raise CheckpointError(
            f"'{text}': a row is a whole number, as in {zoo}#12, or a range, as in {zoo}#3-9"
        )
    low, high = map(int, ends)
    if low > high:
        raise CheckpointError(f"'{text}': rows count upwards, as in {zoo}#{high}-{low}")
    return low, high


def save_network(
    path: str | os.PathLike[str], space: WeightSpace, weights: Mapping[str, Tensor]
) -> None:
    """Write one network to a file, atomically.

    Args:
        path: ``.pt``, ``.pth`` and ``.bin`` become a state dict of ``torch.save``, which does not
            state its space; anything else safetensors, which does.
        space: the space of the weights.
        weights: ``[1, 1, *axes]`` or ``[*axes]``.
    """
    space.check(weights, lead=None)
    tensors = {}
    for name, shape in space.shapes.items():
        if weights[name].numel() != torch.Size(shape).numel():
            raise SpaceError(
                f"a file holds one network; '{name}' has shape {list(weights[name].shape)}"
            )
        tensors[name] = weights[name].reshape(shape)
    write_network(Path(path), tensors, {SPACE_KEY: space.to_json()})


def read_network(
    source: str | os.PathLike[str] | Checkpoint, space: WeightSpace | None = None
) -> tuple[WeightSpace, Weights]:
    """Read one network and its space; names and shapes are checked before any weight is read.

    Args:
        source: an open checkpoint, or what `Checkpoint.open` takes.
        space: the space it must lie in; read from the file if not given.

    Returns:
        The space, and the weights as ``[1, 1, *axes]``.

    >>> import tempfile
    >>> from transformer_nfn.spaces import multi_head
    >>> space = multi_head(6, 2, 3, 3)
    >>> file = f"{tempfile.mkdtemp()}/net.safetensors"
    >>> save_network(file, space, space.randn(1))
    >>> read_network(file)[1]["W_Q"].shape
    torch.Size([1, 1, 2, 6, 3])
    """
    if not isinstance(source, Checkpoint):
        with Checkpoint.open(Path(source)) as opened:
            return read_network(opened, space)
    if space is None:
        if SPACE_KEY not in source.metadata:
            raise TransformerNFNError(
                f"'{source.where}' does not state its weight space: expected one as an "
                "argument"
            )
        space = WeightSpace.from_json(source.metadata[SPACE_KEY])
    try:
        space.check(_outlines(source), finite=False)
        weights = {name: source[name][None, None] for name in space.tensors}
        space.check(weights)
    except SpaceError as error:
        raise SpaceError(f"'{source.where}': {error}") from error
    return space, weights


def _outlines(source: Checkpoint) -> Weights:
    """Tensors of the right shape and dtype without numbers; bytes for dtypes torch lacks."""
    outlines = {}
    for name in source:
        info = source.info(name)
        dtype = getattr(torch, info.dtype, None)
        kind = dtype if isinstance(dtype, torch.dtype) else torch.uint8
        outlines[name] = torch.empty((1, 1, *info.shape), dtype=kind, device="meta")
    return outlines
