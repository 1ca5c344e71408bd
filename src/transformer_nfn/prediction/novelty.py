"""Is a network outside what a predictor has seen? Distance to the training networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from transformer_nfn.errors import CheckpointError
from transformer_nfn.functional.zoo_network import sinusoids
from transformer_nfn.io.tensor_files import read_tensors, write_tensors
from transformer_nfn.models.network import map_network
from transformer_nfn.models.statistics import signed_log
from transformer_nfn.models.whole_network import whole_invariants
from transformer_nfn.models.whole_network.model import INVARIANTS
from transformer_nfn.models.whole_network.probes import MAX_TOKENS
from transformer_nfn.prediction.dataset import Dataset
from transformer_nfn.prediction.records import RunError

SEEN_FILE = "seen.safetensors"
MAX_KEPT = 1024
"""Training networks that are kept: more would make files of many megabytes, and say little more."""
QUANTILE = 0.99
SLACK = 1.25
ANY_SIZE, COUNTED = "any_size", "networks"
"""What a file says beside its tensors."""
_TENSORS = ("rows", "mean", "std", "limit")


@dataclass(frozen=True)
class Seen:
    """What the training networks look like.

    Attributes:
        rows: their features, standardised, ``[n, F]``.
        mean: of the features before that, ``[F]``.
        std: of the features before that, ``[F]``.
        limit: the distance to the nearest other one that 1 % of them exceed, and a quarter more.
        any_size: whether the features are those that networks of all sizes have.
    """

    rows: Tensor
    mean: Tensor
    std: Tensor
    limit: Tensor
    any_size: bool = False

    @staticmethod
    def of(train: Sequence[Dataset], *, any_size: bool = False) -> Seen:
        """Learns it from the training networks.

        Args:
            train: a data set for each kind.
            any_size: whether networks of other sizes will be asked about too.
        """
        total = sum(map(len, train))
        kept = [len(data) * min(total, MAX_KEPT) // total for data in train]
        raw = torch.cat(
            [
                _features(data.take(torch.linspace(0, len(data) - 1, n).long()), any_size)
                for n, data in zip(kept, train, strict=True)
            ]
        )
        mean, std = raw.mean(0), raw.std(0).clamp_min(1e-6)
        rows = (raw - mean) / std
        apart = torch.cdist(rows, rows)
        apart.fill_diagonal_(float("inf"))
        limit = SLACK * torch.quantile(apart.min(1).values, QUANTILE)
        return Seen(rows, mean, std, limit, any_size)

    def novelty(self, data: Dataset) -> Tensor:
        """Distance to the nearest training network over the limit; above 1 is outside."""
        raw = _features(data, self.any_size)
        if raw.shape[1] != len(self.mean):
            raise RunError(
                f"{SEEN_FILE} of the run is of networks with {len(self.mean)} features, found "
                f"{raw.shape[1]}"
            )
        rows = (raw - self.mean) / self.std
        return torch.cdist(rows, self.rows).min(1).values / self.limit

    def save(self, folder: Path) -> None:
        """Writes it beside the predictor; rows by half precision, which no distance shows."""
        tensors = {name: getattr(self, name) for name in _TENSORS} | {"rows": self.rows.half()}
        about = {COUNTED: str(len(self.rows))} | ({ANY_SIZE: "yes"} if self.any_size else {})
        write_tensors(folder / SEEN_FILE, tensors, about)

    @staticmethod
    def load(folder: Path) -> Seen:
        """Reads what `save` wrote."""
        path = folder / SEEN_FILE
        try:
            tensors, metadata = read_tensors(path)
            if "rows" in tensors and tensors["rows"].dtype == torch.float16:
                tensors["rows"] = tensors["rows"].float()
            seen = Seen(**tensors, any_size=ANY_SIZE in metadata)
        except (CheckpointError, TypeError) as error:
            raise RunError(f"'{path}' is not readable: {error}") from error
        seen.check(str(path))
        found = str(len(seen.rows))
        told = metadata.get(COUNTED, found)
        if told != found:
            raise RunError(f"'{path}': 'rows' expected {told[:20]} networks, found {found}")
        return seen

    def check(self, where: str) -> None:
        """Refuses tensors that cannot be what `of` learned."""
        width = self.rows.shape[1] if self.rows.ndim == 2 else 0
        shapes = {"rows": (len(self.rows) if width else 0, width), "mean": (width,),
                  "std": (width,), "limit": ()}  # fmt: skip
        for name, shape in shapes.items():
            found = getattr(self, name)
            if tuple(found.shape) != shape or 0 in shape or found.dtype != torch.float32:
                raise RunError(
                    f"'{where}': '{name}' expected shape {list(shape)} in float32, found "
                    f"{list(found.shape)} in {str(found.dtype).removeprefix('torch.')}"
                )
            if not bool(found.isfinite().all()):
                raise RunError(f"'{where}': '{name}' holds values that are not finite")
        if not float(self.limit) > 0 or not bool((self.std > 0).all()):
            raise RunError(f"'{where}': 'std' and 'limit' expected numbers above 0")


def _features(data: Dataset, any_size: bool) -> Tensor:
    """Invariants of the networks on a logarithmic scale, so that no unit dominates."""
    from transformer_nfn.models import invariant_features

    computed = cast("Mapping[str, Any]", data.network).get(INVARIANTS)
    if any_size and computed is not None:
        return torch.as_tensor(computed).float().cpu()
    if any_size:
        width = data.network["blocks"][0]["W_Q"].shape[3]
        places = None if data.tokens is None else sinusoids(min(data.tokens, MAX_TOKENS), width)
        network = map_network(data.network, lambda w: w.cpu())
        return signed_log(whole_invariants(network, places)).float()
    raw = invariant_features(data.network, data.block_space).float().cpu()
    return torch.sign(raw) * torch.log1p(raw.abs() * 1e3)
