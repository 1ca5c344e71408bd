"""Builds: resumed, shared between builders, killed; the zoo comes out the same."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from transformer_nfn.zoo import Settings, StoreError, Zoo, ZooError, build
from transformer_nfn.zoo.store.folder import Checksums
from transformer_nfn.zoo.training.grid import grid
from transformer_nfn.zoo.verify import verify

from ..conftest import SMALL


def same(a: Zoo, b: Zoo) -> None:
    """Equal runs, no duplicates, equal weights row for row."""
    for column in ("run", "epoch", "best", "shard", "row", "checksum", "test_accuracy"):
        assert np.array_equal(a.table[column], b.table[column]), column
    keys = list(zip(a.table["run"], a.table["epoch"], a.table["best"], strict=True))
    assert len(set(keys)) == len(keys)
    rows = np.arange(len(a))
    x, y = a.weights(rows), b.weights(rows)
    assert all(torch.equal(x[k], y[k]) for k in x)


def start(out: Path, settings: Settings, environment: dict[str, str], workers: int = 1):
    """A build in its own process group, as a user's command is."""
    words = {
        "task": settings.task,
        "runs": settings.runs,
        "epochs": settings.epochs,
        "batch": settings.batch,
        "seed": settings.seed,
        "shard-runs": settings.shard_runs,
        "workers": workers,
        "out": out,
    }
    options = [str(x) for k, v in words.items() if v is not None for x in (f"--{k}", v)]
    code = "from transformer_nfn.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "zoo", "build", *options],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def test_processes_give_the_same_zoo(small_zoo: Zoo, tmp_path: Path) -> None:
    same(small_zoo, build(tmp_path / "zoo", SMALL, workers=2))


def test_finished_shards_are_never_redone(small_zoo: Zoo, tmp_path: Path) -> None:
    out = Path(shutil.copytree(small_zoo.path, tmp_path / "zoo"))
    (out / "shards" / "00001.safetensors").unlink()
    (out / "index.parquet").unlink()
    before = {p.name: p.stat().st_mtime_ns for p in (out / "shards").iterdir()}
    assert not Zoo.open(out).finished
    zoo = build(out, SMALL, workers=1)
    after = {p.name: p.stat().st_mtime_ns for p in (out / "shards").iterdir()}
    assert {k: after[k] for k in before} == before
    same(small_zoo, zoo)


def test_two_builders_share_the_work(
    small_zoo: Zoo, tmp_path: Path, environment: dict[str, str]
) -> None:
    out = tmp_path / "zoo"
    builders = [start(out, SMALL, environment) for _ in range(2)]
    for builder in builders:
        assert builder.wait(120) == 0, builder.stderr.read()
        builder.stderr.close()
    same(small_zoo, Zoo.open(out))
    assert not list((out / "shards").glob(".*"))


def kill_and_resume(
    reference: Zoo, out: Path, settings: Settings, kills: int, environment: dict[str, str]
) -> None:
    """Kills a build with SIGKILL, whole process group, at random moments; then lets it finish."""
    draw = random.Random(4)
    finished: set[str] = set()
    for _ in range(kills):
        builder = start(out, settings, environment, workers=2)
        time.sleep(draw.uniform(1.5, 5.5))
        os.killpg(builder.pid, signal.SIGKILL)
        builder.wait()
        builder.stderr.close()
        shards = {p.name for p in out.glob("shards/*.safetensors")}
        assert finished <= shards, "a finished shard was lost"
        finished = shards
    zoo = build(out, settings, workers=2)
    same(reference, zoo)
    assert verify(out, sample=4).ok
    assert not list((out / "shards").glob(".*"))


def test_killed_twice_and_resumed(
    small_zoo: Zoo, tmp_path: Path, environment: dict[str, str]
) -> None:
    kill_and_resume(small_zoo, tmp_path / "zoo", SMALL, 2, environment)


@pytest.mark.nightly
def test_killed_ten_times_and_resumed(tmp_path: Path, environment: dict[str, str]) -> None:
    settings = Settings("digits", runs=48, epochs=3, batch=64, shard_runs=3, seed=5)
    reference = build(tmp_path / "reference", settings, workers=2)
    kill_and_resume(reference, tmp_path / "zoo", settings, 10, environment)


def test_a_killed_worker_is_made_up_for(small_zoo: Zoo, tmp_path: Path) -> None:
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
    same(small_zoo, build(out, SMALL, workers=2, progress=killer))
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"runs": 11}, "runs 12, asked for 11; it can only grow"),
        ({"runs": None}, "runs 12, asked for 16000; it can only grow"),
        ({"seed": 4}, "seed 3, asked for 4"),
        ({"epochs": 3}, "epochs 2, asked for 3"),
    ],
)
def test_a_folder_of_another_zoo_is_refused(
    small_zoo: Zoo, change: dict[str, int], words: str
) -> None:
    with pytest.raises(StoreError, match=f"holds another zoo: {words}"):
        build(small_zoo.path, Settings(**{**vars(SMALL), **change}), workers=1)


def test_more_runs_make_a_zoo_grow_and_leave_what_it_has(small_zoo: Zoo, tmp_path: Path) -> None:
    out = shutil.copytree(small_zoo.path, tmp_path / "zoo")
    before = {path.name: path.read_bytes() for path in (out / "shards").iterdir()}
    larger = Settings(**{**vars(SMALL), "runs": 20})
    grown = build(out, larger, workers=1)
    assert all((out / "shards" / name).read_bytes() == data for name, data in before.items())
    assert (grown.finished, grown.about["runs"]) == (True, 20)
    old = len(small_zoo)
    assert grown.table["run"][:old].tolist() == small_zoo.table["run"].tolist()
    fresh = build(tmp_path / "fresh", larger, workers=1)
    keys = [
        {
            (run, epoch, best): row
            for row, (run, epoch, best) in enumerate(
                zip(*(zoo.table[c].tolist() for c in ("run", "epoch", "best")), strict=True)
            )
        }
        for zoo in (grown, fresh)
    ]
    assert keys[0].keys() == keys[1].keys()
    assert set(grown.crashed) == set(fresh.crashed)
    wanted = list(keys[0])
    left, right = (
        zoo.weights([rows[key] for key in wanted])
        for zoo, rows in zip((grown, fresh), keys, strict=True)
    )
    assert all(torch.allclose(left[name], right[name], rtol=1e-3, atol=1e-4) for name in left)
    assert verify(out, sample=2).ok
    again = build(out, larger, workers=1)
    same(grown, again)


def test_a_zoo_of_other_runs_does_not_grow(small_zoo: Zoo, tmp_path: Path) -> None:
    out = shutil.copytree(small_zoo.path, tmp_path / "zoo")
    about = json.loads((out / "zoo.json").read_text())
    chosen = {run for shard in about["plan"] for run in shard}
    other = next(c.run for c in grid() if c.run not in chosen)
    about["plan"][0][0] = other
    Checksums(out).replace("zoo.json", json.dumps(about).encode())
    with pytest.raises(StoreError, match=f"cannot grow: its run {other} is none of the 13"):
        build(out, Settings(**{**vars(SMALL), "runs": 13}), workers=1)


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match=r"holds other files \('thesis.tex'\)"):
        build(tmp_path, SMALL)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(StoreError, match="is a file"):
        build(tmp_path / "thesis.tex", SMALL)


@pytest.mark.parametrize(
    ("change", "keywords", "words"),
    [
        ({"task": "imagenet"}, {}, "unknown task 'imagenet'"),
        ({"runs": 0}, {}, "between 1 and 16,000"),
        ({"epochs": 0}, {}, "epochs"),
        ({"dtype": "int8"}, {}, "dtype"),
        ({"select": "luck"}, {}, "selected"),
        ({"shard_runs": 0}, {}, "shard runs"),
        ({"until": 80}, {}, "until must be a checkpoint .50, 75, 100 percent., found 80"),
        ({"seeds": "two"}, {}, "seeds must be one or each, found .two."),
        ({}, {"device": "tpu"}, "device must be"),
        ({}, {"engine": "slurm"}, "unknown engine"),
        ({}, {"workers": 0}, "workers"),
        ({}, {"data": "/nowhere/at/all"}, "does not exist"),
        ({}, {"path": "magic"}, "path must be"),
    ],
)
def test_bad_settings_are_refused_and_nothing_is_written(
    tmp_path: Path, change: dict[str, object], keywords: dict[str, object], words: str
) -> None:
    out = tmp_path / "zoo"
    with pytest.raises(ZooError, match=words):
        build(out, Settings(**{**vars(SMALL), **change}), **keywords)  # type: ignore[arg-type]
    assert not out.exists()
