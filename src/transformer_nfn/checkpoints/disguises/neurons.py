"""What may be done to the neurons of an MLP? Permute them, and scale them where φ allows it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from transformer_nfn.functional.description import Mlp

Weights = dict[str, Tensor]


def permute_neurons(weights: Mapping[str, Tensor], order: Tensor) -> Weights:
    """Neurons in a new order: ``order [f]`` says which old one each new one is."""
    out = {n: weights[n][..., order] for n in ("W_A", "b_A", "W_G") if n in weights}
    return out | {"W_B": weights["W_B"][order]}


def scale_neurons(weights: Mapping[str, Tensor], scales: Tensor) -> Weights:
    """What enters ``W_A`` times ``scales [f]``, undone in ``W_B``.

    For a gated MLP ``W_A`` is the linear branch, so any nonzero scale will do; without a gate it
    stands before the activation, and ReLU lets positive ones through.
    """
    scales = scales.to(weights["W_A"])
    out = {n: weights[n] * scales for n in ("W_A", "b_A") if n in weights}
    return out | {"W_B": weights["W_B"] / scales.unsqueeze(-1)}


def scaling(about: Mlp) -> str | None:
    """Which scales a neuron takes: "nonzero", "positive", or None."""
    if about.gated:
        return "nonzero"
    return "positive" if about.activation == "relu" else None
