"""Which element takes one block to another, and does it hold on every tensor of them?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from transformer_nfn.checkpoints.proof.attention import AttentionElement, match_attention
from transformer_nfn.checkpoints.proof.checks import Check
from transformer_nfn.checkpoints.proof.match import BlockMatch
from transformer_nfn.checkpoints.proof.neurons import match_neurons
from transformer_nfn.checkpoints.reduced import ReducedBlock
from transformer_nfn.checkpoints.sketches import BlockSketch
from transformer_nfn.checkpoints.stream import StreamMap


@dataclass(frozen=True)
class BlockElement:
    """What takes one block to another.

    Attributes:
        attentions: by the prefix of their tensors.
        neurons: which neuron of A each of B is, ``[f]``.
        scales: of what neurons read against what they write, ``[f]``; None where none acts.
    """

    attentions: Mapping[str, AttentionElement]
    neurons: Tensor
    scales: Tensor | None


def match_block(
    a: ReducedBlock,
    b: ReducedBlock,
    stream: StreamMap,
    sketches: tuple[BlockSketch, BlockSketch],
    order: Tensor | None,
) -> tuple[BlockElement, list[Check]]:
    """The element that takes block ``a`` to ``b``, and every tensor checked under it.

    Args:
        a: a block of one model.
        b: of the other, of the same description.
        stream: takes the first stream to the second.
        sketches: of both in one basis, to match heads and neurons by.
        order: of heads, where blocks share a position bias and so their order.
    """
    match = BlockMatch(a, b, stream)
    attentions = {}
    for prefix, about in a.attentions():
        fixed = None if prefix else order
        heads = (sketches[0].heads[prefix], sketches[1].heads[prefix])
        attentions[prefix] = match_attention(match, prefix, about, heads, fixed)
        match.vector(f"{prefix}b_O", a.output_bias(prefix), b.output_bias(prefix))
    neurons, scales = match_neurons(match, sketches)
    match.vector("b_B", a.mlp_bias(), b.mlp_bias())
    theirs = b.norms()
    for name, piece in a.norms().items():
        match.vector(name, piece, theirs.get(name), gain=True)
    return BlockElement(attentions, neurons, scales), match.checks
