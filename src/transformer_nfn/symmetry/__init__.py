"""When are two networks one function? Comparison, canonical forms, fingerprints, witnesses."""

from transformer_nfn.spaces import Element, Group, fold, product, products
from transformer_nfn.symmetry.alignment import Aligned, align
from transformer_nfn.symmetry.canonical import canonical_form
from transformer_nfn.symmetry.comparison import Comparison, compare
from transformer_nfn.symmetry.enlarged import EnlargedElement, random_enlarged
from transformer_nfn.symmetry.fingerprints import fingerprint
from transformer_nfn.symmetry.inspection import Inspection, inspect
from transformer_nfn.symmetry.layer_norm import random_commuting
from transformer_nfn.symmetry.relations import Relation, relate
from transformer_nfn.symmetry.witness import Witness

__all__ = [
    "Aligned",
    "Comparison",
    "Element",
    "EnlargedElement",
    "Group",
    "Inspection",
    "Relation",
    "Witness",
    "align",
    "canonical_form",
    "compare",
    "fingerprint",
    "fold",
    "inspect",
    "product",
    "products",
    "random_commuting",
    "random_enlarged",
    "relate",
]
