"""GGUF files under the names, layouts and config of the family that they were converted from.

llama.cpp renames tensors, turns some matrices round, adds one to Gemma's gains and reorders the
queries and keys of Llama; ``gguf.toml`` says what for each architecture. Everything after `as_hub`
reads the file as if it were the model's own folder.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.checkpoints.families.expressions import (
    MissingFieldError,
    evaluate,
    fields_in,
    shown,
    unexpected,
)
from transformer_nfn.checkpoints.families.family import COUNTER, Family, families
from transformer_nfn.errors import CheckpointError, SpaceError
from transformer_nfn.functional.description import Attention, RotaryScaling
from transformer_nfn.io.checkpoint import SENTENCE_POOLING, Checkpoint
from transformer_nfn.io.gguf_file import ARCHITECTURE
from transformer_nfn.io.tensor_files import TensorInfo

FREQUENCIES = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What every published Llama 3 has; files hold the factors that follow from it."""
MOST_BLOCKS = 10_000
POOLINGS = (None, "mean", "cls", "lasttoken", "rank")
"""Names of ``pooling_type`` in sentence-transformers, see `sentence_pooling`."""
HEADS = "attention.head_count"
ROTARY = {"rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"}


@dataclass(frozen=True)
class Architecture:
    """A table of ``gguf.toml``; see there."""

    name: str
    family: Family
    model_class: str
    config: Mapping[str, str]
    interleaved: frozenset[str]
    transposed: frozenset[str]


@cache
def architectures() -> Mapping[str, Architecture]:
    """Every architecture of GGUF files that is read.

    >>> architectures()["phi2"].family.title
    'Phi'
    """
    tables, out = _tables(), {}
    for name, table in tables.items():
        if name == "keys":
            continue
        config = table["config"]
        out[name] = Architecture(
            name,
            families()[table["family"]],
            table["class"],
            tables[config]["config"] if isinstance(config, str) else config,
            frozenset(table.get("interleaved", ())),
            frozenset(table.get("transposed", ())),
        )
    return out


@cache
def _tables() -> dict[str, Any]:
    path = files("transformer_nfn.checkpoints.families") / "gguf.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def as_hub(checkpoint: Checkpoint) -> Checkpoint:
    """A GGUF file under the names of its family; it shares the file with ``checkpoint``."""
    where, fields = checkpoint.where, checkpoint.config
    found = fields.get(ARCHITECTURE)
    if not isinstance(found, str) or found not in architectures():
        known = f"one of {', '.join(architectures())}"
        raise unexpected(where, f"{ARCHITECTURE} of GGUF", known, found)
    architecture = architectures()[found]
    config = _config(architecture, fields, where)
    config["tie_word_embeddings"] = "output.weight" not in checkpoint
    names = _names(architecture, checkpoint)
    if FREQUENCIES in checkpoint:
        config["rope_scaling"] = _scaling(checkpoint, config)
        del names[FREQUENCIES]
    source = _Hub(checkpoint, architecture, names, config)
    return Checkpoint(where, source, config, converted=True)


def _config(architecture: Architecture, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in fields.items():
        start, _, rest = key.partition(".")
        if start == architecture.name:
            *outer, last = rest.split(".")
            table = tree
            for word in outer:
                table = table.setdefault(word, {})
                if not isinstance(table, dict):
                    raise CheckpointError(f"'{where}': metadata '{key}' stands in no table")
            table[last] = value
    _check_keys(architecture, fields, tree, where)
    model_type = architecture.family.model_types[0]
    config: dict[str, Any] = {"model_type": model_type}
    config["architectures"] = [architecture.model_class]
    for name, text in architecture.config.items():
        try:
            config[name] = evaluate(text, tree)
        except MissingFieldError:
            continue
        except SpaceError as error:
            raise CheckpointError(f"'{where}': metadata: {name}: {error}") from None
    rope = tree.get("rope")
    if isinstance(rope, dict) and (scaling := _rotary_scaling(rope)) is not None:
        config["rope_scaling"] = scaling
    pooling = tree.get("pooling_type", 0)
    if type(pooling) is not int or not 0 <= pooling < len(POOLINGS):
        raise unexpected(where, "metadata: pooling_type", f"0 to {len(POOLINGS) - 1}", pooling)
    config[SENTENCE_POOLING] = POOLINGS[pooling]
    return config


def _check_keys(
    architecture: Architecture, fields: Mapping[str, Any], tree: Mapping[str, Any], where: str
) -> None:
    """Refuse metadata of the architecture that may change the function, and that nothing reads."""
    if f"{architecture.name}.{HEADS}" not in fields:
        raise CheckpointError(f"'{where}': metadata lacks '{architecture.name}.{HEADS}'")
    keys = _tables()["keys"]
    read = {"pooling_type", *ROTARY, *keys["ignored"]}
    read = read.union(*map(fields_in, architecture.config.values()))
    for key, value in fields.items():
        start, _, rest = key.partition(".")
        if start != architecture.name or rest in read:
            continue
        if rest not in keys["expected"]:
            raise CheckpointError(
                f"'{where}': metadata '{key}' is not supported for {architecture.family.title}, "
                f"found {shown(value)}"
            )
        try:
            expected = evaluate(keys["expected"][rest], tree)
        except (MissingFieldError, SpaceError):
            continue  # reported where the field is read
        if value != expected:
            raise unexpected(where, f"metadata: {rest}", shown(expected), value)


def _rotary_scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """The scheme that metadata state as llama.cpp reads them: a factor without a type is linear."""
    scaling = rope.get("scaling", {})
    scaling = scaling if isinstance(scaling, dict) else {}
    factor = scaling.get("factor", rope.get("scale_linear")) or None
    kind = scaling.get("type", "none" if factor is None else "linear")
    return None if kind == "none" else {"rope_type": kind, "factor": factor}


def _names(architecture: Architecture, checkpoint: Checkpoint) -> dict[str, str]:
    """The family's name of each tensor; names that have none stay."""
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    layers = {name.split(".")[1] for name in checkpoint if name.startswith("blk.")}
    blocks = min(len(layers), MOST_BLOCKS)
    table = gguf.get_tensor_name_map(kinds[architecture.name], blocks)
    family, out = architecture.family, {name: name for name in checkpoint}
    for line in reversed(family.lines):
        for i in range(blocks if line.counter else 1):
            for prefix in reversed(family.prefixes):
                key = COUNTER.sub(str(i), line.after(prefix))
                name = table.get_name(key, try_suffixes=(".weight", ".bias"))
                if name in out:
                    out[name] = key
    return out


def _scaling(checkpoint: Checkpoint, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of Llama 3's rotary positions from the factors of its frequencies."""
    stored = checkpoint[FREQUENCIES].double()
    size, base, factor = 2 * stored.numel(), config.get("rope_theta"), float(stored.max())
    if type(base) is float and base > 0:
        plain = Attention(1, 1, size, size, 1.0, rotary=size, rotary_base=base)
        scaled = replace(plain, rotary_scaling=RotaryScaling("llama3", factor, *LLAMA3.values()))
        expected = plain.frequencies() / scaled.frequencies()
        if torch.allclose(stored.flatten(), expected, rtol=1e-4):
            return {"rope_type": "llama3", "factor": round(factor, 4), **LLAMA3}
    raise CheckpointError(
        f"'{checkpoint.where}': '{FREQUENCIES}' expected the factors of Llama 3's rotary scheme, "
        "found others"
    )


class _Hub:
    """A GGUF file under the names of a family; see `TensorSource`."""

    def __init__(
        self,
        file: Checkpoint,
        architecture: Architecture,
        names: Mapping[str, str],
        config: Mapping[str, Any],
    ) -> None:
        self._file, self._architecture, self._config = file, architecture, config
        self._names = {key: name for name, key in names.items()}
        lines = architecture.family.lines
        self._gains = {
            line.key.rpartition("}.")[2]
            for line in lines
            if any(slot.tensor.endswith(".g") for slot in line.slots)
        }
        self.infos = {key: self._info(key) for key in self._names}
        self.metadata: Mapping[str, str] = {}

    def read(self, name: str) -> Tensor:
        """One tensor as the family's files have it."""
        return self._laid_out(name)(self._file[self._names[name]])

    def interval(self, name: str) -> tuple[Tensor, Tensor] | None:
        """See `QuantisedSource`."""
        found = self._file.interval(self._names[name])
        change = self._laid_out(name)
        return None if found is None else (change(found[0]), change(found[1]))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _part(self, name: str) -> str:
        """``attn_q`` of ``blk.3.attn_q.weight``."""
        words = self._names[name].split(".")
        return words[2] if words[0] == "blk" and len(words) > 2 else words[0]

    def _is_offset(self, name: str) -> bool:
        return bool(self._architecture.family.gain_offset) and any(
            name == gain or name.endswith(f".{gain}") for gain in self._gains
        )

    def _info(self, name: str) -> TensorInfo:
        info = self._file.info(self._names[name])
        if self._is_offset(name):
            return TensorInfo(info.shape, "float64")  # holds the gain less one exactly
        if self._part(name) in self._architecture.transposed:
            return TensorInfo(tuple(reversed(info.shape)), info.dtype, info.quantised)
        return info

    def _laid_out(self, name: str) -> Callable[[Tensor], Tensor]:
        part, architecture = self._part(name), self._architecture
        if self._is_offset(name):
            return lambda w: w.double() - architecture.family.gain_offset
        if part in architecture.transposed:
            return lambda w: w.mT.contiguous() if w.ndim == 2 else w
        if part in architecture.interleaved:
            which = "num_attention_heads" if part == "attn_q" else "num_key_value_heads"
            return lambda w: split_pairs(w, self._config[which])
        return lambda w: w


def split_pairs(w: Tensor, heads: int) -> Tensor:
    """Rows of each head from pairs next to each other to all first and all second ones.

    >>> split_pairs(torch.tensor([0, 10, 1, 11, 2, 12]), 1).tolist()
    [0, 1, 2, 10, 11, 12]
    """
    if heads < 1 or len(w) % (2 * heads):
        return w  # its shape is reported where it is compared with the config
    pairs: Tensor = w.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).reshape(w.shape)
