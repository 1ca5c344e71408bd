"""Symmetries of a mixture of experts: their order, and what softmax does not see of the router."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from transformer_nfn.checkpoints.symmetries.base import (
    Additive,
    Noise,
    Part,
    Site,
    Symmetry,
    Tensors,
    Weights,
    block_parts,
    noise,
)
from transformer_nfn.checkpoints.symmetries.neurons import neuron_scales
from transformer_nfn.functional.description import Mlp, Transformer
from transformer_nfn.spaces.actions import Drawing, Permutation, Size
from transformer_nfn.spaces.actions.permutation import assign

ROUTER = "router"


class ExpertPermutation(Symmetry[Tensor]):
    """Experts in another order, and the columns of the router with them.

    An element says which old expert each new one is, ``[experts]``.

    Example:
        >>> site = Site(Transformer("mine", 1, "rms", 1e-6, ()), {}, Mlp(1, "silu", True, 2, 1))
        >>> weights = {"router": torch.tensor([[1.0, 2.0]])}
        >>> weights |= {f"expert.{e}.W_G": torch.full((1, 1), 1.0 + e) for e in range(2)}
        >>> moved = ExpertPermutation().act(site, weights, torch.tensor([1, 0]))
        >>> moved["router"].tolist(), moved["expert.0.W_G"].item()
        ([[2.0, 1.0]], 2.0)
    """

    name = "experts permuted"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Every mixture of experts; its description is the detail."""
        for part, mlp in _mixtures(model):
            names = {n: c for n, c in part.names.items() if n.startswith(("expert.", ROUTER))}
            yield Site(model, names, mlp)

    def size(self, site: Site) -> Size:
        """Orders of the experts."""
        return Permutation().size(site.detail.experts)

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Tensor:
        """A random order."""
        return torch.randperm(site.detail.experts, generator=how.generator)

    def act(self, site: Site, weights: Tensors, g: Tensor) -> Weights:
        """Renames experts and reorders the router."""
        out = {ROUTER: weights[ROUTER][:, g]}
        for new, old in enumerate(g.tolist()):
            before = f"expert.{old}."
            out |= {
                f"expert.{new}.{name.removeprefix(before)}": w
                for name, w in weights.items()
                if name.startswith(before)
            }
        return out

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Tensor:
        """An assignment on the router and on sums over the neurons of each expert."""
        return assign(self.similarity(site, a, b))

    def similarity(self, site: Site, a: Tensors, b: Tensors) -> Tensor:
        """Cosines of expert i of ``b`` and expert j of ``a``, summed, ``[experts, experts]``.

        Neither the order of the neurons nor their scales, nor a shift of the router change it.
        """
        total = torch.zeros(site.detail.experts, site.detail.experts, dtype=torch.float64)
        for x, y in zip(self._features(site, a), self._features(site, b), strict=True):
            x, y = (z / z.norm(dim=1, keepdim=True).clamp_min(1e-300) for z in (x, y))
            total += y @ x.mT
        return total

    def _features(self, site: Site, weights: Tensors) -> Iterator[Tensor]:
        """``[experts, …]``: columns of the router, and sums over neurons that take no scale."""
        mlp: Mlp = site.detail
        router = weights[ROUTER].double()
        yield (router - router.mean(1, keepdim=True)).mT
        if mlp.gated or neuron_scales(mlp) is None:
            name = "W_G" if mlp.gated else "W_A"
            yield torch.stack([weights[f"{p}{name}"].double().sum(1) for p in mlp.prefixes])


class RouterShift(Additive[Tensor]):
    """``router → router + v 1ᵀ``, ``v [D]``: it adds one number to the scores of all experts.

    Example:
        >>> site = Site(Transformer("mine", 1, "rms", 1e-6, ()), {})
        >>> RouterShift().reduce(site, {"router": torch.tensor([[1.0, 3.0]])})["router"].tolist()
        [[-1.0, 1.0]]
    """

    name = "router + v1ᵀ"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Every router."""
        for part, _ in _mixtures(model):
            yield Site(model, {ROUTER: part.names[ROUTER]})

    def size(self, site: Site) -> Size:
        """One number for each coordinate of the stream."""
        return Size(site.model.width)

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Tensor:
        """A random shift."""
        return noise((site.model.width,), weights[ROUTER], how)

    def act(self, site: Site, weights: Tensors, g: Tensor) -> Weights:
        """Adds the shift to every column."""
        return {ROUTER: weights[ROUTER] + g.to(weights[ROUTER]).unsqueeze(-1)}

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Tensor:
        """Difference of the means over experts."""
        return (b[ROUTER] - a[ROUTER]).mean(1)


def _mixtures(model: Transformer) -> Iterator[tuple[Part, Mlp]]:
    for part in block_parts(model):
        if part.block.mlp.experts:
            yield part, part.block.mlp
