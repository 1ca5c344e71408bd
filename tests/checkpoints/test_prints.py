"""Fingerprints of checkpoints: shared by disguises, near in relatives, kept and found again."""

import json
import struct
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from memory_model import MemoryModel, disguised

from tiny_families import TINY
from transformer_nfn.checkpoints.fingerprints import (
    Database,
    Named,
    PrintError,
    add_to_database,
    from_bytes,
    likeness,
    search,
    take_print,
    write_database,
)
from transformer_nfn.checkpoints.fingerprints.database import GROUP
from transformer_nfn.checkpoints.fingerprints.frame import rows_used
from transformer_nfn.errors import WriteError

FLOAT32, FLOAT64, BFLOAT16 = torch.float32, torch.float64, torch.bfloat16
SAME = "same up to rounding"


def movement(a, b):
    """How far the numbers of the blocks moved, relative to their length."""
    x, y = (p.sketch.ravel().astype(float) for p in (a, b))
    return np.linalg.norm(x - y) / np.linalg.norm(x)


def noisy(model, share, seed=0):
    """Every weight moved by a share of its size."""
    generator = torch.Generator().manual_seed(seed)
    moved = {
        n: w * (1 + share * torch.randn(w.shape, generator=generator)).to(w.dtype)
        for n, w in model.tensors.items()
    }
    return model.changed(**moved)


def cut(model, *, blocks=None, vocabulary=None):
    """The model with its first blocks, or tokens, alone."""
    about, tensors = model.about, dict(model.tensors)
    if blocks is not None:
        gone = [
            f"{stack.prefix}{i}."
            for stack in about.stacks
            for i in range(blocks, len(stack.blocks))
        ]
        tensors = {n: w for n, w in tensors.items() if not n.startswith(tuple(gone))}
        stacks = tuple(replace(stack, blocks=stack.blocks[:blocks]) for stack in about.stacks)
        about = replace(about, stacks=stacks)
    if vocabulary is not None:
        about = replace(about, vocab=vocabulary)
        for name in ("token", "head_bias"):
            if name in tensors:
                tensors[name] = tensors[name][:vocabulary]
        if "head" in tensors:
            tensors["head"] = tensors["head"][:, :vocabulary]
    return MemoryModel(about, tensors)


@pytest.mark.parametrize("family", TINY)
def test_no_symmetry_of_a_family_moves_a_print(tiny, family):
    for dtype, condition, allowed in (
        (FLOAT32, 10.0, 1e-4),
        (FLOAT32, 1e5, 1e-2),
        (FLOAT64, 1e5, 1e-4),
        (BFLOAT16, 10.0, 2e-2),
    ):
        model = tiny(family, dtype)
        before, after = take_print(model), take_print(disguised(model, 3, condition=condition))
        assert movement(before, after) <= allowed
        answer = likeness(before, after)
        assert (answer.distance, answer.words()) == (0, SAME)


@pytest.mark.parametrize("family", ["gpt2", "gpt2-untied", "bert", "llama", "llama-tied", "t5"])
@pytest.mark.parametrize("vocabulary", [8, 33])
def test_disguises_of_models_with_few_tokens_are_the_same(tiny, family, vocabulary):
    model = cut(tiny(family), vocabulary=vocabulary)
    before = take_print(model)
    for condition in (10.0, 1e5):
        answer = likeness(before, take_print(disguised(model, 4, condition=condition)))
        assert answer.words() == SAME
    other = take_print(cut(tiny(family, seed=1), vocabulary=vocabulary))
    assert likeness(before, other).words() == "nothing"


def edits(w):
    """One tensor changed in four ways."""
    generator = torch.Generator().manual_seed(0)
    negated = w.clone()
    negated[0] = -negated[0]
    noise = torch.randn(w.shape, generator=generator, dtype=w.dtype)
    return {
        "times 1.3": w * 1.3,
        "one row negated": negated,
        "1 % noise": w * (1 + 0.01 * noise),
        "replaced": w.square().mean().sqrt() * noise,
    }


def unseen(model, ways):
    """Tensors whose change leaves a print the same up to rounding, each with the ways."""
    before, out = take_print(model), {}
    for name, w in model.tensors.items():
        for way in ways:
            answer = likeness(before, take_print(model.changed(**{name: edits(w)[way]})))
            assert (answer.distance > 0) == (answer.words() != SAME)
            if answer.distance == 0:
                out.setdefault(name, set()).add(way)
    return out


WAYS = {"times 1.3", "one row negated", "1 % noise", "replaced"}


@pytest.mark.parametrize(
    ("family", "blocks", "cannot_change_the_function"),
    [  # a key bias adds one number to all scores of a query, which softmax does not see
        ("gpt2", 1, ["0.b_K"]),
        ("bert", 2, ["0.b_K", "1.b_K"]),
        ("vit", 1, ["0.b_K"]),
        ("llama", 1, []),
    ],
)
def test_every_tensor_counts(tiny, family, blocks, cannot_change_the_function):
    found = unseen(cut(tiny(family), blocks=blocks), WAYS)
    assert found == dict.fromkeys(cannot_change_the_function, WAYS)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "t5", "gpt2-base"])
def test_every_tensor_counts_in_other_families(tiny, family):
    """Norms of queries and keys, norms after sublayers, position biases, the stream as output."""
    found = unseen(cut(tiny(family), blocks=1), ["1 % noise"])
    assert found.keys() == ({"0.b_K"} if family == "gpt2-base" else set())


def test_a_scale_that_a_norm_takes_away_is_no_change(tiny):
    model = tiny("qwen3")
    louder = model.changed(**{"0.W_Q": 1.3 * model.tensors["0.W_Q"]})  # under a norm of queries
    assert likeness(take_print(model), take_print(louder)).words() == SAME


def test_what_differs_is_named(tiny):
    model = tiny("bert-base")
    kept = {"kept.classifier.weight": torch.randn(5, 32), "kept.classifier.bias": torch.randn(5)}
    model = model.changed(**kept)
    before = take_print(model)
    for name, words in (
        ("kept.classifier.weight", "same but for other tensors"),
        ("kept.classifier.bias", "same but for other tensors"),
        ("extra.pooler.W", "same but for pooler, pooler bias"),  # which has the norm's in it
        ("extra.pooler.b", "same but for pooler bias"),
        ("type", "same but for token type, input constant"),
        ("2.norm_2.g", "same but for head, pooler"),
        ("0.W_Q", "same but for QK at 0-38 % of the depth, QK biases at 0-38 % of the depth"),
        ("2.b_B", "same but for MLP bias at 62-100 % of the depth"),
    ):
        changed = model.changed(**{name: edits(model.tensors[name])["1 % noise"]})
        assert likeness(before, take_print(disguised(changed, 2))).words() == words


def test_copies_in_half_precision_are_the_same_and_other_vocabularies_too(tiny):
    model = tiny("llama")
    before = take_print(model)
    assert likeness(before, take_print(disguised(model.to(BFLOAT16), 1))).words() == SAME
    longer = {
        "token": torch.cat([model.tensors["token"], torch.randn(2, 32)]),
        "head": torch.cat([model.tensors["head"], torch.randn(32, 2)], 1),
    }
    answer = likeness(before, take_print(model.changed(**longer)))
    assert answer.words() == "same but for embedding, head"


def test_a_tie_that_is_kept_makes_no_difference(tiny):
    model = tiny("gpt2")
    kept = take_print(disguised(model, keep_tie=True))
    assert likeness(take_print(model), kept).words() == SAME


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama", "gemma2", "t5", "vit"])
def test_relatives_are_near_and_strangers_far(tiny, family):
    model = tiny(family)
    first = take_print(model)
    near = likeness(first, take_print(disguised(noisy(model, 0.1), 1)))
    far = likeness(first, take_print(tiny(family, seed=1)))
    assert near.distance < 0.4 < 0.85 < far.distance
    assert near.words() == "all blocks, as near as fine-tunes were"
    assert far.words() == "nothing"


def test_a_print_says_which_part_of_the_depth_is_alike(tiny):
    model, other = tiny("gpt2"), tiny("gpt2", seed=1)
    taken = {n: w for n, w in other.tensors.items() if n.startswith("2.")}
    answer = likeness(take_print(model), take_print(disguised(model.changed(**taken))))
    assert answer.words() == "blocks at 0-62 % of the depth"  # the last third is strange
    ends = {n: w for n, w in model.tensors.items() if n in ("token", "position")}
    answer = likeness(take_print(model), take_print(disguised(other.changed(**ends))))
    assert answer.words() == "embeddings only"


def trained(steps, seed, start=None, data=0):
    """A small GPT-2 trained for real on texts of a random Markov chain."""
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


def test_fine_tuned_copies_of_trained_models_are_nearer_than_strangers(tmp_path):
    from transformer_nfn.checkpoints.families import open_model

    def printed(model, name):
        model.save_pretrained(tmp_path / name)
        with open_model(tmp_path / name) as opened:
            return take_print(disguised(MemoryModel.of(opened), 5))

    first, second = trained(40, 1), trained(40, 2)
    base, stranger = printed(first, "first"), printed(second, "second")
    tuned = [printed(trained(10, 3, first, data), f"tuned {data}") for data in (0, 1)]
    assert max(likeness(base, p).distance for p in tuned) < 0.6
    assert min(likeness(p, stranger).distance for p in (base, *tuned)) > 0.85


def test_a_few_new_tokens_keep_a_frame():
    assert [rows_used(n) for n in (1, 17, 48, 50257, 50304, 32000, 32064)] == [
        1, 16, 48, 49152, 49152, 24576, 24576
    ]  # fmt: skip


def test_models_of_other_inputs_do_not_compare(tiny):
    answer = likeness(take_print(tiny("gpt2")), take_print(tiny("vit")))
    assert not answer.comparable
    assert "not comparable" in answer.words()
    assert answer.as_json()["embedding"] is None


def test_a_print_is_small_and_comes_back_from_its_bytes(tiny):
    first = take_print(tiny("qwen3"))
    data = first.to_bytes()
    assert len(data) <= 5120
    again = from_bytes(data, "x")
    assert again.to_bytes() == data
    assert (again.family, again.width, again.depth) == ("qwen3", 32, 3)
    assert again.checksum == first.checksum == data[:-5:-1].hex()


def test_bytes_that_are_no_print_are_refused_by_name(tiny):
    data = take_print(tiny("gpt2")).to_bytes()
    flipped = data[:900] + bytes([data[900] ^ 1]) + data[901:]
    later = data[:4] + struct.pack("<H", 9) + data[6:]
    for bad, words in (
        (b"", "not a fingerprint"),
        (b"PK" + data[2:], "not a fingerprint"),
        (data[:-1], f"expected {len(data)} bytes, found {len(data) - 1}"),
        (flipped, "do not match their checksum"),
        (data[:4] + struct.pack("<H", 1) + data[6:], "of format 1, expected 2"),
        (later, "of format 9, expected 2"),
    ):
        with pytest.raises(PrintError, match=words) as caught:
            from_bytes(bad, "'db', fingerprint 'x'")
        assert str(caught.value).startswith("'db', fingerprint 'x': ")


@pytest.fixture(scope="module")
def many():
    """Prints of random numbers, every third made from the one before."""
    draw = np.random.default_rng(0)
    out = []
    for i in range(400):
        sketch = draw.standard_normal((8, 3, 64))
        if i % 3 == 2:
            sketch = 0.7 * out[-1].print.sketch + 0.7 * sketch
        p = from_bytes(_EMPTY, "empty")
        out.append(Named(f"m{i}", replace(p, sketch=sketch.astype(np.float32), width=i)))
    return out


def _empty():
    from transformer_nfn.checkpoints.fingerprints import Print
    from transformer_nfn.checkpoints.fingerprints.stored import ROWS

    rows = [np.zeros(shape, np.float32) for _, shape in ROWS]
    noise = [np.zeros(shape[:-1], np.float32) for _, shape in ROWS]
    sizes = np.zeros((8, 3, 4), np.float16)
    return Print("gpt2", 1, 1, 1, "token", 16, *rows, *noise, sizes).to_bytes()


_EMPTY = _empty()


def test_a_search_finds_what_comparing_with_all_finds(many, tmp_path):
    path = tmp_path / "prints.parquet"
    assert write_database(path, many) == 400
    asked = [many[i].print for i in (1, 2, 101)]
    with Database(path) as database:
        assert len(database) == 400
        found = search(database, asked, most=3)
    for p, relatives in zip(asked, found, strict=True):
        truth = sorted(many, key=lambda entry: likeness(p, entry.print).distance)[:2]
        assert [r.name for r in relatives[:2]] == [entry.name for entry in truth]
        assert relatives[0].likeness.distance == 0
        assert relatives[1].likeness.distance < 0.6
        assert relatives[2].likeness.distance > 0.9


def test_adding_begins_extends_and_replaces(many, tmp_path):
    path = tmp_path / "new" / "prints.parquet"
    assert add_to_database(path, many[:3]) == (3, 3)
    assert add_to_database(path, many[3 : GROUP + 20]) == (GROUP + 17, GROUP + 20)
    moved = Named("m1", many[9].print)
    assert add_to_database(path, [moved]) == (1, GROUP + 20)
    with Database(path) as database:
        kept = {entry.name: entry.print for entry in database}
    assert kept["m1"].to_bytes() == many[9].print.to_bytes()
    assert kept["m2"].to_bytes() == many[2].print.to_bytes()
    assert kept.keys() == {f"m{i}" for i in range(GROUP + 20)}
    assert [p.name for p in path.parent.iterdir()] == ["prints.parquet"]


def test_a_failed_write_leaves_the_old_database(many, tmp_path):
    path = tmp_path / "prints.parquet"
    write_database(path, many[:5])
    before = path.read_bytes()

    def broken():
        yield from many[5:300]
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_database(path, broken())
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["prints.parquet"]
    with pytest.raises(WriteError, match="cannot be written"):
        write_database(path / "below", many[:1])


def complaint(path, asked):
    """What reading all of a database and searching it complains of; nothing if it does not."""
    try:
        with Database(path) as database:
            search(database, [asked])
            list(database)
    except PrintError as error:
        return str(error)
    return ""


def test_damage_is_told_in_one_sentence(many, tmp_path):
    path = tmp_path / "prints.parquet"
    write_database(path, many[:200])
    whole, asked = path.read_bytes(), many[0].print
    draw = np.random.default_rng(0)
    places = [*draw.integers(4, len(whole) - 4, 60).tolist(), len(whole) - 5]
    damaged = [whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :] for at in places]
    damaged += [whole[: len(whole) // 2], b"", b"PAR1" + whole[-8:]]
    told = []
    for data in damaged:
        path.write_bytes(data)
        told.append(complaint(path, asked))
    # What no checksum covers (names of columns, lengths of pages) is a small part of the file.
    assert sum(map(bool, told)) >= len(damaged) - 3
    assert all(str(path) in text and "\n" not in text for text in told if text)
    with pytest.raises(PrintError, match="no such database"):
        Database(tmp_path / "none.parquet")


def test_other_files_and_formats_are_refused(many, tmp_path):
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(PrintError, match="not a database of fingerprints"):
        Database(path)
    write_database(path, many[:2])
    table = pq.read_table(path)
    later = {**table.schema.metadata, b"format": b"7"}
    pq.write_table(table.replace_schema_metadata(later), path)
    with pytest.raises(PrintError, match="of format 7, expected 2"):
        Database(path)
    with pytest.raises(PrintError, match="of format 7, expected 2"):
        add_to_database(path, many[:1])


def test_an_empty_database_has_no_relatives(many, tmp_path):
    path = tmp_path / "prints.parquet"
    write_database(path, [])
    with Database(path) as database:
        assert search(database, [many[0].print]) == [[]]
        assert json.dumps(list(database)) == "[]"
