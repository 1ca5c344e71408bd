"""Relation of two checkpoints: one model in disguise, related, or unrelated."""

from transformer_nfn.checkpoints.relations.relation import relate
from transformer_nfn.checkpoints.relations.result import Relation, draw_relation
from transformer_nfn.checkpoints.relations.verdicts import Verdict

__all__ = ["Relation", "Verdict", "draw_relation", "relate"]
