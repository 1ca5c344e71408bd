"""How is a network of the zoo aligned where inputs are at hand? On what it does with them.

Units are paired by what they say on the inputs (no labels are needed), turns are Procrustes' on the
same. Then everything continuous that acts is followed downhill: the network halfway between A,
moved, and B shall say what A and B say on average.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from transformer_nfn.checkpoints.disguises.neurons import permute_neurons, scale_neurons
from transformer_nfn.functional import layer_norm
from transformer_nfn.spaces.actions.solvers import polar_fixing_ones
from transformer_nfn.spaces.axis import under_prefix
from transformer_nfn.symmetry.enlarged import hyperplane

Weights = dict[str, Tensor]
Forward = Callable[[Mapping[str, Tensor], Tensor], Tensor]
EPS = 1e-5
RATE, BATCH = 0.04, 32


def responses(weights: Mapping[str, Tensor], X: Tensor, positions: Tensor, blocks: int) -> Weights:
    """What stands on every axis for inputs ``X [n, T, patch]``: by axis, ``[samples, size]``."""
    out: Weights = {}
    x = X @ weights["embedding.W"] + weights["embedding.b"] if "embedding.W" in weights else X
    x = x + positions[: X.shape[-2]]
    for i in range(blocks):
        own = under_prefix(weights, f"blocks.{i}.")
        x = layer_norm(x, EPS)
        q, k, v = (torch.einsum("btd,hdk->bhtk", x, own[f"W_{p}"]) for p in "QKV")
        mixed = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v
        heads = torch.einsum("bhtv,hvd->hbtd", mixed, own["W_O"])
        out[f"{i}.head"] = heads.flatten(1, 2)
        x = layer_norm(heads.sum(0), EPS)
        out[f"{i}.feature"] = x.flatten(0, 1)
        neurons = torch.relu(x @ own["W_A"] + own["b_A"])
        out[f"{i}.neuron"] = neurons.flatten(0, 1)
        x = neurons @ own["W_B"] + own["b_B"]
        out[f"{i + 1}"] = layer_norm(x, EPS).flatten(0, 1)
    x = layer_norm(x, EPS).mean(-2)
    out["hidden"] = torch.relu(x @ weights["classifier.W_1"] + weights["classifier.b_1"])
    return out


def turn_of(a: Tensor, b: Tensor) -> Tensor:
    """The turn that takes responses ``a [samples, D]`` nearest to ``b``."""
    return polar_fixing_ones(a.mT @ b)


def correlations(a: Tensor, b: Tensor) -> Tensor:
    """Of units of b with units of a, ``[n, n]``."""
    x, y = (z - z.mean(0) for z in (a, b))
    x, y = (z / z.norm(dim=0).clamp_min(1e-9) for z in (x, y))
    found: Tensor = y.mT @ x
    return found


def move_units(own: Weights, a: Tensor, b: Tensor, order: Tensor) -> Weights:
    """``W_A, b_A, W_B`` in a new order, scaled so that units are as active as b's."""
    own = own | permute_neurons(own, order)
    sizes = [z.square().mean(0).sqrt() + 1e-6 for z in (a[:, order], b)]
    return own | scale_neurons(own, (sizes[1] / sizes[0]).clamp(0.05, 20.0))


class Downhill:
    """Everything continuous that acts on a network of the zoo, as parameters that start at zero."""

    def __init__(
        self,
        weights: Weights,
        axes: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]],
        blocks: int,
    ) -> None:
        self._start, self._axes, self._blocks = weights, axes, blocks
        D = weights["classifier.W_1"].shape[0]
        self._plane = hyperplane(D)
        zero = torch.zeros
        self.turns = {a: zero(D - 1, D - 1) for a in axes if a != "0"}
        shape = weights["blocks.0.W_Q"].shape
        self.bases = {
            f"{i}.{p}": zero(shape[0], shape[2], shape[2]) for i in range(blocks) for p in "QV"
        }
        self.scales = {f"{i}": zero(len(weights[f"blocks.{i}.b_A"])) for i in range(blocks)}
        self.scales["hidden"] = zero(len(weights["classifier.b_1"]))

    def parameters(self) -> list[Tensor]:
        """All of them, to be followed."""
        found = [*self.turns.values(), *self.bases.values(), *self.scales.values()]
        return [p.requires_grad_() for p in found]

    def moved(self) -> Weights:
        """The network where the parameters are."""
        w = {n: x.to(next(iter(self.turns.values())).dtype) for n, x in self._start.items()}
        for axis, K in self.turns.items():
            inner = torch.linalg.matrix_exp(K - K.mT) - torch.eye(len(K), dtype=K.dtype)
            plane = self._plane.to(K.dtype)
            T = torch.eye(len(plane), dtype=K.dtype) + plane @ inner @ plane.mT
            write, read = self._axes[axis]
            w |= {n: w[n] @ T for n in write} | {n: T.mT @ w[n] for n in read}
        for i in range(self._blocks):
            at = f"blocks.{i}."
            for (p, r), X in zip(
                (("W_Q", "W_K"), ("W_V", "W_O")),
                (self.bases[f"{i}.Q"], self.bases[f"{i}.V"]),
                strict=True,
            ):
                back = torch.linalg.matrix_exp(-X)
                w[f"{at}{p}"] = w[f"{at}{p}"] @ torch.linalg.matrix_exp(X)
                dual = w[f"{at}{r}"]
                w[f"{at}{r}"] = dual @ back.mT if r == "W_K" else back @ dual
            own = {n: w[f"{at}{n}"] for n in ("W_A", "b_A", "W_B")}
            own = scale_neurons(own, self.scales[f"{i}"].exp())
            w |= {f"{at}{n}": x for n, x in own.items()}
        names = {"W_A": "classifier.W_1", "b_A": "classifier.b_1", "W_B": "classifier.W_2"}
        own = scale_neurons({k: w[n] for k, n in names.items()}, self.scales["hidden"].exp())
        return w | {names[k]: x for k, x in own.items()}

    def follow(self, B: Weights, X: Tensor, forward: Forward, steps: int) -> Weights:
        """Goes downhill, and returns the network there in float64."""
        first, second = ({n: x.float() for n, x in w.items()} for w in (self._start, B))
        X = X.float()
        with torch.no_grad():
            aims = (
                torch.softmax(forward(first, X), -1) + torch.softmax(forward(second, X), -1)
            ) / 2
        optimiser = torch.optim.Adam(self.parameters(), RATE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps)
        draw = torch.Generator().manual_seed(0)
        for _ in range(steps):
            rows = torch.randint(0, len(X), (min(BATCH, len(X)),), generator=draw)
            moved = self.moved()
            loss = torch.zeros(())
            t = float(torch.rand((), generator=draw)) * 0.4 + 0.3
            between = {n: (1 - t) * moved[n] + t * second[n] for n in second}
            says = torch.log_softmax(forward(between, X[rows]), -1)
            loss = -(aims[rows] * says).sum(-1).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        for group in (self.turns, self.bases, self.scales):
            for name, p in group.items():
                group[name] = p.detach().double()
        return self.moved()
