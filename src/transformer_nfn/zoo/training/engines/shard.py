"""One shard's work, the same whoever does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from transformer_nfn.zoo.store import write_shard
from transformer_nfn.zoo.training.grid import Config
from transformer_nfn.zoo.training.paths import describe_path
from transformer_nfn.zoo.training.plan import Plan
from transformer_nfn.zoo.training.tasks import Task
from transformer_nfn.zoo.training.trainer import Recipe, Report, Trained, train

DTYPES = {"float32": torch.float32, "float16": torch.float16}


def train_shard(
    task: Task,
    configs: Sequence[Config],
    recipe: Recipe,
    dtype: str,
    device: str,
    path: str,
    report: Report | None = None,
) -> tuple[Trained, dict[str, Any]]:
    """Trains the runs of a shard; with how it was done, for the record."""
    trained = train(
        task, configs, recipe, device=device, path=path, report=report, stored=DTYPES[dtype]
    )
    made = {
        "device": torch.cuda.get_device_name() if "cuda" in device else "cpu",
        "path": describe_path(path, device, task.arch, recipe.precision)[0],
        "torch": torch.__version__,
    }
    return trained, made


def store_shard(plan: Plan, shard: str, trained: Trained, made: dict[str, Any]) -> int:
    """Writes a trained shard; how many of its runs crashed."""
    folder = plan.folder
    dtype = DTYPES[folder.about["dtype"]]
    write_shard(folder.shard_path(shard), folder.arch, trained.weights, trained.rows, made, dtype)
    return sum(1 for row in trained.rows if row["crashed"])


def open_shards(plan: Plan) -> Iterator[str]:
    """Shards not finished when asked, in order."""
    for shard in plan.folder.shards:
        if not plan.folder.shard_path(shard).exists():
            yield shard
