"""What people do to a checkpoint, done to real weights, and the verdict each has to get."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from real_weights.models import write_folder
from transformer_nfn.checkpoints.families import OpenOptions

Tensors = dict[str, Tensor]
BLOCK = re.compile(r"(.*?\blayers?\.)(\d+)(\..*)")
"""A tensor of a block: what stands before its number, the number, and what follows."""
DEPTH = "num_hidden_layers"
NEW_TOKENS, RANK = 3, 4


@dataclass(frozen=True)
class Real:
    """A real model with what an edit has to know.

    Attributes:
        name: of the model, for the table.
        path: a hub folder, or a state dict.
        tensors: by name in the file.
        config: ``config.json``; None for a state dict.
        embedding: name of the token embedding, None if the file has none.
        head: beginning of the names of what reads the final stream.
        adapted: ends of the names of the matrices that LoRA is merged into.
        tuned: tensors of a real fine-tune of it, None if there is none.
        options: what its files do not state.
    """

    name: str
    path: Path
    tensors: Tensors
    config: Mapping[str, Any] | None
    embedding: str | None
    head: str
    adapted: tuple[str, ...]
    tuned: Tensors | None = None
    options: OpenOptions | None = None

    @staticmethod
    def of_folder(
        name: str, folder: Path, embedding: str, head: str, adapted: tuple[str, ...]
    ) -> Real:
        """A model in a hub folder."""
        tensors, config = read_tensors(folder), read_config(folder)
        return Real(name, folder, tensors, config, embedding, head, adapted)


def read_tensors(path: Path) -> Tensors:
    """All tensors of a hub folder or a state dict."""
    if (path / "model.safetensors").is_file():
        return load_file(path / "model.safetensors")
    file = path / "pytorch_model.bin" if path.is_dir() else path
    return dict(torch.load(file, weights_only=True, map_location="cpu"))


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a hub folder."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def write_edit(edited: tuple[Tensors, Mapping[str, Any] | None], place: Path) -> Path:
    """Writes an edited model as its original is stored: a folder, or a state dict."""
    tensors, config = edited
    if config is not None:
        return write_folder(place, tensors, config)
    file = place.with_suffix(".pt")
    torch.save(tensors, file)
    return file


Edit = Callable[[Real], tuple[Tensors, Mapping[str, Any] | None]]


def _cast(dtype: torch.dtype) -> Edit:
    return lambda m: ({n: w.to(dtype) for n, w in m.tensors.items()}, m.config)


def _more_tokens(m: Real) -> tuple[Tensors, Mapping[str, Any] | None]:
    assert m.embedding is not None
    assert m.config is not None
    vocab = len(m.tensors[m.embedding])
    grown = {}
    for name, w in m.tensors.items():
        grown[name] = w
        if name == m.embedding or (m.head and name.startswith(m.head) and len(w) == vocab):
            # As libraries do it: rows near the mean of the others, a bias of zero.
            mean = w.mean(0, keepdim=True) if w.dim() > 1 else torch.zeros(1)
            noise = 0.02 * _noise(name, NEW_TOKENS, *w.shape[1:]) if w.dim() > 1 else 0.0
            grown[name] = torch.cat([w, mean.expand(NEW_TOKENS, *w.shape[1:]) + noise])
    return grown, {**m.config, "vocab_size": vocab + NEW_TOKENS}


def _averaged(m: Real) -> tuple[Tensors, Mapping[str, Any] | None]:
    assert m.tuned is not None
    mean = {
        name: (w + m.tuned[name]) / 2
        if name in m.tuned and m.tuned[name].shape == w.shape and w.is_floating_point()
        else w
        for name, w in m.tensors.items()
    }
    return mean, m.config


def _pruned(m: Real) -> tuple[Tensors, Mapping[str, Any] | None]:
    return _in_blocks(
        m, lambda name, w: torch.where(w.abs() > w.abs().median(), w, 0.0) if w.dim() > 1 else w
    )


def _lora(m: Real) -> tuple[Tensors, Mapping[str, Any] | None]:
    def merged(name: str, w: Tensor) -> Tensor:
        if not name.endswith(m.adapted):
            return w
        update = _noise(name, len(w), RANK) @ _noise(f"{name}.A", RANK, w.shape[1])
        return w + 0.1 * w.norm() / update.norm() * update

    return _in_blocks(m, merged)


def _in_blocks(
    m: Real, change: Callable[[str, Tensor], Tensor]
) -> tuple[Tensors, Mapping[str, Any] | None]:
    changed = {n: change(n, w) if BLOCK.match(n) else w for n, w in m.tensors.items()}
    return changed, m.config


def _depth(m: Real) -> int:
    return 1 + max(int(found[2]) for name in m.tensors if (found := BLOCK.match(name)))


def _layers(m: Real, order: list[int]) -> tuple[Tensors, Mapping[str, Any] | None]:
    """The blocks of ``order``, each under its new number."""
    out: Tensors = {n: w for n, w in m.tensors.items() if not BLOCK.match(n)}
    for new, old in enumerate(order):
        for name, w in m.tensors.items():
            found = BLOCK.match(name)
            if found and int(found[2]) == old:
                out[f"{found[1]}{new}{found[3]}"] = w.clone()
    return out, None if m.config is None else {**m.config, DEPTH: len(order)}


def _dropped(m: Real) -> tuple[Tensors, Mapping[str, Any] | None]:
    depth = _depth(m)
    return _layers(m, [i for i in range(depth) if i != depth // 2])


def _duplicated(m: Real) -> tuple[Tensors, Mapping[str, Any] | None]:
    depth = _depth(m)
    return _layers(m, sorted([*range(depth), depth // 2]))


def _new_head(m: Real) -> tuple[Tensors, Mapping[str, Any] | None]:
    new = {
        name: 0.02 * _noise(name, *w.shape) if name.startswith(m.head) and w.dim() > 1 else w
        for name, w in m.tensors.items()
    }
    return new, m.config


def _embeddings(m: Real) -> tuple[Tensors, Mapping[str, Any] | None]:
    assert m.embedding is not None
    table = m.tensors[m.embedding].clone()
    table[5:8] *= -1
    return {**m.tensors, m.embedding: table}, m.config


def _noise(name: str, *shape: int) -> Tensor:
    """Normal numbers, the same in every run."""
    seed = int.from_bytes(name.encode(), "little") % 2**31
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """An edit, and the exit code of each verdict that is right for it.

    Attributes:
        edit: what is done.
        right: exit code by verdict.
        needs: a field of `Real` without which the edit does not exist for a model.
    """

    edit: Edit
    right: Mapping[str, int]
    needs: str | None = None


SAME, DERIVED, PARTLY = {"same": 0}, {"derived": 1}, {"partly": 1}
CASES: dict[str, Case] = {
    "as it is": Case(lambda m: (m.tensors, m.config), SAME),
    "cast to float16": Case(_cast(torch.float16), SAME),
    "cast to bfloat16": Case(_cast(torch.bfloat16), SAME),
    "3 tokens added": Case(_more_tokens, DERIVED, needs="embedding"),
    "averaged with a fine-tune": Case(_averaged, DERIVED, needs="tuned"),
    "half of each matrix pruned": Case(_pruned, DERIVED),
    "middle layer dropped": Case(_dropped, PARTLY),
    "middle layer duplicated": Case(_duplicated, PARTLY),
    "LoRA of rank 4 merged": Case(_lora, DERIVED),
    "new head": Case(_new_head, {"same backbone": 1}, needs="head"),
    "3 embeddings negated": Case(_embeddings, DERIVED, needs="embedding"),
}
"""What is done to a model, by name."""


def cases_for(model: Real) -> dict[str, Case]:
    """The edits that exist for a model."""
    return {n: c for n, c in CASES.items() if c.needs is None or getattr(model, c.needs)}
