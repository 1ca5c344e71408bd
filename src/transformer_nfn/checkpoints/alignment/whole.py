"""Alignment of two checkpoints: blocks given the stream, the stream given blocks.

One round reads every block of both, matches heads, bases and neurons under the turn of the stream
found so far, and solves for the turn again from all tensors that have the stream as an axis. Only
weights are looked at, no data and no activations. Rounds go on until the distance settles, or,
where A is a copy of B, until nothing but rounding is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from transformer_nfn.checkpoints.alignment import frames
from transformer_nfn.checkpoints.alignment.ends import LONG, Ends
from transformer_nfn.checkpoints.alignment.heads import head_cosines, move_attention
from transformer_nfn.checkpoints.alignment.neurons import move_neurons
from transformer_nfn.checkpoints.alignment.stream import (
    Cross,
    after,
    identity,
    solve_turn,
    turn_all,
)
from transformer_nfn.checkpoints.disguise import untied
from transformer_nfn.checkpoints.disguises.sites import Site, end_names, sites
from transformer_nfn.checkpoints.families import Model
from transformer_nfn.checkpoints.symmetries.stream import Turn
from transformer_nfn.errors import SpaceError
from transformer_nfn.functional.description import Attention, StreamGroup, Transformer
from transformer_nfn.spaces.actions.permutation import assign_in_groups

ROUNDS = 40
SETTLED = 1e-3
"""A round that gains less than this share of the squared distance is the last."""
FEW = 8
"""After so many rounds each has to gain half of what is left, as it does where A is a copy of B."""
BLURRED = 1e-13
"""A difference of two sums of squares is known to this share of them."""
Weights = dict[str, Tensor]


class Alignment:
    """A on its way to B: iterate it once for its tensors, by canonical name.

    Attributes:
        about: A as it will be: untied if asked for.
        action: what acts on its stream.
        rounds: how many there were.
        before: squares of ``A − B`` by part: ``ends``, ``0``, ``encoder.1``.
        after: likewise of what was moved, complete after the iteration.
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
        check_alike(A.about, B.about)
        self.about = untied(A.about) if untie else A.about
        self._A, self._B, self._progress = A, B, progress
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.sizes: dict[str, float] = {}
        self._ends = self._read_ends()
        self.action: StreamGroup = self.about.stream_group
        if self.action.startswith("orthogonal") and not self._can_fold():
            self.action = "permutation and sign" if self.about.norm == "layer" else "none"
        self._end_cross = self._ends.cross()
        self._turn, self.rounds = self._search(rounds)

    @property
    def distances(self) -> tuple[float, float]:
        """``‖A − B‖ / ‖B‖`` before, and after the iteration."""
        size = max(sum(self.sizes.values()), 1e-300)
        before, after_ = (sum(x.values()) for x in (self.before, self.after))
        return float((before / size) ** 0.5), float((after_ / size) ** 0.5)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        memory = None
        if len(self.about.stacks) > 1:
            memory = frames.safe(self._B["encoder.norm.g"].double())
        for name, w in self._ends.moved(self._turn, memory):
            self._count("ends", self.after, w, self._target(name))
            yield name, w
        for site, own, _, target in self._blocks(self._turn):
            frames.out_of_frame(site, own, target)
            own.pop("memory.g", None)
            for short in list(own):
                w = own.pop(short)
                self._count(_part(site), self.after, w, target[short])
                yield site.names[short], w

    def _search(self, rounds: int) -> tuple[Turn, int]:
        """The best turn of several rounds, from where A stands and from where its ends point."""
        still = identity(self.action, self.about.width)
        pointed = solve_turn(self._end_cross, self.action)
        tried = [(self._round(turn), turn) for turn in (still, pointed)]
        if self.action == "none":
            return still, 1
        (cross, best), turn = min(tried, key=lambda x: x[0][1])
        used, chosen = 1, turn
        exact = torch.finfo(self._B.dtype).eps ** 2 * sum(self.sizes.values())
        halved = True
        while used < rounds and best > exact and (used < FEW or halved):
            turn = after(turn, solve_turn(cross, self.action))
            cross, value = self._round(turn)
            used += 1
            settled, halved = value > best * (1 - SETTLED), value < 0.5 * best
            if value < best:
                best, chosen = value, turn
            if settled:
                break
        return chosen, used

    def _round(self, turn: Turn) -> tuple[Cross, float]:
        """Every block matched under a turn: what they say about the turn, and what is left."""
        cross = self._end_cross.turned(turn)
        away = self._ends_away(turn)
        for site, own, other, _ in self._blocks(turn):
            for short, w in own.items():
                if short in site.names:
                    cross.add(site.names[short], w, other[short])
                    away += float((w - other[short]).square().sum())
        return cross, away

    def _ends_away(self, turn: Turn) -> float:
        moved = self._end_cross.turned(turn)
        inner = float(moved.vectors.diagonal().sum() + moved.gains.diagonal().sum())
        away = self._ends.size - 2 * inner
        return away if away > BLURRED * self._ends.size else 0.0

    def _blocks(self, turn: Turn) -> Iterator[tuple[Site, Weights, Weights, Weights]]:
        """Each block of A in B's frame and moved, B's in that frame, and B's as it is."""
        orders = self._shared_orders(turn)
        for site in sites(self.about):
            own, other, target = self._pair(site, turn)
            for part, about in self._attentions(site):
                order = None if part else orders.get(site.stack.prefix)
                own |= move_attention(own, other, about, part, order=order)
            own |= move_neurons(own, other, site.block.mlp)
            if self._progress is not None:
                self._progress(_part(site))
            yield site, own, other, target

    def _pair(self, site: Site, turn: Turn) -> tuple[Weights, Weights, Weights]:
        own, target = (self._read(model, site) for model in (self._A, self._B))
        if _part(site) not in self.before:
            for short in site.names:
                self._count(_part(site), self.before, own[short], target[short])
                self._count(_part(site), self.sizes, target[short], None)
        other = dict(target)
        for weights in (own, other):
            frames.into_frame(site, weights)
        names = {**site.names, "memory.g": "encoder.norm.g"}
        return turn_all(turn, names, own), other, target

    def _read(self, model: Model, site: Site) -> Weights:
        read = model.read(site.names.values(), torch.float64)
        own = {short: read[name] for short, name in site.names.items()}
        if site.block.cross is not None:
            own["memory.g"] = model["encoder.norm.g"].double()
        return own

    @staticmethod
    def _attentions(site: Site) -> Iterator[tuple[str, Attention]]:
        yield "", site.block.attention
        if site.block.cross is not None:
            yield "cross.", site.block.cross

    def _shared_orders(self, turn: Turn) -> dict[str, Tensor]:
        """One order of heads for all blocks of a stack that share a position bias."""
        alike: dict[str, Tensor] = {}
        for site in sites(self.about):
            about = site.block.attention
            if about.position_bias:
                own, other, _ = self._pair(site, turn)
                found = head_cosines(own, other, about)
                alike[site.stack.prefix] = alike.get(site.stack.prefix, 0) + found
        return {k: assign_in_groups(c, len(c))[0] for k, c in alike.items()}

    def _can_fold(self) -> bool:
        if not self._ends.folds:
            return False
        for site in sites(self.about):
            for model in (self._A, self._B):
                own = self._read(model, site)
                readings = frames.foldable(site.block, own)
                if not all(frames.divides(r, own) for r in readings):
                    return False
        return True

    def _read_ends(self) -> Ends:
        names = end_names(self.about)
        stored = {k: n for k, n in names.items() if n in self._A.about.tensors}
        a, theirs = self._A.read(stored.values()), self._B.names
        own: Weights = {k: a[n] for k, n in stored.items()}
        b: Weights = {}
        for k, n in stored.items():
            found = self._B[n] if n in theirs else None
            if found is None and k == "head" and self._B.about.tied:
                found = self._B["token"].mT * self._B.about.head_scale
            b[k] = _fitted(found, own[k])
            self._count("ends", self.before, own[k], b[k])
            self._count("ends", self.sizes, b[k], None)
        if self._A.about.tied and "token" in own:
            scale = 1.0 if self.about.tied else self._A.about.head_scale
            own["head"] = own["token"].mT * scale
            if "head" in theirs:
                b["head"] = _fitted(self._B["head"], own["head"])
            else:
                b["head"] = b["token"].mT * (1.0 if self.about.tied else self._B.about.head_scale)
            if not self.about.tied:
                self._count("ends", self.before, own["head"], b["head"])
                self._count("ends", self.sizes, b["head"], None)
        return Ends(self.about, names, own, b)

    def _target(self, name: str) -> Tensor:
        short = next((k for k, n in self._ends.names.items() if n == name), name)
        return self._ends.b[short]

    @staticmethod
    def _count(part: str, into: dict[str, float], w: Tensor, other: Tensor | None) -> None:
        total = 0.0
        for i, rows in enumerate(w.split(LONG_ROWS)):
            x = rows.double()
            if other is not None:
                x = x - other[i * LONG_ROWS : (i + 1) * LONG_ROWS].double()
            total += float(x.square().sum())
        into[part] = into.get(part, 0.0) + total


LONG_ROWS = 8192


def _part(site: Site) -> str:
    return f"{site.stack.prefix}{site.index}"


def _fitted(found: Tensor | None, like: Tensor) -> Tensor:
    """B's tensor with the rows that A has; where B has none, A's own."""
    if found is None:
        return like
    if found.shape == like.shape:
        return found
    out = like.clone()
    cut = tuple(slice(0, min(n, m)) for n, m in zip(found.shape, like.shape, strict=True))
    out[cut] = found[cut].to(out)
    return out


def check_alike(a: Transformer, b: Transformer) -> None:
    """Refuses two networks that do not differ by their weights alone, in one sentence."""

    def told(what: str, x: object, y: object) -> SpaceError:
        return SpaceError(f"A and B cannot be aligned: {what}, {x} and {y}")

    if a.norm != b.norm or a.orders != b.orders or a.inputs != b.inputs:
        raise told("they are built differently", a.family, b.family)
    if a.width != b.width:
        raise told("the widths differ", a.width, b.width)
    depths = [[len(s.blocks) for s in x.stacks] for x in (a, b)]
    if depths[0] != depths[1]:
        raise told("the numbers of blocks differ", *depths)
    for x, y in zip(a.stacks, b.stacks, strict=True):
        for i, (s, t) in enumerate(zip(x.blocks, y.blocks, strict=True)):
            if s != replace(t, attention=replace(t.attention, window=s.attention.window)):
                raise told(f"block {x.prefix}{i} is not of one kind in both", s, t)
    free = (*LONG, "position", "type")
    for name, shape in a.tensors.items():
        other = b.tensors.get(name)
        if name in free or name.startswith("kept."):
            continue
        if other != shape:
            raise told(f"'{name}' is not the same tensor in both", shape, other)
