"""The equivariant layer, the invariant layer, and the activation of any weight space."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from transformer_nfn.errors import SpaceError
from transformer_nfn.nn.gather import add_pieces, plan_gathers, plan_pieces, run_gathers
from transformer_nfn.nn.level_map import (
    POOLS,
    SCHEMES,
    Block,
    LevelMap,
    Pool,
    Scheme,
    levels_table,
    reset_maps,
)
from transformer_nfn.nn.levels import (
    Target,
    gate_targets,
    invariant_sources,
    plan_levels,
    tensor_targets,
)
from transformer_nfn.nn.low_rank import Dictionaries, Writers
from transformer_nfn.spaces import Weights, WeightSpace, fold


class Equivariant(nn.Module):
    r"""All maps $E: \mathcal{U}^d \to \mathcal{U}^e$ with $E(gU) = g\,E(U)$ of the paper's form.

    Linear in the tensors and in the invariant products of eq. 17 (Theorem "equivariant layer"),
    for any space: pooled to levels, mapped, broadcast. In the paper's block it has
    ``2D³ + 12D² + 15D + 12`` parameters for each pair of channels and ``2D + 2`` for each output
    channel, the dimension of the space of such maps. In a space with shifts the weights are folded
    first, so outputs are invariant to shifts.

    Args:
        in_channels: d. out_channels: e.
        groups: independent groups of channels, as in a grouped convolution: the layers of several
            blocks in one call.
        rank: size of the dictionaries on the free axes; None for the full layer. With a rank the
            parameters are linear in the width and no matrix of width × width is formed.
        gated: multiply every tensor with a linear axis by ``1 + tanh`` of an invariant number
            for each channel and head. Without it stacked layers are linear in Q, K, V.
        quadratic: also read contractions along permuted axes (``W_A W_B``, ``b_A W_B``,
            ``W_O W_A``), which are outside the paper's form.
        pool: ``mean`` keeps unit scale; ``sum`` is the paper's form. The functions are the same,
            the parameters differ by constants.
        init: ``unit`` or ``xavier`` (the authors').

    >>> from transformer_nfn import spaces
    >>> from transformer_nfn.testing import assert_equivariant
    >>> space = spaces.attention_block(4, 2, 2, 2, 3)
    >>> layer = Equivariant(space, in_channels=1, out_channels=2).double()
    >>> layer(space.randn(5, dtype=torch.float64))["W_Q"].shape
    torch.Size([5, 2, 2, 4, 2])
    >>> assert_equivariant(layer, space, space.randn(1, dtype=torch.float64))
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
        _check_channels(groups, rank, in_channels=in_channels, out_channels=out_channels)
        _check_options(pool=(pool, POOLS), init=(init, SCHEMES))
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
        """Initialise all parameters."""
        reset_maps(self.level_maps, self.init, self.rank)
        if self.readers is not None and self.writers is not None:
            self.readers.reset_parameters()
            self.writers.reset_parameters()

    def blocks(self) -> Iterator[Block]:
        """The parameters split into the paper's Φ, one for each term and target."""
        for linear in self.level_maps:
            yield from linear.blocks(self.rank)

    def forward(self, weights: Mapping[str, Tensor]) -> Weights:
        """E(U).

        Args:
            weights: tensors by name, each ``[batch, d, *axes]``.

        Returns:
            tensors by name, each ``[batch, e, *axes]``.
        """
        inputs = enter(self.space, weights, self.in_channels, self)
        terms = run_gathers(self.plan, inputs, self.readers)
        sample = next(iter(inputs.values()))
        results = [m.parts(t, sample) for m, t in zip(self.level_maps, terms, strict=True)]
        out: Weights = {}
        for target in self.targets:
            y = self._assemble(target, results, sample)
            if self.writers is not None:
                y = self.writers(target, y, inputs[target.name])
            if self.gated and target.family is not None:
                y = y * self._gate(target.name, target.family[0], results)
            out[target.name] = y
        return out

    def _assemble(
        self, target: Target, results: Sequence[Sequence[Tensor]], sample: Tensor
    ) -> Tensor:
        pieces = self.pieces[target.name]
        shape = (sample.shape[0], self.out_channels, *(target.sizes[a] for a in target.labels))
        # A tensor without a piece of full size is constant along the missing axes.
        y = add_pieces(pieces, results).expand(shape) if pieces else sample.new_zeros(shape)
        if target.private is not None:
            # Frequency and pair become one axis again.
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


class Invariant(nn.Module):
    r"""All maps $I: \mathcal{U}^d \to \mathbb{R}^n$ with $I(gU) = I(U)$ of the form of eq. 18.

    The level ∅ of `Equivariant`: ``D² + 3D + 2`` parameters for each channel and output in the
    paper's block, and one for each output.

    Args:
        in_channels: d. out_features: n.
        groups: the outputs are grouped too. This and all other options as in `Equivariant`.

    >>> from transformer_nfn import spaces
    >>> space = spaces.attention_block(4, 2, 2, 2, 3)
    >>> layer = Invariant(space, in_channels=1, out_features=6).double()
    >>> U = space.randn(5, dtype=torch.float64)
    >>> torch.allclose(layer(U), layer(space.group.random(max_condition=10).act(U)))
    True
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
        _check_channels(groups, rank, in_channels=in_channels, out_features=out_features)
        _check_options(pool=(pool, POOLS), init=(init, SCHEMES))
        self.space, self.groups = space, groups
        self.in_channels = in_channels
        self.rank, self.quadratic, self.init = rank, quadratic, init
        sources = [s for s in invariant_sources(space, quadratic=quadratic) if s.family is None]
        target = Target("out", (), (), (), None, (), {}, None)
        (level,) = plan_levels(space, sources, [target], rank=rank, mean=pool == "mean")
        self.plan = plan_gathers([level], rank)
        self.map = LevelMap(level, in_channels, out_features, groups)
        self.readers = Dictionaries(sources, rank) if rank is not None else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all parameters."""
        reset_maps([self.map], self.init, self.rank)
        if self.readers is not None:
            self.readers.reset_parameters()

    def blocks(self) -> Iterator[Block]:
        """The parameters split into the paper's Φ, one for each term."""
        yield from self.map.blocks(self.rank)

    def forward(self, weights: Mapping[str, Tensor]) -> Tensor:
        """I(U), ``[batch, n]``, from weights ``[batch, d, *axes]``."""
        inputs = enter(self.space, weights, self.in_channels, self)
        (terms,) = run_gathers(self.plan, inputs, self.readers)
        out: Tensor = self.map(terms, next(iter(inputs.values())))
        return out.flatten(0, -2).t()

    def extra_repr(self) -> str:
        """The inputs as a table."""
        return levels_table([self.map])


class Activation(nn.Module):
    """A pointwise function on the tensors where it commutes with the group.

    In the paper's block these are W_A, W_B, b_A and b_B, which are only permuted; a function of the
    entries of W_Q would not commute with M. Positive scales commute with ReLU, signs with odd
    functions. Other tensors pass through unchanged.

    >>> from transformer_nfn import spaces
    >>> Activation(spaces.attention_block(4, 2, 2, 2, 3))
    Activation(W_A, W_B, b_A, b_B)
    """

    def __init__(self, space: WeightSpace, fn: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.fn = fn
        self.acts_on = frozenset(
            name
            for name, spec in space.tensors.items()
            if all(space.axes[a].action.commutes_with(fn) for a in spec.axes)
        )

    def forward(self, weights: Mapping[str, Tensor]) -> Weights:
        """Apply ``fn`` where it is equivariant."""
        return {n: self.fn(x) if n in self.acts_on else x for n, x in weights.items()}

    def extra_repr(self) -> str:
        """The tensors it acts on."""
        return ", ".join(sorted(self.acts_on))


def _check_channels(groups: int, rank: int | None, **channels: int) -> None:
    """Raise `SpaceError` unless all are positive integers and the channels divide into groups."""
    for name, number in {**channels, "groups": groups}.items():
        if not _is_positive(number):
            raise SpaceError(f"{name} must be a positive integer, found {number!r}")
    if rank is not None and not _is_positive(rank):
        raise SpaceError(f"rank must be a positive integer or None, found {rank!r}")
    for name, number in channels.items():
        if number % groups:
            raise SpaceError(f"{name} must be a multiple of groups, found {number} and {groups}")
    if groups > 1 and rank is not None:
        raise SpaceError("a layer of low rank has one group; use one layer for each group")


def _is_positive(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def _check_options(**options: tuple[str, Sequence[str]]) -> None:
    """Raise `SpaceError` unless every option is one of its choices."""
    for name, (value, choices) in options.items():
        if value not in choices:
            words = ", ".join(repr(c) for c in choices)
            raise SpaceError(f"{name} must be one of {words}, found {value!r}")


def enter(
    space: WeightSpace, weights: Mapping[str, Tensor], in_channels: int, layer: nn.Module
) -> Mapping[str, Tensor]:
    """The weights, validated and with shifts folded away.

    Weights of lower precision than the layer's parameters, such as those of a zoo in half
    precision, are cast to them; weights of higher precision are rejected.
    """
    space.check(weights, finite=False)
    first = next(iter(weights.values()))
    if first.shape[1] != in_channels:
        raise SpaceError(
            f"the layer reads {in_channels} channels, the weights have {first.shape[1]}"
        )
    dtype = next(layer.parameters()).dtype
    if first.dtype != dtype:
        if torch.promote_types(first.dtype, dtype) != dtype:
            raise SpaceError(
                f"the layer is in {_dtype_name(dtype)} and the weights are in "
                f"{_dtype_name(first.dtype)}: cast either of them"
            )
        weights = {name: w.to(dtype) for name, w in weights.items()}
    return fold(space, weights) if space.shifts else weights


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
