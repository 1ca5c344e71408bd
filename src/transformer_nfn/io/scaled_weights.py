"""int8 and float8 weights with scales in safetensors, dequantised on reading.

Read are ``weight`` in float8 or int8 beside one of

- ``weight_scale_inv``: one scale for each block of the matrix (128 × 128, or as the config says);
- ``weight_scale``: one for the matrix, for each row, or for each group of a row, with
  ``weight_zero_point`` where zero has another code;
- ``SCB``: the largest weight of each row, as bitsandbytes stores int8.

Scales of activations change no weight and are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from transformer_nfn.errors import CheckpointError
from transformer_nfn.io.gguf_file import CLIPPED, SLACK
from transformer_nfn.io.packed_weights import quantisation
from transformer_nfn.io.tensor_files import TensorInfo, TensorSource

# Half of the spacing of numbers relative to their size, and of the smallest ones.
FLOAT8 = {"float8_e4m3fn": (2.0**-4, 2.0**-10), "float8_e5m2": (2.0**-3, 2.0**-17)}
CODES = (*FLOAT8, "int8")
SCALES = ("weight_scale_inv", "weight_scale", "SCB")
ZERO = "weight_zero_point"
LEFT_OUT = re.compile(r"\.(input_scale|output_scale|k_scale|v_scale|weight_format)$")
BLOCK = (128, 128)
"""Of a matrix with ``weight_scale_inv``, where the config does not say."""
LARGEST_INT8 = 127.0


class ScaledWeights:
    """A file with its quantised weights multiplied by their scales; see `QuantisedSource`."""

    def __init__(
        self, source: TensorSource, scales: Mapping[str, str], block: tuple[int, int], where: str
    ) -> None:
        self._source, self._scales, self._block, self._where = source, scales, block, where
        self.metadata = source.metadata
        zeros = {self._zero(name) for name in scales}
        hidden = {*scales.values(), *zeros}
        self.infos = {
            name: TensorInfo(info.shape, "float32", info.dtype) if name in scales else info
            for name, info in source.infos.items()
            if name not in hidden and not LEFT_OUT.search(name)
        }
        for name in scales:
            self._check(name)

    def read(self, name: str) -> Tensor:
        """One tensor, dequantised to float32."""
        raw = self._source.read(name)
        if name not in self._scales:
            return raw
        codes, scale = self._codes(name, raw)
        return codes * scale

    def interval(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Lowest and highest number that the format rounds to each stored one."""
        if name not in self._scales:
            return None
        raw = self._source.read(name)
        codes, scale = self._codes(name, raw)
        value = codes * scale
        dtype = self._source.infos[name].dtype
        if dtype in FLOAT8:
            relative, smallest = FLOAT8[dtype]
            half = (codes.abs() * relative).clamp_min(smallest) * (1 + SLACK)
        else:
            half = torch.full_like(codes, 0.5 + SLACK)
            ends = (raw == -128) | (raw == 127) | (raw == -127)
            half = torch.where(ends, 2 * LARGEST_INT8 * CLIPPED, half)
        # The scale itself is rounded to its dtype.
        stored = getattr(torch, self._source.infos[self._scales[name]].dtype)
        half = half * scale.abs() + torch.finfo(stored).eps / 2 * value.abs()
        return value - half, value + half

    def close(self) -> None:
        """Close the files."""
        self._source.close()

    def _codes(self, name: str, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Codes less the one of zero, and the scale of each."""
        key = self._scales[name]
        scale = self._source.read(key).float()
        if key.endswith(".SCB"):
            scale = scale / LARGEST_INT8
        codes, zero = raw.float(), self._zero(name)
        if zero in self._source.infos:
            codes = codes - self._spread(self._source.read(zero).float(), raw.shape, name)
        return codes, self._spread(scale, raw.shape, name)

    def _spread(self, scale: Tensor, shape: torch.Size, name: str) -> Tensor:
        """Scales repeated over the rows, groups or blocks that they belong to."""
        if scale.numel() == 1:
            return scale.reshape(())
        if scale.ndim == 1:
            scale = scale.unsqueeze(1)
        for axis, size in enumerate(self._blocks(scale.shape, shape, name)):
            scale = scale.repeat_interleave(size, axis).narrow(axis, 0, shape[axis])
        return scale

    def _blocks(
        self, scales: tuple[int, ...], shape: tuple[int, ...], name: str
    ) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        sizes = self._block
        if not self._scales[name].endswith("_inv"):
            sizes = (-(-shape[0] // max(scales[0], 1)), -(-shape[1] // max(scales[1], 1)))
        expected = tuple(-(-n // size) for n, size in zip(shape, sizes, strict=True))
        if tuple(scales) != expected:
            self._refuse(name, f"scales of shape {list(expected)}", f"{list(scales)}")
        return sizes

    def _zero(self, name: str) -> str:
        return f"{name.removesuffix('.weight')}.{ZERO}"

    def _check(self, name: str) -> None:
        """Refuse shapes that do not fit, before anything is read."""
        shape = self._source.infos[name].shape
        if len(shape) != 2 or 0 in shape:
            self._refuse(name, "a matrix", f"shape {list(shape)}")
        for key in (self._scales[name], self._zero(name)):
            info = self._source.infos.get(key)
            if info is None:
                continue
            scales = info.shape if len(info.shape) != 1 else (*info.shape, 1)
            code = key == self._zero(name) and (info.dtype in CODES or "int" in info.dtype)
            if info.weight_dtype is None and not code:
                self._refuse(key, "scales in float32, float16 or bfloat16", info.dtype)
            if info.shape not in ((), (1,), (1, 1)):
                if len(scales) != 2:
                    self._refuse(name, "scales of one or two axes", f"{list(info.shape)}")
                self._blocks(scales, shape, name)

    def _refuse(self, name: str, expected: str, found: str) -> NoReturn:
        raise CheckpointError(f"'{self._where}': '{name}' expected {expected}, found {found}")


def with_scales(source: TensorSource, config: Mapping[str, Any], where: str) -> TensorSource:
    """The source with its quantised weights dequantised, itself where it has none with scales."""
    scales = {}
    for name, info in source.infos.items():
        if info.dtype in CODES and name.endswith(".weight"):
            stem = name.removesuffix("weight")
            key = next((stem + end for end in SCALES if stem + end in source.infos), None)
            if key is not None:
                scales[name] = key
    if not scales:
        return source
    return ScaledWeights(source, scales, _block_size(config, where), where)


def _block_size(config: Mapping[str, Any], where: str) -> tuple[int, int]:
    size = quantisation(config).get("weight_block_size")
    if size is None:
        return BLOCK
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        return size[0], size[1]
    raise CheckpointError(
        f"'{where}': weight_block_size expected two whole numbers, found {str(size)[:60]}"
    )
