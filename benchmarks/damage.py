"""Benchmark of the guard: kinds of damage that training never saw, 200 networks of each.

Trains with some kinds of damage, holds others out, and prints for each held-out kind how many
networks lie outside their interval and how many of those carry a warning; also false warnings and
Kendall's tau on healthy networks that were not seen, with the guard and without:

    python benchmarks/damage.py ZOO --work DIR [--models invariant_boosting,whole_network]
        [--seen KINDS --held-out KINDS] [--split-seed 0] [--data DIR] [--device cuda]
        [--seeds 5] [--count 200] [--learn 480] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from transformer_nfn.models.predictor import find
from transformer_nfn.prediction.data import (
    FRACTIONS,
    Selection,
    describe_zoo,
    load_damaged,
    load_parts,
)
from transformer_nfn.prediction.experiment import Experiment, train_run
from transformer_nfn.prediction.guard import GUARD_FILE
from transformer_nfn.prediction.metrics import kendall_tau
from transformer_nfn.prediction.predict import Prediction, predict
from transformer_nfn.prediction.runs import RunRecord
from transformer_nfn.zoo import Zoo
from transformer_nfn.zoo.damage import damages
from transformer_nfn.zoo.training.damage import DamageOptions, damage_zoo

SEEN = "shuffled:0.5,noise,pruned,tensor"
HELD_OUT = "untrained,exchanged,block,quantised,shuffled:1"
NEAR = 0.1


def main() -> None:
    """Makes the damaged zoos, trains each model beside a guard, prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("zoo")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--models", default="invariant_boosting,invariant_mlp")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--learn", type=int, default=480)
    given = parser.parse_args()
    zoo = Zoo.open(given.zoo)
    train, val, test = zoo.split(Selection().rows(zoo), FRACTIONS, seed=0)
    how: dict[str, Any] = {"data": given.data, "device": given.device}
    learn = _timed("damage to learn from", lambda: damage_zoo(
        zoo, given.work / "learn",
        DamageOptions(SEEN, given.learn, rows=np.concatenate([train, val]), **how),
    ))  # fmt: skip
    held = _timed("damage held out", lambda: damage_zoo(
        zoo, given.work / "held-out",
        DamageOptions(HELD_OUT, given.count, rows=test, **how),
    ))  # fmt: skip
    for model in given.models.split(","):
        parts = load_parts(zoo, Selection(all_checkpoints=find(model).every_checkpoint))
        copies = load_damaged(learn, zoo, parts)
        guarded, plain = (given.work / f"{model}-{name}" for name in ("guarded", "plain"))
        on = parts.to(given.device)
        start = time.perf_counter()
        experiment = Experiment(model, range(given.seeds), selection=Selection().to_json())
        train_run(describe_zoo(zoo), on, experiment, guarded, damaged=copies)
        print(f"training {model}: {time.perf_counter() - start:.0f} s", flush=True)
        # The same predictors, with nobody beside them.
        shutil.rmtree(plain, ignore_errors=True)
        shutil.copytree(guarded, plain, ignore=shutil.ignore_patterns(GUARD_FILE))
        RunRecord.read(guarded).write(plain)
        for run in (plain, guarded):
            print(f"\n{run.name}: learned from {SEEN}")
            healthy = _print_healthy(predict(run, [f"{zoo.path}#{row}" for row in test]))
            broken = _print_kinds(predict(run, held), held)
            print(json.dumps({"run": run.name, **healthy, **broken}), flush=True)


def _timed(words: str, what: Any) -> Any:
    start = time.perf_counter()
    found = what()
    print(f"{words}: {time.perf_counter() - start:.0f} s", flush=True)
    return found


def _truth(found: list[Prediction]) -> np.ndarray:
    return np.array([p.recorded["test_accuracy"] for p in found if p.recorded is not None])


def _print_healthy(found: list[Prediction]) -> dict[str, float]:
    truth, said = _truth(found), np.array([p.value for p in found])
    inside = np.array([p.low <= t <= p.high for p, t in zip(found, truth, strict=True)])
    warned = np.array([p.warning is not None for p in found])
    width = np.median([p.high - p.low for p in found])
    tau = kendall_tau(truth, said)
    print(
        f"  healthy, unseen: {len(found)} networks, tau {tau:.3f}, mean error "
        f"{np.abs(truth - said).mean():.3f}, intervals hold {inside.mean():.1%} (median width "
        f"{width:.3f}), warned {warned.mean():.1%}"
    )
    return {"tau": tau, "false_warnings": float(warned.mean()), "width": float(width)}


def _print_kinds(found: list[Prediction], held: Zoo) -> dict[str, Any]:
    kinds = np.array([damage.kind for damage in damages(held)])
    truth, said = _truth(found), np.array([p.value for p in found])
    outside = np.array([not p.low <= t <= p.high for p, t in zip(found, truth, strict=True)])
    warned = np.array([p.warning is not None for p in found])
    width = np.array([p.high - p.low for p in found])
    near = (np.abs(truth - said) <= NEAR) | warned
    print("  kind        networks  error  width  outside  of them warned  near or warned  warned")
    for kind in [*dict.fromkeys(kinds.tolist()), "all"]:
        here = (kinds == kind) | (kind == "all")
        out = outside & here
        caught = f"{int((warned & out).sum())}" if out.any() else "-"
        print(
            f"  {kind:<12}{here.sum():>8}{np.abs(truth - said)[here].mean():>7.3f}"
            f"{np.median(width[here]):>7.3f}{out.sum():>9}{caught:>16}{near[here].mean():>16.1%}"
            f"{warned[here].mean():>8.1%}"
        )
    unnoticed = int((outside & ~warned).sum())
    print(f"  outside without a warning: {unnoticed} of {len(found)}")
    return {
        "networks": len(found), "outside": int(outside.sum()), "outside_unwarned": unnoticed,
        "warned_of_outside": 1 - unnoticed / max(1, int(outside.sum())),
        "near_or_warned": {k: float(near[kinds == k].mean()) for k in sorted(set(kinds.tolist()))},
        "error": float(np.abs(truth - said).mean()), "warned": float(warned.mean()),
    }  # fmt: skip


if __name__ == "__main__":
    main()
