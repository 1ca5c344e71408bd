"""Fingerprints of checkpoints: invariant, sensitive to every tensor, stored and searched."""

import struct
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from memory_model import MemoryModel, disguised, noisy

from tiny_families import every_family
from transformer_nfn.checkpoints.families import open_model
from transformer_nfn.checkpoints.fingerprints import (
    Database,
    Entry,
    Fingerprint,
    FingerprintError,
    add_to_database,
    compare_fingerprints,
    search,
    take_fingerprint,
    write_database,
)
from transformer_nfn.errors import WriteError

FLOAT32, FLOAT64, BFLOAT16 = torch.float32, torch.float64, torch.bfloat16
SAME = "same up to rounding"


def compared(a, b):
    """The comparison of two models by their fingerprints."""
    return compare_fingerprints(take_fingerprint(a), take_fingerprint(b))


@every_family
def test_no_symmetry_of_a_family_moves_a_fingerprint(tiny, family):
    for dtype, condition, allowed in (
        (FLOAT32, 10.0, 1e-4),
        (FLOAT32, 1e5, 1e-2),
        (FLOAT64, 1e5, 1e-4),
        (BFLOAT16, 10.0, 2e-2),
    ):
        model = tiny(family, dtype)
        a, b = (take_fingerprint(m) for m in (model, disguised(model, 3, condition=condition)))
        x, y = (p.sketch.ravel().astype(float) for p in (a, b))
        assert np.linalg.norm(x - y) <= allowed * np.linalg.norm(x)
        comparison = compare_fingerprints(a, b)
        assert (comparison.distance, comparison.summary()) == (0, SAME)


def test_changes_without_effect_are_none(tiny):
    model = tiny("qwen3")
    larger = model.changed(**{"0.W_Q": 1.3 * model["0.W_Q"]})  # queries have a norm
    assert compared(model, larger).summary() == SAME
    model = tiny("gpt2")
    assert compared(model, disguised(model, keep_tie=True)).summary() == SAME


def test_differences_are_named(tiny):
    model = tiny("bert-base")
    kept = {"kept.classifier.weight": torch.randn(5, 32), "kept.classifier.bias": torch.randn(5)}
    model = model.changed(**kept)
    before = take_fingerprint(model)
    for name, words in (
        ("kept.classifier.weight", "same but for other tensors"),
        ("kept.classifier.bias", "same but for other tensors"),
        ("extra.pooler.W", "same but for pooler, pooler bias"),  # which has the norm's in it
        ("extra.pooler.b", "same but for pooler bias"),
        ("type", "same but for token type, input constant"),
        ("2.norm_2.g", "same but for head, pooler"),
        (
            "0.W_Q",
            "same but for QK at 0-38 % of the depth, QK with VO at 0-38 % of the depth, "
            "QK biases at 0-38 % of the depth",
        ),
        ("2.b_B", "same but for MLP bias at 62-100 % of the depth"),
    ):
        after = take_fingerprint(disguised(noisy(model, 0.01, {name}), 2))
        assert compare_fingerprints(before, after).summary() == words


def test_copies_in_half_precision_and_with_more_tokens_are_the_same(tiny):
    model = tiny("llama")
    assert compared(model, disguised(model.to(BFLOAT16), 1)).summary() == SAME
    longer = {
        "token": torch.cat([model.tensors["token"], torch.randn(2, 32)]),
        "head": torch.cat([model.tensors["head"], torch.randn(32, 2)], 1),
    }
    assert compared(model, model.changed(**longer)).summary() == "same but for embedding, head"


@pytest.mark.parametrize(("family", "seed"), [("vit", 7), ("deit", 20)])
def test_a_bias_of_few_large_rounding_errors_is_the_same(tiny, family, seed):
    """Products that nearly cancel are folded into these biases."""
    model = tiny(family)
    assert compared(model, disguised(model, seed, condition=1e5)).summary() == SAME


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama", "gemma2", "t5", "vit"])
def test_related_models_are_near_and_others_far(tiny, family):
    model = tiny(family)
    near = compared(model, disguised(noisy(model, 0.1), 1))
    far = compared(model, tiny(family, seed=1))
    assert near.distance < 0.4 < 0.85 < far.distance
    assert near.summary() == "all blocks, as near as fine-tunes were"
    assert far.summary() == "nothing"


def test_the_depth_that_agrees_is_named(tiny):
    model, other = tiny("gpt2"), tiny("gpt2", seed=1)
    block = {n: w for n, w in other.tensors.items() if n.startswith("2.")}
    answer = compared(model, disguised(model.changed(**block)))
    assert answer.summary() == "blocks at 0-62 % of the depth"  # the last third was replaced
    ends = {n: w for n, w in model.tensors.items() if n in ("token", "position")}
    assert compared(model, disguised(other.changed(**ends))).summary() == "embeddings only"


def test_models_of_other_inputs_do_not_compare(tiny):
    comparison = compared(tiny("gpt2"), tiny("vit"))
    assert not comparison.comparable
    assert "not comparable" in comparison.summary()
    assert comparison.as_json()["embedding"] is None


def trained(steps, seed, start=None, data=0):
    """A small GPT-2 trained on texts of a random Markov chain."""
    transformers = pytest.importorskip("transformers")
    draw = torch.Generator().manual_seed(data)
    chain = torch.softmax(2.5 * torch.randn(48, 48, generator=draw), -1)
    text = [0]
    for _ in range(2000):
        text.append(int(torch.multinomial(chain[text[-1]], 1, generator=draw)))
    text = torch.tensor(text)
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=16, vocab_size=48, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    if start is not None:
        model.load_state_dict(start.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if start is None else 1e-3)
    for _ in range(steps):
        at = torch.randint(len(text) - 16, (16, 1)) + torch.arange(16)
        logits = model(text[at]).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, text[at][:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.mark.nightly
def test_fine_tuned_copies_of_trained_models_are_nearer_than_others(tmp_path):
    def fingerprint(model, name):
        model.save_pretrained(tmp_path / name)
        with open_model(tmp_path / name) as opened:
            return take_fingerprint(disguised(MemoryModel.of(opened), 5))

    first, second = trained(40, 1), trained(40, 2)
    base, other = fingerprint(first, "first"), fingerprint(second, "second")
    tuned = [fingerprint(trained(10, 3, first, data), f"tuned {data}") for data in (0, 1)]
    assert max(compare_fingerprints(base, p).distance for p in tuned) < 0.6
    assert min(compare_fingerprints(p, other).distance for p in (base, *tuned)) > 0.85


def test_a_fingerprint_is_small_and_round_trips(tiny):
    first = take_fingerprint(tiny("qwen3"))
    data = first.to_bytes()
    assert len(data) <= 5120
    again = Fingerprint.from_bytes(data, "x")
    assert again.to_bytes() == data
    assert (again.family, again.width, again.depth) == ("qwen3", 32, 3)
    assert again.checksum == first.checksum == data[:-5:-1].hex()


def test_invalid_bytes_are_rejected_by_name(tiny):
    data = take_fingerprint(tiny("gpt2")).to_bytes()
    for bad, words in (
        (b"", "not a fingerprint"),
        (b"PK" + data[2:], "not a fingerprint"),
        (data[:-1], f"expected {len(data)} bytes, found {len(data) - 1}"),
        (data[:900] + bytes([data[900] ^ 1]) + data[901:], "do not match their checksum"),
        (data[:4] + struct.pack("<H", 1) + data[6:], "of format 1, expected 6"),
        (data[:4] + struct.pack("<H", 9) + data[6:], "of format 9, expected 6"),
    ):
        with pytest.raises(FingerprintError, match=words) as caught:
            Fingerprint.from_bytes(bad, "'db', fingerprint 'x'")
        assert str(caught.value).startswith("'db', fingerprint 'x': ")


@pytest.fixture(scope="module")
def many(tiny):
    """Random fingerprints, every third derived from the one before."""
    draw = np.random.default_rng(0)
    blank = take_fingerprint(tiny("gpt2"))
    zeros = {
        f"{name}{noise}": 0 * getattr(blank, f"{name}{noise}")
        for name in ("sketch", "constants", "ends", "heads")
        for noise in ("", "_noise")
    }
    out = []
    for i in range(400):
        sketch = draw.standard_normal((8, 3, 64))
        if i % 3 == 2:
            sketch = 0.7 * out[-1].fingerprint.sketch + 0.7 * sketch
        numbers = {**zeros, "sketch": sketch.astype(np.float32)}
        out.append(Entry(f"m{i}", replace(blank, **numbers, width=i)))
    return out


def test_a_search_finds_what_comparing_with_all_finds(many, tmp_path):
    path = tmp_path / "known.parquet"
    assert write_database(path, many) == 400
    queries = [many[i].fingerprint for i in (1, 2, 101)]
    with Database(path) as database:
        assert len(database) == 400
        results = search(database, queries, most=3)
    for query, matches in zip(queries, results, strict=True):
        truth = sorted(many, key=lambda e: compare_fingerprints(query, e.fingerprint).distance)[:2]
        assert [m.name for m in matches[:2]] == [entry.name for entry in truth]
        assert matches[0].comparison.distance == 0
        assert matches[1].comparison.distance < 0.6
        assert matches[2].comparison.distance > 0.9


def test_adding_creates_extends_and_replaces(many, tmp_path):
    path = tmp_path / "new" / "known.parquet"
    assert add_to_database(path, many[:3]) == (3, 3)
    assert add_to_database(path, many[3:84]) == (81, 84)  # more than a row group
    assert add_to_database(path, [Entry("m1", many[9].fingerprint)]) == (1, 84)
    with Database(path) as database:
        kept = {entry.name: entry.fingerprint for entry in database}
    assert kept["m1"].to_bytes() == many[9].fingerprint.to_bytes()
    assert kept["m2"].to_bytes() == many[2].fingerprint.to_bytes()
    assert kept.keys() == {f"m{i}" for i in range(84)}
    assert [p.name for p in path.parent.iterdir()] == ["known.parquet"]


def test_a_failed_write_leaves_the_old_database(many, tmp_path):
    path = tmp_path / "known.parquet"
    write_database(path, many[:5])
    before = path.read_bytes()

    def broken():
        yield from many[5:300]
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_database(path, broken())
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["known.parquet"]
    with pytest.raises(WriteError, match="cannot be written"):
        write_database(path / "below", many[:1])


def test_other_files_and_formats_are_rejected(many, tmp_path):
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(FingerprintError, match="not a database of fingerprints"):
        Database(path)
    write_database(path, many[:2])
    table = pq.read_table(path)
    later = {**table.schema.metadata, b"format": b"7"}
    pq.write_table(table.replace_schema_metadata(later), path)
    for use in (Database, lambda path: add_to_database(path, many[:1])):
        with pytest.raises(FingerprintError, match="of format 7, expected 6"):
            use(path)
