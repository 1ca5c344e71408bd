"""Transfer: predictors trained on the networks of one task rank those of another.

Accuracies of different tasks are not comparable, their order is: a cell is Kendall's τ alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from transformer_nfn.io.files import write_parquet, write_text
from transformer_nfn.models import Network
from transformer_nfn.models.predictor import Predictor, model_name
from transformer_nfn.models.task_reader import MAX_TOKENS
from transformer_nfn.paper.cells import Cell, fill_cell
from transformer_nfn.paper.numbers import TRANSFER, mean_text
from transformer_nfn.paper.table_text import (
    SEEDS_TOGETHER,
    markdown_rows,
    mean_tau,
    seeds_together,
    zoo_label,
)
from transformer_nfn.paper.tables import EXTRA_MODELS, PAPER_MODELS
from transformer_nfn.prediction.data import PERCENT, Dataset, Selection, describe_zoo, load_rows
from transformer_nfn.prediction.metrics import kendall_tau, standard_error
from transformer_nfn.prediction.predictors import load_predictors, seed_predictions
from transformer_nfn.prediction.runs import RUN_FILE, RunError, RunRecord, find_runs
from transformer_nfn.prediction.training_set import TrainingDigests
from transformer_nfn.prediction.uncertainty import TrainedSizes
from transformer_nfn.zoo import NetworkSizes, Zoo
from transformer_nfn.zoo.store import check_outside_zoos

NAME = TRANSFER
FEWEST = 2


@dataclass(frozen=True)
class Ranking:
    """Quality of the ranking of one zoo's networks by the predictors of one run.

    Attributes:
        row: label of the predictor.
        home: label of its training zoo.
        zoo: label of the zoo whose networks are ranked.
        at_home: whether these are the test part of the training zoo.
        networks: number of ranked networks.
        tau: Kendall's τ, the mean over seeds; None where the predictor cannot read them.
        error: its standard error; None for one seed.
        together: τ of the mean over the seeds; None for one seed.
        status: ``done``, or why the predictor cannot read these networks.
    """

    row: str
    home: str
    zoo: str
    at_home: bool
    networks: int
    tau: float | None = None
    error: float | None = None
    together: float | None = None
    status: str = "done"


def _learner(name: str, **options: Any) -> Cell:
    return Cell(NAME, name, "home", name.partition(":")[0], options, keep=True)


LEARNERS: Mapping[str, Cell] = {
    cell.row: cell
    for cell in (
        *map(_learner, (*PAPER_MODELS, *EXTRA_MODELS)),
        _learner("whole_network:invariants", probes=0),
        _learner("invariant_boosting:whole", whole=True),
        _learner("invariant_mlp:whole", whole=True),
    )
}
"""Models of all tables, and those that read networks of any patch, tokens and classes."""
_LABELS = {
    "whole_network:invariants": "Whole network, invariants alone",
    "invariant_boosting:whole": "Boosting on whole invariants",
    "invariant_mlp:whole": "MLP on whole invariants",
}
Progress = Callable[[str, Mapping[str, Any]], None]


def transfer(
    home: Path,
    targets: Sequence[Path],
    out: Path,
    *,
    seeds: list[int],
    epochs: int | None = None,
    learners: Iterable[str] | None = None,
    percent: int | None = PERCENT,
    device: str = "cpu",
    progress: Progress | None = None,
) -> list[Ranking]:
    """Rank the networks of other zoos and write the table as Parquet and Markdown.

    Args:
        home: a zoo to train predictors on (finished ones are read), or a folder in or below which
            there are runs that keep their predictors.
        targets: the other zoos.
        out: folder for cells and the table.
        seeds: random seeds of every predictor that is trained.
        epochs: epochs of neural predictors; None for those of each model.
        learners: which of `LEARNERS` are trained; None for all.
        percent: the checkpoint of each run, in percent of training.
        device: device of neural predictors.
        progress: called with the label of the predictor and its events.
    """
    names = list(LEARNERS if learners is None else learners)
    for name in names:
        if name not in LEARNERS:
            raise RunError(f"there is no model '{name}'; there are {', '.join(LEARNERS)}")
    zoos = [Zoo.open(path) for path in targets]
    _check(zoos, home)
    check_outside_zoos(out)
    if (home / "zoo.json").is_file():
        Zoo.open(home)
        how: dict[str, Any] = dict(seeds=seeds, epochs=epochs, percent=percent, device=device)
        runs = (_trained(home, LEARNERS[name], out, how, progress) for name in names)
    else:
        runs = ((folder, RunRecord.read(folder)) for folder in find_runs([home]))
    rankings: list[Ranking] = []
    for folder, record in runs:
        own = [_at_home(folder, record)]
        own += [_elsewhere(folder, record, zoo, percent) for zoo in zoos]
        if any(r.row == own[0].row and r.home == own[0].home for r in rankings):
            own = [replace(r, row=f"{r.row} ({folder.name})") for r in own]
        rankings += own
        if progress is not None:
            taus = [r.status if r.tau is None else f"τ {r.tau:.3f}" for r in own]
            progress(own[0].row, {"result": ", ".join(taus)})
    write_text(out / f"{NAME}.md", transfer_markdown(rankings))
    columns = {name: [getattr(r, name) for r in rankings] for name in Ranking.__annotations__}
    write_parquet(out / f"{NAME}.parquet", columns, RunError)
    return rankings


def _check(zoos: Sequence[Zoo], home: Path) -> None:
    if not zoos:
        raise RunError("name another zoo, whose networks are to be ranked, with --to ZOO")
    names = [zoo.path.name for zoo in zoos]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise RunError(f"two zoos are called '{twice[0]}': they would share a column")
    trained = _networks(Zoo.open(home)) if (home / "zoo.json").is_file() else set()
    for zoo in zoos:
        if same := len(trained & _networks(zoo)):
            raise RunError(f"'{zoo.path}' holds {same} networks of '{home}': name another zoo")


def _networks(zoo: Zoo) -> set[tuple[str, int, int]]:
    columns = (zoo.table[name].tolist() for name in ("run", "epoch", "checksum"))
    return set(zip(*columns, strict=True))


def _trained(
    home: Path, cell: Cell, out: Path, how: dict[str, Any], progress: Progress | None
) -> tuple[Path, RunRecord]:
    """Train the run of one learner, or read it."""
    label = _LABELS.get(cell.row, model_name(cell.model))
    report = None if progress is None else partial(progress, label)
    return out / "cells" / cell.folder, fill_cell(home, cell, out, report=report, **how)


def _words(record: RunRecord) -> str:
    options = record.protocol.get("options") or {}
    for name, label in _LABELS.items():
        if (LEARNERS[name].model, LEARNERS[name].options) == (record.model, options):
            return label
    text = ", ".join(f"{key} {value}" for key, value in options.items())
    return f"{model_name(record.model)} ({text})" if text else model_name(record.model)


def _at_home(folder: Path, record: RunRecord) -> Ranking:
    """Ranking of the run's test part."""
    record.check_finished(folder / RUN_FILE)
    label, networks = zoo_label(record), int(record.selection.get("test", 0))
    figures = (*mean_tau(record), seeds_together(record))
    return Ranking(_words(record), label, label, True, networks, *figures)


def _elsewhere(folder: Path, record: RunRecord, zoo: Zoo, percent: int | None) -> Ranking:
    """Ranking of the networks of another zoo."""
    predictors = load_predictors(folder, record)
    rows = Selection(percent).rows(zoo)
    other = zoo_label(replace(record, zoo=describe_zoo(zoo)))
    empty = Ranking(_words(record), zoo_label(record), other, False, len(rows))
    trained = TrainedSizes.of(record).first
    misfits = [why for p in predictors if (why := misfit(p, zoo.sizes, trained)) is not None]
    if misfits:
        return replace(empty, status=f"cannot read them: {misfits[0]}")
    if len(rows) < FEWEST:
        raise RunError(f"not enough networks: {len(rows)} of '{zoo.path}' are selected")
    data = load_rows(zoo, rows)
    _check_unseen(folder, record, zoo, data)
    predicted = seed_predictions(predictors, readable(predictors[0], data, zoo.sizes)).numpy()
    accuracy = data.truth
    taus = [kendall_tau(accuracy, each) for each in predicted]
    several = len(taus) > 1
    return replace(
        empty,
        tau=float(np.mean(taus)),
        error=standard_error(taus) if several else None,
        together=kendall_tau(accuracy, predicted.mean(0)) if several else None,
    )


def _check_unseen(folder: Path, record: RunRecord, zoo: Zoo, data: Dataset) -> None:
    """Reject training networks, which only those of the same task can be."""
    task = zoo.task
    if record.zoo.get("task") != task:
        return
    standing = TrainingDigests.load(folder).standings(data, task)
    known = len(standing) - standing.count("unseen")
    if known:
        raise RunError(
            f"'{zoo.path}' holds {known} networks of runs that '{folder}' was trained on or "
            "selected by: name a zoo of other networks"
        )


def misfit(predictor: Predictor, found: NetworkSizes, trained: NetworkSizes) -> str | None:
    """Why a predictor cannot read networks of another task; None where it can."""
    if not predictor.any_task:
        return predictor.misfit(found, trained)
    words = ("networks of word vectors", "networks with an embedding of patches")
    expected, given = (words[bool(sizes.patch)] for sizes in (trained, found))
    return None if expected == given else f"expected {expected}, found {given}"


def readable(predictor: Predictor, data: Dataset, sizes: NetworkSizes) -> Dataset:
    """The networks with features that depend on their number of tokens."""
    if not predictor.any_task:
        return data
    with torch.no_grad():
        read = predictor.prepared(data.network, sizes.positions()[:MAX_TOKENS])
    return replace(data, network=cast("Network", read))


def transfer_markdown(rankings: Sequence[Ranking]) -> str:
    """The table: a row for each predictor, the test part of its zoo first, then the others."""
    lines = ["**Transfer. Kendall’s τ of predictors on networks of other tasks.**", ""]
    zoos = list(dict.fromkeys(r.zoo for r in rankings if not r.at_home))
    for home in dict.fromkeys(r.home for r in rankings):
        part = [r for r in rankings if r.home == home]
        lines += [*_of_home(home, part, zoos), ""]
    notes = [f"- {r.row} → {r.zoo}: {r.status}" for r in rankings if r.status != "done"]
    lines += ["- Only the order counts; accuracies of different tasks are not comparable.", *notes]
    return "\n".join([*lines, ""])


def _of_home(home: str, rankings: Sequence[Ranking], zoos: Sequence[str]) -> list[str]:
    counts = {r.zoo: r.networks for r in rankings if not r.at_home}
    tested = {r.networks for r in rankings if r.at_home}
    at_home = f"at home, {min(tested):,} tested" if len(tested) == 1 else "at home"
    columns = [f"{zoo}: {counts[zoo]:,} ranked" for zoo in zoos]
    rows = []
    for row in dict.fromkeys(r.row for r in rankings):
        own = [r for r in rankings if r.row == row]
        cells = [next(r for r in own if r.at_home)]
        cells += [next(r for r in own if r.zoo == zoo and not r.at_home) for zoo in zoos]
        texts = [mean_text(r.tau, r.error) if r.status == "done" else "cannot read" for r in cells]
        rows.append([row, *texts])
        if any(r.together is not None for r in cells):
            rows.append([SEEDS_TOGETHER, *(mean_text(r.together) for r in cells)])
    table = markdown_rows(["Model"], [at_home, *columns], rows)
    return [f"Trained on: {home}.", "", *table]
