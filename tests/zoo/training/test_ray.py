"""Builds on a real local Ray cluster of two workers: the same zoo, whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from transformer_nfn.zoo import Settings, Zoo, ZooError, build

from ..conftest import SMALL
from .test_build import same

_BUILD = """
import sys, json
from transformer_nfn.zoo import Settings, build
settings = Settings(**json.loads(sys.argv[2]))
{prelude}
build(sys.argv[1], settings, engine="ray", workers=2, progress=progress)
"""


def run(out: Path, settings: Settings, environment: dict[str, str], prelude: str):
    """A driver in its own process group; Ray's own warnings are not ours to judge."""
    code = _BUILD.format(prelude=prelude)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(out), json.dumps(vars(settings))],
        env=environment | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_AUTH_MODE": "disabled"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(driver: subprocess.Popen[str], seconds: float = 240) -> str:
    """The driver's output, once it is done."""
    text, _ = driver.communicate(timeout=seconds)
    assert driver.returncode == 0, text
    return text


def test_ray_gives_the_same_zoo(
    small_zoo: Zoo, tmp_path: Path, environment: dict[str, str]
) -> None:
    finish(run(tmp_path / "zoo", SMALL, environment, "progress = None"))
    same(small_zoo, Zoo.open(tmp_path / "zoo"))


_KILL_A_WORKER = """
import os, signal, threading, time
from pathlib import Path
def kill():
    while True:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if path.read_bytes().startswith(b"ray::_work"):
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    print("killed", flush=True)
                    return
            except OSError:
                pass
        time.sleep(0.05)
threading.Thread(target=kill, daemon=True).start()
progress = None
"""


@pytest.mark.nightly
def test_a_killed_ray_worker_is_replaced(
    small_zoo: Zoo, tmp_path: Path, environment: dict[str, str]
) -> None:
    text = finish(run(tmp_path / "zoo", SMALL, environment, _KILL_A_WORKER))
    assert "killed" in text
    same(small_zoo, Zoo.open(tmp_path / "zoo"))


@pytest.mark.nightly
def test_a_killed_ray_driver_is_resumed(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    settings = Settings("digits", runs=24, epochs=6, batch=64, shard_runs=2, seed=3)
    reference = build(tmp_path / "reference", settings, workers=2)
    out = tmp_path / "zoo"
    driver = run(out, settings, environment, "progress = None")
    start = time.monotonic()
    while not list(out.glob("shards/*.safetensors")) and time.monotonic() - start < 200:
        time.sleep(0.1)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.communicate()
    written = {p.name: p.stat().st_mtime_ns for p in out.glob("shards/*.safetensors")}
    assert 0 < len(written) < 12
    finish(run(out, settings, environment, "progress = None"))
    after = {p.name: p.stat().st_mtime_ns for p in out.glob("shards/*.safetensors")}
    assert {name: after[name] for name in written} == written
    same(reference, Zoo.open(out))


@pytest.mark.usefixtures("no_ray_cluster")
def test_no_cluster_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match=r"no Ray cluster at 10\.0\.0\.1:1"):
        build(tmp_path / "zoo", SMALL, engine="ray", address="10.0.0.1:1")


def test_without_ray_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # type: ignore[arg-type]
    with pytest.raises(ZooError, match=r"pip install 'transformer-nfn\[ray\]'"):
        build(tmp_path / "zoo", SMALL, engine="ray")
