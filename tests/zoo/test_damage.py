"""Damaged networks of a zoo: what was done, their accuracies, how they are stored."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tnfn_command import as_json, printed
from transformer_nfn.spaces import Weights
from transformer_nfn.zoo import Zoo, ZooError
from transformer_nfn.zoo.damage import STRENGTHS, Damage, damages, parse_damages
from transformer_nfn.zoo.training.damage import DamageOptions, damage_zoo
from transformer_nfn.zoo.verify import verify


@pytest.fixture(scope="module")
def damaged(small_zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Six networks of every kind of damage."""
    out = tmp_path_factory.mktemp("damaged") / "all"
    return damage_zoo(small_zoo, out, DamageOptions(count=6))


Pairs = dict[str, list[tuple[Weights, Weights, Damage]]]


@pytest.fixture(scope="module")
def pairs(small_zoo: Zoo, damaged: Zoo) -> Pairs:
    """Tensors before and after, and the record of the damage, by kind."""
    pairs: Pairs = {}
    for row, record in enumerate(damages(damaged)):
        before, after = small_zoo.weights([record.row]), damaged.weights([row])
        pairs.setdefault(record.kind, []).append((before, after, record))
    return pairs


def test_every_kind_is_there_and_records_its_run(
    small_zoo: Zoo, damaged: Zoo, pairs: Pairs
) -> None:
    assert {kind: len(part) for kind, part in pairs.items()} == dict.fromkeys(STRENGTHS, 6)
    for row, record in enumerate(damages(damaged)):
        for column in ("run", "init_std"):
            assert damaged.table[column][row] == small_zoo.table[column][record.row]


def test_accuracies_are_those_of_the_test_data(damaged: Zoo) -> None:
    """`verify` runs networks as plain modules, unlike the test of a damage."""
    verdict = verify(damaged.path, sample=len(damaged))
    assert verdict.ok, verdict.problems
    assert verdict.rerun == len(damaged)
    assert verdict.worst_samples <= 1


def test_shuffling_keeps_the_entries_of_every_tensor(pairs: Pairs) -> None:
    for before, after, record in pairs["shuffled"]:
        for name, w in before.items():
            assert torch.equal(w.flatten().sort().values, after[name].flatten().sort().values)
        moved = (before["blocks.0.W_A"] != after["blocks.0.W_A"]).float().mean()
        assert abs(float(moved) - record.strength) < 0.05


@pytest.mark.parametrize("kind", ["tensor", "block", "exchanged"])
def test_only_the_recorded_part_is_changed(small_zoo: Zoo, pairs: Pairs, kind: str) -> None:
    for before, after, record in pairs[kind]:
        other = small_zoo.weights([max(record.other_row, 0)])
        for name, w in before.items():
            inside = name == record.part or name.startswith(f"{record.part}.")
            assert inside or torch.equal(w, after[name])
            if inside and kind == "exchanged":
                assert torch.equal(after[name], other[name])
            elif inside and name.rpartition(".")[2].startswith("W"):
                assert not torch.equal(w, after[name])
        assert kind != "exchanged" or record.other_run != small_zoo.table["run"][record.row]


def test_the_strength_of_damage_is_as_recorded(small_zoo: Zoo, pairs: Pairs) -> None:
    for _, after, record in pairs["untrained"]:
        std = float(after["blocks.1.W_A"].std())
        assert std == pytest.approx(float(small_zoo.table["init_std"][record.row]), rel=0.1)
        assert not after["blocks.1.b_A"].any()
    for before, after, record in pairs["noise"]:
        difference = after["blocks.0.W_B"] - before["blocks.0.W_B"]
        share = float(difference.std() / before["blocks.0.W_B"].std())
        assert share == pytest.approx(record.strength, rel=0.1)
    for _, after, record in pairs["pruned"]:
        zero = float((after["blocks.0.W_B"] == 0).float().mean())
        assert zero == pytest.approx(record.strength, abs=0.01)
    for before, after, record in pairs["quantised"]:
        assert len(after["blocks.0.W_B"].unique()) <= 2**record.strength - 1
        assert torch.equal(before["blocks.0.b_B"], after["blocks.0.b_B"])


def test_a_killed_damage_resumes_to_the_same_bytes(
    small_zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformer_nfn.zoo.training.damage.SHARD_ROWS", 5)
    options = DamageOptions(kinds="noise,exchanged", count=6)
    reference = damage_zoo(small_zoo, tmp_path / "reference", options)

    def die(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        damage_zoo(small_zoo, tmp_path / "killed", options, die)
    assert len(Zoo.open(tmp_path / "killed")) == 5
    again = damage_zoo(small_zoo, tmp_path / "killed", options)
    assert again.finished
    for column in ("checksum", "test_accuracy"):
        assert np.array_equal(again.table[column], reference.table[column])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("burnt", "no kind of damage 'burnt'"),
        ("pruned:2", "share above 0 and at most 1"),
        ("quantised:2.5", "whole bits"),
        ("noise:nan", "size above 0"),
        ("block:2", "no strength but 1"),
        ("noise:much", "a strength is a number"),
    ],
)
def test_invalid_kinds_are_rejected(text: str, message: str) -> None:
    with pytest.raises(ZooError, match=message):
        parse_damages(text)


def test_the_command_its_summary_and_its_rows(small_zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "few"
    options = ("--kinds", "pruned:0.6,untrained", "--count", 3, "--json")
    text = printed("zoo", "damage", small_zoo.path, "--out", out, *options)
    assert json.loads(text)["by_damage"]["pruned:0.6"]["count"] == 3
    rows = as_json("zoo", "rows", out)
    assert (rows[0]["damage"]["kind"], rows[0]["damage"]["strength"]) == ("pruned", 0.6)
    assert sum(damage.kind == "untrained" for damage in damages(Zoo.open(out))) == 3
