"""Vectors moved between embeddings, and the norms at the ends of a network."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from transformer_nfn.checkpoints.disguises import norms
from transformer_nfn.functional.description import EXTRA, Transformer

Weights = dict[str, Tensor]
MLM = norms.Reading("extra.mlm_norm", ("head",))
EMBEDDINGS = ("token", "position", "type", "patch", "patch_bias", "cls", "dist")


def last_reading(about: Transformer) -> norms.Reading | None:
    """The last norm and what reads it; None where its output is the network's."""
    if about.headless:
        return None
    extras = tuple(name for name in about.tensors if name.startswith(EXTRA) and name.endswith(".W"))
    return norms.Reading("norm", extras if about.mlm is not None else ("head", *extras))


def move_to_positions(weights: Mapping[str, Tensor], vectors: Mapping[str, Tensor]) -> Weights:
    """A vector ``[D]`` from all rows of other embeddings to all rows of ``position``."""
    out = {name: weights[name] - v.to(weights[name]) for name, v in vectors.items()}
    total = torch.stack(list(vectors.values())).sum(0)
    return out | {"position": weights["position"] + total.to(weights["position"])}


def move_patches(weights: Mapping[str, Tensor], vectors: Tensor) -> Weights:
    """[CLS] (and the distillation token) and the patches' bias against their positions.

    Args:
        weights: of the ends.
        vectors: ``[2, D]``, for the first tokens and for patches.
    """
    vectors = vectors.to(weights["position"])
    first = [name for name in ("cls", "dist") if name in weights]
    position = weights["position"].clone()
    position[: len(first)] += vectors[0]
    position[len(first) :] += vectors[1]
    out = {name: weights[name] - vectors[0] for name in first}
    if "patch_bias" not in weights:
        position[len(first) :] -= vectors[1]
        return out | {"position": position}
    return out | {"position": position, "patch_bias": weights["patch_bias"] - vectors[1]}
