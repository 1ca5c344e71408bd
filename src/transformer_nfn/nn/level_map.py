"""The linear map of one level: where the parameters of a layer are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from transformer_nfn.nn.levels import Level, Target, Term


@dataclass(frozen=True)
class Block:
    """The parameters by which one term enters one target: one Φ of the paper.

    Attributes:
        level: the permuted axes of the level.
        term: what is read.
        target: the tensor that is written.
        weight: ``[e, *free axes of the target, d, *free axes of the source]``, a view; with
            frequencies (of an axis of complex form) and groups in front where there are any.
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
        in_channels: d, of all groups together.
        out_channels: e, of all groups together.
        groups: channels in groups that do not see each other, as in a grouped convolution.
    """

    def __init__(
        self, level: Level, in_channels: int, out_channels: int, groups: int = 1
    ) -> None:
        super().__init__()
        self.level, self.groups = level, groups
        # Of one group, as everything below.
        in_channels, out_channels = in_channels // groups, out_channels // groups
        self.in_channels, self.out_channels = in_channels, out_channels
        self.fan_in, self.fan_out = level.inputs * in_channels, level.outputs * out_channels
        private = next((t.source for t in level.terms if t.source.private), None)
        self.frequencies = private.sizes[private.private] if private and private.private else 0
        apart = (groups,) if groups > 1 else ()
        self.lead = (*((self.frequencies,) if self.frequencies else ()), *apart)
        self.weight = nn.Parameter(torch.empty(*self.lead, self.fan_out, self.fan_in))
        has_bias = not level.axes and level.family is None
        self.bias = nn.Parameter(torch.zeros(*apart, self.fan_out)) if has_bias else None
        self.widths = [t.features * out_channels for t in level.targets]
        carried = next((len(t.source.carried) for t in level.terms), 0)
        self._places = 1 + len(level.axes) + carried
        self.scaled = any(t.scale != 1 for t in level.terms)
        self.register_buffer("scale", self._scale(), persistent=False)
        self.scale: Tensor

    def _scale(self) -> Tensor:
        scales = [t.scale for t in self.level.terms for _ in range(t.features * self.in_channels)]
        return torch.tensor(scales, dtype=self.weight.dtype, device=self.weight.device)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # Rounded anew in each dtype: float32 scales made float64 would be off by 1e-8.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not self.weight.is_meta:
            self.scale = self._scale()
        return self

    def forward(self, terms: Sequence[Tensor], sample: Tensor) -> Tensor:
        """From terms ``[d, *features, b, *places]`` to ``[out features, b, *places]``.

        The frequencies of a complex axis stand before all that, in and out; the groups, if there
        are several, after them.

        Args:
            terms: one for each of the level's terms.
            sample: any tensor of the weights, for the batch size where there are no terms.
        """
        if not terms:
            assert self.bias is not None
            return self.bias.unsqueeze(-1).expand(*self.bias.shape, sample.shape[0])
        x = self.stack(terms)
        places = x.shape[len(self.lead) + 1 :]
        x = x.flatten(len(self.lead) + 1)
        weight: Tensor = self.weight
        if self.scaled and self.level.axes:
            weight = self.scaled_weight()  # fewer numbers than x, where there are many places
        elif self.scaled:
            x = x * self.scale[:, None]
        return self._product(weight, x).view(*self.lead, self.fan_out, *places)

    def stack(self, terms: Sequence[Tensor], lead: Sequence[int] | None = None) -> Tensor:
        """What the map reads, ``[*lead, in features, b, *places]``.

        Args:
            terms: one for each of the level's terms.
            lead: frequencies and groups; those of the map unless the terms are of some groups.
        """
        lead = self.lead if lead is None else lead
        rows = [t.features * self.in_channels for t in self.level.terms]
        ends = [x.ndim - self._places for x in terms]
        places = terms[0].shape[ends[0] :]
        # A transposition of two axes is much faster on its own than inside `cat`.
        flat = [
            x.reshape(*lead, r, places.numel()).contiguous()
            for x, r in zip(terms, rows, strict=True)
        ]
        x = flat[0] if len(flat) == 1 else torch.cat(flat, -2)
        return x.view(*lead, self.fan_in, *places)

    def scaled_weight(self) -> Tensor:
        """The matrix for features that are sums, not yet multiplied by their scale."""
        return self.weight * self.scale if self.scaled else self.weight

    def _product(self, weight: Tensor, x: Tensor) -> Tensor:
        if self.fan_in == 1 and self.bias is None:
            return weight * x  # an outer product, which is faster as a multiplication
        if not self.lead:
            return weight @ x if self.bias is None else torch.addmm(self.bias[:, None], weight, x)
        weight, x = weight.flatten(0, -3), x.flatten(0, -3)
        if self.bias is None:
            return torch.bmm(weight, x)
        return torch.baddbmm(self.bias.unsqueeze(-1), weight, x)

    def parts(self, terms: Sequence[Tensor], sample: Tensor) -> Sequence[Tensor]:
        """The result of `forward`, cut into one piece for each target."""
        y = self(terms, sample)
        if len(self.widths) == 1:
            return [y]
        # One split, not many slices: its gradient is one cat instead of sums of zeros.
        return torch.split(y, self.widths, len(self.lead))

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
                part = self.weight[..., row : row + rows, column : column + columns]
                part = part.view(*self.lead, *out, self.in_channels, *inner)
                yield Block(self.level.axes, term, target, part, term.scale)
                column += columns
