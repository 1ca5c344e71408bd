"""Networks of any family as training data: a row of invariant numbers for each checkpoint.

The numbers come from the fingerprint of a checkpoint, which no symmetry of its family changes:
sizes of heads and neurons, and lengths of the rows that describe blocks, biases, embeddings and
heads, at eight steps of depth. There are as many for every family, width and depth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.checkpoints.families import Model
from transformer_nfn.checkpoints.fingerprints import take_fingerprint
from transformer_nfn.models.invariants import FEATURES
from transformer_nfn.networks import Network
from transformer_nfn.prediction.data import (
    FRACTIONS,
    MIN_NETWORKS,
    Dataset,
    Parts,
    Selection,
    check_parts,
)
from transformer_nfn.prediction.recipe_shift import COLUMN as RECIPE_COLUMN
from transformer_nfn.prediction.runs import RunError
from transformer_nfn.prediction.target import ACCURACY, ACCURACY_COLUMN, Target, target_values
from transformer_nfn.zoo import ModelZoo

MODELS = ("invariant_mlp", "invariant_boosting")
"""Predictors that read networks of any family."""
OWN_TASK = "own networks"
RUN = "run"
"""Column of a zoo whose equal values stay in one part: checkpoints of one training."""
Report = Callable[[dict[str, Any]], None]


def model_features(model: Model) -> Tensor:
    """Numbers of a checkpoint that no symmetry of its family changes, ``[F]`` in float64.

    >>> from transformer_nfn.checkpoints import open_model
    >>> from transformer_nfn.testing import write_example_checkpoint
    >>> with open_model(write_example_checkpoint("model")) as model:
    ...     model_features(model).dtype
    torch.float64
    """
    found = take_fingerprint(model)
    lengths = [
        np.log(np.linalg.norm(rows.astype(np.float64), axis=-1) + 1e-12).ravel()
        for rows in (found.sketch, found.constants, found.ends)
    ]
    shape = np.log([found.width, found.depth, found.weights])
    return torch.from_numpy(np.concatenate([shape, found.sizes.astype(float).ravel(), *lengths]))


def load_own_rows(
    zoo: ModelZoo, rows: np.ndarray, target: Target, report: Report | None = None
) -> Dataset:
    """Rows of a zoo of checkpoints as training data."""
    features = []
    for i, row in enumerate(rows.tolist()):
        with zoo[row] as model:
            features.append(model_features(model))
        if report is not None:
            report({"note": f"reads networks, {i + 1} of {len(rows)}", "done": i + 1})
    values = target_values(zoo, target.column, rows)
    runs = zoo.table[_run_column(zoo)][rows].astype(str)
    columns = {"run": runs, "row": np.asarray(rows, dtype=np.int64)}
    recipe = {n: c for n, c in zoo.targets.items() if n not in (target.column, ACCURACY_COLUMN, RUN)}
    columns |= {RECIPE_COLUMN + name: column[rows] for name, column in recipe.items()}
    if target != ACCURACY:
        columns["target"] = values if target.kind == "class" else target.measured(values)
    encoded = torch.as_tensor(target.encode(values), dtype=torch.float32)
    network: Any = {FEATURES: torch.stack(features)}
    return Dataset(None, network, encoded, columns, target=target)


def load_own_networks(
    zoo: ModelZoo, selection: Selection, report: Report | None = None
) -> Parts:
    """Read the networks of a zoo of checkpoints and split them 70/15/15; runs stay together."""
    rows = np.arange(len(zoo))
    if len(rows) < MIN_NETWORKS:
        raise RunError(
            f"not enough networks: '{zoo.path}' has {len(rows)}, {MIN_NETWORKS} are needed"
        )
    target = Target.of(selection.target, target_values(zoo, selection.target, rows))
    seed, by = selection.split_seed, _run_column(zoo)
    train, val, test = zoo.split(rows, FRACTIONS, seed=seed, by=by)
    data = load_own_rows(zoo, rows, target, report)
    return check_parts(Parts(data.take(train), data.take(val), data.take(test)))


def describe_own_zoo(zoo: ModelZoo) -> dict[str, Any]:
    """Description of a zoo of checkpoints for the record of a run."""
    return {
        "name": zoo.path.name,
        "task": OWN_TASK,
        "networks": len(zoo),
        "runs": len(set(zoo.table[_run_column(zoo)].astype(str))),
        "seeds": "unknown",
        "families": dict(Counter(zoo.table["family"].tolist())),
    }


def _run_column(zoo: ModelZoo) -> str:
    """Column whose equal values are checkpoints of one training; each its own where none is."""
    return RUN if RUN in zoo.targets else "network"


def own_features(network: Network, families: Sequence[str]) -> Tensor:
    """Features of a network that a user named, if it is of a family that was trained on."""
    model = network.open_model()
    if model is None:
        raise RunError(
            f"'{network.name}' is no checkpoint of a known family; the predictor reads "
            f"{', '.join(families)}"
        )
    with model:
        family = model.binding.family.name
        if family not in families:
            raise RunError(
                f"'{network.name}' is a {family} checkpoint: the predictor was trained on "
                f"{', '.join(families)}"
            )
        return model_features(model)
