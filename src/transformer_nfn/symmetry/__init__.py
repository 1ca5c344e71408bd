"""The group and its action; when two networks are one function; canonical forms, fingerprints."""

from transformer_nfn.symmetry.element import Element
from transformer_nfn.symmetry.group import Group
from transformer_nfn.symmetry.invariants import fold, product, products

__all__ = ["Element", "Group", "fold", "product", "products"]
