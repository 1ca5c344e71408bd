"""Which architectures have a normal form, equal for two networks only if they are one function?"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from transformer_nfn.functional import Architecture, stage_weights
from transformer_nfn.spaces import Weights
from transformer_nfn.symmetry.block_function import same_block
from transformer_nfn.symmetry.heads import same_attention

SameForm = Callable[[Weights, Weights, float], bool]


def _same_attention(u: Weights, v: Weights, unit: float) -> bool:
    return same_attention(u, v, unit) is True


NORMAL_FORMS: Mapping[str, SameForm] = {
    "multi_head": _same_attention,
    "attention_block": same_block,
}
"""By the name of the architecture: True proves that two networks are one function."""


def same_normal_form(architecture: Architecture, u: Weights, v: Weights, unit: float) -> bool:
    """True if every stage of two networks has one normal form; False says nothing.

    Args:
        architecture: of both networks.
        u: one network, ``[*axes]`` in float64.
        v: the other.
        unit: relative error allowed in one weight.
    """
    stages = architecture.stages
    if not stages or any(stage.architecture not in NORMAL_FORMS for stage in stages):
        return False
    return all(
        NORMAL_FORMS[stage.architecture](stage_weights(stage, u), stage_weights(stage, v), unit)
        for stage in stages
    )
