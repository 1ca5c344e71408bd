"""Learned inputs: what would a network answer to them? No symmetry can change that.

Pixels of their own would be fitted one by one to the few networks there are; a product of three
matrices makes probes that share what they consist of, and learns smoother ones. Images have an end
of the scale: pixels lie between black and white, and most of an image is background. Held to that,
probes that networks agree on look like what the networks were trained on, and say more of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LONGEST = 49
"""Tokens of an input nobody wrote at most: as many as an image of the paper has."""
START = 0.5
"""Size of the numbers in a probe before any training."""
DARK = -1.5
"""Where bounded probes start, before they are bounded: nearly black."""


class Probes(nn.Module):
    """``count`` sequences of ``tokens`` vectors, each with a label of its own.

    Args:
        count: how many.
        tokens: of each.
        width: of a token: pixels of a patch, or of a word vector.
        classes: labels are dealt out in turn, 0, 1, …, 0, 1, ….
        rank: of the matrix of all probes.
        bounded: whether numbers lie between -1 and 1, as those of images do.
    """

    labels: Tensor

    def __init__(
        self,
        count: int,
        tokens: int,
        width: int,
        classes: int,
        rank: int,
        *,
        bounded: bool = False,
    ) -> None:
        super().__init__()
        self.tokens, self.width, self.bounded = tokens, width, bounded
        self.codes = nn.Parameter(torch.randn(count, rank))
        self.mix = nn.Parameter(torch.randn(rank, rank) / rank**0.5)
        self.pieces = nn.Parameter(torch.randn(rank, tokens * width) * (START / rank**0.5))
        self.base = nn.Parameter(torch.full((tokens * width,), DARK if bounded else 0.0))
        self.register_buffer("labels", torch.arange(count) % classes, persistent=False)

    def forward(self) -> Tensor:
        """The probes, ``[count, tokens, width]``."""
        flat: Tensor = self.codes @ self.mix @ self.pieces + self.base
        return (flat.tanh() if self.bounded else flat).view(-1, self.tokens, self.width)
