"""Relation of two checkpoints: one model in disguise, related, or unrelated."""

from transformer_nfn.checkpoints.relations.relation import relate
from transformer_nfn.checkpoints.relations.result import Relation, draw_relation

__all__ = ["Relation", "draw_relation", "relate"]
