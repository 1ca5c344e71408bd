"""How far must intervals of networks without a warning reach, and when is one at chance?

What damaged networks tell of kinds that nobody has seen.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.prediction.guard import NEVER_DEAD, Guard
from transformer_nfn.prediction.guard_learn import FEWEST, HARM, Harmed
from transformer_nfn.prediction.intervals import rank_quantile

SLACK_DOWN = 1.5
"""Intervals reach so much farther than damage that was seen needs: of kinds never seen there is
none to calibrate on."""
UNSEEN_LEVEL = 0.975
"""Of damaged networks without a warning, of a kind not learned from, the share held from below."""
LEAST_DOWN, MOST_DOWN = 2.0, 2.5
"""Errors of the opinion: few damaged networks stay without a warning to tell better."""
DEAD = HARM / 2
"""Above chance, what the opinion says of networks that answer as if they guessed, at most."""


def reach_below(short: Tensor | None, healthy_need: float) -> float:
    """How far down intervals must reach, see `Guard.reach_below`.

    Args:
        short: of damaged networks without a warning, of kinds that a guard had not learned from,
            how far they lie below both opinions, in units of the opinion's error; None where
            nobody knows, then intervals reach as far as may be.
        healthy_need: what healthy networks need.
    """
    if short is None:
        return max(MOST_DOWN, healthy_need)
    needed = highest(short.clamp(min=0).numpy(), UNSEEN_LEVEL) if len(short) else 0.0
    return max(min(max(needed, LEAST_DOWN), MOST_DOWN), healthy_need)


def near_chance(guard: Guard, chance: float, *damaged: Harmed) -> float:
    """How accurate networks may be that are predicted at the floor or below: nobody is warned.

    As the best of the damaged ones that are given, and somewhat farther from chance.
    """
    there = torch.cat([harmed.read.accuracy[_at_floor(guard, harmed)] for harmed in damaged])
    best = float(there.max()) if len(there) else chance
    return chance + SLACK_DOWN * max(best - chance, 0.0)


def _at_floor(guard: Guard, harmed: Harmed) -> Tensor:
    said = guard.opinion(harmed.read.answers)
    return guard.believed(harmed.predicted, said) <= guard.floor


def dead_limit(chance: float, said: Tensor, accuracy: Tensor) -> float:
    """Up to which opinion networks are told to be at chance, see `Guard.dead`.

    `NEVER_DEAD` where few networks tell whether opinions can be trusted so far, or where they
    tell that it is not: hardly one may be better than was said.

    Args:
        chance: the accuracy of guessing.
        said: opinions of networks, healthy and damaged, that they were not learned from.
        accuracy: what these have.
    """
    there = said <= chance + DEAD
    better = (accuracy - said)[there] > HARM
    if len(better) < FEWEST or float(better.double().mean()) > 1 - UNSEEN_LEVEL:
        return NEVER_DEAD
    return chance + DEAD


def highest(sizes: np.ndarray, level: float) -> float:
    """The size that a new one stays below with probability ``level``, or the highest possible."""
    return rank_quantile(sizes, min(level, len(sizes) / (len(sizes) + 1)))
