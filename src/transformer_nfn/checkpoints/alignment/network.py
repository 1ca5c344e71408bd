"""How is a network of the zoo moved nearest to another? Layer by layer, and round again.

It has no residuals, and its LayerNorms have no gains: `LayerNorm(x T) = LayerNorm(x) T` for every
orthogonal T that fixes the all-ones vector, so each width axis after the first takes a T of its
own, between what writes it and what reads it. What LayerNorm's centring hides is set to B's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.checkpoints.alignment.heads import move_attention
from transformer_nfn.checkpoints.alignment.inputs import (
    Downhill,
    correlations,
    move_units,
    responses,
    turn_of,
)
from transformer_nfn.checkpoints.alignment.neurons import move_neurons
from transformer_nfn.errors import SpaceError
from transformer_nfn.functional.architecture import Architecture
from transformer_nfn.functional.description import Attention, Mlp
from transformer_nfn.functional.zoo_network import NAME, network_architecture, sinusoids
from transformer_nfn.spaces import Weights, WeightSpace
from transformer_nfn.spaces.actions.permutation import assign
from transformer_nfn.spaces.actions.solvers import polar_fixing_ones
from transformer_nfn.spaces.axis import under_prefix

ROUNDS = 20
SETTLED = 1e-5
STEPS = 150
CLASSIFIER = {"W_A": "classifier.W_1", "b_A": "classifier.b_1", "W_B": "classifier.W_2"}
"""The classifier is an MLP too."""


@dataclass(frozen=True)
class NetworkAlignment:
    """A network moved along its orbit.

    Attributes:
        weights: ``[1, 1, *axes]`` in the dtype of the network that was moved.
        before: relative distance ``‖A − B‖ / ‖B‖``.
        after: likewise, after moving.
        difference: relative difference of the outputs of A and of what it was moved to, on random
            inputs.
        rounds: how often all axes were solved for.
    """

    weights: Weights
    before: float
    after: float
    difference: float
    rounds: int

    def as_json(self) -> dict[str, float]:
        """Everything but tensors."""
        return {
            "distance_before": self.before,
            "distance_after": self.after,
            "difference_of_outputs": self.difference,
            "rounds": self.rounds,
        }


def align_networks(
    space: WeightSpace,
    A: Mapping[str, Tensor],
    B: Mapping[str, Tensor],
    *,
    rounds: int = ROUNDS,
    inputs: Tensor | None = None,
    positions: Tensor | None = None,
    steps: int = STEPS,
) -> NetworkAlignment:
    """Moves ``A`` as close to ``B`` as its symmetries allow.

    Args:
        space: of both, that of a `small_transformer`.
        A: ``[1, 1, *axes]``.
        B: likewise.
        rounds: at most, where only weights are looked at.
        inputs: ``[n, tokens, patch]`` without labels; with them networks are aligned on what they
            do, see `inputs`.
        positions: of the architecture, where they are not the usual ones.
        steps: downhill, with inputs.
    """
    if space.name != NAME:
        raise SpaceError(
            f"networks of '{space.name}' cannot be aligned: expected a checkpoint of a known "
            f"family, or the zoo's network ('{NAME}')"
        )
    a, b = ({n: w[0, 0].double() for n, w in side.items()} for side in (A, B))
    walk = _Walk(space, a, b, positions)
    if inputs is None:
        moved, used = walk.run(rounds)
    else:
        moved, used = walk.on_inputs(inputs, network_architecture(space, positions), steps), steps
    out = {n: w[None, None].to(A[n].dtype) for n, w in moved.items()}
    return NetworkAlignment(
        out,
        relative_distance(a, b),
        relative_distance({n: w[0, 0].double() for n, w in out.items()}, b),
        _difference(space, a, {n: w[0, 0].double() for n, w in out.items()}),
        used,
    )


def relative_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """``‖a − b‖ / ‖b‖`` over all tensors."""
    away = sum(float((a[n] - b[n]).square().sum()) for n in b)
    return float((away / max(sum(float(w.square().sum()) for w in b.values()), 1e-300)) ** 0.5)


def _difference(space: WeightSpace, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    architecture = network_architecture(space)
    generator = torch.Generator().manual_seed(0)
    X = architecture.inputs.draw(8, architecture.inputs.lengths[-1], generator=generator)
    x, y = (architecture.forward(w, X.double()) for w in (a, b))
    return float((x - y).norm() / x.norm().clamp_min(1e-300))


class _Walk:
    """One network on its way to another, in float64, centred where LayerNorm centres."""

    def __init__(
        self, space: WeightSpace, a: Weights, b: Weights, positions: Tensor | None = None
    ) -> None:
        self._positions = positions
        sizes = dict(space.options)
        self._blocks: int = sizes["blocks"]
        heads, d = sizes["heads"], sizes["d_model"] // sizes["heads"]
        self._attention = Attention(heads, heads, d, d, scale=d**-0.5)
        self._mlp = Mlp(sizes["d_ff"], "relu")
        n = self._blocks
        # Every width axis: what writes it, and what reads it.
        self._axes: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
            "0": (("embedding.W", "embedding.b"), self._readers(0))
        }
        for i in range(n):
            self._axes[f"{i}.feature"] = ((f"blocks.{i}.W_O",), (f"blocks.{i}.W_A",))
            read = ("classifier.W_1",) if i == n - 1 else self._readers(i + 1)
            self._axes[f"{i + 1}"] = ((f"blocks.{i}.W_B", f"blocks.{i}.b_B"), read)
        self._target, self._B = self._centred(b), b
        self._now = self._centred(a)

    def _readers(self, i: int) -> tuple[str, ...]:
        return tuple(f"blocks.{i}.W_{p}" for p in "QKV")

    def _centred(self, weights: Weights) -> Weights:
        out = dict(weights)
        for write, read in self._axes.values():
            out |= {n: out[n] - out[n].mean(-1, keepdim=True) for n in write if n in out}
            out |= {n: out[n] - out[n].mean(-2, keepdim=True) for n in read}
        return out

    def _uncentred(self, weights: Weights) -> Weights:
        """With B's own means, which the function does not notice."""
        out = dict(weights)
        for write, read in self._axes.values():
            out |= {n: out[n] + self._B[n].mean(-1, keepdim=True) for n in write if n in out}
            out |= {n: out[n] + self._B[n].mean(-2, keepdim=True) for n in read}
        return out

    def run(self, rounds: int) -> tuple[Weights, int]:
        best, value = self._now, self._away()
        used, last = 0, float("inf")
        for used in range(1, rounds + 1):
            self._round(first=used == 1)
            away = self._away()
            if away < value:
                best, value = dict(self._now), away
            if last - away <= SETTLED * away and used > 2:
                break
            last = away
        return self._uncentred(best), used

    def on_inputs(self, X: Tensor, architecture: Architecture, steps: int) -> Weights:
        """Units by what they say on inputs, then downhill."""
        sizes, n = dict(architecture.space.options), self._blocks
        positions = (
            sinusoids(sizes["tokens"], sizes["d_model"])
            if self._positions is None
            else self._positions
        )
        a, b = (responses(w, X.double(), positions.double(), n) for w in (self._now, self._target))
        for i in range(n):
            at = f"blocks.{i}."
            T = turn_of(a[f"{i}.feature"], b[f"{i}.feature"])
            self._apply(f"{i}.feature", T)
            heads = [
                (z - z.mean(1, keepdim=True)).flatten(1)
                for z in (a[f"{i}.head"] @ T, b[f"{i}.head"])
            ]
            order = assign(correlations(heads[0].mT, heads[1].mT))
            own, other = under_prefix(self._now, at), under_prefix(self._target, at)
            own = move_attention(own, other, self._attention, order=order)
            pair = a[f"{i}.neuron"], b[f"{i}.neuron"]
            own = move_units(own, *pair, assign(correlations(*pair)))
            self._now |= {f"{at}{name}": w for name, w in own.items()}
            self._apply(f"{i + 1}", turn_of(a[f"{i + 1}"], b[f"{i + 1}"]))
        pair = a["hidden"], b["hidden"]
        own = {k: self._now[name] for k, name in CLASSIFIER.items()}
        own = move_units(own, *pair, assign(correlations(*pair)))
        self._now |= {name: own[k] for k, name in CLASSIFIER.items()}
        walk = Downhill(self._now, self._axes, n)
        return self._uncentred(walk.follow(self._target, X, architecture.forward, steps))

    def _away(self) -> float:
        return sum(float((self._now[n] - w).square().sum()) for n, w in self._target.items())

    def _round(self, *, first: bool) -> None:
        for i in range(self._blocks):
            at = f"blocks.{i}."
            known = not first
            own, other = under_prefix(self._now, at), under_prefix(self._target, at)
            own = move_attention(own, other, self._attention, outputs_known=known)
            self._now |= {f"{at}{n}": w for n, w in own.items()}
            self._turn(f"{i}.feature", readers=known)
            own = move_neurons(under_prefix(self._now, at), other, self._mlp, outputs_known=known)
            self._now |= {f"{at}{n}": w for n, w in own.items()}
            self._turn(f"{i + 1}", readers=known)
        own, other = ({k: w[n] for k, n in CLASSIFIER.items()} for w in (self._now, self._target))
        moved = move_neurons(own, other, Mlp(len(own["b_A"]), "relu"))
        self._now |= {n: moved[k] for k, n in CLASSIFIER.items()}

    def _turn(self, axis: str, *, readers: bool) -> None:
        """Solves for one width axis: ``W → W T`` of what writes it, ``Tᵀ W`` of what reads it."""
        write, read = self._axes[axis]
        D = self._now[write[0]].shape[-1]
        cross = torch.zeros(D, D, dtype=torch.float64)
        for names, dim in ((write, -1), (read if readers else (), -2)):
            for n in names:
                x, y = (w[n].movedim(dim, -1).reshape(-1, D) for w in (self._now, self._target))
                cross += x.mT @ y / max(float(x.norm() * y.norm()), 1e-300)
        self._apply(axis, polar_fixing_ones(cross))

    def _apply(self, axis: str, T: Tensor) -> None:
        write, read = self._axes[axis]
        self._now |= {n: self._now[n] @ T for n in write}
        self._now |= {n: T.mT @ self._now[n] for n in read}
