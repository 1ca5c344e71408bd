"""State dicts of ``torch.save``: opened by their weights only, so that no code in them runs."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.io.errors import CheckpointError
from transformer_nfn.io.source import TensorInfo
from transformer_nfn.io.wrappers import inner_state

# Smaller files are read at once: a map costs more than their bytes.
MAP_FROM = 1 << 20
# A view may show numbers of a file many times over; up to so many bytes it is written out.
REPEATED = 1 << 28
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


class StateDict:
    """A plain state dict in a file of ``torch.save``; see `TensorSource`.

    A dict of more than weights, as training programs write it, is read by its ``state_dict``.
    A large file is mapped, so that a tensor's bytes are read when it is asked for; files in the
    format from before PyTorch 1.6 can only be read at once.
    """

    def __init__(self, path: Path, where: str | None = None) -> None:
        self._where = str(path) if where is None else where
        self._state = _load(path, self._where)
        self.infos = {name: TensorInfo.of(w) for name, w in self._state.items()}
        self.metadata: Mapping[str, str] = {}

    def read(self, name: str) -> Tensor:
        """One tensor."""
        found = self._state[name]
        if found.layout != torch.strided or found.is_meta:
            kind = "meta" if found.is_meta else str(found.layout).removeprefix("torch.")
            raise CheckpointError(f"'{self._where}': '{name}' is a {kind} tensor, not numbers")
        needed, held = found.numel() * found.element_size(), found.untyped_storage().nbytes()
        if needed > max(held, REPEATED):
            raise CheckpointError(
                f"'{self._where}': '{name}' claims {needed:,} bytes, its file holds {held:,}"
            )
        return found.detach().clone(memory_format=torch.contiguous_format)

    def close(self) -> None:
        """Lets go of the file."""
        self._state = {}


def write_state_dict(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a state dict with ``torch.save``; an `OSError` where the disk does not take it."""
    with path.open("wb") as file:
        try:
            torch.save(dict(tensors), file)
        except RuntimeError as error:  # torch's own words for a full disk are of its positions
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


def _load(path: Path, where: str) -> dict[str, Tensor]:
    try:
        large = path.stat().st_size >= MAP_FROM
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch says of its own older formats
            state = _load_weights(path, large)
    except Exception as error:  # torch raises many kinds for a file that is not its own
        raise CheckpointError(f"'{where}' is not a plain state dict: {_reason(error)}") from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"'{where}' is not a plain state dict of tensors by name: it holds a "
            f"{type(state).__name__}"
        )
    state = inner_state(state)
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"'{where}' is not a plain state dict of tensors by name: {name!r} is of kind "
                f"{type(value).__name__}"
            )
    return dict(state)


def _load_weights(path: Path, large: bool) -> Any:
    # Only the newer format can be mapped; it is a zip file.
    with path.open("rb") as file:
        mapped = large and file.read(2) == b"PK"
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped or None)


def _reason(error: Exception) -> str:
    """Why torch refused, without its advice to run what is in the file."""
    text = str(error)
    if "TorchScript" in text:
        return "it is a TorchScript program"
    if isinstance(error, pickle.UnpicklingError):
        match = _GLOBAL.search(text)
        what = f"'{match[1]}'" if match else "more than tensors"
        return f"it holds {what}, and nothing in it was run"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, RuntimeError):
        return text.split(". ")[0].split("\n")[0][:100]
    return "it is not a file of torch.save"
