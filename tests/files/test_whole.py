"""Files appear whole or not at all, whatever happens to the writer."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.files.whole import sweep, whole_file, write_bytes, write_text

KILLED = """
import os, signal, sys
from pathlib import Path
from transformer_nfn.files import whole

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

whole.os.{moment} = die
whole.write_text(Path(sys.argv[1]), "new")
"""


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_writer_killed_before_the_rename_leaves_the_old_file(
    tmp_path: Path, moment: str
) -> None:
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
    done.clear()
    with whole_file(tmp_path / "b", durable=False) as beside:
        beside.write_bytes(b"2")
    assert done == ["rename"]


def test_a_folder_that_cannot_be_synced_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def picky(handle: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EINVAL, "not for folders")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", picky)
    write_text(tmp_path / "a", "kept")
    assert (tmp_path / "a").read_text() == "kept"


def test_an_error_in_the_writer_leaves_the_old_file_and_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "figure.svg"
    write_text(path, "old")

    def draw() -> None:
        with whole_file(path) as beside:
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
