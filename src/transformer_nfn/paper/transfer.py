"""Ranking of other zoos' networks by predictors, of other tasks too: only the order counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from transformer_nfn.models.predictor import Predictor, known_variants
from transformer_nfn.models.task_reader import MAX_TOKENS
from transformer_nfn.paper.numbers import HOME, TRANSFER
from transformer_nfn.prediction.data import Dataset, Selection, load_rows
from transformer_nfn.prediction.metrics import kendall_tau, standard_error
from transformer_nfn.prediction.predictors import load_predictors, seed_predictions
from transformer_nfn.prediction.runs import ENSEMBLE_TAU, RUN_FILE, RunError, RunRecord
from transformer_nfn.prediction.training_set import TrainingDigests
from transformer_nfn.prediction.uncertainty import TrainedSizes
from transformer_nfn.zoo import NetworkSizes, Zoo

FEWEST = 2


def other_zoos(home: Path, others: Sequence[Path | str]) -> list[Zoo]:
    """Open the zoos whose networks are to be ranked; refuse those of the home zoo.

    Args:
        home: a zoo, or a folder of runs.
        others: folders or names.
    """
    zoos = [Zoo.open(path) for path in others]
    if not zoos:
        raise RunError("name another zoo, whose networks are to be ranked, with --to ZOO")
    names = [zoo.path.name for zoo in zoos]
    if twice := [name for name in names if names.count(name) > 1]:
        raise RunError(f"two zoos are called '{twice[0]}': they would share a column")
    trained = _networks(Zoo.open(home)) if (home / "zoo.json").is_file() else set()
    for zoo in zoos:
        if same := len(trained & _networks(zoo)):
            raise RunError(f"'{zoo.path}' holds {same} networks of '{home}': name another zoo")
    return zoos


def _networks(zoo: Zoo) -> set[tuple[str, int, int]]:
    columns = (zoo.table[name].tolist() for name in ("run", "epoch", "checksum"))
    return set(zip(*columns, strict=True))


def transferred(
    folders: Iterable[Path], others: Sequence[Zoo], percent: int | None
) -> list[RunRecord]:
    """Records of the runs in folders, and of their rankings of other zoos."""
    records: list[RunRecord] = []
    for folder in folders:
        record = at_home(folder, RunRecord.read(folder))
        if any(record.table == other.table and record.zoo == other.zoo for other in records):
            row = f"{(record.table or {})['row']} ({folder.name})"
            record = replace(record, table={**(record.table or {}), "row": row})
        records += [record, *(ranked(folder, record, zoo, percent) for zoo in others)]
    return records


def at_home(folder: Path, record: RunRecord) -> RunRecord:
    """The record of a run as the first cell of its row: τ on the test part of its own zoo."""
    record.check_finished(folder / RUN_FILE)
    options = record.protocol.get("options") or {}
    same = [
        row
        for row, variant in known_variants().items()
        if options and (row.partition(":")[0], variant.options) == (record.model, options)
    ]
    text = ", ".join(f"{key} {value}" for key, value in options.items())
    row = same[0] if same else f"{record.model} ({text})" if text else record.model
    return replace(record, table={"table": TRANSFER.topic, "row": row, "column": HOME})


def ranked(folder: Path, record: RunRecord, zoo: Zoo, percent: int | None) -> RunRecord:
    """The record of a run with its ranking of another zoo's networks in place of its results.

    Args:
        folder: of the run.
        record: from `at_home`.
        zoo: the other one.
        percent: which checkpoint of each run.
    """
    predictors, rows = load_predictors(folder, record), Selection(percent).rows(zoo)
    table = {**(record.table or {}), "column": zoo.path.name}
    empty = replace(
        record, table=table, selection={"percent": percent, "test": len(rows)}, seeds=[], summary={}
    )
    trained = TrainedSizes.of(record).first
    misfits = [why for p in predictors if (why := misfit(p, zoo.sizes, trained)) is not None]
    if misfits:
        return replace(empty, status=f"cannot read them: {misfits[0]}")
    if len(rows) < FEWEST:
        raise RunError(f"not enough networks: {len(rows)} of '{zoo.path}' are selected")
    data = load_rows(zoo, rows)
    _check_unseen(folder, record, zoo, data)
    predicted = seed_predictions(predictors, readable(predictors[0], data, zoo.sizes)).numpy()
    taus = [kendall_tau(data.truth, each) for each in predicted]
    pairs = zip(record.seeds, taus, strict=True)
    return replace(
        empty,
        seeds=[{"seed": row["seed"], "tau": tau} for row, tau in pairs],
        summary={
            "tau": sum(taus) / len(taus),
            "tau_se": standard_error(taus),
            ENSEMBLE_TAU: kendall_tau(data.truth, predicted.mean(0)),
        },
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
    return replace(data, network=read)
