"""How do the ends of a network move along? Embeddings, last norm and heads, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.architectures.families.description import Transformer
from transformer_nfn.symmetry.alignment.frames import (
    best_gain,
    centre_readers,
    fold,
    gain_sums,
    unfold,
)
from transformer_nfn.symmetry.alignment.neurons import assign
from transformer_nfn.symmetry.alignment.stream import Cross, turn_all
from transformer_nfn.symmetry.disguise import norms
from transformer_nfn.symmetry.disguise.ends import (
    EMBEDDINGS,
    MLM,
    last_reading,
    move_patches,
    move_to_positions,
)
from transformer_nfn.symmetry.disguise.stream import Turn

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
    def tied(self) -> bool:
        """The last norm is read by the token embedding."""
        return self.about.tied and self.about.mlm is None

    def last(self) -> norms.Reading | None:
        """The last norm, where only its readers see its gain."""
        found = last_reading(self.about)
        return None if found is None or "norm.g" not in self.a else found

    def cuts(self) -> Iterator[slice]:
        """Ranges of the vocabulary."""
        rows = [w.shape[1] if k == "head" else w.shape[0] for k, w in self.a.items() if k in LONG]
        for start in range(0, max([1, *rows]), CHUNK):
            yield slice(start, start + CHUNK)

    def cut(self, side: Weights, rows: slice) -> Weights:
        """One network's ends, the vocabulary cut to a range, in float64."""
        out = {}
        for k, w in side.items():
            if k in LONG:
                w = w[:, rows] if k == "head" else w[rows]
            out[k] = w.double()
        return out

    def folded(self, own: Weights) -> Weights:
        """In the frame of comparison: the last norm folded, means that nobody sees taken away."""
        reading = self.last()
        nothing = {name: torch.zeros_like(w) for name, w in own.items()}
        if reading is not None and not self.tied:
            fold(own, [reading])
            if self.about.norm == "layer":
                centre_readers(own, nothing, reading)
        self._centre(own, nothing)
        return own

    def _centre(self, own: Weights, target: Weights) -> None:
        if self.about.hides_mean_of_embeddings:
            free = [n for n in EMBEDDINGS if n in own and not (n == "token" and self.about.tied)]
            own |= norms.shift_writers(own, {n: (target[n] - own[n]).mean(-1) for n in free})

    def cross(self) -> Cross:
        """What the ends say about the turn of the stream."""
        total = Cross(self.about.width)
        means: dict[str, list[Tensor]] = {}
        movable = self._movable()
        for number, rows in enumerate(self.cuts()):
            a, b = (self.folded(self.cut(side, rows)) for side in (self.a, self.b))
            for k, w in a.items():
                if (number and k not in LONG) or (k == "head" and self.about.tied):
                    continue
                name = "head" if k == "head" else self.names.get(k, k)
                total.add(name, w, b[k])
                self.size += float(w.square().sum() + b[k].square().sum())
                if k in movable:
                    sums = means.setdefault(k, [torch.zeros(()), torch.zeros(()), torch.zeros(())])
                    means[k] = [sums[0] + w.sum(0), sums[1] + b[k].sum(0), sums[2] + len(w)]
        for x, y, count in means.values():  # a vector that may move tells nothing
            total.vectors -= torch.outer(x, y) / float(count)
            self.size -= float(x.square().sum() + y.square().sum()) / float(count)
        return total

    def _movable(self) -> tuple[str, ...]:
        if self.about.inputs != "tokens" or "position" not in self.a:
            return ()
        names = [n for n in ("token", "type") if n in self.a]
        names = [n for n in names if not (n == "token" and self.about.tied)]
        return (*names, "position") if names else ()

    def moved(self, turn: Turn, memory: Tensor | None) -> Iterator[tuple[str, Tensor]]:
        """A's ends, turned and as near to B's as they get, by canonical name."""
        vectors, order = self._vectors(turn), self._hidden_order(turn)
        gain = self._last_gain(turn)
        dtypes = {k: w.dtype for k, w in self.a.items()}
        long = {k: torch.empty_like(w) for k, w in self.a.items() if k in LONG}
        for number, rows in enumerate(self.cuts()):
            own = self._cut_moved(turn, rows, vectors, order, gain)
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

    def _cut_moved(
        self,
        turn: Turn,
        rows: slice,
        vectors: Mapping[str, Tensor],
        order: Tensor | None,
        gain: Tensor | None,
    ) -> Weights:
        own, target = self.folded(self.cut(self.a, rows)), self.cut(self.b, rows)
        own = turn_all(turn, {**self.names, "head": "head"}, own)
        if order is not None:
            for name in ("extra.mlm.b", "extra.mlm_norm.g", "extra.mlm_norm.b"):
                own[name] = own[name][order]
            own["extra.mlm.W"], own["head"] = own["extra.mlm.W"][:, order], own["head"][order]
        self._norms(own, target, gain)
        self._centre(own, target)
        if "patches" in vectors:
            own |= move_patches(own, vectors["patches"])
        elif vectors:
            own |= move_to_positions(own, vectors)
        return own

    def _last_gain(self, turn: Turn) -> Tensor | None:
        """The gain of the last norm that is nearest to B, over the whole vocabulary."""
        last = self.last()
        if last is None or self.tied:
            return None
        total, layer = torch.zeros(2, self.about.width, dtype=torch.float64), self.about.norm
        for number, rows in enumerate(self.cuts()):
            own = turn_all(
                turn, {**self.names, "head": "head"}, self.folded(self.cut(self.a, rows))
            )
            target = self.cut(self.b, rows)
            readers = [n for n in last.present(own) if n == "head" or number == 0]
            part = norms.Reading(last.norm, tuple(readers))
            total += gain_sums(own, target, part, layer == "layer")
        return best_gain(self.b["norm.g"], total)

    def _norms(self, own: Weights, target: Weights, gain: Tensor | None) -> None:
        layer = self.about.norm == "layer"
        last = self.last()
        if last is not None and not self.tied:
            unfold(own, target, last, centred=layer, gain=gain)
            if layer:
                centre_readers(own, target, last)
        elif last_reading(self.about) is not None and "norm.b" in own:
            found = last_reading(self.about)
            assert found is not None
            if found.biased(own):
                own |= norms.shift_bias(own, found, target["norm.b"] - own["norm.b"])
        if self.about.mlm is not None and "head" in own and MLM.biased(own):
            name = "extra.mlm_norm.b"
            own |= norms.shift_bias(own, MLM, target[name] - own[name])

    def _vectors(self, turn: Turn) -> dict[str, Tensor]:
        """Vectors between embeddings, as least squares over all their rows has them."""
        if "position" not in self.a:
            return {}
        sides = [turn_all(turn, self.names, self._means(self.a)), self._means(self.b)]
        away = {k: (sides[0][k] - sides[1][k]).flatten() for k in sides[0]}
        if self.about.hides_mean_of_embeddings:
            away = {k: v - v.mean() for k, v in away.items()}
        if self.about.inputs == "patches":
            first = [n for n in ("cls", "dist") if n in self.a]
            if not first:
                return {}
            apart = turn("position", self.a["position"].double()) - self.b["position"].double()
            if self.about.hides_mean_of_embeddings:
                apart = apart - apart.mean(-1, keepdim=True)
            count, rest = len(first), apart[len(first) :]
            v = (sum(away[n] for n in first) - apart[:count].sum(0)) / (2 * count)
            w = torch.zeros_like(rest[0])
            if "patch_bias" in self.a:
                w = (away["patch_bias"] - rest.sum(0)) / (1 + len(rest))
            return {"patches": torch.stack([torch.as_tensor(v), w])}
        out = {}
        for name in self._movable()[:-1]:
            n, m = len(self.a[name]), len(self.a["position"])
            v = (n * away[name] - m * away["position"]) / (n + m)
            out[name] = v
            away["position"] = away["position"] + v
        return out

    def _means(self, side: Weights) -> Weights:
        names = [n for n in EMBEDDINGS if n in side]
        return {
            n: side[n].mean(0, keepdim=True, dtype=torch.float64)
            if side[n].ndim > 1
            else side[n].double()
            for n in names
        }

    def _hidden_order(self, turn: Turn) -> Tensor | None:
        """The order of the units of BERT's transform, where no tie fixes it."""
        if self.about.mlm is None or self.about.tied or "head" not in self.a:
            return None
        names = ("extra.mlm.W", "extra.mlm.b")
        sides = [{k: w[k].double() for k in names} for w in (self.a, self.b)]
        sides[0] = turn_all(turn, self.names, sides[0])
        x, y = (torch.cat([s["extra.mlm.W"], s["extra.mlm.b"][None]]) for s in sides)
        return assign(y.mT @ x)
