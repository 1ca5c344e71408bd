"""What is asked of anything that holds tensors by name, before any of them is read?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

WEIGHT_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""What weights are stored in; anything else a file holds is listed and not read."""


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor without reading it.

    Attributes:
        shape: its sizes.
        dtype: in torch's words without ``torch.``, such as ``bfloat16``; the file's own word
            where torch has none.
    """

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{list(self.shape)} in {self.dtype}"

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """The dtype of the tensor as weights; None where it cannot be read as weights."""
        return WEIGHT_DTYPES.get(self.dtype)

    @staticmethod
    def of(tensor: Tensor) -> TensorInfo:
        """What is known of a tensor that is there."""
        return TensorInfo(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


class TensorSource(Protocol):
    """A file, some files, or a row of a zoo; `Checkpoint` makes a mapping of any of them.

    A source raises `CheckpointError` where the bytes are not what was promised. It need not
    know the name it is asked for: `Checkpoint` asks only for those in ``infos``.
    """

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name, known without reading any."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the file says of itself."""

    def read(self, name: str) -> Tensor:
        """One tensor, contiguous, on the CPU, the caller's own."""

    def close(self) -> None:
        """Lets go of files; nothing is read afterwards."""
