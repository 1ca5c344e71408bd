"""Reduced form of a transformer: everything that its norms allow is folded away.

The reduced form has as few symmetries as can be had without choosing a basis:

- gains and biases of a norm go into what reads through it, `W ← diag(γ) W`, `b ← b + β W`;
- LayerNorm removes a vector's mean before anything reads it, so the all-ones direction is
  projected out of readers and writers: a pre-norm LayerNorm network is an RMS-norm network on
  D − 1 dimensions;
- a value bias goes through `W_O` into the output bias, a key bias that softmax cannot see is
  dropped, the scale of the scores goes into the queries;
- [CLS], patch bias and the mean of token types go into the positions or tokens they are added to;
- a tied output matrix is read as an untied one, the tie stays a fact of the description;
- post-norm networks keep their gains, since the residual carries them; readers still have them
  folded in, and a norm's bias goes into the next constant that is added to the stream;
- where the final stream is the output, an output matrix of ones says that nothing may move it.

Everything is read tensor by tensor and never multiplied out: the largest thing in memory is one
matrix of one block. Each piece knows how much the rounding of the file is expected to have moved
it. Proofs are computed in float64, scores in float32.
"""

from transformer_nfn.checkpoints.reduced.block import ReducedBlock
from transformer_nfn.checkpoints.reduced.pieces import Piece, Table, rounding_rms
from transformer_nfn.checkpoints.reduced.whole import Reduced, reduce_pair

__all__ = ["Piece", "Reduced", "ReducedBlock", "Table", "reduce_pair", "rounding_rms"]
