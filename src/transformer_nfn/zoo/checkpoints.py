"""Open the network that a user named: a file, a folder, a row of a zoo; used by every command.

This stands in ``zoo`` and not in ``files`` because imports run one way: ``files`` opens what lies
on a disk and knows no zoo; here both are known, so every command comes here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from transformer_nfn.checkpoints.families import (
    Model,
    OpenOptions,
    UnknownFamilyError,
    open_model,
)
from transformer_nfn.errors import CheckpointError, SpaceError
from transformer_nfn.functional.zoo_network import block_in_network
from transformer_nfn.io.assets import resolve
from transformer_nfn.io.checkpoint import Checkpoint, check_plain
from transformer_nfn.io.checkpoint import check_no_nan as check_tensor
from transformer_nfn.io.network import SPACE_KEY, read_network
from transformer_nfn.io.tensor_files import TensorInfo
from transformer_nfn.known_tasks import HEADS
from transformer_nfn.spaces import Weights, WeightSpace
from transformer_nfn.spaces.prefix import under_prefix
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.module import HEADS_KEY, from_state_dict, heads_in
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.store import Zoo
from transformer_nfn.zoo.store.folder import KINDS_FILE

POSITIONS = "embedding.pos_embedding"
# Names by which a file is known to hold the zoo's network: ours, and the authors'.
_OURS, _AUTHORS = "blocks.0.W_Q", "encoder.0.attention.queries.weight"


def open_checkpoint(
    text: str | Path, space: WeightSpace | None = None, part: str | None = None
) -> Checkpoint:
    """Open what a user named, without what wraps its names; reads no weights.

    Args:
        text: what `Checkpoint.open` takes, or a row of a zoo: ``ZOO#12``, the zoo by its path or
            by its name (see `tnfn assets`). Where a file of that very name exists, it is meant.
        space: whose tensors are looked for; names that it has wrap nothing.
        part: what the names of those tensors begin with.
    """
    path, text = Path(text), str(text)
    if not path.exists():
        zoo, mark, row = text.rpartition("#")
        if mark:
            return _open_row(text, zoo, row)
    elif (path / "zoo.json").is_file():
        raise CheckpointError(f"'{text}' is a zoo of many networks: name one, as in {text}#0")
    elif (path / KINDS_FILE).is_file():
        raise CheckpointError(
            f"'{text}' is a mixed zoo: name one network of one kind, as in {text}/KIND#0"
        )
    opened = Checkpoint.open(path, where=text)
    if SPACE_KEY in opened.metadata:
        return opened
    if space is None:
        check_plain(opened, opened.config, text)
    prefix = "" if part is None else f"{part}."
    names = [prefix] if space is None else [f"{prefix}{name}" for name in space.tensors]
    given = space is not None or part is not None
    if given and all(any(key.startswith(name) for key in opened) for name in names):
        return opened
    return opened.unwrapped()


def open_transformer(text: str | Path, options: OpenOptions | None = None) -> Model | None:
    """The transformer of a known family that a user named; None for a network of this library's.

    Args:
        text: a file or folder, as `Checkpoint.open` takes it.
        options: see `transformer_nfn.checkpoints.families.open_model`.
    """
    path = Path(text)
    if options is None or (options.architecture is None and options.family is None):
        if not path.exists() or (path / "zoo.json").is_file() or (path / KINDS_FILE).is_file():
            return None
        with Checkpoint.open(path, where=str(text)) as checkpoint:
            if SPACE_KEY in checkpoint.metadata or recognise(checkpoint.unwrapped()):
                return None
    try:
        return open_model(path, options)
    except UnknownFamilyError:
        return None  # of which the other readers may know more


def check_no_nan(text: str | Path) -> None:
    """Refuse a network of this library's that holds NaN in any tensor, read later or not."""
    with open_checkpoint(text) as checkpoint:
        for name in checkpoint:
            if checkpoint.info(name).weight_dtype is not None:
                check_tensor(checkpoint, name)


def _open_row(text: str, zoo: str, row: str) -> Checkpoint:
    if not (row.isascii() and row.isdecimal()):
        raise CheckpointError(f"'{text}': a row is a whole number, as in {zoo}#12")
    opened = Zoo.open(resolve(zoo, "zoo"))
    if int(row) >= len(opened):
        raise CheckpointError(f"'{text}': the zoo has {len(opened)} rows, counted from 0")
    return Checkpoint(text, ZooRow(opened, int(row)))


class ZooRow:
    """One network of a zoo; see `transformer_nfn.io.tensor_files.TensorSource`.

    A row is checked as a whole, so it is read as a whole, when its first tensor is asked for.
    """

    def __init__(self, zoo: Zoo, row: int) -> None:
        self._zoo, self._row = zoo, row
        self._weights: Weights = {}
        dtype = str(zoo.about.get("dtype", "float32"))
        self.infos = {name: TensorInfo(shape, dtype) for name, shape in zoo.space.shapes.items()}
        self.metadata = {SPACE_KEY: zoo.space.to_json()}

    def read(self, name: str) -> Tensor:
        """One tensor."""
        if not self._weights:
            self._weights = {k: w[0] for k, w in self._zoo.weights([self._row]).items()}
        return self._weights[name].clone()

    def close(self) -> None:
        """Forgets the row."""
        self._weights = {}


def find_network(
    text: str | Path,
    space: WeightSpace | None = None,
    part: str | None = None,
    *,
    in_network: bool = False,
) -> tuple[WeightSpace, Weights]:
    """The network that a user named, in the space it lies in, as ``[1, 1, *axes]``.

    Args:
        text: see `open_checkpoint`.
        space: the space it must lie in; else what the file says, or the zoo's network where the
            tensors are that.
        part: only the tensors below this name, such as ``blocks.0`` of the zoo's network; of
            another file its space has to be given.
        in_network: a block of the zoo's network in the space with all that the network around it
            leaves free (`block_in_network`), and not as a function by itself.
    """
    with open_checkpoint(text, space, part) as checkpoint:
        if space is not None:
            return read_network(checkpoint if part is None else checkpoint.part(part), space)
        if part is None and SPACE_KEY in checkpoint.metadata:
            return read_network(checkpoint)
        arch = recognise(checkpoint)
        if arch is None and part is None:
            return read_network(checkpoint)  # which says that it needs a space
        if arch is None:
            raise CheckpointError(
                f"'{checkpoint.where}': the space of its part '{part}' is not known; name it with "
                "--space"
            )
        named = read_small_transformer(checkpoint, arch)
        chosen, weights = arch.space, named
        if part is not None:
            chosen, weights = _block(arch, named, part, text, in_network)
        found = {name: w[None, None] for name, w in weights.items()}
        try:
            chosen.check(found)
        except SpaceError as error:
            raise SpaceError(f"'{checkpoint.where}': {error}") from error
        return chosen, found


def _block(
    arch: NetworkSizes, named: Mapping[str, Tensor], part: str, text: str | Path, in_network: bool
) -> tuple[WeightSpace, Weights]:
    if part not in [f"blocks.{i}" for i in range(arch.blocks)]:
        raise CheckpointError(
            f"'{text}' has no block '{part}': expected blocks.0 to blocks.{arch.blocks - 1}"
        )
    index = int(part.removeprefix("blocks."))
    space = block_in_network(arch.space, index) if in_network else arch.block_space
    return space, under_prefix(named, f"{part}.")


def recognise(checkpoint: Checkpoint, like: NetworkSizes | None = None) -> NetworkSizes | None:
    """The zoo's network that a checkpoint holds, by its names and shapes; None if it is none.

    Args:
        checkpoint: opened, of anything.
        like: where sizes come from that no shape tells: tokens, and in the authors' layout heads.
    """
    try:
        if _OURS in checkpoint:
            heads, d_model, _ = checkpoint.info(_OURS).shape
            blocks = sum(name.endswith(".W_Q") for name in checkpoint)
            (classes,) = checkpoint.info("classifier.b_2").shape
            d_ff = checkpoint.info("blocks.0.W_A").shape[1]
            inputs = "embedding.W", "embedding.b"
            patch = checkpoint.info(inputs[0]).shape[0] if inputs[0] in checkpoint else 0
        elif _AUTHORS in checkpoint:
            # The authors' files do not say how many heads share a matrix; theirs have two.
            heads = heads_in(checkpoint) or (like.heads if like else HEADS)
            d_model, _ = checkpoint.info(_AUTHORS).shape
            blocks = sum(name.endswith(".queries.weight") for name in checkpoint)
            (classes,) = checkpoint.info("classifier.fc2.bias").shape
            d_ff = checkpoint.info("encoder.0.fc1.weight").shape[0]
            inputs = "embedding.conv1.weight", "embedding.conv1.bias"
            side = checkpoint.info(inputs[0]).shape[-1] if inputs[0] in checkpoint else 0
            patch = side * side
        else:
            return None
    except (CheckpointError, ZooError, ValueError, IndexError):
        return None
    if heads == 0 or d_model % heads or (inputs[0] in checkpoint) != (inputs[1] in checkpoint):
        return None
    found = NetworkSizes(
        tokens=49 if patch else 512,  # of no weight's shape
        classes=classes,
        patch=patch,
        d_model=d_model,
        heads=heads,
        d_ff=d_ff,
        blocks=blocks,
    )
    return found if like is None else replace(found, tokens=like.tokens)


def read_small_transformer(checkpoint: Checkpoint, arch: NetworkSizes) -> dict[str, Tensor]:
    """One network under the names of ``arch.space``, each ``[*axes]``; other tensors are left.

    Args:
        checkpoint: with the names of the space, or with those of the authors' state dicts.
        arch: what it must be.
    """
    found = recognise(checkpoint)
    if found is not None and (found.blocks, found.patch) != (arch.blocks, arch.patch):
        raise CheckpointError(
            f"'{checkpoint.where}' is of another architecture: expected {arch.blocks} blocks and "
            f"{arch.patch} pixels a patch, found {found.blocks} and {found.patch}"
        )
    if not set(arch.space.tensors) <= set(checkpoint):
        try:
            heads = heads_in(checkpoint)
            if heads not in (None, arch.heads):
                raise ZooError(f"expected {arch.heads} heads, found {heads}")
            return from_state_dict(arch, checkpoint)
        except ZooError as error:
            raise CheckpointError(
                f"'{checkpoint.where}' is of another architecture: {error}"
            ) from error
    for name, shape in arch.space.shapes.items():
        if checkpoint.info(name).shape != shape:
            raise CheckpointError(
                f"'{checkpoint.where}' is of another architecture: '{name}' expected shape "
                f"{list(shape)}, found {list(checkpoint.info(name).shape)}"
            )
    return {name: checkpoint[name] for name in arch.space.tensors}


def left_out(checkpoint: Checkpoint, arch: NetworkSizes) -> list[str]:
    """The tensors of a file that `read_small_transformer` does not read.

    But for the number of heads, which is read, and the fixed positions, which are no weights;
    `changed_positions` tells them from others.
    """
    read = set(arch.space.tensors)
    if not read <= set(checkpoint):
        naming = arch.architecture.naming
        read = {*naming.lines, *naming.constants}
    return [name for name in checkpoint if name not in read | {POSITIONS, HEADS_KEY}]


def changed_positions(checkpoint: Checkpoint, arch: NetworkSizes) -> str | None:
    """What is wrong with the positions of a file, which every network of a zoo shares."""
    if POSITIONS not in checkpoint:
        return None
    expected, stored = arch.positions(), checkpoint[POSITIONS]
    if stored.shape == (1, *expected.shape):
        stored = stored[0]
    if stored.shape != expected.shape:
        return (
            f"'{POSITIONS}' expected shape {list(expected.shape)}, found {list(stored.shape)}"
        )
    # Others compute the table in another order, and half precision keeps a few digits of it.
    allowed = max(1e-4, torch.finfo(stored.dtype).eps)
    apart = float((stored.double() - expected.double()).abs().max())
    if apart <= allowed:
        return None
    return f"'{POSITIONS}' is not the fixed sinusoidal table (it differs by up to {apart:.2g})"
