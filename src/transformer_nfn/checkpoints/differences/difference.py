"""What was changed on the way from one checkpoint to another.

Blocks of B are matched with those of A by their scores (`relate`). Where the files have one basis,
tensors are compared as they are stored; else B is aligned to A first, and compared in the reduced
form, in which gains and biases of norms stand in the matrices that read them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby

import torch
from torch import Tensor

from transformer_nfn.checkpoints.differences.bases import Matched
from transformer_nfn.checkpoints.differences.change import REPLACED, Change, Kind, spectrum
from transformer_nfn.checkpoints.differences.grids import Grid, find_grid
from transformer_nfn.checkpoints.differences.matching import (
    AlignedBlock,
    columns,
    match_units,
    stored_pair,
)
from transformer_nfn.checkpoints.differences.result import Difference, Merge
from transformer_nfn.checkpoints.families import Model
from transformer_nfn.checkpoints.proof.blocks import match_classifier
from transformer_nfn.checkpoints.proof.checks import Check, Tolerance
from transformer_nfn.checkpoints.proof.ends import (
    check_added,
    check_ends,
    compare_outputs,
    table_shifts,
)
from transformer_nfn.checkpoints.reduced import Reduced, reduce_pair
from transformer_nfn.checkpoints.relations import Relation, relate
from transformer_nfn.checkpoints.relations.verdicts import CONSISTENT
from transformer_nfn.checkpoints.sketches import draw_probes, sketch_block
from transformer_nfn.checkpoints.stream import BlockStreams, acting, fit_stream, refine_stream
from transformer_nfn.checkpoints.symmetries import StreamMap
from transformer_nfn.errors import SpaceError
from transformer_nfn.functional.description import KEPT

ALIKE = 0.7
"""Relative change up to which a tensor stands where the other model has it: half of the way to two
unrelated tensors (1.41)."""
NEARER, MOVED = 0.75, 0.01
"""Distance that is left, at most, after an element that was needed; and relative change from which
on one may have been, where scores see no other difference."""
ZERO = 1e-6
"""Size of a head or neuron, relative to the median, up to which it is zero."""
UNITS = ("W_V", "W_O", "cross.W_V", "cross.W_O", "W_A", "W_G", "W_B")
"""Tensors whose heads or neurons may be zero."""


@dataclass(frozen=True)
class _Pair:
    """One tensor of both models: the block of A, the block of B (empty outside blocks)."""

    first: str
    second: str
    matched: Matched


def diff(A: Model, B: Model, C: Model | None = None) -> Difference:
    """Find what was changed on the way from A to B, whatever disguise B wears.

    Args:
        A: the model to compare with, from `open_model`.
        B: the other; of another width, only blocks, heads and neurons are matched.
        C: a third model; B is also explained as a mixture of A and C.

    Example:
        >>> from transformer_nfn.checkpoints import open_model
        >>> from transformer_nfn.testing import write_example_checkpoint
        >>> a, b = (write_example_checkpoint(f"model-{seed}", seed) for seed in (0, 1))
        >>> with open_model(a) as A, open_model(b) as B:
        ...     diff(A, B).relation.verdict, diff(A, A).relation.verdict
        ('unrelated', 'same')
    """
    if "chain" in A.description.orders:
        raise SpaceError(
            f"'{A.where}' has no residuals, so that nothing fixes the bases of two different "
            "networks: expected a family with residuals; tnfn compare and tnfn align take it"
        )
    pair = _Related.of(A, B)
    if not pair.pairs:
        return Difference(pair.relation)
    if A.description.width != B.description.width:
        return Difference(pair.relation, aligned=True)
    third = None if C is None else _third(A, C)
    if third is not None:
        aligned = pair.aligned or third.aligned
        pair, third = replace(pair, aligned=aligned), replace(third, aligned=aligned)
    allowed = Tolerance.of(A.dtype, B.dtype).same
    edited = () if pair.aligned else tuple(edit.name for edit in pair.relation.edits)
    changes = [_change(p, A, B, allowed, edited) for p in pair.tensors()]
    listed = {change.name for change in changes}
    for c in pair.ends() if pair.aligned else ():
        if c.name in (A.names.keys() | B.names.keys() | {"output"}) - listed:
            kind: Kind = "replaced" if c.residual > REPLACED else "dense"
            kind = "unchanged" if c.excess <= allowed else kind
            changes.append(Change("", "", c.name, c.residual, c.expected, kind))
    return Difference(
        pair.relation,
        aligned=pair.aligned,
        changes=tuple(changes),
        rows=_rows(A, B),
        only_one=_only_one(A, B),
        merge=None if third is None else _merge(pair, third),
    )


def _third(A: Model, C: Model) -> _Related:
    third = _Related.of(A, C)
    relation = third.relation
    if not third.pairs or relation.units or any(a != c for c, a in relation.sources.items()):
        raise SpaceError(
            f"'{C.where}' cannot be a part of a mixture with '{A.where}': expected a related model "
            f"of other weights with the same shapes, found {relation.verdict} ({relation.reason})"
        )
    return third


@dataclass(frozen=True)
class _Related:
    """Two models, and how their tensors are brought into one basis.

    Attributes:
        A: one model. B: the other.
        relation: of both, by scores.
        pairs: blocks of A with the blocks of B that come from them; none where the models are the
            same or unrelated.
        aligned: whether B has to be aligned to A.
    """

    A: Model
    B: Model
    relation: Relation
    pairs: list[tuple[str, str]]
    aligned: bool

    @staticmethod
    def of(A: Model, B: Model) -> _Related:
        relation = relate(A, B, prove=False)
        pairs = [(a, b) for b, a in relation.sources.items() if a is not None]
        related = _Related(A, B, relation, pairs, aligned=True)
        of_one_width = pairs and A.description.width == B.description.width
        return replace(related, aligned=not of_one_width or related._is_rebased())

    def tensors(self) -> Iterator[_Pair]:
        """Every tensor that both models have, in one basis."""
        return self._aligned() if self.aligned else self._stored()

    def ends(self) -> Iterator[Check]:
        """Outputs, classifiers and vectors outside the blocks of aligned models, without ranks."""
        a, b, stream = self._frame
        shifts, outputs = table_shifts(b, a, stream), compare_outputs(self.B, self.A)
        yield from check_ends(b, a, stream, shifts, outputs)
        yield from check_added(b, a, stream)
        if a.classifier is not None and b.classifier is not None:
            drawn = draw_probes(b.description.width, centred=b.centred, dtype=torch.float64)
            yield from match_classifier(b.classifier, a.classifier, stream, drawn)[1]

    def _is_rebased(self) -> bool:
        """Whether B has to be aligned: it has other shapes, or is much nearer to A then."""
        for a, b in self.pairs:
            shapes = [
                {n.removeprefix(f"{at}."): s for n, s in m.names.items() if n.startswith(f"{at}.")}
                for m, at in ((self.A, a), (self.B, b))
            ]
            if any(shapes[1].get(n) != s for n, s in shapes[0].items() if len(s) > 1):
                return True
        explained = self.relation.verdict == CONSISTENT
        stored = _distances(self._stored())
        apart = {
            block: {n for n, d in found.items() if d > (MOVED if explained else ALIKE)}
            for block, found in stored.items()
        }
        pairs = [pair for pair in self.pairs if apart.get(pair[0])]
        if not any(apart.values()):
            return False
        for block, found in groupby(replace(self, pairs=pairs)._aligned(), lambda p: p.first):
            near = _distances(found)[block]
            common = near.keys() & stored[block].keys()
            before, after = (sum(d[n] ** 2 for n in common) for d in (stored[block], near))
            alike = any(near[n] <= ALIKE for n in common & apart[block])
            if after <= NEARER**2 * before and (alike or common <= apart[block]) and common:
                return True
        return False

    def _stored(self) -> Iterator[_Pair]:
        """As the files have them."""
        A, B = self.A, self.B
        inside = tuple(f"{block}." for m in (A, B) for block in m.description.blocks)
        for name in (n for n in A.names if n in B.names):
            comparable = A.names[name] == B.names[name] or not name.startswith(KEPT)
            if comparable and not name.startswith(inside):
                yield _Pair("", "", stored_pair(name, name, A, B, name))
        first, second = ("head" if "head" in m.names else "token" for m in (A, B))
        if first != second and all(Reduced(m).has_head for m in (A, B)):  # one repeats its tokens
            yield _Pair("", "", stored_pair(first, "head", A, B, second))
        for a, b in self.pairs:
            for name in A.names:
                short = name.removeprefix(f"{a}.")
                if short != name and f"{b}.{short}" in B.names:
                    yield _Pair(a, b, stored_pair(name, short, A, B, f"{b}.{short}"))

    @cached_property
    def _frame(self) -> tuple[Reduced, Reduced, StreamMap]:
        """Both reduced forms, and the map of B's stream to A's."""
        a, b = reduce_pair(self.A, self.B)
        stream = fit_stream(b, a, hold_out=False, only=self.relation.fitted).map
        return a, b, refine_stream(b, a, stream) if a.blocks == b.blocks else stream

    def _aligned(self) -> Iterator[_Pair]:
        """In the reduced form, with B aligned to A."""
        a, b, stream = self._frame
        allowed = Tolerance.of(self.A.dtype, self.B.dtype).same
        for matched in _tables(a, b, stream):
            yield _Pair("", "", matched)
        drawn = draw_probes(b.description.width, centred=b.centred, dtype=torch.float64)
        for first, second in self.pairs:
            x, y = a.block(first), b.block(second)
            streams = BlockStreams.of(x, stream)
            sketches = sketch_block(x, streams.moved(drawn)), sketch_block(y, drawn)
            units = match_units(x, y, sketches)
            for matched in AlignedBlock(x, y, streams, units, allowed):
                yield _Pair(first, second, matched)


def _distances(pairs: Iterable[_Pair]) -> dict[str, dict[str, float]]:
    """Distances of the matrices, by block and tensor."""
    out: dict[str, dict[str, float]] = {"": {}}
    for p in pairs:
        of_block = out.setdefault(p.first, {})
        if not p.matched.is_vector and not p.matched.name.rpartition(".")[2].startswith("b_"):
            of_block[p.matched.name] = p.matched.distance
    return out


def _rows(A: Model, B: Model) -> dict[str, tuple[int, int]]:
    """Numbers of tokens, positions and outputs, where they differ."""
    a, b = _ends(A), _ends(B)
    unlike = [n for n in a if n in b and a[n] != b[n]]
    return {n: next(p for p in zip(a[n], b[n], strict=False) if p[0] != p[1]) for n in unlike}


def _only_one(A: Model, B: Model) -> dict[str, str]:
    """Tables and classifiers that only one of the two has."""
    a, b = _ends(A), _ends(B)
    return {n: "A" for n in a if n not in b} | {n: "B" for n in b if n not in a}


def _ends(model: Model) -> dict[str, tuple[int, ...]]:
    """Numbers of rows of tables, and shapes of classifiers."""
    reduced = Reduced(model)
    kept = {n: s for n, s in model.names.items() if n.startswith((KEPT, "classifier."))}
    return {n: (reduced.table_rows(n),) for n in reduced.table_names()} | kept


def _tables(a: Reduced, b: Reduced, stream: StreamMap) -> Iterator[Matched]:
    """Embeddings, positions and outputs, on the rows that both have."""
    common = [n for n in a.table_names() if n in b.table_names()]
    moved: dict[str, Matched] = {}
    for name in common:
        x, y = a.table(name), b.table(name)
        count = min(len(x), len(y))
        own, other = x.rows(0, count), y.rows(0, count)
        noise = (own.error + other.error).reshape(-1, 1, 1) / own.value.shape[1]
        values = own.value.unsqueeze(-1), acting(a, name, stream)(other.value).unsqueeze(-1)
        moved[name] = Matched(name, *values, noise)
    # A vector may have been moved from one table to another that is added to it.
    first, last = ([n for n in names if n in moved] for names in a.description.added)
    for name in first if last else ():
        shift = (moved[name].a - moved[name].b).median(0).values  # whatever some rows did
        for n, sign in ((name, 1), *((n, -1) for n in last)):
            moved[n] = replace(moved[n], b=moved[n].b + sign * shift)
    return iter(moved.values())


def _change(
    pair: _Pair, A: Model, B: Model, allowed: float, edited: Sequence[str]
) -> Change:
    """Measure the change of one tensor; one that rounding explains may be an edit nevertheless."""
    change = _measured(pair, A, B, allowed)
    if change.kind == "unchanged" and change.grid is None and change.name in edited:
        return replace(change, kind="edited", rank=None)
    return change


def _measured(pair: _Pair, A: Model, B: Model, allowed: float) -> Change:
    """Measure the change of one tensor, with all that rounding may cause allowed for."""
    matched = pair.matched
    relative, rounding = matched.relative, matched.rounding
    make = partial(Change, pair.first, pair.second, matched.name, relative, rounding)
    if math.isinf(relative):
        return make("filled")
    if matched.is_vector:
        same = relative <= 2 * allowed * rounding
        return make("unchanged" if same else "replaced" if relative > REPLACED else "dense")
    grids = [_grid(m, at, matched.name) for m, at in ((A, pair.first), (B, pair.second))]
    grid = None if grids[1] is None else str(grids[1])
    for found in grids:
        if found is not None:  # rounding to the grid is noise like any other
            uniform = torch.eye(matched.noise.shape[-1], dtype=torch.float64) * found.step**2 / 12
            matched = replace(matched, noise=matched.noise + uniform)
    units = _zero_units(matched)
    zero = (matched.b == 0) & (matched.a != 0)
    if grid is not None:  # which has a zero
        zero[:] = False
    zero[list(units)] = True
    zeros = float(zero.double().mean())
    make = partial(make, zeros=zeros, zero_units=_in_A(matched, units), grid=grid)
    kept = replace(matched, b=torch.where(zero, matched.a, matched.b)) if zeros else matched
    values = spectrum(kept.white(), allowed)
    if values.rank == 0:
        return make("pruned") if zeros else make("unchanged", 0)
    if relative > REPLACED:
        return make("replaced")
    if values.dense:
        return make("dense", values.rank, values.standing_out)
    return make("low rank", values.rank)


def _grid(model: Model, block: str, tensor: str) -> Grid | None:
    """The quantisation grid of a tensor as the file has it."""
    name = f"{block}.{tensor}" if block else tensor
    if name not in model.names:
        return None
    W = columns(name, model[name])
    inputs = W.movedim(0, 1).reshape(W.shape[1], -1)  # of the stream
    return find_grid(inputs.mT if tensor in ("W_O", "cross.W_O", "W_B") else inputs)


def _zero_units(matched: Matched) -> tuple[int, ...]:
    """Heads or neurons that are zero in B and not in A."""
    if matched.name not in UNITS:
        return ()
    sizes = [w.square().sum((-2, -1)).sqrt() for w in (matched.a, matched.b)]
    dead = [size <= ZERO * size.median() for size in sizes]
    return tuple((dead[1] & ~dead[0]).nonzero().flatten().tolist())


def _in_A(matched: Matched, units: tuple[int, ...]) -> tuple[int, ...]:
    """Units by their places in A."""
    return units if matched.units is None else tuple(matched.units[list(units)].tolist())


def _merge(pair: _Related, third: _Related) -> Merge:
    """The share of C in B, by least squares over all tensors that all three have."""
    sums: dict[str, Tensor] = {}
    found = {(p.first, p.matched.name): p.matched for p in third.tensors()}
    for p in pair.tensors():
        other = found.get((p.first, p.matched.name))
        if other is None or other.a.shape != p.matched.a.shape:
            continue
        x, y = p.matched.b - p.matched.a, other.b - other.a
        size = max(float(w.square().sum()) for w in (p.matched.a, x, y))
        noise = [m.rounding**2 * m.a.square().sum() for m in (p.matched, other)]
        squares = torch.stack([(x * y).sum(), y.square().sum(), x.square().sum(), *noise])
        if size:
            sums[p.first] = sums.get(p.first, torch.zeros(5)) + squares / size
    inner, C, B, noise_B, noise_C = torch.stack(list(sums.values())).sum(0).tolist()
    share = inner / max(C, 1e-300)
    left = max(B - 2 * share * inner + share**2 * C, 0.0)
    allowed = Tolerance.of(pair.A.dtype, pair.B.dtype, third.B.dtype).same
    if left <= allowed**2 * (noise_B + share**2 * noise_C):
        left = 0.0
    blocks = {n: float(s[0] / s[1].clamp_min(1e-300)) for n, s in sums.items() if n}
    return Merge(share, blocks, (left / max(B, 1e-300)) ** 0.5)
