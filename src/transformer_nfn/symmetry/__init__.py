"""The group and its action; when two networks are one function; canonical forms, fingerprints."""

from transformer_nfn.symmetry.canonical import canonical_form
from transformer_nfn.symmetry.compare import Comparison, compare
from transformer_nfn.symmetry.element import Element
from transformer_nfn.symmetry.enlarged import EnlargedElement, random_enlarged
from transformer_nfn.symmetry.fingerprint import fingerprint
from transformer_nfn.symmetry.group import Group
from transformer_nfn.symmetry.invariants import fold, product, products
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
