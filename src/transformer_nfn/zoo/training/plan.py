"""Options of a build, and its plan: configurations, recipe, and the runs of each shard."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from transformer_nfn.known_tasks import BLOCKS, HEADS, WIDTH
from transformer_nfn.zoo.errors import StoreError, ZooError
from transformer_nfn.zoo.sizes import SizeGroup
from transformer_nfn.zoo.store.folder import Checksums, Folder, WordVectors, check_fresh, claim
from transformer_nfn.zoo.store.index import CONFIGURATION, Index
from transformer_nfn.zoo.store.shards import DTYPES
from transformer_nfn.zoo.training.grid import GRID_SIZE, Config, grid, sample
from transformer_nfn.zoo.training.tasks import Task, TextTask, load_task
from transformer_nfn.zoo.training.tasks.load import check_sources
from transformer_nfn.zoo.training.trainer import PERCENTS, Recipe

ENGINES = ("local", "ray")
# Networks per shard. On the CPU an interrupted build loses little; a GPU needs many at once.
SHARD_RUNS = {"cpu": 8, "cuda": 256}


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build: the zoo, and how it is built. None is the task's default.

    Attributes:
        runs: number of runs of the grid; None for all 16,000.
        samples: maximum number of samples to train on.
        select: the split on which the best epoch is chosen, ``held`` or ``test``.
        precision: of products in training, ``float32``, ``tf32`` or ``bf16``.
        shard_runs: runs per shard; None for a number that suits the device.
        dtype: of stored weights, ``float32`` or ``float16``.
        seeds: ``each`` for a seed per run, ``one`` for the same seed for all, as the authors.
        until: end of training in percent of ``epochs``: 50, 75 or 100.
        keep: the only checkpoint to be tested and stored, at which training ends; None for three
            and the best epoch.
        width, heads, depth: of the networks; the paper's by default.
        data: the folder of the task's files; None fetches them.
        vectors: for text, a word2vec file or a text zoo; None trains word vectors.
        device: ``auto``, ``cpu`` or ``cuda``.
        engine: ``local`` (this machine) or ``ray`` (a cluster).
        workers: number of processes; None for one per core (CPU) or one (CUDA).
        address: of the Ray cluster; None starts a local one.
        gpu_share: the part of a GPU that a worker of a Ray cluster takes, on ``cuda``.
        path: the code that computes a step; see `backends.describe_path`.

    >>> BuildOptions("digits", runs=8, width=16).group.name
    'w16-h2-d2'
    """

    task: str
    runs: int | None = None
    epochs: int | None = None
    batch: int | None = None
    seed: int = 0
    samples: int | None = None
    select: str = "held"
    precision: str = "float32"
    shard_runs: int | None = None
    dtype: str = "float32"
    seeds: str = "each"
    until: int = 100
    keep: int | None = None
    width: int = WIDTH
    heads: int = HEADS
    depth: int = BLOCKS
    data: Path | str | None = None
    vectors: Path | str | None = None
    device: str = "auto"
    engine: str = "local"
    workers: int | None = None
    address: str | None = None
    gpu_share: float = 1.0
    path: str = "auto"

    @property
    def group(self) -> SizeGroup:
        """Width, heads and depth; raises for impossible sizes."""
        return SizeGroup(self.width, self.heads, self.depth)

    @property
    def grid_runs(self) -> int:
        """Number of runs, resolved."""
        return GRID_SIZE if self.runs is None else self.runs

    def resolved(self) -> BuildOptions:
        """The options with the device that there is; raises for what this machine lacks."""
        if self.engine not in ENGINES:
            raise ZooError(f"unknown engine '{self.engine}': expected one of {', '.join(ENGINES)}")
        if self.workers is not None and self.workers < 1:
            raise ZooError(f"workers must be at least 1, found {self.workers}")
        if self.data is not None and not Path(self.data).is_dir():
            raise ZooError(f"data folder '{self.data}' does not exist")
        check_sources(self.task, self.data, self.vectors)
        if self.keep not in (None, *PERCENTS):
            raise ZooError(f"keep expected one of {PERCENTS}, found {self.keep}")
        if self.keep is not None and self.until != PERCENTS[-1]:
            raise ZooError(f"keep {self.keep} ends the training there, found until {self.until}")
        if self.address is not None and self.engine != "ray":
            raise ZooError(f"an address is for the engine ray, found {self.engine}")
        device = _device(self.device, self.engine)
        shared = self.engine == "ray" and "cuda" in device
        if not 0 < self.gpu_share <= 1 or (self.gpu_share < 1 and not shared):
            raise ZooError(
                "gpu share must be above 0 and at most 1, below 1 with the engine ray on cuda "
                f"only, found {self.gpu_share:g} with {self.engine} on {device}"
            )
        return replace(self, device=device)


def _device(device: str, engine: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ZooError(f"device must be auto, cpu or cuda, found '{device}'")
    # Workers of a cluster have GPUs that the driver has not.
    if device.startswith("cuda") and engine == "local" and not torch.cuda.is_available():
        raise ZooError("device cuda is not available: PyTorch finds no GPU")
    return device


class Progress:
    """Receives the progress of a build, and ignores it."""

    def begin(self, runs: int, done: int, work: int, note: str) -> None:
        """A build of ``runs`` begins: ``done`` are finished, ``work`` network-epochs are left."""

    def trained(self, network_epochs: int) -> None:
        """That many networks finished an epoch."""

    def finished(self, shard: str, runs: int, crashed: int) -> None:
        """A shard was written."""

    def note(self, text: str) -> None:
        """A message for the user."""


@dataclass(frozen=True)
class Plan:
    """A build in its folder.

    Attributes:
        options: as `BuildOptions.resolved` returns them.
        task: with its data, if making the plan has loaded it.
    """

    folder: Folder
    options: BuildOptions
    task: Task | None = None

    @property
    def recipe(self) -> Recipe:
        """Training parameters that all runs share."""
        stored = self.folder.metadata["recipe"]
        fields = {name: stored[name] for name in Recipe.__dataclass_fields__ if name in stored}
        return Recipe(**fields | {"percents": tuple(stored["percents"])})

    def configs(self) -> dict[str, list[Config]]:
        """The runs of each shard."""
        by_id = _grid(self.folder)
        return {
            shard: [by_id[run] for run in runs]
            for shard, runs in zip(self.folder.shards, self.folder.metadata["plan"], strict=True)
        }

    def load_task(self) -> Task:
        """The task of the zoo's metadata, with the zoo's word vectors."""
        if self.task is not None:
            return self.task
        stored = self.folder.metadata["task"]
        task = load_task(
            stored["name"],
            self.options.data,
            held=0.0 if self.recipe.select == "test" else None,
            samples=stored["samples"],
            vectors=self.folder.word_vectors(),
            group=self.folder.sizes.group,
        )
        if task.provenance != stored["provenance"]:
            raise StoreError(
                f"'{self.folder.path}' was begun on other data: expected "
                f"{stored['provenance']}, found {task.provenance}"
            )
        return task


def _grid(folder: Folder) -> dict[str, Config]:
    return {config.run: config for config in grid(folder.metadata["seed"], folder.seeds)}


def check_configurations(folder: Folder, index: Index) -> None:
    """Compare the rows of a zoo that was built with the configurations of their runs."""
    by_id, runs = _grid(folder), index.columns["run"].tolist()
    for name in (*CONFIGURATION, "seed"):
        planned = np.array([getattr(by_id[run], name) for run in runs])
        for row in np.flatnonzero(index.columns[name] != planned)[:1]:
            raise StoreError(
                f"{folder.shard_path(index.columns['shard'][row])}: '{name}' of run '{runs[row]}' "
                f"expected {planned[row]}, as zoo.json says, found {index.columns[name][row]}"
            )


def make_plan(out: Path, options: BuildOptions) -> Plan:
    """The plan in folder ``out``: that of an interrupted build, or a new one.

    A plan with fewer runs grows. Options and data are checked before anything is written.
    """
    task = None
    if options.shard_runs is not None and options.shard_runs < 1:
        raise ZooError(f"shard runs must be at least 1, found {options.shard_runs}")
    if not (out / "zoo.json").exists():
        task = _create(out, options)
    folder = Folder.open(out)
    _check_same(folder, options)
    if options.runs is not None and options.runs > folder.metadata["runs"]:
        task = Plan(folder, options, task).load_task()  # raises before anything is written
        folder = _grow(out, options)
    check_configurations(folder, folder.check_shards())
    return Plan(folder, options, task)


def _create(out: Path, options: BuildOptions) -> Task | None:
    """Write a new plan; its task, or None if another process wrote one first."""
    check_fresh(out)
    if options.dtype not in DTYPES:
        raise ZooError(f"dtype must be float32 or float16, found '{options.dtype}'")
    configs = sample(options.grid_runs, options.seed, options.seeds)
    _recipe(options)
    task = load_task(
        options.task,
        options.data,
        held=0.0 if options.select == "test" else None,
        samples=options.samples,
        vectors=_vectors(options.vectors),
        group=options.group,
    )
    words = task.words if isinstance(task, TextTask) else None
    created = Folder.create_once(out, task.sizes, _describe(options, task, configs), words)
    return task if created else None  # another's may have other word vectors


def _recipe(options: BuildOptions, epochs: int = 1, batch: int = 1) -> Recipe:
    """The recipe with the task's default ``epochs`` and ``batch``; validates the options."""
    return Recipe(
        epochs if options.epochs is None else options.epochs,
        batch if options.batch is None else options.batch,
        options.precision,
        options.select,
        percents=PERCENTS if options.keep is None else (options.keep,),
        until=options.keep or options.until,
    )


def _vectors(source: Path | str | None) -> Path | WordVectors | None:
    """The word vectors of a zoo, or the path of a file."""
    if source is None or not (path := Path(source)).is_dir():
        return None if source is None else Path(source)
    words = Folder.open(path).word_vectors()
    if words is None:
        raise ZooError(f"'{path}' holds no word vectors: it is no zoo of text")
    return words


def _grow(out: Path, options: BuildOptions) -> Folder:
    """Add shards to a plan; its shards and their rows stay as they are."""
    assert options.runs is not None
    with claim(out, "create", wait=True):
        metadata = Folder.open(out).metadata  # another process may have grown it meanwhile
        planned = {run for shard in metadata["plan"] for run in shard}
        wanted = sample(options.runs, options.seed, options.seeds)
        foreign = planned - {config.run for config in wanted}
        if foreign and options.runs > metadata["runs"]:
            raise StoreError(
                f"'{out}' cannot grow: its run {min(foreign)} is none of the {options.runs} that "
                "a build with this seed has"
            )
        more = _shards([c for c in wanted if c.run not in planned], options)
        if options.runs > metadata["runs"]:
            plan = [*metadata["plan"], *more]
            grown = metadata | {"runs": options.runs, "shards": len(plan), "plan": plan}
            Checksums(out).replace("zoo.json", json.dumps(grown, indent=1).encode())
    return Folder.open(out)


def _shards(configs: Sequence[Config], options: BuildOptions) -> list[list[str]]:
    """The runs that are trained together."""
    size = options.shard_runs or SHARD_RUNS["cuda" if "cuda" in options.device else "cpu"]
    # Runs with equally many steps per epoch are together, so that none waits for another.
    ordered = sorted(configs, key=lambda config: (-config.train_fraction, config.run))
    return [[c.run for c in ordered[i : i + size]] for i in range(0, len(ordered), size)]


def _describe(options: BuildOptions, task: Task, configs: Sequence[Config]) -> dict[str, Any]:
    plan = _shards(configs, options)
    return {
        "origin": "build",
        "task": {
            "name": task.name,
            "samples": options.samples,
            "sizes": dict(task.num_samples),
            "provenance": task.provenance,
        },
        "recipe": _recipe(options, task.epochs, task.batch_size).to_json(),
        "seed": options.seed,
        "seeds": options.seeds,
        "runs": len(configs),
        "dtype": options.dtype,
        "shards": len(plan),
        "plan": plan,
    }


def _check_same(folder: Folder, options: BuildOptions) -> None:
    """Reject a folder whose zoo differs from the options."""
    metadata = folder.metadata
    if metadata["origin"] != "build":
        made = "an imported zoo" if metadata["origin"] == "import" else "a zoo of another origin"
        raise StoreError(f"'{folder.path}' holds {made}: name another folder")
    recipe = metadata["recipe"]
    stored = {
        "task": metadata["task"]["name"],
        "seed": metadata["seed"],
        "seeds": folder.seeds,
        "samples": metadata["task"]["samples"],
        **{name: recipe[name] for name in ("epochs", "batch", "select")},
        "until": recipe.get("until", 100) if len(recipe["percents"]) > 1 else 100,
        "keep": None if len(recipe["percents"]) > 1 else recipe["percents"][0],
        "precision": recipe["precision"],
        "dtype": metadata["dtype"],
        **asdict(folder.sizes.group),
    }
    for name, value in stored.items():
        wanted = getattr(options, name)
        if wanted != value and not (name in ("epochs", "batch") and wanted is None):
            raise StoreError(
                f"'{folder.path}' holds another zoo: {name} {value}, asked for {wanted}"
            )
    runs = metadata["runs"]
    if options.grid_runs < runs or (options.runs is None and options.grid_runs > runs):
        raise StoreError(
            f"'{folder.path}' holds another zoo: runs {runs}, asked for {options.grid_runs}; it "
            "can only grow, by a larger number of runs"
        )
