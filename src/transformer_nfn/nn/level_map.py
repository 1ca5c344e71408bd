"""The linear map of one level: parameters, initialisation, and a table of levels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from transformer_nfn.nn.levels import Level, Target, Term

Scheme = Literal["unit", "xavier"]
Pool = Literal["mean", "sum"]
POOLS, SCHEMES = ("mean", "sum"), ("unit", "xavier")


@dataclass(frozen=True)
class Block:
    """The parameters between one term and one target: one Φ of the paper.

    Attributes:
        level: the permuted axes of the level.
        term: the input.
        target: the tensor written.
        weight: ``[e, *free axes of the target, d, *free axes of the source]``, a view; with
            frequencies (of an axis of complex form) and groups in front where there are any.
        scale: factor of the *sum* over pooled axes, so the paper's Φ is ``weight * scale``.

    >>> from transformer_nfn import nn, spaces
    >>> layer = nn.Invariant(spaces.multi_head(4, 2, 3, 3), in_channels=1, out_features=2)
    >>> [(block.term.name, list(block.weight.shape)) for block in layer.blocks()]
    [('W_Q·W_K', [2, 1, 4, 4]), ('W_V·W_O', [2, 1, 4, 4])]
    """

    level: tuple[str, ...]
    term: Term
    target: Target
    weight: Tensor
    scale: float


class LevelMap(nn.Module):
    """``y = W [x_1, x_2, …] + c``: one matrix product for all terms and targets of a level.

    Args:
        in_channels: d, over all groups. out_channels: e, likewise.
        groups: independent groups of channels, as in a grouped convolution.
    """

    def __init__(
        self, level: Level, in_channels: int, out_channels: int, groups: int = 1
    ) -> None:
        super().__init__()
        self.level, self.groups = level, groups
        # Per group from here on.
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
        # Recomputed in each dtype: float32 scales cast to float64 would be off by 1e-8.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not self.weight.is_meta:
            self.scale = self._scale()
        return self

    def forward(self, terms: Sequence[Tensor], sample: Tensor) -> Tensor:
        """From terms ``[d, *features, b, *places]`` to ``[out features, b, *places]``.

        The frequencies of a complex axis come first, in and out, then the groups.

        Args:
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
            weight = self.scaled_weight()  # cheaper than scaling x where there are many places
        elif self.scaled:
            x = x * self.scale[:, None]
        return self._product(weight, x).view(*self.lead, self.fan_out, *places)

    def stack(self, terms: Sequence[Tensor], lead: Sequence[int] | None = None) -> Tensor:
        """The input of the map, ``[*lead, in features, b, *places]``.

        Args:
            lead: frequencies and groups; those of the map by default.
        """
        lead = self.lead if lead is None else lead
        rows = [t.features * self.in_channels for t in self.level.terms]
        ends = [x.ndim - self._places for x in terms]
        places = terms[0].shape[ends[0] :]
        # A transposition of two axes is much faster outside `cat`.
        flat = [
            x.reshape(*lead, r, places.numel()).contiguous()
            for x, r in zip(terms, rows, strict=True)
        ]
        x = flat[0] if len(flat) == 1 else torch.cat(flat, -2)
        return x.view(*lead, self.fan_in, *places)

    def scaled_weight(self) -> Tensor:
        """The matrix for features that are sums, not means."""
        return self.weight * self.scale if self.scaled else self.weight

    def _product(self, weight: Tensor, x: Tensor) -> Tensor:
        if self.fan_in == 1 and self.bias is None:
            return weight * x  # an outer product is faster as a multiplication
        if not self.lead:
            return weight @ x if self.bias is None else torch.addmm(self.bias[:, None], weight, x)
        weight, x = weight.flatten(0, -3), x.flatten(0, -3)
        if self.bias is None:
            return torch.bmm(weight, x)
        return torch.baddbmm(self.bias.unsqueeze(-1), weight, x)

    def parts(self, terms: Sequence[Tensor], sample: Tensor) -> Sequence[Tensor]:
        """The result of `forward`, split by target."""
        y = self(terms, sample)
        if len(self.widths) == 1:
            return [y]
        # The gradient of one split is one cat instead of sums of padded slices.
        return torch.split(y, self.widths, len(self.lead))

    def offsets(self) -> Iterator[tuple[Target, int, int]]:
        """Each target with the start and number of its features."""
        start = 0
        for target in self.level.targets:
            width = target.features * self.out_channels
            yield target, start, width
            start += width

    def blocks(self, rank: int | None) -> Iterator[Block]:
        """The weight, split into the paper's Φ."""
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


@torch.no_grad()
def reset_maps(maps: Sequence[LevelMap], scheme: Scheme, rank: int | None) -> None:
    """Initialise the weights of a layer's maps.

    ``unit``: independent inputs of unit scale give outputs of unit scale. A level l whose features
    have mean variance V_l gets a share V_l / Σ V of a target's variance, regardless of its fan-in,
    so that the one entry of W_A matters beside the D² numbers of QK.
    ``xavier``: the authors' scheme for sums, each Φ normal with variance 2 / (fan in + fan out) of
    its einsum, and that variance as deviation where a product is read or an axis is pooled.

    Args:
        rank: the rank of the layer's dictionaries, if it has any.
    """
    if scheme == "xavier":
        for linear in maps:
            for block in linear.blocks(rank):
                fan_in = block.term.features * linear.in_channels
                fan_out = block.target.features * linear.out_channels
                std = (2 / (fan_in + fan_out)) ** 0.5
                squared = len(block.term.source.factors) > 1 or block.term.pooled > 1
                block.weight.normal_(0, std**2 if squared else std)
        return
    shares: dict[str, float] = {}
    for linear in maps:
        for target in linear.level.targets:
            shares[target.name] = shares.get(target.name, 0.0) + _variance(linear)
    for linear in maps:
        for target, start, width in linear.offsets():
            std = (linear.fan_in * shares[target.name]) ** -0.5 if linear.fan_in else 0.0
            linear.weight[..., start : start + width, :].normal_(0, std)


def _variance(linear: LevelMap) -> float:
    terms = linear.level.terms
    total = sum(t.features for t in terms)
    return sum(t.features * t.variance for t in terms) / total if total else 0.0


def levels_table(maps: Sequence[LevelMap]) -> str:
    """One line per level: inputs, outputs and number of parameters."""
    rows = [("level", "in", "out", "parameters")]
    for linear in reversed(maps):
        level = linear.level
        rows.append(
            (
                level.name,
                ", ".join(f"{t.name} {t.features}" for t in level.terms) or "1",
                ", ".join(f"{t.name} {t.features}" for t in level.targets),
                f"{sum(p.numel() for p in linear.parameters()):,}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        "  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]) for row in rows
    )
