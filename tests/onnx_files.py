"""Hub folders of BERT as ONNX files: names kept, linear layers anonymous and transposed."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
from onnx import helper, numpy_helper
from safetensors.torch import load_file


def write_onnx(
    folder: Path, out: Path, *, names: bool = True, op: str = "MatMul", external: str = ""
) -> Path:
    """A graph that holds the weights as exporters name them; nothing else of it is right."""
    tensors, nodes = [], []
    for i, (key, w) in enumerate(load_file(folder / "model.safetensors").items()):
        linear = key.endswith(("query.weight", "key.weight", "value.weight", "dense.weight"))
        name, value = (f"onnx::MatMul_{i}", w.T) if linear else (key, w)
        tensors.append(numpy_helper.from_array(value.contiguous().numpy(), name))
        if linear:
            path = "/" + key.removesuffix(".weight").replace(".", "/").replace(
                "layer/", "layer.") + "/" + op  # fmt: skip
            nodes.append(helper.make_node(op, ["x", name], [f"y{i}"], path if names else ""))
    graph = helper.make_graph(nodes, "model", [], [], tensors)
    model = helper.make_model(graph)
    out.mkdir(exist_ok=True)
    shutil.copy(folder / "config.json", out / "config.json")
    if external:
        onnx.save(model, str(out / "model.onnx"), save_as_external_data=True, location=external,
                  size_threshold=64)  # fmt: skip
    else:
        onnx.save(model, str(out / "model.onnx"))
    return out / "model.onnx"
