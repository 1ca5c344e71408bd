"""How are two real checkpoints related? Scores that survive every disguise, and what they say."""

from transformer_nfn.symmetry.likeness.scores import Part, block_score
from transformer_nfn.symmetry.likeness.verdict import NO_DIRECTION, Verdict
from transformer_nfn.symmetry.relations.figure import draw_relation
from transformer_nfn.symmetry.relations.relation import Relation, relate
from transformer_nfn.symmetry.relations.words import as_json, describe

__all__ = [
    "NO_DIRECTION",
    "Part",
    "Relation",
    "Verdict",
    "as_json",
    "block_score",
    "describe",
    "draw_relation",
    "relate",
]
