"""The equivariant layer E of any weight space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from transformer_nfn.nn.assemble import add_pieces, plan_pieces
from transformer_nfn.nn.dictionaries import Dictionaries, Writers, check_rank
from transformer_nfn.nn.entry import check_channels, check_groups, check_options, enter
from transformer_nfn.nn.gather import plan_gathers, run_gathers
from transformer_nfn.nn.init import POOLS, SCHEMES, Pool, Scheme, reset_maps
from transformer_nfn.nn.level_map import Block, LevelMap
from transformer_nfn.nn.levels import (
    Target,
    gate_targets,
    invariant_sources,
    plan_levels,
    tensor_targets,
)
from transformer_nfn.nn.table import levels_table
from transformer_nfn.spaces import Weights, WeightSpace


class Equivariant(nn.Module):
    r"""All maps $E: \mathcal{U}^d \to \mathcal{U}^e$ with $E(gU) = g\,E(U)$ of the paper's form.

    Linear in the tensors and in the invariant products of eq. 17 (Theorem "equivariant layer"),
    for any space: levels, pooled, mapped, broadcast. In the paper's block it has
    ``2D³ + 12D² + 15D + 12`` parameters for each pair of channels and ``2D + 2`` for each output
    channel, as many as there are such maps. In a space with shifts the weights are folded
    first, so outputs do not notice shifts at all.

    Args:
        space: of the weights, in and out.
        in_channels: d.
        out_channels: e.
        groups: channels in groups that do not see each other, as in a grouped convolution: the
            layers of several blocks side by side, in one call.
        rank: size of the dictionaries on the free axes; None for the full layer. With a rank the
            parameters are linear in the width and no matrix of width × width is formed.
        gated: multiply every tensor with a linear axis by ``1 + tanh`` of an invariant number
            for each channel and head. Without it layers stacked on Q, K, V collapse to one.
        quadratic: also read contractions along permuted axes (``W_A W_B``, ``b_A W_B``,
            ``W_O W_A``), which are outside the paper's form.
        pool: ``mean`` keeps everything at unit scale; ``sum`` is what the paper writes. The
            functions are the same, the parameters differ by constants.
        init: ``unit`` or ``xavier`` (the authors').
    """

    def __init__(
        self,
        space: WeightSpace,
        in_channels: int,
        out_channels: int,
        *,
        groups: int = 1,
        rank: int | None = None,
        gated: bool = False,
        quadratic: bool = False,
        pool: Pool = "mean",
        init: Scheme = "unit",
    ) -> None:
        super().__init__()
        check_channels(in_channels=in_channels, out_channels=out_channels)
        check_groups(groups, rank, in_channels=in_channels, out_channels=out_channels)
        check_rank(rank)
        check_options(pool=(pool, POOLS), init=(init, SCHEMES))
        self.space, self.groups = space, groups
        self.in_channels, self.out_channels = in_channels, out_channels
        self.rank, self.gated, self.quadratic, self.init = rank, gated, quadratic, init
        sources = invariant_sources(space, quadratic=quadratic)
        self.targets = tensor_targets(space, rank=rank)
        gates = gate_targets(space) if gated else []
        levels = plan_levels(
            space, sources, [*self.targets, *gates], rank=rank, mean=pool == "mean"
        )
        self.plan = plan_gathers(levels, rank)
        self.maps = nn.ModuleList(
            LevelMap(level, in_channels, out_channels, groups) for level in levels
        )
        self.pieces = plan_pieces(self.level_maps, [*self.targets, *gates])
        self.readers = Dictionaries(sources, rank) if rank is not None else None
        self.writers = (
            Writers(space, rank, in_channels, out_channels) if rank is not None else None
        )
        self.reset_parameters()

    @property
    def level_maps(self) -> list[LevelMap]:
        """The maps of the levels, largest level first."""
        return [m for m in self.maps if isinstance(m, LevelMap)]

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        reset_maps(self.level_maps, self.init, self.rank)
        if self.readers is not None and self.writers is not None:
            self.readers.reset_parameters()
            self.writers.reset_parameters(share=0.5)

    def blocks(self) -> Iterator[Block]:
        """The parameters cut into the paper's Φ, one for each term and target."""
        for linear in self.level_maps:
            yield from linear.blocks(self.rank)

    def forward(self, weights: Mapping[str, Tensor]) -> Weights:
        """E(U).

        Args:
            weights: tensors by name, each ``[batch, d, *axes]``.

        Returns:
            tensors by name, each ``[batch, e, *axes]``.
        """
        given = enter(self.space, weights, self.in_channels, self)
        terms = run_gathers(self.plan, given, self.readers)
        sample = next(iter(given.values()))
        results = [m.parts(t, sample) for m, t in zip(self.level_maps, terms, strict=True)]
        out: Weights = {}
        for target in self.targets:
            y = self._assemble(target, results, sample)
            if self.writers is not None:
                y = self.writers(target, y, given[target.name])
            if self.gated and target.family is not None:
                y = y * self._gate(target.name, target.family[0], results)
            out[target.name] = y
        return out

    def _assemble(
        self, target: Target, results: Sequence[Sequence[Tensor]], sample: Tensor
    ) -> Tensor:
        pieces = self.pieces[target.name]
        shape = (sample.shape[0], self.out_channels, *(target.sizes[a] for a in target.labels))
        # A tensor that nothing of its own size is read into is the same along its axes.
        y = add_pieces(pieces, results).expand(shape) if pieces else sample.new_zeros(shape)
        if target.private is not None:
            # Piece and place in the piece (frequency and pair) become one axis again.
            place = 2 + target.labels.index(target.private)
            assert target.family is not None
            y = self.space.axes[target.family[0]].action.join(y, place)
        return y

    def _gate(self, name: str, carried: str, results: Sequence[Sequence[Tensor]]) -> Tensor:
        gate = add_pieces(self.pieces[f"gate {name}"], results)
        spec = self.space.tensors[name]
        owners = self.space.ancestors(carried)
        gate = gate.permute(0, 1, *(2 + owners.index(a) for a in spec.axes if a in owners))
        for place, axis in enumerate(spec.axes):
            if axis not in owners:
                gate = gate.unsqueeze(2 + place)
        return 1 + torch.tanh(gate)

    def extra_repr(self) -> str:
        """The levels as a table."""
        return levels_table(self.level_maps)
