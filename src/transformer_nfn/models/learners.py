"""Learners of a table of numbers with one row per network; `tabular.Tabular` stores their files.

Here are their base, and the small ones: an MLP, and a linear model of the logit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.io.tensor_files import TensorInfo
from transformer_nfn.models.statistics import fit_ridge, mean_and_scale, signed_log, standardised
from transformer_nfn.models.stored_state import check_state

STATE_FILE = "model.safetensors"
Held = tuple[np.ndarray, np.ndarray] | None
"""Validation rows and accuracies, where there are any."""
HIDDEN, DROPOUT = 8, 0.2
"""Neurons of the MLP's one hidden layer, and dropout of these and of its features."""
RATE, DECAY, BATCH = 3e-3, 0.1, 64
"""Largest learning rate, weight decay and networks per step of its AdamW."""
PATIENCE = 40
"""Epochs without a smaller validation loss before its training stops."""
PENALTIES = tuple(10.0**i for i in range(-3, 6))
"""Ridge penalties to choose from."""
EXTREME = 1e-3
"""Accuracies closer to 0 or 1 count as this close: their logits would outweigh all others."""
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


@dataclass
class SmallMLP(TensorLearner):
    """A small MLP on the signed logarithm of the numbers, standardised on the training part.

    >>> SmallMLP().num_parameters(648)
    5201

    Attributes:
        epochs: largest number of epochs.
    """

    epochs: int = 300
    frame: ClassVar = ("mean", "scale")

    def fit(self, x: np.ndarray, y: np.ndarray, held: Held, seed: int) -> None:
        """Train until the validation loss no longer falls."""
        mean, scale = mean_and_scale(signed_log(torch.from_numpy(x)))
        frame = {"mean": mean, "scale": scale}
        target = torch.from_numpy(y).float().clamp(0, 1)
        check = None
        if held is not None:
            check = (_standard(held[0], frame), torch.from_numpy(held[1]).float().clamp(0, 1))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            state = self._train(_standard(x, frame), target, check)
        self._state = {**frame, **state}

    def _train(
        self, x: Tensor, y: Tensor, check: tuple[Tensor, Tensor] | None
    ) -> dict[str, Tensor]:
        module = _module(x.shape[1])
        adam = torch.optim.AdamW(module.parameters(), RATE, weight_decay=DECAY)
        steps = self.epochs * -(-len(x) // BATCH)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
        best, best_loss, since = _copy(module), float("inf"), 0
        for _ in range(self.epochs):
            module.train()
            for rows in torch.randperm(len(x)).split(BATCH):
                adam.zero_grad()
                binary_cross_entropy_with_logits(module(x[rows])[:, 0], y[rows]).backward()
                adam.step()
                schedule.step()
            if check is None:
                continue
            with torch.no_grad():
                out = module.eval()(check[0])[:, 0]
                loss = float(binary_cross_entropy_with_logits(out, check[1]))
            since += 1
            if loss < best_loss:
                best, best_loss, since = _copy(module), loss, 0
            if since >= PATIENCE:
                break
        return best if check is not None else _copy(module)

    @torch.no_grad()
    def predict(self, x: np.ndarray) -> np.ndarray:
        """Sigmoid of the MLP's output."""
        module = _module(x.shape[1]).eval()
        module.load_state_dict({k: v for k, v in self._state.items() if k not in self.frame})
        out: np.ndarray = torch.sigmoid(module(_standard(x, self._state))[:, 0]).numpy()
        return out

    def shapes(self, width: int) -> dict[str, TensorInfo]:
        """Mean and scale of the numbers, weights and biases."""
        with torch.device("meta"):
            layers = _module(width).state_dict()
        frame = dict.fromkeys(self.frame, TensorInfo((width,), "float64"))
        return frame | {name: TensorInfo.of(w) for name, w in layers.items()}


@dataclass
class LogitLinear(TensorLearner):
    """Ridge regression of the logit of the accuracy; the penalty of least leave-one-out error.

    Nothing is random: all seeds give one predictor.

    >>> LogitLinear().num_parameters(7)
    8
    """

    def fit(self, x: np.ndarray, y: np.ndarray, held: Held, seed: int) -> None:
        """Choose the penalty and solve."""
        table, target = torch.from_numpy(x).double(), torch.from_numpy(y)
        mean, scale = mean_and_scale(table)
        logits = target.clamp(EXTREME, 1 - EXTREME).logit()
        fit = fit_ridge((table - mean) * scale, logits, PENALTIES)
        weight = fit.weight * scale
        self._state = {"weight": weight, "constant": fit.constant - mean @ weight}

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Sigmoid of the linear model."""
        logits = torch.from_numpy(x).double() @ self._state["weight"] + self._state["constant"]
        return np.asarray(torch.sigmoid(logits).numpy())

    def shapes(self, width: int) -> dict[str, TensorInfo]:
        """A weight for each number, and a constant."""
        return {"weight": TensorInfo((width,), "float64"), "constant": TensorInfo((), "float64")}


def subclass(base: type[Class], name: object) -> type[Class] | None:
    """A class of this name, ``base`` or derived from it."""
    classes = [base]
    for each in classes:
        classes += each.__subclasses__()
    return next((each for each in classes if each.__name__ == name), None)


def _module(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Dropout(DROPOUT), nn.Linear(width, HIDDEN), nn.SiLU(),
        nn.Dropout(DROPOUT), nn.Linear(HIDDEN, 1),
    )  # fmt: skip


def _standard(x: np.ndarray, frame: Mapping[str, Tensor]) -> Tensor:
    return standardised(signed_log(torch.from_numpy(x)), frame["mean"], frame["scale"]).float()


def _copy(module: nn.Module) -> dict[str, Tensor]:
    return {name: w.detach().clone() for name, w in module.state_dict().items()}
