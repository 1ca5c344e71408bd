"""Does a network fit what a predictor was trained on? The one place that asks the predictor."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.networks import Network
from transformer_nfn.prediction.predictors import Predictor
from transformer_nfn.prediction.records import RunError
from transformer_nfn.zoo import NetworkSizes

_BLOCK = re.compile(r"(?:blocks|encoder)\.(\d{1,9})\..+")
NAMED = 3


@dataclass(frozen=True)
class FittingNetwork:
    """A network that a predictor reads.

    Attributes:
        sizes: of the network.
        weights: under the names of ``sizes.space``, each ``[*axes]`` in float32.
        left_out: tensors of the file that are no part of what was read.
    """

    sizes: NetworkSizes
    weights: dict[str, Tensor]
    left_out: tuple[str, ...]

    @property
    def note(self) -> str | None:
        """One sentence about what was left out; None where everything was read."""
        if not self.left_out:
            return None
        names = ", ".join(f"'{name}'" for name in self.left_out[:NAMED])
        more = ", …" if len(self.left_out) > NAMED else ""
        many = len(self.left_out) > 1
        return (
            f"{len(self.left_out)} {'tensors are' if many else 'tensor is'} left out ({names}"
            f"{more}), which the zoo's networks do not have: this is the prediction for the "
            f"network without {'them' if many else 'it'}"
        )


def check_sizes(
    where: str, found: NetworkSizes, trained: NetworkSizes, predictors: Sequence[Predictor]
) -> None:
    """Raises `RunError` unless every predictor reads networks of these sizes.

    Args:
        where: what the error calls the network or zoo.
        found: its sizes.
        trained: those of the networks the predictors were trained on.
        predictors: of the run.
    """
    for predictor in predictors:
        misfit = predictor.misfit(found, trained)
        if misfit is not None:
            raise RunError(f"'{where}' is of another architecture: {misfit}")


def read_fitting(
    network: Network, trained: NetworkSizes, predictors: Sequence[Predictor]
) -> FittingNetwork:
    """Read a network, or raise an error that names what the predictors cannot read.

    Args:
        network: with the names of the zoo's networks, or those of the authors' state dicts.
        trained: the sizes of the networks the predictors were trained on.
        predictors: of the run.
    """
    where = network.name
    with network.as_zoo_network(trained) as opened:
        sizes = opened.sizes
        check_sizes(where, sizes, trained, predictors)
        rest = opened.unread
        for name in rest:
            block = _BLOCK.fullmatch(name)
            if block is not None and int(block[1]) >= sizes.blocks:
                raise RunError(
                    f"'{where}' is of another architecture: '{name}' is of a block that a network "
                    f"of {sizes.blocks} blocks does not have"
                )
        weights = {name: tensor.float() for name, tensor in opened.read().items()}
        changed = opened.changed_positions
    if changed is not None:
        raise RunError(f"'{where}' is of another architecture: {changed}")
    for name, tensor in weights.items():
        if not bool(torch.isfinite(tensor).all()):
            raise RunError(f"'{where}': '{name}' holds values that are not finite in float32")
    return FittingNetwork(sizes, weights, tuple(rest))
