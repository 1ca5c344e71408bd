"""GPTQ, AWQ and other packed integer weights in safetensors, dequantised on reading.

Read are, for each matrix,

- GPTQ: ``qweight`` packed along the inputs, ``qzeros``, ``scales``, and ``g_idx``, the group of
  each input;
- AWQ (layout GEMM): ``qweight`` and ``qzeros`` packed along the outputs, ``scales``;
- compressed-tensors (pack-quantized): ``weight_packed``, ``weight_scale``, ``weight_shape``, and
  ``weight_zero_point`` where zero has another code.

Integers are unpacked by the package `compressed-tensors`. GPTQ moves weights by more than their
rounding and AWQ scales inputs, so no weight stands for an interval of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from transformer_nfn.errors import CheckpointError, needs_extra
from transformer_nfn.io.tensor_files import TensorInfo, TensorSource

QUANTISED = "quantization_config"
WORD = 32
BITS = (2, 3, 4, 8)
# Parts that a matrix may lack.
OPTIONAL = ("g_idx", "weight_g_idx", "weight_zero_point")
LARGEST = 2**24
"""Rows or columns of a matrix."""
# Ending of packed tensors, the config field that names their layout, and the layouts that are read;
# the first one counts where the field is not there.
FORMATS = {
    "gptq": (".qweight", "checkpoint_format", ("gptq", "gptq_v2")),
    "awq": (".qweight", "version", ("gemm",)),
    "compressed-tensors": (".weight_packed", "format", ("pack-quantized", "mixed-precision")),
}


@dataclass(frozen=True)
class _Packed:
    """A matrix: its sizes, the bits of a code, and the shapes of its parts by their names."""

    outputs: int
    inputs: int
    groups: int
    bits: int
    parts: Mapping[str, tuple[int, ...]]


class PackedWeights:
    """A file with its packed weights as numbers; see `TensorSource`."""

    def __init__(self, source: TensorSource, method: str, layout: str, where: str) -> None:
        with needs_extra(CheckpointError, "compressed-tensors", "packed", f"reading '{where}'"):
            from compressed_tensors.compressors.pack_quantized import unpack_from_int32
            from compressed_tensors.entrypoints.convert import AutoAWQConverter
        self._unpack, self._awq_order = unpack_from_int32, AutoAWQConverter
        self._source, self._method, self._layout, self._where = source, method, layout, where
        self.metadata = source.metadata
        end, _, _ = FORMATS[method]
        stems = [name.removesuffix(end) for name in source.infos if name.endswith(end)]
        self._matrices = {f"{stem}.weight": self._matrix(stem) for stem in stems}
        parts = {
            f"{name.removesuffix('weight')}{part}"
            for name, matrix in self._matrices.items()
            for part in matrix.parts
        }
        self.infos = {name: info for name, info in source.infos.items() if name not in parts}
        for name, matrix in self._matrices.items():
            self.infos[name] = TensorInfo((matrix.outputs, matrix.inputs), "float32")

    def read(self, name: str) -> Tensor:
        """One tensor, dequantised to float32."""
        if name not in self._matrices:
            return self._source.read(name)
        matrix, stem = self._matrices[name], name.removesuffix("weight")
        held = self._source.infos
        parts = {p: self._source.read(stem + p) for p in matrix.parts if stem + p in held}
        read = {"gptq": self._gptq, "awq": self._awq}.get(self._method, self._plain)
        codes, zeros, scales = read(matrix, parts)
        group = parts.get("g_idx", parts.get("weight_g_idx"))
        if group is None:
            group = torch.arange(matrix.inputs) // -(-matrix.inputs // matrix.groups)
        if int(group.min()) < 0 or int(group.max()) >= matrix.groups:
            self._refuse(f"{stem}g_idx", f"groups 0 to {matrix.groups - 1}", f"{int(group.max())}")
        group = group.long()
        return (codes.float() - zeros.float()[:, group]) * scales.float()[:, group]

    def close(self) -> None:
        """Close the files."""
        self._source.close()

    def _gptq(self, m: _Packed, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        codes = self._unpack(parts["qweight"], m.bits, torch.Size((m.inputs, m.outputs)), 0)
        zeros = self._unpack(parts["qzeros"], m.bits, torch.Size((m.groups, m.outputs)), 1)
        # The first version of the format stores one less than the code of zero.
        zeros = zeros.int() + (self._layout == "gptq")
        return codes.mT, zeros.mT, parts["scales"].mT

    def _awq(self, m: _Packed, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        unpacked = self._awq_order.unpack_awq(parts["qweight"], parts["qzeros"], m.bits)
        codes, zeros = self._awq_order.reverse_awq_order(*unpacked, m.bits)
        return (codes & 15).mT, (zeros & 15).mT, parts["scales"].mT

    def _plain(self, m: _Packed, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        shape = torch.Size((m.outputs, m.inputs))
        codes, scales = self._unpack(parts["weight_packed"], m.bits, shape), parts["weight_scale"]
        if "weight_zero_point" not in parts:
            return codes, torch.zeros(m.outputs, m.groups), scales
        shape = torch.Size((m.outputs, m.groups))
        return codes, self._unpack(parts["weight_zero_point"], m.bits, shape, 0), scales

    def _matrix(self, stem: str) -> _Packed:
        """Sizes from the shapes of the parts; refuses parts that do not fit."""
        if self._method == "compressed-tensors":
            outputs, inputs = self._shape(stem)
            groups = self._size(stem, "weight_scale", 1)
            bits = WORD * self._size(stem, "weight_packed", 1) // inputs
            parts: dict[str, tuple[int, ...]] = {
                "weight_packed": (outputs, _words(inputs, bits)), "weight_shape": (2,),
                "weight_scale": (outputs, groups),
                "weight_zero_point": (_words(outputs, bits), groups), "weight_g_idx": (inputs,),
            }  # fmt: skip
        else:
            groups, outputs = (self._size(stem, "scales", axis) for axis in (0, 1))
            inputs = self._size(stem, "qweight", 0)
            bits = WORD * self._size(stem, "qzeros", 1) // outputs
            if self._method == "gptq":
                inputs = inputs * WORD // max(bits, 1)
            along = (_words(inputs, bits), outputs), (inputs, _words(outputs, bits))
            parts = {
                "qweight": along[self._method == "awq"], "qzeros": (groups, _words(outputs, bits)),
                "scales": (groups, outputs), "g_idx": (inputs,),
            }  # fmt: skip
        if bits not in (BITS if self._method != "awq" else (4,)):
            self._refuse(f"{stem}.weight", "codes of 2, 3, 4 or 8 bits (AWQ: 4)", f"{bits} bits")
        for part, shape in parts.items():
            if part not in OPTIONAL or f"{stem}.{part}" in self._source.infos:
                self._check(f"{stem}.{part}", shape)
        return _Packed(outputs, inputs, groups, bits, parts)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        info = self._source.infos.get(name)
        if info is None:
            self._refuse(name, f"shape {list(shape)}", "no such tensor")
        scales = name.endswith(("scale", "scales"))
        whole = ("int32", "int64") if name.endswith(("g_idx", "shape")) else ("int32",)
        right = info.weight_dtype is not None if scales else info.dtype in whole
        if info.shape != shape or not right:
            kind = "floating point" if scales else "int32"
            self._refuse(name, f"shape {list(shape)} in {kind}", str(info))

    def _shape(self, stem: str) -> tuple[int, int]:
        name = f"{stem}.weight_shape"
        self._check(name, (2,))
        outputs, inputs = (int(n) for n in self._source.read(name))
        if not (0 < outputs <= LARGEST and 0 < inputs <= LARGEST):
            self._refuse(name, f"two sizes from 1 to {LARGEST}", f"{[outputs, inputs]}")
        return outputs, inputs

    def _size(self, stem: str, part: str, axis: int) -> int:
        """One size of a part, which must be a matrix that is not empty."""
        info = self._source.infos.get(f"{stem}.{part}")
        if info is None or len(info.shape) != 2 or 0 in info.shape:
            found = "no such tensor" if info is None else f"shape {list(info.shape)}"
            self._refuse(f"{stem}.{part}", "a matrix", found)
        return info.shape[axis]

    def _refuse(self, name: str, expected: str, found: str) -> NoReturn:
        raise CheckpointError(f"'{self._where}': '{name}' expected {expected}, found {found}")


def quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config states about quantised weights; empty where it states nothing."""
    stated = config.get(QUANTISED)
    return stated if isinstance(stated, Mapping) else {}


def with_packed(source: TensorSource, config: Mapping[str, Any], where: str) -> TensorSource:
    """The source with its packed weights as numbers, itself where it has none of a known format."""
    stated = quantisation(config)
    method = stated.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        return source
    end, field, known = FORMATS[method]
    if not any(name.endswith(end) for name in source.infos):
        return source
    layout = stated.get(field) or known[0]
    if str(layout).lower() not in known:
        raise CheckpointError(
            f"'{where}': {field} of {method} weights expected {' or '.join(known)}, found "
            f"{str(layout)[:60]!r}"
        )
    return PackedWeights(source, method, str(layout).lower(), where)


def _words(codes: int, bits: int) -> int:
    """Words of 32 bits that hold as many codes."""
    return -(-codes * bits // WORD)
