"""Builds that are resumed, shared, killed, or on a Ray cluster give the same zoo."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from transformer_nfn.zoo import (
    BuildOptions,
    SizeGroup,
    StoreError,
    Zoo,
    ZooError,
    build,
    build_mixed,
)
from transformer_nfn.zoo.store.folder import Checksums
from transformer_nfn.zoo.training.grid import grid
from transformer_nfn.zoo.verify import verify

from .conftest import SMALL

RAY_QUIET = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_AUTH_MODE": "disabled"}


def assert_same(a: Zoo, b: Zoo) -> None:
    """Equal runs, no duplicates, equal weights row for row, and equal files."""
    for column in ("run", "epoch", "best", "shard", "row", "checksum", "test_accuracy"):
        assert np.array_equal(a.table[column], b.table[column]), column
    keys = list(zip(a.table["run"], a.table["epoch"], a.table["best"], strict=True))
    assert len(set(keys)) == len(keys)
    rows = np.arange(len(a))
    x, y = a.weights(rows), b.weights(rows)
    assert all(torch.equal(x[k], y[k]) for k in x)
    for name in ("zoo.json", "checksums.json", "index.parquet", "shards"):
        for path in (a.path / "shards").iterdir() if name == "shards" else [a.path / name]:
            assert path.read_bytes() == (b.path / path.relative_to(a.path)).read_bytes(), path


def start(out: Path, options: BuildOptions, environment: dict[str, str], prelude: str = ""):
    """A build in its own process group."""
    code = f"import json, sys; from transformer_nfn.zoo import *; {prelude}\n"
    code += "build(sys.argv[1], BuildOptions(**json.loads(sys.argv[2])))"
    return subprocess.Popen(
        [sys.executable, "-c", code, str(out), json.dumps(vars(options))],
        env=environment | RAY_QUIET,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(builder: subprocess.Popen[str], seconds: float = 240) -> str:
    """The output of a build that succeeds."""
    text, _ = builder.communicate(timeout=seconds)
    assert builder.returncode == 0, text
    return text


def test_finished_shards_are_never_redone(small_zoo: Zoo, tmp_path: Path) -> None:
    out = Path(shutil.copytree(small_zoo.path, tmp_path / "zoo"))
    (out / "shards" / "00001.safetensors").unlink()
    (out / "index.parquet").unlink()
    before = {p.name: p.stat().st_mtime_ns for p in (out / "shards").iterdir()}
    assert not Zoo.open(out).finished
    zoo = build(out, SMALL)
    after = {p.name: p.stat().st_mtime_ns for p in (out / "shards").iterdir()}
    assert {k: after[k] for k in before} == before
    assert_same(small_zoo, zoo)


@pytest.mark.nightly
def test_two_builders_share_the_work(
    small_zoo: Zoo, tmp_path: Path, environment: dict[str, str]
) -> None:
    out = tmp_path / "zoo"
    builders = [start(out, SMALL, environment) for _ in range(2)]
    for builder in builders:
        finish(builder)
    assert_same(small_zoo, Zoo.open(out))
    assert not list((out / "shards").glob(".*"))


def kill_and_resume(
    reference: Zoo, out: Path, options: BuildOptions, kills: int, environment: dict[str, str]
) -> None:
    """Kill the process group of a build at random moments, then let it finish."""
    draw = random.Random(4)
    finished: set[str] = set()
    for _ in range(kills):
        builder = start(out, options, environment)
        time.sleep(draw.uniform(1.5, 5.5))
        os.killpg(builder.pid, signal.SIGKILL)
        builder.communicate()
        shards = {p.name for p in out.glob("shards/*.safetensors")}
        assert finished <= shards, "a finished shard was lost"
        finished = shards
    assert_same(reference, build(out, options))
    assert verify(out, sample=4).ok
    assert not list((out / "shards").glob(".*"))


def test_killed_and_resumed(small_zoo: Zoo, tmp_path: Path, environment: dict[str, str]) -> None:
    kill_and_resume(small_zoo, tmp_path / "zoo", SMALL, 1, environment)


@pytest.mark.nightly
def test_killed_ten_times_and_resumed(tmp_path: Path, environment: dict[str, str]) -> None:
    options = BuildOptions("digits", runs=48, epochs=3, batch=64, shard_runs=3, seed=5, workers=2)
    reference = build(tmp_path / "reference", options)
    kill_and_resume(reference, tmp_path / "zoo", options, 10, environment)


@pytest.mark.nightly
def test_the_shard_of_a_killed_worker_is_trained_again(small_zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "zoo"

    class Killer:
        killed = 0

        def begin(self, *_: object) -> None: ...
        def note(self, _: str) -> None: ...
        def finished(self, *_: object) -> None: ...

        def trained(self, _: int) -> None:
            if not self.killed:
                self.killed = _children()[0]
                os.kill(self.killed, signal.SIGKILL)

    killer = Killer()
    assert_same(small_zoo, build(out, replace(SMALL, workers=2), killer))
    assert killer.killed


def _children() -> list[int]:
    out = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            command = (path.parent / "cmdline").read_bytes()
            if b"training.local_engine" in command:
                out.append(int(path.parent.name))
    return out


def test_a_folder_of_another_zoo_or_of_other_files_is_rejected(
    small_zoo: Zoo, tmp_path: Path
) -> None:
    for change, words in (
        ({"runs": 11}, "runs 12, asked for 11; it can only grow"),
        ({"runs": None}, "runs 12, asked for 16000; it can only grow"),
        ({"seed": 4}, "seed 3, asked for 4"),
        ({"epochs": 3}, "epochs 2, asked for 3"),
        ({"seeds": "one"}, "seeds each, asked for one"),
    ):
        with pytest.raises(StoreError, match=f"holds another zoo: {words}"):
            build(small_zoo.path, replace(SMALL, **change))  # type: ignore[arg-type]
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match=r"holds other files \('thesis.tex'\)"):
        build(tmp_path, SMALL)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(StoreError, match="is a file"):
        build(tmp_path / "thesis.tex", SMALL)
    (tmp_path / "link").symlink_to(small_zoo.path / "shards" / "new")
    before = sorted(small_zoo.path.rglob("*"))
    for out in (small_zoo.path / "deep" / "er", tmp_path / "link"):
        for group in ({}, {"groups": (SizeGroup(4, 2, 1), SizeGroup(6, 2, 1))}):
            with pytest.raises(StoreError, match=f"lies in the zoo '{small_zoo.path}'"):
                (build_mixed if group else build)(out, SMALL, **group)  # type: ignore[operator]
    assert sorted(small_zoo.path.rglob("*")) == before


@pytest.mark.nightly
def test_more_runs_extend_a_zoo(small_zoo: Zoo, tmp_path: Path) -> None:
    out = shutil.copytree(small_zoo.path, tmp_path / "zoo")
    before = {path.name: path.read_bytes() for path in (out / "shards").iterdir()}
    larger = replace(SMALL, runs=20)
    grown = build(out, larger)
    assert all((out / "shards" / name).read_bytes() == data for name, data in before.items())
    assert (grown.finished, grown.metadata["runs"]) == (True, 20)
    old = len(small_zoo)
    assert grown.table["run"][:old].tolist() == small_zoo.table["run"].tolist()
    fresh = build(tmp_path / "fresh", larger)
    order = [np.lexsort([z.table[c] for c in ("best", "epoch", "run")]) for z in (grown, fresh)]
    for column in ("run", "epoch", "best"):
        assert np.array_equal(
            *(z.table[column][o] for z, o in zip((grown, fresh), order, strict=True))
        )
    left, right = (zoo.weights(rows) for zoo, rows in zip((grown, fresh), order, strict=True))
    assert all(torch.allclose(left[name], right[name], rtol=1e-3, atol=1e-4) for name in left)
    assert verify(out, sample=2).ok
    assert_same(grown, build(out, larger))


def test_a_zoo_of_other_runs_does_not_grow(small_zoo: Zoo, tmp_path: Path) -> None:
    out = shutil.copytree(small_zoo.path, tmp_path / "zoo")
    metadata = json.loads((out / "zoo.json").read_text())
    chosen = {run for shard in metadata["plan"] for run in shard}
    other = next(c.run for c in grid() if c.run not in chosen)
    metadata["plan"][0][0] = other
    Checksums(out).replace("zoo.json", json.dumps(metadata).encode())
    with pytest.raises(StoreError, match=f"cannot grow: its run {other} is none of the 13"):
        build(out, replace(SMALL, runs=13))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "imagenet"}, "unknown task 'imagenet'"),
        ({"runs": 0}, "between 1 and 16,000"),
        ({"epochs": 0}, "'epochs' expected a whole number at least 1, found 0"),
        ({"dtype": "int8"}, "dtype"),
        ({"select": "luck"}, "'select' expected one of held, test, found 'luck'"),
        ({"shard_runs": 0}, "shard runs"),
        ({"until": 80}, "'until' expected one of 50, 75, 100, found 80"),
        ({"seeds": "two"}, "seeds must be one or each, found .two."),
        ({"device": "tpu"}, "device must be"),
        ({"engine": "slurm"}, "unknown engine"),
        ({"workers": 0}, "workers"),
        ({"gpu_share": 0.5}, "below 1 with the engine ray on cuda only, found 0.5 with local"),
        ({"gpu_share": 0.5, "engine": "ray", "device": "cpu"}, "found 0.5 with ray on cpu"),
        ({"address": "auto"}, "an address is for the engine ray, found local"),
        ({"vectors": "/dev/null"}, "vectors are for tasks of text: digits are images"),
        ({"data": "/"}, "data is for other tasks: the digits come with scikit-learn"),
        ({"gpu_share": 1.5, "engine": "ray"}, "at most 1, .* found 1.5 with ray"),
        ({"data": "/nowhere/at/all"}, "does not exist"),
        ({"path": "magic"}, "path must be"),
    ],
)
def test_invalid_options_write_nothing(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    out = tmp_path / "zoo"
    with pytest.raises(ZooError, match=message):
        build(out, replace(SMALL, **change))  # type: ignore[arg-type]
    assert not out.exists()


RAY = replace(SMALL, engine="ray", workers=2)
_KILL_A_WORKER = """
import os, signal, threading, time
from pathlib import Path
def kill():
    while True:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if path.read_bytes().startswith(b"ray::train_shard"):
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    print("killed", flush=True)
                    return
            except OSError:
                pass
        time.sleep(0.05)
threading.Thread(target=kill, daemon=True).start()
"""


@pytest.mark.nightly
def test_ray_gives_the_same_zoo_and_a_killed_worker_is_replaced(
    small_zoo: Zoo, tmp_path: Path, environment: dict[str, str]
) -> None:
    assert "killed" in finish(start(tmp_path / "zoo", RAY, environment, _KILL_A_WORKER))
    assert_same(small_zoo, Zoo.open(tmp_path / "zoo"))


@pytest.mark.nightly
def test_a_killed_ray_driver_is_resumed(tmp_path: Path, environment: dict[str, str]) -> None:
    options = BuildOptions("digits", runs=24, epochs=6, batch=64, shard_runs=2, seed=3, workers=2)
    reference = build(tmp_path / "reference", options)
    out = tmp_path / "zoo"
    driver = start(out, replace(options, engine="ray"), environment)
    begun = time.monotonic()
    while not list(out.glob("shards/*.safetensors")) and time.monotonic() - begun < 200:
        time.sleep(0.1)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.communicate()
    written = {p.name: p.stat().st_mtime_ns for p in out.glob("shards/*.safetensors")}
    assert 0 < len(written) < 12
    finish(start(out, replace(options, engine="ray"), environment))
    after = {p.name: p.stat().st_mtime_ns for p in out.glob("shards/*.safetensors")}
    assert {name: after[name] for name in written} == written
    assert_same(reference, Zoo.open(out))


@pytest.mark.nightly
def test_a_cluster_loses_no_run_and_waits_for_one_shard_at_most(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """The simulated cluster of benchmarks/cluster.py, whose workers sleep in place of training."""
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    code = "import json, sys; from pathlib import Path; import cluster\n"
    code += "print(json.dumps(cluster.simulate(4, 3.0, 1, Path(sys.argv[1]))))"
    path = os.pathsep.join([str(benchmarks), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300,
        env=environment | RAY_QUIET | {"PYTHONPATH": path}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr  # it compares the runs of the zoo with its plan
    measured = json.loads(done.stdout.splitlines()[-1])
    assert (measured["shards"], measured["killed"], measured["begun"]) == (16, 1, 17)
    assert measured["tail"] < measured["longest_shard"] + 2


@pytest.mark.usefixtures("no_ray_cluster")
def test_a_missing_cluster_or_library_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ZooError, match=r"no Ray cluster at 10\.0\.0\.1:1"):
        build(tmp_path / "zoo", replace(RAY, address="10.0.0.1:1"))
    monkeypatch.setitem(sys.modules, "ray", None)  # type: ignore[arg-type]
    with pytest.raises(ZooError, match=r"pip install 'transformer-nfn\[ray\]'"):
        build(tmp_path / "zoo", RAY)


def test_a_driver_without_a_gpu_asks_for_a_share_of_one_per_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def end(_: object) -> None:
        raise ZooError("collected")

    def options(**resources: object) -> SimpleNamespace:
        asked.update(resources)
        return SimpleNamespace(remote=lambda *arguments: arguments[1][0].run)

    ray = SimpleNamespace(
        is_initialized=lambda: True, put=lambda task: task, get=end,
        remote=lambda work: SimpleNamespace(options=options),
        wait=lambda references, timeout: (references[:1], references[1:]),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ZooError, match="collected"):
        build(tmp_path / "zoo", replace(RAY, device="cuda", gpu_share=0.5))
    assert (asked["num_gpus"], asked["num_cpus"]) == (0.5, 1)


def test_one_checkpoint_alone_is_that_of_a_whole_build(tmp_path):
    options = BuildOptions(task="digits", runs=6, epochs=4, samples=300, workers=1)
    alone = build(tmp_path / "alone", replace(options, keep=75))
    whole = build(tmp_path / "whole", options)
    rows = whole.select(percent=75)
    assert len(alone) == len(rows) == 6
    for name in ("run", "epoch", "train_accuracy", "held_accuracy", "test_loss", "test_accuracy"):
        assert alone.table[name].tolist() == whole.table[name][rows].tolist()
    ours, theirs = alone.weights(range(6)), whole.weights(rows)
    assert all(torch.equal(w, theirs[name]) for name, w in ours.items())
    assert not alone.table["best"].any()
    build(tmp_path / "alone", replace(options, keep=75))
    for changes, message in (
        ({"keep": 60}, r"keep expected one of \(50, 75, 100\), found 60"),
        ({"keep": 50, "until": 75}, "keep 50 ends the training there, found until 75"),
        ({"keep": 50}, "holds another zoo: keep 75, asked for 50"),
        ({}, "holds another zoo: keep 75, asked for None"),
    ):
        with pytest.raises(ZooError, match=message):
            build(tmp_path / "alone", replace(options, **changes))
