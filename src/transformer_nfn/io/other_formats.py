"""Refuse weights that are not plain tensors of a whole network: GGUF, ONNX, adapters, quantised."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from transformer_nfn.io.errors import CheckpointError
from transformer_nfn.io.hub_folder import WEIGHTS
from transformer_nfn.io.regular import open_regular

PLAIN = "plain weights in float64, float32, float16 or bfloat16"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
ADAPTER_WORDS = "an adapter (LoRA), which changes another model's weights"
SUFFIXES = {".gguf": "GGUF", ".onnx": "ONNX"}
GGUF = b"GGUF"
# An ONNX file is a protobuf message: its version (field 1, a small number), then the name and
# version of its producer, a domain, a text, the graph or the operators (fields 2 to 8).
ONNX_VERSION, ONNX_VERSIONS = 0x08, range(1, 32)
ONNX_FIELDS = (0x12, 0x1A, 0x22, 0x28, 0x32, 0x3A, 0x42)

# Names of tensors that only such a checkpoint has.
BY_NAME = (
    (re.compile(r"(^|\.)lora_|\.lora\.|(^|\.)base_model\.model\."), "an adapter (LoRA)"),
    (re.compile(r"\.(qweight|qzeros|g_idx)$"), "weights quantised by GPTQ or AWQ"),
    (
        re.compile(r"\.(absmax|quant_map|SCB|weight_format|quant_state\..+)$"),
        "weights quantised by bitsandbytes",
    ),
    (
        re.compile(r"\.(weight_scale|weight_scale_inv|input_scale|weight_packed)$"),
        "weights quantised with scales",
    ),
)


def check_format(path: Path, where: str | None = None) -> None:
    """Refuse a file or folder by its names and first bytes, before it is opened.

    Args:
        path: a file, or a folder as model hubs lay it out; one that also holds weights that can
            be read passes.
        where: what errors call it; its path if not given.
    """
    where = str(path) if where is None else where
    if path.is_dir():
        if any((path / name).is_file() for name in WEIGHTS):
            return
        adapter = next((name for name in ADAPTER if (path / name).is_file()), None)
        if adapter:
            refuse(f"{where.rstrip('/')}/{adapter}", ADAPTER_WORDS)
        for suffix, what in SUFFIXES.items():
            found = sorted([*path.glob(f"*{suffix}"), *path.glob(f"*/*{suffix}")])
            if found:
                refuse(f"{where.rstrip('/')}/{found[0].relative_to(path)}", what)
    elif path.is_file():
        if path.name in ADAPTER:
            refuse(where, ADAPTER_WORDS)
        other = SUFFIXES.get(path.suffix.lower()) or _by_content(path)
        if other:
            refuse(where, other)


def _by_content(path: Path) -> str | None:
    try:
        with open(open_regular(path), "rb") as file:
            head = file.read(9)
    except OSError:
        return None  # the reader of the file reports why
    if head[:4] == GGUF:
        return "GGUF"
    safetensors = head[8:] == b"{"
    if len(head) == 9 and not safetensors and head[0] == ONNX_VERSION:
        return "ONNX" if head[1] in ONNX_VERSIONS and head[2] in ONNX_FIELDS else None
    return None


def check_plain(keys: Iterable[str], config: Mapping[str, Any], where: str) -> None:
    """Refuse quantised weights and adapters by their config and the names of their tensors."""
    quantised = config.get("quantization_config")
    if isinstance(quantised, Mapping):
        method = quantised.get("quant_method", "an unnamed method")
        refuse(f"{where}': 'quantization_config", f"weights quantised by {str(method)[:60]}")
    for key in keys:
        for pattern, what in BY_NAME:
            if pattern.search(key):
                refuse(f"{where}': '{key}", what)


def refuse(where: str, found: str) -> NoReturn:
    """Raise the error that names what was found."""
    raise CheckpointError(f"'{where}' expected {PLAIN} of a dense transformer, found {found}")
