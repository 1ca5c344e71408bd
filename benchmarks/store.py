"""How fast a zoo as large as the paper's opens, selects and gives random batches from cold files.

A synthetic MNIST zoo of 62,756 checkpoints (15,689 runs, four each, 4.4 GiB) is written, its
files are dropped from the system's cache, and a fresh process opens it, selects the epoch-75
networks, and reads random batches of 16. The same on a zoo of an eighth of the size shows
whether memory grows with the zoo.

    python benchmarks/store.py --folder /tmp/store-benchmark
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import time
from pathlib import Path

import numpy as np
import torch

from costs import drop_from_cache, in_a_process
from transformer_nfn.known_tasks import KNOWN_TASKS
from transformer_nfn.zoo import NetworkSizes, Recipe, Zoo
from transformer_nfn.zoo.store import Folder, write_shard
from transformer_nfn.zoo.training.grid import grid

RUNS = 15_689
NETWORKS = 8000
SHARD_RUNS = 256


def write_zoo(path: Path, runs: int) -> None:
    """A zoo of random networks, in the form a build on a GPU writes."""
    sizes = NetworkSizes.of(KNOWN_TASKS["mnist"])
    weights = torch.randn(SHARD_RUNS * 4, sizes.num_weights)
    configs = grid()[:runs]
    groups = [configs[i : i + SHARD_RUNS] for i in range(0, runs, SHARD_RUNS)]
    draw = np.random.default_rng(0)
    description = {
        "origin": "build",
        "task": {"name": "mnist", "samples": None, "provenance": {}},
        "recipe": Recipe(88).to_json(),
        "seed": 0,
        "runs": runs,
        "dtype": "float32",
        "shards": len(groups),
        "plan": [[config.run for config in group] for group in groups],
    }
    folder = Folder.create(path, sizes, description)
    for shard, group in zip(folder.shards, groups, strict=True):
        rows = [
            config.to_json()
            | {
                "crashed": False,
                "epoch": epoch or 88,
                "percent": epoch,
                "best": epoch == 0,
                "train_accuracy": draw.random(),
                "held_accuracy": draw.random(),
                "test_loss": draw.random(),
                "test_accuracy": draw.random(),
            }
            for config in group
            for epoch in (50, 75, 100, 0)
        ]
        path = folder.shard_path(shard)
        write_shard(path, sizes.row_layout, weights[: len(rows)], rows, {})
    folder.merge()


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def read_zoo(path: Path) -> dict[str, float]:
    """What a fresh process measures."""
    start = time.perf_counter()
    zoo = Zoo.open(path)
    rows = zoo.select(epoch=75, min_accuracy=0.2)
    opened = time.perf_counter() - start
    before = resident()
    chosen = np.random.default_rng(1).permutation(len(zoo))[:NETWORKS]
    start = time.perf_counter()
    peak = 0
    for _, weights in zoo.batches(chosen, size=16):
        assert weights["blocks.0.W_Q"].shape[0] <= 16
        peak = max(peak, resident())
    seconds = time.perf_counter() - start
    return {
        "checkpoints": len(zoo),
        "selected": len(rows),
        "open_and_select_seconds": round(opened, 3),
        "networks_a_second": round(NETWORKS / seconds),
        "resident_growth_MiB": round((peak - before) / 2**20, 1),
    }


def main() -> None:
    """Writes, forgets, reads in a fresh process, prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/transformer-nfn-store"))
    arguments = parser.parse_args()
    for runs in (RUNS // 8, RUNS):
        path = arguments.folder / str(runs)
        if not (path / "index.parquet").exists():
            shutil.rmtree(path, ignore_errors=True)
            write_zoo(path, runs)
        for file in filter(Path.is_file, path.rglob("*")):
            drop_from_cache(file)
        for state in ("cold", "warm"):
            found = in_a_process(read_zoo, path)
            print(f"{runs} runs, {state}: {json.dumps(found)}", flush=True)
    shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
