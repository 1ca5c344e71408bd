"""What a build will do, fixed before it starts: runs, recipe, and which run is in which shard."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_nfn.known_tasks import BLOCKS, HEADS, WIDTH
from transformer_nfn.zoo.errors import StoreError, ZooError
from transformer_nfn.zoo.sizes import Kind
from transformer_nfn.zoo.store.folder import (
    VECTORS_FILE,
    Checksums,
    Folder,
    WordVectors,
    check_fresh,
    claim,
)
from transformer_nfn.zoo.training.grid import GRID_SIZE, Config, grid, sample
from transformer_nfn.zoo.training.tasks import Task, TextTask, load_task
from transformer_nfn.zoo.training.trainer import Recipe

# Networks a shard. On the CPU little is lost when a build is stopped; a GPU wants many at once.
SHARD_RUNS = {"cpu": 8, "cuda": 256}


@dataclass(frozen=True)
class Settings:
    """What a user asks of a build. None leaves the choice to the task.

    Attributes:
        runs: how many runs of the grid; None for all 16,000.
        samples: train on so many samples at most.
        select: where the best epoch is chosen, ``held`` or ``test``.
        shard_runs: runs a shard, None for a size that suits the device.
        dtype: how weights are stored, ``float32`` or ``float16``.
        seeds: ``each`` for a seed of its own for every run, ``one`` for the same seed for all,
            as the authors made their zoo.
        until: where training ends, in percent of ``epochs``: 50, 75 or 100.
        width, heads, depth: of the networks; the paper's by default.
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
    width: int = WIDTH
    heads: int = HEADS
    depth: int = BLOCKS

    @property
    def kind(self) -> Kind:
        """The kind of network; refuses sizes that cannot be."""
        return Kind(self.width, self.heads, self.depth)


@dataclass(frozen=True)
class Plan:
    """A build in its folder.

    Attributes:
        task: with its data, where making the plan has loaded them already.
    """

    folder: Folder
    task: Task | None = None

    @property
    def recipe(self) -> Recipe:
        """What all runs share."""
        data = dict(self.folder.about["recipe"])
        return Recipe(**data | {"percents": tuple(data["percents"])})

    @property
    def seed(self) -> int:
        """The seed the runs' own seeds come from."""
        return int(self.folder.about["seed"])

    @property
    def seeds(self) -> str:
        """Whether the runs share ``one`` seed or have one ``each``."""
        return self.folder.seeds

    def configs(self) -> dict[str, list[Config]]:
        """The runs of each shard."""
        by_id = {config.run: config for config in grid(self.seed, self.seeds)}
        return {
            shard: [by_id[run] for run in runs]
            for shard, runs in zip(self.folder.shards, self.folder.about["plan"], strict=True)
        }

    def load_task(self, data: Path | None) -> Task:
        """The task as the zoo's ``zoo.json`` describes it, with the zoo's own word vectors."""
        if self.task is not None:
            return self.task
        about = self.folder.about["task"]
        task = load_task(
            about["name"],
            data,
            held=0.0 if self.recipe.select == "test" else None,
            samples=about["samples"],
            vectors=self.folder.word_vectors(),
            kind=self.folder.arch.kind,
        )
        if task.provenance != about["provenance"]:
            raise StoreError(
                f"'{self.folder.path}' was begun on other data: expected "
                f"{about['provenance']}, found {task.provenance}"
            )
        return task


def make_plan(
    out: Path, settings: Settings, *, data: Path | None, vectors: Path | None, device: str
) -> Plan:
    """The plan in folder ``out``: the one that is there if it is the same, else a new one.

    One that is the same but for having fewer runs grows by the others.

    Everything that can be wrong with the settings or the data is found before anything is
    written.
    """
    task = None
    if settings.shard_runs is not None and settings.shard_runs < 1:
        raise ZooError(f"shard runs must be at least 1, found {settings.shard_runs}")
    if not (out / "zoo.json").exists():
        check_fresh(out)
        if settings.dtype not in ("float32", "float16"):
            raise ZooError(f"dtype must be float32 or float16, found '{settings.dtype}'")
        runs = GRID_SIZE if settings.runs is None else settings.runs
        configs = sample(runs, settings.seed, settings.seeds)
        Recipe(
            settings.epochs or 1,
            select=settings.select,
            precision=settings.precision,
            until=settings.until,
        )
        task = load_task(
            settings.task,
            data,
            held=0.0 if settings.select == "test" else None,
            samples=settings.samples,
            vectors=_vectors(vectors),
            kind=settings.kind,
        )
        about = _describe(settings, task, configs, device)
        with claim(out, "create", wait=True):
            if (out / "zoo.json").exists():
                # Another builder came first, perhaps with other word vectors.
                task = None
            else:
                if isinstance(task, TextTask):
                    Checksums(out).replace(VECTORS_FILE, task.words.to_bytes())
                Folder.create(out, task.arch, about)
    folder = Folder.open(out)
    _check_same(folder, settings)
    if settings.runs is not None and settings.runs > folder.about["runs"]:
        task = Plan(folder, task).load_task(data)  # what is wrong with the data is found first
        folder = _grow(out, settings, device)
    return Plan(folder, task)


def _vectors(given: Path | None) -> Path | WordVectors | None:
    """Those of another zoo where its folder is given; files are left to who reads them."""
    if given is None or not given.is_dir():
        return given
    words = Folder.open(given).word_vectors()
    if words is None:
        raise ZooError(f"'{given}' holds no word vectors: it is no zoo of text")
    return words


def _grow(out: Path, settings: Settings, device: str) -> Folder:
    """The zoo with further shards in its plan; those it has, and their rows, stay as they are."""
    assert settings.runs is not None
    with claim(out, "create", wait=True):
        about = Folder.open(out).about  # another builder may have grown it meanwhile
        there = {run for shard in about["plan"] for run in shard}
        wanted = sample(settings.runs, settings.seed, settings.seeds)
        strange = there - {config.run for config in wanted}
        if strange and settings.runs > about["runs"]:
            raise StoreError(
                f"'{out}' cannot grow: its run {min(strange)} is none of the {settings.runs} that "
                "a build with this seed has"
            )
        more = _shards([c for c in wanted if c.run not in there], settings, device)
        if settings.runs > about["runs"]:
            plan = [*about["plan"], *more]
            grown = about | {"runs": settings.runs, "shards": len(plan), "plan": plan}
            Checksums(out).replace("zoo.json", json.dumps(grown, indent=1).encode())
    return Folder.open(out)


def _shards(configs: Sequence[Config], settings: Settings, device: str) -> list[list[str]]:
    """Which runs are trained together."""
    size = settings.shard_runs or SHARD_RUNS["cuda" if "cuda" in device else "cpu"]
    # Runs with as many steps an epoch stand together, so that none waits for another.
    ordered = sorted(configs, key=lambda config: (-config.train_fraction, config.run))
    return [[c.run for c in ordered[i : i + size]] for i in range(0, len(ordered), size)]


def _describe(
    settings: Settings, task: Task, configs: Sequence[Config], device: str
) -> dict[str, Any]:
    recipe = Recipe(
        task.epochs if settings.epochs is None else settings.epochs,
        task.batch_size if settings.batch is None else settings.batch,
        settings.precision,
        settings.select,
        until=settings.until,
    )
    plan = _shards(configs, settings, device)
    return {
        "origin": "build",
        "task": {
            "name": task.name,
            "samples": settings.samples,
            "sizes": dict(task.sizes),
            "provenance": task.provenance,
        },
        "recipe": recipe.to_json(),
        "seed": settings.seed,
        "seeds": settings.seeds,
        "runs": len(configs),
        "dtype": settings.dtype,
        "shards": len(plan),
        "plan": plan,
    }


def _check_same(folder: Folder, settings: Settings) -> None:
    about = folder.about
    if about.get("origin") != "build":
        made = "an imported zoo" if about.get("origin") == "import" else "a zoo of another origin"
        raise StoreError(f"'{folder.path}' holds {made}: name another folder")
    recipe = about["recipe"]
    asked = {
        "task": (settings.task, about["task"]["name"]),
        "seed": (settings.seed, about["seed"]),
        "seeds": (settings.seeds, folder.seeds),
        "samples": (settings.samples, about["task"]["samples"]),
        "epochs": (settings.epochs, recipe["epochs"]),
        "batch": (settings.batch, recipe["batch"]),
        "select": (settings.select, recipe["select"]),
        "until": (settings.until, recipe.get("until", 100)),
        "precision": (settings.precision, recipe["precision"]),
        "dtype": (settings.dtype, about["dtype"]),
        "width": (settings.width, folder.arch.d_model),
        "heads": (settings.heads, folder.arch.heads),
        "depth": (settings.depth, folder.arch.blocks),
    }
    for name, (wanted, there) in asked.items():
        optional = name in ("epochs", "batch")
        if wanted != there and not (optional and wanted is None):
            raise StoreError(
                f"'{folder.path}' holds another zoo: {name} {there}, asked for {wanted}"
            )
    runs = GRID_SIZE if settings.runs is None else settings.runs
    if runs < about["runs"] or (settings.runs is None and runs > about["runs"]):
        raise StoreError(
            f"'{folder.path}' holds another zoo: runs {about['runs']}, asked for {runs}; it can "
            "only grow, by a larger number of runs"
        )
