"""Sapiens: two RoBERTas of antibodies, converted from fairseq, through every command."""

import json

import pytest
import torch
from every_command import check_align, check_fingerprints, check_outputs, check_same, disguise, run

from real_weights.models import sapiens_logits

PUBLISHED = [[0.003272, 0.004147, 0.004011, 0.004590], [0.012038, 0.003854, 0.006803, 0.008174]]
"""Probabilities of A, C, D and E at the first two positions, from the package's readme."""


def test_the_converted_model_gives_the_published_scores(sapiens):
    scores = sapiens_logits(sapiens["h"]).softmax(-1)[:2, 4:8]
    assert torch.allclose(scores, torch.tensor(PUBLISHED), atol=2e-6)


@pytest.mark.parametrize("chain", ["h", "l"])
def test_a_disguise_is_proved_the_same_and_keeps_the_logits(sapiens, tmp_path, chain):
    model = sapiens[chain]
    out = disguise(model, tmp_path / "disguised")
    assert check_same(model, out) >= 14 * 4
    check_outputs(sapiens_logits(model), sapiens_logits(out))


def test_the_two_are_unrelated(sapiens):
    answer = run("compare", sapiens["h"], sapiens["l"], code=1)
    assert answer["verdict"] == "unrelated"
    assert answer["score"] < 0.05


def test_every_command_reads_a_model(sapiens, tmp_path):
    model = sapiens["h"]
    assert "roberta" in json.dumps(run("inspect", model))
    out = disguise(model, tmp_path / "disguised")
    check_fingerprints(model, out, sapiens["l"], tmp_path)
    tied = disguise(model, tmp_path / "tied", "--keep-tie")
    back = check_align(model, tied, tmp_path / "aligned")
    check_outputs(sapiens_logits(tied), sapiens_logits(back))
