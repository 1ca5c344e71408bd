"""An input on which two networks differ, by more than rounding their weights could explain."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.architectures import Architecture, Forward
from transformer_nfn.spaces import Weights

SIGNIFICANT = 32.0
ASCENT_STEPS = 60


@dataclass(frozen=True)
class Witness:
    """Proof that two networks are different functions.

    Attributes:
        X: the input, ``[L, D]``, float64 (or ``[L]``, token ids).
        out_U: what the first network makes of it.
        out_V: what the second does.
        difference: ``‖out_U − out_V‖ / ‖out_U‖``.
        noise: how far the outputs move when the weights move by their own rounding error.
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
    unit: float,
    *,
    seed: int = 0,
    samples: int = 4,
    thorough: bool = True,
) -> Witness | None:
    """Looks for an input on which the outputs differ significantly; None if none is found.

    Random inputs of several lengths and scales first, then gradient ascent from the best.

    Args:
        architecture: whose forward is run, on inputs of its kind.
        U: one network, ``[*axes]`` in float64.
        V: the other.
        unit: relative error to expect in one weight.
        seed: of the random inputs.
        samples: inputs tried for each length and scale.
        thorough: try all scales and ascend; otherwise inputs of unit scale only.
    """
    sample = next(iter(U.values()))
    forward, inputs = architecture.forward, architecture.inputs
    generator = torch.Generator().manual_seed(seed)
    shaken = [_shaken(w, unit, generator) for w in (U, V)]
    best: tuple[float, Tensor] | None = None
    for scale in inputs.scales if thorough else inputs.scales[:1]:
        for length in inputs.lengths:
            drawn = inputs.draw(samples, length, scale=scale, generator=generator)
            for X in drawn.to(sample.device):
                score = _score(forward, X, U, V, shaken)
                if score > SIGNIFICANT:
                    return _witness(forward, X, U, V, shaken)
                if best is None or score > best[0]:
                    best = (score, X)
    if best is None or best[0] <= 0 or not thorough or not inputs.continuous:
        return None
    X = _ascend(forward, best[1], U, V)
    if _score(forward, X, U, V, shaken) > SIGNIFICANT:
        return _witness(forward, X, U, V, shaken)
    return None


def _shaken(weights: Weights, unit: float, generator: torch.Generator) -> tuple[Weights, Weights]:
    """The weights, and the weights moved at random within their rounding error."""
    moved = {}
    for name, w in weights.items():
        noise = torch.rand(w.shape, generator=generator, dtype=torch.float64).to(w.device)
        moved[name] = noise.mul_(2 * unit).add_(1 - unit).mul_(w)
    return weights, moved


def _noise(
    forward: Forward, X: Tensor, shaken: list[tuple[Weights, Weights]], size: float
) -> float:
    moves = [float((forward(w, X) - forward(moved, X)).norm()) for w, moved in shaken]
    return max([*moves, torch.finfo(torch.float64).eps * size])


def _score(
    forward: Forward,
    X: Tensor,
    U: Weights,
    V: Weights,
    shaken: list[tuple[Weights, Weights]],
) -> float:
    out_U, out_V = forward(U, X), forward(V, X)
    difference = float((out_U - out_V).norm())
    if not difference < float("inf"):
        return 0.0
    noise = _noise(forward, X, shaken, float(out_U.norm() + out_V.norm()))
    return difference / max(noise, 1e-300)


def _ascend(forward: Forward, X: Tensor, U: Weights, V: Weights) -> Tensor:
    """Moves ``X`` uphill on the relative difference of the outputs."""
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


def _witness(
    forward: Forward,
    X: Tensor,
    U: Weights,
    V: Weights,
    shaken: list[tuple[Weights, Weights]],
) -> Witness:
    """Runs both networks once more and writes down what they give."""
    out_U, out_V = forward(U, X).detach(), forward(V, X).detach()
    size = float(out_U.norm())
    difference = float((out_U - out_V).norm()) / max(size, 1e-300)
    noise = _noise(forward, X, shaken, size) / max(size, 1e-300)
    return Witness(X.detach(), out_U, out_V, difference, noise)
