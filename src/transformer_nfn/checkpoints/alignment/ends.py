"""Alignment of the ends of a network: embeddings, last norm and heads, some rows at a time.

Whatever the symmetries of the ends leave free is set to one value in both networks before they are
compared (the frame of comparison), and to what B has after A was turned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from transformer_nfn.checkpoints.alignment.frames import (
    best_gain,
    centre_readers,
    divides,
    fold,
    gain_sums,
    unfold,
)
from transformer_nfn.checkpoints.alignment.stream import Cross, turn_all
from transformer_nfn.checkpoints.disguises import norms
from transformer_nfn.checkpoints.disguises.ends import (
    EMBEDDINGS,
    MLM,
    last_reading,
    move_patches,
    move_to_positions,
)
from transformer_nfn.checkpoints.symmetries.stream import Turn
from transformer_nfn.functional.description import Transformer
from transformer_nfn.spaces.actions.permutation import assign

Weights = dict[str, Tensor]
LONG = ("token", "head", "head_bias")
CHUNK = 8192


@dataclass
class Ends:
    """The ends of both networks, under the names of `disguise.sites.end_names`.

    Attributes:
        about: A as it will be written.
        names: canonical names by those of the ends.
        a: A's tensors, ``head`` among them where it is tied.
        b: B's, of the rows that A has (A's own where B has none).
        size: squares of both in the frame of comparison, complete after `cross`.
    """

    about: Transformer
    names: Mapping[str, str]
    a: Weights
    b: Weights
    size: float = 0.0

    @property
    def folds(self) -> bool:
        """Whether the last norm, if only its readers see its gain, can be folded in both."""
        last = self._readings.get("norm")
        return last is None or self._tied(last) or last in self._free

    @cached_property
    def _readings(self) -> dict[str, norms.Reading]:
        """The last norm and that of BERT's transform, where anything reads them."""
        last = last_reading(self.about)
        found = [] if last is None else [last]
        if self.about.mlm is not None and "head" in self.a:
            found.append(MLM)
        return {r.norm: r for r in found if f"{r.norm}.g" in self.a}

    def _tied(self, reading: norms.Reading) -> bool:
        """The token embedding reads the norm, which fixes its gain."""
        return self.about.tied and (self.about.mlm is None or reading is MLM)

    @cached_property
    def _free(self) -> list[norms.Reading]:
        """Those whose gain is free."""
        return [
            r
            for r in self._readings.values()
            if not self._tied(r) and all(divides(r, side) for side in (self.a, self.b))
        ]

    @property
    def _layer(self) -> bool:
        return self.about.norm == "layer"

    def _cuts(self) -> Iterator[slice]:
        """Ranges of the vocabulary."""
        rows = [w.shape[1] if k == "head" else w.shape[0] for k, w in self.a.items() if k in LONG]
        for start in range(0, max([1, *rows]), CHUNK):
            yield slice(start, start + CHUNK)

    def _cut(self, side: Weights, rows: slice) -> Weights:
        """One network's ends, the vocabulary cut to a range, in float64."""
        out = {}
        for k, w in side.items():
            if k in LONG:
                w = w[:, rows] if k == "head" else w[rows]
            out[k] = w.double()
        return out

    def _framed(self, side: Weights, rows: slice) -> Weights:
        """One network's ends in the frame of comparison.

        Norms are folded, means that nobody sees are zero, and vectors between embeddings are
        where their squares are least.
        """
        own = self._cut(side, rows)
        nothing = {name: torch.zeros_like(w) for name, w in own.items()}
        for reading in self._readings.values():
            if reading in self._free:
                fold(own, [reading])
                if self._layer:
                    centre_readers(own, nothing, reading)
            elif reading.biased(own):
                own |= norms.absorb_bias(own, reading)
        self._centre(own, nothing)
        return self._shifted(own, self._gauges[side is self.b])

    def _centre(self, own: Weights, target: Weights) -> None:
        if self.about.hides_mean_of_embeddings:
            free = [n for n in EMBEDDINGS if n in own and not (n == "token" and self.about.tied)]
            own |= norms.shift_writers(own, {n: (target[n] - own[n]).mean(-1) for n in free})

    def cross(self) -> Cross:
        """What the ends say about the turn of the stream.

        BERT's transform says nothing: its units turn along, or have an order of their own. Nor
        does the norm after an encoder, which the blocks of the decoder fold.
        """
        total = Cross(self.about.width)
        for number, rows in enumerate(self._cuts()):
            a, b = (self._framed(side, rows) for side in (self.a, self.b))
            for k, w in a.items():
                copied = k == "head" and (self.about.tied or self.about.mlm is not None)
                silent = k == "encoder.norm.g" or k.startswith("extra.mlm")
                if (number and k not in LONG) or copied or silent:
                    continue
                if total.add("head" if k == "head" else self.names.get(k, k), w, b[k]):
                    self.size += float(w.square().sum() + b[k].square().sum())
        return total

    def moved(self, turn: Turn, memory: Tensor | None) -> Iterator[tuple[str, Tensor]]:
        """A's ends, turned and as near to B's as they get, by canonical name."""
        order = self._hidden_order(turn)
        vectors, gains = self._vectors_to_b(turn), self._gains(turn, order)
        dtypes = {k: w.dtype for k, w in self.a.items()}
        long = {k: torch.empty_like(w) for k, w in self.a.items() if k in LONG}
        for number, rows in enumerate(self._cuts()):
            own, target = self._turned(turn, rows, order), self._cut(self.b, rows)
            self._unfold(own, target, gains)
            self._centre(own, target)
            own = self._shifted(own, vectors)
            if memory is not None:
                own["encoder.norm.g"] = memory
            for k in list(own):
                if k in long:
                    piece = long[k][:, rows] if k == "head" else long[k][rows]
                    piece.copy_(own.pop(k))
            if number == 0:
                yield from ((self.names[k], w) for k, w in own.items())
        if self.about.tied:
            long.pop("head", None)
        yield from ((self.names.get(k, k), w.to(dtypes[k])) for k, w in long.items())

    def _turned(self, turn: Turn, rows: slice, order: Tensor | None) -> Weights:
        """A's ends in B's frame of comparison."""
        own = turn_all(turn, {**self.names, "head": "head"}, self._framed(self.a, rows))
        if order is not None:
            for name in ("extra.mlm.b", "extra.mlm_norm.g", "extra.mlm_norm.b"):
                own[name] = own[name][order]
            own["extra.mlm.W"], own["head"] = own["extra.mlm.W"][:, order], own["head"][order]
        if MLM in self._free:  # a turn has left its signs there
            own |= norms.replace_gain(own, MLM, own[f"{MLM.norm}.g"].abs())
        return own

    def _gains(self, turn: Turn, order: Tensor | None) -> dict[str, Tensor]:
        """Free gains that are nearest to B, over the whole vocabulary."""
        totals = {
            r.norm: torch.zeros(2, len(self.a[f"{r.norm}.g"]), dtype=torch.float64)
            for r in self._free
        }
        for number, rows in enumerate(self._cuts() if self._free else ()):
            own, target = self._turned(turn, rows, order), self._cut(self.b, rows)
            for reading in self._free:
                readers = [n for n in reading.present(own) if n == "head" or number == 0]
                part = norms.Reading(reading.norm, tuple(readers))
                totals[reading.norm] += gain_sums(own, target, part, self._layer)
        return {norm: best_gain(self.b[f"{norm}.g"], total) for norm, total in totals.items()}

    def _unfold(self, own: Weights, target: Weights, gains: Mapping[str, Tensor]) -> None:
        for reading in self._readings.values():
            name = f"{reading.norm}.b"
            if reading in self._free:
                unfold(own, target, reading, centred=self._layer, gain=gains[reading.norm])
                if self._layer:
                    centre_readers(own, target, reading)
            elif reading.biased(own):
                own |= norms.shift_bias(own, reading, target[name] - own[name])

    @cached_property
    def _gauges(self) -> list[Tensor | Weights]:
        """For A and for B: vectors between embeddings that make the embeddings smallest."""
        return [self._vectors(self._tables(side)) for side in (self.a, self.b)]

    def _vectors_to_b(self, turn: Turn) -> Tensor | Weights:
        own = self._shifted(self._tables(self.a), self._gauges[0])
        own, target = turn_all(turn, self.names, own), self._tables(self.b)
        return self._vectors({k: w - target[k] for k, w in own.items()})

    def _tables(self, side: Weights) -> Weights:
        """All embeddings that a vector may be moved between; of tokens and types their means."""
        if "position" not in side:
            return {}
        if self.about.inputs != "tokens":
            names = ("cls", "dist", "patch_bias", "position")
            return {n: side[n].double() for n in names if n in side}
        tables = ("type", "position") if self.about.tied else ("token", "type", "position")
        return {n: side[n].mean(0, keepdim=True, dtype=torch.float64) for n in tables if n in side}

    def _vectors(self, away: Weights) -> Tensor | Weights:
        """Vectors between embeddings after which they are away least, by least squares."""
        if self.about.hides_mean_of_embeddings:
            away = {k: w - w.mean(-1, keepdim=True) for k, w in away.items()}
        if self.about.inputs == "tokens":
            if len(away) < 2:  # nothing beside positions
                return {}
            rows = {n: len(self.a[n]) for n in away}
            left = sum(w.flatten() for w in away.values()) / sum(1 / n for n in rows.values())
            return {n: w.flatten() - left / rows[n] for n, w in away.items() if n != "position"}
        if "position" not in away:
            return {}
        first = [away[n].flatten() for n in ("cls", "dist") if n in away]
        apart, rest = away["position"][: len(first)], away["position"][len(first) :]
        v = w = torch.zeros_like(rest[0])
        if first:
            v = (torch.stack(first) - apart).sum(0) / (2 * len(first))
        if "patch_bias" in away:
            w = (away["patch_bias"] - rest.sum(0)) / (1 + len(rest))
        return torch.stack([v, w])

    @staticmethod
    def _shifted(own: Weights, vectors: Tensor | Weights) -> Weights:
        if isinstance(vectors, Tensor):
            return own | move_patches(own, vectors)
        return own | move_to_positions(own, vectors) if vectors else own

    def _hidden_order(self, turn: Turn) -> Tensor | None:
        """The order of the units of BERT's transform, where no tie fixes it."""
        if self.about.mlm is None or self.about.tied or "head" not in self.a:
            return None
        first = next(self._cuts())
        sides = [self._turned(turn, first, None), self._framed(self.b, first)]
        x, y = (torch.cat([s["extra.mlm.W"], s["extra.mlm.b"][None]]) for s in sides)
        return assign(y.mT @ x)
