"""Run folders as training leaves them, made up: a zoo with two modes, predictors of known skill."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from transformer_nfn.prediction.runs import LOG_FILE, RunRecord, write_predictions
from transformer_nfn.zoo import NetworkSizes

# How far each predictor is off, and its parameters.
MODELS: dict[str, tuple[float, int | None]] = {
    "transformer_nfn": (0.075, 1_812_301),
    "mlp": (0.11, 933_051),
    "statnn": (0.06, 203_117),
    "xgboost": (0.085, None),
    "lightgbm": (0.08, None),
    "random_forest": (0.13, None),
    "invariant_boosting": (0.045, None),
    "invariant_mlp": (0.04, 21_313),
}
NEURAL = ("transformer_nfn", "mlp", "statnn", "invariant_mlp")
OPTIMIZERS = ("sgd", "sgdm", "adam", "rmsprop")


def make_zoo(networks: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Configurations and accuracies of a zoo."""
    rng = np.random.default_rng(seed)
    optimizer = rng.choice(OPTIMIZERS, networks)
    rate = rng.choice([3e-4, 1e-3, 3e-3, 1e-2, 5e-2], networks)
    good = 0.97 - rng.gamma(1.2, 0.05, networks) - 0.25 * (rate > 0.03) * rng.random(networks)
    failed = rng.random(networks) < 0.18 + 0.12 * (optimizer == "rmsprop")
    low = 0.1 + 0.75 * rng.beta(0.8, 1.6, networks)
    return {
        "run": np.arange(networks),
        "accuracy": np.clip(np.where(failed, low, good), 0.05, 0.985),
        "optimizer": optimizer,
        "learning_rate": rate,
        "l2": rng.choice([1e-8, 1e-6, 1e-4, 1e-2], networks),
        "init_std": rng.choice([0.1, 0.2, 0.3, 0.5], networks),
        "dropout": rng.choice([0.0, 0.1, 0.2], networks),
        "train_fraction": rng.choice([0.7, 0.8, 0.9, 1.0], networks),
    }


def write_run(
    folder: Path,
    model: str = "transformer_nfn",
    *,
    networks: int = 256,
    seeds: int = 3,
    train: int | None = None,
    task: str = "mnist",
    min_accuracy: float | None = None,
    augment: float | None = None,
    table: dict[str, str] | None = None,
    status: str = "done",
    skill: float = 1.0,
    log: bool = True,
    predictions: bool = True,
    name: str | None = None,
    zoo_seeds: str = "each",
    same_parts: bool = False,
    reach: float = 2.2,
) -> Path:
    """Writes one run folder and returns it.

    Args:
        zoo_seeds: what the record says of the zoo's seeds.
        same_parts: whether every seed tests the same networks, as training has it; then the
            record has τ of their mean.
        reach: half the width of intervals, in units of the typical error.
    """
    noise, parameters = MODELS.get(model, (0.1, None))
    zoo = make_zoo(networks)
    kept = np.flatnonzero(zoo["accuracy"] >= (min_accuracy or 0.0))
    test = val = round(0.15 * len(kept))
    train = train or len(kept) - test - val
    noise = noise / skill * (1 + 20 / train)
    rows: dict[str, list[np.ndarray]] = {}
    summary: list[dict[str, Any]] = []
    for seed in range(seeds if status == "done" else 0):
        rng = np.random.default_rng([seed, len(model), train])
        for split, part in _split(kept, 0 if same_parts else seed, val, test).items():
            chosen = {key: values[part] for key, values in zoo.items()}
            wild = 1.0 + 1.5 * (chosen["optimizer"] == "rmsprop")
            drawn = chosen["accuracy"] + noise * wild * rng.standard_normal(len(part))
            predicted = np.clip(drawn, 0.02, 0.99)
            columns = {
                "seed": np.full(len(part), seed),
                "split": np.full(len(part), split),
                "row": part,
                "predicted": predicted,
                "low": np.clip(predicted - reach * noise, 0, 1),
                "high": np.clip(predicted + reach * noise, 0, 1),
                **chosen,
            }
            for key, values in columns.items():
                rows.setdefault(key, []).append(values)
        summary.append(_scores(seed, columns) | {"best_epoch": 40 if model in NEURAL else None})
    folder.mkdir(parents=True, exist_ok=True)
    if rows and predictions:
        write_predictions(folder, {key: np.concatenate(values) for key, values in rows.items()})
    if log and model in NEURAL and status == "done":
        _write_log(folder, seeds, noise)
    taus = [entry["tau"] for entry in summary]
    together = _together(rows) if same_parts else float(np.mean(taus)) if taus else 0.0
    RunRecord(
        model=model,
        zoo={
            "task": task,
            "name": name or task,
            "networks": 4 * networks,
            "runs": networks,
            "architecture": NetworkSizes(tokens=49, classes=10, patch=16).to_json(),
            "seeds": zoo_seeds,
        },
        selection={
            "percent": 75,
            "min_accuracy": min_accuracy or 0.0,
            "train": train,
            "val": val,
            "test": test,
            "augment": augment,
        },
        protocol={
            "epochs": 50,
            "batch": 16,
            "lr": 1e-3,
            "final_lr": 1e-5,
            "warmup": 10,
            "options": {},
            "identity": "f0",
        },
        seeds=summary,
        summary={}
        if not summary
        else {
            "tau": float(np.mean(taus)),
            "tau_se": float(np.std(taus, ddof=1) / len(taus) ** 0.5) if len(taus) > 1 else None,
            **{key: float(np.mean([s[key] for s in summary])) for key in ("r2", "mae", "coverage")},
            "level": 0.9,
            "radius": min(1.0, reach * noise),
            "tau_together": together,
        },
        num_parameters=parameters,
        status=status,
        table=table,
    ).write(folder)
    return folder


def write_study(root: Path, networks: int = 256, seeds: int = 3) -> Path:
    """Everything at once: all models, a threshold table, augmentation, fewer networks."""
    for model in MODELS:
        write_run(root / "demo" / model, model, networks=networks, seeds=seeds)
        for train in (networks // 8, networks // 3):
            write_run(
                root / "fewer" / f"{model}-{train}",
                model,
                networks=networks,
                seeds=seeds,
                train=train,
                log=False,
            )
    for model in list(MODELS)[:6]:
        for column in ("all", "0.2", "0.4", "0.6", "0.8"):
            write_run(
                root / "table1" / f"{model}-{column}",
                model,
                networks=networks,
                seeds=seeds,
                min_accuracy=None if column == "all" else float(column),
                table={"table": "thresholds", "row": model, "column": column},
                status="not enough networks: 12 above 80 %, 20 needed"
                if (model, column) == ("mlp", "0.8")
                else "done",
            )
        for column, bound in (("original", None), ("[-1,1]", 1.0), ("[-100,100]", 100.0)):
            write_run(
                root / "table7" / f"{model}-{bound}",
                model,
                networks=networks,
                seeds=seeds,
                task="ag_news",
                augment=bound,
                skill=1.0 if model == "transformer_nfn" or bound is None else 0.6,
                table={"table": "augmentation", "row": model, "column": column},
            )
    return root


def write_curve(root: Path, models: Iterable[str] = MODELS, seeds: int = 2, **options: Any) -> Path:
    """The cells of a learning curve on 64, 128, 256 and all 300 networks to train on."""
    for model in models:
        for column, train in (("64", 64), ("128", 128), ("256", 256), ("all", 300)):
            write_run(
                root / "cells" / f"learning-curve-{model}-{column}",
                model,
                seeds=seeds,
                train=train,
                table={"table": "learning-curve", "row": model, "column": column},
                log=False,
                **options,
            )
    return root


def _split(kept: np.ndarray, seed: int, val: int, test: int) -> dict[str, np.ndarray]:
    order = np.random.default_rng([7, seed]).permutation(kept)
    return {"val": order[:val], "test": order[val : val + test]}


def _scores(seed: int, part: dict[str, np.ndarray]) -> dict[str, Any]:
    truth, predicted = part["accuracy"], part["predicted"]
    tau = float(kendalltau(truth, predicted).statistic)
    inside = (part["low"] <= truth) & (truth <= part["high"])
    return {
        "seed": seed,
        "tau": tau,
        "tau_low": tau - 0.04,
        "tau_high": tau + 0.03,
        "r2": float(1 - np.mean((truth - predicted) ** 2) / np.var(truth)),
        "mae": float(np.mean(np.abs(truth - predicted))),
        "coverage": float(inside.mean()),
        "val_tau": tau + 0.005,
        "seconds": 12.5,
    }


def _together(rows: dict[str, list[np.ndarray]]) -> float:
    # Parts follow each other, of each seed validation and test.
    tested = {key: np.stack(values[1::2]) for key, values in rows.items()}
    return float(kendalltau(tested["accuracy"][0], tested["predicted"].mean(0)).statistic)


def _write_log(folder: Path, seeds: int, noise: float) -> None:
    lines = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        for epoch in range(1, 51):
            done = 1 - np.exp(-epoch / 12)
            entry = {
                "seed": seed,
                "epoch": epoch,
                "loss": 0.69 - (0.33 - noise) * done + 0.008 * rng.standard_normal(),
                "val_tau": (0.95 - 3 * noise) * done + 0.015 * rng.standard_normal(),
                "lr": 1e-3,
            }
            lines.append(json.dumps(entry))
    (folder / LOG_FILE).write_text("\n".join(lines) + "\n")
