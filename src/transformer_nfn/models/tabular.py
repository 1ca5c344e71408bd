"""Predictors that are fitted on a table with one row per network: `fit`, `predict`, `save`, `load`.

A folder holds ``predictor.json`` (class, settings, table width, a checksum of every file) and the
files themselves, in formats that hold data and no code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.io.files import read_regular, write_bytes
from transformer_nfn.io.json_fields import Fields, read_object
from transformer_nfn.io.tensor_files import TensorInfo
from transformer_nfn.models.checkpoint_batch import WEIGHTS, by_size
from transformer_nfn.models.stored_state import check_state

FORMAT = 1
METADATA = "predictor.json"
STATE_FILE = "model.safetensors"
LARGEST_WIDTH = 1 << 30
MOST_THREADS = 4096
Validation = tuple[Mapping[str, object], Tensor]
Held = tuple[np.ndarray, np.ndarray] | None
"""Validation rows and accuracies, where there are any."""


class PredictorError(TransformerNFNError):
    """A predictor that cannot be fitted, read or used on these networks."""


class TabularPredictor:
    """Predictor of accuracies from a table of numbers, one row per network.

    Subclasses define the row of a network (`table`), how a table is learned (`_learn`) and read
    (`_read`), and the files that hold the fitted state (`_files`, `_restore`).
    """

    settings: dict[str, Any]
    width: int | None = None
    _classes: ClassVar[dict[str, type[TabularPredictor]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        TabularPredictor._classes[cls.__name__] = cls

    def fit(
        self,
        network: Mapping[str, object],
        accuracy: Tensor,
        validation: Validation | None = None,
        seed: int = 0,
    ) -> Self:
        """Learn from networks and their accuracies.

        Args:
            network: a `Network` of n networks.
            accuracy: ``[n]``, between 0 and 1.
            validation: networks and accuracies for early stopping; without them the predictor
                takes all its rounds.
            seed: random seed.
        """
        x, y = self._rows(network, accuracy, "training")
        held = None if validation is None else self._rows(*validation, "validation")
        if held is not None and held[0].shape[1] != x.shape[1]:
            raise PredictorError(
                f"training networks give {x.shape[1]} numbers each, validation networks "
                f"{held[0].shape[1]}"
            )
        self.width = x.shape[1]
        self._learn(x, y, held, seed)
        return self

    def predict(self, network: Mapping[str, object]) -> Tensor:
        """The predicted accuracy of each network, ``[n]`` in float32; NaN where it overflows."""
        if self.width is None:
            raise PredictorError(f"{type(self).__name__} has to be fitted before it predicts")
        x = self.table(network)
        if x.shape[1] != self.width:
            raise PredictorError(
                f"{type(self).__name__} learned from networks of {self.width} numbers, "
                f"found {x.shape[1]}"
            )
        finite = np.isfinite(x).all(1)  # a tree would take NaN for a small number
        values = np.where(finite, self._read(x), np.nan)
        return torch.from_numpy(values).float()  # without the warning of NumPy where it overflows

    @property
    def num_parameters(self) -> int | None:
        """Number of trainable parameters; None for trees."""
        return None

    def save(self, folder: str | Path) -> Path:
        """Write the fitted predictor into a folder, made if need be."""
        if self.width is None:
            raise PredictorError(f"{type(self).__name__} has to be fitted before it is saved")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = self._files()
        metadata = {
            "format": FORMAT,
            "predictor": type(self).__name__,
            "settings": self.settings,
            "width": self.width,
            "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        }
        for name, data in files.items():
            write_bytes(folder / name, data)
        # Last, so that a folder with it is complete.
        write_bytes(folder / METADATA, (json.dumps(metadata, indent=1) + "\n").encode())
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read what `save` wrote; on `TabularPredictor` itself, a predictor of any class."""
        folder = Path(folder)
        metadata = _read_metadata(folder / METADATA)
        made_by = TabularPredictor._classes.get(metadata["predictor"])
        if made_by is None or not issubclass(made_by, cls):
            raise PredictorError(
                f"'{folder}' holds a predictor of kind {metadata['predictor']}, expected "
                f"{cls.__name__}"
            )
        files = {name: _read_checked(folder, name, sha) for name, sha in metadata["sha256"].items()}
        try:
            predictor = made_by(**metadata["settings"])
            predictor.width = int(metadata["width"])
            predictor._restore(files)
        except PredictorError as error:
            raise PredictorError(f"'{folder}' holds no readable predictor: {error}") from error
        except (TypeError, KeyError, ValueError, AttributeError, RuntimeError) as error:
            raise PredictorError(
                f"'{folder}' holds no readable predictor ({type(error).__name__}: {error})"
            ) from error
        assert isinstance(predictor, cls)
        return predictor

    def table(self, network: Mapping[str, object]) -> np.ndarray:
        """Networks as rows of numbers; here all weights, one after another, in float32."""
        return flattened(network)

    def _rows(
        self, network: Mapping[str, object], accuracy: Tensor, part: str
    ) -> tuple[np.ndarray, np.ndarray]:
        x = self.table(network)
        y = torch.as_tensor(accuracy).detach().cpu().double().numpy()
        if y.shape != (len(x),) or len(x) == 0:
            raise PredictorError(
                f"{part} needs one accuracy for each network, found {list(y.shape)} for {len(x)}"
            )
        if not np.isfinite(y).all() or not np.isfinite(x).all():
            raise PredictorError(f"{part} networks hold values that are not finite")
        return x, y

    def _learn(self, x: np.ndarray, y: np.ndarray, held: Held, seed: int) -> None:
        raise NotImplementedError

    def _read(self, x: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _files(self) -> dict[str, bytes]:
        raise NotImplementedError

    def _restore(self, files: Mapping[str, bytes]) -> None:
        raise NotImplementedError


class TensorPredictor(TabularPredictor):
    """A tabular predictor whose fitted state is a few tensors; subclasses define `_shapes`."""

    _state: dict[str, Tensor]

    def _shapes(self) -> dict[str, TensorInfo]:
        """Shape and dtype of every tensor of the state."""
        raise NotImplementedError

    def _files(self) -> dict[str, bytes]:
        return {STATE_FILE: safetensors.torch.save(self._state)}

    def _restore(self, files: Mapping[str, bytes]) -> None:
        try:
            state = safetensors.torch.load(files[STATE_FILE])
        except safetensors.SafetensorError as error:
            raise PredictorError(f"{STATE_FILE} is not readable: {error}") from error
        check_state(state, self._shapes(), STATE_FILE, PredictorError)
        self._state = state


def only_size(network: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors ``[n, *axes]`` of a batch of checkpoints; several sizes are refused."""
    groups = list(by_size(network))
    if len(groups) != 1:
        raise PredictorError(
            f"a predictor on tensors reads networks of one size, found {len(groups)} sizes"
        )
    return groups[0][2]


def flattened(network: Mapping[str, Any]) -> np.ndarray:
    """Embedding, blocks and classifier side by side, names in alphabetical order, ``[n, all]``.

    Of checkpoints all tensors, in the order of their names in the file.
    """
    if WEIGHTS in network:
        tensors = only_size(network).values()
        return torch.cat([w.flatten(1).detach().cpu().float() for w in tensors], 1).numpy()
    parts = [network.get("embedding"), *network.get("blocks", []), network.get("classifier")]
    rows: list[Tensor] = []
    for part in parts:
        if isinstance(part, Mapping):
            rows += [part[name].flatten(1) for name in sorted(part)]
        elif part is not None:
            rows.append(part.flatten(1))
    if len({x.shape[0] for x in rows}) != 1:
        sizes = ", ".join(str(x.shape[0]) for x in rows) or "none"
        raise PredictorError(f"the parts of a network must have one batch size, found {sizes}")
    return torch.cat([x.detach().cpu().float() for x in rows], 1).numpy()


def _read_metadata(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise PredictorError(f"'{path.parent}' holds no {path.name}")
    data = read_object(path, PredictorError)
    if type(data.get("format")) is not int or data["format"] != FORMAT:
        raise PredictorError(f"'{path}' has format {data.get('format')!r}, expected {FORMAT}")
    fields = Fields(data, str(path), PredictorError)
    fields.text("predictor")
    fields.whole("width", 1, LARGEST_WIDTH)
    settings, sums = fields.inner("settings"), fields.inner("sha256")
    if settings.has("threads"):
        settings.whole("threads", 0, MOST_THREADS)
    for name in sums.data:
        sums.text(name)
    return data


def _read_checked(folder: Path, name: str, sha256: str) -> bytes:
    path = folder / name
    if Path(name).name != name:
        raise PredictorError(f"'{folder / METADATA}': '{name}' leads out of its folder")
    try:
        data = read_regular(path)
    except OSError as error:
        raise PredictorError(f"'{path}' is missing, though {METADATA} names it") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise PredictorError(f"'{path}' is damaged: its checksum is not that of {METADATA}")
    return data
