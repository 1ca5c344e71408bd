"""The main job on an embedded default: digits zoos of both kinds, every predictor, a report."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console

from transformer_nfn.cli.experiment_progress import (
    counting_bar,
    tau_by_kind_table,
    tau_text,
    trainings_bar,
)
from transformer_nfn.cli.options import seed_from
from transformer_nfn.known_tasks import SEED_KINDS, seeds_text
from transformer_nfn.processes import worker_pool

if TYPE_CHECKING:
    from transformer_nfn.prediction.runs import RunRecord
    from transformer_nfn.zoo import BuildOptions, Zoo
    from transformer_nfn.zoo.training.plan import Plan

Job = TypeVar("Job")
Result = TypeVar("Result")

# Not 0: the settings of the predictors on invariants were chosen on a zoo of seed 0.
SEED = 1

LIBRARIES = ("transformer_nfn.cli.app", "transformer_nfn.paper.cells", "sklearn.datasets")
"""What workers need from the start."""

EXPLANATION = (
    "One seed for all: every network starts from the same random numbers, as in the authors' "
    "sweeps, so their coordinates are aligned from birth and raw weights can be compared entry by "
    "entry. "
    "A seed each: nothing aligns them, as with networks met in the wild."
)


@dataclass(frozen=True)
class Size:
    """How much the demo does, for each kind of zoo alike.

    Attributes:
        runs: networks of a zoo.
        zoo_epochs: what their learning rates are laid out for; training ends at the checkpoint
            that the predictors read.
        seeds: of every predictor.
        epochs: of the neural predictors.
        probe_epochs: of the one that asks probes.
    """

    runs: int
    zoo_epochs: int
    seeds: int
    epochs: int
    probe_epochs: int


QUICK_TIME = "a minute"
"""How long the quick demo takes, in words, on two Arm cores with nothing else to do."""
FULL = Size(runs=192, zoo_epochs=12, seeds=2, epochs=40, probe_epochs=20)
QUICK = Size(runs=64, zoo_epochs=4, seeds=2, epochs=15, probe_epochs=4)


def demo_command(
    out: Annotated[Path, typer.Option("--out", help="Folder for zoos, runs and report.")] = Path(
        "demo"
    ),
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help=f"All steps in {QUICK_TIME}, on so few networks that τ says little."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(callback=seed_from(0), help="Chooses the runs.")] = SEED,
) -> None:
    """Build two small zoos, train all predictors, write a report.

    Both zoos hold the same runs: in one they share a seed, as in the authors' sweeps, in the other
    each has its own. Everything is kept in the folder of --out; run the command again to resume.

    [bold]Example[/bold]

      tnfn demo --quick
    """
    from transformer_nfn.zoo.store import check_outside_zoos

    check_outside_zoos(out)
    console = Console()
    start = time.perf_counter()
    size = QUICK if quick else FULL
    root = out / ("quick" if quick else "full")
    with worker_pool(LIBRARIES) as pool:
        from transformer_nfn.prediction.data import load_parts
        from transformer_nfn.report import write_report

        console.print(
            f"[bold]1.[/bold] two zoos of {size.runs} small transformers, trained on 8×8 digits"
        )
        for kind, zoo in _build_zoos(pool, root, size, seed).items():
            counts = load_parts(zoo).counts
            console.print(
                f"   {seeds_text(kind)}: {counts['train']} networks to train on, "
                f"{counts['val']} to select by, {counts['test']} to test on"
            )
        console.print(
            f"[bold]2.[/bold] predict their test accuracy from their weights, {size.seeds} seeds"
        )
        records = _train_predictors(pool, root, size)
    console.print(tau_by_kind_table(records))
    console.print(EXPLANATION, highlight=False)
    page = root / "report.html"
    write_report(
        [root / kind / "cells" for kind in SEED_KINDS],
        page,
        zoos=[root / kind / "zoo" for kind in SEED_KINDS],
    )
    spent = time.perf_counter() - start
    console.print(
        f"[bold]3.[/bold] R², errors, intervals, figures: {page}   ({spent:.0f} s in all)",
        highlight=False,
    )
    console.print(
        f"\nTry: tnfn predict {root / 'each' / 'cells' / records['each'][-1].model} "
        f"{root / 'each' / 'zoo'}#0",
        highlight=False,
        soft_wrap=True,
    )


def _results(
    pool: ProcessPoolExecutor | None, work: Callable[[Job], Result], jobs: list[Job]
) -> Iterator[tuple[Job, Result]]:
    """Results of the jobs as they come from the pool; without one, from here."""
    if pool is None:
        yield from ((job, work(job)) for job in jobs)
        return
    running = {pool.submit(work, job): job for job in jobs}
    yield from ((running[done], done.result()) for done in as_completed(running))


def _build_zoos(
    pool: ProcessPoolExecutor | None, root: Path, size: Size, seed: int
) -> dict[str, Zoo]:
    """Train both zoos at once, so that no core waits for the last shard of the first."""
    from transformer_nfn.prediction.data import PERCENT
    from transformer_nfn.zoo import BuildOptions, build
    from transformer_nfn.zoo.training.backends import describe_path
    from transformer_nfn.zoo.training.plan import make_plan

    zoos = {
        root / kind / "zoo": BuildOptions(
            task="digits",
            runs=size.runs,
            seed=seed,
            epochs=size.zoo_epochs,
            seeds=kind,
            until=PERCENT,
            device="cpu",
        )
        for kind in SEED_KINDS
    }
    jobs = [
        (path, options, shard)
        for path, options in zoos.items()
        for shard in make_plan(path, options).folder.missing()
    ]
    with counting_bar("   groups of networks", len(jobs)) as (bar, task):
        bar.console.print(describe_path("auto", "cpu")[1], highlight=False)
        for _ in _results(pool, _train_shard, jobs):
            bar.advance(task)
    # Writes the indices, after training what another process claimed and did not finish.
    return {options.seeds: build(path, options) for path, options in zoos.items()}


def _train_shard(job: tuple[Path, BuildOptions, str]) -> None:
    """Train a shard of a zoo, unless another process does."""
    from transformer_nfn.zoo.training.local_engine import claim_shard
    from transformer_nfn.zoo.training.plan import Progress

    path, options, shard = job
    claim_shard(_plan(path, options), shard, Progress())


@functools.cache
def _plan(path: Path, options: BuildOptions) -> Plan:
    from transformer_nfn.zoo.training.plan import make_plan

    plan = make_plan(path, options)
    return replace(plan, task=plan.load_task())


def _train_predictors(
    pool: ProcessPoolExecutor | None, root: Path, size: Size
) -> dict[str, list[RunRecord]]:
    """Train every predictor on both zoos."""
    from transformer_nfn.paper.tables import EXTRA_MODELS, PAPER_MODELS

    models = (*PAPER_MODELS, *EXTRA_MODELS)
    # The last models take longest; begun last, one would run alone.
    order = [(kind, model) for model in reversed(models) for kind in SEED_KINDS]
    records: dict[tuple[str, str], RunRecord] = {}
    train = functools.partial(_train_one, root, size)
    with trainings_bar("   predictors", len(order)) as report:
        for (kind, model), record in _results(pool, train, order):
            records[kind, model] = record
            result = {"result": f"τ {tau_text(record)}"}
            report(f"   {seeds_text(kind):16s} {model:18s}", result)
    return {kind: [records[kind, model] for model in models] for kind in SEED_KINDS}


def _train_one(root: Path, size: Size, job: tuple[str, str]) -> RunRecord:
    """Train a model on a zoo, given the kind of its seeds and the model."""
    from transformer_nfn.models.predictor import find
    from transformer_nfn.paper.cells import Cell, fill_cell

    kind, model = job
    # Probes are a hundred times the work of reading weights, and learn in fewer passes.
    epochs = size.probe_epochs if find(model).every_checkpoint else size.epochs
    seeds = tuple(range(size.seeds))
    cell = Cell("", model, "", model, seeds=seeds, epochs=epochs, keep=True)
    return fill_cell(root / kind / "zoo", cell, root / kind)
