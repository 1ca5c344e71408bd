"""What does dropout leave, for a probability per network and random words by counter?"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_nfn.functional.zoo_network import Drop
from transformer_nfn.zoo.training.randomness import keep_mask


def dropout(
    key: Tensor, threshold: Tensor, scale: Tensor, stride: int
) -> Drop:
    """Dropout with a probability per network, from counter-based words.

    Args:
        key: ``int32 [networks, sites, 2]``.
        threshold: ``int32 [networks]``, see `randomness.dropout_threshold`.
        scale: ``[networks]``, 1/(1 − p).
        stride: rows a sample takes in the numbering of rows, at least its tokens.
    """

    def apply(x: Tensor, site: int) -> Tensor:
        B, T, D = x.shape[1:]
        rows = torch.arange(B, device=x.device)[:, None] * stride
        rows = rows + torch.arange(T, device=x.device)
        keep = keep_mask(key[:, site], threshold, rows, D)
        return x * (keep * scale[:, None, None, None]).to(x.dtype)

    return apply
