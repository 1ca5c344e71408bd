"""Which tensors stand under a prefix, as ``W_Q`` of ``blocks.0.W_Q`` stands under ``blocks.0.``?"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def under_prefix(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix``, under the rest of their names."""
    return {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
