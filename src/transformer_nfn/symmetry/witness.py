"""Search for an input on which two networks differ by more than rounding explains."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from transformer_nfn.functional import Architecture, Forward
from transformer_nfn.spaces import Weights
from transformer_nfn.symmetry.rounding import HALF, rounding_unit

ASCENT_STEPS = 60
SAMPLES = 4
"""Inputs tried for each length and scale."""


@dataclass(frozen=True)
class Noise:
    """Model of rounding errors, and the threshold above which a difference is significant.

    Attributes:
        unit: largest expected relative error of one weight.
        shakes: number of random perturbations of each network by as much.
        significant: threshold, in multiples of the largest output change of those perturbations.
    """

    unit: float
    shakes: int = 1
    significant: float = 32.0

    @staticmethod
    def of(dtype: torch.dtype) -> Noise:
        """For weights stored in a dtype.

        In half precision storing is the only error, and a few perturbations bound its effect; in
        single and double precision the threshold covers arithmetic as well.
        """
        unit = rounding_unit(dtype)
        return Noise(unit, 8, 8.0) if dtype in HALF else Noise(unit)


@dataclass(frozen=True)
class Witness:
    """Proof that two networks are different functions.

    Attributes:
        X: the input, ``[L, D]``, float64 (or ``[L]``, token ids).
        out_U: output of the first network.
        out_V: output of the second network.
        difference: ``‖out_U − out_V‖ / ‖out_U‖``.
        noise: relative change of the outputs when the weights change by their rounding error.

    >>> from transformer_nfn import spaces
    >>> from transformer_nfn.symmetry import compare
    >>> space = spaces.multi_head(4, 2, 2, 2)
    >>> witness = compare(space, space.randn(1), space.randn(1)).witness
    >>> witness.difference > witness.noise
    True
    """

    X: Tensor
    out_U: Tensor
    out_V: Tensor
    difference: float
    noise: float


def find_witness(
    architecture: Architecture,
    U: Weights,
    V: Weights,
    noise: Noise,
    *,
    seed: int = 0,
    thorough: bool = True,
) -> Witness | None:
    """Search for an input on which the outputs differ significantly; None if there is none.

    Random inputs of several lengths and scales first, then gradient ascent from the best. Only
    tensors that differ between the networks are assumed to carry rounding errors.

    Args:
        U: one network, ``[*axes]`` in float64. V: the other.
        thorough: try all scales and gradient ascent; otherwise inputs of unit scale only.
    """
    sample = next(iter(U.values()))
    forward, inputs = architecture.forward, architecture.inputs
    generator = torch.Generator().manual_seed(seed)
    best: _Trial | None = None
    for scale in inputs.scales if thorough else inputs.scales[:1]:
        for length in inputs.lengths:
            drawn = inputs.draw(SAMPLES, length, scale=scale, generator=generator)
            for trial in _trials(forward, drawn.to(sample.device), U, V, noise, seed):
                if trial.score > noise.significant:
                    return trial.witness()
                if best is None or trial.score > best.score:
                    best = trial
    if best is None or best.score <= 0 or not thorough or not inputs.continuous:
        return None
    X = _ascend(forward, best.X, U, V)
    (trial,) = _trials(forward, X.unsqueeze(0), U, V, noise, seed)
    return trial.witness() if trial.score > noise.significant else None


@dataclass(frozen=True)
class _Trial:
    """Both networks run on one input; ``noise`` is the effect of rounding errors on it."""

    X: Tensor
    out_U: Tensor
    out_V: Tensor
    noise: float

    @cached_property
    def difference(self) -> float:
        return float((self.out_U - self.out_V).norm())

    @property
    def score(self) -> float:
        finite = self.difference < float("inf")
        return self.difference / max(self.noise, 1e-300) if finite else 0.0

    def witness(self) -> Witness:
        size = max(float(self.out_U.norm()), 1e-300)
        return Witness(self.X, self.out_U, self.out_V, self.difference / size, self.noise / size)


def _trials(
    forward: Forward, inputs: Tensor, U: Weights, V: Weights, noise: Noise, seed: int
) -> list[_Trial]:
    """One trial for each input; perturbed weights of one network are in memory at a time."""
    outputs = [[forward(w, X).detach() for X in inputs] for w in (U, V)]
    eps = torch.finfo(torch.float64).eps
    noises = [eps * float(u.norm() + v.norm()) for u, v in zip(*outputs, strict=True)]
    apart = [float((u - v).norm()) for u, v in zip(*outputs, strict=True)]
    equal = {name for name, w in U.items() if torch.equal(w, V[name])}
    for shake in range(noise.shakes):
        for i, (w, out) in enumerate(zip((U, V), outputs, strict=True)):
            generator = torch.Generator().manual_seed(2 * (noise.shakes * seed + shake) + i)
            perturbed = _perturbed(w, noise.unit, equal, generator)
            moves = [
                float((forward(perturbed, X) - o).norm()) for X, o in zip(inputs, out, strict=True)
            ]
            noises = [max(pair) for pair in zip(moves, noises, strict=True)]
            del perturbed
        if all(d <= noise.significant * n for d, n in zip(apart, noises, strict=True)):
            break  # more noise would change nothing
    return [_Trial(*row) for row in zip(inputs, *outputs, noises, strict=True)]


def _perturbed(
    weights: Weights, unit: float, equal: Collection[str], generator: torch.Generator
) -> Weights:
    """The weights perturbed within their rounding error; equal tensors by that of float64."""
    moved = {}
    for name, w in weights.items():
        size = rounding_unit(torch.float64) if name in equal else unit
        noise = torch.rand(w.shape, generator=generator, dtype=torch.float64).to(w.device)
        moved[name] = noise.mul_(2 * size).add_(1 - size).mul_(w)
    return moved


def _ascend(forward: Forward, X: Tensor, U: Weights, V: Weights) -> Tensor:
    """Gradient ascent on the relative difference of the outputs."""
    X = X.clone().requires_grad_()
    optimiser = torch.optim.Adam([X], lr=0.05 * float(X.detach().abs().mean().clamp_min(1e-3)))
    best, at = -float("inf"), X.detach().clone()
    for _ in range(ASCENT_STEPS):
        out_U, out_V = forward(U, X), forward(V, X)
        gain = (out_U - out_V).square().sum() / (out_U.square().sum() + 1e-300)
        value = float(gain.detach())
        if value > best:
            best, at = value, X.detach().clone()
        optimiser.zero_grad()
        (-torch.log(gain + 1e-300)).backward()
        if X.grad is None or not bool(torch.isfinite(X.grad).all()):
            break
        optimiser.step()
    return at
