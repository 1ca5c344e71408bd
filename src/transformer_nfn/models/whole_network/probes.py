"""Learned inputs: what would a network answer to them? No symmetry can change that.

Pixels of their own would be fitted one by one to the few networks there are; a product of three
matrices makes probes that share what they consist of, and learns smoother ones. Images have an end
of the scale: pixels lie between black and white, and most of an image is background. Held to that,
probes that networks agree on look like what the networks were trained on, and say more of them.
Groups share nothing: probes of two groups are less alike than as many of one, and say more.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from transformer_nfn.errors import SpaceError

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
        rank: of the matrix of the probes of a group.
        bounded: whether numbers lie between -1 and 1, as those of images do.
        groups: into which the probes fall, one after another.
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
        groups: int = 1,
    ) -> None:
        super().__init__()
        if groups < 1 or count % groups:
            raise SpaceError(f"{count} probes do not fall into {groups} groups of one size")
        self.tokens, self.width, self.bounded = tokens, width, bounded
        self.groups, size = groups, tokens * width
        self.codes = nn.Parameter(torch.randn(count, rank))
        self.mix = nn.Parameter(torch.randn(groups * rank, rank) / rank**0.5)
        self.pieces = nn.Parameter(torch.randn(groups * rank, size) * (START / rank**0.5))
        self.base = nn.Parameter(torch.full((groups * size,), DARK if bounded else 0.0))
        self.register_buffer("labels", torch.arange(count) % classes, persistent=False)

    def forward(self) -> Tensor:
        """The probes, ``[count, tokens, width]``."""
        codes, mix, pieces, base = (
            stacked.unflatten(0, (self.groups, -1))
            for stacked in (self.codes, self.mix, self.pieces, self.base)
        )
        flat: Tensor = codes @ mix @ pieces + base[:, None]
        return (flat.tanh() if self.bounded else flat).reshape(-1, self.tokens, self.width)
