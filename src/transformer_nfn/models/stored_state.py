"""Tensors of a fitted model as they stand in a file: checked before the model is built."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.io.tensor_files import TensorInfo


def check_state(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, TensorInfo],
    where: str,
    kind: type[TransformerNFNError],
) -> None:
    """Refuse missing and foreign tensors, other shapes and dtypes, and numbers not finite.

    Args:
        tensors: as read.
        expected: shape and dtype of each.
        where: the file, for errors.
        kind: class of the error.
    """
    for name in [*expected, *tensors]:
        info = TensorInfo.of(tensors[name]) if name in tensors else None
        if info != expected.get(name):
            raise kind(f"'{where}': '{name}' expected {expected.get(name)}, found {info}")
        if not bool(tensors[name].isfinite().all()):
            raise kind(f"'{where}': '{name}' holds values that are not finite")
