"""Damaged relatives of a zoo's networks: what was done, what they measure, how they are kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from transformer_nfn.cli.app import app
from transformer_nfn.zoo import Zoo, ZooError
from transformer_nfn.zoo.damage import STRENGTHS, damages, parse_damages, rows_of
from transformer_nfn.zoo.errors import StoreError
from transformer_nfn.zoo.training.damage import damage_zoo
from transformer_nfn.zoo.verify import verify


@pytest.fixture(scope="module")
def damaged(small_zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Six networks of every kind of damage."""
    return damage_zoo(small_zoo, tmp_path_factory.mktemp("damaged") / "all", count=6)


def pairs(small_zoo: Zoo, damaged: Zoo, kind: str) -> list[tuple[dict, dict, object]]:
    """The tensors before and after, and what is said to have been done."""
    found = []
    for row, record in enumerate(damages(damaged)):
        if record.kind == kind:
            before, after = small_zoo.weights([record.row]), damaged.weights([row])
            found.append((before, after, record))
    assert len(found) == 6
    return found


def test_every_kind_is_there_and_remembers_its_run(small_zoo: Zoo, damaged: Zoo) -> None:
    told = damages(damaged)
    assert [sum(d.kind == kind for d in told) for kind in STRENGTHS] == [6] * len(STRENGTHS)
    for row, record in enumerate(told):
        assert damaged.table["run"][row] == small_zoo.table["run"][record.row]
        assert damaged.table["init_std"][row] == small_zoo.table["init_std"][record.row]


def test_accuracies_are_those_of_the_test_data(damaged: Zoo) -> None:
    """`verify` runs every network as a plain module, which is not how they were tested."""
    verdict = verify(damaged.path, sample=len(damaged))
    assert verdict.ok, verdict.problems
    assert verdict.rerun == len(damaged)
    assert verdict.worst_samples <= 1


def test_shuffling_keeps_the_entries_of_every_tensor(small_zoo: Zoo, damaged: Zoo) -> None:
    for before, after, record in pairs(small_zoo, damaged, "shuffled"):
        for name, w in before.items():
            assert torch.equal(w.flatten().sort().values, after[name].flatten().sort().values)
        moved = (before["blocks.0.W_A"] != after["blocks.0.W_A"]).float().mean()
        assert abs(float(moved) - record.strength) < 0.05


@pytest.mark.parametrize("kind", ["tensor", "block", "exchanged"])
def test_only_the_part_named_is_touched(small_zoo: Zoo, damaged: Zoo, kind: str) -> None:
    for before, after, record in pairs(small_zoo, damaged, kind):
        other = small_zoo.weights([max(record.other_row, 0)])
        for name, w in before.items():
            inside = name == record.part or name.startswith(f"{record.part}.")
            assert inside or torch.equal(w, after[name])
            if inside and kind == "exchanged":
                assert torch.equal(after[name], other[name])
            elif inside and name.rpartition(".")[2].startswith("W"):
                assert not torch.equal(w, after[name])
    if kind == "exchanged":
        told = [record for _, _, record in pairs(small_zoo, damaged, kind)]
        assert all(d.other_run != small_zoo.table["run"][d.row] for d in told)


def test_untrained_networks_have_the_std_of_their_run(small_zoo: Zoo, damaged: Zoo) -> None:
    for _, after, record in pairs(small_zoo, damaged, "untrained"):
        std = float(after["blocks.1.W_A"].std())
        assert std == pytest.approx(float(small_zoo.table["init_std"][record.row]), rel=0.1)
        assert not after["blocks.1.b_A"].any()


def test_noise_pruning_and_quantisation_are_as_strong_as_they_say(
    small_zoo: Zoo, damaged: Zoo
) -> None:
    for before, after, record in pairs(small_zoo, damaged, "noise"):
        gap = after["blocks.0.W_B"] - before["blocks.0.W_B"]
        share = float(gap.std() / before["blocks.0.W_B"].std())
        assert share == pytest.approx(record.strength, rel=0.1)
    for _, after, record in pairs(small_zoo, damaged, "pruned"):
        zero = float((after["blocks.0.W_B"] == 0).float().mean())
        assert zero == pytest.approx(record.strength, abs=0.01)
    for before, after, record in pairs(small_zoo, damaged, "quantised"):
        assert len(after["blocks.0.W_B"].unique()) <= 2**record.strength - 1
        assert torch.equal(before["blocks.0.b_B"], after["blocks.0.b_B"])


def test_a_killed_damage_goes_on_to_the_same_bytes(
    small_zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "transformer_nfn.zoo.training.damage"
    monkeypatch.setattr(f"{module}.SHARD_ROWS", 5)
    how = {"kinds": "noise,exchanged", "count": 6}
    whole = damage_zoo(small_zoo, tmp_path / "whole", **how)

    def die(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        damage_zoo(small_zoo, tmp_path / "killed", tick=die, **how)
    assert len(Zoo.open(tmp_path / "killed")) == 5
    again = damage_zoo(small_zoo, tmp_path / "killed", **how)
    assert again.finished
    assert np.array_equal(again.table["checksum"], whole.table["checksum"])
    assert np.array_equal(again.table["test_accuracy"], whole.table["test_accuracy"])


def test_other_damage_in_the_folder_is_refused(small_zoo: Zoo, damaged: Zoo) -> None:
    with pytest.raises(StoreError, match="asked for 7"):
        damage_zoo(small_zoo, damaged.path, count=7)
    with pytest.raises(StoreError, match="holds another zoo"):
        damage_zoo(small_zoo, small_zoo.path)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("burnt", "no kind of damage 'burnt'"),
        ("pruned:2", "share above 0 and at most 1"),
        ("quantised:2.5", "whole bits"),
        ("noise:nan", "size above 0"),
        ("block:2", "no strength but 1"),
        ("noise:much", "a strength is a number"),
    ],
)
def test_kinds_that_are_none_are_refused(words: str, sentence: str) -> None:
    with pytest.raises(ZooError, match=sentence):
        parse_damages(words)


def test_the_command_its_summary_and_its_rows(
    small_zoo: Zoo, damaged: Zoo, tmp_path: Path
) -> None:
    out = tmp_path / "few"
    command = ["zoo", "damage", str(small_zoo.path), "--out", str(out), "--kinds"]
    ran = CliRunner().invoke(app, [*command, "pruned:0.6,untrained", "--count", "3", "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["by_damage"]["pruned:0.6"]["count"] == 3
    told = json.loads(CliRunner().invoke(app, ["zoo", "rows", str(out), "--json"]).stdout)
    assert (told[0]["damage"]["kind"], told[0]["damage"]["strength"]) == ("pruned", 0.6)
    assert len(rows_of(Zoo.open(out), {"untrained": (1,)})) == 3
