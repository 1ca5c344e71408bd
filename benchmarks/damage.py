"""Are predictors fooled by broken networks? Kinds of damage that training never saw, 200 of each.

Trains with some kinds of damage, holds others out, and prints for each held-out kind how many
networks lie outside their interval and how many of those carry a warning; also false warnings and
Kendall's tau on healthy networks that were not seen, with the guard and without:

    python benchmarks/damage.py ZOO --work DIR [--models invariant_boosting,invariant_mlp]
        [--data DIR] [--seeds 5] [--count 200] [--learn 480]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from transformer_nfn.prediction.damaged import load_damaged
from transformer_nfn.prediction.dataset import FRACTIONS, load_parts, select_rows
from transformer_nfn.prediction.predict import Prediction, predict
from transformer_nfn.prediction.predictors import ALL_CHECKPOINTS
from transformer_nfn.prediction.runs import describe_zoo, train_run
from transformer_nfn.zoo import Zoo
from transformer_nfn.zoo.damage_record import damages
from transformer_nfn.zoo.training.damaged_zoo import damage_zoo

SEEN = "shuffled:0.5,noise,pruned,tensor"
HELD_OUT = "untrained,exchanged,block,quantised,shuffled:1"
NEAR = 0.1


def main() -> None:
    """Makes the damaged zoos, trains each model with and without them, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("zoo")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--models", default="invariant_boosting,invariant_mlp")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--learn", type=int, default=480)
    given = parser.parse_args()
    zoo = Zoo.open(given.zoo)
    train, val, test = zoo.split(select_rows(zoo), FRACTIONS)
    how = {"data": given.data}
    learn = damage_zoo(
        zoo, given.work / "learn", kinds=SEEN, count=given.learn,
        rows=np.concatenate([train, val]), **how,
    )  # fmt: skip
    held = damage_zoo(
        zoo, given.work / "held-out", kinds=HELD_OUT, count=given.count, rows=test, **how
    )
    for model in given.models.split(","):
        parts = load_parts(zoo, all_checkpoints=model in ALL_CHECKPOINTS)
        found = {}
        for name, relatives in (("plain", None), ("guarded", load_damaged(learn, zoo, parts))):
            out = given.work / f"{model}-{name}"
            record = train_run(
                describe_zoo(zoo), parts, model, out, seeds=list(range(given.seeds)),
                selection={"percent": 75, "min_accuracy": 0.0, "augment": None}, damaged=relatives,
            )  # fmt: skip
            found[name] = record.summary
            broken = predict(out, held)
            healthy = predict(out, [f"{zoo.path}#{row}" for row in test])
            print(f"\n{model}, {name}")
            _print_healthy(healthy)
            _print_kinds(broken, held)
        print(json.dumps({name: summary.get("guarded") for name, summary in found.items()}))


def _truth(found: list[Prediction]) -> np.ndarray:
    return np.array([p.recorded["test_accuracy"] for p in found if p.recorded is not None])


def _print_healthy(found: list[Prediction]) -> None:
    from transformer_nfn.prediction.metrics import kendall_tau

    truth, said = _truth(found), np.array([p.accuracy for p in found])
    inside = np.array([p.low <= t <= p.high for p, t in zip(found, truth, strict=True)])
    warned = np.array([p.warning is not None for p in found])
    width = np.median([p.high - p.low for p in found])
    print(
        f"  healthy, unseen: {len(found)} networks, tau {kendall_tau(truth, said):.3f}, mean error "
        f"{np.abs(truth - said).mean():.3f}, intervals hold {inside.mean():.1%} (median width "
        f"{width:.3f}), warned {warned.mean():.1%}"
    )


def _print_kinds(found: list[Prediction], held: Zoo) -> None:
    kinds = np.array([damage.kind for damage in damages(held)])
    truth, said = _truth(found), np.array([p.accuracy for p in found])
    outside = np.array([not p.low <= t <= p.high for p, t in zip(found, truth, strict=True)])
    warned = np.array([p.warning is not None for p in found])
    width = np.array([p.high - p.low for p in found])
    print("  kind        networks  error  width  outside  of them warned  near or warned")
    for kind in dict.fromkeys(kinds.tolist()):
        here = kinds == kind
        out = outside & here
        caught = f"{int((warned & out).sum())}" if out.any() else "-"
        near = (np.abs(truth - said) <= NEAR) | warned
        print(
            f"  {kind:<12}{here.sum():>8}{np.abs(truth - said)[here].mean():>7.3f}"
            f"{np.median(width[here]):>7.3f}{out.sum():>9}{caught:>16}{near[here].mean():>16.1%}"
        )


if __name__ == "__main__":
    main()
