"""What must a predictor that fits itself offer? `fit`, `predict`, `save`, `load`.

A folder holds ``predictor.json`` (class, settings, the networks it reads, a checksum of every
file) and the files themselves, in formats that hold data and no code.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.errors import TransformerNFNError, missing_extra
from transformer_nfn.io.files import write_bytes
from transformer_nfn.io.json_fields import Fields, read_object

FORMAT = 1
ABOUT = "predictor.json"
WIDEST = 1 << 30
"""Numbers that a network can have for a predictor."""
MOST_THREADS = 4096
Validation = tuple[Mapping[str, object], Tensor]


class PredictorError(TransformerNFNError):
    """A predictor that cannot be fitted, read or used on these networks."""


class TabularPredictor:
    """Networks to a table of numbers, the table to an accuracy.

    Subclasses say how a network becomes a row (`table`), how a table is learned (`_learn`) and
    read (`_read`), and what is kept (`_files`, `_restore`).
    """

    settings: dict[str, Any]
    width: int | None = None
    _kinds: ClassVar[dict[str, type[TabularPredictor]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        TabularPredictor._kinds[cls.__name__] = cls

    def fit(
        self,
        network: Mapping[str, object],
        accuracy: Tensor,
        validation: Validation | None = None,
        seed: int = 0,
    ) -> Self:
        """Learns from networks and their accuracies.

        Args:
            network: a `Network` of n networks.
            accuracy: ``[n]``, between 0 and 1.
            validation: networks and accuracies that say when to stop; without them the
                predictor takes all its rounds.
            seed: of everything random.
        """
        x, y = self._pair(network, accuracy, "training")
        held = None if validation is None else self._pair(*validation, "validation")
        if held is not None and held[0].shape[1] != x.shape[1]:
            raise PredictorError(
                f"training networks give {x.shape[1]} numbers each, validation networks "
                f"{held[0].shape[1]}"
            )
        self.width = x.shape[1]
        self._learn(x, y, held, seed)
        return self

    def predict(self, network: Mapping[str, object]) -> Tensor:
        """The predicted accuracy of each network, ``[n]`` in float32."""
        if self.width is None:
            raise PredictorError(f"{type(self).__name__} has to be fitted before it predicts")
        x = self.table(network)
        if x.shape[1] != self.width:
            raise PredictorError(
                f"{type(self).__name__} learned from networks of {self.width} numbers, "
                f"found {x.shape[1]}"
            )
        return torch.from_numpy(np.ascontiguousarray(self._read(x), dtype=np.float32))

    @property
    def num_parameters(self) -> int | None:
        """Trainable numbers; None for trees."""
        return None

    def save(self, folder: str | Path) -> Path:
        """Writes the fitted predictor into a folder, made if need be."""
        if self.width is None:
            raise PredictorError(f"{type(self).__name__} has to be fitted before it is saved")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = self._files()
        about = {
            "format": FORMAT,
            "predictor": type(self).__name__,
            "settings": self.settings,
            "width": self.width,
            "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        }
        for name, data in files.items():
            write_bytes(folder / name, data)
        # Last, so that a folder with it is complete.
        write_bytes(folder / ABOUT, (json.dumps(about, indent=1) + "\n").encode())
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Reads what `save` wrote; on `TabularPredictor` itself, a predictor of any kind."""
        folder = Path(folder)
        about = _about(folder / ABOUT)
        kind = TabularPredictor._kinds.get(about["predictor"])
        if kind is None or not issubclass(kind, cls):
            raise PredictorError(
                f"'{folder}' holds a predictor of kind {about['predictor']}, expected "
                f"{cls.__name__}"
            )
        files = {name: _checked(folder, name, sha) for name, sha in about["sha256"].items()}
        _check_threads(about["settings"].get("threads"), folder / ABOUT)
        try:
            made = kind(**about["settings"])
            made.width = int(about["width"])
            made._restore(files)
        except PredictorError as error:
            raise PredictorError(f"'{folder}' holds no readable predictor: {error}") from error
        except (TypeError, KeyError, ValueError, AttributeError, RuntimeError) as error:
            raise PredictorError(
                f"'{folder}' holds no readable predictor ({type(error).__name__}: {error})"
            ) from error
        assert isinstance(made, cls)
        return made

    def table(self, network: Mapping[str, object]) -> np.ndarray:
        """Networks as rows of numbers; here all weights, one after another, in float32."""
        return flattened(network)

    def _pair(
        self, network: Mapping[str, object], accuracy: Tensor, what: str
    ) -> tuple[np.ndarray, np.ndarray]:
        x = self.table(network)
        y = torch.as_tensor(accuracy).detach().cpu().double().numpy()
        if y.shape != (len(x),) or len(x) == 0:
            raise PredictorError(
                f"{what} needs one accuracy for each network, found {list(y.shape)} for {len(x)}"
            )
        if not np.isfinite(y).all() or not np.isfinite(x).all():
            raise PredictorError(f"{what} networks hold values that are not finite")
        return x, y

    def _learn(
        self,
        x: np.ndarray,
        y: np.ndarray,
        held: tuple[np.ndarray, np.ndarray] | None,
        seed: int,
    ) -> None:
        raise NotImplementedError

    def _read(self, x: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _files(self) -> dict[str, bytes]:
        raise NotImplementedError

    def _restore(self, files: Mapping[str, bytes]) -> None:
        raise NotImplementedError


def flattened(network: Mapping[str, object]) -> np.ndarray:
    """Embedding, blocks and classifier side by side, names in alphabetical order, ``[n, all]``."""
    parts: list[Any] = [network.get("embedding"), *_list(network), network.get("classifier")]
    rows: list[Tensor] = []
    for part in parts:
        if isinstance(part, Mapping):
            rows += [part[name].flatten(1) for name in sorted(part)]
        elif part is not None:
            rows.append(part.flatten(1))
    if len({x.shape[0] for x in rows}) != 1:
        found = ", ".join(str(x.shape[0]) for x in rows) or "none"
        raise PredictorError(f"the parts of a network must have one batch size, found {found}")
    return torch.cat([x.detach().cpu().float() for x in rows], 1).numpy()


def _list(network: Mapping[str, object]) -> list[Any]:
    blocks = network.get("blocks") or []
    return list(blocks) if isinstance(blocks, list | tuple) else [blocks]


def optional(module: str) -> Any:
    """A library of the extra ``baselines``, imported where it is used."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = {"sklearn": "scikit-learn"}.get(top := module.split(".")[0], top)
        raise missing_extra(PredictorError, package, "baselines", "this predictor") from error


def _about(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise PredictorError(f"'{path.parent}' holds no {path.name}")
    data = read_object(path, PredictorError)
    if type(data.get("format")) is not int or data["format"] != FORMAT:
        raise PredictorError(f"'{path}' has format {data.get('format')!r}, expected {FORMAT}")
    fields = Fields(data, str(path), PredictorError)
    fields.text("predictor")
    fields.inner("settings")
    fields.whole("width", 1, WIDEST)
    sums = fields.inner("sha256")
    for name in sums.data:
        sums.text(name)
    return data


def _check_threads(threads: Any, path: Path) -> None:
    if threads is not None and (type(threads) is not int or not 0 <= threads <= MOST_THREADS):
        raise PredictorError(
            f"'{path}': 'settings.threads' expected null or a whole number up to {MOST_THREADS}, "
            f"found {str(threads)[:40]}"
        )


def _checked(folder: Path, name: str, sha256: str) -> bytes:
    path = folder / name
    if Path(name).name != name:
        raise PredictorError(f"'{folder / ABOUT}': '{name}' leads out of its folder")
    try:
        if not path.is_file():
            raise FileNotFoundError(path)
        data = path.read_bytes()
    except OSError as error:
        raise PredictorError(f"'{path}' is missing, though {ABOUT} names it") from error
    # The libraries' own readers may end the process on a damaged file.
    if hashlib.sha256(data).hexdigest() != sha256:
        raise PredictorError(f"'{path}' is damaged: its checksum is not that of {ABOUT}")
    return data
