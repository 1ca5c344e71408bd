"""SCEPTR: 16 small nn.TransformerEncoder models of T cell receptors, through every command."""

import json
import shlex
import shutil

import pytest
import torch
from every_command import check_align, check_fingerprints, check_outputs, check_same, disguise, run

from real_weights.models import AMINO_ACIDS, FACTS, RECEPTORS, sceptr_logits
from tnfn_command import printed, tnfn
from transformer_nfn.checkpoints import open_model, relate

NAMES = (
    "A_SCEPTR", "B_SCEPTR", "SCEPTR", "SCEPTR_BLOSUM", "SCEPTR_CDR3_only",
    "SCEPTR_CDR3_only_MLM_only", "SCEPTR_MLM_only", "SCEPTR_average_pooling",
    "SCEPTR_dropout_noise_only", "SCEPTR_finetuned", "SCEPTR_large", "SCEPTR_left_aligned",
    "SCEPTR_shuffled_data", "SCEPTR_small", "SCEPTR_synthetic_data", "SCEPTR_tiny",
)  # fmt: skip
QUICK = ("A_SCEPTR", "SCEPTR", "SCEPTR_finetuned", "SCEPTR_large", "SCEPTR_tiny")
OPTIONS = shlex.split(str(FACTS))
TRUE_PAIR = {"SCEPTR.pt", "SCEPTR_finetuned.pt"}


def test_the_package_holds_these_models_and_they_read_amino_acids(sceptr):
    assert tuple(sceptr) == NAMES
    letters = "".join(f"-{alpha}{beta}" for alpha, beta in RECEPTORS)
    predicted = sceptr_logits(sceptr["SCEPTR_tiny"]).argmax(1).tolist()
    pairs = [(AMINO_ACIDS[p], x) for p, x in zip(predicted, letters, strict=True) if x != "-"]
    assert sum(p == x for p, x in pairs) / len(pairs) > 0.8


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.nightly) for n in NAMES]
)
def test_a_disguise_is_proved_the_same_and_keeps_the_logits(sceptr, tmp_path, name):
    model = sceptr[name]
    out = disguise(model, tmp_path / "disguised.pt", *OPTIONS)
    answer = run("compare", model, out, *OPTIONS)
    assert answer["verdict"] == "same", answer["reason"]
    assert answer["proof"]["same_function"] is True
    blocks = 4 if name == "SCEPTR_large" else 3
    assert len(answer["proof"]["tensors"]) >= 16 * blocks
    check_outputs(sceptr_logits(model), sceptr_logits(out))


@pytest.mark.parametrize(
    ("names", "pairs"), [(QUICK, 10), pytest.param(NAMES, 120, marks=pytest.mark.nightly)]
)
def test_of_all_pairs_one_is_derived(sceptr, tmp_path, names, pairs):
    for name in names:
        shutil.copy(sceptr[name], tmp_path / f"{name}.pt")
    answer = run("compare", "--matrix", tmp_path, *OPTIONS)
    assert len(answer["pairs"]) == pairs
    assert not answer["not_read"]
    derived = [pair for pair in answer["pairs"] if pair["verdict"] == "derived"]
    assert [{pair["a"], pair["b"]} for pair in derived] == [TRUE_PAIR]
    for pair in answer["pairs"]:
        assert pair["verdict"] in ("derived", "unrelated", "not comparable")
        assert pair["same_function"] is False
        if pair["verdict"] == "not comparable":
            assert "the streams have different widths" in pair["reason"]


def test_of_the_models_trained_from_scratch_only_the_fine_tune_is_no_stranger(sceptr):
    with open_model(sceptr["SCEPTR"], FACTS) as A:
        for name in NAMES:
            with open_model(sceptr[name], FACTS) as B:
                exact = relate(A, B, prove=False).exact
            if name == "SCEPTR_finetuned":
                assert exact.total.log10_p < -50
            elif exact is not None:  # others have another width, or are the model itself
                assert exact.total.log10_p > -3


def test_every_command_reads_a_model(sceptr, tmp_path):
    tiny, small = sceptr["SCEPTR_tiny"], sceptr["SCEPTR_small"]
    seen = run("inspect", tiny, *OPTIONS)
    assert "11192" in json.dumps(seen)
    out = disguise(tiny, tmp_path / "disguised.pt", *OPTIONS)
    assert check_same(tiny, out, *OPTIONS) >= 48
    check_fingerprints(tiny, out, small, tmp_path, *OPTIONS)
    back = check_align(tiny, out, tmp_path / "aligned.pt", *OPTIONS)
    check_outputs(sceptr_logits(out), sceptr_logits(back))


def test_facts_that_the_file_does_not_state_are_asked_for(sceptr, tmp_path):
    model = sceptr["SCEPTR_tiny"]
    for words in (["inspect", model], ["disguise", model, "--out", tmp_path / "out.pt"]):
        done = tnfn(*words)
        assert done.returncode == 2
        first, *lines = done.stderr.splitlines()
        assert lines[:2] == ['  extends = "torch_encoder"', "  [config]"]
        for fact in ("nhead", "norm_first", "activation"):
            assert f"--set {fact}=" in first
            assert any(line.startswith(f"  {fact} = ") for line in lines)
    assert not list(tmp_path.iterdir())


def test_scores_alone_do_not_call_a_disguise_the_same(sceptr, tmp_path):
    out = disguise(sceptr["SCEPTR_tiny"], tmp_path / "disguised.pt", *OPTIONS)
    shown = printed("compare", sceptr["SCEPTR_tiny"], out, "--no-prove", *OPTIONS, code=3)
    assert "consistent with a disguise, not proved" in shown


def test_a_matrix_times_ten_is_not_the_same(sceptr, tmp_path):
    state = torch.load(sceptr["SCEPTR_tiny"], weights_only=True)
    name = next(name for name in state if name.endswith("layers.1.linear2.weight"))
    torch.save({**state, name: 10 * state[name]}, tmp_path / "scaled.pt")
    answer = run("compare", sceptr["SCEPTR_tiny"], tmp_path / "scaled.pt", *OPTIONS, code=1)
    assert answer["same_function"] is False
