"""Keys of GGUF files: what may change the function is never called the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from test_config_fields import is_seen

import tiny_families
from gguf_conversion import write_gguf
from transformer_nfn.io import Checkpoint

CASES = ("llama", "qwen2", "qwen3", "gemma2", "phi3", "phi", "gpt2", "bert-base")
NO_SETTINGS = {
    "vocab_size", "context_length", "tensor_data_layout", "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
}  # fmt: skip
"""What llama.cpp does not read for these architectures, or only for rejected rotary schemes."""
UNSTATED = {
    "attention.causal": True, "expert_count": 0, "expert_used_count": 0, "pooling_type": 0,
    "rope.scale_linear": 0, "rope.scaling.attn_factor": 1, "rope.scaling.factor": 0,
}  # fmt: skip
"""Values that llama.cpp takes where a file has none."""


def all_keys(of: type = gguf.Keys) -> Iterator[str]:
    """Every key of an architecture that the package knows, without the architecture."""
    for value in vars(of).values():
        if isinstance(value, type):
            yield from all_keys(value)
        elif isinstance(value, str) and value.startswith("{arch}."):
            yield value.removeprefix("{arch}.").replace("{dense}", "dense_2")


def other_values(value: Any) -> tuple[Any, ...]:
    """Values to try instead of one in a file; None takes the key away."""
    if value is None:
        return (1, 3, 0.7, False, "yarn", [1, 2])
    if isinstance(value, bool):
        return (not value, None)
    return tuple(factor * value for factor in ((1.3, 1e3) if isinstance(value, float) else (0, 2)))


def unseen_keys(case: str, folder: Path, keys: set[str]) -> list[str]:
    """Changed keys that `relate` or a fingerprint does not see."""
    tiny_families.save(tiny_families.build(case, dtype=torch.float32), folder)
    plain = write_gguf(folder, folder / "plain.gguf")
    with Checkpoint.open(plain) as file:
        stated = {key.partition(".")[2]: value for key, value in file.config.items()}
    unseen = []
    for key in sorted(keys - NO_SETTINGS):
        for other in other_values(stated.get(key)):
            if key in UNSTATED and other == UNSTATED[key]:
                continue
            changed = write_gguf(folder, folder / "changed.gguf", metadata={key: other})
            if not is_seen(plain, changed):
                unseen.append(f"{key}: {other}")
    return unseen


@pytest.mark.parametrize(
    ("case", "keys"),
    [
        ("bert-base", {"pooling_type", "attention.causal"}),
        ("qwen3", {"pooling_type", "attention.scale", "attention.causal"}),
    ],
)
def test_keys_are_seen(case: str, keys: set[str], tmp_path: Path) -> None:
    assert unseen_keys(case, tmp_path, keys) == []


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_keys_of_every_architecture_are_seen(case: str, tmp_path: Path) -> None:
    keys = {*all_keys(), "rope.scale_linear", "unheard.of"}
    if case in ("gpt2", "bert-base"):  # no rotary positions
        keys = {key for key in keys if not key.startswith("rope.")}
    assert unseen_keys(case, tmp_path, keys) == []
