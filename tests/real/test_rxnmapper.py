"""An ALBERT of chemical reactions, one block for twelve layers, through every command."""

import pytest
import torch
from every_command import check_align, check_outputs, check_same, disguise, run

from real_weights.models import rxnmapper_logits
from transformer_nfn.checkpoints.families import open_model
from transformer_nfn.functional.transformer import transformer

pytestmark = pytest.mark.nightly


def test_a_disguise_is_proved_the_same_and_undone(rxnmapper, tmp_path):
    out = disguise(rxnmapper, tmp_path / "disguised")
    assert check_same(rxnmapper, out) == 29
    check_outputs(rxnmapper_logits(rxnmapper), rxnmapper_logits(out))
    check_align(rxnmapper, out, tmp_path / "aligned")
    distances = run("fingerprint", rxnmapper, out)["distances"]
    assert distances[0][1] < 0.005


def test_the_blocks_are_run_as_often_as_the_config_says(rxnmapper):
    assert run("inspect", rxnmapper)["sizes"]["repeats"] == 12
    ids = torch.arange(40, 60).unsqueeze(0)
    from transformers import AlbertForMaskedLM

    with open_model(rxnmapper) as model, torch.no_grad():
        expected = AlbertForMaskedLM.from_pretrained(rxnmapper).eval()(ids).logits
        torch.testing.assert_close(
            transformer(model.description, model, ids), expected, rtol=1e-4, atol=1e-4
        )
