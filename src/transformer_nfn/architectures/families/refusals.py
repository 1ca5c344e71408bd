"""Which checkpoints are refused by name? Experts, quantised weights, adapters, foreign formats."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from transformer_nfn.files.errors import CheckpointError
from transformer_nfn.files.hub_folder import WEIGHTS

GGUF = b"GGUF"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
PLAIN = "plain weights in float64, float32, float16 or bfloat16"

# What the names of tensors give away, each with what it is.
BY_NAME = (
    (re.compile(r"(^|\.)lora_|\.lora\.|(^|\.)base_model\.model\."), "an adapter (LoRA)"),
    (re.compile(r"\.(qweight|qzeros|g_idx)$"), "weights quantised by GPTQ or AWQ"),
    (
        re.compile(r"\.(absmax|quant_map|SCB|weight_format|quant_state\..+)$"),
        "weights quantised by bitsandbytes",
    ),
    (
        re.compile(r"\.(weight_scale|weight_scale_inv|input_scale)$"),
        "weights quantised with scales",
    ),
    (
        re.compile(r"\.(experts|block_sparse_moe|shared_expert|shared_experts|router)\."),
        "a mixture of experts",
    ),
)
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def check_path(path: Path) -> None:
    """Refuses a file or folder that is no checkpoint of whole plain weights, before it is opened.

    Raises:
        CheckpointError: for GGUF files and for adapters.
    """
    if path.is_dir():
        found = next((name for name in ADAPTER if (path / name).is_file()), None)
        weights = any((path / name).is_file() for name in WEIGHTS)
        if found and not weights:
            _refuse(str(path / found), "an adapter (LoRA), which changes another model's weights")
        gguf = sorted(path.glob("*.gguf")) if not weights else []
        if gguf:
            _refuse(str(gguf[0]), "GGUF")
    elif path.is_file():
        try:
            with path.open("rb") as file:
                head = file.read(len(GGUF))
        except OSError:
            return  # whoever opens it next says why
        if path.suffix == ".gguf" or head == GGUF:
            _refuse(str(path), "GGUF")


def check_contents(keys: Iterable[str], config: Mapping[str, Any], where: str) -> None:
    """Refuses what the config or the names of the tensors say is of a kind that is not read.

    Raises:
        CheckpointError: for quantised weights, adapters and mixtures of experts.
    """
    quantised = config.get("quantization_config")
    if isinstance(quantised, Mapping):
        method = quantised.get("quant_method", "an unnamed method")
        _refuse(f"{where}': 'quantization_config", f"weights quantised by {str(method)[:60]}")
    for key in keys:
        for pattern, what in BY_NAME:
            if pattern.search(key):
                _refuse(f"{where}': '{key}", what)
    for field in EXPERTS:
        experts = config.get(field)
        if type(experts) is int and 1 < experts < 1 << 30:
            _refuse(f"{where}': '{field} = {experts}", "a mixture of experts")


def _refuse(where: str, found: str) -> NoReturn:
    raise CheckpointError(f"'{where}' expected {PLAIN} of a dense transformer, found {found}")
