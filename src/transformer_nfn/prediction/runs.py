"""One experiment from networks to a run folder: fit every seed, measure, write down."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.prediction.damaged import Damaged
from transformer_nfn.prediction.dataset import Dataset, Parts
from transformer_nfn.prediction.guard import Guard
from transformer_nfn.prediction.guard_fit import fit_guard
from transformer_nfn.prediction.identity import KEY, is_of, training_identity
from transformer_nfn.prediction.intervals import LEVEL, coverage, radius
from transformer_nfn.prediction.metrics import scores, standard_error
from transformer_nfn.prediction.novelty import Seen
from transformer_nfn.prediction.predictors import (
    ALL_CHECKPOINTS,
    NEURAL,
    Predictor,
    check_name,
    module_builder,
    tabular_class,
)
from transformer_nfn.prediction.probe_search import STEPS, STEPS_AN_EPOCH
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.records import (
    CONFIGURATION,
    RUN_FILE,
    RunError,
    RunRecord,
    write_predictions,
)
from transformer_nfn.prediction.trained_on import TrainedOn
from transformer_nfn.prediction.training import SAVE_SECONDS, STATE_FILE, Report, train_seeds
from transformer_nfn.zoo import NetworkSizes

if TYPE_CHECKING:
    from transformer_nfn.zoo import Zoo


def describe_zoo(zoo: Zoo) -> dict[str, Any]:
    """What a record says of the zoo."""
    return {
        "name": zoo.path.name,
        "task": zoo.about["task"]["name"],
        "networks": len(zoo),
        "runs": len(np.unique(zoo.table["run"].astype(str))),
        "seeds": zoo.seeds,
        "architecture": zoo.arch.to_json(),
    }


def train_run(
    zoo: Mapping[str, Any],
    parts: Parts,
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
        parts: the networks, on the device to train on.
        model: one of `PREDICTORS`.
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
    if model not in ALL_CHECKPOINTS:
        parts = replace(parts, more=None)
    protocol, options = protocol or Protocol.of(model), dict(options or {})
    identity = training_identity(model, options, parts, protocol, seeds, damaged)
    if (out / RUN_FILE).is_file():
        record = RunRecord.read(out)
        if is_of(record, identity, model, options, parts, protocol, seeds):
            return _with_seeds(record, zoo, out)
        raise RunError(f"'{out}' holds another run ({record.model}); choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    rows: list[dict[str, Any]]
    if model in NEURAL:
        trained = train_seeds(
            module_builder(model, parts.train, options),
            parts,
            protocol,
            seeds,
            folder=out,
            identity=identity,
            report=report,
            save_every=save_every,
        )
        predictors = [Predictor(model, module.cpu()) for module in trained.modules]
        rows = [
            {"best_epoch": e, "val_tau": t}
            for e, t in zip(trained.best_epoch, trained.val_tau, strict=True)
        ]
    else:
        predictors, rows = [], []
        for i, seed in enumerate(seeds):
            inner = tabular_class(model)(**options)
            inner.fit(
                parts.train.network,
                parts.train.accuracy,
                validation=(parts.val.network, parts.val.accuracy),
                seed=seed,
            )
            predictors.append(Predictor(model, inner))
            rows.append({"best_epoch": None})
            if report is not None:
                report({"epoch": i + 1, "epochs": len(seeds)})
    seconds = (time.perf_counter() - start) / len(seeds)
    columns, rows, residuals = _measure(predictors, parts, seeds, rows)
    for row in rows:
        row["seconds"] = seconds
    write_predictions(out, columns)
    if keep:
        for seed, predictor in zip(seeds, predictors, strict=True):
            predictor.save(out / f"seed-{seed}")
        Seen.of(parts.train).save(out)
        TrainedOn.of(parts, str(zoo["task"])).save(out)
    guarded: dict[str, Any] = {}
    if damaged is not None:
        guard, guarded = _guard(predictors, parts, damaged, zoo, protocol.epochs)
        guard.save(out)
    taus = [row["tau"] for row in rows]
    record = RunRecord(
        model=model,
        zoo=dict(zoo),
        selection={**(selection or {}), **parts.counts},
        protocol={**protocol.to_json(), "options": options, KEY: identity},
        seeds=rows,
        summary={
            "tau": float(np.mean(taus)),
            "tau_se": standard_error(taus),
            "r2": float(np.mean([row["r2"] for row in rows])),
            "mae": float(np.mean([row["mae"] for row in rows])),
            "coverage": coverage(residuals["val"], residuals["test"]),
            "level": LEVEL,
            "radius": radius(np.concatenate([residuals["val"], residuals["test"]])),
            **guarded,
            **(measure(predictors) if measure is not None else {}),
        },
        num_parameters=predictors[0].num_parameters,
        table=table,
    )
    record.write(out)
    (out / STATE_FILE).unlink(missing_ok=True)
    return record


def _guard(
    predictors: list[Predictor],
    parts: Parts,
    damaged: Damaged,
    zoo: Mapping[str, Any],
    epochs: int,
) -> tuple[Guard, dict[str, Any]]:
    """The guard, and for the summary how it does on the healthy networks of the test part."""

    def mean(data: Dataset) -> Tensor:
        return torch.stack([p.predict(data) for p in predictors]).double().mean(0)

    arch = NetworkSizes.from_json(zoo["architecture"])
    val, test = parts.val.to("cpu"), parts.test.to("cpu")
    steps = min(STEPS, STEPS_AN_EPOCH * epochs)
    guard = fit_guard(parts, damaged, arch, mean(val), mean(damaged.val), steps=steps)
    judged = guard.judge(test, arch, mean(test))
    truth, said = _truth(test), judged.accuracy.numpy()
    found = scores(truth, said)
    figures = {
        **{key: found[key] for key in ("tau", "r2", "mae")},
        "coverage": float((np.abs(truth - said) <= judged.radius.numpy()).mean()),
        "warned": float((judged.strangeness > 1).double().mean()),
        "damaged": damaged.counts,
    }
    return guard, {"guarded": figures}


def _with_seeds(record: RunRecord, zoo: Mapping[str, Any], out: Path) -> RunRecord:
    """A record from before zoos told their seeds, completed: it is of these very networks."""
    if "seeds" in record.zoo or "seeds" not in zoo:
        return record
    record = replace(record, zoo={**record.zoo, "seeds": zoo["seeds"]})
    record.write(out)
    return record


def _measure(
    predictors: list[Predictor], parts: Parts, seeds: list[int], rows: list[dict[str, Any]]
) -> tuple[dict[str, np.ndarray], list[dict[str, Any]], dict[str, np.ndarray]]:
    """Predictions of every seed on both held-out parts, scores, residuals of their mean."""
    parts = replace(
        parts,
        val=predictors[0].prepared(parts.val.to("cpu")),
        test=predictors[0].prepared(parts.test.to("cpu")),
    )
    columns: dict[str, list[np.ndarray]] = {}
    out = []
    total: dict[str, np.ndarray] = {}
    for seed, predictor, row in zip(seeds, predictors, rows, strict=True):
        found = {
            name: predictor.predict(part).double().numpy()
            for name, part in (("val", parts.val), ("test", parts.test))
        }
        reach = radius(_truth(parts.val) - found["val"])
        for name, part in (("val", parts.val), ("test", parts.test)):
            predicted = found[name]
            total[name] = total.get(name, 0.0) + predicted / len(seeds)
            values = {
                "seed": np.full(len(part), seed),
                "split": np.full(len(part), name, dtype=object),
                "accuracy": _truth(part),
                "predicted": predicted,
                "low": np.clip(predicted - reach, 0, 1),
                "high": np.clip(predicted + reach, 0, 1),
                **{key: part.columns[key] for key in ("row", "run", *CONFIGURATION)},
            }
            for key, value in values.items():
                columns.setdefault(key, []).append(value)
        out.append({"seed": seed, **row, **scores(_truth(parts.test), found["test"])})
    residuals = {
        "val": _truth(parts.val) - total["val"],
        "test": _truth(parts.test) - total["test"],
    }
    return {k: np.concatenate(v) for k, v in columns.items()}, out, residuals


def _truth(data: Dataset) -> np.ndarray:
    return np.asarray(data.accuracy.cpu().double().numpy())
