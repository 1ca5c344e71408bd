"""Build a zoo, or a mixed zoo of several sizes: plan, train missing shards, write the index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from transformer_nfn.io.files import foreign_files
from transformer_nfn.known_tasks import KNOWN_TASKS
from transformer_nfn.zoo.errors import StoreError, ZooError
from transformer_nfn.zoo.sizes import Kind, NetworkSizes
from transformer_nfn.zoo.store import Folder, MixedZoo, Zoo
from transformer_nfn.zoo.store.folder import KINDS_FILE, claim
from transformer_nfn.zoo.store.zoo import is_mixed, kinds_in, read_kinds, write_kinds
from transformer_nfn.zoo.training.backends import describe_path
from transformer_nfn.zoo.training.grid import GRID_SIZE
from transformer_nfn.zoo.training.local_engine import Progress, Silent, open_shards
from transformer_nfn.zoo.training.plan import Plan, Settings, make_plan
from transformer_nfn.zoo.training.randomness import run_seed

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
        from transformer_nfn.zoo.training.ray_engine import run_ray

        run_ray(plan, folder, device, workers, address, path, progress)
    else:
        from transformer_nfn.zoo.training.local_engine import run_local

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


_OWN = {KINDS_FILE, "checksums.json", "claims"}


def build_mixed(
    out: Path | str,
    settings: Settings,
    kinds: Sequence[Kind],
    *,
    data: Path | str | None = None,
    vectors: Path | str | None = None,
    device: str = "auto",
    engine: str = "local",
    workers: int | None = None,
    address: str | None = None,
    path: str = "auto",
    progress: Progress | None = None,
) -> MixedZoo:
    """Builds a zoo of each kind in a folder of its own, or goes on where that was interrupted.

    What is not named below is as in `build`.

    Args:
        out: the folder; empty, not there yet, or one this very build was begun in.
        settings: of all kinds; ``runs`` (all 16,000 if None) are spread over the kinds, and
            ``seed`` gives every kind a seed of its own, so that no two kinds share a run.
        kinds: at least one, none twice.
    """
    out = Path(out)
    parts = spread(settings, kinds)
    device = resolve_device(device)
    data = None if data is None else Path(data)
    vectors = None if vectors is None else Path(vectors)
    check_means(engine, workers, data)
    _check_paths(path, device, settings, kinds)
    _check_folder(out, kinds)
    # The first plan finds what is wrong with the settings, before anything is written.
    first = parts[0]
    plan = make_plan(out / first.kind.name, first, data=data, vectors=vectors, device=device)
    with claim(out, "create", wait=True):
        if not is_mixed(out):
            write_kinds(out, kinds, {"task": settings.task, "seeds": settings.seeds})
    watch = _AllKinds(progress or Silent(), len(kinds))
    done = sum(runs_done(out / part.kind.name) for part in parts)
    total = sum(part.runs or 0 for part in parts)
    watch.start(total, done, (total - done) * plan.recipe.epochs_trained)
    for part in parts:
        watch.kind = part.kind
        build(
            out / part.kind.name,
            part,
            data=data,
            vectors=vectors,
            device=device,
            engine=engine,
            workers=workers,
            address=address,
            path=path,
            progress=watch,
        )
    return MixedZoo.open(out)


def spread(settings: Settings, kinds: Sequence[Kind]) -> list[Settings]:
    """The settings of each kind's zoo: an equal share of the runs (to within one), its own seed."""
    if len(set(kinds)) != len(kinds) or not kinds:
        raise ZooError(f"a mixed zoo needs different kinds, found {[k.name for k in kinds]}")
    runs = GRID_SIZE if settings.runs is None else settings.runs
    if runs < len(kinds):
        raise ZooError(f"{runs} runs cannot be spread over {len(kinds)} kinds of network")
    each, more = divmod(runs, len(kinds))
    return [
        replace(
            settings,
            runs=each + (i < more),
            seed=kind_seed(settings.seed, kind),
            width=kind.width,
            heads=kind.heads,
            depth=kind.depth,
        )
        for i, kind in enumerate(kinds)
    ]


def kind_seed(seed: int, kind: Kind) -> int:
    """The seed of one kind's zoo, from that of the build; 63 bits."""
    # Runs are numbered below 2**20, so no run of a plain zoo has this number.
    return run_seed(seed, (kind.width << 40) + (kind.heads << 30) + (kind.depth << 20))


def runs_done(path: Path) -> int:
    """How many runs of a zoo, begun or not, are on disk."""
    if not (path / "zoo.json").is_file():
        return 0
    plan = Plan(Folder.open(path))
    missing = set(open_shards(plan))
    return sum(len(runs) for shard, runs in plan.configs().items() if shard not in missing)


def _check_paths(path: str, device: str, settings: Settings, kinds: Sequence[Kind]) -> None:
    """A path that was asked for must fit every kind; ``auto`` finds one for each."""
    known = KNOWN_TASKS.get(settings.task)
    if path == "auto" or known is None:
        return
    for kind in kinds:
        describe_path(path, device, NetworkSizes.of(known, kind), settings.precision)


def _check_folder(out: Path, kinds: Sequence[Kind]) -> None:
    """Refuses a folder that is not this mixed zoo's."""
    if not out.exists():
        return
    if not out.is_dir():
        raise StoreError(f"'{out}' is a file, not a folder")
    if (out / "zoo.json").exists():
        raise StoreError(f"'{out}' holds a zoo of one kind: name an empty folder")
    asked = [kind.name for kind in kinds]
    if is_mixed(out):
        there = [kind.name for kind in kinds_in(out, read_kinds(out))]
        if set(there) != set(asked):
            raise StoreError(
                f"'{out}' holds another mixed zoo: kinds {', '.join(there)}, asked for "
                f"{', '.join(asked)}"
            )
    foreign = foreign_files(out, _OWN | set(asked))
    if foreign:
        raise StoreError(f"'{out}' holds other files ('{foreign[0]}'): name an empty folder")


class _AllKinds:
    """One bar over all kinds; what a kind says when it begins becomes a note."""

    def __init__(self, progress: Progress, kinds: int) -> None:
        self._progress, self._kinds, self._begun = progress, kinds, 0
        self.kind = Kind()

    def start(self, runs: int, done: int, work: int) -> None:
        """The counts of all kinds together."""
        self._progress.begin(runs, done, work, f"{self._kinds} kinds of network")

    def begin(self, runs: int, done: int, work: int, note: str) -> None:
        """One kind's build begins."""
        self._begun += 1
        self._progress.note(f"{self.kind.name} ({self._begun} of {self._kinds}): {note}")

    def trained(self, network_epochs: int) -> None:
        """So many networks did one more epoch each."""
        self._progress.trained(network_epochs)

    def finished(self, shard: str, runs: int, crashed: int) -> None:
        """A shard is on disk."""
        self._progress.finished(shard, runs, crashed)

    def note(self, text: str) -> None:
        """Something a user should know."""
        self._progress.note(text)
