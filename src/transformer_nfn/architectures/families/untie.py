"""How does a tied model lie in a file once its output matrix is its own? One or two keys more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from transformer_nfn.architectures.families.binding import Binding, Entry
from transformer_nfn.architectures.families.keys import find_prefix, standard_names
from transformer_nfn.architectures.families.model import Model
from transformer_nfn.architectures.families.sizes import Sizes
from transformer_nfn.architectures.layout import file_shape
from transformer_nfn.files.errors import CheckpointError

# What configs say of a tie: whether there is one, and T5's scale that goes with it.
TIE, TIED_SCALE = "tie_word_embeddings", "scale_decoder_outputs"


@dataclass(frozen=True)
class Added:
    """A tensor that the source does not have.

    Attributes:
        beside: the tensor of the source whose file it goes into.
        shape: in the file.
        dtype: likewise.
    """

    beside: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """In bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a model go when it is written.

    Attributes:
        binding: which tensor of the file holds what.
        names: shape of each tensor by canonical name.
        added: tensors of the file that the source does not have.
        config: fields of ``config.json`` that change.
    """

    binding: Binding
    names: Mapping[str, tuple[int, ...]]
    added: Mapping[str, Added]
    config: Mapping[str, Any]


def layout_of(model: Model, *, untied: bool) -> Layout:
    """As the source lies, or with an output matrix of its own where it is tied.

    The bias of the output matrix stands twice in some files, and the library reads the second
    one where nothing is tied; it is added as well.
    """
    if not (untied and model.about.tied):
        return Layout(model.binding, model.names, {}, {})
    if not model.config:
        raise CheckpointError(
            f"'{model.where}' has no config.json that could say that its output matrix is no "
            "longer the token embedding: keep the tie"
        )
    binding = model.binding
    entries, holders = dict(binding.entries), dict(binding.holders)
    token = holders["token"]
    added: dict[str, Added] = {}
    sizes = Sizes({**binding.sizes.axes, "class": binding.sizes.axes["vocab"]})
    infos = {key: model.checkpoint.info(key) for key in model.checkpoint}
    prefix = find_prefix(binding.family, standard_names(binding.family, infos), model.where)
    for line in binding.family.lines:
        holds = [slot.tensor for slot in line.slots]
        if not line.tied and (holds != ["head_bias"] or "head_bias" not in holders):
            continue
        key = line.key if line.outside else f"{prefix}{line.key}"
        shape = file_shape(sizes, line.slots)
        if key not in infos:
            dtype = infos[token[0]].weight_dtype
            assert dtype is not None
            added[key] = Added(token[0], shape, dtype)
        entries[key] = Entry(key, line.slots, shape, shape)
        if line.tied:
            holders["head"] = (*holders.get("head", ()), key)
        elif key not in holders["head_bias"]:
            holders["head_bias"] = (*holders["head_bias"], key)
    holders["token"] = tuple(key for key in token if key not in holders["head"])
    names = {**model.names, "head": (model.about.width, model.names["token"][0])}
    binding = replace(binding, tied=False, entries=entries, holders=holders, sizes=sizes)
    changes = {TIE: False} | ({TIED_SCALE: False} if TIED_SCALE in model.config else {})
    return Layout(binding, names, added, changes)
