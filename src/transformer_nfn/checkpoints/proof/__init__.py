"""Proof that two real checkpoints are one function, or that they are not."""

from transformer_nfn.checkpoints.proof.proof import Proof, prove_pair

__all__ = ["Proof", "prove_pair"]
