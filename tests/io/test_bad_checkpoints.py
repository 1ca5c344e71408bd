"""Damaged and unsafe checkpoints are refused in one sentence, and code in them is never run."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoint_files import TENSORS, legacy, sharded, write_raw
from transformer_nfn.errors import CheckpointError
from transformer_nfn.io.checkpoint import Checkpoint


def one(**changes: Any) -> dict[str, Any]:
    return {"W": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


def two(first: list[int], second: list[int]) -> dict[str, Any]:
    return one(data_offsets=first) | {"V": one(data_offsets=second)["W"]}


BAD_FILES: dict[str, tuple[dict[str, Any] | bytes, int, str]] = {
    "overlap": (two([0, 8], [4, 12]), 12, "tensors 'W' and 'V' overlap at byte"),
    "hole": (two([0, 8], [12, 20]), 20, "belong to no tensor"),
    "left over": (one(), 9, "belong to no tensor"),
    "past the end": (one(), 7, "tensor 'W' lies at bytes .* the file has"),
    "backwards": (one(data_offsets=[8, 0]), 8, "tensor 'W' lies at bytes"),
    "size": (one(shape=[3]), 8, r"'W' of shape \[3\] in float32 expected 12 bytes, found 8"),
    "negative": (one(shape=[-2]), 8, "tensor 'W' has a malformed"),
    "huge": (one(shape=[0, 1 << 70], data_offsets=[0, 0]), 0, "tensor 'W' has a malformed"),
    "fraction": (one(shape=[2.0]), 8, "tensor 'W' has a malformed"),
    "dtype": (one(dtype=3), 8, "tensor 'W' has a malformed"),
    "lacks": ({"W": {"dtype": "F32"}}, 0, "tensor 'W' has no dtype, shape and two offsets"),
    "no object": ({"W": 3}, 0, "tensor 'W' has no dtype, shape and two offsets"),
    "list": (b"[1, 2]", 0, "its header is not an object in JSON"),
    "deep": (b"[" * 100_000, 0, "its header is not an object in JSON"),
    "no JSON": (b"<html>", 0, "its header is not an object in JSON"),
    "twice": (b'{"W": 1, "W": 2}', 0, "'W' stands in it twice"),
    "metadata": ({"__metadata__": {"a": 3}}, 0, "its metadata is not text by name"),
    "no UTF-8": (b'{"\xff\xfe": 1}', 0, "its header is not UTF-8"),
    "surrogate": (b'{"\\ud800": 1}', 0, "its header is not UTF-8"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_safetensors_file_is_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    header, size, words = BAD_FILES[case]
    path = tmp_path / "bad.safetensors"
    write_raw(path, header, bytes(size))
    with pytest.raises(CheckpointError, match=words) as caught:
        Checkpoint.open(path)
    text = str(caught.value)
    assert text.startswith(f"'{path}' is not a readable safetensors file: ")
    assert len(text.splitlines()) == 1
    text.encode()


def test_headers_that_cannot_be_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(CheckpointError, match="its header claims 1152921504606846976 bytes, 2 are"):
        Checkpoint.open(path)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 34))
        file.truncate(1 << 35)
    with pytest.raises(CheckpointError, match="17179869184 bytes, at most 100000000 are allowed"):
        Checkpoint.open(path)
    path.write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="it has 3 bytes, a header needs at least 8"):
        Checkpoint.open(path)
    with pytest.raises(CheckpointError, match=r"there is no file '.*none\.safetensors'"):
        Checkpoint.open(tmp_path / "none.safetensors")


def test_a_file_cut_short_while_open_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"W": torch.ones(100)}, path)
    checkpoint = Checkpoint.open(path)
    os.truncate(path, 200)
    with pytest.raises(CheckpointError, match=r"a\.safetensors' ends at byte 200: it was cut"):
        checkpoint["W"]


class Trap:
    """Running this would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_code_in_a_state_dict_is_never_run(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    victim = folder / "pytorch_model.bin"
    for save in (torch.save, legacy):
        save({"W": Trap(tmp_path / "ran")}, victim)  # type: ignore[dict-item]
        for path in (victim, folder):
            with pytest.raises(CheckpointError, match=r"state dict: .*nothing in it was run"):
                Checkpoint.open(path)
    assert not (tmp_path / "ran").exists()
    torch.save(print, victim)
    with pytest.raises(CheckpointError, match=r"it holds '[\w.]*print', and nothing in it was run"):
        Checkpoint.open(victim)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "of tensors by name: it holds a list"),
        ({"W": torch.ones(1), "epoch": 3}, "of tensors by name: 'epoch' is of kind int"),
        ({3: torch.ones(1)}, "of tensors by name: the name 3 is of kind int"),
        (b"", "it is not a file of torch.save"),
        (b"hello there", "it is not a file of torch.save"),
        (b"PK\x03\x04 torn", "PytorchStreamReader failed"),
    ],
)
def test_other_state_dicts_are_refused_in_one_sentence(
    content: Any, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "net.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=rf"net\.pt' is not a plain state dict.*{words}") as e:
        Checkpoint.open(path)
    assert "weights_only" not in str(e.value), "no advice to run it"


def change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/etc/passwd", "'/etc/passwd' leads out of its folder"),
        ("../out.safetensors", "leads out of its folder"),
        ("a/../../out.safetensors", "leads out of its folder"),
        ("..\\out.safetensors", "leads out of its folder"),
        ("", "'' leads out of its folder"),
        ("link.safetensors", "'link.safetensors' is a link that leads out of its folder"),
        ("linked/out.safetensors", "is a link that leads out of its folder"),
        ("part-7.safetensors", "names 'part-7.safetensors', which is missing"),
        ("part-0.safetensors", "'h.0.W' is in 'part-0.safetensors', where it is not"),
        ("model.safetensors.index.json", "not a readable safetensors file"),
        (3, "the file of tensor 'h.0.W' is not named by text"),
    ],
)
def test_an_index_leads_nowhere_else(name: object, words: str, tmp_path: Path) -> None:
    folder = sharded(tmp_path / "net", "model.safetensors", save_file)
    save_file(TENSORS, tmp_path / "out.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "out.safetensors")
    (folder / "linked").symlink_to(tmp_path)
    change_index(folder, lambda index: index["weight_map"].update({"h.0.W": name}))
    with pytest.raises(CheckpointError, match=words) as caught:
        Checkpoint.open(folder)
    assert str(folder) in str(caught.value)


def test_folders_and_indexes_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no weights: expected model\.safetensors or"):
        Checkpoint.open(tmp_path)
    save_file(TENSORS, tmp_path / "out.safetensors")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "model.safetensors").symlink_to("../out.safetensors")
    with pytest.raises(CheckpointError, match="is a link that leads out of its folder"):
        Checkpoint.open(inner)
    index = tmp_path / "model.safetensors.index.json"
    for text, words in (("{", "is not JSON"), ("[]", "not an object"), ("{}", "no 'weight_map'")):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=words):
            Checkpoint.open(index)


def test_the_cache_of_a_hub_may_link_to_its_blobs(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--gpt2" / "snapshots" / "abc"
    blobs = tmp_path / "models--gpt2" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file(TENSORS, blobs / "123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    with Checkpoint.open(snapshot) as checkpoint:
        assert set(checkpoint) == set(TENSORS)
