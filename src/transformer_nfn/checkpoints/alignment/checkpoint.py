"""Alignment of two checkpoints: blocks given the stream, the stream given blocks.

One round reads every block of both, fits heads, bases and neurons under the current map of the
stream, and solves for the map again from all tensors that have the stream as an axis. Only
weights are used, no data and no activations. Rounds go on until the distance settles, or, where A
is a copy of B, until only rounding is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.checkpoints.alignment.chain import ChainAlignment
from transformer_nfn.checkpoints.alignment.frame import (
    GAUGES,
    NEGLIGIBLE,
    Ends,
    into_frame,
    out_of_frame,
    turned,
    usable,
)
from transformer_nfn.checkpoints.disguises import untied
from transformer_nfn.checkpoints.families import Model, open_model, write_model
from transformer_nfn.checkpoints.proof.witness import Perturbed, model_outputs, random_inputs
from transformer_nfn.checkpoints.symmetries import (
    SYMMETRIES,
    EmbeddingShift,
    ExpertPermutation,
    HeadPermutation,
    NeuronPermutation,
    NeuronScale,
    NormBias,
    NormGain,
    Part,
    QuarterTurns,
    QueryKeyBasis,
    QueryKeyGains,
    QueryKeySigns,
    Site,
    StreamBasis,
    StreamMap,
    ValueOutputBasis,
)
from transformer_nfn.checkpoints.symmetries.attention import HeadOrder
from transformer_nfn.checkpoints.symmetries.base import (
    LONG,
    Sites,
    Weights,
    block_parts,
    end_names,
)
from transformer_nfn.checkpoints.symmetries.stream import Cross, allowed
from transformer_nfn.errors import SpaceError, TransformerNFNError, WriteError
from transformer_nfn.functional.description import POSITIONS, StreamGroup, Transformer
from transformer_nfn.io.files import explained_write, locked_beside, made_folder, take_name

ROUNDS = 40
SETTLED = 1e-3
"""A round that gains less than this share of the squared distance is the last."""
FEW = 8
"""After so many rounds each has to halve the rest, as it does where A is a copy of B."""
BLURRED = 1e-13
"""A difference of two sums of squares is accurate to this share of them."""
COUNTED_ROWS = 8192
LENGTH = 8
ARITHMETIC = 1e-13
"""Relative error of outputs that float64 arithmetic explains, however weights are stored."""
ALLOWED = 32.0
"""Allowed change of A's outputs, as a multiple of the effect of rounding its weights."""
MATCHED = (
    HeadPermutation,
    QueryKeyBasis,
    QuarterTurns,
    QueryKeySigns,
    QueryKeyGains,
    ValueOutputBasis,
    ExpertPermutation,
    NeuronPermutation,
    NeuronScale,
)
"""Symmetries that are fitted in the frame of comparison, in this order; added ones follow."""


class Alignment:
    """A on its way to B: iterate it once for its tensors, by canonical name.

    Attributes:
        config: A as it will be: untied if requested.
        action: group that acts on its stream.
        rounds: number of rounds.
        before: squares of ``A − B`` by part: ``ends``, ``0``, ``encoder.1``.
        after: likewise of the aligned network, complete after the iteration.
        sizes: squares of B.
    """

    def __init__(
        self,
        A: Model,
        B: Model,
        *,
        rounds: int = ROUNDS,
        untie: bool = False,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        check_comparable(A.description, B.description)
        self.config = untied(A.description) if untie else A.description
        self._A, self._B, self._progress = A, B, progress
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.sizes: dict[str, float] = {}
        self._parts = list(block_parts(self.config))
        self._gauges, self._matched = self._sites()
        self._ends = self._read_ends()
        self.action: StreamGroup = "none"
        for site in StreamBasis().sites(self.config):
            self.action = allowed(site, A, B, least=NEGLIGIBLE).detail.group
        self._end_cross = self._ends.cross()
        self._stream, self.rounds = self._search(rounds)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, w in self._ends.moved(self._stream, self._memory()):
            self._count("ends", self.after, w, self._ends.b[name])
            yield name, w
        for part, weights, _, target in self._blocks(self._stream):
            out_of_frame(self._usable(part, weights, target), weights, target, part.context)
            for name in part.names.values():
                w = weights.pop(name)
                self._count(part.name, self.after, w, target[name])
                yield name, w

    def _memory(self) -> Weights:
        """The norm after an encoder, as every block of the decoder fits it to B."""
        names = self.config.memory_norm
        weights, target = (m.read(names, torch.float64) for m in (self._A, self._B))
        sites: Sites = [
            (symmetry, site)
            for symmetry in (NormGain(), NormBias())
            for site in symmetry.sites(self.config)
            if names and names[0] in site.names.values()
        ]
        sites = usable(sites, weights, target)
        into_frame(sites, weights)
        weights = turned(self.config, self._stream, weights)
        out_of_frame(sites, weights, target, names)
        return weights

    def _sites(self) -> tuple[dict[str, Sites], dict[str, Sites]]:
        """Sites by part, of symmetries that are reduced and of those that are fitted.

        A site that spans several parts (heads with a common position bias, the norm after an
        encoder) belongs to each of them.
        """
        order = {kind: i for i, kind in enumerate(MATCHED)}
        skipped = {type(s) for s in GAUGES} | {StreamBasis, EmbeddingShift}
        matched = [s for s in SYMMETRIES if type(s) not in skipped]
        matched.sort(key=lambda s: order.get(type(s), len(order)))
        owner = {name: part.name for part in self._parts for name in part.names.values()}
        out: list[dict[str, Sites]] = []
        for symmetries in (GAUGES, matched):
            local: dict[str, Sites] = {part.name: [] for part in self._parts}
            for symmetry in symmetries:
                for site in symmetry.sites(self.config):
                    for name in dict.fromkeys(owner.get(n) for n in site.names.values()):
                        if name is not None:
                            local[name].append((symmetry, site))
            out.append(local)
        return out[0], out[1]

    def _search(self, rounds: int) -> tuple[StreamMap, int]:
        """The best map of several rounds, started from the identity or from the ends."""
        identity = StreamMap.identity(self.action, self.config.width)
        if self.action == "none":
            return identity, 1
        starts = [identity, self._end_cross.solve(self.action)]
        tried = [(self._round(stream), stream) for stream in starts]
        (cross, best), stream = min(tried, key=lambda x: x[0][1])
        used, chosen = 1, stream
        exact = torch.finfo(self._B.dtype).eps ** 2 * sum(self.sizes.values())
        halved = True
        while used < rounds and best > exact and (used < FEW or halved):
            stream = stream.then(cross.solve(self.action))
            cross, value = self._round(stream)
            used += 1
            settled, halved = value > best * (1 - SETTLED), value < 0.5 * best
            if value < best:
                best, chosen = value, stream
            if settled:
                break
        return chosen, used

    def _round(self, stream: StreamMap) -> tuple[Cross, float]:
        """Fit every block under a map: the products that determine the next, and the distance."""
        cross = self._end_cross.moved(stream)
        inner = float(cross.vectors.diagonal().sum() + cross.gains.diagonal().sum())
        distance = self._ends.size - 2 * inner
        distance = distance if distance > BLURRED * self._ends.size else 0.0
        for part, weights, other, _ in self._blocks(stream):
            for name in part.names.values():
                if self.config.moves(name):
                    cross.add(name, weights[name], other[name])
                distance += float((weights[name] - other[name]).square().sum())
        return cross, distance

    def _blocks(self, stream: StreamMap) -> Iterator[tuple[Part, Weights, Weights, Weights]]:
        """Each block of A in B's frame and fitted, B's in that frame, and B's as it is."""
        orders = self._shared_orders(stream)
        for part in self._parts:
            weights, other, target = self._pair(part, stream)
            for symmetry, site in self._matched[part.name]:
                a = site.pick(weights)
                g = orders.get(id(site))
                if g is None:
                    g = symmetry.fit(site, a, site.pick(other))
                weights |= site.put(symmetry.act(site, a, g))
            if self._progress is not None:
                self._progress(part.name)
            yield part, weights, other, target

    def _pair(self, part: Part, stream: StreamMap) -> tuple[Weights, Weights, Weights]:
        """A block of A turned, and of B, both in the frame of comparison; and B's as it is."""
        names = [*part.names.values(), *part.context]
        weights, target = (m.read(names, torch.float64) for m in (self._A, self._B))
        if part.name not in self.before:
            for name in part.names.values():
                self._count(part.name, self.before, weights[name], target[name])
                self._count(part.name, self.sizes, target[name], None)
        other = dict(target)
        gauges = self._usable(part, weights, target)
        for side in (weights, other):
            into_frame(gauges, side)
        return turned(self.config, stream, weights), other, target

    def _usable(self, part: Part, *networks: Weights) -> Sites:
        return usable(self._gauges[part.name], *networks)

    def _shared_orders(self, stream: StreamMap) -> dict[int, HeadOrder]:
        """One order of heads for all blocks that share a position bias, by the id of the site."""
        totals: dict[int, tuple[Site, Tensor]] = {}
        heads = HeadPermutation()
        for part in self._parts:
            for symmetry, site in self._matched[part.name]:
                if isinstance(symmetry, HeadPermutation) and site.detail.position_bias:
                    weights, other, _ = self._pair(part, stream)
                    similarity = heads.similarity(site, site.pick(weights), site.pick(other))
                    if id(site) in totals:
                        similarity = similarity + totals[id(site)][1]
                    totals[id(site)] = site, similarity
        return {key: heads.assign(site, total) for key, (site, total) in totals.items()}

    def _read_ends(self) -> Ends:
        """The ends of both networks, with the rows that A has."""
        A, B = self._A, self._B
        stored = [n for n in end_names(self.config).values() if n in A.description.tensors]
        a, b = A.read(stored), dict[str, Tensor]()
        for name in stored:
            other = B[name] if name in B.names else None
            if other is None and name == "head" and B.description.tied:
                other = B["token"].mT * B.description.head_scale
            b[name] = _fitted(other, a[name])
        if A.description.tied and "token" in a:
            tied = self.config.tied
            a["head"] = a["token"].mT * (1.0 if tied else A.description.head_scale)
            if "head" in B.names:
                b["head"] = _fitted(B["head"], a["head"])
            else:
                b["head"] = b["token"].mT * (1.0 if tied else B.description.head_scale)
        for name in a:
            if name in stored or not self.config.tied:
                self._count("ends", self.before, a[name], b[name])
                self._count("ends", self.sizes, b[name], None)
        return Ends(self.config, a, b)

    @staticmethod
    def _count(part: str, into: dict[str, float], w: Tensor, other: Tensor | None) -> None:
        """Add squares of a tensor, or of its difference from another, some rows at a time."""
        total = 0.0
        for start in range(0, len(w), COUNTED_ROWS):
            x = w[start : start + COUNTED_ROWS].double()
            if other is not None:
                x = x - other[start : start + COUNTED_ROWS].double()
            total += float(x.square().sum())
        into[part] = into.get(part, 0.0) + total


def _fitted(other: Tensor | None, like: Tensor) -> Tensor:
    """B's tensor with the rows that A has; where B has none, A's."""
    if other is None:
        return like
    if other.shape == like.shape:
        return other
    out = like.clone()
    cut = tuple(slice(0, min(n, m)) for n, m in zip(other.shape, like.shape, strict=True))
    out[cut] = other[cut].to(out)
    return out


def check_comparable(a: Transformer, b: Transformer) -> None:
    """Reject two networks that differ by more than their weights."""

    def error(what: str, x: object, y: object) -> SpaceError:
        return SpaceError(f"A and B cannot be aligned: {what}, {x} and {y}")

    if a.norm != b.norm or a.orders != b.orders or a.inputs != b.inputs:
        raise error("they are built differently", a.family, b.family)
    if a.width != b.width:
        raise error("the widths differ", a.width, b.width)
    depths = [[len(s.blocks) for s in x.stacks] for x in (a, b)]
    if depths[0] != depths[1]:
        raise error("the numbers of blocks differ", *depths)
    for x, y in zip(a.stacks, b.stacks, strict=True):
        for i, (s, t) in enumerate(zip(x.blocks, y.blocks, strict=True)):
            if s != replace(t, attention=replace(t.attention, window=s.attention.window)):
                raise error(f"block {x.prefix}{i} is not of one kind in both", s, t)
    for name, shape in a.tensors.items():
        if name in (*LONG, *POSITIONS, "type") or name.startswith("kept."):
            continue
        if b.tensors.get(name) != shape:
            raise error(f"'{name}' is not the same tensor in both", shape, b.tensors.get(name))


@dataclass(frozen=True)
class Aligned:
    """Result of `align`.

    Attributes:
        before: relative distance ``‖A − B‖ / ‖B‖`` over all weights.
        after: likewise of the aligned network.
        parts: both, of the ends and of each block.
        rounds: number of rounds.
        action: group that acted on the stream.
        difference: relative difference of the outputs of A and of the file that was written, on
            random inputs in float64; None where nothing was written.
        noise: the same, caused by rounding A's weights.
        tensors: of the aligned network, by canonical name; None where they were written.

    Example:
        >>> aligned = Aligned(1.4, 0.9, {"ends": (1.4, 0.9)}, 3, "orthogonal")
        >>> aligned.as_json()["distance_after"]
        0.9
    """

    before: float
    after: float
    parts: dict[str, tuple[float, float]]
    rounds: int
    action: str
    difference: float | None = None
    noise: float | None = None
    tensors: dict[str, Tensor] | None = None

    def as_json(self) -> dict[str, Any]:
        """Everything except tensors."""
        return {
            "distance_before": self.before,
            "distance_after": self.after,
            "parts": {name: list(pair) for name, pair in self.parts.items()},
            "rounds": self.rounds,
            "stream": self.action,
            "difference_of_outputs": self.difference,
            "rounding_of_outputs": self.noise,
        }


def align(
    A: Model,
    B: Model,
    out: str | Path | None = None,
    *,
    rounds: int | None = None,
    untie: bool = False,
    inputs: Tensor | None = None,
    progress: Callable[[str], None] | None = None,
) -> Aligned:
    """Move A along its orbit as close to B as possible, and write it in A's layout and dtype.

    The file is written beside its destination and run against A before it is renamed.

    Args:
        B: another of the same family and sizes; vocabularies may differ.
        out: a new folder if A is one, else a new file; None keeps the tensors.
        untie: write a tied model untied, which lets more act on its stream.
        inputs: networks without residuals: ``[n, tokens, width]`` without labels; with them units
            are paired by their activations, and ``rounds`` are gradient steps.
        progress: called with the name of each block that is matched.

    Example:
        >>> from transformer_nfn.checkpoints import open_model
        >>> from transformer_nfn.testing import write_example_checkpoint
        >>> a, b = (write_example_checkpoint(f"model-{seed}", seed) for seed in (0, 1))
        >>> with open_model(a) as A, open_model(b) as B:
        ...     aligned = align(A, B, "aligned")
        >>> aligned.after < aligned.before, aligned.difference < 1e-5
        (True, True)
    """
    place = None if out is None else free_place(Path(out))
    alignment: Alignment | ChainAlignment
    if "chain" in A.description.orders:
        check_comparable(A.description, B.description)
        alignment = ChainAlignment(A, B, rounds=rounds, inputs=inputs)
    elif inputs is not None:
        raise SpaceError(f"'{A.where}' is aligned by its weights alone: it has residuals")
    else:
        limit = ROUNDS if rounds is None else rounds
        alignment = Alignment(A, B, rounds=limit, untie=untie, progress=progress)
    if place is None:
        tensors = {name: w.to(torch.float64) for name, w in alignment}
        return _result(alignment, tensors=tensors)
    with (
        explained_write(place),
        made_folder(place.parent),
        locked_beside(place, folder=True) as scratch,
        explained_write(place, beside := scratch / place.name),
    ):
        write_model(A, alignment, beside, untied=untie)
        with open_model(beside, A.options) as moved:
            difference, noise = _compare_outputs(A, moved)
        if difference > ALLOWED * max(noise, ARITHMETIC):
            raise TransformerNFNError(
                f"the aligned network does not compute what A does: outputs differ by "
                f"{difference:.1e}, rounding explains {noise:.1e}; nothing was written"
            )
        take_name(beside, place)
    return _result(alignment, difference=difference, noise=noise)


def _result(alignment: Alignment | ChainAlignment, **more: Any) -> Aligned:
    total = max(sum(alignment.sizes.values()), 1e-300)
    before, after = (
        float((sum(x.values()) / total) ** 0.5) for x in (alignment.before, alignment.after)
    )
    parts = {}
    for name, size in alignment.sizes.items():
        squares = (alignment.before.get(name, 0.0), alignment.after.get(name, 0.0))
        first, last = (x / max(size, 1e-300) for x in squares)
        parts[name] = (float(first**0.5), float(last**0.5))
    return Aligned(before, after, parts, alignment.rounds, alignment.action, **more)


def free_place(out: Path) -> Path:
    """Reject a place that is taken; an empty folder is not."""
    taken = any(out.iterdir()) if out.is_dir() else out.exists()
    if taken or out.is_symlink():
        raise WriteError(f"'{out}' is already there: name a new place")
    return out


def _compare_outputs(A: Model, moved: Model) -> tuple[float, float]:
    """Relative difference of two models' outputs, and the effect of rounding A's weights."""
    length = LENGTH
    if A.description.inputs == "tokens":
        rows = (A.names[name][0] for name in POSITIONS if name in A.names)
        length = min([length, *(n - A.description.position_offset for n in rows)])
    generator = torch.Generator().manual_seed(0)
    inputs, decoder = random_inputs(A.description, length, A.description.vocab, generator)
    expected, outputs, perturbed = (
        model_outputs(config, weights, inputs, decoder)
        for config, weights in (
            (A.description, A),
            (moved.description, moved),
            (A.description, Perturbed(A)),
        )
    )
    size = max(float(expected.norm()), 1e-300)
    return float((outputs - expected).norm()) / size, float((perturbed - expected).norm()) / size
