"""How is a whole network disguised? Every symmetry that it has, drawn at random, block by block.

What all blocks share is drawn first: the turn of the stream, the order of heads that share a
position bias, the gain of the norm after an encoder. Then each block is read, moved and let go,
so that a large network costs the memory of one block and of its embeddings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from transformer_nfn.checkpoints.disguises import heads, norms
from transformer_nfn.checkpoints.disguises.ends import EndRow, end_rows, last_reading
from transformer_nfn.checkpoints.disguises.rows import BLOCK_ROWS, TINY, new_gains
from transformer_nfn.checkpoints.disguises.sites import Site, end_names, sites
from transformer_nfn.checkpoints.disguises.stream import Turn, draw_turn, stream_action
from transformer_nfn.checkpoints.families import Model, write_model
from transformer_nfn.errors import GroupError
from transformer_nfn.functional.description import Transformer
from transformer_nfn.functional.transformer import Weights as Source
from transformer_nfn.functional.transformer import fetch
from transformer_nfn.spaces.actions import Drawing
from transformer_nfn.spaces.group import WORST_CONDITION

CHUNK = 16384
"""Entries of a vocabulary that are moved at a time."""
MEMORY = norms.Reading("memory", ("cross.W_K", "cross.W_V"))
"""The norm after an encoder, which every block of the decoder reads."""


def untied(about: Transformer) -> Transformer:
    """The same network with an output matrix of its own, which takes up the head's scale."""
    if not about.tied:
        return about
    assert about.vocab is not None
    tensors = {**about.tensors, "head": (about.width, about.vocab)}
    return replace(about, tied=False, head_scale=1.0, tensors=tensors)


class Disguise:
    """One random disguise of a network: iterate it once for its tensors, by canonical name.

    Attributes:
        about: the network as it will be: untied, unless ties are to be kept.
        action: what acts on its stream.
        acted: how many times each symmetry acted, complete after the iteration.
    """

    def __init__(
        self,
        about: Transformer,
        weights: Source,
        generator: torch.Generator | None = None,
        *,
        condition: float = 10.0,
        keep_tie: bool = False,
    ) -> None:
        self.about = about if keep_tie else untied(about)
        self.acted: Counter[str] = Counter()
        self._before, self._weights = about, weights
        self._how = Drawing(generator, condition=condition)
        self._dtype = _working(about, weights)
        self.action = stream_action(self.about)
        if self.action == "orthogonal fixing ones" and not self._can_fold():
            self.action = "permutation and sign"
        self._turn: Turn = draw_turn(self.action, about.width, self._how)
        if self.action != "none":
            self.acted[f"stream: {self.action}"] = 1
        self._orders = {
            stack.prefix: heads.draw_heads(stack.blocks[0].attention, self._how)
            for stack in about.stacks
            if stack.blocks and stack.blocks[0].attention.position_bias
        }
        self._memory: tuple[Tensor, Tensor] | None = None
        if len(about.stacks) > 1:
            old = fetch(weights, ["encoder.norm.g"], torch.float64)["encoder.norm.g"]
            self._memory = old, new_gains(old, self._how)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._ends()
        for site in sites(self._before):
            short = self._block(site)
            for name in list(short):
                yield site.names[name], short.pop(name)

    def _can_fold(self) -> bool:
        """Whether no norm has a bias that neither its readers' take nor its gain can scale."""
        for site in sites(self._before):
            for reading in norms.readings(site.block, site.names):
                if not reading.biased(site.names) and not self._divides(reading, site.names):
                    return False
        last, names = last_reading(self.about), end_names(self.about)
        return last is None or last.biased(names) or self._divides(last, names)

    def _divides(self, reading: norms.Reading, names: Mapping[str, str]) -> bool:
        if f"{reading.norm}.b" not in names:
            return True
        gain = fetch(self._weights, [names[f"{reading.norm}.g"]], torch.float64).popitem()[1].abs()
        return bool(gain.min() > TINY * gain.max())

    def _block(self, site: Site) -> dict[str, Tensor]:
        read = fetch(self._weights, site.names.values(), self._dtype)
        own = {short: read[name] for short, name in site.names.items()}
        if site.block.cross is not None and self._memory is not None:
            own["memory.g"] = self._memory[0].to(own["cross.W_K"])
        if self._turn.needs_unit_gains:
            for reading in (*norms.readings(site.block, own), MEMORY):
                _unit_gain(own, reading)
        for short, name in site.names.items():
            own[short] = self._turn(name, own[short])
        if "memory.g" in own:
            own["memory.g"] = self._turn("encoder.norm.g", own["memory.g"])
        if site.stack.prefix in self._orders:
            own |= heads.permute_heads(own, *self._orders[site.stack.prefix])
            self.acted["heads permuted, all blocks alike"] += 1
        for row, act in BLOCK_ROWS.items():
            changed = act(site, own, self._how)
            own |= changed
            self.acted[row] += bool(changed)
        if "memory.g" in own and self._memory is not None:
            own |= norms.replace_gain(own, MEMORY, self._memory[1])
            del own["memory.g"]
        return own

    def _ends(self) -> Iterator[tuple[str, Tensor]]:
        names = end_names(self.about)
        stored = [name for name in names.values() if name in self._before.tensors]
        full = fetch(self._weights, stored, None)
        full = {short: full[name] for short, name in names.items() if name in full}
        if self._before.tied and "token" in full:
            full["head"] = full["token"].mT  # also where it stays tied: its norm's bias moves
        small = {short: w.to(self._dtype) for short, w in full.items() if short not in _LONG}
        prepared = small | {k: full[k] for k in _LONG if k in full}
        rows = list(self._end_rows(prepared, names))
        for row in rows:
            self.acted[row.name] += 1
        long = {k: torch.empty_like(full[k]) for k in _LONG if k in full}
        entries = max([1, *(_entries(k, w) for k, w in long.items())])
        for start in range(0, entries, CHUNK):
            cut = slice(start, start + CHUNK)
            own = self._moved({**small, **self._cut(full, cut)}, names, cut, rows)
            for k in long:
                _at(k, long[k], cut).copy_(own.pop(k))
            if start == 0:
                yield from ((names[k], w) for k, w in own.items())
        if self.about.tied:
            long.pop("head", None)
        yield from ((names[k], w) for k, w in long.items())

    def _cut(self, full: Mapping[str, Tensor], cut: slice) -> dict[str, Tensor]:
        own = {k: _at(k, full[k], cut).to(self._dtype) for k in _LONG if k in full}
        if self._before.tied and not self.about.tied:
            own["head"] = own["head"] * self._before.head_scale
        return own

    def _moved(
        self, own: dict[str, Tensor], names: Mapping[str, str], cut: slice, rows: list[EndRow]
    ) -> dict[str, Tensor]:
        last = last_reading(self.about)
        if self._turn.needs_unit_gains and last is not None:
            _unit_gain(own, last)
        for short in own:
            own[short] = self._turn(names.get(short, short), own[short])
        for row in rows:
            own |= row.act(own, cut)
        if self._memory is not None:
            own["encoder.norm.g"] = self._memory[1].to(own["encoder.norm.g"])
        return own

    def _end_rows(self, full: Mapping[str, Tensor], names: Mapping[str, str]) -> Iterator[EndRow]:
        """The rows at the ends, drawn for norms as they are once folded and turned."""
        prepared = dict(full)
        if self._turn.needs_unit_gains and "norm.g" in prepared:
            prepared["norm.g"] = torch.ones_like(prepared["norm.g"])
        for short in prepared:
            if prepared[short].ndim == 1 and short not in _LONG:
                prepared[short] = self._turn(names[short], prepared[short])
        return end_rows(self.about, prepared, self._how)


def disguise(
    model: Model,
    out: str | Path,
    generator: torch.Generator | None = None,
    *,
    condition: float = 10.0,
    keep_tie: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Disguise:
    """Writes a model with other weights and the same function, laid out as its source is.

    Args:
        model: the source, open.
        out: a new or empty folder if the source is one, else a file.
        generator: where the randomness comes from.
        condition: of every matrix that re-bases a head, and the spread of scales.
        keep_tie: leave out what would part the output matrix from the token embedding; else a
            tied model is written untied, and its config says so.
        progress: told the number of weights after each tensor.

    Returns:
        What acted.
    """
    if not condition >= 1:
        raise GroupError(f"condition must be at least 1, found {condition}")
    if condition > WORST_CONDITION:
        raise GroupError(f"condition must be at most {WORST_CONDITION:g}, found {condition:g}")
    drawn = Disguise(model.about, model, generator, condition=condition, keep_tie=keep_tie)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, w in drawn:
            yield name, w
            if progress is not None:
                progress(w.numel())

    write_model(model, tensors(), out, untied=not keep_tie)
    return drawn


_LONG = ("token", "head", "head_bias")


def _entries(name: str, w: Tensor) -> int:
    return w.shape[1] if name == "head" else w.shape[0]


def _at(name: str, w: Tensor, cut: slice) -> Tensor:
    return w[:, cut] if name == "head" else w[cut]


def _working(about: Transformer, weights: Source) -> torch.dtype:
    """float64 for full precision; half-precision weights lose nothing in float32."""
    name = f"{about.stacks[0].prefix}0.W_B"
    stored = fetch(weights, [name])[name].dtype
    return torch.float64 if stored in (torch.float32, torch.float64) else torch.float32


def _unit_gain(own: dict[str, Tensor], reading: norms.Reading) -> None:
    """Folds a norm into its readers: its bias into theirs where they have any, then its gain."""
    if f"{reading.norm}.g" not in own:
        return
    if reading.biased(own):
        own |= norms.absorb_bias(own, reading)
    gain = own[f"{reading.norm}.g"]
    own |= norms.replace_gain(own, reading, torch.ones_like(gain))
