"""Is a predictor fooled? A second opinion, intervals that widen with strangeness, and a warning.

A predictor that reads weights may take a broken network for a good one. The guard asks the network
itself (`responses`) and looks how well its tensors fit each other (`tensor_fit`). It learns from
healthy networks and from damaged relatives whose accuracy was measured, and others calibrate it
(`guard_fit`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from transformer_nfn.files.errors import CheckpointError
from transformer_nfn.files.safetensors_file import read_tensors, write_tensors
from transformer_nfn.models.tensor_fit import tensor_fit
from transformer_nfn.prediction.dataset import Dataset
from transformer_nfn.prediction.guard_parts import Distance, Harm, Opinion, rebuilt, tensors_of
from transformer_nfn.prediction.records import RunError
from transformer_nfn.prediction.responses import AGREED, COUNT, input_shape, responses
from transformer_nfn.zoo import NetworkSizes

GUARD_FILE = "guard.safetensors"
SIGNS = 3


@dataclass(frozen=True)
class Judgement:
    """What a guard says of networks, ``[n]`` each.

    Attributes:
        accuracy: predictor and second opinion together.
        radius: half the width of the interval.
        strangeness: above 1 is a warning.
    """

    accuracy: Tensor
    radius: Tensor
    strangeness: Tensor


@dataclass(frozen=True)
class Guard:
    """See the module.

    Attributes:
        agreed: inputs that accurate networks agree on, ``[AGREED, tokens, width]``.
        opinion: accuracy from responses.
        harm: whether responses are those of a harmed network.
        distance: of how tensors fit each other, to healthy networks.
        weight: of the predictor beside the opinion, scalar.
        error: to be expected where predictor and opinion agree, and for each 1 that they differ
            by, ``[2]``.
        centre, width: of the signs of strangeness on healthy networks, ``[SIGNS]``.
        limit: above it a network is warned of, scalar.
        floor: below this accuracy there is nothing to warn of: harm would not show, scalar.
        quantile: of errors, in units of what is to be expected, scalar.
    """

    agreed: Tensor
    opinion: Opinion
    harm: Harm
    distance: Distance
    weight: Tensor
    error: Tensor
    centre: Tensor
    width: Tensor
    limit: Tensor
    floor: Tensor
    quantile: Tensor

    @staticmethod
    def blank(inputs: tuple[int, int], fits: int) -> Guard:
        """One that knows nothing yet: every tensor in its shape, zero.

        Args:
            inputs: tokens of an input and numbers in each.
            fits: numbers that `tensor_fit` gives.
        """
        parts = (Opinion.blank(COUNT), Harm.blank(COUNT), Distance.blank(fits))
        shapes = ((), (2,), (SIGNS,), (SIGNS,), (), (), ())
        return Guard(
            torch.zeros((AGREED, *inputs), dtype=torch.float64),
            *parts,
            *(torch.zeros(shape, dtype=torch.float64) for shape in shapes),
        )

    def judge(self, data: Dataset, arch: NetworkSizes, predicted: Tensor) -> Judgement:
        """What to say of networks of which the predictor says ``predicted``."""
        fit = tensor_fit(data.network)
        self._check_fit(arch, fit)
        answers = responses(data, arch, self.agreed)
        said = self.opinion(answers)
        apart = (predicted.double() - said).abs()
        signs = torch.stack([self.harm(answers), self.distance(fit), apart], -1)
        accuracy = self.weight * predicted + (1 - self.weight) * said
        strange = ((signs - self.centre) / self.width).amax(-1) / self.limit
        told = torch.where(accuracy > self.floor, strange, strange.clamp(max=1.0))
        reach = self.quantile * (self.error[0] + self.error[1] * apart)
        return Judgement(accuracy, reach.clamp(max=1.0), told)

    def reads(self, arch: NetworkSizes, trained: NetworkSizes) -> bool:
        """Whether networks of some sizes are such as it was fitted on."""
        return arch == trained

    def _check_fit(self, arch: NetworkSizes, fit: Tensor) -> None:
        """Refuses networks of other sizes than the guard's own tensors are of."""
        own = (tuple(self.agreed.shape[1:]), len(self.distance.frame.mean))
        asked = (input_shape(arch), fit.shape[1])
        if own != asked:
            raise RunError(
                f"{GUARD_FILE} of the run is of other networks: inputs {list(own[0])} and "
                f"{own[1]} numbers of tensors, expected {list(asked[0])} and {asked[1]}"
            )

    def save(self, folder: Path) -> None:
        """Writes it beside the predictor."""
        write_tensors(folder / GUARD_FILE, tensors_of(self))

    @staticmethod
    def load(folder: Path) -> Guard | None:
        """Reads what `save` wrote; None for a run that has none."""
        path = folder / GUARD_FILE
        if not path.is_file():
            return None
        try:
            tensors = read_tensors(path)[0]
        except CheckpointError as error:
            raise RunError(f"'{path}' is not readable: {error}") from error
        agreed, fits = (tensors.get(k) for k in ("agreed", "distance.frame.mean"))
        inputs = (0, 0) if agreed is None or agreed.ndim != 3 else tuple(agreed.shape[1:])
        like = Guard.blank((inputs[0], inputs[1]), 0 if fits is None else fits.numel())
        _check(tensors, tensors_of(like), str(path))
        return rebuilt(like, tensors)


def _check(found: dict[str, Tensor], like: dict[str, Tensor], where: str) -> None:
    """Refuses tensors that cannot be a guard's."""
    for name, expected in like.items():
        tensor = found.get(name)
        if tensor is None or tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            shown = None if tensor is None else f"{list(tensor.shape)} in {tensor.dtype}"
            raise RunError(
                f"'{where}': '{name}' expected {list(expected.shape)} in float64, found {shown}"
            )
        if not bool(tensor.isfinite().all()):
            raise RunError(f"'{where}': '{name}' holds values that are not finite")
    for name in ("width", "limit"):
        if not bool((found[name] > 0).all()):
            raise RunError(f"'{where}': '{name}' expected numbers above 0")
