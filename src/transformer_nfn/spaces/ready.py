"""Ready-made spaces of common architectures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformer_nfn.errors import SpaceError
from transformer_nfn.spaces.axis import Axis, Shift
from transformer_nfn.spaces.parts import (
    Part,
    Rotary,
    attention_part,
    axis_part,
    compose,
    map_part,
    mlp_part,
    norm_part,
)
from transformer_nfn.spaces.space import WeightSpace


def multi_head(d_model: int, heads: int, d_k: int, d_v: int) -> WeightSpace:
    """Multi-head attention alone (Theorem 3.2): W_Q, W_K, W_V, W_O.

    >>> multi_head(8, 2, 3, 4)
    WeightSpace('multi_head', 224 weights)
    """
    return compose(
        "multi_head",
        axis_part(Axis.free("input", d_model)),
        attention_part("input", "feature", heads=heads, d_k=d_k, d_v=d_v),
        axis_part(Axis.free("feature", d_model)),
        architecture="multi_head",
    )


def _block(
    name: str,
    d_model: int,
    attention: Part,
    mlp: Part,
    *,
    options: Mapping[str, Any] | None = None,
) -> WeightSpace:
    """Attention from ``input`` to ``feature``, then an MLP from ``feature`` to ``output``."""
    return compose(
        name,
        axis_part(Axis.free("input", d_model)),
        attention,
        axis_part(Axis.perm("feature", d_model)),
        mlp,
        axis_part(Axis.free("output", d_model)),
        architecture=name,
        options=options,
    )


def attention_block(d_model: int, heads: int, d_k: int, d_v: int, d_ff: int) -> WeightSpace:
    """The paper's U (eq. 10): attention, LayerNorm, ReLU MLP, LayerNorm; no residuals.

    >>> space = attention_block(8, 2, 3, 4, 16)
    >>> [axis.name for axis in space.axes.values() if axis.action.permutes]
    ['head', 'feature', 'neuron']
    """
    attention = attention_part("input", "feature", heads=heads, d_k=d_k, d_v=d_v)
    return _block(
        "attention_block", d_model, attention, mlp_part("feature", "output", d_ff=d_ff)
    )


def biased_block(d_model: int, heads: int, d_k: int, d_v: int, d_ff: int) -> WeightSpace:
    """The paper's block with biases on Q, K, V and O.

    b_K drops out of the softmax; b_V may be shifted into b_O through W_O.

    >>> [shift.tensor for shift in biased_block(8, 2, 3, 4, 16).shifts]
    ['b_K', 'b_V']
    """
    attention = attention_part("input", "feature", heads=heads, d_k=d_k, d_v=d_v, biases=True)
    return _block("biased_block", d_model, attention, mlp_part("feature", "output", d_ff=d_ff))


def grouped_query_block(
    d_model: int, groups: int, queries: int, d_k: int, d_v: int, d_ff: int
) -> WeightSpace:
    """Grouped-query attention: ``groups`` key/value heads, each shared by ``queries`` queries.

    The queries of a group permute among themselves and the groups permute as units, the wreath
    product S_queries ≀ S_groups; one M and one N for each group.

    >>> grouped_query_block(8, 2, 3, 4, 4, 16).tensors["W_Q"].axes
    ('group', 'query', 'input', 'qk')
    """
    attention = attention_part(
        "input", "feature", heads=groups, queries=queries, d_k=d_k, d_v=d_v
    )
    mlp = mlp_part("feature", "output", d_ff=d_ff)
    return _block("grouped_query_block", d_model, attention, mlp)


def rope_block(
    d_model: int, heads: int, d_k: int, d_v: int, d_ff: int, *, base: float = 10000.0
) -> WeightSpace:
    """The paper's block with rotary positions on queries and keys.

    M must commute with every rotation: one complex scale for each of the d_k/2 frequencies.

    >>> qk = rope_block(8, 2, 4, 4, 16).axes["qk"]
    >>> qk.action.describe(qk.size)
    '2 complex scales'
    """
    attention = attention_part(
        "input", "feature", heads=heads, d_k=d_k, d_v=d_v, rotary="neighbours"
    )
    mlp = mlp_part("feature", "output", d_ff=d_ff)
    return _block("rope_block", d_model, attention, mlp, options={"base": base})


def swiglu_block(d_model: int, heads: int, d_k: int, d_v: int, d_ff: int) -> WeightSpace:
    """The paper's block with a gated MLP, ``(silu(x W_G) ∘ x W_U) W_D``.

    Each neuron may be scaled by any nonzero number between W_U and W_D: a linear axis of
    size 1, ``gain``, that belongs to ``neuron``.

    >>> [product.name for product in swiglu_block(8, 2, 3, 4, 16).products]
    ['W_Q·W_K', 'W_V·W_O', 'W_U·W_D']
    """
    mlp = {"W_G": "feature neuron", "W_U": "feature neuron gain", "W_D": "neuron gain* output"}
    return compose(
        "swiglu_block",
        axis_part(Axis.free("input", d_model)),
        attention_part("input", "feature", heads=heads, d_k=d_k, d_v=d_v),
        axis_part(Axis.perm("feature", d_model)),
        axis_part(Axis.perm("neuron", d_ff), Axis.free("output", d_model)),
        Part((Axis.linear("gain", 1, of="neuron"),), mlp),
        architecture="swiglu_block",
    )


def _check_blocks(blocks: int) -> None:
    if blocks < 0:
        raise SpaceError(f"a stack has no less than 0 blocks, found {blocks}")


def residual_stack(
    blocks: int,
    d_model: int,
    heads: int,
    d_k: int,
    d_v: int,
    d_ff: int,
    *,
    d_in: int,
    d_out: int,
) -> WeightSpace:
    """A pre-norm residual transformer with embedding and head, LayerNorms with gain and bias.

    One permutation acts on the residual stream; it is shared by all blocks.

    >>> residual_stack(2, 8, 2, 3, 4, 16, d_in=5, d_out=10)
    WeightSpace('residual_stack', 1226 weights)
    """
    shared = Axis.free("token", d_in), Axis.perm("stream", d_model), Axis.free("logit", d_out)
    parts = [axis_part(*shared), map_part("W_E", "token", "stream", bias="b_E")]
    _check_blocks(blocks)
    for i in range(blocks):
        neuron = f"{i}.neuron"
        mlp = {f"{i}.W_A": f"stream {neuron}", f"{i}.b_A": neuron,
               f"{i}.W_B": f"{neuron} stream", f"{i}.b_B": "stream"}  # fmt: skip
        parts += [
            norm_part("stream", f"{i}.g_1", bias=f"{i}.b_1"),
            attention_part("stream", "stream", heads=heads, d_k=d_k, d_v=d_v, prefix=f"{i}."),
            norm_part("stream", f"{i}.g_2", bias=f"{i}.b_2"),
            Part((Axis.perm(neuron, d_ff),), mlp),
        ]
    parts += [
        norm_part("stream", "g", bias="b"), map_part("W_C", "stream", "logit", bias="b_C")
    ]  # fmt: skip
    return compose(
        "residual_stack", *parts, architecture="residual_stack", options={"blocks": blocks}
    )


def decoder_stack(
    blocks: int,
    d_model: int,
    groups: int,
    queries: int,
    d_k: int,
    d_v: int,
    d_ff: int,
    *,
    d_in: int,
    d_out: int,
    biases: bool = True,
    rotary: Rotary = "halves",
    base: float = 10000.0,
) -> WeightSpace:
    """A current decoder, composed of parts around one residual stream.

    RMS norms with gains, grouped queries with rotary positions, gated MLPs, biases. One
    permutation acts on the stream.

    Args:
        groups: key/value heads, each shared by ``queries`` queries.
        queries: see ``groups``.
        d_k: width of queries and keys, even.
        rotary: how entries are paired, ``halves`` (as in Llama's files) or ``neighbours``.

    >>> decoder_stack(1, 8, 2, 2, 4, 4, 16, d_in=5, d_out=10, biases=False).group.size.continuous
    56
    """
    shared = Axis.free("token", d_in), Axis.perm("stream", d_model), Axis.free("logit", d_out)
    parts = [axis_part(*shared), map_part("W_E", "token", "stream")]
    _check_blocks(blocks)
    for i in range(blocks):
        parts += [
            norm_part("stream", f"{i}.g_1"),
            attention_part(
                "stream",
                "stream",
                heads=groups,
                queries=queries,
                d_k=d_k,
                d_v=d_v,
                rotary=rotary,
                biases=biases,
                prefix=f"{i}.",
            ),
            norm_part("stream", f"{i}.g_2"),
            mlp_part("stream", "stream", d_ff=d_ff, gated=True, biases=biases, prefix=f"{i}."),
        ]
    parts += [norm_part("stream", "g"), map_part("W_C", "stream", "logit")]
    options = {"blocks": blocks, "base": base, "pairing": rotary}
    return compose("decoder_stack", *parts, architecture="decoder_stack", options=options)


def stack(block: WeightSpace, depth: int, *, between: str = "fixed") -> WeightSpace:
    """``depth`` blocks in sequence, tensors named ``0.W_Q``, ``1.W_Q``, …

    Args:
        block: the space of one block, with axes ``input`` and ``output`` of equal size.
        between: ``fixed`` leaves the width axis between two blocks alone, so the group is the
            product of the blocks' groups, as in the paper; ``permuted`` also lets one permutation
            act on each such axis, which leaves the function unchanged too.

    >>> stack(attention_block(8, 2, 3, 4, 16), 2)
    WeightSpace('attention_block×2', 1008 weights)
    """
    if depth < 1:
        raise SpaceError(f"a stack needs at least one block, found depth {depth}")
    if between not in ("fixed", "permuted"):
        raise SpaceError(f"between must be 'fixed' or 'permuted', found {between!r}")
    if {"input", "output"} - set(block.axes):
        raise SpaceError(f"space '{block.name}' has no axes 'input' and 'output' to stack by")
    if block.axes["input"].size != block.axes["output"].size:
        raise SpaceError(f"'{block.name}' changes the width, so it cannot be stacked")
    axes: dict[str, Axis] = {}
    tensors: dict[str, str] = {}
    shifts: list[Shift] = []
    for i in range(depth):
        names = {a: f"{i}.{a}" for a in block.axes}
        names |= {"input": f"stream{i}", "output": f"stream{i + 1}"}
        for axis in block.axes.values():
            inner = {"input": i > 0, "output": i < depth - 1}.get(axis.name, False)
            of = names[axis.of] if axis.of else None
            if inner and between == "permuted":
                axes[names[axis.name]] = Axis.perm(names[axis.name], axis.size, of)
            else:
                axes[names[axis.name]] = replace(axis, name=names[axis.name], of=of)
        for name, spec in block.tensors.items():
            words = [names[w.rstrip("*")] + "*" * w.endswith("*") for w in spec.words()]
            tensors[f"{i}.{name}"] = " ".join(words)
        shifts += [_prefixed(shift, i) for shift in block.shifts]
    options = {"depth": depth, "block": block.architecture, "block_options": dict(block.options)}
    return WeightSpace.build(
        f"{block.name}×{depth}",
        axes.values(),
        tensors,
        shifts=shifts,
        architecture="stack",
        options=options,
    )


def _prefixed(shift: Shift, i: int) -> Shift:
    named = {k: f"{i}.{v}" if v is not None else None for k, v in vars(shift).items()}
    return Shift(**named)  # type: ignore[arg-type]


READY: Mapping[str, str] = {
    "multi_head": "multi-head attention alone",
    "attention_block": "the paper's block",
    "biased_block": "with biases on Q, K, V, O",
    "residual_stack": "pre-norm residual transformer, one stream permutation",
    "grouped_query_block": "grouped-query attention",
    "rope_block": "rotary positions",
    "swiglu_block": "gated MLP",
    "decoder_stack": "RMS norms, grouped queries, rotary positions, gated MLP, one stream",
}
"""Names of the ready-made spaces, with a description each."""
