"""Initialisers of an ONNX file under the names of the modules that they were exported from.

Exporters keep most names. The matrix of a linear layer becomes an anonymous, transposed one,
``onnx::MatMul_147``; the node that reads it says which layer that was,
``/encoder/layer.0/attention/self/query/MatMul``. What no node names is rejected where it is a
matrix, and left out where it is a constant: a weight that is missing is reported by whoever binds
the tensors to a family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.errors import CheckpointError, needs_extra
from transformer_nfn.io.files import explained_read, read_regular
from transformer_nfn.io.tensor_files import TensorInfo, inside, open_handle, read_at

if TYPE_CHECKING:
    from onnx import GraphProto, TensorProto

DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 5: "int16", 6: "int32", 7: "int64", 9: "bool",
    10: "float16", 11: "float64", 16: "bfloat16",
}  # fmt: skip
"""Types of tensors by the file's numbers; others are no weights."""
QUANTISED = (
    "MatMulInteger", "QLinearMatMul", "DynamicQuantizeLinear", "QuantizeLinear",
    "DequantizeLinear", "MatMulNBits", "MatMulBnb4",
)  # fmt: skip


class OnnxFile:
    """An open ONNX file; see `TensorSource`. Weights inside the file stay in memory."""

    def __init__(self, path: Path, where: str) -> None:
        self._path, self._where = path, where
        with needs_extra(CheckpointError, "onnx", "onnx", f"reading '{where}'"):
            import onnx
        with explained_read(where, CheckpointError):
            stored = read_regular(path)
        try:
            model = onnx.load_model_from_string(stored)
        except Exception as error:  # protobuf raises several types for an invalid file
            self._refuse("it is no ONNX model", error)
        self._helper: Any = onnx.numpy_helper
        self._tensors: dict[str, tuple[TensorProto, bool]] = self._resolve(model.graph)
        if not self._tensors:
            self._refuse("it holds no weights")
        self.infos = {name: self._info(name) for name in self._tensors}
        self.metadata: Mapping[str, str] = {}

    def read(self, name: str) -> Tensor:
        """One tensor as its module has it."""
        stored, transposed = self._tensors[name]
        dtype = getattr(torch, self.infos[name].dtype)
        shape = tuple(stored.dims)
        try:
            if stored.data_location == stored.EXTERNAL:
                value = self._external(stored, dtype)
            else:
                array = np.ascontiguousarray(self._helper.to_array(stored))
                value = torch.from_numpy(array.reshape(-1).view(np.uint8).copy()).view(dtype)
            value = value.reshape(shape)
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            if isinstance(error, CheckpointError):
                raise
            self._refuse(f"'{stored.name}' does not hold {list(shape)} numbers", error)
        return value.mT.contiguous() if transposed else value

    def close(self) -> None:
        """Release the weights."""
        self._tensors = {}

    def _resolve(self, graph: GraphProto) -> dict[str, tuple[TensorProto, bool]]:
        """Initialisers by the name of their module, and whether they are transposed."""
        names = [tensor.name for tensor in graph.initializer]
        names += [x for n in graph.node for x in (n.name, n.op_type, *n.input, *n.output)]
        if not all(isinstance(name, str) for name in names):
            self._refuse("a name in its graph is not UTF-8")
        held = {tensor.name: tensor for tensor in graph.initializer}
        found = {name: (w, False) for name, w in held.items() if not _anonymous(name)}
        resolved: set[str] = set()
        for node in graph.node:
            if node.op_type in QUANTISED:
                self._refuse(f"node '{node.name}' is quantised ({node.op_type})")
            inputs = list(node.input)
            if node.op_type == "Identity" and inputs[:1] and inputs[0] in held:
                for name in node.output:  # equal tensors, once
                    found.setdefault(name, (held[inputs[0]], False))
            if node.op_type not in ("MatMul", "Gemm") or len(inputs) < 2 or inputs[1] not in held:
                continue
            module = node.name.strip("/").split("/")[:-1]
            if _anonymous(inputs[1]) and module:
                transposed = node.op_type == "MatMul" or not any(
                    attribute.name == "transB" and attribute.i for attribute in node.attribute
                )
                found[".".join([*module, "weight"])] = (held[inputs[1]], transposed)
                resolved.add(inputs[1])
        for name, tensor in held.items():
            matrix = len(tensor.dims) == 2 and min(tensor.dims) > 1 and tensor.data_type in (1, 10)
            if _anonymous(name) and name not in resolved and matrix:
                self._refuse(f"no node says which weight '{name}' {list(tensor.dims)} is")
        return {name: pair for name, pair in found.items() if not _anonymous(name)}

    def _info(self, name: str) -> TensorInfo:
        tensor, transposed = self._tensors[name]
        shape = tuple(reversed(tensor.dims)) if transposed else tuple(tensor.dims)
        return TensorInfo(shape, DTYPES.get(tensor.data_type, f"ONNX type {tensor.data_type}"))

    def _external(self, stored: TensorProto, dtype: torch.dtype) -> Tensor:
        """Numbers in a file beside this one."""
        fields = {entry.key: entry.value for entry in stored.external_data}
        path = inside(self._path.parent, fields.get("location", ""), self._path)
        size = dtype.itemsize * math.prod(stored.dims)
        offset = int(fields.get("offset", "0"))
        if offset < 0 or int(fields.get("length", size)) != size:
            raise ValueError
        with open(open_handle(path, str(path)), "rb") as file:
            return read_at(file.fileno(), offset, size, str(path)).view(dtype)

    def _refuse(self, why: str, error: BaseException | None = None) -> NoReturn:
        raise CheckpointError(f"'{self._where}' is not a readable ONNX file: {why}") from error


def _anonymous(name: str) -> bool:
    """Whether an exporter made up a name."""
    return "::" in name or "/" in name or not name
