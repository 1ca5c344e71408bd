"""How a build on a Ray cluster of 64 GPUs spends its time, simulated on one machine.

Ray's scheduler, the driver of `tnfn zoo build --engine ray`, its claims, shards and index are the
real ones. The GPUs are simulated: a worker sleeps while its shard would train, and returns weights
that the driver made up. Every shard takes 0.9 to 1.1 of ``--seconds``, the last but a few one
three times that, and some workers are killed in their sleep.

Measured on their own, at the size of 256 MNIST networks and four checkpoints each: the start of
a worker, data through Ray, a shard from worker to disk, the index of 16,000 runs. From these and
the measured speed of one GPU (docs/performance.md) follows the cost of larger builds.

    python benchmarks/cluster.py --data MNIST_FOLDER     # also writes results/cluster.json
    python benchmarks/cluster.py --cost --speed 232
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import ray
import torch

from transformer_nfn.known_tasks import KNOWN_TASKS
from transformer_nfn.paper.table_text import markdown_rows
from transformer_nfn.ray_cluster import one_core_task, task_result
from transformer_nfn.zoo import BuildOptions, NetworkSizes, Recipe, SizeGroup, Zoo, build
from transformer_nfn.zoo.store import Folder, write_shard
from transformer_nfn.zoo.store.shards import read_header
from transformer_nfn.zoo.training import ray_engine
from transformer_nfn.zoo.training.grid import Config, grid
from transformer_nfn.zoo.training.tasks import load_task
from transformer_nfn.zoo.training.trainer import Trained

SHARD_RUNS = 256
SHARDS_EACH = 4
STRAGGLER = 3.0
CHECKPOINTS = 4
QUIET = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_AUTH_MODE": "disabled"}
RESULT = Path(__file__).parent / "results" / "cluster.json"


def made_up(configs: list[Config], sizes: NetworkSizes, checkpoints: int = 1) -> Trained:
    """Random weights for some runs, with rows as a training gives them."""
    measured = dict.fromkeys(("train_accuracy", "held_accuracy", "test_loss", "test_accuracy"), 0.5)
    rows = [
        config.to_json()
        | {"crashed": False, "epoch": epoch, "percent": 25 * epoch, "best": False, **measured}
        for config in configs
        for epoch in range(1, checkpoints + 1)
    ]
    return Trained(rows, torch.randn(len(rows), sizes.num_weights))


def sleep_as_gpu(task: Any, trained: bytes, name: str, seconds: float, log: str) -> Any:
    """A worker: sleeps in place of training. Without torch, so that 64 fit on one machine."""
    begun = time.time()
    started = Path(log) / f"{name}-{os.getpid()}"
    started.write_text(json.dumps({"begun": begun, "processor": time.process_time()}))
    time.sleep(seconds)
    return trained, {"pid": os.getpid(), "begun": begun, "ended": time.time(), "slept": seconds}


class Simulation:
    """Takes the place of `one_core_task` and `task_result` in the engine."""

    def __init__(self, shards: int, seconds: float, log: Path) -> None:
        self.log = log
        draw = random.Random(0)
        self.seconds = [seconds * draw.uniform(0.9, 1.1) for _ in range(shards)]
        self.seconds[-3] = seconds * STRAGGLER
        self.made: dict[str, dict[str, Any]] = {}
        self.sizes = NetworkSizes.of(KNOWN_TASKS["digits"])

    def task(self, ray_: Any, work: Any, gpus: float, retries: int) -> Any:
        """Submits a sleeping worker for each shard, with the resources that the engine asks for."""
        self.sleeping = one_core_task(ray_, sleep_as_gpu, gpus, retries)
        return self

    def remote(self, task: Any, configs: list[Config], recipe: Any, options: Any) -> Any:
        """What the engine calls for each shard; the data travels as a reference."""
        name, seconds = configs[0].run, self.seconds.pop(0)
        trained = pickle.dumps(made_up(configs, self.sizes))
        return self.sleeping.remote([task], trained, name, seconds, str(self.log))

    def result(self, *arguments: Any) -> Any:
        """What the engine calls for a finished shard."""
        trained, made = task_result(*arguments)
        return pickle.loads(trained), made


def kill_workers(log: Path, workers: int, kills: int, killed: list[str]) -> None:
    """Kill some workers in their sleep, once all have begun."""
    while len(list(log.iterdir())) < workers:
        time.sleep(0.2)
    for started in random.Random(1).sample(sorted(log.iterdir()), kills):
        os.kill(int(started.name.rpartition("-")[2]), signal.SIGKILL)
        killed.append(started.name)


def simulate(workers: int, seconds: float, kills: int, folder: Path) -> dict[str, Any]:
    """Build a zoo on simulated GPUs, and compare its rows with the plan."""
    shards, log, killed = SHARDS_EACH * workers, folder / "log", list[str]()
    log.mkdir(parents=True)
    simulation = Simulation(shards, seconds, log)
    ray_engine.one_core_task = simulation.task  # type: ignore[assignment]
    ray_engine.task_result = simulation.result  # type: ignore[assignment]
    begun = time.time()
    ray.init(num_cpus=workers, num_gpus=workers / 2, include_dashboard=False, log_to_driver=False)
    killer = threading.Thread(target=kill_workers, args=(log, workers, kills, killed), daemon=True)
    killer.start()
    # Two workers share a GPU.
    options = BuildOptions(
        "digits", runs=4 * shards, epochs=1, shard_runs=4, device="cuda", engine="ray",
        gpu_share=0.5, workers=2 * workers,
    )  # fmt: skip
    processor = time.process_time()
    zoo = build(folder / "zoo", options)
    processor = time.process_time() - processor
    ray.shutdown()
    planned = sorted(run for shard in zoo.metadata["plan"] for run in shard)
    assert sorted(zoo.table["run"].tolist()) == planned, "a run is missing, or there twice"
    assert len(killed) == kills
    return {
        **_times(zoo, workers, begun),
        "shards": shards,
        "killed": kills,
        "begun": len(list(log.iterdir())),
        "driver_per_shard": processor / shards,
        "worker_start": float(
            np.median([json.loads(p.read_text())["processor"] for p in _first(log)])
        ),
    }


def _first(log: Path) -> list[Path]:
    """The first shard of each worker."""
    first: dict[str, Path] = {}
    for path in sorted(log.iterdir(), key=lambda path: json.loads(path.read_text())["begun"]):
        first.setdefault(path.name.rpartition("-")[2], path)
    return list(first.values())


def _times(zoo: Zoo, workers: int, begun: float) -> dict[str, Any]:
    """What the records of the shards say about the schedule."""
    folder = Folder.open(zoo.path)
    made = [read_header(folder.shard_path(shard)).made for shard in folder.shards]
    by_worker: dict[int, list[dict[str, Any]]] = {}
    for each in sorted(made, key=lambda each: each["begun"]):
        by_worker.setdefault(each["pid"], []).append(each)
    gaps = [b["begun"] - a["ended"] for own in by_worker.values() for a, b in pairwise(own)]
    starts = sorted(own[0]["begun"] for own in by_worker.values())
    last_start = max(each["begun"] for each in made)
    return {
        "workers": len(by_worker),
        "all_running_after": starts[min(workers, len(starts)) - 1] - begun,
        "gap_median": float(np.median(gaps)),
        "gap_95": float(np.quantile(gaps, 0.95)),
        "tail": max(each["ended"] for each in made) - last_start,
        "longest_shard": max(each["slept"] for each in made),
        "busy_until_queue_empty": _busy(made, starts[-1], last_start, workers),
    }


def _busy(made: list[dict[str, Any]], start: float, end: float, workers: int) -> float:
    """Share of the time in which workers slept, from the last start to the empty queue."""
    slept = sum(max(0.0, min(e["ended"], end) - max(e["begun"], start)) for e in made)
    return slept / (workers * (end - start))


def through_ray(data: Path | None, folder: Path) -> dict[str, float]:
    """Data of MNIST to a worker, and a shard of 256 runs back and onto the disk."""
    task = load_task("mnist", data)
    sizes = task.sizes
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)

    def receive(reference: list[Any]) -> float:
        import transformer_nfn.zoo.training.ray_engine  # noqa: F401 - imports are counted elsewhere

        begun = time.process_time()
        ray.get(reference[0])
        return time.process_time() - begun

    def give(configs: list[Config]) -> Trained:
        return made_up(configs, sizes, CHECKPOINTS)

    begun = time.process_time()
    reference = ray.put(task)
    put = time.process_time() - begun
    receiver = ray.remote(receive)
    received = min(ray.get([receiver.remote([reference]) for _ in range(3)]))
    result = ray.remote(give).remote(grid()[:SHARD_RUNS])
    ray.wait([result])
    begun = time.process_time()
    trained = ray.get(result)
    weights = sizes.to_rows(trained.weights)
    write_shard(folder / "00000.safetensors", sizes.row_layout, weights, trained.rows, {})
    stored = time.process_time() - begun
    size = (folder / "00000.safetensors").stat().st_size
    ray.shutdown()
    return {
        "data_mib": sum(x.nbytes for x in task.images.values()) / 2**20,  # type: ignore[attr-defined]
        "put": put, "receive": received, "shard_mib": size / 2**20, "store": stored,
    }  # fmt: skip


def merged(folder: Path) -> float:
    """Processor time of the index of 16,000 runs with four checkpoints each."""
    sizes = NetworkSizes.of(KNOWN_TASKS["digits"], SizeGroup(4, 1, 1))
    configs = grid()
    parts = [configs[i : i + SHARD_RUNS] for i in range(0, len(configs), SHARD_RUNS)]
    fields = {
        "origin": "build", "task": {"name": "digits", "samples": None, "provenance": {}},
        "recipe": Recipe(100).to_json(), "seed": 0, "runs": len(configs), "dtype": "float32",
        "shards": len(parts), "plan": [[config.run for config in part] for part in parts],
    }  # fmt: skip
    zoo = Folder.create(folder, sizes, fields)
    for shard, part in zip(zoo.shards, parts, strict=True):
        trained = made_up(part, sizes, CHECKPOINTS)
        weights = sizes.to_rows(trained.weights)
        write_shard(zoo.shard_path(shard), sizes.row_layout, weights, trained.rows, {})
    begun = time.process_time()
    zoo.merge()
    return time.process_time() - begun


def imports() -> float:
    """Processor time in which a worker's process imports the engine."""
    code = "import time, ray, transformer_nfn.zoo.training.ray_engine; print(time.process_time())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Print the table of a simulated cluster; the numbers behind it."""
    with TemporaryDirectory() as scratch:
        root = Path(scratch)
        (root / "one").mkdir()
        s = simulate(args.workers, args.seconds, args.kill, root / "cluster")
        r = through_ray(args.data, root / "one")
        index, started = merged(root / "index"), imports()
    again = s["begun"] - s["shards"]
    rows = [
        ["start of a worker process: Ray's own part, and importing the engine",
         f"{s['worker_start']:.1f} s and {started:.1f} s"],
        [f"MNIST into the object store, once ({r['data_mib']:.0f} MiB)", f"{r['put']:.2f} s"],
        ["the same out of it, once a shard", f"{r['receive']:.2f} s"],
        ["from the end of a shard to the next on that worker: median, 95 %",
         f"{1000 * s['gap_median']:.0f} ms, {1000 * s['gap_95']:.0f} ms"],
        ["workers busy, from the last start to the empty queue",
         f"{100 * s['busy_until_queue_empty']:.1f} %"],
        [f"tail: from the empty queue to the last shard (the longest shard slept "
         f"{s['longest_shard']:.0f} s)", f"{s['tail']:.0f} s"],
        [f"workers killed; shards begun again; runs missing or there twice, of {4 * s['shards']:,}",
         f"{s['killed']}; {again}; 0"],
        [f"driver: a shard of {SHARD_RUNS} runs ({r['shard_mib']:.0f} MiB) from Ray to the disk",
         f"{r['store']:.2f} s"],
        ["driver: everything else, a shard", f"{1000 * s['driver_per_shard']:.0f} ms"],
        [f"index of {len(grid()):,} runs, {CHECKPOINTS * len(grid()):,} rows", f"{index:.1f} s"],
    ]  # fmt: skip
    print("\n".join(markdown_rows(["what"], ["measured"], rows)))
    return {**s, **r, "index": index, "imports": started}


def cost(speed: float, text_speed: float) -> None:
    """Print the table of GPU-hours, from the measured overheads and the speed of one GPU.

    Args:
        speed: runs × epochs a second of a whole MNIST build of 100 epochs on one GPU.
        text_speed: the same for AG News.
    """
    measured = json.loads(RESULT.read_text())
    start = measured["worker_start"] + measured["imports"] + measured["put"] + KERNELS
    per_shard = measured["receive"] + measured["gap_median"]
    driver = measured["store"] + measured["driver_per_shard"]
    gpus = (1, 8, 64)
    rows = []
    for name, parts in {
        "16,000 MNIST runs": [(16_000, speed)],
        "16,000 AG News runs": [(16_000, text_speed)],
        "both zoos of the paper": [(16_000, speed), (16_000, text_speed)],
        "a million MNIST runs": [(10**6, speed)],
    }.items():
        hours = sum(runs * EPOCHS / rate for runs, rate in parts) / 3600
        cells = []
        for n in gpus:
            seconds = start
            for runs, rate in parts:
                rounds = math.ceil(math.ceil(runs / SHARD_RUNS) / n)
                seconds += rounds * (SHARD_RUNS * EPOCHS / rate + per_shard)
                seconds += measured["index"] * runs / len(grid())
            cells.append(f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds / 60:.0f} min")
        rows.append([name, f"{hours:,.1f}", *cells])
    feeds = SHARD_RUNS * EPOCHS / speed / driver
    columns = ["GPU-hours", *(f"{n} GPU{'s' * (n > 1)}" for n in gpus)]
    print("\n".join(markdown_rows(["zoo"], columns, rows)))
    print(
        f"\nA shard of {SHARD_RUNS} MNIST runs trains for {SHARD_RUNS * EPOCHS / speed:.0f} s "
        f"and takes {driver:.2f} s of the driver: one driver feeds about {feeds:.0f} GPUs."
    )


KERNELS = 20.0
"""Seconds in which the first build on a machine compiles its kernels (docs/performance.md)."""
EPOCHS = 100


def main() -> None:
    """Measure, or compute the cost from what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0, help="that a shard sleeps")
    parser.add_argument("--kill", type=int, default=4, help="workers to kill")
    parser.add_argument("--data", type=Path, help="the folder of MNIST")
    parser.add_argument("--cost", action="store_true", help="only compute the cost")
    parser.add_argument("--speed", type=float, default=232.0)
    parser.add_argument("--text-speed", type=float, default=20.0)
    args = parser.parse_args()
    os.environ.update(QUIET)
    if args.cost:
        cost(args.speed, args.text_speed)
    else:
        RESULT.write_text(json.dumps(measure(args), indent=1) + "\n")


if __name__ == "__main__":
    main()
