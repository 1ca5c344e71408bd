"""One mapping over every kind of checkpoint: the same tensors, read only when asked for."""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoint_files import TENSORS, legacy, sharded, write_raw
from transformer_nfn.errors import CheckpointError
from transformer_nfn.io import tensor_files
from transformer_nfn.io.checkpoint import Checkpoint


def in_folder(folder: Path, name: str, save: Callable[[dict[str, Tensor], Path], None]) -> Path:
    folder.mkdir()
    save(TENSORS, folder / name)
    return folder


def written(kind: str, tmp_path: Path) -> Path:
    """The same tensors, as each kind of checkpoint."""
    path = tmp_path / "net"
    if kind in (".safetensors", "no ending"):
        path = path.with_suffix(".safetensors") if kind == ".safetensors" else path
        save_file(TENSORS, path)
        return path
    if kind in (".pt", ".pth", ".bin", "no ending, torch"):
        path = path.with_suffix(kind) if kind.startswith(".") else path
        torch.save(TENSORS, path)
        return path
    if kind == "old .pt":
        legacy(TENSORS, path.with_suffix(".pt"))
        return path.with_suffix(".pt")
    made = {
        "folder": lambda: in_folder(path, "model.safetensors", save_file),
        "folder of .bin": lambda: in_folder(path, "pytorch_model.bin", torch.save),
        "shards": lambda: sharded(path, "model.safetensors", save_file),
        "shards of .bin": lambda: sharded(path, "pytorch_model.bin", torch.save),
        "index": lambda: (
            sharded(path, "model.safetensors", save_file) / "model.safetensors.index.json"
        ),
    }
    return made[kind]()


KINDS = [".safetensors", "no ending", ".pt", ".pth", ".bin", "old .pt", "no ending, torch"]
KINDS += ["folder", "folder of .bin", "shards", "shards of .bin", "index"]


@pytest.mark.parametrize("mapped", [False, True], ids=["", "mapped"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_checkpoint_is_the_same_mapping(
    kind: str, mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "MAP_FROM", 0 if mapped else 1 << 20)
    with Checkpoint.open(written(kind, tmp_path)) as checkpoint:
        assert set(checkpoint) == set(TENSORS)
        assert len(checkpoint) == len(TENSORS)
        for name, expected in TENSORS.items():
            info = checkpoint.info(name)
            assert (info.shape, info.weight_dtype) == (tuple(expected.shape), expected.dtype)
            assert info.dtype == str(expected.dtype)[len("torch.") :]
            found = checkpoint[name]
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
            found.zero_()  # the caller's own
            assert torch.equal(checkpoint[name], expected)
        assert "scale" in checkpoint
        assert "scales" not in checkpoint
        assert checkpoint.get("scales") is None
        with pytest.raises(KeyError, match=r"net\S*' holds no tensor 'scales'"):
            checkpoint["scales"]
        part = checkpoint.part("h.0")
        assert set(part) == {"W", "b"}
        assert torch.equal(part["W"], TENSORS["h.0.W"])
        with pytest.raises(CheckpointError, match=r"holds no tensors named 'h\.7\.…'"):
            checkpoint.part("h.7")
    with pytest.raises(CheckpointError, match="was closed before 'scale' was read"):
        checkpoint["scale"]
    with pytest.raises(CheckpointError, match="was closed before"):
        part["W"]


def test_metadata_and_config_are_those_of_the_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors", {"made by": "a test"})
    assert Checkpoint.open(tmp_path / "a.safetensors").metadata == {"made by": "a test"}
    folder = sharded(tmp_path / "b", "model.safetensors", save_file)
    assert Checkpoint.open(folder).config == {"model_type": "gpt2"}


def test_nothing_is_read_before_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of 64 GB that lies nowhere: only what is asked for can be read at all."""
    path = tmp_path / "huge.safetensors"
    big = 16 << 30
    header: dict[str, Any] = {
        "big": {"dtype": "F32", "shape": [big], "data_offsets": [0, 4 * big]},
        "small": {"dtype": "F32", "shape": [2], "data_offsets": [4 * big, 4 * big + 8]},
    }
    write_raw(path, header, b"")
    with path.open("r+b") as file:
        start = file.seek(0, os.SEEK_END)
        file.truncate(start + 4 * big)
        file.seek(0, os.SEEK_END)
        file.write(struct.pack("<2f", 1.0, 2.0))
    reads: list[int] = []
    read_at = tensor_files.read_at

    def counted(handle: int, begin: int, size: int, where: str) -> Tensor:
        reads.append(size)
        return read_at(handle, begin, size, where)

    monkeypatch.setattr(tensor_files, "read_at", counted)
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.info("big").shape == (big,)
        assert reads == []
        assert checkpoint["small"].tolist() == [1.0, 2.0]
    assert reads == [8]


def test_a_large_state_dict_is_mapped_and_read_by_tensor(tmp_path: Path) -> None:
    path = tmp_path / "large.pt"
    torch.save({f"w{i}": torch.full((1 << 20,), float(i)) for i in range(8)}, path)
    before = resident()
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.info("w7").shape == (1 << 20,)
        assert resident() - before < 16 << 20, "the file has 32 MiB"
        assert float(checkpoint["w3"].mean()) == 3.0


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_what_is_no_weights_is_listed_but_not_read(tmp_path: Path) -> None:
    path = tmp_path / "mixed.safetensors"
    save_file({"W": torch.ones(2), "ids": torch.arange(3), "mask": torch.ones(2) > 0}, path)
    checkpoint = Checkpoint.open(path)
    assert {name: checkpoint.info(name).dtype for name in checkpoint} == {
        "W": "float32",
        "ids": "int64",
        "mask": "bool",
    }
    words = r"mixed\.safetensors': 'ids' holds int64, weights are float64, float32, float16"
    with pytest.raises(CheckpointError, match=words):
        checkpoint["ids"]
    header = {"W": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}
    write_raw(tmp_path / "f4.safetensors", header, bytes(2))
    checkpoint = Checkpoint.open(tmp_path / "f4.safetensors")
    assert checkpoint.info("W").dtype == "F4"
    with pytest.raises(CheckpointError, match="'W' holds F4, weights are"):
        checkpoint["W"]
    torch.save({"ids": torch.arange(3), "s": torch.ones(2, 2).to_sparse()}, tmp_path / "ids.pt")
    checkpoint = Checkpoint.open(tmp_path / "ids.pt")
    for name, why in (("ids", "holds int64"), ("s", "is a sparse_coo tensor")):
        with pytest.raises(CheckpointError, match=rf"ids\.pt': '{name}' {why}"):
            checkpoint[name]
