"""What do the two neural baselines share? How they read a network, and how they are rebuilt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from transformer_nfn.errors import SpaceError
from transformer_nfn.models.pretrained import Pretrained
from transformer_nfn.spaces import WeightSpace


class PlainModel(Pretrained):
    """A module with `logits`, and its Sigmoid as `forward`."""

    def logits(self, network: Mapping[str, object]) -> Tensor:
        """The number before the Sigmoid, ``[batch]``."""
        raise NotImplementedError

    def forward(self, network: Mapping[str, object]) -> Tensor:
        """The predicted accuracy of each network, ``[batch]``, between 0 and 1."""
        return torch.sigmoid(self.logits(network))

    @staticmethod
    def read(head: nn.Module, parts: Sequence[Tensor]) -> Tensor:
        """The head on all parts side by side, ``[batch]``."""
        out: Tensor = head(torch.cat(same_batch(parts), -1))
        return out.squeeze(-1)


def relu_mlp(width: int, hidden: int) -> nn.Sequential:
    """Two layers with a ReLU between them."""
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden))


def block_tensors(space: WeightSpace, weights: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors of a block in the order of its space, each ``[batch, numbers]``."""
    space.check(weights, finite=False)
    for name in space.tensors:
        if weights[name].shape[1] != 1:
            raise SpaceError(
                f"tensor '{name}' must have one channel to be read as weights, "
                f"found {weights[name].shape[1]}"
            )
    return [weights[name].flatten(1) for name in space.tensors]


def same_batch(parts: Sequence[Tensor]) -> list[Tensor]:
    """The parts, if they speak of equally many networks."""
    if len({x.shape[0] for x in parts}) > 1:
        found = ", ".join(str(x.shape[0]) for x in parts)
        raise SpaceError(f"the parts of a network must have one batch size, found {found}")
    return list(parts)
