"""Networks of any family as training data: invariant numbers of each checkpoint, and its weights.

The numbers come from the fingerprint of a checkpoint, which no symmetry of its family changes:
sizes of heads and neurons, and lengths of the rows that describe blocks, biases, embeddings and
heads, at eight steps of depth. There are as many for every family, width and depth. Predictors that
run networks, or read their tensors, also get the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.checkpoints.families import Model, OpenOptions, UnstatedFactError
from transformer_nfn.checkpoints.fingerprints import take_fingerprint
from transformer_nfn.errors import SpaceError
from transformer_nfn.models.batch import Batch, RowLayout
from transformer_nfn.models.invariants import FEATURES
from transformer_nfn.models.predictor import (
    CHECKPOINTS,
    INVARIANTS,
    OUTPUTS,
    Predictor,
    find,
    names,
)
from transformer_nfn.models.whole_network import ProbeFormat
from transformer_nfn.networks import Network
from transformer_nfn.prediction.runs import RunError
from transformer_nfn.zoo import Zoo

CLASSIFIER = "torch_classifier"
"""Family of classifiers around an `nn.TransformerEncoder`, whose parts are named by the user."""
MOST_WEIGHTS = 1 << 31
"""Numbers in the weights of all networks that are held in memory."""
Report = Callable[[dict[str, Any]], None]


def read_checkpoint(model: Model, reads: str) -> Batch:
    """What a predictor needs of an open checkpoint, see `Predictor.reads`: a batch of one."""
    features = model_features(model)[None]
    if reads == INVARIANTS:
        return Batch.of_rows(torch.zeros(1, 0), RowLayout({})).plus(FEATURES, features)
    named = model.read(model.names, torch.float32)
    tensors = {name: named[name][None] for name in model.description.tensors}
    return Batch.of(tensors, model.description).plus(FEATURES, features)


def check_format(model: Model, name: str, text: str) -> str:
    """`ProbeFormat.text` of a network; refused if it cannot be probed, or is not ``text``."""
    try:
        found = ProbeFormat.of(RowLayout(model.description.tensors, model.description)).text
    except SpaceError as error:
        raise RunError(f"whole_network cannot read '{name}': {error}") from error
    if text and found != text:
        raise RunError(
            f"'{name}' reads {found}: whole_network asks all networks by the same probes, and "
            f"others read {text}"
        )
    return found


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


def read_checkpoints(
    zoo: Zoo, rows: np.ndarray, model: str, text: str = "", report: Report | None = None
) -> Batch:
    """Networks of a zoo as a predictor reads them.

    Args:
        zoo: the zoo.
        rows: of it.
        model: name of the predictor.
        text: `ProbeFormat.text` that all must have, empty if none is known.
        report: called after every network.
    """
    networks: list[Batch] = []
    weights, reads = 0, find(model, CHECKPOINTS).reads
    for i, row in enumerate(rows.tolist()):
        with zoo.model(row) as opened:
            if reads == OUTPUTS:
                text = check_format(opened, f"{zoo.path}#{row}", text)
            weights += sum(torch.Size(shape).numel() for shape in opened.names.values())
            if reads != INVARIANTS and weights > MOST_WEIGHTS:
                raise RunError(
                    f"'{zoo.path}': {model} keeps all weights in memory, expected at most "
                    f"{MOST_WEIGHTS:,}, found more; train {names(CHECKPOINTS, reads=INVARIANTS)[0]}"
                )
            networks.append(read_checkpoint(opened, reads))
        if report is not None:
            report({"note": f"reads networks, {i + 1} of {len(rows)}", "done": i + 1})
    return Batch.join(networks)


def open_checkpoint(
    network: Network, families: Sequence[str], options: OpenOptions | None = None
) -> Model:
    """Open a network that a user named, if it is of a family that was trained on."""
    try:
        model = network.open_model(options)
    except UnstatedFactError:
        # A state dict alone does not show what stands around its encoder.
        if options or CLASSIFIER not in families:
            raise
        model = network.open_model(OpenOptions(family=CLASSIFIER))
    family = model.binding.family.name
    if family not in families:
        model.close()
        raise RunError(
            f"'{network.name}' is a {family} checkpoint: the predictor was trained on "
            f"{', '.join(families)}"
        )
    return model


def read_named(model: Model, name: str, predictor: Predictor) -> Batch:
    """Read a network that a user named, if its inputs are those of the training networks.

    Args:
        model: of `open_checkpoint`.
        name: as the user wrote it.
        predictor: that reads it.
    """
    if predictor.text:
        check_format(model, name, predictor.text)
    return read_checkpoint(model, predictor.reads)
