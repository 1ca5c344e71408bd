"""Proof that two real checkpoints are one function, or that they are not."""

from transformer_nfn.checkpoints.proof.attention import AttentionElement
from transformer_nfn.checkpoints.proof.blocks import BlockElement
from transformer_nfn.checkpoints.proof.checks import Check, Tolerance
from transformer_nfn.checkpoints.proof.proof import ModelElement, Proof, find_element, prove_pair
from transformer_nfn.checkpoints.proof.witness import TokenWitness, find_witness

__all__ = [
    "AttentionElement",
    "BlockElement",
    "Check",
    "ModelElement",
    "Proof",
    "TokenWitness",
    "Tolerance",
    "find_element",
    "find_witness",
    "prove_pair",
]
