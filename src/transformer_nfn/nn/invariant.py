"""The invariant layer I of any weight space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from transformer_nfn.nn.dictionaries import Dictionaries, check_rank
from transformer_nfn.nn.entry import check_channels, check_groups, check_options, enter
from transformer_nfn.nn.gather import plan_gathers, run_gathers
from transformer_nfn.nn.init import POOLS, SCHEMES, Pool, Scheme, reset_maps
from transformer_nfn.nn.level_map import Block, LevelMap
from transformer_nfn.nn.levels import Target, invariant_sources, plan_levels
from transformer_nfn.nn.table import levels_table
from transformer_nfn.spaces import WeightSpace


class Invariant(nn.Module):
    r"""All maps $I: \mathcal{U}^d \to \mathbb{R}^n$ with $I(gU) = I(U)$ of the form of eq. 18.

    The level ∅ of `Equivariant` with other outputs: ``D² + 3D + 2`` parameters for each channel
    and output in the paper's block, and one for each output.

    Args:
        space: of the weights.
        in_channels: d.
        out_features: n.
        groups: as in `Equivariant`; the outputs are grouped too.
        rank: as in `Equivariant`.
        quadratic: as in `Equivariant`.
        pool: as in `Equivariant`.
        init: as in `Equivariant`.
    """

    def __init__(
        self,
        space: WeightSpace,
        in_channels: int,
        out_features: int,
        *,
        groups: int = 1,
        rank: int | None = None,
        quadratic: bool = False,
        pool: Pool = "mean",
        init: Scheme = "unit",
    ) -> None:
        super().__init__()
        check_channels(in_channels=in_channels, out_features=out_features)
        check_groups(groups, rank, in_channels=in_channels, out_features=out_features)
        check_rank(rank)
        check_options(pool=(pool, POOLS), init=(init, SCHEMES))
        self.space, self.groups = space, groups
        self.in_channels, self.out_features = in_channels, out_features
        self.rank, self.quadratic, self.init = rank, quadratic, init
        sources = [s for s in invariant_sources(space, quadratic=quadratic) if s.family is None]
        target = Target("out", (), (), (), None, (), {}, None)
        (level,) = plan_levels(space, sources, [target], rank=rank, mean=pool == "mean")
        self.plan = plan_gathers([level], rank)
        self.map = LevelMap(level, in_channels, out_features, groups)
        self.readers = Dictionaries(sources, rank) if rank is not None else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        reset_maps([self.map], self.init, self.rank)
        if self.readers is not None:
            self.readers.reset_parameters()

    def blocks(self) -> Iterator[Block]:
        """The parameters cut into the paper's Φ, one for each term."""
        yield from self.map.blocks(self.rank)

    def forward(self, weights: Mapping[str, Tensor]) -> Tensor:
        """I(U), ``[batch, n]``, from weights ``[batch, d, *axes]``."""
        given = enter(self.space, weights, self.in_channels, self)
        (terms,) = run_gathers(self.plan, given, self.readers)
        out: Tensor = self.map(terms, next(iter(given.values())))
        return out.flatten(0, -2).t()

    def extra_repr(self) -> str:
        """What the layer reads as a table."""
        return levels_table([self.map])
