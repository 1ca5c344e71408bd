"""One experiment from networks to a run folder: fit every seed, measure, write down."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from transformer_nfn.io.files import made_folder
from transformer_nfn.prediction.damaged import Damaged
from transformer_nfn.prediction.dataset import Dataset, Parts
from transformer_nfn.prediction.guarded import fit_beside
from transformer_nfn.prediction.identity import KEY, is_of, training_identity
from transformer_nfn.prediction.intervals import LEVEL, coverage, radius
from transformer_nfn.prediction.kinds import Kinds, as_kinds, describe_mixed
from transformer_nfn.prediction.known_sizes import KnownSizes
from transformer_nfn.prediction.measuring import Judgements
from transformer_nfn.prediction.metrics import standard_error
from transformer_nfn.prediction.novelty import Seen
from transformer_nfn.prediction.predictors import (
    ALL_CHECKPOINTS,
    ANY_SIZE,
    NEURAL,
    Predictor,
    check_name,
    module_builder,
    tabular_class,
)
from transformer_nfn.prediction.probe_search import search_steps
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.records import (
    RUN_FILE,
    RunError,
    RunRecord,
    write_predictions,
)
from transformer_nfn.prediction.together import TOGETHER, tau_together, with_together
from transformer_nfn.prediction.trained_on import TrainedOn
from transformer_nfn.prediction.training import SAVE_SECONDS, Report, train_seeds
from transformer_nfn.prediction.training_state import STATE_FILE
from transformer_nfn.prediction.widening import measure_widening
from transformer_nfn.zoo import MixedZoo, NetworkSizes, Zoo
from transformer_nfn.zoo.store import check_outside_zoos


def describe_zoo(zoo: Zoo | MixedZoo) -> dict[str, Any]:
    """What a record says of the zoo."""
    if isinstance(zoo, MixedZoo):
        return describe_mixed(zoo)
    return {
        "name": zoo.path.name,
        "task": zoo.metadata["task"]["name"],
        "networks": len(zoo),
        "runs": len(np.unique(zoo.table["run"].astype(str))),
        "seeds": zoo.seeds,
        "architecture": zoo.sizes.to_json(),
    }


def train_run(
    zoo: Mapping[str, Any],
    parts: Parts | Kinds,
    model: str,
    out: Path,
    *,
    seeds: list[int],
    protocol: Protocol | None = None,
    options: Mapping[str, Any] | None = None,
    selection: Mapping[str, Any] | None = None,
    table: Mapping[str, Any] | None = None,
    keep: bool = True,
    measure: Callable[[list[Predictor]], Mapping[str, Any]] | None = None,
    report: Report | None = None,
    save_every: float = SAVE_SECONDS,
    damaged: Damaged | None = None,
) -> RunRecord:
    """Fits every seed of a predictor, measures it on the test part, and writes a run folder.

    A finished run of the same kind is read instead; an interrupted one goes on where it was.

    Args:
        zoo: from `describe_zoo`.
        parts: the networks, of one kind or several, on the device to train on.
        model: one of `PREDICTORS`; for several kinds one of `ANY_SIZE`.
        out: the run folder.
        seeds: of initialisation and order; each makes a predictor.
        protocol: of neural predictors; `Protocol.of` the model by default.
        options: of the model, e.g. ``channels``.
        selection: how the networks were chosen, for the record.
        table: the table and cell this is, for the record.
        keep: whether the predictors themselves are kept.
        measure: further numbers for the record's summary, from the fitted predictors.
        report: called with progress.
        save_every: seconds between two saved states of a training.
        damaged: relatives of the networks that a `Guard` beside the predictors learns from.
    """
    check_name(model)
    check_outside_zoos(out)
    kinds = as_kinds(parts)
    check_kinds(model, mixed=kinds.named, damaged=damaged is not None)
    if model not in ALL_CHECKPOINTS:
        kinds = replace(kinds, more=[])
    protocol, options = protocol or Protocol.of(model), dict(options or {})
    identity = training_identity(model, options, kinds, protocol, seeds, damaged)
    if (out / RUN_FILE).is_file():
        record = RunRecord.read(out)
        if is_of(record, identity, model, options, kinds, protocol, seeds):
            return _completed(record, zoo, out)
        raise RunError(f"'{out}' holds another run ({record.model}); choose another folder")
    training = _Training(model, options, kinds, protocol, seeds, identity)
    with made_folder(out):  # first: hours later is too late to learn that it cannot be made
        fitted = _fit(training, out, report, save_every)
    read = _as_read(fitted, kinds)
    judged = Judgements.of(fitted.predictors, read)
    rows = [
        {**row, **tested}
        for row, tested in zip(fitted.rows, judged.seed_rows(seeds), strict=True)
    ]
    residuals = {split: judged.residuals(split) for split in ("val", "test")}
    reach = radius(np.concatenate([residuals["val"], residuals["test"]]))
    by_kind, factor = _by_kind(fitted.predictors[0], read, judged, reach, zoo)
    columns = judged.columns(seeds, factor, named=kinds.named)
    write_predictions(out, columns)
    predictors = [predictor.on_cpu() for predictor in fitted.predictors]
    if keep:
        for seed, predictor in zip(seeds, predictors, strict=True):
            predictor.save(out / f"seed-{seed}")
        Seen.of(read.train, any_size=model in ANY_SIZE).save(out)
        TrainedOn.of(kinds, str(zoo["task"])).save(out)
    guarded: dict[str, Any] = {}
    if damaged is not None and isinstance(parts, Parts):
        arch = NetworkSizes.from_json(zoo["architecture"])
        steps = search_steps(protocol.epochs)
        guard, guarded = fit_beside(predictors, parts, damaged, arch, steps)
        guard.save(out)
    taus = [row["tau"] for row in rows]
    record = RunRecord(
        model=model,
        zoo=dict(zoo),
        selection={**(selection or {}), **kinds.selection},
        protocol={**protocol.to_json(), "options": options, KEY: identity},
        seeds=rows,
        summary={
            "tau": float(np.mean(taus)),
            "tau_se": standard_error(taus),
            TOGETHER: tau_together(columns),
            "r2": float(np.mean([row["r2"] for row in rows])),
            "mae": float(np.mean([row["mae"] for row in rows])),
            "coverage": coverage(residuals["val"], residuals["test"]),
            "level": LEVEL,
            "radius": reach,
            **by_kind,
            **guarded,
            **(measure(predictors) if measure is not None else {}),
        },
        num_parameters=predictors[0].num_parameters,
        table=table,
    )
    record.write(out)
    (out / STATE_FILE).unlink(missing_ok=True)
    return record


def check_kinds(model: str, *, mixed: bool, damaged: bool) -> None:
    """Refuses to train on a mixed zoo what reads one size alone."""
    if mixed and model not in ANY_SIZE:
        raise RunError(
            f"'{model}' reads networks of one size: of a mixed zoo name one kind by its folder, or "
            f"train {', '.join(ANY_SIZE)}"
        )
    if mixed and damaged:
        raise RunError("a guard against damaged networks is learned from one kind, not several")


def _completed(record: RunRecord, zoo: Mapping[str, Any], out: Path) -> RunRecord:
    """A record from before all was kept that is today: it is of these very networks."""
    full = with_together(record, out)
    if "seeds" not in record.zoo and "seeds" in zoo:
        full = replace(full, zoo={**record.zoo, "seeds": zoo["seeds"]})
    if full is not record:
        full.write(out)
    return full


@dataclass(frozen=True)
class _Training:
    """What is fitted to which networks; ``identity`` tells it from every other training."""

    model: str
    options: Mapping[str, Any]
    kinds: Kinds
    protocol: Protocol
    seeds: list[int]
    identity: str


@dataclass(frozen=True)
class _Fitted:
    """A predictor for each seed, what its training tells, and the networks as they were read.

    Attributes:
        train: of each kind those to train on, further ones behind them.
    """

    predictors: list[Predictor]
    rows: list[dict[str, Any]]
    train: list[Dataset]


def _fit(
    training: _Training, folder: Path, report: Report | None, save_every: float
) -> _Fitted:
    """Fits every seed; ``folder`` keeps the log, and the state to go on from."""
    start = time.perf_counter()
    if training.model in NEURAL:
        fitted = _fit_neural(training, folder, report, save_every)
    else:
        fitted = _fit_tabular(training, report)
    seconds = (time.perf_counter() - start) / len(training.seeds)
    return replace(fitted, rows=[{**row, "seconds": seconds} for row in fitted.rows])


def _fit_neural(
    training: _Training, folder: Path, report: Report | None, save_every: float
) -> _Fitted:
    trained = train_seeds(
        module_builder(training.model, training.kinds.train[0], training.options),
        training.kinds,
        training.protocol,
        training.seeds,
        folder=folder,
        identity=training.identity,
        report=report,
        save_every=save_every,
    )
    predictors = [Predictor(training.model, module) for module in trained.modules]
    best = zip(trained.best_epoch, trained.val_tau, strict=True)
    rows = [{"best_epoch": epoch, "val_tau": tau} for epoch, tau in best]
    return _Fitted(predictors, rows, trained.read)


def _fit_tabular(training: _Training, report: Report | None) -> _Fitted:
    """Trees and the like have no epochs: progress is told seed by seed, and nothing is saved."""
    (train,), (val,) = training.kinds.train, training.kinds.val
    predictors = []
    for i, seed in enumerate(training.seeds):
        inner = tabular_class(training.model)(**training.options)
        held = (val.network, val.accuracy)
        inner.fit(train.network, train.accuracy, validation=held, seed=seed)
        predictors.append(Predictor(training.model, inner))
        if report is not None:
            report({"epoch": i + 1, "epochs": len(training.seeds)})
    return _Fitted(predictors, [{"best_epoch": None} for _ in predictors], [train])


def _as_read(fitted: _Fitted, kinds: Kinds) -> Kinds:
    """The networks with what all seeds and measures read of them computed once."""
    prepared = fitted.predictors[0].prepared
    own = zip(fitted.train, kinds.train, strict=True)
    return replace(
        kinds,
        train=[prepared(data.take(torch.arange(len(first)))) for data, first in own],
        val=[prepared(data) for data in kinds.val],
        test=[prepared(data) for data in kinds.test],
        left_out={name: prepared(data) for name, data in kinds.left_out.items()},
    )


def _by_kind(
    predictor: Predictor, kinds: Kinds, judged: Judgements, reach: float, zoo: Mapping[str, Any]
) -> tuple[dict[str, Any], Callable[[str], float]]:
    """Of a mixed zoo the figures by kind, and how much wider intervals of a kind are."""
    if not kinds.named:
        return {}, lambda _: 1.0
    sizes = {name: NetworkSizes.from_json(a) for name, a in zoo["architectures"].items()}
    widening = measure_widening(predictor.inner, kinds, sizes)
    known = KnownSizes(tuple(sizes[name] for name in kinds.names), reach, widening)
    figures = judged.by_kind(lambda kind: known.reach(sizes[kind]))
    return {**figures, "widening": widening}, lambda kind: known.factor(sizes[kind])
