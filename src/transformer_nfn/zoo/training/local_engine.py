"""The engine on this machine: trains shards in this process or in several workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.store import Folder, write_shard
from transformer_nfn.zoo.training.backends import describe_path
from transformer_nfn.zoo.training.grid import Config
from transformer_nfn.zoo.training.plan import Plan
from transformer_nfn.zoo.training.tasks import Task
from transformer_nfn.zoo.training.trainer import Recipe, Report, Trained, train


class Progress(Protocol):
    """Told of a build as it goes."""

    def begin(self, runs: int, done: int, work: int, note: str) -> None:
        """``runs`` there are, ``done`` of them already; ``work`` network-epochs are left."""

    def trained(self, network_epochs: int) -> None:
        """So many networks did one more epoch each."""

    def finished(self, shard: str, runs: int, crashed: int) -> None:
        """A shard is on disk."""

    def note(self, text: str) -> None:
        """Something a user should know."""


class Silent:
    """Says nothing."""

    def begin(self, runs: int, done: int, work: int, note: str) -> None:
        """Says nothing."""

    def trained(self, network_epochs: int) -> None:
        """Says nothing."""

    def finished(self, shard: str, runs: int, crashed: int) -> None:
        """Says nothing."""

    def note(self, text: str) -> None:
        """Says nothing."""


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


POLL_SECONDS = 0.5


def run_local(
    plan: Plan,
    data: Path | None,
    device: str,
    workers: int | None,
    path: str,
    progress: Progress,
) -> None:
    """Trains every shard that is not there; returns when all are, whoever made them."""
    configs = plan.configs()
    missing = set(open_shards(plan))
    done = sum(len(configs[shard]) for shard in configs if shard not in missing)
    work = sum(len(configs[shard]) for shard in missing) * plan.recipe.epochs_trained
    total = sum(len(runs) for runs in configs.values())
    if workers is None:
        workers = 1 if "cuda" in device else cores()
    workers = min(workers, len(missing))
    note = describe_path(path, device, plan.folder.arch, plan.recipe.precision)[1]
    progress.begin(total, done, work, note)
    if workers > 1:
        _run_processes(plan, data, device, workers, path, progress)
    elif missing:
        claim_and_train(plan, data, device, path, progress)


def cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def claim_and_train(
    plan: Plan, data: Path | None, device: str, path: str, progress: Progress
) -> None:
    """Claims shards one after another until none is left, waiting for other builders' last."""
    task = plan.load_task(data)
    configs = plan.configs()
    waiting = False
    while missing := list(open_shards(plan)):
        worked = False
        for shard in missing:
            with plan.folder.claim(shard) as mine:
                # Another builder may have finished it between our look and our claim.
                if not mine or plan.folder.shard_path(shard).exists():
                    continue
                trained, made = train_shard(
                    task,
                    configs[shard],
                    plan.recipe,
                    plan.folder.about["dtype"],
                    device,
                    path,
                    progress.trained,
                )
                crashed = store_shard(plan, shard, trained, made)
            progress.finished(shard, len(configs[shard]), crashed)
            worked = True
        if not worked:
            if not waiting:
                progress.note("the shards left are being trained by another builder")
            waiting = True
            time.sleep(POLL_SECONDS)


def _run_processes(
    plan: Plan, data: Path | None, device: str, workers: int, path: str, progress: Progress
) -> None:
    """Separate processes: PyTorch's threads in one would wait for each other."""
    order = {
        "folder": str(plan.folder.path),
        "data": None if data is None else str(data),
        "device": device,
        "path": path,
    }
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # Not "-m": the package imports this module, of which runpy would warn.
    start = "from transformer_nfn.zoo.training.local_engine import main; main()"
    command = [sys.executable, "-c", start, json.dumps(order)]
    # Ctrl-C reaches all processes of a terminal: this one takes it and ends the workers, which
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
    if list(open_shards(plan)):
        # A worker that was killed from outside leaves its shard; this process takes over.
        progress.note("a worker died; its shard is trained again here")
        torch.set_num_threads(1)
        claim_and_train(plan, data, device, path, progress)


def _listen(
    process: subprocess.Popen[str], progress: Progress, errors: list[str], lock: threading.Lock
) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        message = json.loads(line)
        with lock:
            _dispatch(message, progress, errors.append)


def _dispatch(message: dict[str, object], progress: Progress, fail: Callable[[str], None]) -> None:
    kind, arguments = message["kind"], message["arguments"]
    if kind == "error":
        fail(str(arguments))
    else:
        getattr(progress, str(kind))(*arguments)  # type: ignore[misc]


class LineProgress:
    """Progress as lines on standard output; a parent that died breaks the pipe and ends us."""

    def begin(self, runs: int, done: int, work: int, note: str) -> None:
        """Not a worker's to say."""

    def trained(self, network_epochs: int) -> None:
        """So many networks did one more epoch each."""
        say("trained", network_epochs)

    def finished(self, shard: str, runs: int, crashed: int) -> None:
        """A shard is on disk."""
        say("finished", shard, runs, crashed)

    def note(self, text: str) -> None:
        """Every worker would say it; the parent sees the shards itself."""


def say(kind: str, *arguments: object) -> None:
    """One line for the parent."""
    body = arguments[0] if kind == "error" else arguments
    sys.stdout.write(json.dumps({"kind": kind, "arguments": body}) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Works on the folder named by the order in the first argument."""
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    try:
        plan = Plan(Folder.open(order["folder"]))
        data = None if order["data"] is None else Path(order["data"])
        claim_and_train(plan, data, order["device"], order["path"], LineProgress())
    except TransformerNFNError as error:
        say("error", str(error))
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)
