"""Alignment of two networks without residuals, by their weights or by their activations.

The LayerNorms of such a network (of the zoo) have no gains: `LayerNorm(x T) = LayerNorm(x) T` for
every orthogonal T that fixes the all-ones vector, so each width axis after the first takes a T of
its own, between the tensors that write it and those that read it.

With inputs, units are paired by their activations (no labels are needed) and the T are fitted to
activations. Then all continuous parameters follow a gradient: the network between A, moved, and B
should output the mean of the outputs of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from transformer_nfn.checkpoints.alignment.frame import GAUGES, into_frame, out_of_frame
from transformer_nfn.checkpoints.families import Model
from transformer_nfn.checkpoints.symmetries import (
    HeadPermutation,
    NeuronPermutation,
    NeuronScale,
    QueryKeyBasis,
    Site,
    ValueOutputBasis,
)
from transformer_nfn.checkpoints.symmetries.attention import HeadOrder, head_similarity
from transformer_nfn.checkpoints.symmetries.base import Sites, Weights
from transformer_nfn.functional import layer_norm, sinusoids
from transformer_nfn.functional.description import StreamGroup, Transformer, axes_of
from transformer_nfn.functional.transformer import transformer
from transformer_nfn.spaces.actions.permutation import assign
from transformer_nfn.spaces.actions.solvers import nearest_matrix, polar_fixing_ones
from transformer_nfn.symmetry.enlarged import hyperplane

ROUNDS = 20
SETTLED = 1e-5
STEPS = 150
RATE, BATCH = 0.04, 32
Stream = tuple[tuple[str, ...], tuple[str, ...]]
"""Names of the tensors that write a stream, and of those that read it."""


class ChainAlignment:
    """A on its way to B: iterate it for its tensors, by canonical name. See `Alignment`.

    Attributes:
        config: the description of both.
        action: group that acts on each stream.
        rounds: number of rounds over all streams, or of gradient steps.
        before: squares of ``A − B`` by part. after: likewise of the aligned network. sizes: of B.
    """

    def __init__(
        self, A: Model, B: Model, *, rounds: int | None = None, inputs: Tensor | None = None
    ) -> None:
        """Align two networks.

        Args:
            A: one. B: the other, of the same description.
            rounds: limit, where only weights are used; gradient steps, with inputs.
            inputs: ``[n, tokens, width]`` without labels.
        """
        self.config = A.description
        self.action: StreamGroup = self.config.stream_group
        a, b = (m.read(m.names, torch.float64) for m in (A, B))
        self._names = list(a)
        state = _State(self.config, a, b)
        if inputs is None:
            self._moved, self.rounds = state.run(ROUNDS if rounds is None else rounds)
        else:
            self.rounds = STEPS if rounds is None else rounds
            self._moved = state.on_inputs(inputs, self.rounds)
        rounded = {n: w.to(A.dtype).double() for n, w in self._moved.items()}
        self.before, self.after = (_squares(x, b) for x in (a, rounded))
        self.sizes = _squares(b, {n: torch.zeros_like(w) for n, w in b.items()})

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self._moved[name]) for name in self._names)


def _squares(a: Weights, b: Weights) -> dict[str, float]:
    """Squares of ``a − b`` by part: a block, or the ends."""
    out: dict[str, float] = {}
    for name, w in b.items():
        first = name.partition(".")[0]
        part = first if first.isdigit() else "ends"
        out[part] = out.get(part, 0.0) + float((a[name] - w).square().sum())
    return out


class _State:
    """One network on its way to another, in float64, in the frame of comparison."""

    def __init__(self, config: Transformer, a: Weights, b: Weights) -> None:
        self._config, self._depth = config, len(config.stacks[0].blocks)
        self._attentions = list(HeadPermutation().sites(config))
        self._mlps = list(NeuronPermutation().sites(config))
        self._streams = [_split(names) for names in config.streams]
        self._gauges: Sites = [(s, site) for s in GAUGES for site in s.sites(config)]
        self._B, self._target, self._now = b, dict(b), dict(a)
        for side in (self._target, self._now):
            into_frame(self._gauges, side)

    def run(self, rounds: int) -> tuple[Weights, int]:
        """Fit all streams in turn, until the distance settles."""
        best, value = dict(self._now), self._distance()
        used, last = 0, float("inf")
        for used in range(1, rounds + 1):
            self._round(first=used == 1)
            distance = self._distance()
            if distance < value:
                best, value = dict(self._now), distance
            if last - distance <= SETTLED * distance and used > 2:
                break
            last = distance
        return self._finished(best), used

    def _finished(self, weights: Weights) -> Weights:
        """With B's means, on which the function does not depend."""
        out_of_frame(self._gauges, weights, self._B)
        return weights

    def on_inputs(self, X: Tensor, steps: int) -> Weights:
        """Match units by their activations, then follow a gradient."""
        X = X.double()
        a, b = (_activations(self._config, w, X) for w in (self._now, self._target))
        for i in range(self._depth):
            T = polar_fixing_ones(a[f"{i}.feature"].mT @ b[f"{i}.feature"])
            self._apply(2 * i, T)
            heads = [
                (z - z.mean(1, keepdim=True)).flatten(1)
                for z in (a[f"{i}.head"] @ T, b[f"{i}.head"])
            ]
            order = assign(_correlations(heads[0].mT, heads[1].mT))
            self._match_attention(i, order=order)
            self._match_units(i, a[f"{i}.neuron"], b[f"{i}.neuron"])
            self._apply(2 * i + 1, polar_fixing_ones(a[f"{i + 1}"].mT @ b[f"{i + 1}"]))
        self._match_units(self._depth, a["hidden"], b["hidden"])
        descent = _Descent(self._config, self._now, self._streams, self._attentions, self._mlps)
        return self._finished(descent.run(self._target, X, steps))

    def _distance(self) -> float:
        return sum(float((self._now[n] - w).square().sum()) for n, w in self._target.items())

    def _round(self, *, first: bool) -> None:
        """Fit every stream once; in the first round outputs are not yet in one basis."""
        for i in range(self._depth):
            self._match_attention(i, outputs_known=not first)
            self._turn(2 * i, readers=not first)
            self._match_neurons(i, outputs_known=not first)
            self._turn(2 * i + 1, readers=not first)
        self._match_neurons(self._depth)

    def _match_attention(
        self, i: int, *, order: Tensor | None = None, outputs_known: bool = True
    ) -> None:
        """Heads in B's order and bases; in a given order, if there is one."""
        site = self._attentions[i]
        own, other = (site.pick(w) for w in (self._now, self._target))
        heads = HeadPermutation()
        if order is None:
            alike = head_similarity(site.detail, own, other, outputs_known=outputs_known)
            order = heads.assign(site, alike).queries
        own |= heads.act(site, own, HeadOrder(order, order))
        own |= QueryKeyBasis().act(site, own, QueryKeyBasis().fit(site, own, other))
        values, outputs = (own["W_V"], other["W_V"]), (own["W_O"].mT, other["W_O"].mT)
        H = nearest_matrix(values, outputs, dual_known=outputs_known)
        own |= ValueOutputBasis().act(site, own, H)
        self._now |= site.put(own)

    def _match_neurons(self, i: int, *, outputs_known: bool = True) -> None:
        """Neurons of an MLP in B's order and scales."""
        site = self._mlps[i]
        own, other = (site.pick(w) for w in (self._now, self._target))
        neurons, scale = NeuronPermutation(), NeuronScale()
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
        self._now |= site.put(own | scale.act(site, own, s))

    def _match_units(self, i: int, a: Tensor, b: Tensor) -> None:
        """Neurons by their activations ``[samples, f]``, scaled to be as active as b's."""
        site = self._mlps[i]
        own = site.pick(self._now)
        order = assign(_correlations(a, b))
        own |= NeuronPermutation().act(site, own, order)
        sizes = [z.square().mean(0).sqrt() + 1e-6 for z in (a[:, order], b)]
        own |= NeuronScale().act(site, own, (sizes[1] / sizes[0]).clamp(0.05, 20.0))
        self._now |= site.put(own)

    def _turn(self, stream: int, *, readers: bool) -> None:
        """Fit one stream: ``W → W T`` of what writes it, ``Tᵀ W`` of what reads it."""
        write, read = self._streams[stream]
        D = self._config.width
        cross = torch.zeros(D, D, dtype=torch.float64)
        for names, dim in ((write, -1), (read if readers else (), -2)):
            for n in names:
                x, y = (w[n].movedim(dim, -1).reshape(-1, D) for w in (self._now, self._target))
                cross += x.mT @ y / max(float(x.norm() * y.norm()), 1e-300)
        self._apply(stream, polar_fixing_ones(cross))

    def _apply(self, stream: int, T: Tensor) -> None:
        write, read = self._streams[stream]
        self._now |= {n: self._now[n] @ T for n in write}
        self._now |= {n: T.mT @ self._now[n] for n in read}


def _split(names: tuple[str, ...]) -> Stream:
    """Tensors of a stream that write it, and those that read it."""
    write = tuple(name for name in names if axes_of(name)[-1] == "D")
    return write, tuple(name for name in names if name not in write)


def _activations(config: Transformer, weights: Weights, X: Tensor) -> Weights:
    """Activations of every axis for inputs ``X [n, T, width]``: by axis, ``[samples, size]``."""
    out: Weights = {}
    x = X @ weights["patch"] + weights["patch_bias"] if "patch" in weights else X
    x = x + sinusoids(x.shape[-2], x.shape[-1]).to(x)
    for i in range(len(config.stacks[0].blocks)):
        W_Q, W_K, W_V, W_O, W_A, W_B, b_A, b_B = (
            weights[f"{i}.{n}"] for n in ("W_Q", "W_K", "W_V", "W_O", "W_A", "W_B", "b_A", "b_B")
        )
        x = layer_norm(x, config.eps)
        q, k, v = (torch.einsum("btd,hdk->bhtk", x, W) for W in (W_Q, W_K, W_V))
        mixed = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v
        heads = torch.einsum("bhtv,hvd->hbtd", mixed, W_O)
        out[f"{i}.head"] = heads.flatten(1, 2)
        x = layer_norm(heads.sum(0), config.eps)
        out[f"{i}.feature"] = x.flatten(0, 1)
        neurons = torch.relu(x @ W_A + b_A)
        out[f"{i}.neuron"] = neurons.flatten(0, 1)
        x = neurons @ W_B + b_B
        out[f"{i + 1}"] = layer_norm(x, config.eps).flatten(0, 1)
    x = layer_norm(x, config.eps).mean(-2)
    out["hidden"] = torch.relu(x @ weights["classifier.W_A"] + weights["classifier.b_A"])
    return out


def _correlations(a: Tensor, b: Tensor) -> Tensor:
    """Correlations of units of b with units of a, ``[n, n]``."""
    x, y = (z - z.mean(0) for z in (a, b))
    x, y = (z / z.norm(dim=0).clamp_min(1e-9) for z in (x, y))
    products: Tensor = y.mT @ x
    return products


class _Descent:
    """Gradient descent on all continuous symmetries of a network, parametrised from zero."""

    def __init__(
        self,
        config: Transformer,
        weights: Weights,
        streams: list[Stream],
        attentions: list[Site],
        mlps: list[Site],
    ) -> None:
        self._config, self._start, self._streams = config, weights, streams
        self._attentions, self._mlps = attentions, mlps
        D = config.width
        self._plane = hyperplane(D)
        zero = torch.zeros
        self._turns = {i: zero(D - 1, D - 1) for i in range(len(streams))}
        heads = [(site.detail.heads, site.detail.d_k, site.detail.d_k) for site in attentions]
        self._queries = {i: zero(shape) for i, shape in enumerate(heads)}
        self._values = {i: zero(shape) for i, shape in enumerate(heads)}
        self._scales = {i: zero(site.shape("b_A")) for i, site in enumerate(mlps)}

    def run(self, B: Weights, X: Tensor, steps: int) -> Weights:
        """Descend, and return the network in float64."""
        first, second = ({n: x.float() for n, x in w.items()} for w in (self._start, B))
        X = X.float()

        def forward(weights: Mapping[str, Tensor], X: Tensor) -> Tensor:
            return transformer(self._config, weights, X)

        with torch.no_grad():
            outputs = [torch.softmax(forward(w, X), -1) for w in (first, second)]
            target = (outputs[0] + outputs[1]) / 2
        groups = (self._turns, self._queries, self._values, self._scales)
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
        w = {n: x.to(self._turns[0].dtype) for n, x in self._start.items()}
        for stream, K in self._turns.items():
            inner = torch.linalg.matrix_exp(K - K.mT) - torch.eye(len(K), dtype=K.dtype)
            plane = self._plane.to(K.dtype)
            T = torch.eye(len(plane), dtype=K.dtype) + plane @ inner @ plane.mT
            write, read = self._streams[stream]
            w |= {n: w[n] @ T for n in write} | {n: T.mT @ w[n] for n in read}
        for i, site in enumerate(self._attentions):
            own = site.pick(w)
            for plain, dual, X in (
                ("W_Q", "W_K", self._queries[i]), ("W_V", "W_O", self._values[i])
            ):
                back = torch.linalg.matrix_exp(-X)
                D = own[dual]
                own[plain] = own[plain] @ torch.linalg.matrix_exp(X)
                own[dual] = D @ back.mT if dual == "W_K" else back @ D
            w |= site.put(own)
        for i, site in enumerate(self._mlps):
            own = site.pick(w)
            w |= site.put(NeuronScale().act(site, own, self._scales[i].exp()))
        return w
