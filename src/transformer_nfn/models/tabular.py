"""Predictors that learn a table with one row per network: what it reads, and a learner.

A folder holds ``predictor.json`` (class, settings, table width, a checksum of every file) and the
files themselves, in formats that hold data and no code.
"""

from __future__ import annotations

import hashlib
import json
from copy import copy
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.io.files import read_regular, write_bytes
from transformer_nfn.io.json_fields import Fields, read_object
from transformer_nfn.models.batch import Batch, rows_of
from transformer_nfn.models.estimators import Estimator
from transformer_nfn.models.invariants import FEATURES, invariant_features, space_of
from transformer_nfn.models.learners import Learner, PredictorError, subclass
from transformer_nfn.models.predictor import (
    INVARIANTS,
    PACKED,
    STATISTICS,
    ZOOS,
    LearningSet,
    Predictor,
    predictor,
)
from transformer_nfn.models.statistics import sorted_statistics
from transformer_nfn.models.whole_network.invariants import whole_invariants
from transformer_nfn.spaces import WeightSpace

FORMAT = 1
METADATA = "predictor.json"
LARGEST_WIDTH = 1 << 30
MOST_THREADS = 4096
Validation = tuple[Batch, Tensor]


PREFIX = "tabular:"
"""First word of the name of a `Tabular` that a user made."""


@predictor(PREFIX)
class Tabular(Predictor):
    """A predictor that turns networks into rows of numbers, and learns these.

    >>> networks = Batch.of({"b_1": torch.randn(20, 5)})
    >>> Tabular("statistics", "LogitLinear").fit(networks, torch.rand(20)).width
    7

    Args:
        reads: ``"packed"`` (all weights), ``"statistics"`` of each tensor, or ``"invariants"``.
        learner: a `Learner`, the name of a class of it, or any regressor of scikit-learn.
        space: for invariants, weight space of one block (or its JSON); None for the paper's block,
            with its sizes taken from the networks.
        whole: read `whole_invariants`, as many for networks of any size and task.
        options: of the learner, if it is a name.
    """

    zoos = ZOOS
    reads = PACKED
    width: int | None = None

    def __init__(
        self,
        reads: str,
        learner: Any,
        space: WeightSpace | str | None = None,
        whole: bool = False,
        **options: Any,
    ) -> None:
        if reads not in (PACKED, STATISTICS, INVARIANTS):
            raise PredictorError(
                f"a table holds {PACKED}, {STATISTICS} or {INVARIANTS}, found {reads!r}"
            )
        if isinstance(learner, str):
            made = subclass(Learner, learner)
            if made is None:
                raise PredictorError(f"there is no learner '{learner}'")
            learner = made(**options)
        self.reads, self.whole = reads, whole
        self.learner = learner if isinstance(learner, Learner) else Estimator(learner)
        self.space = WeightSpace.from_json(space) if isinstance(space, str) else space
        if not isinstance(self.space, WeightSpace | None):
            raise PredictorError(f"'space' expected a weight space, found {space!r:.40}")

    @classmethod
    def of(cls, data: LearningSet, **options: Any) -> Self:
        """A predictor of networks like these."""
        return cls(**options)

    def fresh(self) -> Self:
        """An unfitted copy, to fit with another seed."""
        made = copy(self)
        made.learner, made.width = copy(self.learner), None
        return made

    @property
    def own_name(self) -> str:
        """Name of a predictor that a user made."""
        text = " ".join(repr(getattr(self.learner, "estimator", self.learner)).split())
        return f"{PREFIX}{text} on {self.reads}"

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of the constructor, as JSON values."""
        settings: dict[str, Any] = {"reads": self.reads, "learner": type(self.learner).__name__}
        settings |= self.learner.settings
        if self.reads == INVARIANTS:
            space = None if self.space is None else self.space.to_json()
            settings |= {"whole": self.whole, "space": space}
        return settings

    @property
    def any_task(self) -> bool:
        """Whether networks of other patches, tokens and classes have as many numbers."""
        return self.reads == INVARIANTS and self.whole

    def table(self, batch: Batch) -> np.ndarray:
        """Networks as rows of numbers, ``[n, F]``."""
        if self.reads == PACKED:
            return flattened(batch)
        if self.reads == STATISTICS:
            return tensor_statistics(batch)
        if FEATURES in batch.computed:
            rows = batch.computed[FEATURES]
        elif self.whole:
            rows = whole_invariants(batch)
        else:
            self.space = self.space or space_of(batch)
            rows = invariant_features(batch, self.space)
        return np.asarray(rows.cpu().double())

    def fit(
        self,
        batch: Batch,
        accuracy: Tensor,
        validation: Validation | None = None,
        seed: int = 0,
    ) -> Self:
        """Learn from networks and their accuracies.

        Args:
            batch: n networks.
            accuracy: ``[n]``, between 0 and 1.
            validation: networks and accuracies for early stopping; without them the predictor
                takes all its rounds.
            seed: random seed.
        """
        x, y = self._rows(batch, accuracy, "training")
        held = None if validation is None else self._rows(*validation, "validation")
        if held is not None and held[0].shape[1] != x.shape[1]:
            raise PredictorError(
                f"training networks give {x.shape[1]} numbers each, validation networks "
                f"{held[0].shape[1]}"
            )
        self.learner.fit(x, y, held, seed)
        self.width = x.shape[1]
        return self

    def predict(self, batch: Batch) -> Tensor:
        """The predicted accuracy of each network, ``[n]`` in float32; NaN where it overflows."""
        if self.width is None:
            raise PredictorError(f"{type(self).__name__} has to be fitted before it predicts")
        x = self.table(batch)
        if x.shape[1] != self.width:
            raise PredictorError(
                f"{type(self).__name__} learned from networks of {self.width} numbers, "
                f"found {x.shape[1]}"
            )
        finite = np.isfinite(x).all(1)  # a tree would take NaN for a small number
        values = np.where(finite, self.learner.predict(x), np.nan)
        single = torch.from_numpy(values).float()  # without the warning of NumPy for overflow
        return torch.where(single.isinf(), torch.nan, single).clamp(0, 1)

    @property
    def num_parameters(self) -> int | None:
        """Number of trainable parameters; None for trees, and before it is fitted."""
        return None if self.width is None else self.learner.num_parameters(self.width)

    def save(self, folder: str | Path) -> Path:
        """Write the fitted predictor into a folder, made if need be."""
        if self.width is None:
            raise PredictorError(f"{type(self).__name__} has to be fitted before it is saved")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = self.learner.files()
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
        """Read what `save` wrote; on `Tabular` itself, a predictor of any class."""
        folder = Path(folder)
        metadata = _read_metadata(folder / METADATA)
        made_by = subclass(Tabular, metadata["predictor"])
        if made_by is None or not issubclass(made_by, cls):
            raise PredictorError(
                f"'{folder}' holds a predictor of kind {metadata['predictor']}, expected "
                f"{cls.__name__}"
            )
        files = {name: _read_checked(folder, name, sha) for name, sha in metadata["sha256"].items()}
        try:
            predictor = made_by(**metadata["settings"])
            predictor.width = int(metadata["width"])
            predictor.learner.restore(files, predictor.width)
        except PredictorError as error:
            raise PredictorError(f"'{folder}' holds no readable predictor: {error}") from error
        except (TypeError, KeyError, ValueError, AttributeError, RuntimeError) as error:
            raise PredictorError(
                f"'{folder}' holds no readable predictor ({type(error).__name__}: {error})"
            ) from error
        assert isinstance(predictor, cls)
        return predictor

    def _rows(self, batch: Batch, accuracy: Tensor, part: str) -> tuple[np.ndarray, np.ndarray]:
        x = self.table(batch)
        y = torch.as_tensor(accuracy).detach().cpu().double().numpy()
        if y.shape != (len(x),) or len(x) == 0:
            raise PredictorError(
                f"{part} needs one accuracy for each network, found {list(y.shape)} for {len(x)}"
            )
        if not np.isfinite(y).all() or not np.isfinite(x).all():
            raise PredictorError(f"{part} networks hold values that are not finite")
        return x, y


def tensor_statistics(batch: Batch) -> np.ndarray:
    """Seven statistics of every tensor, names in alphabetical order, ``[n, F]`` in float64.

    >>> tensor_statistics(Batch.of({"b_1": torch.ones(2, 5)})).shape
    (2, 7)
    """
    named = batch.to("cpu").views
    weights = [rows_of(named[name].detach().double()) for name in sorted(named)]
    out: np.ndarray = torch.cat([sorted_statistics(w) for w in weights], 1).numpy()
    return out


def flattened(batch: Batch) -> np.ndarray:
    """All tensors of each network side by side, ``[n, all]`` in float32.

    Of networks of the zoo embedding, blocks and classifier, names in alphabetical order.
    """
    views, names = batch.views, list(batch.layout.shapes)
    order = {"embedding": 0, "blocks": 1, "classifier": 2}
    parts = {name.split(".")[0] for name in names}
    if batch.layout.depth and parts <= {*order}:
        names.sort(key=lambda name: (order[name.split(".")[0]], name))
    columns = [rows_of(views[name]) for name in names]
    return torch.cat(columns, 1).detach().cpu().float().numpy()


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
