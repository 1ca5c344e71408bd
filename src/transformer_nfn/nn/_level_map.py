"""The linear map of one level: where the parameters of a layer are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_nfn.nn._gather import Gather
from transformer_nfn.nn._levels import Level, Target, Term


@dataclass(frozen=True)
class Block:
    """The parameters by which one term enters one target: one Φ of the paper.

    Attributes:
        level: the permuted axes of the level.
        term: what is read.
        target: the tensor that is written.
        weight: ``[e, *free axes of the target, d, *free axes of the source]``, a view; with the
            frequencies in front for an axis of complex form.
        scale: the layer multiplies the *sum* over pooled axes by this before ``weight``, so
            the paper's Φ is ``weight * scale``.
    """

    level: tuple[str, ...]
    term: Term
    target: Target
    weight: Tensor
    scale: float


class LevelMap(nn.Module):
    """``y = W [x_1, x_2, …] + c``: one matrix product for everything that meets at a level.

    Args:
        level: what goes in and what comes out.
        gathers: how each term of the level lies in memory.
        in_channels: d.
        out_channels: e.
    """

    def __init__(
        self, level: Level, gathers: Sequence[Gather], in_channels: int, out_channels: int
    ) -> None:
        super().__init__()
        self.level = level
        self.in_channels, self.out_channels = in_channels, out_channels
        self.starts = tuple(g.start for g in gathers)
        self.fan_in, self.fan_out = level.inputs * in_channels, level.outputs * out_channels
        private = next((t.source for t in level.terms if t.source.private), None)
        self.frequencies = private.sizes[private.private] if private and private.private else 0
        shape: tuple[int, ...] = (self.fan_out, self.fan_in)
        if self.frequencies:
            shape = (self.frequencies, self.fan_in, self.fan_out)
        self.weight = nn.Parameter(torch.empty(shape))
        has_bias = not level.axes and level.family is None
        self.bias = nn.Parameter(torch.zeros(self.fan_out)) if has_bias else None
        self.widths = [t.features * out_channels for t in level.targets]
        self.scaled = any(t.scale != 1 for t in level.terms)
        self.register_buffer("scale", self._scale(), persistent=False)
        self.scale: Tensor

    def _scale(self) -> Tensor:
        scales = [t.scale for t in self.level.terms for _ in range(t.features * self.in_channels)]
        return torch.tensor(scales, dtype=self.weight.dtype, device=self.weight.device)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # Rounded anew in each dtype: float32 scales made float64 would be off by 1e-8.
        super()._apply(fn, recurse)
        if not self.weight.is_meta:
            self.scale = self._scale()
        return self

    def parts(self, terms: Sequence[Tensor], batch: Tensor) -> Sequence[Tensor]:
        """The result of `forward`, cut into one piece for each target."""
        y = self(terms, batch)
        if len(self.widths) == 1:
            return [y]
        # One split, not many slices: its gradient is one cat instead of sums of zeros.
        return list(y.split(self.widths, 1 if self.level.front else -1))

    def forward(self, terms: Sequence[Tensor], batch: Tensor) -> Tensor:
        """From the gathered terms to ``[b, *level, *carried, features]``.

        Channels come first instead where they are all the features there are (`Level.front`),
        and the frequencies of a complex axis before the batch.
        """
        if not terms:
            assert self.bias is not None
            return self.bias.expand(batch.shape[0], -1)
        if self.level.front:
            return self._front(terms)
        flat = [x.flatten(start) for x, start in zip(terms, self.starts, strict=True)]
        x = flat[0] if len(flat) == 1 else torch.cat(flat, -1)
        if self.scaled:
            x = x * self.scale
        if self.frequencies:
            y = torch.bmm(x.reshape(x.shape[0], x.shape[1:-1].numel(), self.fan_in), self.weight)
            return y.view(*x.shape[:-1], self.fan_out)
        return F.linear(x, self.weight, self.bias)

    def _front(self, terms: Sequence[Tensor]) -> Tensor:
        places = terms[0].shape[2:]
        x = terms[0] if len(terms) == 1 else torch.cat(list(terms), 1)
        x = x.reshape(x.shape[0], self.fan_in, places.numel())
        # The scale goes to whichever of the two is the smaller.
        weight = self.weight * self.scale if self.scaled else self.weight
        # One channel in: an outer product, which is faster as a multiplication.
        y = x * weight if self.fan_in == 1 else torch.matmul(weight, x)
        if self.bias is not None:
            y = y + self.bias[:, None]
        return y.view(y.shape[0], self.fan_out, *places)

    def offsets(self) -> Iterator[tuple[Target, int, int]]:
        """Each target with where its features start, and how many there are."""
        start = 0
        for target in self.level.targets:
            width = target.features * self.out_channels
            yield target, start, width
            start += width

    def blocks(self, rank: int | None) -> Iterator[Block]:
        """The weight, cut into the paper's Φ."""
        for target, row, rows in self.offsets():
            column = 0
            out = (self.out_channels, *(target.sizes[a] for a in target.free))
            for term in self.level.terms:
                columns = term.features * self.in_channels
                free = [a for a in term.source.free if rank is None or a not in term.source.dense]
                inner = [term.source.sizes[a] for a in free]
                if rank is not None and term.source.dense:
                    inner = [rank, *inner]
                weight = self.weight if not self.frequencies else self.weight.mT
                part = weight[..., row : row + rows, column : column + columns]
                lead = part.shape[:-2]
                part = part.view(*lead, *out, self.in_channels, *inner)
                yield Block(self.level.axes, term, target, part, term.scale)
                column += columns
