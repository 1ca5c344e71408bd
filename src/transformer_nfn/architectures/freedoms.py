"""What else does a function not notice? Scales that cancel between tensors, shifts of biases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transformer_nfn.errors import SpaceError
from transformer_nfn.spaces import Axis, Shift, WeightSpace


@dataclass(frozen=True)
class Rescaling:
    """A number for each index of an axis, multiplied into some tensors and out of others.

    Attributes:
        name: of the axis of size 1 that stands for it.
        of: the perm axis it belongs to: the stream, the neurons.
        plain: tensors that are multiplied, ``g`` and ``b`` of a norm.
        dual: tensors that are divided, the matrices that read the norm.
        positive: whether the number must be positive (ReLU) or just not zero.
    """

    name: str
    of: str
    plain: tuple[str, ...]
    dual: tuple[str, ...]
    positive: bool = False


def with_freedoms(space: WeightSpace, freedoms: Iterable[Rescaling | Shift]) -> WeightSpace:
    """The space with a larger group: scales, as axes of size 1, and further shifts of biases."""
    shifts = [freedom for freedom in freedoms if isinstance(freedom, Shift)]
    scales = [freedom for freedom in freedoms if isinstance(freedom, Rescaling)]
    axes = list(space.axes.values())
    words = {name: spec.words() for name, spec in space.tensors.items()}
    for scale in scales:
        make = Axis.positive if scale.positive else Axis.scale
        axes.append(make(scale.name, 1, of=scale.of))
        for names, star in ((scale.plain, ""), (scale.dual, "*")):
            for name in names:
                if name not in words or scale.of not in words[name]:
                    raise SpaceError(
                        f"scale '{scale.name}' acts on '{name}', which must be a tensor of "
                        f"'{space.name}' with the axis '{scale.of}'"
                    )
                words[name].insert(words[name].index(scale.of) + 1, scale.name + star)
    return WeightSpace.build(
        f"{space.name}, enlarged",
        axes,
        {name: " ".join(w) for name, w in words.items()},
        shifts=[*space.shifts, *shifts],
    )
