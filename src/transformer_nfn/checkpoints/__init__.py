"""Checkpoints of transformers: inspect one, compare two, align, disguise, fingerprint."""

from transformer_nfn.checkpoints.alignment import Aligned, align
from transformer_nfn.checkpoints.differences import Difference, diff
from transformer_nfn.checkpoints.disguises import Disguise, disguise
from transformer_nfn.checkpoints.families import Model, OpenOptions, open_model
from transformer_nfn.checkpoints.inspection import Inspection, inspect
from transformer_nfn.checkpoints.relations import Relation, relate

__all__ = [
    "Aligned",
    "Difference",
    "Disguise",
    "Inspection",
    "Model",
    "OpenOptions",
    "Relation",
    "align",
    "diff",
    "disguise",
    "inspect",
    "open_model",
    "relate",
]
