"""From settings to a finished zoo: plan, train the shards nobody has, write the index."""

from __future__ import annotations

from pathlib import Path

import torch

from transformer_nfn.known_tasks import KNOWN_TASKS
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.store import Zoo
from transformer_nfn.zoo.training.paths import describe_path
from transformer_nfn.zoo.training.plan import Settings, make_plan
from transformer_nfn.zoo.training.progress import Progress, Silent

ENGINES = ("local", "ray")


def build(
    out: Path | str,
    settings: Settings,
    *,
    data: Path | str | None = None,
    vectors: Path | str | None = None,
    device: str = "auto",
    engine: str = "local",
    workers: int | None = None,
    address: str | None = None,
    path: str = "auto",
    progress: Progress | None = None,
) -> Zoo:
    """Builds a zoo, or goes on with one that was interrupted.

    Args:
        out: the folder; empty, not there yet, or one this very build was begun in.
        data: the folder of the task's files; None fetches them.
        vectors: for text, a word2vec file or a zoo that has some; None trains them on the text.
        device: ``auto``, ``cpu`` or ``cuda``.
        engine: ``local`` (this machine) or ``ray`` (a cluster).
        workers: processes at once; None for one a core (CPU) or one (CUDA).
        address: of the Ray cluster; None starts a local one.
        path: how steps are computed, see `paths.choose_runner`.
        progress: told what happens; None stays silent.
    """
    device = resolve_device(device)
    folder = Path(data) if data is not None else None
    check_means(engine, workers, folder)
    known = KNOWN_TASKS.get(settings.task)  # who loads an unknown one refuses it
    arch = None if known is None else NetworkSizes.of(known, settings.kind)
    describe_path(path, device, arch, settings.precision)
    plan = make_plan(
        Path(out),
        settings,
        data=folder,
        vectors=Path(vectors) if vectors is not None else None,
        device=device,
    )
    progress = progress or Silent()
    if engine == "ray":
        from transformer_nfn.zoo.training.engines.ray import run_ray

        run_ray(plan, folder, device, workers, address, path, progress)
    else:
        from transformer_nfn.zoo.training.engines.local import run_local

        run_local(plan, folder, device, workers, path, progress)
    plan.folder.merge()
    return Zoo.open(out)


def check_means(engine: str, workers: int | None, data: Path | None) -> None:
    """Refuses an engine, a number of workers or a folder of data that there is not."""
    if engine not in ENGINES:
        raise ZooError(f"unknown engine '{engine}': expected one of {', '.join(ENGINES)}")
    if workers is not None and workers < 1:
        raise ZooError(f"workers must be at least 1, found {workers}")
    if data is not None and not data.is_dir():
        raise ZooError(f"data folder '{data}' does not exist")


def resolve_device(device: str) -> str:
    """``auto`` as what there is; refuses a GPU that is not there."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ZooError(f"device must be auto, cpu or cuda, found '{device}'")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ZooError("device cuda was asked for, but PyTorch finds no GPU")
    return device
