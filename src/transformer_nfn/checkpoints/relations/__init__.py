"""How are two real checkpoints related? Scores that survive every disguise, and what they say."""

from transformer_nfn.checkpoints.relations.figure import draw_relation
from transformer_nfn.checkpoints.relations.relation import Relation, relate
from transformer_nfn.checkpoints.relations.words import as_json, describe
from transformer_nfn.checkpoints.scores.scores import Part, block_score
from transformer_nfn.checkpoints.scores.verdict import NO_DIRECTION, Verdict

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
