"""Which neuron is which? An assignment on what neurons read and write, then their scales."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from transformer_nfn.checkpoints.disguises import neurons
from transformer_nfn.functional.description import Mlp
from transformer_nfn.spaces.actions.permutation import assign
from transformer_nfn.spaces.actions.solvers import nearest_scales

Weights = dict[str, Tensor]


def move_neurons(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], about: Mlp, *, outputs_known: bool = True
) -> Weights:
    """The tensors of MLP ``a``, its neurons in b's order and scales.

    Args:
        a: ``W_A``, ``b_A``, ``W_G``, ``W_B``, the stream in the other's basis.
        b: of the other.
        about: both.
        outputs_known: False where what neurons write is not yet in one basis.
    """
    kind = neurons.scaling(about)
    sides = [_read_and_write(w, gated=about.gated) for w in (a, b)]
    if kind is not None:
        sides = [_balanced(*side) for side in sides]
    (read_A, write_A), (read_B, write_B) = sides
    alike = read_B @ read_A.mT
    if outputs_known:
        alike = alike + write_B @ write_A.mT
    if kind == "nonzero":
        alike = alike.abs()
    if about.gated:
        alike = alike + b["W_G"].to(alike).mT @ a["W_G"].to(alike)
    out = dict(a) | neurons.permute_neurons(a, assign(alike))
    if kind is None:
        return out
    (read_A, write_A), (read_B, write_B) = (_read_and_write(w, gated=about.gated) for w in (out, b))
    if not outputs_known:
        read_A, write_A = read_A, torch.zeros_like(write_A)
        size = read_B.norm(dim=1) / read_A.norm(dim=1).clamp_min(1e-30)
        return out | neurons.scale_neurons(out, torch.where(size > 0, size, 1.0))
    plain, dual = (read_A.mT, read_B.mT), (write_A.mT, write_B.mT)
    scales = nearest_scales(plain, dual, positive=kind == "positive")
    return out | neurons.scale_neurons(out, scales)


def _read_and_write(w: Mapping[str, Tensor], *, gated: bool) -> tuple[Tensor, Tensor]:
    """What a scale acts on: ``[f, n]`` before it, ``[f, D]`` behind."""
    read = w["W_A"].mT
    if "b_A" in w:
        read = torch.cat([read, w["b_A"].unsqueeze(-1)], 1)
    return read, w["W_B"]


def _balanced(read: Tensor, write: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled so that a neuron's reading and writing are of one size."""
    r, w = (x.norm(dim=1, keepdim=True).clamp_min(1e-30) for x in (read, write))
    size = (r * w).sqrt()
    return read * (size / r), write * (size / w)
