"""Disguise a checkpoint: a random element of every symmetry acts at every site.

What several blocks share (the basis of the stream, the order of heads with a common position
bias) is drawn first. Then each block is read, moved and released, so that a large network costs
the memory of one block and of its embeddings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.checkpoints.families import Model, write_model
from transformer_nfn.checkpoints.symmetries import SYMMETRIES
from transformer_nfn.checkpoints.symmetries.base import (
    LONG,
    Site,
    Sites,
    Symmetry,
    Weights,
    block_parts,
    end_names,
    entries,
    vocabulary_cuts,
)
from transformer_nfn.checkpoints.symmetries.stream import StreamBasis, allowed
from transformer_nfn.errors import GroupError
from transformer_nfn.functional.description import StreamGroup, Transformer
from transformer_nfn.functional.transformer import Weights as Source
from transformer_nfn.functional.transformer import fetch
from transformer_nfn.spaces.actions import Drawing
from transformer_nfn.spaces.group import WORST_CONDITION

CHUNK = 16384
"""Entries of a vocabulary that are moved at a time."""
ENDS = "ends"
"""Key of the tensors outside the blocks."""


def untied(description: Transformer) -> Transformer:
    """The same network with an untied output matrix, which takes up the head's scale."""
    if not description.tied:
        return description
    assert description.vocab is not None
    tensors = {**description.tensors, "head": (description.width, description.vocab)}
    return replace(description, tied=False, head_scale=1.0, tensors=tensors)


class Disguise:
    """One random disguise of a network: iterate it once for its tensors, by canonical name.

    Attributes:
        description: the network as it will be: untied, unless ties are to be kept.
        action: the group that acts on its stream.
        acted: number of sites at which each symmetry acted, complete after the iteration.

    Example:
        >>> from transformer_nfn.checkpoints import open_model
        >>> from transformer_nfn.testing import write_example_checkpoint
        >>> with open_model(write_example_checkpoint("llama")) as model:
        ...     disguise = Disguise(model.description, model, torch.Generator().manual_seed(0))
        ...     tensors = dict(disguise)
        >>> disguise.action, disguise.acted["neurons scaled"]
        ('orthogonal', 2)
    """

    def __init__(
        self,
        description: Transformer,
        weights: Source,
        generator: torch.Generator | None = None,
        *,
        condition: float = 10.0,
        keep_tie: bool = False,
    ) -> None:
        self.description = description if keep_tie else untied(description)
        self.action: StreamGroup = "none"
        self.acted: Counter[str] = Counter()
        self._before, self._weights = description, weights
        self._how = Drawing(generator, condition=condition)
        self._dtype = _working_dtype(description, weights)
        self._ends, self._blocks = end_names(self.description), list(block_parts(self.description))
        self._local, shared = self._sites()
        self._full = self._read_ends()
        self._small = {n: w.to(self._dtype) for n, w in self._full.items() if n not in LONG}
        self._shared: list[tuple[Symmetry[Any], Site, Any]] = []
        state = dict(self._small)
        for symmetry, site in shared:
            g = symmetry.draw(site, site.pick(state), self._how)
            state |= site.put(symmetry.act(site, site.pick(state), g))
            self._shared.append((symmetry, site, g))
            self.acted[symmetry.label(site)] += 1

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._moved_ends()
        for part in self._blocks:
            owned = list(part.names.values())
            weights = fetch(self._weights, [*owned, *part.context], self._dtype)
            self._act_shared(weights)
            for symmetry, site in self._local[part.name]:
                g = symmetry.draw(site, site.pick(weights), self._how)
                self._act(symmetry, site, weights, g)
            for name in owned:
                yield name, weights.pop(name)

    def _sites(self) -> tuple[dict[str, Sites], Sites]:
        """Sites within one part, by its name, and those that span several."""
        owner = dict.fromkeys(self._ends.values(), ENDS)
        owner |= {name: part.name for part in self._blocks for name in part.names.values()}
        local: dict[str, Sites] = {name: [] for name in (ENDS, *(p.name for p in self._blocks))}
        shared: Sites = []
        for symmetry in SYMMETRIES:
            for site in symmetry.sites(self.description):
                if isinstance(symmetry, StreamBasis):
                    site = allowed(site, self._weights)
                    self.action = site.detail.group
                moved = (name for short, name in site.names.items() if short not in symmetry.reads)
                owners = {owner[name] for name in moved if name in owner}
                place = local[owners.pop()] if len(owners) == 1 else shared
                place.append((symmetry, site))
        return local, shared

    def _act_shared(self, weights: Weights) -> None:
        for symmetry, site, g in self._shared:
            weights |= site.put(symmetry.act(site, site.pick(weights), g))

    def _act(
        self, symmetry: Symmetry[Any], site: Site, weights: Weights, g: Any, *, count: bool = True
    ) -> None:
        changed = symmetry.act(site, site.pick(weights), g)
        weights |= site.put(changed)
        self.acted[symmetry.label(site)] += count and bool(changed)

    def _read_ends(self) -> Weights:
        stored = [name for name in self._ends.values() if name in self._before.tensors]
        full = fetch(self._weights, stored)
        if self._before.tied and "token" in full:
            full["head"] = full["token"].mT  # also where it stays tied: its norm's bias moves
        return full

    def _moved_ends(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors outside the blocks; of the vocabulary some entries at a time."""
        long = {k: torch.empty_like(w) for k, w in self._full.items() if k in LONG}
        elements: list[Any] = []
        for cut in vocabulary_cuts(long, CHUNK):
            weights = {**self._small, **self._cut(cut)}
            self._act_shared(weights)
            for i, (symmetry, site) in enumerate(self._local[ENDS]):
                if cut.start == 0:
                    known = site.pick({**weights, **{k: self._full[k] for k in long}})
                    elements.append(symmetry.draw(site, known, self._how))
                g = symmetry.for_entries(elements[i], cut)
                self._act(symmetry, site, weights, g, count=cut.start == 0)
            for k, w in long.items():
                entries(k, w, cut).copy_(weights.pop(k))
            if cut.start == 0:
                yield from weights.items()
        if self.description.tied:
            long.pop("head", None)
        yield from long.items()

    def _cut(self, cut: slice) -> Weights:
        """Some entries of the vocabulary, in the working dtype."""
        out = {k: entries(k, w, cut).to(self._dtype) for k, w in self._full.items() if k in LONG}
        if self._before.tied and not self.description.tied:
            out["head"] = out["head"] * self._before.head_scale
        return out


def disguise(
    model: Model,
    out: str | Path,
    generator: torch.Generator | None = None,
    *,
    condition: float = 10.0,
    keep_tie: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Disguise:
    """Write a model with other weights and the same function, in the layout of its source.

    Args:
        out: a new or empty folder if the source is one, else a file.
        condition: of every matrix that re-bases a head, and the spread of scales.
        keep_tie: leave out what would part the output matrix from the token embedding; else a
            tied model is written untied, and its config says so.
        progress: called with the number of weights after each tensor.

    Returns:
        What acted.

    Example:
        >>> from transformer_nfn.checkpoints import open_model
        >>> from transformer_nfn.testing import write_example_checkpoint
        >>> with open_model(write_example_checkpoint("llama")) as model:
        ...     done = disguise(model, "disguised", torch.Generator().manual_seed(0))
        >>> done.acted["heads permuted"]
        2
    """
    if not condition >= 1:
        raise GroupError(f"condition must be at least 1, found {condition}")
    if condition > WORST_CONDITION:
        raise GroupError(f"condition must be at most {WORST_CONDITION:g}, found {condition:g}")
    drawn = Disguise(model.description, model, generator, condition=condition, keep_tie=keep_tie)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, w in drawn:
            yield name, w
            if progress is not None:
                progress(w.numel())

    write_model(model, tensors(), out, untied=not keep_tie)
    return drawn


def _working_dtype(description: Transformer, weights: Source) -> torch.dtype:
    """float64 for full precision; half-precision weights lose nothing in float32."""
    name = f"{description.stacks[0].prefix}0.W_O"
    stored = fetch(weights, [name])[name].dtype
    return torch.float64 if stored in (torch.float32, torch.float64) else torch.float32
