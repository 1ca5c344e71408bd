"""Ways to damage the graph of an ONNX file that keep it a readable protobuf message."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import onnx
from expected import Damage, Right

Change = Callable[[Random, Any, Any], None]


def _dims(chance: Random, tensor: Any, node: Any) -> None:
    tensor.dims[:] = chance.choice(([], [0], [-1], [3, -1], [2**40, 2**40], [7] * 9))


def _type(chance: Random, tensor: Any, node: Any) -> None:
    tensor.data_type = chance.choice((0, 2, 7, 8, 10, 11, 14, 16, 99))


def _name(chance: Random, tensor: Any, node: Any) -> None:
    tensor.name = chance.choice(("", "x", "onnx::MatMul_x", "x" * 100_000))


def _data(chance: Random, tensor: Any, node: Any) -> None:
    """Bytes inside the file are too few; a place outside is another."""
    places = {"location": ("", "../x", "/etc/passwd", "config.json", "x"),
              "offset": ("-1", "x", "9" * 30), "length": ("0", "-1", "9" * 30)}  # fmt: skip
    key = chance.choice(sorted(places))
    for entry in tensor.external_data:
        if entry.key == key:
            entry.value = chance.choice(places[key])
    if not tensor.external_data:
        tensor.raw_data = tensor.raw_data[:-1]


def _op(chance: Random, tensor: Any, node: Any) -> None:
    node.op_type = chance.choice(("QLinearMatMul", "DequantizeLinear", "x"))


def _node(chance: Random, tensor: Any, node: Any) -> None:
    """What read the weight says no longer which layer it is."""
    node.name = chance.choice(("", "/", "MatMul", "/x/MatMul"))


def _identity(chance: Random, tensor: Any, node: Any) -> None:
    node.op_type = "Identity"
    node.input[:] = [tensor.name]
    del node.output[:]


CHANGES: tuple[Change, ...] = (_dims, _type, _name, _data, _op, _node, _identity)


def graph(chance: Random, path: Path) -> Damage:
    """One tensor or one node of the graph is another."""
    model = onnx.load(path, load_external_data=False)
    change = chance.choice(CHANGES)
    tensor, node = chance.choice(model.graph.initializer), chance.choice(model.graph.node)
    what = f"{path.name}: {change.__name__[1:]} of '{tensor.name}', '{node.name}'"
    change(chance, tensor, node)
    path.write_bytes(model.SerializeToString())
    return Damage(what, Right.REFUSED)
