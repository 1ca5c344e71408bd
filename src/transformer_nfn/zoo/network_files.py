"""Files with a network of the Small Transformer Zoo, in this library's layout or the authors'."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.errors import CheckpointError
from transformer_nfn.io.checkpoint import Checkpoint
from transformer_nfn.known_tasks import HEADS
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.module import HEADS_KEY, from_state_dict, heads_in
from transformer_nfn.zoo.sizes import NetworkSizes

POSITIONS = "embedding.pos_embedding"
_BLOCK = re.compile(r"(?:blocks|encoder)\.(\d{1,9})\..+")
# Tensors by which a file is recognised as the zoo's network: our layout, and the authors'.
OURS, AUTHORS = "blocks.0.W_Q", "encoder.0.attention.queries.weight"


@dataclass(frozen=True)
class ZooNetwork:
    """An open network with the tensors of the zoo's network, and perhaps others.

    Attributes:
        name: as the user wrote it.
        sizes: of the network.
        tensors: by name in the file, read on access.
    """

    name: str
    sizes: NetworkSizes
    tensors: Mapping[str, Tensor]

    def read(self) -> dict[str, Tensor]:
        """The weights under the names of ``sizes.space``, each ``[*axes]``."""
        return read_zoo_network(self.name, self.tensors, self.sizes)

    @property
    def unread(self) -> list[str]:
        """Tensors that are not weights of the zoo's network.

        Neither the number of heads nor the fixed positions count; see `check_positions`.
        """
        read = set(self.sizes.space.tensors)
        if not read <= set(self.tensors):
            naming = self.sizes.architecture.naming
            read = {*naming.lines, *naming.constants}
        return [name for name in self.tensors if name not in read | {POSITIONS, HEADS_KEY}]


def check_positions(where: str, tensors: Mapping[str, Tensor], sizes: NetworkSizes) -> None:
    """Refuse stored positions that are not the fixed ones of every zoo."""
    if POSITIONS not in tensors:
        return
    expected, stored = sizes.positions(), tensors[POSITIONS]
    if stored.shape == (1, *expected.shape):
        stored = stored[0]
    if stored.shape != expected.shape:
        found = f"expected shape {list(expected.shape)}, found {list(stored.shape)}"
        raise CheckpointError(f"'{where}' is of another architecture: '{POSITIONS}' {found}")
    # Others compute the table in another order, and half precision keeps a few digits of it.
    allowed = max(1e-4, torch.finfo(stored.dtype).eps)
    difference = float((stored.double() - expected.double()).abs().max())
    if difference > allowed:
        raise CheckpointError(
            f"'{where}' is of another architecture: '{POSITIONS}' is not the fixed sinusoidal "
            f"table (it differs by up to {difference:.2g})"
        )


def check_blocks(where: str, names: Iterable[str], sizes: NetworkSizes) -> None:
    """Refuse tensors of blocks beyond the last."""
    for name in names:
        block = _BLOCK.fullmatch(name)
        if block is not None and int(block[1]) >= sizes.blocks:
            raise CheckpointError(
                f"'{where}' is of another architecture: '{name}' is of a block that a network of "
                f"{sizes.blocks} blocks does not have"
            )


def zoo_sizes(checkpoint: Checkpoint, like: NetworkSizes | None = None) -> NetworkSizes | None:
    """Sizes of the zoo's network in a file, by its names and shapes; None if it is another.

    Args:
        checkpoint: open, of anything.
        like: sizes that no shape states: tokens, and in the authors' layout heads.
    """
    try:
        if OURS in checkpoint:
            heads, d_model, _ = checkpoint.info(OURS).shape
            blocks = sum(name.endswith(".W_Q") for name in checkpoint)
            (classes,) = checkpoint.info("classifier.b_2").shape
            d_ff = checkpoint.info("blocks.0.W_A").shape[1]
            inputs = "embedding.W", "embedding.b"
            patch = checkpoint.info(inputs[0]).shape[0] if inputs[0] in checkpoint else 0
        elif AUTHORS in checkpoint:
            # The authors' files do not state how many heads share a matrix; theirs have two.
            heads = heads_in(checkpoint) or (like.heads if like else HEADS)
            d_model, _ = checkpoint.info(AUTHORS).shape
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
    tokens = 49 if patch else 512
    if like is not None:
        tokens = like.tokens
    elif POSITIONS in checkpoint:  # no weight's shape states them
        tokens = checkpoint.info(POSITIONS).shape[-2]
    return NetworkSizes(tokens, classes, patch, d_model, heads, d_ff, blocks)


def read_zoo_network(
    where: str, tensors: Mapping[str, Tensor], sizes: NetworkSizes
) -> dict[str, Tensor]:
    """One network under the names of ``sizes.space``, each ``[*axes]``; other tensors are left."""
    found = zoo_sizes(tensors) if isinstance(tensors, Checkpoint) else None
    if found is not None and (found.blocks, found.patch) != (sizes.blocks, sizes.patch):
        raise CheckpointError(
            f"'{where}' is of another architecture: expected {sizes.blocks} blocks and "
            f"{sizes.patch} pixels a patch, found {found.blocks} and {found.patch}"
        )
    if not set(sizes.space.tensors) <= set(tensors):
        try:
            heads = heads_in(tensors)
            if heads not in (None, sizes.heads):
                raise ZooError(f"expected {sizes.heads} heads, found {heads}")
            return from_state_dict(sizes, tensors)
        except ZooError as error:
            raise CheckpointError(f"'{where}' is of another architecture: {error}") from error
    for name, shape in sizes.space.shapes.items():
        stored = _shape(tensors, name)
        if stored != shape:
            raise CheckpointError(
                f"'{where}' is of another architecture: '{name}' expected shape {list(shape)}, "
                f"found {list(stored)}"
            )
    return {name: tensors[name] for name in sizes.space.tensors}


def _shape(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    if isinstance(tensors, Checkpoint):
        return tensors.info(name).shape
    return tuple(tensors[name].shape)
