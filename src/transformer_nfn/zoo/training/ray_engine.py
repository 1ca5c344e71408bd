"""The engine on a Ray cluster: workers train shards, the driver claims and writes them.

Only the driver accesses the folder, so a cluster needs no shared disk. Ray replaces a worker that
dies, and its shard is trained again. On ``cuda`` a worker has a GPU, or the share of one that the
options state; the driver needs none. If the driver dies, its claims end, and the same command
continues from the shards that are there.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from transformer_nfn.ray_cluster import import_ray, one_core_task, ray_cluster, task_result
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.store.folder import claim
from transformer_nfn.zoo.training.local_engine import (
    POLL_SECONDS,
    WAITING,
    begin,
    store_shard,
    train_shard,
)
from transformer_nfn.zoo.training.plan import Plan, Progress

# Enough waiting work that an autoscaling cluster grows, and some left for another builder.
IN_FLIGHT = 128
RETRIES = 5


def run_ray(plan: Plan, progress: Progress) -> None:
    """Train every missing shard on a cluster; returns when all are on disk.

    ``workers`` limits the shards in training; without an ``address`` a local cluster starts.
    """
    import_ray(ZooError)
    if not begin(plan, progress, ", by Ray"):
        return
    options = plan.options
    with ray_cluster(options.address, ZooError, cores=options.workers) as ray:
        _Driver(ray, plan, progress).run()


class _Driver:
    def __init__(self, ray: Any, plan: Plan, progress: Progress) -> None:
        self.ray, self.plan, self.progress = ray, plan, progress
        self.configs = plan.configs()
        self.most = plan.options.workers or IN_FLIGHT
        # The data is sent once to each node, so that workers need no files.
        self.task = ray.put(plan.load_task())
        gpus = plan.options.gpu_share if "cuda" in plan.options.device else 0
        self.remote = one_core_task(ray, train_shard, gpus, RETRIES)
        self.flying: dict[Any, tuple[str, ExitStack]] = {}

    def run(self) -> None:
        """Keep work in flight until every shard is on disk."""
        noted = False
        try:
            while missing := self.plan.folder.missing():
                self._submit(missing)
                if self.flying:
                    ready, _ = self.ray.wait(list(self.flying), timeout=POLL_SECONDS)
                    for reference in ready:
                        self._collect(reference)
                    continue
                if not noted:
                    self.progress.note(WAITING)
                noted = True
                time.sleep(POLL_SECONDS)
        finally:
            for _, lock in self.flying.values():
                lock.close()

    def _submit(self, missing: list[str]) -> None:
        busy = {shard for shard, _ in self.flying.values()}
        plan = self.plan
        for shard in missing:
            if len(self.flying) >= self.most:
                return
            if shard in busy:
                continue
            lock = ExitStack()
            held = lock.enter_context(claim(plan.folder.path, shard))
            if not held or plan.folder.shard_path(shard).exists():
                lock.close()
                continue
            reference = self.remote.remote(
                self.task, self.configs[shard], plan.recipe, plan.options
            )
            self.flying[reference] = (shard, lock)

    def _collect(self, reference: Any) -> None:
        shard, lock = self.flying.pop(reference)
        with lock:
            lost = f"shard {shard} was lost {RETRIES + 1} times on the cluster"
            trained, made = task_result(self.ray, reference, ZooError, lost)
            crashed = store_shard(self.plan.folder, shard, trained, made)
        runs = len(self.configs[shard])
        self.progress.trained(runs * self.plan.recipe.epochs_trained)
        self.progress.finished(shard, runs, crashed)
