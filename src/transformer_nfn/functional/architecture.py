"""Architectures: a weight space, the function its weights compute, and their names in files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError
from transformer_nfn.io.layout import Naming
from transformer_nfn.spaces import Axis, Shift, Weights, WeightSpace

Generator = torch.Generator | None
Forward = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""From weights ``[*lead, *axes]`` and inputs to outputs ``[*lead, …]``."""

LENGTHS = (3, 1, 2, 4, 6, 8)
"""Two attention maps may agree on all inputs of one and two tokens and differ on three."""
SCALES = (1.0, 0.3, 3.0, 0.1, 10.0)


@dataclass(frozen=True)
class Inputs(ABC):
    """Distribution of random inputs of a forward.

    Attributes:
        lengths: tokens, in the order in which they are tried.
        scales: likewise.
    """

    lengths: tuple[int, ...] = LENGTHS
    scales: tuple[float, ...] = SCALES
    continuous: ClassVar[bool]
    """Whether inputs are real numbers, with respect to which there is a gradient."""

    @abstractmethod
    def draw(
        self, samples: int, length: int, *, scale: float = 1.0, generator: Generator = None
    ) -> Tensor:
        """``samples`` inputs of ``length`` tokens, ``[samples, length, …]``."""


@dataclass(frozen=True, kw_only=True)
class Vectors(Inputs):
    """Normal vectors of ``width`` numbers for each token, in float64.

    >>> Vectors(width=3).draw(2, 5).shape
    torch.Size([2, 5, 3])
    """

    width: int
    continuous: ClassVar[bool] = True

    def draw(
        self, samples: int, length: int, *, scale: float = 1.0, generator: Generator = None
    ) -> Tensor:
        """``[samples, length, width]``."""
        shape = (samples, length, self.width)
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Ids(Inputs):
    """Uniform token ids below ``vocabulary``.

    >>> Ids(vocabulary=10).draw(2, 5).shape
    torch.Size([2, 5])
    """

    vocabulary: int
    scales: tuple[float, ...] = (1.0,)
    continuous: ClassVar[bool] = False

    def draw(
        self, samples: int, length: int, *, scale: float = 1.0, generator: Generator = None
    ) -> Tensor:
        """``[samples, length]``, integers; the scale has no effect."""
        return torch.randint(self.vocabulary, (samples, length), generator=generator)


@dataclass(frozen=True)
class Rescaling:
    """A scale for each index of an axis that cancels between tensors, as a gain and its readers do.

    Attributes:
        name: of the axis of size 1 that stands for it.
        of: the perm axis it belongs to: the stream, the neurons.
        plain: tensors that are multiplied, ``g`` and ``b`` of a norm.
        dual: tensors that are divided, the matrices that read the norm.
        positive: whether the number must be positive (ReLU) or just not zero.

    >>> Rescaling("gain", "stream", plain=("g",), dual=("W_C",)).positive
    False
    """

    name: str
    of: str
    plain: tuple[str, ...]
    dual: tuple[str, ...]
    positive: bool = False


def with_freedoms(space: WeightSpace, freedoms: Iterable[Rescaling | Shift]) -> WeightSpace:
    """Enlarge the group of a space: scales, as axes of size 1, and shifts of biases.

    >>> from transformer_nfn.spaces import attention_block
    >>> space = attention_block(6, 2, 3, 3, 8)
    >>> scale = Rescaling("scale", "neuron", ("W_A", "b_A"), ("W_B",), positive=True)
    >>> with_freedoms(space, [scale]).shape("b_A")
    (8, 1)
    """
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


@dataclass(frozen=True)
class Stage:
    """A part of an architecture that is an architecture itself and reads the output of the last.

    Attributes:
        architecture: its name, ``attention_block``.
        prefix: of the names of its tensors, ``0.``.

    >>> Stage("attention_block", "0.").prefix
    '0.'
    """

    architecture: str
    prefix: str = ""


@dataclass(frozen=True, eq=False)
class Architecture:
    """A weight space, a forward that its group leaves unchanged, and a naming.

    Attributes:
        space: of the weights.
        forward: the reference: ``forward(weights, inputs)``. It must take weights without
            leading axes, ``[*axes]``, and be the same for all networks that a group element of
            ``space`` or a freedom joins; `check_invariance` tries that.
        inputs: how inputs are drawn where two networks are run side by side.
        naming: the names and layouts of the tensors in files; their own names by default.
        freedoms: symmetries beside the group of ``space`` that layers cannot use: scales (the
            gain of a norm against its readers) and shifts of biases. `symmetry.compare` and
            `symmetry.fingerprint` take them into account.
        stages: architectures of which this one is a chain.

    >>> from transformer_nfn.spaces import attention_block
    >>> from transformer_nfn.functional import block
    >>> space = attention_block(6, 2, 3, 3, 8)
    >>> architecture = Architecture(space, lambda w, X: block(X, w), Vectors(width=6))
    >>> architecture.check_invariance()
    """

    space: WeightSpace
    forward: Forward
    inputs: Inputs
    naming: Naming = field(default_factory=lambda: Naming({}))
    freedoms: tuple[Rescaling | Shift, ...] = ()
    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        if not self.naming.lines:
            object.__setattr__(self, "naming", Naming.identity(self.space))
        self.naming.check(self.space)

    @cached_property
    def enlarged(self) -> WeightSpace | None:
        """The space of the same tensors with the freedoms as axes of size 1; None without any."""
        return with_freedoms(self.space, self.freedoms) if self.freedoms else None

    @property
    def name(self) -> str:
        """Name of the space."""
        return self.space.name

    def read(self, tensors: Mapping[str, Tensor]) -> Weights:
        """One network out of the tensors of a file, each ``[1, 1, *axes]``, checked.

        Args:
            tensors: by name in the file; may be lazy.
        """
        read = self.naming.read(self.space, tensors)
        weights = {name: w[None, None] for name, w in read.items()}
        self.space.check(weights)
        return weights

    def write(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a file from one network, ``[1, 1, *axes]`` or ``[*axes]``."""
        self.space.check(weights, lead=None, finite=False)
        shapes = self.space.shapes
        if any(weights[name].numel() != torch.Size(n).numel() for name, n in shapes.items()):
            raise SpaceError("a file holds one network, found several")
        return self.naming.write(
            self.space, {name: weights[name].detach().reshape(n) for name, n in shapes.items()}
        )

    def in_enlarged(self, weights: Mapping[str, Tensor]) -> Weights:
        """Weights ``[*lead, *axes]`` as those of the enlarged space (of `space` without one)."""
        return _reshaped(self.space, self.enlarged or self.space, weights)

    def from_enlarged(self, weights: Mapping[str, Tensor]) -> Weights:
        """The inverse of `in_enlarged`."""
        return _reshaped(self.enlarged or self.space, self.space, weights)

    def over_enlarged(self) -> Architecture:
        """This architecture on weights of the enlarged space, which becomes its own."""
        space = self.enlarged or self.space
        return Architecture(
            space, lambda weights, x: self.forward(self.from_enlarged(weights), x), self.inputs
        )

    def disguise(
        self,
        weights: Mapping[str, Tensor],
        generator: torch.Generator | None = None,
        *,
        max_condition: float = 100.0,
    ) -> Weights:
        """Other weights of the same function, by a random element of the largest known group."""
        space = self.enlarged or self.space
        element = space.group.random(generator, max_condition=max_condition)
        return self.from_enlarged(element.act(self.in_enlarged(weights)))

    def check_invariance(self, *, seed: int = 0, tolerance: float = 1e-9) -> None:
        """Raise `AssertionError` unless random group elements leave the forward unchanged.

        Random weights in float64, an element of `space` and one of `enlarged`, inputs of three
        lengths.
        """
        generator = torch.Generator().manual_seed(seed)
        for space in (self.space, *([self.enlarged] if self.enlarged is not None else [])):
            weights = self.space.randn(1, generator=generator, dtype=torch.float64)
            element = space.group.random(generator, max_condition=100.0)
            moved = element.act(weights if space is self.space else self.in_enlarged(weights))
            moved = moved if space is self.space else self.from_enlarged(moved)
            for length in self.inputs.lengths[:3]:
                (x,) = self.inputs.draw(1, length, generator=generator)
                before, after = (
                    self.forward({n: w[0, 0] for n, w in side.items()}, x)
                    for side in (weights, moved)
                )
                error = float((after - before).norm() / before.norm().clamp_min(1e-300))
                if not error <= tolerance:
                    raise AssertionError(
                        f"the group of '{space.name}' changes its function: on {length} tokens "
                        f"the outputs differ by {error:.3g} relative (allowed {tolerance:g})"
                    )

    def __repr__(self) -> str:
        return f"Architecture('{self.name}', {self.space.num_weights} weights)"


def _reshaped(source: WeightSpace, target: WeightSpace, weights: Mapping[str, Tensor]) -> Weights:
    source.check(weights, lead=None, finite=False)
    out = {}
    for name, spec in source.tensors.items():
        w = weights[name]
        out[name] = w.reshape(*w.shape[: w.ndim - len(spec.axes)], *target.shape(name))
    return out
