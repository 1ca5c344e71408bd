"""Alignment of two networks of the zoo, by their weights or by their activations.

Such a network has no residuals, and its LayerNorms have no gains: `LayerNorm(x T) = LayerNorm(x) T`
for every orthogonal T that fixes the all-ones vector, so each width axis after the first takes a T
of its own, between the tensors that write it and those that read it. What LayerNorm's centring
hides is set to B's.

With inputs, units are paired by their activations (no labels are needed) and the T are fitted to
activations. Then all continuous parameters follow a gradient: the network between A, moved, and B
should output the mean of the outputs of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.checkpoints.symmetries import (
    HeadPermutation,
    NeuronPermutation,
    NeuronScale,
    QueryKeyBasis,
    Site,
    ValueOutputBasis,
)
from transformer_nfn.checkpoints.symmetries.attention import HeadOrder, head_similarity
from transformer_nfn.errors import SpaceError
from transformer_nfn.functional import layer_norm, sinusoids
from transformer_nfn.functional.architecture import Architecture
from transformer_nfn.functional.description import Attention, Transformer
from transformer_nfn.functional.zoo_network import NAME, network_architecture
from transformer_nfn.spaces import Weights, WeightSpace
from transformer_nfn.spaces.actions.permutation import assign
from transformer_nfn.spaces.actions.solvers import nearest_matrix, polar_fixing_ones
from transformer_nfn.spaces.axis import under_prefix
from transformer_nfn.symmetry.enlarged import hyperplane

ROUNDS = 20
SETTLED = 1e-5
STEPS = 150
EPS = 1e-5
RATE, BATCH = 0.04, 32
CLASSIFIER = {"W_A": "classifier.W_1", "b_A": "classifier.b_1", "W_B": "classifier.W_2"}
"""The classifier is an MLP too."""
Axes = Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
Forward = Callable[[Mapping[str, Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class NetworkAlignment:
    """Result of `align_networks`.

    Attributes:
        weights: ``[1, 1, *axes]`` in the dtype of the network that was moved.
        before: relative distance ``‖A − B‖ / ‖B‖``.
        after: likewise, after moving.
        difference: relative difference of the outputs of A before and after, on random inputs.
        rounds: number of rounds over all axes.
    """

    weights: Weights
    before: float
    after: float
    difference: float
    rounds: int

    def as_json(self) -> dict[str, float]:
        """Everything except tensors."""
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
    """Move network ``A`` of the zoo as close to ``B`` as its symmetries allow.

    Args:
        space: of both, that of a `small_transformer`.
        A: ``[1, 1, *axes]``.
        B: likewise.
        rounds: limit, where only weights are used.
        inputs: ``[n, tokens, patch]`` without labels; with them networks are aligned by their
            activations.
        positions: of the architecture, where they are not sinusoids.
        steps: gradient steps, with inputs.

    Example:
        >>> from transformer_nfn.functional import small_transformer
        >>> space = small_transformer(2, 2, 2, d_model=4, heads=1, d_ff=4).space
        >>> seeded = torch.Generator().manual_seed(0)
        >>> A = space.randn(1, generator=seeded, dtype=torch.float64)
        >>> align_networks(space, A, A).after < 1e-9
        True
    """
    if space.name != NAME:
        raise SpaceError(
            f"networks of '{space.name}' cannot be aligned: expected a checkpoint of a known "
            f"family, or the zoo's network ('{NAME}')"
        )
    a, b = ({n: w[0, 0].double() for n, w in side.items()} for side in (A, B))
    state = _Alignment(space, a, b)
    if inputs is None:
        moved, used = state.run(rounds)
    else:
        architecture = network_architecture(space, positions)
        moved, used = state.on_inputs(inputs, architecture, positions, steps), steps
    out = {n: w[None, None].to(A[n].dtype) for n, w in moved.items()}
    rounded = {n: w[0, 0].double() for n, w in out.items()}
    return NetworkAlignment(
        out,
        _relative_distance(a, b),
        _relative_distance(rounded, b),
        _output_difference(space, a, rounded),
        used,
    )


def _relative_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """``‖a − b‖ / ‖b‖`` over all tensors."""
    distance = sum(float((a[n] - b[n]).square().sum()) for n in b)
    return float((distance / max(sum(float(w.square().sum()) for w in b.values()), 1e-300)) ** 0.5)


def _output_difference(space: WeightSpace, a: Weights, b: Weights) -> float:
    architecture = network_architecture(space)
    generator = torch.Generator().manual_seed(0)
    X = architecture.inputs.draw(8, architecture.inputs.lengths[-1], generator=generator)
    x, y = (architecture.forward(w, X.double()) for w in (a, b))
    return float((x - y).norm() / x.norm().clamp_min(1e-300))


class _Alignment:
    """One network on its way to another, in float64, centred where LayerNorm centres."""

    def __init__(self, space: WeightSpace, a: Weights, b: Weights) -> None:
        sizes = dict(space.options)
        self._blocks: int = sizes["blocks"]
        heads, d = sizes["heads"], sizes["d_model"] // sizes["heads"]
        network = Transformer("zoo", sizes["d_model"], "layer", EPS, ())
        names = {f"W_{part}": f"0.W_{part}" for part in "QKVO"}
        self._attention = Site(network, names, Attention(heads, heads, d, d, scale=d**-0.5))
        self._mlp = Site(network, {n: f"0.{n}" for n in ("W_A", "b_A", "W_B")}, "positive")
        n = self._blocks
        # Every width axis: the tensors that write it, and those that read it.
        self._axes: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
            "0": (("embedding.W", "embedding.b"), self._readers(0))
        }
        for i in range(n):
            self._axes[f"{i}.feature"] = ((f"blocks.{i}.W_O",), (f"blocks.{i}.W_A",))
            read = ("classifier.W_1",) if i == n - 1 else self._readers(i + 1)
            self._axes[f"{i + 1}"] = ((f"blocks.{i}.W_B", f"blocks.{i}.b_B"), read)
        self._B, self._target, self._now = b, self._centred(b), self._centred(a)

    def _readers(self, i: int) -> tuple[str, ...]:
        return tuple(f"blocks.{i}.W_{p}" for p in "QKV")

    def _centred(self, weights: Weights) -> Weights:
        out = dict(weights)
        for write, read in self._axes.values():
            out |= {n: out[n] - out[n].mean(-1, keepdim=True) for n in write if n in out}
            out |= {n: out[n] - out[n].mean(-2, keepdim=True) for n in read}
        return out

    def _uncentred(self, weights: Weights) -> Weights:
        """With B's means, on which the function does not depend."""
        out = dict(weights)
        for write, read in self._axes.values():
            out |= {n: out[n] + self._B[n].mean(-1, keepdim=True) for n in write if n in out}
            out |= {n: out[n] + self._B[n].mean(-2, keepdim=True) for n in read}
        return out

    def run(self, rounds: int) -> tuple[Weights, int]:
        """Fit all axes in turn, until the distance settles."""
        best, value = self._now, self._distance()
        used, last = 0, float("inf")
        for used in range(1, rounds + 1):
            self._round(first=used == 1)
            distance = self._distance()
            if distance < value:
                best, value = dict(self._now), distance
            if last - distance <= SETTLED * distance and used > 2:
                break
            last = distance
        return self._uncentred(best), used

    def on_inputs(
        self, X: Tensor, architecture: Architecture, positions: Tensor | None, steps: int
    ) -> Weights:
        """Match units by their activations, then follow a gradient."""
        sizes, n = dict(architecture.space.options), self._blocks
        if positions is None:
            positions = sinusoids(sizes["tokens"], sizes["d_model"])
        X, positions = X.double(), positions.double()
        a, b = (_activations(w, X, positions, n) for w in (self._now, self._target))
        for i in range(n):
            T = polar_fixing_ones(a[f"{i}.feature"].mT @ b[f"{i}.feature"])
            self._apply(f"{i}.feature", T)
            heads = [
                (z - z.mean(1, keepdim=True)).flatten(1)
                for z in (a[f"{i}.head"] @ T, b[f"{i}.head"])
            ]
            order = assign(_correlations(heads[0].mT, heads[1].mT))
            self._match_attention(i, order=order)
            self._match_units(_block_names(i), a[f"{i}.neuron"], b[f"{i}.neuron"])
            self._apply(f"{i + 1}", polar_fixing_ones(a[f"{i + 1}"].mT @ b[f"{i + 1}"]))
        self._match_units(CLASSIFIER, a["hidden"], b["hidden"])
        descent = _Descent(self._now, self._axes, n, self._mlp)
        return self._uncentred(descent.run(self._target, X, architecture.forward, steps))

    def _distance(self) -> float:
        return sum(float((self._now[n] - w).square().sum()) for n, w in self._target.items())

    def _round(self, *, first: bool) -> None:
        """Fit every axis once; in the first round outputs are not yet in one basis."""
        for i in range(self._blocks):
            self._match_attention(i, outputs_known=not first)
            self._turn(f"{i}.feature", readers=not first)
            self._match_neurons(_block_names(i), outputs_known=not first)
            self._turn(f"{i + 1}", readers=not first)
        self._match_neurons(CLASSIFIER)

    def _match_attention(
        self, i: int, *, order: Tensor | None = None, outputs_known: bool = True
    ) -> None:
        """Heads in B's order and bases; in a given order, if there is one."""
        at, site = f"blocks.{i}.", self._attention
        own, other = (
            {n: w[f"{at}{n}"] for n in site.names} for w in (self._now, self._target)
        )
        heads = HeadPermutation()
        if order is None:
            alike = head_similarity(site.detail, own, other, outputs_known=outputs_known)
            order = heads.assign(site, alike).queries
        own |= heads.act(site, own, HeadOrder(order, order))
        own |= QueryKeyBasis().act(site, own, QueryKeyBasis().fit(site, own, other))
        values, outputs = (own["W_V"], other["W_V"]), (own["W_O"].mT, other["W_O"].mT)
        H = nearest_matrix(values, outputs, dual_known=outputs_known)
        own |= ValueOutputBasis().act(site, own, H)
        self._now |= {f"{at}{n}": w for n, w in own.items()}

    def _match_neurons(self, names: Mapping[str, str], *, outputs_known: bool = True) -> None:
        """Neurons of an MLP in B's order and scales."""
        own, other = ({k: w[n] for k, n in names.items()} for w in (self._now, self._target))
        neurons, scale, site = NeuronPermutation(), NeuronScale(), self._mlp
        alike = neurons.similarity(site, own, other, outputs_known=outputs_known)
        own |= neurons.act(site, own, assign(alike))
        if outputs_known:
            s = scale.fit(site, own, other)
        else:
            sizes = [
                torch.cat([w["W_A"], w["b_A"].unsqueeze(0)]).norm(dim=0) for w in (own, other)
            ]
            s = sizes[1] / sizes[0].clamp_min(1e-30)
            s = torch.where(s > 0, s, 1.0)
        own |= scale.act(site, own, s)
        self._now |= {n: own[k] for k, n in names.items()}

    def _match_units(self, names: Mapping[str, str], a: Tensor, b: Tensor) -> None:
        """Neurons by their activations ``[samples, f]``, scaled to be as active as b's."""
        own = {k: self._now[n] for k, n in names.items()}
        order = assign(_correlations(a, b))
        own |= NeuronPermutation().act(self._mlp, own, order)
        sizes = [z.square().mean(0).sqrt() + 1e-6 for z in (a[:, order], b)]
        own |= NeuronScale().act(self._mlp, own, (sizes[1] / sizes[0]).clamp(0.05, 20.0))
        self._now |= {n: own[k] for k, n in names.items()}

    def _turn(self, axis: str, *, readers: bool) -> None:
        """Fit one width axis: ``W → W T`` of what writes it, ``Tᵀ W`` of what reads it."""
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


def _block_names(i: int) -> dict[str, str]:
    """Tensors of the MLP of a block."""
    return {n: f"blocks.{i}.{n}" for n in ("W_A", "b_A", "W_B")}


def _activations(weights: Weights, X: Tensor, positions: Tensor, blocks: int) -> Weights:
    """Activations of every axis for inputs ``X [n, T, patch]``: by axis, ``[samples, size]``."""
    out: Weights = {}
    x = X @ weights["embedding.W"] + weights["embedding.b"] if "embedding.W" in weights else X
    x = x + positions[: X.shape[-2]]
    for i in range(blocks):
        block = under_prefix(weights, f"blocks.{i}.")
        x = layer_norm(x, EPS)
        q, k, v = (torch.einsum("btd,hdk->bhtk", x, block[f"W_{p}"]) for p in "QKV")
        mixed = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v
        heads = torch.einsum("bhtv,hvd->hbtd", mixed, block["W_O"])
        out[f"{i}.head"] = heads.flatten(1, 2)
        x = layer_norm(heads.sum(0), EPS)
        out[f"{i}.feature"] = x.flatten(0, 1)
        neurons = torch.relu(x @ block["W_A"] + block["b_A"])
        out[f"{i}.neuron"] = neurons.flatten(0, 1)
        x = neurons @ block["W_B"] + block["b_B"]
        out[f"{i + 1}"] = layer_norm(x, EPS).flatten(0, 1)
    x = layer_norm(x, EPS).mean(-2)
    out["hidden"] = torch.relu(x @ weights["classifier.W_1"] + weights["classifier.b_1"])
    return out


def _correlations(a: Tensor, b: Tensor) -> Tensor:
    """Correlations of units of b with units of a, ``[n, n]``."""
    x, y = (z - z.mean(0) for z in (a, b))
    x, y = (z / z.norm(dim=0).clamp_min(1e-9) for z in (x, y))
    products: Tensor = y.mT @ x
    return products


class _Descent:
    """Gradient descent on all continuous symmetries of a network, parametrised from zero."""

    def __init__(self, weights: Weights, axes: Axes, blocks: int, mlp: Site) -> None:
        self._start, self._axes, self._blocks, self._mlp = weights, axes, blocks, mlp
        D = weights["classifier.W_1"].shape[0]
        self._plane = hyperplane(D)
        zero = torch.zeros
        self._turns = {a: zero(D - 1, D - 1) for a in axes if a != "0"}
        shape = weights["blocks.0.W_Q"].shape
        self._bases = {
            f"{i}.{p}": zero(shape[0], shape[2], shape[2]) for i in range(blocks) for p in "QV"
        }
        self._scales = {f"{i}": zero(len(weights[f"blocks.{i}.b_A"])) for i in range(blocks)}
        self._scales["hidden"] = zero(len(weights["classifier.b_1"]))

    def run(self, B: Weights, X: Tensor, forward: Forward, steps: int) -> Weights:
        """Descend, and return the network in float64."""
        first, second = ({n: x.float() for n, x in w.items()} for w in (self._start, B))
        X = X.float()
        with torch.no_grad():
            outputs = [torch.softmax(forward(w, X), -1) for w in (first, second)]
            target = (outputs[0] + outputs[1]) / 2
        groups = (self._turns, self._bases, self._scales)
        parameters = [p.requires_grad_() for group in groups for p in group.values()]
        optimiser = torch.optim.Adam(parameters, RATE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps)
        generator = torch.Generator().manual_seed(0)
        for _ in range(steps):
            rows = torch.randint(0, len(X), (min(BATCH, len(X)),), generator=generator)
            moved = self._moved()
            t = float(torch.rand((), generator=generator)) * 0.4 + 0.3
            between = {n: (1 - t) * moved[n] + t * second[n] for n in second}
            log_p = torch.log_softmax(forward(between, X[rows]), -1)
            loss = -(target[rows] * log_p).sum(-1).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        for group in groups:
            for name, p in group.items():
                group[name] = p.detach().double()
        return self._moved()

    def _moved(self) -> Weights:
        """The network at the current parameters."""
        w = {n: x.to(next(iter(self._turns.values())).dtype) for n, x in self._start.items()}
        for axis, K in self._turns.items():
            inner = torch.linalg.matrix_exp(K - K.mT) - torch.eye(len(K), dtype=K.dtype)
            plane = self._plane.to(K.dtype)
            T = torch.eye(len(plane), dtype=K.dtype) + plane @ inner @ plane.mT
            write, read = self._axes[axis]
            w |= {n: w[n] @ T for n in write} | {n: T.mT @ w[n] for n in read}
        for i in range(self._blocks):
            at = f"blocks.{i}."
            for plain, dual, X in (
                ("W_Q", "W_K", self._bases[f"{i}.Q"]),
                ("W_V", "W_O", self._bases[f"{i}.V"]),
            ):
                back = torch.linalg.matrix_exp(-X)
                w[f"{at}{plain}"] = w[f"{at}{plain}"] @ torch.linalg.matrix_exp(X)
                D = w[f"{at}{dual}"]
                w[f"{at}{dual}"] = D @ back.mT if dual == "W_K" else back @ D
        named = [(f"{i}", _block_names(i)) for i in range(self._blocks)]
        for key, names in (*named, ("hidden", CLASSIFIER)):
            own = {k: w[n] for k, n in names.items()}
            scaled = NeuronScale().act(self._mlp, own, self._scales[key].exp())
            w |= {names[k]: x for k, x in scaled.items()}
        return w
