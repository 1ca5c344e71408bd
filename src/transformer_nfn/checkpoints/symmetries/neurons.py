"""Symmetries of the neurons of an MLP: their order, and their scale where φ allows one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from transformer_nfn.checkpoints.symmetries.base import (
    Noise,
    Site,
    Symmetry,
    Tensors,
    Weights,
    block_parts,
    random_scales,
)
from transformer_nfn.functional.description import Mlp, Transformer
from transformer_nfn.spaces.actions import Drawing, Permutation, PositiveScale, Scale, Size
from transformer_nfn.spaces.actions.permutation import assign
from transformer_nfn.spaces.actions.solvers import least_squares_scales, nearest_scales

Scales = Literal["nonzero", "positive"]


def neuron_scales(mlp: Mlp) -> Scales | None:
    """Scales that a neuron takes.

    The linear branch of a gated MLP takes any that is not zero; without a gate a scale stands
    before the activation, and ReLU lets positive ones through.
    """
    if mlp.gated:
        return "nonzero"
    return "positive" if mlp.activation == "relu" else None


def mlp_sites(model: Transformer) -> Iterator[Site]:
    """Every MLP, that of a classifier too; the scales that its neurons take are the detail."""
    names = ("W_A", "W_A.B", "b_A", "W_G", "W_B")
    for part in block_parts(model):
        for prefix in part.block.mlp.prefixes:
            inner = {n: part.names[prefix + n] for n in names if prefix + n in part.names}
            yield Site(model, inner, neuron_scales(part.block.mlp))
    if model.classifier is not None:
        inner = {n: f"classifier.{n}" for n in ("W_A", "b_A", "W_B")}
        yield Site(model, inner, neuron_scales(model.classifier))


class NeuronPermutation(Symmetry[Tensor]):
    """Neurons in another order; an element says which old one each new one is, ``[f]``.

    Example:
        >>> site = Site(Transformer("mine", 2, "rms", 1e-6, ()), {})
        >>> weights = {"W_A": torch.eye(2), "W_B": torch.tensor([[1.0], [2.0]])}
        >>> NeuronPermutation().act(site, weights, torch.tensor([1, 0]))["W_B"].tolist()
        [[2.0], [1.0]]
    """

    name = "neurons permuted"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Every MLP, and BERT's transform before its output matrix if no tie fixes its order."""
        yield from mlp_sites(model)
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

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Tensor:
        """A random order."""
        return torch.randperm(site.shape("W_B")[0], generator=how.generator)

    def act(self, site: Site, weights: Tensors, g: Tensor) -> Weights:
        """Reorders every axis of neurons."""
        return {n: w[g] if n == "W_B" else w[..., g] for n, w in weights.items()}

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Tensor:
        """An assignment on what neurons read and write, whatever their scales."""
        return assign(self.similarity(site, a, b))

    def similarity(
        self, site: Site, a: Tensors, b: Tensors, *, outputs_known: bool = True
    ) -> Tensor:
        """Products of neuron i of ``b`` and neuron j of ``a``, ``[f, f]``.

        ``outputs_known`` is False where the outputs are not yet in one basis.
        """
        (read_A, write_A), (read_B, write_B) = (self._features(site, w) for w in (a, b))
        alike = read_B @ read_A.mT
        if outputs_known:
            alike = alike + write_B @ write_A.mT
        if site.detail == "nonzero":
            alike = alike.abs()
        if "W_G" in site.names:
            alike = alike + b["W_G"].to(alike).mT @ a["W_G"].to(alike)
        return alike

    def _features(self, site: Site, weights: Tensors) -> tuple[Tensor, Tensor]:
        """Input and output weights of each neuron; of one size where its scale is free."""
        read = weights["W_A"].mT
        if "b_A" in weights:
            read = torch.cat([read, weights["b_A"].unsqueeze(-1)], 1)
        if "norm.g" in site.names:  # the output matrix is long, and adds nothing
            return read, read[:, :0]
        write = weights["W_B"]
        if site.detail is None:
            return read, write
        sizes = [x.norm(dim=1, keepdim=True).clamp_min(1e-30) for x in (read, write)]
        even = (sizes[0] * sizes[1]).sqrt()
        return read * (even / sizes[0]), write * (even / sizes[1])


class NeuronScale(Symmetry[Tensor]):
    """``W_A → W_A diag(s)``, ``s [f]``, undone in ``W_B``.

    Example:
        >>> site = Site(Transformer("mine", 2, "rms", 1e-6, ()), {}, "positive")
        >>> weights = {"W_A": torch.eye(2), "W_B": torch.ones(2, 1)}
        >>> NeuronScale().act(site, weights, torch.tensor([2.0, 4.0]))["W_B"].tolist()
        [[0.5], [0.25]]
    """

    name = "neurons scaled"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """MLPs whose neurons take any scale."""
        for site in mlp_sites(model):
            if site.detail is not None:
                yield replace(site, names={n: c for n, c in site.names.items() if n != "W_G"})

    def size(self, site: Site) -> Size:
        """A scale for each neuron, and its sign if that is free."""
        action = PositiveScale() if site.detail == "positive" else Scale()
        return action.size(site.shape("W_B")[0])

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Tensor:
        """Scales over a factor of ``how.condition``."""
        return random_scales(site.shape("W_B")[0], how, positive=site.detail == "positive")

    def act(self, site: Site, weights: Tensors, g: Tensor) -> Weights:
        """Multiplies ``W_A`` and ``b_A``, divides ``W_B``."""
        g = g.to(weights["W_A"])
        return {n: w / g.unsqueeze(-1) if n == "W_B" else w * g for n, w in weights.items()}

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Tensor:
        """A scale for each neuron; ``noise`` has ``W_A`` and ``W_B``, ``[f]``."""
        plain, dual = (self._read(a), self._read(b)), (a["W_B"].mT, b["W_B"].mT)
        positive = site.detail == "positive"
        if noise is None:
            return nearest_scales(plain, dual, positive=positive)
        weights = (1 / noise["W_A"].clamp_min(1e-300), 1 / noise["W_B"].clamp_min(1e-300))
        s = least_squares_scales(plain, dual, weights)
        return s.clamp_min(0) if positive else s

    def _read(self, weights: Tensors) -> Tensor:
        rows = [weights["W_A"]] + ([weights["b_A"].unsqueeze(0)] if "b_A" in weights else [])
        return torch.cat(rows) if len(rows) > 1 else rows[0]
