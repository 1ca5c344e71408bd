"""Is a predictor fooled? A second opinion, intervals that widen with strangeness, and a warning.

A predictor that reads weights may take a broken network for a good one. The guard asks the network
itself (`responses`) and looks how well its tensors fit each other (`tensor_fit`). It learns from
healthy networks and from damaged relatives whose accuracy was measured, and others calibrate it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from transformer_nfn.files.errors import CheckpointError
from transformer_nfn.files.safetensors_file import read_tensors, write_tensors
from transformer_nfn.models.tensor_fit import tensor_fit
from transformer_nfn.prediction.damaged import Damaged
from transformer_nfn.prediction.dataset import Dataset, Parts
from transformer_nfn.prediction.guard_parts import Distance, Frame, Harm, Opinion
from transformer_nfn.prediction.intervals import LEVEL, radius, rank_quantile
from transformer_nfn.prediction.records import RunError
from transformer_nfn.prediction.responses import responses
from transformer_nfn.zoo import NetworkSizes

GUARD_FILE = "guard.safetensors"
ALARM = 0.04
"""Of healthy networks, the share that may be warned of."""
HARM = 0.1
"""A network is harmed that lost this much accuracy, and good that has this much above chance."""
DAMAGED_LEVEL = 0.95
"""Of damaged networks of the kinds seen, the share that intervals hold for."""
SMALLEST = 0.005
"""Of an expected error."""
FEWEST = 20
_OWN = ("weight", "error", "centre", "width", "limit", "floor", "quantile")


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
        opinion: accuracy from responses.
        harm: whether responses are those of a harmed network.
        distance: of how tensors fit each other, to healthy networks.
        weight: of the predictor beside the opinion, scalar.
        error: to be expected where predictor and opinion agree, and for each 1 that they differ
            by, ``[2]``.
        centre, width: of the three signs of strangeness on healthy networks, ``[3]``.
        limit: above it a network is warned of, scalar.
        floor: below this accuracy there is nothing to warn of: harm would not show, scalar.
        quantile: of errors, in units of what is to be expected, scalar.
    """

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
    def of(
        parts: Parts,
        damaged: Damaged,
        arch: NetworkSizes,
        predicted: Tensor,
        predicted_damaged: Tensor,
    ) -> Guard:
        """Learns from training networks, healthy and damaged, and calibrates on validation ones.

        Args:
            parts: healthy networks, on the CPU.
            damaged: their relatives.
            arch: the sizes of all of them.
            predicted: what the predictor says of ``parts.val``.
            predicted_damaged: what it says of ``damaged.val``.
        """
        chance = 1 / arch.classes
        answers = responses(parts.train, arch)
        harmed_answers = responses(damaged.train, arch)
        good = parts.train.accuracy > chance + HARM
        harmed = damaged.train_drop > HARM
        for what, there in (("trained networks above chance", good), ("harmed networks", harmed)):
            if int(there.sum()) < FEWEST:
                raise RunError(f"not enough {what}: {int(there.sum())}, {FEWEST} are needed")
        opinion = Opinion.of(
            torch.cat([answers, harmed_answers]),
            torch.cat([parts.train.accuracy, damaged.train.accuracy]).double(),
            _even(len(answers), len(harmed_answers)),
        )
        harm = Harm.of(answers[good], harmed_answers[harmed])
        distance = Distance.of(tensor_fit(parts.train.take(good.nonzero()[:, 0]).network))
        plain = torch.zeros(())
        blank = Guard(
            opinion, harm, distance, plain, torch.zeros(2), torch.zeros(3), torch.ones(3),
            plain, plain, plain,
        )  # fmt: skip
        return blank._calibrated(
            parts.val, damaged.val, arch, predicted.double(), predicted_damaged.double(), chance
        )

    def _calibrated(
        self,
        healthy: Dataset,
        harmed: Dataset,
        arch: NetworkSizes,
        predicted: Tensor,
        predicted_harmed: Tensor,
        chance: float,
    ) -> Guard:
        said, signs = self._read(healthy, arch, predicted)
        said_harmed, signs_harmed = self._read(harmed, arch, predicted_harmed)
        truth, truth_harmed = healthy.accuracy.double(), harmed.accuracy.double()
        weight = _share(
            torch.cat([predicted, predicted_harmed]),
            torch.cat([said, said_harmed]),
            torch.cat([truth, truth_harmed]),
            _even(len(said), len(said_harmed)),
        )
        mixed = weight * predicted + (1 - weight) * said
        mixed_harmed = weight * predicted_harmed + (1 - weight) * said_harmed
        # Harm brings accuracy down to chance: where that is within reach anyway, nobody is misled.
        floor = torch.tensor(chance) + radius((truth - mixed).numpy()) / 2
        above = mixed > floor
        known = signs[above] if int(above.sum()) >= FEWEST else signs
        centre = known.quantile(0.5, 0)
        width = (known.quantile(0.95, 0) - centre).clamp(min=1e-6)
        strange = ((signs - centre) / width).amax(-1)
        alarming = torch.where(above, strange, -torch.inf)
        limit = _at_rank(alarming, 1 - ALARM)
        error = _expected_error(
            torch.cat([signs, signs_harmed])[:, -1],
            torch.cat([truth - mixed, truth_harmed - mixed_harmed]).abs(),
            _even(len(said), len(said_harmed)),
        )
        ratios = (truth - mixed).abs() / (error[0] + error[1] * signs[:, -1])
        ratios_harmed = (truth_harmed - mixed_harmed).abs() / (
            error[0] + error[1] * signs_harmed[:, -1]
        )
        # Wide enough for healthy networks as for damaged ones of the kinds seen.
        quantile = max(
            rank_quantile(ratios.numpy(), LEVEL),
            rank_quantile(ratios_harmed.numpy(), DAMAGED_LEVEL),
        )
        return Guard(
            self.opinion, self.harm, self.distance, weight, error, centre, width,
            limit, floor, torch.tensor(min(quantile, 1 / float(error[0]))),
        )  # fmt: skip

    def _read(self, data: Dataset, arch: NetworkSizes, predicted: Tensor) -> tuple[Tensor, Tensor]:
        """The second opinion ``[n]``, and the signs of strangeness ``[n, 3]``."""
        answers = responses(data, arch)
        said = self.opinion(answers)
        signs = [self.harm(answers), self.distance(tensor_fit(data.network))]
        return said, torch.stack([*signs, (predicted - said).abs()], -1)

    def judge(self, data: Dataset, arch: NetworkSizes, predicted: Tensor) -> Judgement:
        """What to say of networks of which the predictor says ``predicted``."""
        said, signs = self._read(data, arch, predicted.double())
        accuracy = self.weight * predicted + (1 - self.weight) * said
        strange = ((signs - self.centre) / self.width).amax(-1)
        reach = self.quantile * (self.error[0] + self.error[1] * signs[:, -1])
        told = strange / self.limit.clamp(min=1e-6)
        told = torch.where(accuracy > self.floor, told, told.clamp(max=1.0))
        return Judgement(accuracy, reach.clamp(max=1.0), told)

    def save(self, folder: Path) -> None:
        """Writes it beside the predictor."""
        tensors = {
            "opinion.mean": self.opinion.inner.mean, "opinion.scale": self.opinion.inner.scale,
            "products.mean": self.opinion.outer.mean, "products.scale": self.opinion.outer.scale,
            "opinion.coef": self.opinion.coef,
            "harm.mean": self.harm.frame.mean, "harm.scale": self.harm.frame.scale,
            "harm.coef": self.harm.coef,
            "distance.mean": self.distance.frame.mean, "distance.scale": self.distance.frame.scale,
            "distance.inverse": self.distance.inverse,
            **{name: getattr(self, name) for name in _OWN},
        }  # fmt: skip
        write_tensors(folder / GUARD_FILE, {k: v.double().contiguous() for k, v in tensors.items()})

    @staticmethod
    def load(folder: Path) -> Guard | None:
        """Reads what `save` wrote; None for a run that has none."""
        path = folder / GUARD_FILE
        if not path.is_file():
            return None
        try:
            t = read_tensors(path)[0]
        except CheckpointError as error:
            raise RunError(f"'{path}' is not readable: {error}") from error
        _check(t, str(path))
        return Guard(
            Opinion(
                Frame(t["opinion.mean"], t["opinion.scale"]),
                Frame(t["products.mean"], t["products.scale"]),
                t["opinion.coef"],
            ),
            Harm(Frame(t["harm.mean"], t["harm.scale"]), t["harm.coef"]),
            Distance(Frame(t["distance.mean"], t["distance.scale"]), t["distance.inverse"]),
            **{name: t[name] for name in _OWN},
        )

    def reads(self, arch: NetworkSizes, trained: NetworkSizes) -> bool:
        """Whether networks of some sizes are such as it was fitted on."""
        return arch == trained


def _even(healthy: int, harmed: int) -> Tensor:
    """Weights of so many of each, with which both count the same in all."""
    both = [torch.ones(healthy), torch.full((harmed,), healthy / harmed)]
    return torch.cat(both).double()


def _share(first: Tensor, second: Tensor, truth: Tensor, weight: Tensor) -> Tensor:
    """The weight of the first beside the second that brings them nearest to the truth."""
    gap = first - second
    total = (weight * gap.square()).sum().clamp(min=1e-12)
    return ((weight * (truth - second) * gap).sum() / total).clamp(0, 1)


def _expected_error(apart: Tensor, error: Tensor, weight: Tensor) -> Tensor:
    """A line through how far two opinions are apart and how large the error is, not falling."""
    mean = (weight * apart).sum() / weight.sum()
    level = (weight * error).sum() / weight.sum()
    spread = (weight * (apart - mean).square()).sum().clamp(min=1e-12)
    slope = ((weight * (apart - mean) * (error - level)).sum() / spread).clamp(min=0)
    return torch.stack([(level - slope * mean).clamp(min=SMALLEST), slope])


def _at_rank(values: Tensor, level: float) -> Tensor:
    """The value that a new one exceeds with probability ``1 - level`` at most."""
    rank = math.ceil(level * (len(values) + 1))
    ordered = values.sort().values
    found = ordered[min(rank, len(ordered)) - 1]
    # Where so few are above the floor that any alarm is allowed, the strangest sets the limit.
    return found if bool(found.isfinite()) else torch.ones((), dtype=values.dtype)


def _check(t: dict[str, Tensor], where: str) -> None:
    """Refuses tensors that cannot be a guard's."""
    answers, fits = (len(t.get(k, torch.empty(0))) for k in ("opinion.mean", "distance.mean"))
    products = answers + answers * (answers + 1) // 2
    shapes = {
        "opinion.mean": (answers,), "opinion.scale": (answers,), "products.mean": (products,),
        "products.scale": (products,), "opinion.coef": (products + 1,), "harm.mean": (answers,),
        "harm.scale": (answers,), "harm.coef": (answers + 1,), "distance.mean": (fits,),
        "distance.scale": (fits,), "distance.inverse": (fits, fits), "weight": (), "error": (2,),
        "centre": (3,),
        "width": (3,), "limit": (), "floor": (), "quantile": (),
    }  # fmt: skip
    for name, shape in shapes.items():
        found = t.get(name)
        if found is None or tuple(found.shape) != shape or found.dtype != torch.float64:
            shown = None if found is None else f"{list(found.shape)} in {found.dtype}"
            raise RunError(f"'{where}': '{name}' expected {list(shape)} in float64, found {shown}")
        if not bool(found.isfinite().all()):
            raise RunError(f"'{where}': '{name}' holds values that are not finite")
