"""SmolLM2-135M, dequantised from GGUF: a Llama with grouped queries and tied embeddings."""

import json

import pytest
from every_command import check_align, check_outputs, check_same, disguise, run

from real_weights.models import smollm2_logits

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


