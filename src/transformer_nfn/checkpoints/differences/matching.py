"""Tensors of two models in one basis: as their files have them, or after B was aligned to A."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from transformer_nfn.checkpoints.differences.bases import Matched, SharedBasis, Side
from transformer_nfn.checkpoints.differences.change import spectrum
from transformer_nfn.checkpoints.families import Model
from transformer_nfn.checkpoints.pieces import Piece, filled
from transformer_nfn.checkpoints.proof.attention import equal_pairs, match_heads, normed_basis
from transformer_nfn.checkpoints.proof.blocks import neuron_features
from transformer_nfn.checkpoints.reduced import ReducedBlock
from transformer_nfn.checkpoints.sketches import BlockSketch, unit_directions
from transformer_nfn.checkpoints.stream import BlockStreams
from transformer_nfn.checkpoints.survivors import SURVIVED, match_heads_of, match_neurons_of
from transformer_nfn.checkpoints.symmetries import (
    QueryKeyBasis,
    Site,
    StreamMap,
    ValueOutputBasis,
)
from transformer_nfn.checkpoints.symmetries.neurons import neuron_scales
from transformer_nfn.checkpoints.symmetries.query_key_norm import GAINS, reorder_gains
from transformer_nfn.functional.description import KEPT, Attention, axes_of
from transformer_nfn.spaces.actions.permutation import match_rows
from transformer_nfn.spaces.actions.solvers import Pair
from transformer_nfn.symmetry.rounding import rounding_rms


def stored_pair(name: str, short: str, A: Model, B: Model, other: str) -> Matched:
    """A tensor of both models as their files have it, on the rows that both have.

    Args:
        name: canonical name in A.
        short: the name without the block.
        A: one model. B: the other.
        other: canonical name in B.
    """
    unit = max(rounding_rms(m.dtype) for m in (A, B)) ** 2
    stored = [m[n].double() for m, n in ((A, name), (B, other))]
    if stored[0].ndim == 1:
        stored = [w[: min(map(len, stored))] for w in stored]
    pair = [columns(n, w) for n, w in zip((name, other), stored, strict=True)]
    a, b = (w[: min(map(len, pair))] for w in pair)
    return Matched(short, a, b, torch.diag_embed(unit * (a.square() + b.square()).mean(-2)))


def columns(name: str, w: Tensor) -> Tensor:
    """A canonical tensor as ``[n, rows, d]``, rows along the stream.

    Example:
        >>> columns("0.W_A", torch.zeros(4, 16)).shape  # 16 neurons
        torch.Size([16, 4, 1])
    """
    if w.ndim == 1:
        return w.reshape(1, -1, 1)
    if name.startswith(KEPT):
        return w.flatten(1).unsqueeze(-1)
    axes = axes_of(name)
    if w.ndim == 2:
        return (w.mT if axes[0] == "D" else w).unsqueeze(-1)
    return w if axes[1] == "D" else w.mT


@dataclass(frozen=True)
class Units:
    """Units of one block that both models have, in corresponding order.

    Attributes:
        queries: heads by the prefix of their attention: of A, in its order, and of B.
        groups: likewise of keys and values.
        neurons: of A, and of B.
    """

    queries: dict[str, Pair]
    groups: dict[str, Pair]
    neurons: Pair


def match_units(
    a: ReducedBlock, b: ReducedBlock, sketches: tuple[BlockSketch, BlockSketch]
) -> Units:
    """Match heads and neurons of two blocks by their sketches in one basis of the stream.

    Where one of the two has fewer, those that survived are matched.
    """
    queries, groups = {}, {}
    units = [unit_directions(sketch) for sketch in sketches]
    others = dict(b.attentions())
    for prefix, config in a.attentions():
        heads = [s.heads[prefix] for s in sketches]
        other = others[prefix]
        if (config.heads, config.groups) == (other.heads, other.groups):
            order, of_groups = match_heads(config, (heads[0], heads[1]), [None, None], None)
            queries[prefix], groups[prefix] = _sorted(order), _sorted(of_groups)
        else:
            shares = config.heads // config.groups, other.heads // other.groups
            found = match_heads_of(units[0], units[1], prefix)
            queries[prefix], groups[prefix] = _surviving_groups(*found, *shares)
    mlp = a.description.mlp
    if len(units[0].read) != len(units[1].read):
        partners, alike = match_neurons_of(units[0], units[1])
        kept = ((partners >= 0) & (alike >= SURVIVED)).nonzero().flatten()
        of_A, order = _sorted(partners[kept])
        return Units(queries, groups, (of_A, kept[order]))
    scaled = neuron_scales(mlp) is not None
    features = [neuron_features(s.neurons, gated=mlp.gated, scaled=scaled) for s in sketches]
    return Units(queries, groups, _sorted(match_rows(features[1], features[0]).index))


def _surviving_groups(partners: Tensor, alike: Tensor, share: int, other: int) -> tuple[Pair, Pair]:
    """Heads, and groups of keys and values, that both have: groups of B with all of their heads.

    Args:
        partners: head of A that each head of B is. alike: their cosines.
        share: heads in a group of A. other: in a group of B.
    """
    of_group = partners.reshape(-1, other)
    sources = of_group[:, 0] // share
    whole = (of_group // share == sources[:, None]).all(1) & (alike >= SURVIVED).reshape(
        -1, other
    ).all(1)
    kept = whole.nonzero().flatten()
    kept = kept[sources[kept].argsort()]
    order = of_group[kept].argsort(1)
    of_B = (kept[:, None] * other + order).flatten()
    return (partners[of_B], of_B), (sources[kept], kept)


def _sorted(partners: Tensor) -> Pair:
    """Units of A and of B that correspond, in the order of A; from A's unit for each of B's."""
    order = partners.argsort()
    return partners[order], order


@dataclass(frozen=True)
class AlignedBlock:
    """Every tensor of two blocks in the bases of A: iterate it.

    Attributes:
        a: a block of A. b: its partner of B.
        streams: take B's streams to A's.
        units: heads and neurons that both have.
        allowed: multiple of the rounding error up to which a tensor is unchanged.
    """

    a: ReducedBlock
    b: ReducedBlock
    streams: BlockStreams
    units: Units
    allowed: float

    @property
    def stream(self) -> StreamMap:
        """Takes B's stream to A's."""
        return self.streams.before

    def __iter__(self) -> Iterator[Matched]:
        for prefix, config in self.a.attentions():
            values, outputs = (
                replace(m, units=units[prefix][0])
                for m, units in zip(
                    self._value_output(prefix, config),
                    (self.units.groups, self.units.queries),
                    strict=True,
                )
            )
            yield from self._query_key(prefix, config)
            yield from (values, outputs)
            a, b = (side.output_bias(prefix) for side in (self.a, self.b))
            for vector in self._vector(f"{prefix}b_O", a, b):
                yield _unexplained(vector, values, outputs, self.allowed)
        yield from (replace(m, units=self.units.neurons[0]) for m in self._mlp())
        yield from self._vector("b_B", self.a.mlp_bias(), self.b.mlp_bias())
        others = self.b.norms()
        for name, piece in self.a.norms().items():
            yield from self._vector(name, piece, others.get(name), gain=name.endswith(".g"))

    def _query_key(self, prefix: str, config: Attention) -> tuple[Matched, ...]:
        pieces = [side.query_key(prefix) for side in (self.a, self.b)]
        chosen = {"Q": self.units.queries[prefix], "K": self.units.groups[prefix]}
        sides = []
        for part, orders in chosen.items():
            weights = [p[f"W_{part}"][o] for p, o in zip(pieces, orders, strict=True)]
            biases = [
                p[f"b_{part}"][o] if f"b_{part}" in p else None
                for p, o in zip(pieces, orders, strict=True)
            ]
            crosses = bool(prefix) and part == "K"
            sides.append(Side.of(weights[0], self._read(weights[1], crosses), *biases))
            gain = f"{part.lower()}_norm.g"
            if config.qk_norm == "all heads":
                for p, o in zip(pieces, orders, strict=True):
                    p[gain] = p[gain][o]
        config = self._cut(prefix, config)
        names = (f"{prefix}W_Q", f"{prefix}W_K")
        shared = SharedBasis(
            QueryKeyBasis(), self._site(config), names, sides[0], sides[1], self.allowed
        )
        if not config.qk_norm:
            return shared.best()
        rows = [[x.reshape(config.groups, -1, config.d_k) for x in (s.a, s.b)] for s in sides]
        equal = equal_pairs((pieces[0], pieces[1]), config)
        G, order = normed_basis(config, (rows[0][0], rows[0][1]), (rows[1][0], rows[1][1]), equal)
        back = order.argsort(-1)
        norms: list[Matched] = []
        for name in GAINS:
            x, y = (side[name] for side in pieces)
            moved = Piece(reorder_gains(y.value, back), y.error.sum())
            norms += self._vector(f"{prefix}{name}", Piece(x.value, x.error.sum()), moved, None)
        return (*shared.matched(G), *norms)

    def _value_output(self, prefix: str, config: Attention) -> tuple[Matched, Matched]:
        values, outputs = [], []
        for i, side in enumerate((self.a, self.b)):
            values.append(side.reader(f"{prefix}W_V")[0][self.units.groups[prefix][i]])
            W_O = side.writer(f"{prefix}W_O")[self.units.queries[prefix][i]]
            outputs.append(Piece((self.stream(W_O.value) if i else W_O.value).mT, W_O.error))
        return SharedBasis(
            ValueOutputBasis(),
            self._site(self._cut(prefix, config)),
            (f"{prefix}W_V", f"{prefix}W_O"),
            Side.of(values[0], self._read(values[1], bool(prefix))),
            Side.of(outputs[0], outputs[1]),
            self.allowed,
        ).best()

    def _mlp(self) -> Iterator[Matched]:
        mlp, f = self.a.description.mlp, len(self.units.neurons[0])
        write = []
        for i, side in enumerate((self.a, self.b)):
            experts = [side.writer(f"{expert}W_B") for expert in side.description.mlp.prefixes]
            W_B = _joined(experts, 0)[self.units.neurons[i]]
            value = self.stream(W_B.value) if i else W_B.value
            write.append(Piece(value.unsqueeze(-1), W_B.error.unsqueeze(-1)))
        shared = SharedBasis(
            ValueOutputBasis(),
            self._site(Attention(f, f, 1, 1, 1.0)),
            ("W_A", "W_B"),
            self._neurons_read("W_A"),
            Side.of(write[0], write[1]),
            self.allowed,
        )
        one = torch.ones(f, 1, 1, dtype=torch.float64)
        yield from shared.best() if neuron_scales(mlp) else shared.matched(one)
        if mlp.gated:
            yield self._neurons_read("W_G").moved("W_G", one)

    def _neurons_read(self, tensor: str) -> Side:
        """What neurons read, one matrix ``[rows, 1]`` each; those of experts one after another."""
        weights, biases = [], []
        for side, order in zip((self.a, self.b), self.units.neurons, strict=True):
            read = [side.reader(f"{expert}{tensor}") for expert in side.description.mlp.prefixes]
            W = _joined([weight for weight, _ in read], -1)
            shifts = [bias for _, bias in read if bias is not None]
            b = _joined(shifts, 0) if shifts else None
            columns = Piece(W.value[:, order].mT.unsqueeze(-1), W.error[order].unsqueeze(-1))
            weights.append(columns)
            biases.append(None if b is None else Piece(b.value[order, None], b.error[order, None]))
        return Side.of(weights[0], self._read(weights[1]), *biases)

    def _read(self, piece: Piece, crosses: bool = False) -> Piece:
        """A piece of B ``[n, D, d]`` that reads the stream (or an encoder), in A's stream."""
        stream = self.streams.memory if crosses else self.stream
        return Piece(stream.columns(piece.value), piece.error)

    def _cut(self, prefix: str, config: Attention) -> Attention:
        """The attention with the heads that both have."""
        queries, groups = self.units.queries[prefix][0], self.units.groups[prefix][0]
        return replace(config, heads=len(queries), groups=len(groups))

    def _site(self, config: Attention) -> Site:
        return Site(self.a.network.description, {}, config)

    def _vector(
        self, name: str, a: Piece | None, b: Piece | None, gain: bool | None = False
    ) -> Iterator[Matched]:
        """A vector of the stream (with ``gain`` None of another axis); zeros where one has none."""
        pair = filled(a, b)
        if pair is None:
            return
        a, b = pair
        moved = b.value if gain is None else self.stream(b.value, gain=gain)
        x, y = (w.double().reshape(1, -1, 1) for w in (a.value, moved))
        noise = (a.error + b.error).double().reshape(1, 1, 1) / x.shape[1]
        yield Matched(name, x, y, noise)


def _joined(pieces: list[Piece], dim: int) -> Piece:
    """Neurons of several experts as those of one MLP."""
    values, errors = [p.value for p in pieces], [p.error for p in pieces]
    return pieces[0] if len(pieces) == 1 else Piece(torch.cat(values, dim), torch.cat(errors))


def _unexplained(vector: Matched, values: Matched, outputs: Matched, allowed: float) -> Matched:
    """An output bias without what follows from a change of values and outputs.

    Value biases are read through both: a change of ``W_V`` moves the bias within what the changed
    directions write, a change of ``W_O`` within the directions that it changes.
    """
    heads, rows, d = outputs.a.shape
    change_V, change_O = (m.b - m.a for m in (values, outputs))
    share = heads // len(values.a)
    spread = change_V.repeat_interleave(share, 0).movedim(1, 0).reshape(-1, heads * d)
    write = outputs.b.movedim(1, 0).reshape(rows, heads * d)
    parts = []
    for matched, span in (
        (values, write @ spread.mT),
        (outputs, change_O.movedim(1, 0).reshape(rows, heads * d)),
    ):
        rank = spectrum(matched.white(), allowed).rank
        parts.append(torch.linalg.svd(span, full_matrices=False)[0][:, :rank])
    basis = torch.linalg.qr(torch.cat(parts, 1)).Q
    difference = (vector.b - vector.a)[0]
    return replace(vector, b=vector.b - basis @ (basis.mT @ difference))
