"""Which tensors has a network, and what acts on each of their axes? A line per kind of tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from transformer_nfn.checkpoints.symmetries.neurons import neuron_scales
from transformer_nfn.functional.description import (
    KEPT,
    Attention,
    Transformer,
    axes_of,
)
from transformer_nfn.spaces import WeightSpace


@dataclass(frozen=True)
class TensorLine:
    """A kind of tensor.

    Attributes:
        name: canonical, ``{i}`` for the number of a block.
        times: how many of them.
        shape: of the first one.
        axes: what each axis is.
        acts: what acts on each axis; empty where nothing does.
    """

    name: str
    times: int
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    acts: tuple[str, ...]


def family_tensors(about: Transformer) -> tuple[TensorLine, ...]:
    """The tensors of a checkpoint, those of all blocks in one line."""
    found: dict[str, TensorLine] = {}
    for name, shape in about.tensors.items():
        short = re.sub(r"^((?:encoder\.|decoder\.)?)\d+\.", r"\1{i}.", name)
        if short in found:
            old = found[short]
            found[short] = TensorLine(short, old.times + 1, old.shape, old.axes, old.acts)
            continue
        axes = () if name.startswith(KEPT) else axes_of(name)
        acts = _acts(about, name)
        found[short] = TensorLine(short, 1, shape, axes, tuple(acts.get(a, "") for a in axes))
    return tuple(found.values())


def _acts(about: Transformer, name: str) -> Mapping[str, str]:
    stack = next((s for s in about.stacks if s.prefix and name.startswith(s.prefix)), None)
    block = (stack or about.stacks[0]).blocks[0]
    attention = block.attention
    if "cross." in name and block.cross is not None:
        attention = block.cross
    scaled = neuron_scales(block.mlp)
    neurons = "permuted" if scaled is None else f"permuted, {scaled} scale"
    heads = "permuted"
    if attention.position_bias and "cross." not in name:
        heads = "permuted, all blocks alike"
    groups = "permuted"
    if attention.groups < attention.heads:
        heads = "permuted within its group, groups permuted"
    stream = "" if about.stream_group == "none" else about.stream_group
    mlm = "permuted with the stream" if about.tied else "permuted"
    return {
        "D": stream,
        "head": heads,
        "group": groups,
        "d_k": _queries(attention),
        "d_v": f"GL({attention.d_v}) per key/value head",
        "neuron": neurons,
        "mlm": mlm,
    }


def _queries(about: Attention) -> str:
    if about.qk_norm:
        return "signs and quarter turns of pairs"
    plain = about.d_k - about.rotary
    parts = []
    if about.rotary:
        parts.append(f"{about.rotary // 2} complex scales")
    if plain:
        parts.append(f"GL({plain})")
    return f"{' and '.join(parts)} per key head"


def space_tensors(space: WeightSpace) -> tuple[TensorLine, ...]:
    """The tensors of a weight space, one by one."""
    out = []
    for name, spec in space.tensors.items():
        axes = tuple(word.rstrip("*") for word in spec.words())
        acts = []
        for a in axes:
            axis = space.axes[a]
            acts.append("" if axis.kind == "free" else axis.action.describe(axis.size))
        out.append(TensorLine(name, 1, space.shape(name), axes, tuple(acts)))
    return tuple(out)


def axis_actions(lines: Iterable[TensorLine]) -> dict[str, tuple[str, ...]]:
    """What acts on each axis, over all tensors that have it."""
    found: dict[str, dict[str, None]] = {}
    for line in lines:
        for name, acts in zip(line.axes, line.acts, strict=True):
            found.setdefault(name, {}).update({acts: None} if acts else {})
    return {name: tuple(acts) for name, acts in found.items()}
