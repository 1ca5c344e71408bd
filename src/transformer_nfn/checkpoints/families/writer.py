"""Write changed weights back under the keys of the source file, fused and laid out as there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from transformer_nfn.checkpoints.families.binding import Binding, Entry
from transformer_nfn.checkpoints.families.model import TURNED, Model
from transformer_nfn.checkpoints.families.recognise import (
    find_prefix,
    find_wrapper,
    standard_names,
)
from transformer_nfn.errors import CheckpointError, SpaceError
from transformer_nfn.functional.description import KEPT
from transformer_nfn.io.layout import put
from transformer_nfn.io.rewrite import Additions, rewritten
from transformer_nfn.io.tensor_files import TensorInfo

Tensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
# What configs say of a tie: whether there is one, and T5's scale that goes with it.
TIE, TIED_SCALE = "tie_word_embeddings", "scale_decoder_outputs"


def write_model(
    model: Model, tensors: Tensors, out: str | Path, *, untied: bool = False
) -> Path:
    """Writes a model of the same family and sizes, laid out as ``model`` is in its file.

    Same keys, fused parts, dtypes and shards; config and other small files are copied. Every
    file is written beside and renamed, after the last tensor has come; see
    `transformer_nfn.io.rewrite`.

    Args:
        model: the source, still open.
        tensors: every tensor by canonical name, a mapping or pairs in any order; those named
            ``kept.…`` may be left out and stay as they are.
        out: a new or empty folder if the source is one, else a file.
        untied: a tied model gets an output matrix of its own, ``head`` among the tensors, and its
            config says so.

    Returns:
        ``out``.
    """
    target = target_of(model, untied=untied)
    with rewritten(model.checkpoint, model.path, Path(out), target.additions) as write:
        for key, value in _file_tensors(model, target, tensors):
            write(key, value)
    return Path(out)


def _file_tensors(model: Model, target: Target, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the file, each as soon as all that it holds has come."""
    binding = target.binding
    waiting: dict[str, dict[str, Tensor]] = {}
    done: set[str] = set()
    for name, value in tensors.items() if isinstance(tensors, Mapping) else tensors:
        _check(model.where, target.names, name, value, done)
        done.add(name)
        if name in binding.kept:
            yield binding.kept[name], value
            continue
        for key in binding.holders[name]:
            entry = binding.entries[key]
            parts = waiting.setdefault(key, {})
            parts[name] = _stored(model, key, name, value.detach())
            if len(parts) == len(entry.slots):
                whole = put(binding.sizes, waiting.pop(key), entry.slots)
                yield key, whole.reshape(entry.shape)
    missing = [name for name in target.names if name not in done and not name.startswith(KEPT)]
    if missing:
        raise SpaceError(f"'{missing[0]}' {list(target.names[missing[0]])} was not given to write")


def _check(
    where: str, names: Mapping[str, tuple[int, ...]], name: str, value: Tensor, done: set[str]
) -> None:
    if name not in names:
        raise SpaceError(f"'{where}' has no tensor '{name}' {list(value.shape)}")
    if tuple(value.shape) != names[name]:
        expected, found = list(names[name]), list(value.shape)
        raise SpaceError(f"'{name}' expected shape {expected}, found {found} to write")
    if name in done:
        raise SpaceError(f"'{name}' was given twice to write")


def _stored(model: Model, key: str, name: str, value: Tensor) -> Tensor:
    """A gain as the file stores it; one that did not change stays to the bit.

    Rotary pairs are put back where the file has them.
    """
    order = model.pair_order
    if order is not None and name.endswith(TURNED):
        return value[..., order.argsort()]
    offset = model.binding.family.gain_offset
    if not offset or not name.endswith(".g"):
        return value
    before = model.checkpoint[key].double()
    return torch.where(before + offset == value.double(), before, value.double() - offset)


@dataclass(frozen=True)
class Target:
    """What a model is written as.

    Attributes:
        binding: which tensor of the file holds what.
        names: shape of each tensor by canonical name.
        additions: what the source does not have.
    """

    binding: Binding
    names: Mapping[str, tuple[int, ...]]
    additions: Additions = field(default_factory=Additions)


def target_of(model: Model, *, untied: bool) -> Target:
    """As the source lies, or with an output matrix of its own where it is tied.

    The bias of the output matrix or the token embedding stands under several names in some files,
    and the library reads each of them where nothing is tied; they are added as well.
    """
    if not (untied and model.description.tied):
        return Target(model.binding, model.names)
    if not model.checkpoint.config:
        raise CheckpointError(
            f"'{model.where}' has no config.json that could say that its output matrix is no "
            "longer the token embedding: keep the tie"
        )
    binding = model.binding
    entries, holders = dict(binding.entries), dict(binding.holders)
    infos = {key: model.checkpoint.info(key) for key in model.checkpoint}
    sizes = {**binding.sizes, "class": binding.sizes["vocab"]}
    prefix = find_prefix(binding.family, standard_names(binding.family, infos), model.where)
    wrapper = find_wrapper(binding.family, infos)
    token, added = holders["token"], {}
    for line in binding.family.lines:
        holds = [slot.tensor for slot in line.slots]
        name = "head" if line.tied else holds[0] if len(holds) == 1 else ""
        if name != "head" and not (name in ("token", "head_bias") and name in holders):
            continue
        key = wrapper + line.after(prefix)
        entries[key] = Entry.of(line, sizes)
        if key not in infos:
            added[key] = TensorInfo(entries[key].shape, infos[token[0]].dtype)
        if key not in holders.get(name, ()):
            holders[name] = (*holders.get(name, ()), key)
    holders["token"] = tuple(key for key in holders["token"] if key not in holders["head"])
    changes = {TIE: False} | ({TIED_SCALE: False} if TIED_SCALE in model.config else {})
    return Target(
        replace(binding, tied=False, entries=entries, holders=holders, sizes=sizes),
        {**model.names, "head": (model.description.width, model.names["token"][0])},
        Additions(added, holders["token"][0], changes),
    )
