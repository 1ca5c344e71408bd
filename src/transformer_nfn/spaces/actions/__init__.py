"""What can act on an axis: one class for each symmetry, and the words that name them in files."""

from collections.abc import Mapping

from transformer_nfn.spaces.actions.base import (
    MAX_CONDITION,
    Action,
    Drawing,
    Pieces,
    Place,
    Pointwise,
    Solution,
)
from transformer_nfn.spaces.actions.complex_scale import ComplexScale
from transformer_nfn.spaces.actions.free import Free
from transformer_nfn.spaces.actions.linear import Linear
from transformer_nfn.spaces.actions.matrix import MatrixAction
from transformer_nfn.spaces.actions.orthogonal import Orthogonal
from transformer_nfn.spaces.actions.permutation import Permutation
from transformer_nfn.spaces.actions.scales import PositiveScale, Scale, Sign

ACTIONS: Mapping[tuple[str, str], Action] = {
    ("free", "general"): Free(),
    ("perm", "general"): Permutation(),
    ("linear", "general"): Linear(),
    ("linear", "complex"): ComplexScale("neighbours"),
    ("linear", "complex_halves"): ComplexScale("halves"),
    ("scale", "general"): Scale(),
    ("positive", "general"): PositiveScale(),
    ("sign", "general"): Sign(),
    ("orthogonal", "general"): Orthogonal(),
}
"""Every action by its kind and form, the words that stand in the JSON of a space."""

__all__ = [
    "ACTIONS",
    "MAX_CONDITION",
    "Action",
    "ComplexScale",
    "Drawing",
    "Free",
    "Linear",
    "MatrixAction",
    "Orthogonal",
    "Permutation",
    "Pieces",
    "Place",
    "Pointwise",
    "PositiveScale",
    "Scale",
    "Sign",
    "Solution",
]
