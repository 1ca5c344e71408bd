"""Where may a pointwise function act?"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from transformer_nfn.spaces import Weights, WeightSpace


class Activation(nn.Module):
    """A pointwise function where it commutes with what acts; the rest passes through.

    In the paper's block that is on W_A, W_B, b_A and b_B, which are only permuted. A function of
    the entries of W_Q would not commute with M. Every action knows which functions commute with
    it: positive scales let ReLU through, signs let odd functions through.

    Args:
        space: of the weights.
        fn: applied entry by entry.
    """

    def __init__(self, space: WeightSpace, fn: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.fn = fn
        self.acts_on = frozenset(
            name
            for name, spec in space.tensors.items()
            if all(space.axes[a].action.commutes_with(fn) for a in spec.axes)
        )

    def forward(self, weights: Mapping[str, Tensor]) -> Weights:
        """The weights with ``fn`` applied where it is equivariant."""
        return {n: self.fn(x) if n in self.acts_on else x for n, x in weights.items()}

    def extra_repr(self) -> str:
        """The tensors it acts on."""
        return ", ".join(sorted(self.acts_on))
