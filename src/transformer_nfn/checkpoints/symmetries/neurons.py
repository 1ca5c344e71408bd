"""Symmetries of the neurons of an MLP: their order, and their scale where φ allows one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from transformer_nfn.checkpoints.symmetries.base import (
    Site,
    Symmetry,
    Weights,
    block_parts,
    chosen,
    random_scales,
)
from transformer_nfn.functional.description import Mlp, Transformer
from transformer_nfn.spaces.actions import Drawing, Permutation, Size
from transformer_nfn.spaces.actions.base import LOG10_2

Scales = Literal["nonzero", "positive"]


def neuron_scales(mlp: Mlp) -> Scales | None:
    """Which scales a neuron takes.

    The linear branch of a gated MLP takes any that is not zero; without a gate a scale stands
    before the activation, and ReLU lets positive ones through.
    """
    if mlp.gated:
        return "nonzero"
    return "positive" if mlp.activation == "relu" else None


class NeuronPermutation(Symmetry[Tensor]):
    """Neurons in another order; an element says which old one each new one is, ``[f]``."""

    name = "neurons permuted"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Every MLP, and BERT's transform before its output matrix if no tie fixes its order."""
        for part in block_parts(model):
            yield Site(model, chosen(part.names, ("W_A", "b_A", "W_G", "W_B")))
        if model.mlm is not None and not model.tied and "head" in model.tensors:
            yield Site(
                model,
                {
                    "W_A": "extra.mlm.W",
                    "b_A": "extra.mlm.b",
                    "norm.g": "extra.mlm_norm.g",
                    "norm.b": "extra.mlm_norm.b",
                    "W_B": "head",
                },
            )

    def size(self, site: Site) -> Size:
        """f! orders."""
        return Permutation().size(site.shape("W_B")[0])

    def draw(self, site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Tensor:
        """A random order."""
        return torch.randperm(site.shape("W_B")[0], generator=how.generator)

    def act(self, site: Site, weights: Mapping[str, Tensor], g: Tensor) -> Weights:
        """Reorders every axis of neurons."""
        return {n: w[g] if n == "W_B" else w[..., g] for n, w in weights.items()}


class NeuronScale(Symmetry[Tensor]):
    """What enters ``W_A`` times ``s [f]``, undone in ``W_B``."""

    name = "neurons scaled"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """MLPs whose neurons take any scale."""
        for part in block_parts(model):
            assert part.block is not None
            scales = neuron_scales(part.block.mlp)
            if scales is not None:
                yield Site(model, chosen(part.names, ("W_A", "b_A", "W_B")), scales)

    def size(self, site: Site) -> Size:
        """A scale for each neuron, and its sign if that is free."""
        neurons = site.shape("W_B")[0]
        return Size(neurons, neurons * LOG10_2 if site.detail == "nonzero" else 0.0)

    def draw(self, site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Tensor:
        """Scales over a factor of ``how.condition``."""
        return random_scales(site.shape("W_B")[0], how, positive=site.detail == "positive")

    def act(self, site: Site, weights: Mapping[str, Tensor], g: Tensor) -> Weights:
        """Multiplies ``W_A`` and ``b_A``."""
        g = g.to(weights["W_A"])
        out = {n: weights[n] * g for n in ("W_A", "b_A") if n in weights}
        return out | {"W_B": weights["W_B"] / g.unsqueeze(-1)}


