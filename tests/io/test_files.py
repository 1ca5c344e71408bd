"""Atomic writes leave the old file or the new one."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.io.files import atomic_file, atomic_folder, sweep, write_bytes, write_text
from transformer_nfn.io.tensor_files import read_tensors, write_tensors
from transformer_nfn.networks import save_network
from transformer_nfn.spaces import multi_head

KILLED = """
import os, signal, sys
from pathlib import Path
from transformer_nfn.io import files

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

files.os.{moment} = die
files.write_text(Path(sys.argv[1]), "new")
"""


@pytest.mark.parametrize("moment", [pytest.param("fsync", marks=pytest.mark.nightly), "replace"])
def test_a_writer_killed_before_the_rename_leaves_the_old_file(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "run.json"
    write_text(path, "old")
    code = KILLED.format(moment=moment)
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2, "what it had written lies beside"
    (tmp_path / ".hidden").write_text("the user's own")
    sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".hidden", "run.json"]


def test_the_next_writer_of_a_file_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    for left in (".0123abcd.beside.run.json", ".0123abcd.beside.folder/half", ".12345678.beside.x"):
        (tmp_path / left).parent.mkdir(exist_ok=True)
        (tmp_path / left).write_text("half")
    write_text(tmp_path / "run.json", "new")
    with atomic_folder(tmp_path) as made:
        write_text(made / "sub" / "a", "1")
    assert {p.name for p in tmp_path.iterdir()} == {"run.json", "sub", ".12345678.beside.x"}
    sweep(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"run.json", "sub"}


def test_what_another_writer_has_not_finished_is_not_swept(tmp_path: Path) -> None:
    with atomic_folder(tmp_path) as made, atomic_file(tmp_path / "b") as beside:
        (made / "a").write_text("all of it")
        beside.write_text("all of it")
        sweep(tmp_path)
        write_text(tmp_path / "b", "another's")
        assert len(list(tmp_path.iterdir())) == 3
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == dict.fromkeys("ab", "all of it")


def test_equal_tensors_and_metadata_are_equal_files(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2), "n": torch.ones(3, dtype=torch.int8), "w": torch.eye(3)[:, 1:]}
    metadata = {f"key {i}": "ü" for i in range(20)}
    for path in (tmp_path / "0", tmp_path / "1"):
        write_tensors(path, tensors, metadata)
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()
    read, stated = read_tensors(tmp_path / "0")
    theirs = safetensors.torch.load_file(tmp_path / "0")
    assert stated == metadata
    assert all(torch.equal(w, file[name]) for name, w in tensors.items() for file in (read, theirs))


def test_bytes_are_on_disk_before_the_name_and_the_name_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        fsync(handle)

    def renamed(old: Path, new: Path) -> None:
        done.append("rename")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write_bytes(tmp_path / "a", b"1")
    assert done == ["file", "rename", "folder"]


def test_an_error_in_the_writer_leaves_the_old_file_and_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "figure.svg"
    write_text(path, "old")

    def draw() -> None:
        with atomic_file(path) as beside:
            assert beside.suffix == ".svg", "some writers go by the ending"
            beside.write_text("half")
            raise KeyError("a bug")

    with pytest.raises(KeyError):
        draw()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TransformerNFNError, match=r"a' cannot be written: No space left on device"):
        write_bytes(tmp_path / "a", b"1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["net.safetensors", "net.pt"])
def test_files_get_the_usual_mode_and_older_ones_keep_theirs(tmp_path: Path, name: str) -> None:
    space = multi_head(4, 2, 2, 2)
    path = tmp_path / name
    before = os.umask(0o027)
    try:
        save_network(path, space, space.randn(1))
        assert path.stat().st_mode & 0o777 == 0o640
        path.chmod(0o604)
        save_network(path, space, space.randn(1))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o604


def test_a_link_stays_a_link_and_the_file_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    real, link = tmp_path / "elsewhere" / "real.txt", tmp_path / "link.txt"
    link.symlink_to("elsewhere/real.txt")
    for text in ("new", "newer"):
        write_text(link, text)
        assert link.is_symlink()
        assert real.read_text() == text
    assert [p.name for p in real.parent.iterdir()] == ["real.txt"]


def test_what_is_no_regular_file_is_refused_and_stays(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(TransformerNFNError, match="is not a regular file"):
            write_text(path, "new")
    for path in (tmp_path, Path(), Path("/")):
        with pytest.raises(TransformerNFNError, match="is a folder"):
            write_text(path, "new")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(TransformerNFNError, match="cannot be written"):
        write_text(tmp_path / "loop", "new")
    assert pipe.is_fifo()
    assert link.is_symlink()


def test_a_failure_leaves_no_folders(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("new/deep", "empty"):
        for writer in (atomic_file(tmp_path / folder / "x"), atomic_folder(tmp_path / folder)):
            with pytest.raises(ZeroDivisionError), writer as beside:
                (beside / "part" if beside.is_dir() else beside).write_text(f"half {1 / 0}")
    assert [p.name for p in tmp_path.rglob("*")] == ["empty"]


@pytest.mark.parametrize("folder", ["new/deep", "."])
def test_a_folder_appears_with_all_that_was_written(tmp_path: Path, folder: str) -> None:
    with atomic_folder(tmp_path / folder) as made:
        write_text(made / "sub" / "a", "1")
        write_text(made / "b", "2")
    found = {p.relative_to(tmp_path / folder).as_posix() for p in (tmp_path / folder).rglob("*")}
    assert found == {"sub", "sub/a", "b"}


def test_an_error_in_a_folder_names_the_folder_that_was_meant(tmp_path: Path) -> None:
    place = tmp_path / "out"
    with pytest.raises(TransformerNFNError, match=f"'{place}' is a"), atomic_folder(place) as made:
        write_text(made, "1")
    assert not list(tmp_path.iterdir())
