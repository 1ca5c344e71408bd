"""The symmetry of the stream: one matrix acts on every tensor that reads or writes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from transformer_nfn.checkpoints.symmetries.base import (
    TINY,
    Noise,
    Site,
    Symmetry,
    Tensors,
    Weights,
    random_signs,
)
from transformer_nfn.checkpoints.symmetries.norms import NormBias, NormGain, is_biased, norm_sites
from transformer_nfn.functional.description import StreamGroup, Transformer, axes_of
from transformer_nfn.functional.transformer import Weights as Source
from transformer_nfn.functional.transformer import fetch
from transformer_nfn.spaces.actions import Drawing, Orthogonal, Permutation, Sign, Size
from transformer_nfn.spaces.actions.matrix import orthogonal
from transformer_nfn.spaces.actions.permutation import assign_signed
from transformer_nfn.spaces.actions.solvers import polar, polar_fixing_ones


@dataclass(frozen=True)
class StreamMap:
    """``x → x T`` for the whole stream; the identity if it has neither a matrix nor an order.

    Attributes:
        order: for a signed permutation, which old coordinate each new one is, ``[D]``.
        signs: with it, ``[D]``.
        matrix: otherwise the orthogonal ``T [D, D]``; gains are all one then.
        span: orthonormal columns ``[D, r]``, the directions on which a fit determines the matrix;
            None where it determines all of it.

    Example:
        >>> stream = StreamMap(torch.tensor([1, 0]), torch.tensor([1.0, -1.0]))
        >>> stream(torch.tensor([[3.0, 4.0]])).tolist()
        [[4.0, -3.0]]
        >>> stream.tensor("0.norm_1.g", torch.tensor([3.0, 4.0])).tolist()
        [4.0, 3.0]
    """

    order: Tensor | None = None
    signs: Tensor | None = None
    matrix: Tensor | None = None
    span: Tensor | None = None

    @staticmethod
    def identity(group: StreamGroup, width: int) -> StreamMap:
        """The element that changes nothing, as a matrix or a permutation."""
        if group == "none":
            return StreamMap()
        if group.startswith("orthogonal"):
            return StreamMap(matrix=torch.eye(width, dtype=torch.float64))
        return StreamMap(torch.arange(width), torch.ones(width, dtype=torch.float64))

    def then(self, other: StreamMap) -> StreamMap:
        """This map, and another of the same group after it."""
        if self.matrix is not None and other.matrix is not None:
            T = self.matrix @ other.matrix
            return StreamMap(matrix=1.5 * T - 0.5 * T @ (T.mT @ T))  # restores orthogonality
        if self.order is None or self.signs is None or other.order is None or other.signs is None:
            return self
        return StreamMap(self.order[other.order], self.signs[other.order] * other.signs)

    def __call__(self, x: Tensor, dim: int = -1, *, gain: bool = False) -> Tensor:
        """``x`` moved along one axis; a gain is permuted without signs."""
        if self.matrix is not None:
            return x if gain else (x.movedim(dim, -1) @ self.matrix.to(x)).movedim(-1, dim)
        if self.order is None or self.signs is None:
            return x
        x = x.index_select(dim, self.order)
        return x if gain else x * self.signs.to(x).reshape(-1, *[1] * (x.ndim - 1 - dim % x.ndim))

    def columns(self, x: Tensor) -> Tensor:
        """A matrix that reads the stream, ``[..., D, n]``, moved along."""
        return self(x, -2) if self.matrix is None else self.matrix.to(x).mT @ x

    def tensor(self, name: str, x: Tensor) -> Tensor:
        """A canonical tensor, moved along.

        The output of BERT's transform before its output matrix is a copy of the stream as far
        as a tied output matrix goes: it moves along, with signs in the norm after it.
        """
        for dim, axis in enumerate(axes_of(name)):
            if axis == "D":
                x = self(x, dim, gain=name.endswith(".g"))
            elif axis == "mlm":
                x = self(x, dim, gain=not name.startswith("extra.mlm_norm."))
        return x

    def determined(self, x: Tensor) -> Tensor:
        """The part of ``x [..., D]`` whose image is determined."""
        return x if self.span is None else x @ self.span.to(x) @ self.span.to(x).mT


class Cross:
    """Sums ``AᵀB`` over tensors of two networks along the stream, from which a map is solved.

    Attributes:
        vectors: ``[D, D]``, of what turns.
        gains: ``[D, D]``, of gains, which are permuted but never change sign.

    Example:
        >>> cross = Cross(2)
        >>> a = torch.eye(2).double()
        >>> cross.add("token", a, a.flip(0))
        True
        >>> cross.solve("permutation and sign").order.tolist()
        [1, 0]
    """

    def __init__(self, width: int) -> None:
        self.vectors = torch.zeros(width, width, dtype=torch.float64)
        self.gains = torch.zeros_like(self.vectors)

    def __len__(self) -> int:
        return len(self.vectors)

    def add(self, name: str, a: Tensor, b: Tensor) -> bool:
        """Add a canonical tensor of both networks; False where it has no axis of the stream."""
        if "D" not in axes_of(name):
            return False
        dim = axes_of(name).index("D")
        x, y = (w.movedim(dim, -1).reshape(-1, len(self)) for w in (a, b))
        total = self.gains if name.endswith(".g") else self.vectors
        total += (x.mT @ y).double()
        return True

    def moved(self, stream: StreamMap) -> Cross:
        """The same after A was moved."""
        out = Cross(len(self))
        if stream.matrix is not None:
            out.vectors, out.gains = stream.matrix.mT @ self.vectors, self.gains.clone()
        elif stream.order is not None and stream.signs is not None:
            out.vectors = self.vectors[stream.order] * stream.signs.double().unsqueeze(-1)
            out.gains = self.gains[stream.order]
        else:
            out.vectors, out.gains = self.vectors.clone(), self.gains.clone()
        return out

    def solve(self, group: StreamGroup) -> StreamMap:
        """The map of a group under which A lies nearest to B."""
        if group == "none":
            return StreamMap()
        if group == "orthogonal":
            return StreamMap(matrix=polar(self.vectors))
        if group == "orthogonal fixing ones":
            return StreamMap(matrix=polar_fixing_ones(self.vectors))
        one_sign = group != "signed permutation"
        return StreamMap(*assign_signed(self.vectors, self.gains, one_sign=one_sign))


@dataclass(frozen=True)
class StreamDetail:
    """The group that acts on a stream, and the norms whose gains its matrices need to be one."""

    group: StreamGroup
    norms: tuple[Site, ...]


class StreamBasis(Symmetry[StreamMap]):
    """``x → x T`` for a stream and every tensor with that axis.

    Orthogonal matrices act once all norms are folded into their readers, which `act` does.

    Example:
        >>> site = Site(Transformer("mine", 2, "rms", 1e-6, ()), {}, StreamDetail("orthogonal", ()))
        >>> StreamBasis().size(site).continuous, StreamBasis().label(site)
        (1, 'stream: orthogonal')
    """

    name = "stream"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Every stream on which anything acts: the whole network, where it has residuals."""
        if model.stream_group != "none":
            norms = tuple(site for site in norm_sites(model) if site.detail.residual is None)
            detail = StreamDetail(model.stream_group, norms)
            for names in model.streams:
                yield Site(model, {n: n for n in names}, detail)

    def label(self, site: Site) -> str:
        """Names the group."""
        return f"stream: {site.detail.group}"

    def size(self, site: Site) -> Size:
        """Of the group in D dimensions."""
        D, group = site.model.width, site.detail.group
        if group.startswith("orthogonal"):
            return Orthogonal().size(D if group == "orthogonal" else D - 1)
        return Permutation().size(D) + Sign().size(D if group == "signed permutation" else 1)

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> StreamMap:
        """Uniform over the group."""
        width, group = site.model.width, site.detail.group
        if group == "orthogonal":
            return StreamMap(matrix=orthogonal(1, width, how)[0])
        if group == "orthogonal fixing ones":
            return StreamMap(matrix=orthogonal_fixing_ones(width, how))
        signs = random_signs((width if group == "signed permutation" else 1,), how)
        order = torch.randperm(width, generator=how.generator)
        return StreamMap(order=order, signs=signs.expand(width))

    def act(self, site: Site, weights: Tensors, g: StreamMap) -> Weights:
        """Turns every tensor, after norms were folded where T is no permutation."""
        out = dict(weights)
        if g.matrix is not None:
            for norm in site.detail.norms:
                tensors = norm.pick(out)
                if "norm.g" in tensors:
                    if is_biased(norm):
                        tensors |= NormBias().reduce(norm, tensors)
                    out |= norm.put(tensors | NormGain().reduce(norm, tensors))
        return {name: g.tensor(name, w) for name, w in out.items()}

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> StreamMap:
        """The best map for all tensors with the axis of the stream."""
        cross = Cross(site.model.width)
        folded = [
            self.act(site, w, StreamMap.identity(site.detail.group, len(cross))) for w in (a, b)
        ]
        for name, w in folded[0].items():
            if not name.startswith("extra.mlm"):  # they turn on both sides, see `StreamMap`
                cross.add(name, w, folded[1][name])
        return cross.solve(site.detail.group)


def allowed(site: Site, *sources: Source, least: float = TINY) -> Site:
    """The site of a stream with the group that the weights of all sources allow.

    A bias of a norm that no bias of a reader can take up has to be divided by the gain; where a
    gain is near zero, only permutations are left.

    Args:
        sources: weights of the networks that the group is to act on.
        least: smallest gain to divide by, relative to the largest.
    """
    for norm in site.detail.norms if site.detail.group == "orthogonal fixing ones" else ():
        if "norm.b" not in norm.names or is_biased(norm):
            continue
        name = norm.names["norm.g"]
        for source in sources:
            gain = fetch(source, [name], torch.float64)[name].abs()
            if not gain.min() > least * gain.max():
                return replace(site, detail=replace(site.detail, group="permutation and sign"))
    return site


def orthogonal_fixing_ones(size: int, how: Drawing) -> Tensor:
    """A random orthogonal matrix under which the all-ones vector stays."""
    inner = torch.eye(size, dtype=torch.float64)
    inner[1:, 1:] = orthogonal(1, size - 1, how)[0]
    mirror = torch.ones(size, dtype=torch.float64) / size**0.5
    mirror[0] -= 1  # reflects the first unit vector into the direction of ones
    mirror = mirror / mirror.norm().clamp_min(1e-300)

    def reflect(x: Tensor) -> Tensor:
        return x - 2 * torch.outer(mirror, mirror @ x)

    return reflect(reflect(inner).mT).mT
