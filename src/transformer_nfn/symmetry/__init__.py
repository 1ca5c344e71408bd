"""Networks up to symmetry: comparison, canonical form, fingerprint, witness."""

from transformer_nfn.spaces import Element, Group, fold, product, products
from transformer_nfn.symmetry.comparison import Comparison, compare
from transformer_nfn.symmetry.enlarged import (
    EnlargedElement,
    random_commuting,
    random_enlarged,
)
from transformer_nfn.symmetry.representatives import canonical_form, fingerprint
from transformer_nfn.symmetry.witness import Witness

__all__ = [
    "Comparison",
    "Element",
    "EnlargedElement",
    "Group",
    "Witness",
    "canonical_form",
    "compare",
    "fingerprint",
    "fold",
    "product",
    "products",
    "random_commuting",
    "random_enlarged",
]
