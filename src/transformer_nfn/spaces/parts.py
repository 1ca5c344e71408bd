"""Parts of a transformer (attention, MLP, norm, linear map) as axes and tensors to compose.

A part names the axes it reads and writes; parts that name the same axis share it. One stream
through embedding, blocks and head is one axis, with one permutation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from transformer_nfn.errors import SpaceError
from transformer_nfn.spaces.axis import Axis, Shift
from transformer_nfn.spaces.space import WeightSpace

Rotary = Literal["neighbours", "halves"]
FORMS = {None: "general", "neighbours": "complex", "halves": "complex_halves"}


@dataclass(frozen=True)
class Part:
    """Some axes and tensors of a space, to be composed with others.

    Attributes:
        axes: the axes of the part itself (those it reads and writes are declared elsewhere).
        tensors: one text per tensor, as in `WeightSpace.build`.
        shifts: biases of the part that may be shifted.

    >>> Part((Axis.perm("neuron", 16),), {"W_A": "feature neuron"}).axes[0].name
    'neuron'
    """

    axes: tuple[Axis, ...] = ()
    tensors: Mapping[str, str] = field(default_factory=dict)
    shifts: tuple[Shift, ...] = ()


def compose(
    name: str,
    *parts: Part,
    architecture: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> WeightSpace:
    """One space from parts, in order; axes of one name must be equal.

    >>> compose(
    ...     "mlp",
    ...     axis_part(Axis.free("input", 4), Axis.free("output", 3)),
    ...     mlp_part("input", "output", d_ff=8),
    ... )
    WeightSpace('mlp', 67 weights)
    """
    axes: dict[str, Axis] = {}
    tensors: dict[str, str] = {}
    shifts: list[Shift] = []
    for part in parts:
        for axis in part.axes:
            if axes.setdefault(axis.name, axis) != axis:
                raise SpaceError(f"two parts of '{name}' disagree about axis '{axis.name}'")
        for tensor, words in part.tensors.items():
            if tensor in tensors:
                raise SpaceError(f"two parts of '{name}' have a tensor '{tensor}'")
            tensors[tensor] = words
        shifts += part.shifts
    return WeightSpace.build(
        name, axes.values(), tensors, shifts=shifts, architecture=architecture, options=options
    )


def axis_part(*axes: Axis) -> Part:
    """Axes that several parts share: the input, the stream, the logits.

    >>> len(axis_part(Axis.free("token", 5), Axis.perm("stream", 8)).axes)
    2
    """
    return Part(axes)


def map_part(weight: str, read: str, write: str, *, bias: str | None = None) -> Part:
    """A linear map ``x W + b``: an embedding, a head.

    >>> map_part("W_E", "token", "stream", bias="b_E").tensors
    {'W_E': 'token stream', 'b_E': 'stream'}
    """
    return Part((), {weight: f"{read} {write}"} | ({bias: write} if bias else {}))


def norm_part(stream: str, gain: str, *, bias: str | None = None) -> Part:
    """The gain (and bias) of a LayerNorm or RMS norm, permuted with the stream.

    >>> norm_part("stream", "g_1").tensors
    {'g_1': 'stream'}
    """
    return Part((), {gain: stream} | ({bias: stream} if bias else {}))


def attention_part(
    read: str,
    write: str,
    *,
    heads: int,
    d_k: int,
    d_v: int,
    queries: int | None = None,
    rotary: Rotary | None = None,
    biases: bool = False,
    prefix: str = "",
) -> Part:
    """Attention from the axis ``read`` to the axis ``write``.

    Args:
        read: the axis that W_Q, W_K and W_V read.
        write: the axis that W_O writes.
        heads: number of heads; with ``queries``, of key/value groups.
        queries: queries that share one key/value group; None for one each.
        rotary: how rotary positions pair the entries of Q and K; None for no such positions, so
            that any invertible matrix may act between them.
        biases: whether Q, K, V and O have biases. The value bias may be shifted into the output
            bias; the key bias drops out, except under rotary positions.
        prefix: of the names of tensors and of the part's axes, ``0.``.

    >>> list(attention_part("input", "feature", heads=2, d_k=3, d_v=4).tensors.values())
    ['head input qk', 'head input qk*', 'head input vo', 'head vo* feature']
    """
    owner = f"{prefix}{'head' if queries is None else 'group'}"
    qk, vo = f"{prefix}qk", f"{prefix}vo"
    axes = [
        Axis.perm(owner, heads),
        Axis.linear(qk, d_k, of=owner, form=FORMS[rotary]),
        Axis.linear(vo, d_v, of=owner),
    ]
    each = owner
    if queries is not None:
        axes.insert(1, Axis.perm(f"{prefix}query", queries, of=owner))
        each = f"{owner} {prefix}query"
    tensors = {
        f"{prefix}W_Q": f"{each} {read} {qk}",
        f"{prefix}W_K": f"{owner} {read} {qk}*",
        f"{prefix}W_V": f"{owner} {read} {vo}",
        f"{prefix}W_O": f"{each} {vo}* {write}",
    }
    shifts = []
    if biases:
        tensors |= {
            f"{prefix}b_Q": f"{each} {qk}",
            f"{prefix}b_K": f"{owner} {qk}*",
            f"{prefix}b_V": f"{owner} {vo}",
            f"{prefix}b_O": write,
        }
        if rotary is None:
            shifts.append(Shift(f"{prefix}b_K"))
        shifts.append(Shift(f"{prefix}b_V", through=f"{prefix}W_O", into=f"{prefix}b_O"))
    return Part(tuple(axes), tensors, tuple(shifts))


def mlp_part(
    read: str,
    write: str,
    *,
    d_ff: int,
    gated: bool = False,
    biases: bool = True,
    prefix: str = "",
) -> Part:
    """A hidden layer from ``read`` to ``write``.

    Args:
        gated: ``(φ(x W_G) ∘ x W_U) W_D``, each neuron scaled by any nonzero number between W_U
            and W_D, instead of ``φ(x W_A) W_B``.
        prefix: of the names of tensors and of the part's axes.

    >>> mlp_part("feature", "output", d_ff=8).tensors
    {'W_A': 'feature neuron', 'W_B': 'neuron output', 'b_A': 'neuron', 'b_B': 'output'}
    """
    neuron, gain = f"{prefix}neuron", f"{prefix}gain"
    if not gated:
        tensors = {f"{prefix}W_A": f"{read} {neuron}", f"{prefix}W_B": f"{neuron} {write}"}
        if biases:
            tensors |= {f"{prefix}b_A": neuron, f"{prefix}b_B": write}
        return Part((Axis.perm(neuron, d_ff),), tensors)
    tensors = {
        f"{prefix}W_G": f"{read} {neuron}",
        f"{prefix}W_U": f"{read} {neuron} {gain}",
        f"{prefix}W_D": f"{neuron} {gain}* {write}",
    }
    if biases:
        tensors |= {
            f"{prefix}b_G": neuron,
            f"{prefix}b_U": f"{neuron} {gain}",
            f"{prefix}b_D": write,
        }
    return Part((Axis.perm(neuron, d_ff), Axis.scale(gain, 1, of=neuron)), tensors)
