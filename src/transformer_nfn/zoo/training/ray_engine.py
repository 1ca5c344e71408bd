"""The engine on a Ray cluster: workers train shards, the driver claims and writes them.

Only the driver touches the folder, so a cluster needs no shared disk. A worker that dies is
replaced by Ray and its shard trained again; a driver that dies lets its claims go, and the
same command goes on from the shards that are there.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from transformer_nfn.ray_cluster import import_ray, one_core_task, ray_cluster, task_result
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.training.backends import describe_path
from transformer_nfn.zoo.training.local_engine import (
    Progress,
    open_shards,
    store_shard,
    train_shard,
)
from transformer_nfn.zoo.training.plan import Plan

# Enough waiting work that an autoscaling cluster grows, little enough that another builder
# on the same folder finds some too.
IN_FLIGHT = 128
RETRIES = 5
POLL_SECONDS = 0.5


def _work(*arguments: Any) -> Any:
    """What a worker does; one thread, because there is a worker for every core."""
    torch.set_num_threads(1)
    return train_shard(*arguments)


def run_ray(
    plan: Plan,
    data: Path | None,
    device: str,
    workers: int | None,
    address: str | None,
    path: str,
    progress: Progress,
) -> None:
    """Trains every shard that is not there on a cluster; returns when all are.

    Args:
        workers: shards at once at most; None for as many as the cluster takes.
        address: of the cluster; None starts one on this machine with ``workers`` cores.
    """
    import_ray(ZooError)
    configs = plan.configs()
    missing = list(open_shards(plan))
    total = sum(len(runs) for runs in configs.values())
    left = sum(len(configs[shard]) for shard in missing)
    note = describe_path(path, device, plan.folder.arch, plan.recipe.precision)[1]
    progress.begin(total, total - left, left * plan.recipe.epochs_trained, f"{note}, by Ray")
    if not missing:
        return
    with ray_cluster(address, ZooError, cores=workers) as ray:
        _Driver(ray, plan, data, device, workers, path, progress).run()


class _Driver:
    def __init__(
        self,
        ray: Any,
        plan: Plan,
        data: Path | None,
        device: str,
        workers: int | None,
        path: str,
        progress: Progress,
    ) -> None:
        self.ray, self.plan, self.device, self.path = ray, plan, device, path
        self.progress, self.configs = progress, plan.configs()
        self.most = workers or IN_FLIGHT
        # The data travels once to each node, so that workers need no files.
        self.task = ray.put(plan.load_task(data))
        self.remote = one_core_task(ray, _work, device, RETRIES)
        self.flying: dict[Any, tuple[str, ExitStack]] = {}

    def run(self) -> None:
        """Keeps work in flight until every shard is on disk, whoever wrote it."""
        told = False
        try:
            while missing := list(open_shards(self.plan)):
                self._submit(missing)
                if self.flying:
                    ready, _ = self.ray.wait(list(self.flying), timeout=POLL_SECONDS)
                    for reference in ready:
                        self._collect(reference)
                    continue
                if not told:
                    self.progress.note("the shards left are being trained by another builder")
                told = True
                time.sleep(POLL_SECONDS)
        finally:
            for _, claim in self.flying.values():
                claim.close()

    def _submit(self, missing: list[str]) -> None:
        busy = {shard for shard, _ in self.flying.values()}
        for shard in missing:
            if len(self.flying) >= self.most:
                return
            if shard in busy:
                continue
            claim = ExitStack()
            if not claim.enter_context(self.plan.folder.claim(shard)):
                claim.close()
                continue
            if self.plan.folder.shard_path(shard).exists():
                claim.close()
                continue
            reference = self.remote.remote(
                self.task,
                self.configs[shard],
                self.plan.recipe,
                self.plan.folder.about["dtype"],
                self.device,
                self.path,
            )
            self.flying[reference] = (shard, claim)

    def _collect(self, reference: Any) -> None:
        shard, claim = self.flying.pop(reference)
        with claim:
            lost = f"shard {shard} was lost {RETRIES + 1} times on the cluster"
            trained, made = task_result(self.ray, reference, ZooError, lost)
            crashed = store_shard(self.plan, shard, trained, made)
        runs = len(self.configs[shard])
        self.progress.trained(runs * self.plan.recipe.epochs_trained)
        self.progress.finished(shard, runs, crashed)
