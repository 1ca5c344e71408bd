"""What does a reference forward take? Sequences of vectors, or of token ids; drawn at random."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

LENGTHS = (3, 1, 2, 4, 6, 8)
"""Two attention maps may agree on all inputs of one and two tokens and differ on three."""
SCALES = (1.0, 0.3, 3.0, 0.1, 10.0)


@dataclass(frozen=True)
class Inputs(ABC):
    """How inputs of a forward are drawn.

    Attributes:
        lengths: tokens, in the order in which they are tried.
        scales: likewise.
    """

    lengths: tuple[int, ...] = LENGTHS
    scales: tuple[float, ...] = SCALES
    continuous: ClassVar[bool]
    """Whether an input can be moved a little, so that a gradient means something."""

    @abstractmethod
    def draw(
        self,
        samples: int,
        length: int,
        *,
        scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """``samples`` inputs of ``length`` tokens, ``[samples, length, …]``."""


@dataclass(frozen=True, kw_only=True)
class Vectors(Inputs):
    """Normal vectors of ``width`` numbers for each token, in float64."""

    width: int
    continuous: ClassVar[bool] = True

    def draw(
        self,
        samples: int,
        length: int,
        *,
        scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """``[samples, length, width]``."""
        shape = (samples, length, self.width)
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Ids(Inputs):
    """Token ids below ``vocabulary``, all equally likely."""

    vocabulary: int
    scales: tuple[float, ...] = (1.0,)
    continuous: ClassVar[bool] = False

    def draw(
        self,
        samples: int,
        length: int,
        *,
        scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """``[samples, length]``, whole numbers; the scale is of no use."""
        return torch.randint(self.vocabulary, (samples, length), generator=generator)
