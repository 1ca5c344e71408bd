"""BERTs of chemical reactions, with real fine-tunes, and of sentences, through every command."""

import filecmp
import json

import pytest
import torch
from every_command import check_align, check_fingerprints, check_outputs, check_same, disguise, run

from gguf_conversion import write_gguf
from real_weights.models import minilm_outputs, rxnfp_outputs
from tnfn_command import tnfn

pytestmark = pytest.mark.nightly

PRETRAINED, TUNES = "bert_pretrained", ("bert_ft", "bert_ft_10k_25s")
BERT = ("--family", "bert")
"""A config of 2019 does not name the model type."""


@pytest.mark.parametrize("name", [PRETRAINED, *TUNES])
def test_a_disguise_of_a_reaction_model_is_proved_the_same(rxnfp, tmp_path, name):
    model = rxnfp[name]
    out = disguise(model, tmp_path / "disguised", *BERT)
    assert check_same(model, out, *BERT) >= 14 * 12
    check_outputs(rxnfp_outputs(model), rxnfp_outputs(out))


def test_a_config_without_a_model_type_is_read_or_the_remedy_is_named(rxnfp):
    for folder in rxnfp.values():
        done = tnfn("inspect", folder)
        assert done.returncode == 0 or (done.returncode == 2 and "--family bert" in done.stderr)


@pytest.mark.parametrize("name", TUNES)
def test_a_fine_tune_is_derived(rxnfp, tmp_path, name):
    out = disguise(rxnfp[name], tmp_path / "disguised", *BERT)
    for second in (rxnfp[name], out):
        answer = run("compare", rxnfp[PRETRAINED], second, *BERT, code=1)
        assert answer["verdict"] == "derived"
        assert answer["score"] > 0.9


@pytest.mark.parametrize("name", TUNES)
def test_a_fine_tune_and_its_base_are_no_strangers(rxnfp, name):
    test = run("compare", rxnfp[PRETRAINED], rxnfp[name], *BERT, code=1)["exact_test"]
    assert test["log10_p"] < -1000
    assert all(block["log10_p"] < -50 for block in test["blocks"].values())


def test_two_fine_tunes_of_one_model_are_derived(rxnfp):
    answer = run("compare", *(rxnfp[name] for name in TUNES), *BERT, code=1)
    assert answer["verdict"] == "derived"


def test_every_command_reads_a_reaction_model(rxnfp, tmp_path):
    model = rxnfp["bert_ft_10k_25s"]
    assert "bert" in json.dumps(run("inspect", model))
    out = disguise(model, tmp_path / "disguised")
    back = check_align(model, out, tmp_path / "aligned")
    check_outputs(rxnfp_outputs(out), rxnfp_outputs(back))
    distances = run("fingerprint", model, rxnfp[PRETRAINED], *BERT)["distances"]
    assert distances[0][1] < 0.5


def test_a_sentence_transformers_folder_is_disguised_whole(minilm, rxnfp, tmp_path):
    out = disguise(minilm, tmp_path / "disguised")
    assert check_same(minilm, out) >= 14 * 6
    check_outputs(minilm_outputs(minilm), minilm_outputs(out))
    files = [p.relative_to(minilm) for p in minilm.rglob("[!.]*") if p.is_file()]
    assert any(len(p.parts) > 1 for p in files)
    for file in files:
        if file.suffix != ".safetensors":
            assert filecmp.cmp(minilm / file, out / file, shallow=False), file
    check_fingerprints(minilm, out, rxnfp["bert_ft_10k_25s"], tmp_path)
    back = check_align(minilm, out, tmp_path / "aligned")
    for file in files:
        assert (back / file).is_file()
    check_outputs(minilm_outputs(out), minilm_outputs(back))


def test_models_of_different_widths_are_not_one(minilm, rxnfp):
    answer = run("compare", minilm, rxnfp["bert_ft_10k_25s"], code=1)
    assert answer["same_function"] is False
    assert answer["verdict"] == "unrelated"


def test_sentence_embeddings_are_those_of_the_model(minilm):
    """Two sentences that share a word are alike, not equal."""
    first, second = minilm_outputs(minilm)
    assert 0.2 < float(torch.dot(first, second)) < 0.8


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0"])
def test_a_gguf_of_sentence_embeddings_is_the_same_up_to_rounding(minilm, tmp_path, kind):
    file = write_gguf(minilm, tmp_path / "model.gguf", kind)
    answer = run("compare", minilm, file)
    assert (answer["verdict"], answer["conversion"]["checked"]) == ("same", 101)
    assert answer["conversion"]["formats"] == [kind, "float32"]
    answer = run("compare", disguise(minilm, tmp_path / "disguised"), file, code=3)
    assert answer["verdict"] == "consistent with a disguise, not proved", answer["reason"]
