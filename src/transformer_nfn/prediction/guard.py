"""Is a predictor fooled? A warning, and for networks that are strange a second opinion.

A predictor that reads weights may take a broken network for a good one. The guard asks the network
itself (`responses`) and looks how well its tensors fit each other (`coupling_features`). It learns
from healthy networks and from damaged relatives whose accuracy was measured, and others calibrate
it (`guard_fit`).

Three signs of strangeness, each 1 at its limit: answers of a harmed network, tensors that fit each
other as those of no healthy one, and a prediction above what the answers suggest, in units of what
is usual for healthy networks of that predicted accuracy. One sign above its limit is a warning.

The number is the predictor's, but for two kinds of networks. One that answers as if it guessed is
told to be at chance, whatever its weights look like: answers hardly ever err there. And where two
signs are above their limits, the number leans on the opinion.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from transformer_nfn.errors import CheckpointError
from transformer_nfn.io.tensor_files import read_tensors, write_tensors
from transformer_nfn.models.coupling import coupling_features
from transformer_nfn.prediction.dataset import Dataset
from transformer_nfn.prediction.guard_curves import Curve
from transformer_nfn.prediction.guard_parts import Distance, Harm, Opinion, rebuilt, tensors_of
from transformer_nfn.prediction.records import RunError
from transformer_nfn.prediction.responses import COUNT, input_shape, responses
from transformer_nfn.zoo import NetworkSizes

GUARD_FILE = "guard.safetensors"
SIGNS, SCALARS = 3, 9
LEAN_FROM, LEAN_TO = 1.2, 1.6
"""Where the second sign begins to move the number, and where the number is the opinion's."""
DEAD_RAMP = 0.05
"""Beyond `Guard.dead`, until the opinion has no more say."""
OLD_WIDEN = 0.5
"""What `Guard.widen` was for guards that do not say."""
NEVER_DEAD = -1.0
"""What `Guard.dead` is where the opinion is not to be trusted so far."""


@dataclass(frozen=True)
class Judgement:
    """What a guard says of networks, ``[n]`` each.

    Attributes:
        accuracy: the predictor's own where strangeness is 1 or less.
        low: lower end of the interval.
        high: its upper end.
        strangeness: above 1 is a warning.
    """

    accuracy: Tensor
    low: Tensor
    high: Tensor
    strangeness: Tensor

    def holds(self, truth: Tensor) -> Tensor:
        """Whether the interval of each network contains its accuracy."""
        return (self.low <= truth) & (truth <= self.high)


@dataclass(frozen=True)
class Guard:
    """See the module.

    Attributes:
        agreed: inputs that accurate networks agree on, ``[inputs, tokens, width]``.
        opinion: accuracy from responses.
        harm: whether responses are those of a harmed network.
        distance: of how tensors fit each other, to healthy networks.
        usual_gap: of healthy networks, predicted accuracy above the opinion, by what is predicted.
        gap_spread: its standard deviation.
        error: of predictions of healthy networks, by what is predicted.
        opinion_error: of the opinion, by what it is; healthy and damaged networks alike.
        centre: of the signs on healthy networks, ``[SIGNS]``.
        width: from there to their limits, ``[SIGNS]``.
        floor: below this accuracy there is nothing to warn of: harm would not show, scalar.
        radius: what an interval reaches beyond both opinions at least, scalar.
        reach: the same upwards, in units of the error to be expected, scalar.
        reach_down: the same downwards, of guards of older versions; 0 since.
        reach_below: the same downwards, in units of the opinion's error: damage of kinds never seen
            makes networks worse, not better, and where opinions are unsure by more, scalar.
        near_chance: networks at the floor and below, of which nobody is warned, may have this
            accuracy, scalar.
        strange_reach: of intervals that lean on the opinion, in units of its error, scalar.
        widen: intervals of networks at the limit are wider by this share than those of usual
            ones, scalar.
        dead: what the opinion says of networks that answer as if they guessed, at most; the number
            is then the opinion's, scalar.
    """

    agreed: Tensor
    opinion: Opinion
    harm: Harm
    distance: Distance
    usual_gap: Curve
    gap_spread: Curve
    error: Curve
    opinion_error: Curve
    centre: Tensor
    width: Tensor
    floor: Tensor
    radius: Tensor
    reach: Tensor
    reach_down: Tensor
    reach_below: Tensor
    near_chance: Tensor
    strange_reach: Tensor
    widen: Tensor
    dead: Tensor

    @staticmethod
    def blank(inputs: tuple[int, ...], fits: int) -> Guard:
        """One that knows nothing yet: every tensor in its shape, zero.

        Args:
            inputs: how many agreed inputs, tokens of an input and numbers in each.
            fits: numbers that `coupling_features` gives.
        """
        parts = (Opinion.blank(COUNT), Harm.blank(COUNT), Distance.blank(fits))
        curves = (Curve.blank(), Curve.blank(), Curve.blank(), Curve.blank())
        shapes = ((SIGNS,), (SIGNS,), *((),) * SCALARS)
        return Guard(
            torch.zeros(inputs, dtype=torch.float64),
            *parts,
            *curves,
            *(torch.zeros(shape, dtype=torch.float64) for shape in shapes),
        )

    def judge(self, data: Dataset, arch: NetworkSizes, predicted: Tensor) -> Judgement:
        """What to say of networks of which the predictor says ``predicted``."""
        fit = coupling_features(data.network)
        self._check_fit(arch, fit)
        return self.judge_read(responses(data, arch, self.agreed), fit, predicted.double())

    def judge_read(self, answers: Tensor, fit: Tensor, predicted: Tensor) -> Judgement:
        """The same of networks that were read, with `responses` and `coupling_features`."""
        said = self.opinion(answers)
        signs = self.scaled(self.signs(answers, fit, predicted, said))
        believed = self.believed(predicted, said)
        second, first = signs.sort(-1).values[:, -2:].unbind(-1)
        above = believed > self.floor
        lean = ((second - LEAN_FROM) / (LEAN_TO - LEAN_FROM)).clamp(0, 1) * above
        low, high = self._interval(believed, said, first)
        strange_radius = self.strange_reach * self.opinion_error(said)
        return Judgement(
            believed + lean * (said - believed),
            (low + lean * (said - strange_radius - low)).clamp(0, 1),
            (high + lean * (said + strange_radius - high)).clamp(0, 1),
            self.strangeness(signs, predicted, believed),
        )

    def believed(self, predicted: Tensor, said: Tensor) -> Tensor:
        """What is left of predictions: the opinion where answers are those of guessing, ``[n]``."""
        guesses = ((self.dead - said) / DEAD_RAMP + 1).clamp(0, 1) * (predicted > self.floor)
        return predicted - guesses * (predicted - said).clamp(min=0)

    def strangeness(self, scaled: Tensor, predicted: Tensor, believed: Tensor) -> Tensor:
        """The largest of the signs ``[n, SIGNS]`` that may be a warning, ``[n]``.

        Of networks that are told to be at chance nobody is warned: harm could not make them worse.
        Only where their weights look far better than that, the gap is told.
        """
        first, gap = scaled.amax(-1), scaled[:, 2]
        quiet = first.clamp(max=1.0)
        at_chance = torch.where(predicted > self.floor, torch.maximum(quiet, gap), quiet)
        return torch.where(believed > self.floor, first, at_chance)

    def _interval(
        self, believed: Tensor, said: Tensor, strangeness: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Around predictor and opinion, by the error to be expected; ``[n]`` each."""
        error = self.expected_error(believed, strangeness)
        down = self.reach_down * error + self.reach_below * self.unsure(said, strangeness)
        low = torch.minimum(believed, said) - torch.maximum(down, self.radius)
        high = torch.maximum(believed, said) + torch.maximum(self.reach * error, self.radius)
        above = believed > self.floor
        # At chance a network may also confuse classes, and be below. (Guards that do not tell who
        # guesses have calibrated this end as any other.)
        low = torch.where(above | (self.dead < 0), low, 0.0)
        return low, torch.where(above, high, torch.maximum(high, self.near_chance))

    def signs(self, answers: Tensor, fit: Tensor, predicted: Tensor, said: Tensor) -> Tensor:
        """The three signs of strangeness, ``[n, SIGNS]``; ``said`` is the opinion."""
        gap = self.gap(predicted, said)
        return torch.stack([self.harm(answers), self.distance(fit), gap], -1)

    def gap(self, predicted: Tensor, said: Tensor) -> Tensor:
        """How much farther than usual predictions are above the opinion, ``[n]``."""
        return (predicted - said - self.usual_gap(predicted)) / self.gap_spread(predicted)

    def scaled(self, signs: Tensor) -> Tensor:
        """Signs ``[n, SIGNS]`` such that each has its limit at 1."""
        return (signs - self.centre) / self.width

    def expected_error(self, predicted: Tensor, strangeness: Tensor) -> Tensor:
        """Of predictions, larger near the limit of strangeness."""
        return self.error(predicted) * self.widening(strangeness)

    def unsure(self, said: Tensor, strangeness: Tensor) -> Tensor:
        """The expected error of opinions, larger near the limit of strangeness."""
        return self.opinion_error(said) * self.widening(strangeness)

    def widening(self, strangeness: Tensor) -> Tensor:
        """By what intervals of networks so strange are wider than those of usual ones."""
        return 1 + self.widen * strangeness.clamp(0, 1)

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
        tensors = {**_unsaid(tensors), **tensors}
        agreed, fits = (tensors.get(k) for k in ("agreed", "distance.frame.mean"))
        inputs = (0, 0, 0) if agreed is None or agreed.ndim != 3 else tuple(agreed.shape)
        like = Guard.blank(inputs, 0 if fits is None else fits.numel())
        _check(tensors, tensors_of(like), str(path))
        return rebuilt(like, tensors)


def _unsaid(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What guards of older versions did not say: as far down as up, near chance as elsewhere."""
    if "reach" not in tensors:
        return {}
    reach = tensors["reach"]
    return {
        "reach_down": reach,
        "reach_below": torch.zeros_like(reach),
        "near_chance": torch.zeros_like(reach),
        "widen": torch.full_like(reach, OLD_WIDEN),
        "dead": torch.full_like(reach, NEVER_DEAD),
    }


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
    for name in ("width", "gap_spread.values"):
        if not bool((found[name] > 0).all()):
            raise RunError(f"'{where}': '{name}' expected numbers above 0")
