"""How are changed weights written back? Under the file's own keys, fused and laid out as there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from transformer_nfn.checkpoints.families.model import Model
from transformer_nfn.checkpoints.families.untie import Target, target_of
from transformer_nfn.errors import SpaceError
from transformer_nfn.io.layout import put
from transformer_nfn.io.rewrite import rewritten

Tensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


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
    missing = [name for name in target.names if name not in done and name not in binding.kept]
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
    """A gain as the file stores it; one that did not change stays to the bit."""
    offset = model.binding.family.gain_offset
    if not offset or not name.endswith(".g"):
        return value
    before = model.checkpoint[key].double()
    return torch.where(before + offset == value.double(), before, value.double() - offset)
