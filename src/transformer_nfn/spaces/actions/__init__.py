"""Actions on an axis: one class per symmetry, and their names in files."""

from collections.abc import Mapping

from transformer_nfn.spaces.actions.base import (
    MAX_CONDITION,
    Action,
    Drawing,
    Free,
    Pieces,
    Place,
    Pointwise,
    Size,
    Solution,
)
from transformer_nfn.spaces.actions.matrix import Linear, MatrixAction, Orthogonal
from transformer_nfn.spaces.actions.permutation import Matching, Permutation, match_rows
from transformer_nfn.spaces.actions.scales import ComplexScale, PositiveScale, Scale, Sign

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
"""Every action by kind and form, as in the JSON of a space."""

__all__ = [
    "ACTIONS",
    "MAX_CONDITION",
    "Action",
    "ComplexScale",
    "Drawing",
    "Free",
    "Linear",
    "Matching",
    "MatrixAction",
    "Orthogonal",
    "Permutation",
    "Pieces",
    "Place",
    "Pointwise",
    "PositiveScale",
    "Scale",
    "Sign",
    "Size",
    "Solution",
    "match_rows",
]
