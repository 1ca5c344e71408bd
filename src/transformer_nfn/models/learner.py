"""What learns a table of numbers, one row per network; `tabular.Tabular` stores its files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import safetensors
import safetensors.torch
from torch import Tensor

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.io.tensor_files import TensorInfo
from transformer_nfn.models.stored_state import check_state

STATE_FILE = "model.safetensors"
Held = tuple[np.ndarray, np.ndarray] | None
"""Validation rows and accuracies, where there are any."""
Class = TypeVar("Class")


class PredictorError(TransformerNFNError):
    """A predictor that cannot be fitted, read or used on these networks."""


@dataclass
class Learner:
    """Base of learners: a subclass is a dataclass of its settings, and holds the fitted state."""

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of the constructor, as JSON values."""
        return asdict(self)

    def fit(self, x: np.ndarray, y: np.ndarray, held: Held, seed: int) -> None:
        """Learn accuracies ``[n]`` from rows ``[n, F]``."""
        raise NotImplementedError

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Prediction for each row, ``[n]``."""
        raise NotImplementedError

    def files(self) -> dict[str, bytes]:
        """Files that hold the fitted state, as data without code."""
        raise NotImplementedError

    def restore(self, files: Mapping[str, bytes], width: int) -> None:
        """Take the fitted state from `files`, of rows of ``width`` numbers."""
        raise NotImplementedError

    def num_parameters(self, width: int) -> int | None:
        """Number of trainable parameters for rows of ``width`` numbers; None for trees."""
        return None


class TensorLearner(Learner):
    """A learner whose fitted state is a few tensors; subclasses define `shapes`."""

    frame: ClassVar[tuple[str, ...]] = ()
    """Tensors that are no parameters."""
    _state: dict[str, Tensor]

    def shapes(self, width: int) -> dict[str, TensorInfo]:
        """Shape and dtype of every tensor of the state."""
        raise NotImplementedError

    def files(self) -> dict[str, bytes]:
        """The tensors as a safetensors file."""
        return {STATE_FILE: safetensors.torch.save(self._state)}

    def restore(self, files: Mapping[str, bytes], width: int) -> None:
        """Read the tensors; rejects others than `shapes`."""
        try:
            state = safetensors.torch.load(files[STATE_FILE])
        except safetensors.SafetensorError as error:
            raise PredictorError(f"{STATE_FILE} is not readable: {error}") from error
        check_state(state, self.shapes(width), STATE_FILE, PredictorError)
        self._state = state

    def num_parameters(self, width: int) -> int:
        """Numbers in the tensors that are trained."""
        shapes = self.shapes(width).items()
        return sum(math.prod(info.shape) for name, info in shapes if name not in self.frame)


def subclass(base: type[Class], name: object) -> type[Class] | None:
    """A class of this name, ``base`` or derived from it."""
    classes = [base]
    for each in classes:
        classes += each.__subclasses__()
    return next((each for each in classes if each.__name__ == name), None)
