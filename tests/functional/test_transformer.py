"""The reference forward of real transformers computes what the `transformers` library does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tiny_families import HEADS, TINY, build, inputs_of, network, run_library, save
from transformer_nfn.checkpoints.families import open_model
from transformer_nfn.errors import SpaceError
from transformer_nfn.functional import transformer as forward
from transformer_nfn.functional.transformer import relative_buckets

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", [*TINY, *(name for name in HEADS if name != "bart-class")])
def test_it_computes_what_the_library_computes(name: str, tmp_path: Path) -> None:
    model, inputs = build(name), inputs_of(name)
    expected = run_library(model, inputs)
    with open_model(save(model, tmp_path)) as read:
        found = forward.transformer(
            read.description,
            read,
            next(iter(inputs.values())),
            decoder=inputs.get("decoder_input_ids"),
        )
    assert found.dtype == torch.float64
    assert found.shape == expected.shape
    allowed = 1e-9 if name == "bloom" else 1e-12  # its GELU has eight digits of √(2/π)
    assert float((found - expected).abs().max() / expected.abs().max()) < allowed


def test_the_pooler_computes_what_the_library_computes(tmp_path: Path) -> None:
    model, inputs = build("bert-base"), inputs_of("bert-base")
    with torch.no_grad():
        expected = model(**inputs).pooler_output
    with open_model(save(model, tmp_path)) as read:
        x = forward.hidden_states(read.description, read, inputs["input_ids"])
        found = forward.pooled(read.description, read, x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_classifier_reads_the_last_token_of_a_decoder(tmp_path: Path) -> None:
    model, inputs = build("bart-class"), inputs_of("bart-class")
    ids = inputs["input_ids"]
    ids[:, -1] = 2  # the end, which the library looks for in what the encoder reads
    shifted = torch.cat([ids[:, -1:], ids[:, :-1]], 1)
    with open_model(save(model, tmp_path)) as read:
        found = forward.transformer(read.description, read, ids, decoder=shifted)
    torch.testing.assert_close(found, run_library(model, {"input_ids": ids}), rtol=1e-9, atol=1e-9)


def test_half_precision_files_are_computed_in_the_dtype_asked_for(tmp_path: Path) -> None:
    save(build("llama", dtype=torch.bfloat16), tmp_path)
    ids = inputs_of("llama")["input_ids"]
    with open_model(tmp_path) as read:
        wide = forward.transformer(read.description, read, ids, dtype=torch.float64)
        narrow = forward.transformer(read.description, read, ids)
    assert wide.dtype == torch.float64
    assert narrow.dtype == torch.bfloat16


def test_a_window_hides_what_is_far() -> None:
    net = network("mistral")
    block = net.description.stacks[0].blocks[0]
    wide = replace(block, attention=replace(block.attention, window=None))
    stack = replace(net.description.stacks[0], blocks=(wide,) * 3)
    assert net.change({}, replace(net.description, stacks=(stack,))) > 1e-2


def test_inputs_longer_than_the_positions_are_refused() -> None:
    net = network("gpt2")
    with pytest.raises(SpaceError, match="'position': expected at least 25 rows"):
        forward.transformer(net.description, net.weights, torch.zeros(1, 25, dtype=torch.long))


def test_a_decoder_needs_its_own_tokens() -> None:
    net = network("t5")
    with pytest.raises(SpaceError, match="has a decoder"):
        forward.transformer(net.description, net.weights, torch.zeros(1, 5, dtype=torch.long))


@pytest.mark.parametrize("both_ways", [True, False])
def test_far_positions_share_a_bucket(both_ways: bool) -> None:
    buckets = relative_buckets(40, 40, buckets=8, farthest=16, both_ways=both_ways)
    assert int(buckets.min()) == 0
    assert int(buckets.max()) == 7
    assert torch.equal(buckets[30, :14], buckets[31, 1:15])  # distances count, not places
    assert len(buckets[39, :20].unique()) == 1
