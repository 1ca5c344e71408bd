"""Tensors of two blocks in one basis: as the files have them, or after every symmetry was fitted.

Under a disguise the basis of a head is fitted on what was not changed. Where one of the two tensors
that share a basis (queries and keys, values and outputs, what a neuron reads and writes) fits alone
within rounding, it determines the basis. Where neither does, the basis and a change of low rank are
fitted together, by turns, with the smallest rank that leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from transformer_nfn.checkpoints.differences.change import spectrum, unwhitened, whitened
from transformer_nfn.checkpoints.families import Model
from transformer_nfn.checkpoints.proof.attention import equal_pairs, match_heads, normed_basis
from transformer_nfn.checkpoints.proof.blocks import neuron_features
from transformer_nfn.checkpoints.reduced import Piece, ReducedBlock, rounding_rms
from transformer_nfn.checkpoints.sketches import BlockSketch
from transformer_nfn.checkpoints.stream import StreamMap
from transformer_nfn.checkpoints.symmetries import QueryKeyBasis, Site, ValueOutputBasis
from transformer_nfn.checkpoints.symmetries.base import Symmetry
from transformer_nfn.checkpoints.symmetries.neurons import neuron_scales
from transformer_nfn.functional.description import Attention, axes_of
from transformer_nfn.spaces.actions.permutation import match_rows
from transformer_nfn.spaces.actions.solvers import Pair

ROUNDS = 200
"""Largest number of turns between a basis and a change of low rank."""
SLOW, SETTLED = 0.96, 1e-18
"""They end when a turn leaves more than this share of the squares that the last one left, or when
so little is left of the change."""
DIRECT = 256
"""Smaller sizes up to which all singular values are computed."""
NOTHING = 1e-2
"""Share of a change up to which what its low-rank part leaves counts as nothing."""
LARGEST = 0.5
"""Largest rank that is tried, as a share of the smaller size of a tensor."""


@dataclass(frozen=True)
class Matched:
    """One tensor of both models in one basis.

    Attributes:
        name: canonical name without the block.
        a: of A, ``[n, rows, d]``: heads, the stream (and a bias), coordinates of a head; neurons
            and vectors have ``d = 1``.
        b: of B, likewise.
        noise: covariance of one row of ``b − a`` from rounding, ``[n, d, d]``.
    """

    name: str
    a: Tensor
    b: Tensor
    noise: Tensor

    @property
    def relative(self) -> float:
        """``‖b − a‖ / ‖a‖``."""
        return float((self.b - self.a).norm() / self.a.norm().clamp_min(1e-300))

    @property
    def rounding(self) -> float:
        """The same, expected of rounding alone."""
        squares = self.noise.diagonal(dim1=-2, dim2=-1).sum() * self.a.shape[-2]
        return float(squares.sqrt() / self.a.norm().clamp_min(1e-300))

    @property
    def is_vector(self) -> bool:
        """Whether it has one column, and so no rank."""
        return self.a.shape[0] * self.a.shape[2] == 1

    def white(self) -> Tensor:
        """The difference with noise of variance one, ``[rows, n · d]``."""
        return whitened(self.b - self.a, self.noise)


def stored_pair(name: str, short: str, A: Model, B: Model, other: str) -> Matched:
    """A tensor of both models as their files have it, on the rows that both have.

    Args:
        name: canonical name in A.
        short: the name without the block.
        A: one model. B: the other.
        other: canonical name in B.
    """
    unit = max(rounding_rms(m.dtype) for m in (A, B)) ** 2
    pair = [columns(name, m[n].double()) for m, n in ((A, name), (B, other))]
    count = min(len(w) for w in pair)
    a, b = (w[:count] for w in pair)
    return Matched(short, a, b, torch.diag_embed(unit * (a.square() + b.square()).mean(-2)))


def columns(name: str, w: Tensor) -> Tensor:
    """A canonical tensor as ``[n, rows, d]``, rows along the stream.

    Example:
        >>> columns("0.W_A", torch.zeros(4, 16)).shape  # 16 neurons
        torch.Size([16, 4, 1])
    """
    axes = axes_of(name)
    if w.ndim == 1:
        return w.reshape(1, -1, 1)
    if w.ndim == 2:
        return (w.mT if axes[0] == "D" else w).unsqueeze(-1)
    return w if axes[1] == "D" else w.mT


@dataclass
class _Side:
    """One of two tensors that share a basis, of both models: ``[n, rows, d]``, errors ``[n, d]``.

    Errors are expected squares of one entry.
    """

    a: Tensor
    b: Tensor
    error_a: Tensor
    error_b: Tensor

    @staticmethod
    def of(a: Piece, b: Piece, biases: tuple[Piece | None, Piece | None] = (None, None)) -> _Side:
        """From pieces ``[n, rows, d]`` with errors ``[n, d]`` summed over rows; a bias is a row."""
        sides = []
        for piece, bias, other in ((a, *biases), (b, *reversed(biases))):
            value = piece.value
            if bias is not None or other is not None:
                row = torch.zeros_like(value[:, :1]) if bias is None else bias.value.unsqueeze(-2)
                value = torch.cat([value, row], -2)
            sides.append((value.double(), piece.error.double() / piece.value.shape[-2]))
        return _Side(sides[0][0], sides[1][0], sides[0][1], sides[1][1])

    def moved(self, name: str, back: Tensor) -> Matched:
        """Both in A's basis: ``b · back`` against ``a``, ``back [n, d, d]``."""
        noise = back.mT @ (self.error_b.unsqueeze(-1) * back) + torch.diag_embed(self.error_a)
        return Matched(name, self.a, self.b @ back, noise)


@dataclass
class _Shared:
    """Two tensors that share a basis G: ``plain_B = plain_A G``, ``dual_A = dual_B Gᵀ``."""

    symmetry: Symmetry[Tensor]
    site: Site
    names: tuple[str, str]
    plain: _Side
    dual: _Side
    groups: int
    allowed: float

    def fit(self, low: tuple[Tensor, Tensor] | None = None, only: int | None = None) -> Tensor:
        """G ``[g, d, d]`` by least squares, after changes ``low`` of both were taken away.

        Args:
            low: change of the plain tensor in B's basis, and of the dual one in A's.
            only: fit to one of the two tensors alone, 0 or 1.
        """
        P, D = self.plain, self.dual
        P_B, D_A = (P.b, D.a) if low is None else (P.b - low[0], D.a - low[1])
        first, second = self.symmetry_names
        sizes = [
            x.unflatten(0, (self.groups, -1)).sum((1, 2)).clamp_min(1e-300) * y.shape[-2]
            for x, y in ((P.error_b, P.b), (D.error_a, D.a))
        ]
        noise = dict(zip((first, second), sizes, strict=True))
        if only is not None:
            ignored = (second, first)[only]
            noise[ignored] = torch.full_like(noise[ignored], torch.inf)
        outputs = second == "W_O"
        a = {first: P.a, second: D_A.mT if outputs else D_A}
        b = {first: P_B, second: D.b.mT if outputs else D.b}
        return self.symmetry.fit(self.site, a, b, noise)

    @property
    def symmetry_names(self) -> tuple[str, str]:
        """What the symmetry calls both tensors."""
        return ("W_Q", "W_K") if isinstance(self.symmetry, QueryKeyBasis) else ("W_V", "W_O")

    def spread(self, G: Tensor, side: _Side) -> Tensor:
        return G.repeat_interleave(len(side.a) // len(G), dim=0)

    def matched(self, G: Tensor) -> tuple[Matched, Matched]:
        """Both tensors in A's basis."""
        inverse = torch.linalg.pinv(G)
        plain = self.plain.moved(self.names[0], self.spread(inverse, self.plain))
        return plain, self.dual.moved(self.names[1], self.spread(G.mT, self.dual))

    def best(self) -> tuple[Matched, Matched]:
        """Both tensors in A's basis, which is fitted on what was not changed."""
        both = self.fit()
        found = self.matched(both)
        if all(self._within(m) for m in found):
            return found
        for only in (0, 1):
            side = (self.plain, self.dual)[only]
            if side.a.shape[-2] > side.a.shape[-1]:  # else any change is a change of basis
                alone = self.matched(self.fit(only=only))
                if self._within(alone[only]):
                    return alone
        return self._with_low_rank(both)

    def _within(self, matched: Matched) -> bool:
        """Whether rounding explains a difference."""
        white = matched.white()
        if float(white.square().mean()) > self.allowed**2:
            return False
        return spectrum(white, self.allowed).rank == 0

    def _with_low_rank(self, both: Tensor) -> tuple[Matched, Matched]:
        """Basis and low-rank changes of both tensors; the nearest basis where no rank suffices."""
        sizes = [min(s.a.shape[-2], s.a.shape[0] * s.a.shape[-1]) for s in (self.plain, self.dual)]
        limit = max(int(LARGEST * min(sizes)), 1)
        tried: dict[int, tuple[Tensor, bool]] = {}

        def leaves_nothing(rank: int) -> bool:
            if rank not in tried:
                tried[rank] = self._alternate(rank)
            return tried[rank][1]

        if not leaves_nothing(limit):
            return self.matched(self.symmetry.fit(self.site, *self._tensors()))
        high = 1
        while high < limit and not leaves_nothing(high):
            high = min(2 * high, limit)
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if leaves_nothing(middle) else (middle, high)
        return self.matched(tried[high][0])

    def _tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        first, second = self.symmetry_names
        dual = [w.mT if second == "W_O" else w for w in (self.dual.a, self.dual.b)]
        return {first: self.plain.a, second: dual[0]}, {first: self.plain.b, second: dual[1]}

    def _alternate(self, rank: int) -> tuple[Tensor, bool]:
        """G under changes of a rank, and whether these leave nothing."""
        G, last = self.fit(), float("inf")
        for _ in range(ROUNDS):
            low = []
            share, nothing = 0.0, True
            for side, moved in ((self.plain, self._plain(G)), (self.dual, self._dual(G))):
                part, left, clear = _truncated(moved, rank, self.allowed)
                low.append(part)
                share, nothing = share + left, nothing and clear
            if share > SLOW * last or share < SETTLED:
                break
            last = share
            G = self.fit((low[0], low[1]))
        return G, nothing

    def _plain(self, G: Tensor) -> Matched:
        """The plain tensor, ``P_B`` against ``P_A G``."""
        P, G = self.plain, self.spread(G, self.plain)
        noise = G.mT @ (P.error_a.unsqueeze(-1) * G) + torch.diag_embed(P.error_b)
        return Matched("", P.a @ G, P.b, noise)

    def _dual(self, G: Tensor) -> Matched:
        """The dual tensor, ``D_A`` against ``D_B Gᵀ``."""
        matched = self.dual.moved("", self.spread(G, self.dual).mT)
        return replace(matched, a=matched.b, b=matched.a)


def _truncated(matched: Matched, rank: int, allowed: float) -> tuple[Tensor, float, bool]:
    """The nearest change ``[n, rows, d]`` of a rank, over all heads together.

    Returns:
        The change, the share of the squares that it leaves, and whether that is nothing: rounding,
        or a share of at most `NOTHING`.
    """
    white = matched.white()
    m, n = white.shape
    if min(m, n) <= DIRECT:
        U, S, Vh = torch.linalg.svd(white, full_matrices=False)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            U, S, V = torch.svd_lowrank(white, q=rank + 8, niter=2)
        Vh = V.mT
    low = (U[:, :rank] * S[:rank]) @ Vh[:rank]
    total = float(white.square().sum())
    share = float((white - low).square().sum()) / max(total, 1e-300)
    noise = float(S[rank]) <= allowed * (m**0.5 + n**0.5) if rank < len(S) else True
    return unwhitened(low, matched.noise), share, noise or share <= NOTHING**2


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


def match_units(a: ReducedBlock, b: ReducedBlock, sketches: tuple[BlockSketch, BlockSketch]) -> Units:
    """Match heads and neurons of two blocks by their sketches in one basis of the stream."""
    queries, groups = {}, {}
    for prefix, config in a.attentions():
        heads = [s.heads[prefix] for s in sketches]
        order, of_groups = match_heads(config, (heads[0], heads[1]), [None, None], None)
        queries[prefix], groups[prefix] = _sorted(order), _sorted(of_groups)
    mlp = a.about.mlp
    scaled = neuron_scales(mlp) is not None
    features = [neuron_features(s, gated=mlp.gated, scaled=scaled) for s in sketches]
    return Units(queries, groups, _sorted(match_rows(features[1], features[0]).index))


def _sorted(partners: Tensor) -> Pair:
    """Units of A and of B that correspond, in the order of A; from A's unit for each of B's."""
    order = partners.argsort()
    return partners[order], order


def aligned_block(
    a: ReducedBlock, b: ReducedBlock, stream: StreamMap, units: Units, allowed: float
) -> Iterator[Matched]:
    """Every tensor of two blocks in the bases of A.

    Args:
        a: a block of A. b: its partner of B.
        stream: takes B's stream to A's.
        units: heads and neurons that both have.
        allowed: multiple of the rounding error up to which a tensor is unchanged.
    """
    followed = []
    for prefix, config in a.attentions():
        yield from _query_key(a, b, prefix, config, stream, units, allowed)
        value_output = _value_output(a, b, prefix, config, stream, units, allowed)
        yield from value_output
        followed.append((f"{prefix}b_O", a.output_bias(prefix), b.output_bias(prefix), value_output))
    yield from _mlp(a, b, stream, units, allowed)
    followed.append(("b_B", a.mlp_bias(), b.mlp_bias(), None))
    for name, x, y, through in followed:
        vector = _vector(name, x, y, stream)
        if vector is not None:
            yield vector if through is None else _unexplained(vector, *through, allowed)
    others = b.norms()
    for name, piece in a.norms().items():
        other = others.get(name)
        if other is not None and stream.index is not None:
            other = replace(other, value=other.value[stream.index])
        gains = _vector(name, piece, other, None)
        if gains is not None:
            yield gains


def _query_key(
    a: ReducedBlock,
    b: ReducedBlock,
    prefix: str,
    config: Attention,
    stream: StreamMap,
    units: Units,
    allowed: float,
) -> tuple[Matched, ...]:
    pieces = [side.query_key(prefix, config) for side in (a, b)]
    chosen = {"Q": units.queries[prefix], "K": units.groups[prefix]}
    sides = []
    for part, orders in chosen.items():
        weights, biases = [], []
        for piece, order in zip(pieces, orders, strict=True):
            W, bias = piece[f"W_{part}"], piece.get(f"b_{part}")
            weights.append(Piece(W.value[order], W.error[order]))
            biases.append(None if bias is None else Piece(bias.value[order], bias.error[order]))
        weights[1] = Piece(stream.columns(weights[1].value), weights[1].error)
        sides.append(_Side.of(weights[0], weights[1], (biases[0], biases[1])))
    groups = len(chosen["K"][0])
    config = replace(config, heads=len(chosen["Q"][0]), groups=groups)
    names = (f"{prefix}W_Q", f"{prefix}W_K")
    shared = _Shared(QueryKeyBasis(), _site(a, config), names, sides[0], sides[1], groups, allowed)
    if not config.qk_norm:
        return shared.best()
    (Q_A, Q_B), (K_A, K_B) = (
        [x.reshape(groups, -1, config.d_k) for x in (side.a, side.b)] for side in sides
    )
    equal = equal_pairs((pieces[0], pieces[1]), config)
    G, gains = normed_basis(config, (Q_A, Q_B), (K_A, K_B), equal)
    norms = []
    for name in ("q_norm.g", "k_norm.g"):
        x, y = (side[name] for side in pieces)
        moved = Piece(x.value[gains], x.error.sum())
        vector = _vector(f"{prefix}{name}", moved, Piece(y.value, y.error.sum()), None)
        assert vector is not None
        norms.append(vector)
    return (*shared.matched(G), *norms)


def _value_output(
    a: ReducedBlock,
    b: ReducedBlock,
    prefix: str,
    config: Attention,
    stream: StreamMap,
    units: Units,
    allowed: float,
) -> tuple[Matched, Matched]:
    values, outputs = [], []
    for i, side in enumerate((a, b)):
        V, O = side.reader(f"{prefix}W_V")[0], side.writer(f"{prefix}W_O")
        groups, queries = units.groups[prefix][i], units.queries[prefix][i]
        values.append(Piece(V.value[groups], V.error[groups]))
        outputs.append(Piece(O.value[queries], O.error[queries]))
    values[1] = Piece(stream.columns(values[1].value), values[1].error)
    outputs[1] = Piece(stream(outputs[1].value), outputs[1].error)
    outputs = [Piece(O.value.mT, O.error) for O in outputs]
    groups = len(units.groups[prefix][0])
    site = _site(a, replace(config, heads=len(units.queries[prefix][0]), groups=groups))
    names = (f"{prefix}W_V", f"{prefix}W_O")
    sides = _Side.of(values[0], values[1]), _Side.of(outputs[0], outputs[1])
    return _Shared(ValueOutputBasis(), site, names, *sides, groups, allowed).best()


def _mlp(
    a: ReducedBlock, b: ReducedBlock, stream: StreamMap, units: Units, allowed: float
) -> Iterator[Matched]:
    def reading(tensor: str) -> _Side:
        weights, biases = [], []
        for side, order in zip((a, b), units.neurons, strict=True):
            W, bias = side.reader(tensor)
            weights.append(Piece(W.value[:, order], W.error[order]))
            biases.append(
                None if bias is None else Piece(bias.value[order, None], bias.error[order, None])
            )
        weights[1] = Piece(stream.columns(weights[1].value), weights[1].error)
        weights = [Piece(W.value.mT.unsqueeze(-1), W.error.unsqueeze(-1)) for W in weights]
        return _Side.of(weights[0], weights[1], (biases[0], biases[1]))

    read, neurons = reading("W_A"), units.neurons
    W_B, V_B = a.writer("W_B"), b.writer("W_B")
    write = _Side.of(
        *(
            Piece(value[order].unsqueeze(-1), piece.error[order].unsqueeze(-1))
            for value, piece, order in zip(
                (W_B.value, stream(V_B.value)), (W_B, V_B), neurons, strict=True
            )
        )
    )
    f = len(neurons[0])
    site = _site(a, Attention(f, f, 1, 1, 1.0))
    shared = _Shared(ValueOutputBasis(), site, ("W_A", "W_B"), read, write, f, allowed)
    mlp = a.about.mlp
    one = torch.ones(f, 1, 1, dtype=torch.float64)
    yield from shared.best() if neuron_scales(mlp) else shared.matched(one)
    if mlp.gated:
        yield reading("W_G").moved("W_G", one)


def _site(block: ReducedBlock, config: Attention) -> Site:
    return Site(block.network.about, {}, config)


def _vector(name: str, a: Piece | None, b: Piece | None, stream: StreamMap | None) -> Matched | None:
    """A vector of the stream; zeros where only one model has it."""
    present = a or b
    if present is None:
        return None
    zero = Piece(torch.zeros_like(present.value), torch.zeros_like(present.error))
    a, b = a or zero, b or zero
    moved = b.value if stream is None else stream(b.value)
    x, y = (w.double().reshape(1, -1, 1) for w in (a.value, moved))
    noise = (a.error + b.error).double().reshape(1, 1, 1) / x.shape[1]
    return Matched(name, x, y, noise)


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
    left = difference - basis @ (basis.mT @ difference)
    return replace(vector, b=vector.a + left)
