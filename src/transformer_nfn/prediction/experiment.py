"""Experiments: fit every seed of a predictor, measure it, and write a run folder."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from transformer_nfn.io.files import made_folder
from transformer_nfn.models.predictor import Predictor, find, names
from transformer_nfn.models.whole_network.search import search_steps
from transformer_nfn.prediction.data import DamagedNetworks, Dataset, Parts, Selection, SizeGroups
from transformer_nfn.prediction.guard.fit import fit_guard_beside
from transformer_nfn.prediction.guard.own import fit_own_guard
from transformer_nfn.prediction.held_out import HeldOut, configuration
from transformer_nfn.prediction.metrics import (
    LEVEL,
    class_scores,
    conformal_radius,
    coverage,
    mean,
    standard_error,
)
from transformer_nfn.prediction.predictors import (
    class_folders,
    class_probabilities,
    load_predictors,
    predictor_builder,
    prepared,
)
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.recipe_shift import measure_shift
from transformer_nfn.prediction.runs import (
    ENSEMBLE_TAU,
    IDENTITY,
    RUN_FILE,
    RunError,
    RunRecord,
    ensemble_tau,
    made_here,
    write_predictions,
)
from transformer_nfn.prediction.target import ACCURACY
from transformer_nfn.prediction.training import STATE_FILE, Execution, train_seeds
from transformer_nfn.prediction.training_set import TrainingDigests, TrainingSetDistance
from transformer_nfn.prediction.uncertainty import TrainedSizes, measure_widening
from transformer_nfn.zoo import NetworkSizes, Zoo
from transformer_nfn.zoo.store import check_outside_zoos


@dataclass(frozen=True)
class Experiment:
    """A predictor to train, and the metadata of its run record.

    Attributes:
        model: name of a predictor, see `models.predictor`.
        seeds: of initialisation and order; each gives a predictor.
        protocol: of neural predictors; None for `Protocol.of` the model.
        options: of the model, such as ``channels``.
        selection: `Selection.to_json`, for the record.
        table: table and cell of the paper, for the record.
        keep: whether the predictors are kept.
    """

    model: str
    seeds: Sequence[int]
    protocol: Protocol | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    selection: Mapping[str, Any] = field(default_factory=Selection(None).to_json)
    table: Mapping[str, Any] | None = None
    keep: bool = True


def train_run(
    zoo: Mapping[str, Any],
    networks: Parts | SizeGroups,
    experiment: Experiment,
    out: Path,
    *,
    damaged: DamagedNetworks | Zoo | None = None,
    measure: Callable[[list[Predictor]], Mapping[str, Any]] | None = None,
    execution: Execution | None = None,
) -> RunRecord:
    """Fit every seed of a predictor, measure it on the test part, and write a run folder.

    A finished run of the same training is read instead; an interrupted one is resumed.

    Args:
        zoo: from `describe_zoo`.
        networks: of one size or several, on the device to train on.
        experiment: what to train.
        out: the run folder.
        damaged: damaged copies of the networks, to fit a `Guard` to, or the zoo of checkpoints
            that they are of, to fit an `OwnGuard` to copies in memory.
        measure: further numbers for the record's summary, from the fitted predictors.
        execution: progress and saved states; its folder and identity are set here.
    """
    model, options = experiment.model, dict(experiment.options)
    check_outside_zoos(out)
    groups = SizeGroups.of(networks)
    copies = damaged if isinstance(damaged, DamagedNetworks) else None
    check_networks(model, mixed=groups.mixed, damaged=copies is not None)
    if not find(model).every_checkpoint:
        groups = groups.map(lambda parts: replace(parts, more=None))
    if not issubclass(_class_of(experiment, groups), nn.Module):
        groups = groups.to("cpu")
    experiment = replace(
        experiment, seeds=list(experiment.seeds), options=options,
        protocol=experiment.protocol or Protocol.of(model, zoo=zoo),
    )  # fmt: skip
    target = groups.train[0].target
    if copies is not None and target != ACCURACY:
        raise RunError(f"a guard against damaged networks is about accuracy, not {target.what}")
    identity = training_identity(experiment, groups, copies)
    if (out / RUN_FILE).is_file():
        record = RunRecord.read(out)
        if record.protocol.get(IDENTITY) == identity:
            return record
        raise RunError(f"'{out}' holds another run ({record.model}); choose another folder")
    execution = replace(execution or Execution(), folder=out, identity=identity)
    if target.kind == "class":
        return _train_classes(zoo, groups, experiment, out, execution)
    with made_folder(out):  # first: hours later is too late to learn that it cannot be made
        fitted = _fit(experiment, groups, execution)
    return _write_run(zoo, groups, experiment, fitted, execution, damaged, measure)


def check_networks(model: str, *, mixed: bool, damaged: bool) -> None:
    """Reject a mixed zoo for a predictor of one size, and a guard for a mixed zoo."""
    if not find(model).any_size and mixed:
        raise RunError(
            f"'{model}' reads networks of one size: of a mixed zoo name one size by its folder, or "
            f"train {', '.join(names(any_size=True))}"
        )
    if mixed and damaged:
        raise RunError("a guard against damaged networks is fitted to one size, not several")


def training_identity(
    experiment: Experiment, groups: SizeGroups, damaged: DamagedNetworks | None = None
) -> str:
    """Digest of everything a training result depends on.

    Model, options, protocol, seeds, and every weight and accuracy of all parts; the location of
    the networks and the order of their tensors do not count.
    """
    protocol = experiment.protocol or Protocol.of(experiment.model)
    settings = {
        "model": experiment.model,
        "options": dict(experiment.options),
        "protocol": protocol.to_json(),
        "seeds": list(experiment.seeds),
    }
    if (code := find(experiment.model).code) is not None:
        settings["code"] = code.sha256
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    datasets: list[Dataset | None] = []
    for parts in groups.parts.values():
        datasets += [parts.train, parts.val, parts.test, parts.more]
    datasets += groups.left_out.values()
    datasets += [] if damaged is None else [damaged.train, damaged.val]
    for data in datasets:
        if data is None:
            continue
        tensors = data.network.named | {"accuracy": data.accuracy}
        for name in sorted(tensors):
            w = tensors[name]
            digest.update(f"{name} {w.dtype} {list(w.shape)}".encode())
            digest.update(_bytes(w))
    return digest.hexdigest()[:16]


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


@dataclass(frozen=True)
class _Fitted:
    """A predictor and training figures for each seed, and the training networks as they were read.

    Attributes:
        train: of each size, additional networks last.
        updates: of a neural predictor.
    """

    predictors: list[Predictor]
    rows: list[dict[str, Any]]
    train: list[Dataset]
    updates: int | None = None


def _fit(experiment: Experiment, groups: SizeGroups, execution: Execution) -> _Fitted:
    start = time.perf_counter()
    alone = hasattr(_class_of(experiment, groups), "fit")
    fitted = (_fit_alone if alone else _fit_neural)(experiment, groups, execution)
    seconds = (time.perf_counter() - start) / len(experiment.seeds)
    return replace(fitted, rows=[{**row, "seconds": seconds} for row in fitted.rows])


def _class_of(experiment: Experiment, groups: SizeGroups) -> type[Predictor]:
    return find(experiment.model, groups.train[0].kind)


def _fit_neural(experiment: Experiment, groups: SizeGroups, execution: Execution) -> _Fitted:
    assert experiment.protocol is not None
    trained = train_seeds(
        predictor_builder(experiment.model, groups.train, experiment.options),
        groups,
        experiment.protocol,
        list(experiment.seeds),
        execution,
    )
    best = zip(trained.best_epoch, trained.val_tau, strict=True)
    rows = [{"best_epoch": epoch, "val_tau": tau} for epoch, tau in best]
    return _Fitted([*trained.modules], rows, trained.train, trained.updates)


def _fit_alone(experiment: Experiment, groups: SizeGroups, execution: Execution) -> _Fitted:
    """Fit a predictor without epochs: progress is reported per seed, and no state is saved."""
    (train,), (val,) = groups.train, groups.val
    predictors, build = [], predictor_builder(experiment.model, train, experiment.options)
    for i, seed in enumerate(experiment.seeds):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            predictor = build()
        validation = (val.network, val.accuracy)
        predictor.fit(train.network, train.accuracy, validation=validation, seed=seed)
        predictors.append(predictor)
        if execution.report is not None:
            execution.report({"epoch": i + 1, "epochs": len(experiment.seeds)})
    return _Fitted(predictors, [{"best_epoch": None} for _ in predictors], [train])


def _write_run(
    zoo: Mapping[str, Any],
    groups: SizeGroups,
    experiment: Experiment,
    fitted: _Fitted,
    execution: Execution,
    damaged: DamagedNetworks | Zoo | None,
    measure: Callable[[list[Predictor]], Mapping[str, Any]] | None,
) -> RunRecord:
    assert experiment.protocol is not None
    assert execution.folder is not None
    model, seeds, out = experiment.model, experiment.seeds, execution.folder
    ready = _prepared(fitted, groups)
    held_out = HeldOut.of(fitted.predictors, ready)
    rows = [
        {**row, **tested}
        for row, tested in zip(fitted.rows, held_out.seed_rows(seeds), strict=True)
    ]
    val, test = held_out.residuals("val"), held_out.residuals("test")
    target = groups.train[0].target
    widest = held_out.span(target)
    radius = conformal_radius(np.concatenate([val, test]), widest=widest)
    by_size, factor = _by_size(fitted.predictors[0], ready, held_out, radius, zoo)
    columns = held_out.columns(seeds, factor, mixed=groups.mixed, target=target)
    write_predictions(out, columns)
    predictors = [predictor.to("cpu") for predictor in fitted.predictors]
    shift: dict[str, Any] = {}
    if experiment.keep:
        for seed, predictor in zip(seeds, predictors, strict=True):
            predictor.save(out / f"seed-{seed}")
        distance = TrainingSetDistance.of(ready.train, any_size=find(model).any_size)
        distance.save(out)
        shift = {"shift": measure_shift(distance, ready.train).to_json()}
        TrainingDigests.of(groups, str(zoo["task"])).save(out)
    guarded: dict[str, Any] = {}
    if damaged is not None and not isinstance(damaged, DamagedNetworks):
        own_guard = fit_own_guard(damaged, groups.train[0], radius, execution.report)
        if own_guard is not None:
            own_guard.save(out)
    elif damaged is not None:
        (parts,) = groups.parts.values()
        sizes = NetworkSizes.from_json(zoo["architecture"])
        steps = search_steps(experiment.protocol.epochs)
        guard, guarded = fit_guard_beside(predictors, parts, damaged, sizes, steps)
        guard.save(out)
    taus = [row["tau"] for row in rows]
    record = RunRecord(
        model=model,
        zoo=dict(zoo),
        selection={**experiment.selection, **groups.selection},
        protocol={
            **experiment.protocol.to_json(),
            "options": dict(experiment.options),
            IDENTITY: execution.identity,
        },
        seeds=rows,
        summary={
            "tau": float(np.mean(taus)),
            "tau_se": standard_error(taus),
            ENSEMBLE_TAU: ensemble_tau(columns),
            **{key: mean([row[key] for row in rows]) for key in ("r2", "mae")},
            "coverage": coverage(val, test, widest=widest),
            "level": LEVEL,
            "radius": radius,
            **shift,
            **by_size,
            **guarded,
            **(measure(predictors) if measure is not None else {}),
        },
        num_parameters=predictors[0].num_parameters,
        table=experiment.table,
        target=None if target == ACCURACY else target.to_json(),
        made=made_here(groups.train[0].accuracy.device, fitted.updates),
        code=None if (code := find(model).code) is None else asdict(code),
    )
    record = record.write(out)
    (out / STATE_FILE).unlink(missing_ok=True)
    return record


def _train_classes(
    zoo: Mapping[str, Any],
    groups: SizeGroups,
    experiment: Experiment,
    out: Path,
    execution: Execution,
) -> RunRecord:
    """Train a predictor of each class, in a run folder of its own, and measure them together."""
    target, seeds = groups.train[0].target, experiment.seeds
    assert experiment.protocol is not None
    experiment = replace(experiment, keep=True)  # they are measured together
    predictors, records = [], []
    for name, folder in zip(target.outputs, class_folders(out, target), strict=True):
        record = train_run(zoo, groups.of_class(name), experiment, folder, execution=execution)
        records.append(record)
        predictors.append(load_predictors(folder, record))

    def measured(split: str) -> tuple[np.ndarray, np.ndarray, list[Dataset]]:
        parts: list[Dataset] = [part.to("cpu") for part in getattr(groups, split)]
        probabilities = [class_probabilities(predictors, part) for part in parts]
        truth = np.concatenate([part.accuracy.numpy() for part in parts]).astype(int)
        return truth, np.concatenate(probabilities, -1), parts

    def doubts(truth: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
        """One less the mean probability of the true class, ``[n]``."""
        return np.asarray(1 - probabilities.mean(0)[truth, np.arange(len(truth))])

    columns: dict[str, list[np.ndarray]] = {}
    val, test = measured("val"), measured("test")
    for split, (_, probabilities, parts) in (("val", val), ("test", test)):
        names = np.concatenate([part.columns["target"].astype(str) for part in parts])
        for seed, each in zip(seeds, probabilities, strict=True):
            values = {
                "seed": np.full(len(names), seed),
                "split": np.full(len(names), split, dtype=object),
                **{
                    key: np.concatenate([part.columns[key] for part in parts])
                    for key in configuration(parts[0].columns)
                },
                "class": names.astype(object),
                "predicted": np.array(target.classes, dtype=object)[each.argmax(0)],
                **{f"probability of {name}": each[i] for i, name in enumerate(target.classes)},
            }
            for key, value in values.items():
                columns.setdefault(key, []).append(value)
    write_predictions(out, {key: np.concatenate(value) for key, value in columns.items()})
    rows = [
        {"seed": seed, **class_scores(test[0], each),
         "seconds": sum(record.seeds[i]["seconds"] for record in records)}
        for i, (seed, each) in enumerate(zip(seeds, test[1], strict=True))
    ]  # fmt: skip
    doubt = doubts(*val[:2]), doubts(*test[:2])
    counts = [record.num_parameters for record in records]
    record = replace(
        records[0],
        seeds=rows,
        num_parameters=None if counts[0] is None else sum(n or 0 for n in counts),
        protocol={**records[0].protocol, IDENTITY: execution.identity},
        summary={
            **{
                key: mean([row[key] for row in rows])
                for key in ("accuracy", "auroc", "calibration_error")
            },
            "accuracy_se": standard_error([row["accuracy"] for row in rows]),
            "together": class_scores(test[0], test[1].mean(0)),
            "chance": float(np.bincount(test[0]).max() / len(test[0])),
            "coverage": coverage(*doubt),
            "level": LEVEL,
            "radius": conformal_radius(np.concatenate(doubt)),
            **{key: records[0].summary[key] for key in ("shift",) if key in records[0].summary},
        },
        target=target.to_json(),
    )
    return record.write(out)


def _prepared(fitted: _Fitted, groups: SizeGroups) -> SizeGroups:
    """Precompute what all seeds and measures read of the networks; drop additional ones."""
    ready = partial(prepared, fitted.predictors[0])
    parts = {
        name: Parts(
            ready(data.take(torch.arange(len(parts.train)))), ready(parts.val), ready(parts.test)
        )
        for (name, parts), data in zip(groups.parts.items(), fitted.train, strict=True)
    }
    return SizeGroups(parts, {name: ready(data) for name, data in groups.left_out.items()})


def _by_size(
    predictor: Predictor,
    groups: SizeGroups,
    held_out: HeldOut,
    radius: float,
    zoo: Mapping[str, Any],
) -> tuple[dict[str, Any], Callable[[str], float]]:
    """Figures by size of a mixed zoo, and the factor by which intervals of a size are wider."""
    if not groups.mixed:
        return {}, lambda _: 1.0
    sizes = {name: NetworkSizes.from_json(a) for name, a in zoo["architectures"].items()}
    widening = measure_widening(predictor, groups, sizes)
    target = groups.train[0].target
    trained = TrainedSizes(tuple(sizes[name] for name in groups.names), radius, widening, target)
    figures = held_out.by_size(lambda name: trained.interval_radius(sizes[name]))
    return {**figures, "widening": widening}, lambda name: trained.factor(sizes[name])
