"""The engine on this machine: trains shards in this process or in several workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.processes import cores
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.store.folder import Folder, claim
from transformer_nfn.zoo.store.shards import DTYPES, write_shard
from transformer_nfn.zoo.training.backends import describe_path
from transformer_nfn.zoo.training.grid import Config
from transformer_nfn.zoo.training.plan import BuildOptions, Plan, Progress
from transformer_nfn.zoo.training.tasks import Task
from transformer_nfn.zoo.training.trainer import Recipe, Report, Trained, train

POLL_SECONDS = 0.5
WAITING = "the shards left are being trained by another builder"


def train_shard(
    task: Task,
    configs: Sequence[Config],
    recipe: Recipe,
    options: BuildOptions,
    report: Report | None = None,
) -> tuple[Trained, dict[str, Any]]:
    """Train the runs of a shard; also how it was done, for the record."""
    trained = train(
        task,
        configs,
        recipe,
        device=options.device,
        path=options.path,
        report=report,
        stored=DTYPES[options.dtype],
    )
    made = {
        "device": torch.cuda.get_device_name() if "cuda" in options.device else "cpu",
        "path": describe_path(options.path, options.device, task.sizes, recipe.precision)[0],
        "torch": torch.__version__,
    }
    return trained, made


def store_shard(folder: Folder, shard: str, trained: Trained, made: dict[str, Any]) -> int:
    """Write a trained shard; the number of crashed runs."""
    path = folder.shard_path(shard)
    weights, layout = folder.sizes.to_rows(trained.weights), folder.sizes.row_layout
    write_shard(path, layout, weights, trained.rows, made, folder.dtype)
    return sum(1 for row in trained.rows if row["crashed"])


def begin(plan: Plan, progress: Progress, engine: str = "") -> int:
    """Report the beginning of a build; the number of missing shards."""
    configs, missing = plan.configs(), plan.folder.missing()
    runs = sum(len(part) for part in configs.values())
    left = sum(len(configs[shard]) for shard in missing)
    options = plan.options
    _, note = describe_path(options.path, options.device, plan.folder.sizes, options.precision)
    progress.begin(runs, runs - left, left * plan.recipe.epochs_trained, note + engine)
    return len(missing)


def run_local(plan: Plan, progress: Progress) -> None:
    """Train every missing shard; returns when all are on disk."""
    missing = begin(plan, progress)
    workers = plan.options.workers
    if workers is None:
        workers = 1 if "cuda" in plan.options.device else cores()
    if min(workers, missing) > 1:
        _run_processes(plan, min(workers, missing), progress)
    elif missing:
        claim_and_train(plan, progress)


def claim_and_train(plan: Plan, progress: Progress) -> None:
    """Claim and train shards until none is missing; waits for shards of other processes."""
    plan = replace(plan, task=plan.load_task())
    waiting = False
    while missing := plan.folder.missing():
        worked = [claim_shard(plan, shard, progress) for shard in missing]
        if not any(worked):
            if not waiting:
                progress.note(WAITING)
            waiting = True
            time.sleep(POLL_SECONDS)


def claim_shard(plan: Plan, shard: str, progress: Progress) -> bool:
    """Train and write a shard, unless another process has claimed or finished it."""
    folder = plan.folder
    with claim(folder.path, shard) as held:
        # Another builder may have finished it since `missing` was read.
        if not held or folder.shard_path(shard).exists():
            return False
        configs = plan.configs()[shard]
        trained, made = train_shard(
            plan.load_task(), configs, plan.recipe, plan.options, progress.trained
        )
        crashed = store_shard(folder, shard, trained, made)
    progress.finished(shard, len(configs), crashed)
    return True


def _run_processes(plan: Plan, workers: int, progress: Progress) -> None:
    """Train in several processes, because threads of PyTorch in one would wait for each other."""
    order = {"folder": str(plan.folder.path), "options": asdict(plan.options)}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # Not with -m, which would import this module twice.
    code = f"from {__name__} import main; main()"
    command = [sys.executable, "-c", code, json.dumps(order, default=str)]
    # Ctrl-C reaches all processes of a terminal: this one handles it and ends the workers, which
    # inherit that it is blocked.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
            for _ in range(workers)
        ]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    errors: list[str] = []
    lock = threading.Lock()
    threads = [
        threading.Thread(target=_listen, args=(process, progress, errors, lock), daemon=True)
        for process in processes
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
                if errors:
                    raise ZooError(errors[0])
        if errors:
            raise ZooError(errors[0])
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    if plan.folder.missing():
        # A worker was killed from outside; this process takes over its shard.
        progress.note("a worker died; its shard is trained again here")
        torch.set_num_threads(1)
        claim_and_train(plan, progress)


def _listen(
    process: subprocess.Popen[str], progress: Progress, errors: list[str], lock: threading.Lock
) -> None:
    """Forward a worker's messages to ``progress`` or ``errors``."""
    assert process.stdout is not None
    for line in process.stdout:
        method, arguments = json.loads(line)
        with lock:
            if method == "error":
                errors.extend(arguments)
            else:
                getattr(progress, method)(*arguments)


class _LineProgress(Progress):
    """Progress of a worker as lines of JSON; if the parent died, the broken pipe ends it."""

    def trained(self, network_epochs: int) -> None:
        """That many networks finished an epoch."""
        _send("trained", network_epochs)

    def finished(self, shard: str, runs: int, crashed: int) -> None:
        """A shard was written."""
        _send("finished", shard, runs, crashed)


def _send(method: str, *arguments: object) -> None:
    sys.stdout.write(json.dumps([method, arguments]) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run a worker on the folder and options in the first argument."""
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    try:
        plan = Plan(Folder.open(order["folder"]), BuildOptions(**order["options"]))
        claim_and_train(plan, _LineProgress())
    except TransformerNFNError as error:
        _send("error", str(error))
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)
