"""When are two networks one function? Comparison, canonical forms, fingerprints, witnesses."""

from transformer_nfn.spaces import Element, Group, fold, product, products
from transformer_nfn.symmetry.canonical import canonical_form
from transformer_nfn.symmetry.comparison import Comparison, compare
from transformer_nfn.symmetry.enlarged import EnlargedElement, random_enlarged
from transformer_nfn.symmetry.fingerprints import fingerprint
from transformer_nfn.symmetry.layer_norm import random_commuting
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
