"""Registry of predictors: how each is built, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from transformer_nfn import models
from transformer_nfn.models import map_network
from transformer_nfn.models.task_reader import SIZE_TEXTS
from transformer_nfn.models.whole_network.probes import MAX_TOKENS
from transformer_nfn.prediction.data import Dataset, in_batches
from transformer_nfn.prediction.runs import RUN_FILE, RunError, RunRecord
from transformer_nfn.prediction.target import Target
from transformer_nfn.zoo import NetworkSizes


def _transformer_nfn(data: Dataset, **options: Any) -> nn.Module:
    components = options.pop("components", None)
    sizes: dict[str, Any] = data.sizes
    assert data.block_space is not None
    if components is not None:
        sizes = {part: n if part in components else None for part, n in sizes.items()}
    return models.TransformerNFN(
        data.block_space,
        len(data.network["blocks"]),
        options.pop("channels", [10]),
        encoder=components is None or "encoder" in components,
        **sizes,
        **{"pool": "sum", "init": "xavier", **options},
    )


def _gated_nfn(data: Dataset, **options: Any) -> nn.Module:
    return _transformer_nfn(
        data, **{"pool": "mean", "init": "unit", "gated": True, "quadratic": True, **options}
    )


def _baseline(name: str) -> Callable[..., nn.Module]:
    def build(data: Dataset, **options: Any) -> nn.Module:
        module: nn.Module = getattr(models, name)(
            data.block_space, len(data.network["blocks"]), **data.sizes, **options
        )
        return module

    return build


def _of_task(name: str) -> Callable[..., nn.Module]:
    def build(data: Dataset, **options: Any) -> nn.Module:
        sizes = whole_network_sizes(data)
        module: nn.Module = getattr(models, name)(data.block_space, **(sizes | options))
        return module

    return build


def whole_network_sizes(data: Dataset) -> dict[str, Any]:
    """Arguments of `WholeNetwork` and other readers of a task that networks determine."""
    embedding = data.network.get("embedding")
    first, last = data.network["blocks"][0]["W_Q"], data.network["classifier"]
    assert isinstance(last, Mapping)
    assert embedding is None or isinstance(embedding, Mapping)
    return {
        "tokens": min(data.tokens or MAX_TOKENS, MAX_TOKENS),
        "width": first.shape[3] if embedding is None else embedding["W"].shape[1],
        "classes": last["W_2"].shape[-1],
        "images": embedding is not None,
    }


MANY_NETWORKS = 1024
"""From so many training networks of a size on, probes of `WholeNetwork` learn with its heads."""
LEARNED_PROBES = {"probes": 128, "hidden": 64}
"""Sizes of `WholeNetwork` then: each step asks the probes, so there are fewer."""


def _whole_network(data: Dataset, **options: Any) -> nn.Module:
    if data.block_space is None:
        return models.WholeCheckpoint.of(data.network, **options)
    many = len(data) >= MANY_NETWORKS
    module = _of_task("WholeNetwork")(data, **(LEARNED_PROBES if many else {}) | options)
    assert isinstance(module, models.WholeNetwork)
    module.learn_probes = many and module.probes is not None
    return module


NEURAL: Mapping[str, tuple[str, Callable[..., nn.Module]]] = {
    "whole_network": ("WholeNetwork", _whole_network),
    "transformer_nfn": ("TransformerNFN", _transformer_nfn),
    "transformer_nfn_gated": ("TransformerNFN", _gated_nfn),
    "mlp": ("MLP", _baseline("MLP")),
    "statnn": ("StatNN", _baseline("StatNN")),
    "probegen": ("ProbeGen", _of_task("ProbeGen")),
    "hidden_probe": ("HiddenProbe", _of_task("HiddenProbe")),
    "neural_graph": ("NeuralGraph", _of_task("NeuralGraph")),
}
TABULAR: Mapping[str, str] = {
    "xgboost": "XGBoostPredictor",
    "lightgbm": "LightGBMPredictor",
    "random_forest": "RandomForestPredictor",
    "invariant_boosting": "InvariantBoosting",
    "invariant_mlp": "InvariantMLP",
    "statistics_linear": "StatisticsLinear",
    "statistics_mlp": "StatisticsMLP",
    "statistics_boosting": "StatisticsBoosting",
    "weights_mlp": "WeightsMLP",
}
ALL_CHECKPOINTS = ("whole_network",)
"""Predictors that also train on the other checkpoints of the training runs."""
ANY_SIZE = ("whole_network", "probegen", "hidden_probe", "neural_graph")
"""Predictors that read networks of any width, number of heads and depth."""
PREDICTORS = (*NEURAL, *TABULAR)
"""Names of all predictors."""
SMALLEST_SHARE = 1e-6
"""Of a class, so that shares that are all 0 are equal probabilities."""
PAPER_MODELS = ("xgboost", "lightgbm", "random_forest", "mlp", "statnn", "transformer_nfn")


def check_name(name: str) -> None:
    """Reject an unknown predictor, listing the known ones."""
    if name not in PREDICTORS:
        raise RunError(f"there is no model '{name}'; there are {', '.join(PREDICTORS)}")


def module_builder(name: str, data: Dataset, options: Mapping[str, Any]) -> Callable[[], nn.Module]:
    """Return a function that builds a fresh neural predictor for networks like these."""
    _, make = NEURAL[name]
    return lambda: make(data, **dict(options))


def tabular_class(name: str) -> Any:
    """Class of a predictor with a ``fit`` method."""
    return getattr(models, TABULAR[name])


def prepared(module: Any, data: Dataset) -> Dataset:
    """Add what every seed would have to compute of the networks, if the model has such."""
    prepare = getattr(module, "prepared", None)
    return data if prepare is None else replace(data, network=prepare(data.network))


@dataclass(frozen=True)
class Predictor:
    """A fitted predictor, neural or tabular."""

    name: str
    inner: Any

    @torch.no_grad()
    def predict(self, data: Dataset) -> Tensor:
        """Predicted accuracy of each network, ``[n]`` in float32; NaN where numbers overflow."""
        if self.name in TABULAR:
            out: Tensor = self.inner.predict(data.network)
            return out.float().clamp(0, 1)
        if not len(data):
            return torch.empty(0)
        self.inner.eval()
        device = next(self.inner.parameters())

        def logits(network: Mapping[str, Any]) -> Tensor:
            out: Tensor = self.inner.logits(map_network(network, lambda w: w.to(device)))
            return out

        found = in_batches(logits, data.network, data).cpu()
        return torch.sigmoid(torch.where(found.isinf(), torch.nan, found))

    def misfit(self, sizes: NetworkSizes, trained: NetworkSizes) -> str | None:
        """Why this predictor cannot read networks of some sizes; None if it can.

        A predictor reads the sizes it was trained on, unless its class has a ``misfit`` method.

        Args:
            sizes: of the networks in question.
            trained: of the training networks.
        """
        if hasattr(self.inner, "misfit"):
            reason: str | None = self.inner.misfit(sizes, trained)
            return reason
        expected, actual = trained.to_json(), sizes.to_json()
        for size, text in SIZE_TEXTS.items():
            if expected[size] != actual[size]:
                return f"expected {text.format(expected[size])}, found {actual[size]}"
        return None

    def prepared(self, data: Dataset) -> Dataset:
        """Add what every seed would have to compute of the networks, if the model has such."""
        return prepared(self.inner, data)

    def to(self, device: str) -> Predictor:
        """Move to a device; trees stay on the CPU."""
        return self if self.name in TABULAR else Predictor(self.name, self.inner.to(device))

    @property
    def num_parameters(self) -> int | None:
        """Number of trainable parameters; None for trees."""
        if self.name in TABULAR:
            count: int | None = self.inner.num_parameters
            return count
        return sum(int(p.numel()) for p in self.inner.parameters())

    def save(self, folder: Path) -> None:
        """Write to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.name in TABULAR:
            self.inner.save(folder)
        else:
            self.inner.save_pretrained(folder)

    @staticmethod
    def load(name: str, folder: Path, *, own: bool = False) -> Predictor:
        """Read what `save` wrote; ``own`` for a predictor of checkpoints of any family."""
        if not folder.is_dir():
            raise RunError(f"the run keeps no predictor: there is no folder '{folder}'")
        if name in TABULAR:
            return Predictor(name, tabular_class(name).load(folder))
        class_name = "WholeCheckpoint" if own else NEURAL[name][0]
        return Predictor(name, getattr(models, class_name).from_pretrained(folder))


def load_predictors(run: Path, record: RunRecord) -> list[Predictor]:
    """Load the predictor of every seed of a run."""
    if record.model not in PREDICTORS:
        raise RunError(
            f"'{run / RUN_FILE}': 'model' expected one of {', '.join(PREDICTORS)}, found "
            f"{record.model!r}"
        )
    own = "families" in record.zoo
    return [
        Predictor.load(record.model, run / f"seed-{row['seed']}", own=own) for row in record.seeds
    ]


def seed_predictions(predictors: Sequence[Predictor], data: Dataset) -> Tensor:
    """Prediction of each seed of a run, ``[seeds, n]`` in float64."""
    ready = predictors[0].prepared(data)
    return torch.stack([p.predict(ready) for p in predictors]).double()


def class_folders(run: Path, target: Target) -> list[Path]:
    """Folder of the run of each class that has predictors; none unless classes are predicted."""
    return [run / f"class-{target.classes.index(name)}" for name in target.outputs]


def class_probabilities(predictors: Sequence[Sequence[Predictor]], data: Dataset) -> np.ndarray:
    """Probability of each class by each seed, ``[seeds, classes, n]``.

    Args:
        predictors: for each class one per seed; of two classes for the second only.
        data: the networks.
    """
    belongs = np.stack([seed_predictions(each, data).numpy() for each in predictors], 1)
    if belongs.shape[1] == 1:
        return np.concatenate([1 - belongs, belongs], 1)
    belongs = np.maximum(belongs, SMALLEST_SHARE)
    return np.asarray(belongs / belongs.sum(1, keepdims=True))


def mean_prediction(predictors: Sequence[Predictor], data: Dataset) -> Tensor:
    """Mean prediction over seeds, ``[n]`` in float64."""
    return seed_predictions(predictors, data).mean(0)
