"""``tnfn train --damaged`` and what ``predict`` then says of kinds of damage that were held out."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tnfn_command import as_json, assert_refused
from transformer_nfn.prediction.guard import GUARD_FILE
from transformer_nfn.prediction.runs import RunRecord
from transformer_nfn.zoo import Zoo
from transformer_nfn.zoo.damage import damages

CHANCE = 0.1


@pytest.mark.nightly
def test_a_kind_held_out_is_not_looked_at_and_fools_nobody(
    broken_mnist: Zoo, tmp_path: Path
) -> None:
    damaged = broken_mnist.path
    run, plain = tmp_path / "guarded", tmp_path / "plain"
    ours = ("--model", "invariant_boosting", "--seeds", 1, "--epochs", 1)
    told = as_json(
        "train", "mnist-sample", "--damaged", damaged, "--hold-out", "untrained", *ours,
        "--out", run,
    )  # fmt: skip
    shutil.copytree(run, plain, ignore=shutil.ignore_patterns(GUARD_FILE))
    RunRecord.read(run).write(plain)
    guarded = told["summary"]["guarded"]
    assert guarded["damaged"] == {"train": 112, "val": 24}
    assert guarded["warned"] <= 0.1

    kinds = [damage.kind for damage in damages(Zoo.open(damaged))]
    rows = [row for row, kind in enumerate(kinds) if kind == "untrained"]
    which = f"{damaged}#{','.join(map(str, rows[:40]))}"
    shares = {}
    for name in (run, plain):
        found = as_json("predict", name, which)
        held = [p["low"] <= CHANCE <= p["high"] for p in found]
        warned = [p["warning"] is not None for p in found]
        shares[name.name] = float(np.mean(np.array(held) | np.array(warned)))

    # A search of one epoch, 160 networks and one kind of damage: few warnings can come of these,
    # but intervals reach down to what the answers of a network suggest.
    assert shares["guarded"] >= 0.95
    assert shares["guarded"] > shares["plain"] + 0.3


def test_holding_out_needs_damaged_networks_to_choose_from(tmp_path: Path) -> None:
    words = ("train", "mnist-sample", "--hold-out", "noise", "--out", tmp_path / "run")
    assert_refused("--damaged", *words)
