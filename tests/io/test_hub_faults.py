"""A hub that fails: no verdict from incomplete data, no long silence, nothing outside its cache."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from huggingface_hub import file_download
from huggingface_hub.utils import _http

import transformer_nfn
from hub_server import FAULTS, Hub, into_shards, read_folder
from tnfn_command import Done, tnfn
from transformer_nfn.io import hub as hub_module
from transformer_nfn.io.hub import commit_of
from transformer_nfn.testing import write_example_checkpoint

A, B = "org/whole", "org/sharded"
REQUESTS = 14
"""Of a comparison: two listings, and two for each file."""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of the client, and for it, shortened by a hundred."""
    clock = SimpleNamespace(
        sleep=lambda seconds: time.sleep(min(seconds / 100, 1.0)), time=time.time,
        monotonic=time.monotonic,
    )  # fmt: skip
    monkeypatch.setattr(_http, "time", clock)
    monkeypatch.setattr(file_download, "time", clock)
    monkeypatch.setattr(hub_module, "SILENCE", 0.4)


def at_request(number: int, fault: str, *, once: bool) -> Callable[[str, str], str | None]:
    """What spoils one request, or all from it on."""
    seen = [0]

    def spoil(method: str, path: str) -> str | None:
        if "agent-harnesses" in path:
            return None
        seen[0] += 1
        hit = seen[0] == number or (seen[0] > number and not once)
        return fault if hit else None

    return spoil


def put_pair(hub: Hub, folder: Path) -> None:
    """One model in two repositories, once in shards."""
    hub.put(A, write_example_checkpoint(folder / "a"))
    hub.put(B, into_shards(write_example_checkpoint(folder / "b")))


def compare(cwd: Path) -> Done:
    commit_of.cache_clear()
    before = read_folder(cwd.parent)
    start = time.monotonic()
    done = tnfn("compare", A, B, "--json")
    assert time.monotonic() - start < 30
    cache = "hub/"
    after = {name for name in read_folder(cwd.parent) if not name.startswith(cache)}
    assert after == {name for name in before if not name.startswith(cache)}
    return done


def check(hub: Hub, cwd: Path, fault: str, number: int, *, once: bool) -> bool:
    """Compare with a fault, and again without; returns whether there was a verdict at once."""
    hub.spoil = at_request(number, fault, once=once)
    done = compare(cwd)
    assert done.returncode in (0, 2), done
    if done.returncode == 2:
        error = done.stderr.splitlines()[-1]
        assert error.startswith("error: ")
        assert any(name in error for name in (A, B))
        assert json.loads(done.stdout)["exit_code"] == 2
    hub.spoil = lambda method, path: None
    for thread in threading.enumerate():
        if thread.name == "hub":  # given up, it holds the client's lock on a file
            thread.join()
    again = compare(cwd)
    assert json.loads(again.stdout)["verdict"] == "same", again
    assert done.returncode == 2 or done.stdout == again.stdout
    return done.returncode == 0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "cwd"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_download(hub: Hub, place: Path, tmp_path: Path, fault: str) -> None:
    put_pair(hub, tmp_path)
    recovered = check(hub, place, fault, 6, once=True)
    assert recovered or fault not in ("cut", "close", "429", "trickle")


@pytest.mark.nightly
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("part", range(4))
def test_two_hundred_faults(hub: Hub, place: Path, tmp_path: Path, part: int) -> None:
    put_pair(hub, tmp_path)
    ends = []
    for seed in range(50 * part, 50 * (part + 1)):
        chance = Random(seed)
        fault, number = chance.choice(FAULTS), chance.randint(1, REQUESTS)
        shutil.rmtree(tmp_path / "hub", ignore_errors=True)
        ends.append(check(hub, place, fault, number, once=chance.random() < 0.5))
    assert any(ends)
    assert not all(ends)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("number", range(1, REQUESTS + 1))
def test_a_branch_that_moves_while_it_is_read(
    hub: Hub, place: Path, tmp_path: Path, number: int
) -> None:
    put_pair(hub, tmp_path)
    seen = [0]

    def move(method: str, path: str) -> None:
        seen[0] += 1
        if seen[0] == number:
            hub.put(A, write_example_checkpoint(tmp_path / "moved-a", 1))
            hub.put(B, into_shards(write_example_checkpoint(tmp_path / "moved-b", 1)))

    hub.spoil = move
    done = tnfn("compare", A, B, "--json")
    # Both of one time are the same; whole files of two times are unrelated; never a mixture.
    verdict = json.loads(done.stdout)["verdict"]
    listings = [i for i, r in enumerate(hub.requests, 1) if "/api/models/" in r]
    between = listings[0] < number <= listings[1]
    assert verdict == ("unrelated" if between else "same")


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["stall", "429 for an hour", "503"])
def test_the_command_ends_within_thirty_seconds(hub: Hub, tmp_path: Path, fault: str) -> None:
    put_pair(hub, tmp_path)
    hub.spoil = at_request(3, fault, once=False)
    words = [sys.executable, "-m", "transformer_nfn", "compare", A, B]
    hub.stall = 60
    source = str(Path(transformer_nfn.__file__).parents[1])
    settings = {
        "PYTHONPATH": source,
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "",
    }
    with subprocess.Popen(
        words, env={**os.environ, **settings}, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as command:
        assert command.stderr is not None
        assert "asking the hub" in command.stderr.readline()
        start = time.monotonic()
        *_, last = command.stderr
        assert command.wait() == 2
        assert f"'{A}' cannot be read" in last
        assert time.monotonic() - start < 30
