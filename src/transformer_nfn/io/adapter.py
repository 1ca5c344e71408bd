"""LoRA adapters as PEFT stores them: low-rank changes of another model's weights.

``adapter_config.json`` and ``adapter_model.safetensors`` hold two factors for each matrix that is
changed, ``W + scale · B A``. `adapted` is the base with the changes merged on reading.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from transformer_nfn.errors import CheckpointError
from transformer_nfn.io.checkpoint import ADAPTER, Checkpoint, OpenFiles, check_numbers, open_source
from transformer_nfn.io.json_fields import read_object
from transformer_nfn.io.location import HUB, Location
from transformer_nfn.io.tensor_files import TensorInfo, closed_on_error, inside

CONFIG, *WEIGHTS = ADAPTER
BASE_FIELD = "base_model_name_or_path"
PREFIX = "base_model.model."
FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.default)?(?:\.weight)?")
UNSUPPORTED = {
    "use_dora": "DoRA (use_dora)",
    "use_qalora": "QA-LoRA (use_qalora)",
    "lora_bias": "biases of factors (lora_bias)",
    "megatron_config": "Megatron layers",
    "trainable_token_indices": "single trained tokens (trainable_token_indices)",
    "layer_replication": "repeated blocks (layer_replication)",
    "alora_invocation_tokens": "factors that some tokens turn on (alora_invocation_tokens)",
}
"""Fields of the config that change what the factors mean, and their names in errors."""
OF_THE_BASE = ("pissa", "olora", "corda", "loftq")
"""Initialisations that PEFT subtracts from the base whenever it loads such an adapter."""


@dataclass(frozen=True)
class Change:
    """A matrix that an adapter changes by ``scale · B A``.

    Attributes:
        module: its name in the model, without ``.weight``.
        keys: names of A ``[r, in]`` and B ``[out, r]`` in the file.
        shape: of ``B A``, ``[out, in]``.
        rank: of the change.
        scale: factor on it.
        transposed: the model stores the matrix as ``[in, out]``.
    """

    module: str
    keys: tuple[str, str]
    shape: tuple[int, int]
    rank: int
    scale: float
    transposed: bool


class Adapter(OpenFiles):
    """An open LoRA folder; factors are read on access.

    Attributes:
        where: name in errors.
        config: ``adapter_config.json``.
        changes: by module, in the order of the file.
        replaced: tensors stored in full, by name in the model, and their names in the file.

    >>> Adapter.open("no-such-folder")
    Traceback (most recent call last):
    transformer_nfn.errors.CheckpointError: 'no-such-folder' holds no adapter_config.json
    """

    def __init__(self, where: str, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
        self.where, self.checkpoint, self.config = where, checkpoint, config
        if (found := str(config.get("peft_type"))) != "LORA":
            raise CheckpointError(f"'{where}': peft_type expected LORA, found {found[:60]!r}")
        unsupported = [words for name, words in UNSUPPORTED.items() if config.get(name)]
        start = str(config.get("init_lora_weights")).lower()
        if start.startswith(OF_THE_BASE):
            unsupported.append(f"factors taken from its base (init_lora_weights {start[:20]!r})")
        if unsupported:
            raise CheckpointError(f"'{where}': an adapter with {unsupported[0]} is not supported")
        factors: dict[str, dict[str, str]] = {}
        embedded: set[str] = set()
        self.replaced: dict[str, str] = {}
        for key in checkpoint:
            name = key.removeprefix(PREFIX)
            match = FACTOR.fullmatch(name)
            if match is not None:
                factors.setdefault(match[1], {})[match[3]] = key
                embedded |= {match[1]} if match[2] else set()
            elif "lora_" in name:
                self._refuse(f"'{key}' expected a factor lora_A or lora_B")
            else:
                self.replaced[name.replace(".base_layer.", ".")] = key
        self.changes = {
            module: self._change(module, keys, module in embedded)
            for module, keys in factors.items()
        }
        if not self.changes:
            self._refuse("holds no factors lora_A and lora_B")

    @staticmethod
    def open(folder: str | Path, *, where: str | None = None) -> Adapter:
        """Open a folder; reads no factors.

        Args:
            where: name in errors; its path if not given.
        """
        folder = Path(folder)
        if not os.path.lexists(folder / CONFIG):
            raise CheckpointError(f"'{folder}' holds no {CONFIG}")
        config = read_object(inside(folder, CONFIG, folder))
        found = [name for name in WEIGHTS if os.path.lexists(folder / name)]
        if not found:
            raise CheckpointError(f"'{folder}' holds no {WEIGHTS[0]}")
        path = inside(folder, found[0], folder)
        checkpoint = Checkpoint(str(path), open_source(path, str(path)))
        with closed_on_error(checkpoint.close):
            return Adapter(str(folder) if where is None else where, checkpoint, config)

    @property
    def base(self) -> Location | None:
        """The model of a hub that the config names as the base; never a folder."""
        named, revision = self.config.get(BASE_FIELD), self.config.get("revision")
        at = f"@{revision}" if isinstance(revision, str) and revision else ""
        try:
            return Location.hub(f"{HUB}{named}{at}" if isinstance(named, str) else "")
        except CheckpointError:
            return None

    def factors(self, module: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """``scale · B [out, r]`` and ``A [r, in]`` of one change."""
        change = self.changes[module]
        A, B = (self.checkpoint[key].to(dtype) for key in change.keys)
        for factor in (A, B):
            check_numbers(factor, f"'{self.where}': '{module}'")
        return change.scale * B, A

    def close(self) -> None:
        """Close the files."""
        self.checkpoint.close()

    def _change(self, module: str, keys: Mapping[str, str], embedded: bool) -> Change:
        if set(keys) != {"A", "B"}:
            self._refuse(f"'{module}' expected factors A and B, found only {' '.join(keys)}")
        shapes = [self.checkpoint.info(keys[part]).shape for part in "AB"]
        if any(len(shape) != 2 for shape in shapes) or shapes[0][0] != shapes[1][1]:
            self._refuse(
                f"'{module}' expected factors [r, in] and [out, r], found {list(shapes[0])} and "
                f"{list(shapes[1])}"
            )
        rank = shapes[0][0]
        expected = self._pattern("rank_pattern", module, self.config.get("r"))
        if type(expected) is not int:
            self._refuse(f"r and rank_pattern expected whole numbers, found {str(expected)[:60]!r}")
        if rank != expected or not rank:
            self._refuse(f"'{module}' expected rank {expected} as its config says, found {rank}")
        alpha = self._pattern("alpha_pattern", module, self.config.get("lora_alpha"))
        if type(alpha) not in (int, float) or not abs(alpha) < 1e30:
            self._refuse(f"lora_alpha expected a number, found {str(alpha)[:60]!r}")
        flags = [self.config.get(name, False) for name in ("use_rslora", "fan_in_fan_out")]
        if any(type(flag) is not bool for flag in flags):
            self._refuse("use_rslora and fan_in_fan_out expected true or false")
        scale = alpha / (rank**0.5 if flags[0] else rank)
        transposed = embedded or flags[1]
        return Change(
            module, (keys["A"], keys["B"]), (shapes[1][0], shapes[0][1]), rank, scale, transposed
        )

    def _pattern(self, field: str, module: str, default: Any) -> Any:
        """The value of a module in a table of patterns, as PEFT looks it up."""
        table = self.config.get(field) or {}
        if not isinstance(table, Mapping):
            self._refuse(f"{field} expected a table, found {str(table)[:60]!r}")
        for pattern, value in table.items():
            try:
                if re.match(rf"(.*\.)?({pattern})$", module):
                    return value
            except re.error:
                self._refuse(f"{field} expected patterns of names, found {pattern[:60]!r}")
        return default

    def _refuse(self, why: str) -> NoReturn:
        raise CheckpointError(f"'{self.where}' is not a readable LoRA adapter: {why}")


def adapted(base: Checkpoint, adapter: Adapter) -> Checkpoint:
    """The base with an adapter merged on reading; it shares the files of both."""
    source = _Adapted(base, adapter)
    return Checkpoint(adapter.where, source, base.config, converted=True)


class _Adapted:
    """A base with the changes of an adapter; see `TensorSource`."""

    def __init__(self, base: Checkpoint, adapter: Adapter) -> None:
        self._base, self._adapter = base, adapter
        self._changes: dict[str, Change] = {}
        self._replaced: dict[str, str] = {}
        self.infos: dict[str, TensorInfo] = {name: base.info(name) for name in base}
        for name, stored in adapter.replaced.items():
            key, info = self._find(name), adapter.checkpoint.info(stored)
            self._check(key, info.shape, name)
            self._replaced[key], self.infos[key] = stored, info
        for change in adapter.changes.values():
            key = self._find(f"{change.module}.weight")
            shape = tuple(reversed(change.shape)) if change.transposed else change.shape
            self._check(key, shape, change.module)
            self._changes[key] = change
            dtype = "float64" if self.infos[key].dtype == "float64" else "float32"
            self.infos[key] = TensorInfo(shape, dtype)
        self.metadata = base.metadata

    def read(self, name: str) -> Tensor:
        """One tensor, with its change."""
        replaced = self._replaced.get(name)
        before = self._base[name] if replaced is None else self._adapter.checkpoint[replaced]
        if name not in self._changes:
            return before
        change = self._changes[name]
        dtype = torch.float64 if self.infos[name].dtype == "float64" else torch.float32
        B, A = self._adapter.factors(change.module, dtype)
        merged = B @ A
        return before.to(dtype) + (merged.mT if change.transposed else merged)

    def interval(self, name: str) -> tuple[Tensor, Tensor] | None:
        """See `QuantisedSource`."""
        return self._base.interval(name)

    def close(self) -> None:
        """Closes both."""
        self._base.close()
        self._adapter.close()

    def _find(self, name: str) -> str:
        """The tensor of the base; a prefix that only one of the two writes does not matter."""
        if name in self._base:
            return name
        ends = [
            key for key in self._base if key.endswith(f".{name}") or name.endswith(f".{key}")
        ]
        if len(ends) != 1:
            raise CheckpointError(
                f"'{self._adapter.where}' changes '{name}', which its base '{self._base.where}' "
                "does not have"
            )
        return ends[0]

    def _check(self, key: str, shape: tuple[int, ...], name: str) -> None:
        found = self.infos[key].shape
        if found != shape:
            raise CheckpointError(
                f"'{self._adapter.where}' does not fit its base '{self._base.where}': '{name}' "
                f"expected shape {list(shape)}, found {list(found)}"
            )
