"""Which predictors there are, and how each is made, fitted, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transformer_nfn import models
from transformer_nfn.models import map_network
from transformer_nfn.models.whole_network.probes import MAX_TOKENS
from transformer_nfn.prediction.dataset import Dataset, in_batches
from transformer_nfn.prediction.manner import prepared
from transformer_nfn.prediction.records import RunError
from transformer_nfn.zoo import NetworkSizes

Build = Callable[[], nn.Module]


def _sizes(data: Dataset, components: list[str] | None) -> dict[str, Any]:
    sizes: dict[str, Any] = data.sizes
    if components is not None:
        sizes = {part: n if part in components else None for part, n in sizes.items()}
    return sizes


def _transformer_nfn(data: Dataset, **options: Any) -> nn.Module:
    components = options.pop("components", None)
    return models.TransformerNFN(
        data.block_space,
        len(data.network["blocks"]),
        options.pop("channels", [10]),
        encoder=components is None or "encoder" in components,
        **_sizes(data, components),
        **{"pool": "sum", "init": "xavier", **options},
    )


def _gated_nfn(data: Dataset, **options: Any) -> nn.Module:
    return _transformer_nfn(
        data, **{"pool": "mean", "init": "unit", "gated": True, "quadratic": True, **options}
    )


def _plain(kind: str) -> Callable[..., nn.Module]:
    def build(data: Dataset, **options: Any) -> nn.Module:
        made: nn.Module = getattr(models, kind)(
            data.block_space, len(data.network["blocks"]), **data.sizes, **options
        )
        return made

    return build


def _whole_network(data: Dataset, **options: Any) -> nn.Module:
    return models.WholeNetwork(data.block_space, **(whole_network_sizes(data) | options))


def whole_network_sizes(data: Dataset) -> dict[str, Any]:
    """The arguments of `WholeNetwork` that networks like these determine."""
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


NEURAL: Mapping[str, tuple[str, Callable[..., nn.Module]]] = {
    "whole_network": ("WholeNetwork", _whole_network),
    "transformer_nfn": ("TransformerNFN", _transformer_nfn),
    "transformer_nfn_gated": ("TransformerNFN", _gated_nfn),
    "mlp": ("MLP", _plain("MLP")),
    "statnn": ("StatNN", _plain("StatNN")),
}
TABULAR: Mapping[str, str] = {
    "xgboost": "XGBoostPredictor",
    "lightgbm": "LightGBMPredictor",
    "random_forest": "RandomForestPredictor",
    "invariant_boosting": "InvariantBoosting",
    "invariant_mlp": "InvariantMLP",
}
ALL_CHECKPOINTS = ("whole_network",)
"""Predictors that also learn from the other checkpoints of the runs they learn from."""
ANY_SIZE = ("whole_network",)
"""Predictors that read networks of any width, number of heads and depth."""
PREDICTORS = (*NEURAL, *TABULAR)
"""Names of all predictors."""
SIZE_WORDS: Mapping[str, str] = {
    "blocks": "{} blocks",
    "patch": "{} pixels in a patch",
    "classes": "{} classes",
    "d_model": "width {}",
    "heads": "{} heads",
    "d_ff": "{} neurons",
    "tokens": "{} tokens",
}
"""How the sizes of a network are told, the most telling first."""
PAPER_MODELS = ("xgboost", "lightgbm", "random_forest", "mlp", "statnn", "transformer_nfn")


def check_name(name: str) -> None:
    """Refuses a predictor that does not exist, naming those that do."""
    if name not in PREDICTORS:
        raise RunError(f"there is no model '{name}'; there are {', '.join(PREDICTORS)}")


def module_builder(name: str, data: Dataset, options: Mapping[str, Any]) -> Build:
    """How to make a fresh neural predictor for networks like these."""
    _, make = NEURAL[name]
    return lambda: make(data, **dict(options))


def tabular_class(name: str) -> Any:
    """The class of a predictor that fits itself."""
    return getattr(models, TABULAR[name])


def seed_predictions(predictors: Sequence[Predictor], data: Dataset) -> Tensor:
    """What each seed of a run says, ``[seeds, n]`` in float64."""
    ready = predictors[0].prepared(data)
    return torch.stack([p.predict(ready) for p in predictors]).double()


def mean_prediction(predictors: Sequence[Predictor], data: Dataset) -> Tensor:
    """What the seeds of a run say together, ``[n]`` in float64."""
    return seed_predictions(predictors, data).mean(0)


@dataclass(frozen=True)
class Predictor:
    """A fitted predictor of either kind, under one interface."""

    name: str
    inner: Any

    @torch.no_grad()
    def predict(self, data: Dataset) -> Tensor:
        """Predicted accuracy of each network, ``[n]`` in float32."""
        if self.name in TABULAR:
            out: Tensor = self.inner.predict(data.network)
            return out.float().clamp(0, 1)
        if not len(data):
            return torch.empty(0)
        self.inner.eval()
        place = next(self.inner.parameters())

        def logits(network: Mapping[str, Any]) -> Tensor:
            found: Tensor = self.inner.logits(map_network(network, lambda w: w.to(place)))
            return found

        return torch.sigmoid(in_batches(logits, data.network, data)).cpu()

    def misfit(self, found: NetworkSizes, trained: NetworkSizes) -> str | None:
        """Why this predictor cannot read networks of some sizes; None where it can.

        A predictor reads the sizes it was trained on. One that reads more has a method
        ``misfit(found, trained)`` of its own, which answers here.

        Args:
            found: the sizes of the networks in question.
            trained: those of the networks it was trained on.
        """
        own = getattr(self.inner, "misfit", None)
        if own is not None:
            answer: str | None = own(found, trained)
            return answer
        wanted, there = trained.to_json(), found.to_json()
        for size, words in SIZE_WORDS.items():
            if wanted[size] != there[size]:
                return f"expected {words.format(wanted[size])}, found {there[size]}"
        return None

    def prepared(self, data: Dataset) -> Dataset:
        """The networks with what every seed would have to compute of them, where it is much."""
        return prepared(self.inner, data)

    def on_cpu(self) -> Predictor:
        """The same, where files and users' networks are."""
        return self if self.name in TABULAR else Predictor(self.name, self.inner.cpu())

    @property
    def num_parameters(self) -> int | None:
        """Trainable numbers; None for trees."""
        if self.name in TABULAR:
            count: int | None = self.inner.num_parameters
            return count
        return sum(int(p.numel()) for p in self.inner.parameters())

    def save(self, folder: Path) -> None:
        """Writes the predictor into a folder of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.name in TABULAR:
            self.inner.save(folder)
        else:
            self.inner.save_pretrained(folder)

    @staticmethod
    def load(name: str, folder: Path) -> Predictor:
        """Reads what `save` wrote."""
        check_name(name)
        if not folder.is_dir():
            raise RunError(f"the run keeps no predictor: there is no folder '{folder}'")
        if name in TABULAR:
            return Predictor(name, tabular_class(name).load(folder))
        kind, _ = NEURAL[name]
        return Predictor(name, getattr(models, kind).from_pretrained(folder))
