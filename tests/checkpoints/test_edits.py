"""Edits of single tensors in every family: what changes the function is never called the same."""

from collections.abc import Iterator, Mapping

import pytest
import torch
from memory_model import MemoryModel, disguised, noisy
from torch import Tensor
from weight_edits import unseen_edits

from tiny_families import HEADS, QUICK, TINY, encoder, inputs_of
from transformer_nfn.checkpoints import OpenOptions, diff, open_model, relate
from transformer_nfn.checkpoints.fingerprints import compare_fingerprints, take_fingerprint
from transformer_nfn.functional.transformer import hidden_states, logits, pooled, transformer


def outputs_of(family: str, model: MemoryModel):
    """Function from tensors to logits, and to what a pooler gives."""
    first, *decoder = inputs_of(family).values()
    description = model.description

    def outputs(tensors: Mapping[str, Tensor]) -> Tensor:
        x = hidden_states(description, tensors, first, decoder=decoder[0] if decoder else None)
        out = [logits(description, tensors, x)]
        if "extra.pooler.W" in tensors:
            out.append(pooled(description, tensors, x))
        return torch.cat([y.flatten() for y in out])

    return outputs


@pytest.mark.parametrize("family", [*QUICK, "opt-post-norm"])
def test_edits_are_seen(tiny, family):
    """One in two hundred; one in fifteen in the nightly test."""
    model = tiny(family, torch.float64)
    assert unseen_edits(model, outputs_of(family, model), 200) == []


@pytest.mark.nightly
@pytest.mark.parametrize("family", TINY | HEADS)
@pytest.mark.parametrize(("one_in", "hidden"), [(15, False), (40, True)])
def test_edits_of_every_family_are_seen(tiny, family, one_in, hidden):
    model = tiny(family, torch.float64)
    assert unseen_edits(model, outputs_of(family, model), one_in, hidden=hidden) == []


@pytest.mark.parametrize(
    ("family", "name", "edit"),
    [
        ("opt-post-norm", "position", lambda w: w + 0.3),  # the first block reads the mean
        ("opt-post-norm", "0.W_Q", lambda w: w + 0.3),
        ("albert", "projection_bias", lambda w: w + 0.3),
        ("llama", "1.W_Q", lambda w: w[[1, 0, 2, 3]]),  # heads that share keys and values
        ("llama", "1.W_O", lambda w: w[[0, 1, 3, 2]]),
        ("esm", "1.contact", lambda w: w * 1.1),
    ],
)
def test_means_and_the_partners_of_heads_are_seen(tiny, family, name, edit):
    model = tiny(family)
    other = disguised(model.changed(**{name: edit(model.tensors[name])}), 1)
    comparison = compare_fingerprints(take_fingerprint(model), take_fingerprint(other))
    assert comparison.changed
    assert comparison.distance > 0
    assert relate(model, other).same_function is False


def test_a_bias_between_two_norms_is_seen(tmp_path):
    """PyTorch's post-norm encoder with a final norm: two norms one after the other."""
    module = encoder(norm_first=False, final=True, activation="gelu")
    torch.save(module.state_dict(), tmp_path / "encoder.pt")
    settings = {"nhead": 4, "norm_first": False, "activation": "gelu"}
    with open_model(tmp_path / "encoder.pt", OpenOptions(settings=settings)) as opened:
        model = MemoryModel.of(opened)
    x = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def outputs(tensors: Mapping[str, Tensor]) -> Tensor:
        return transformer(model.description, tensors, x)

    torch.testing.assert_close(outputs(model.tensors), module(x).detach(), rtol=1e-9, atol=1e-9)
    bias = model.tensors["2.norm_2.b"]
    for edited, same in ((1.2 * bias, False), (bias.roll(1), False), (bias + 0.3, True)):
        other = model.changed(**{"2.norm_2.b": edited})
        apart = (outputs(other.tensors) - outputs(model.tensors)).abs().max()
        assert bool(apart < 1e-9) is same
        assert relate(model, other).same_function is same
        comparison = compare_fingerprints(take_fingerprint(model), take_fingerprint(other))
        assert (not comparison.changed) is same


DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def drawn_edits(tiny, families: list[str], count: int, seed: int) -> Iterator[tuple]:
    """Edits of a size, dtype, family and tensors drawn at random: of one entry, or of all."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    for i in range(count):
        family, dtype = families[draw(len(families))], DTYPES[draw(3)]
        A = tiny(family, dtype)
        size = 10 ** (3 * float(torch.rand((), generator=generator)) - 4)
        changed = {}
        for _ in range(1 + i % 3):
            name = list(A.tensors)[draw(len(A.tensors))]
            w = A[name].double()
            away = size * w.square().mean().sqrt()
            if i % 2:
                w.view(-1)[draw(w.numel())] += away
            else:
                w += away * torch.randn(w.shape, generator=generator, dtype=torch.float64)
            if not torch.equal(w.to(dtype), A[name]):
                changed[name] = w.to(dtype)
        if changed:
            words = f"seed {seed}, edit {i}: {family}, {dtype}, {size:.1e} of {[*changed]}"
            yield words, family, A, A.changed(**changed), changed


def unnamed_edits(tiny, families: list[str], count: int, seed: int) -> list[str]:
    """Edits that are called the same, or are not named with the entries that differ."""
    wrong = []
    for words, family, A, B, changed in drawn_edits(tiny, families, count, seed):
        relation = relate(A, B)
        entries = {e.name: e.entries for e in relation.edits}
        if entries != {n: int((w != A[n]).sum()) for n, w in changed.items()}:
            wrong.append(f"{words}: named {entries}")
        if any(name not in str(relation) for name in [*changed][:4]):
            wrong.append(f"{words}: {relation}")
        if relation.verdict == "same" or relation.same_function is not False:
            outputs = outputs_of(family, A)
            before, after = (
                outputs({n: w.double() for n, w in model.tensors.items()}) for model in (A, B)
            )
            # Softmax does not see a key bias without rotary positions.
            if (after - before).abs().max() > 1e-12 * before.abs().max():
                wrong.append(f"{words}: {relation.verdict}")
    return wrong


def test_edits_that_rounding_would_hide_are_named(tiny):
    assert unnamed_edits(tiny, ["gpt2", "bert-class", "llama", "t5-v1.1"], 5, seed=0) == []


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_edits_of_every_size_are_named_in_every_family(tiny, seed):
    assert unnamed_edits(tiny, sorted(TINY | HEADS), 200, seed=seed) == []


@pytest.mark.parametrize(
    ("family", "name"), [("gpt2", "token"), ("gpt2", "1.norm_1.b"), ("bert-class", "kept.pooled.W"),
                         ("llama", "head"), ("llama", "1.W_B"), ("vit", "norm.b")]
)  # fmt: skip
def test_one_entry_is_named_by_both_commands(tiny, family, name):
    """The change is a hundredth of the tensor's root mean square, less than rounding may hide."""
    A = tiny(family, torch.bfloat16)
    w = A[name]
    entry = w.view(-1)[0]
    entry.copy_(torch.nextafter(entry, torch.tensor(9, dtype=w.dtype)))
    B = A.changed(**{name: w})
    text = f"{name} (1 of {w.numel():,} entries, by up to "
    relation, difference = relate(A, B), diff(A, B)
    assert relation.verdict in ("derived", "same backbone")
    assert relation.same_function is False
    assert text in str(relation)
    assert text in str(difference)
    assert [c.name for c in difference.changes if c.kind != "unchanged"] == [name]
    assert relation.as_json()["edits"][0]["entries"] == 1


def test_a_cast_with_an_edit_is_no_cast(tiny):
    A = tiny("gpt2")
    B = A.to(torch.bfloat16)
    assert relate(A, B).reason == "B holds the numbers of A rounded to bfloat16"
    assert relate(B.to(torch.float32), A).reason == "A holds the numbers of B rounded to bfloat16"
    assert relate(B, B.to(torch.float32)).reason == "both hold the same numbers, in other dtypes"
    assert relate(A.to(torch.float16), B).verdict == "same"
    gain = A["norm.g"].bfloat16().float()  # of all tensors one alone
    for other in (B.changed(**{"norm.g": (1.01 * B["norm.g"].float()).bfloat16()}),
                  A.changed(**{"norm.g": gain})):  # fmt: skip
        relation = relate(A, other)
        assert relation.same_function is False, str(relation)
        assert [edit.name for edit in relation.edits] == ["norm.g"]


def test_what_an_element_changes_in_one_block_is_the_same(tiny):
    """Two neurons swapped, queries and keys scaled, in half precision, all else as it lies."""
    A = tiny("gpt2", torch.bfloat16)
    order = [1, 0, *range(2, A["1.W_A"].shape[1])]
    swapped = {n: A[n][..., order] for n in ("1.W_A", "1.b_A")} | {"1.W_B": A["1.W_B"][order]}
    scaled = {n: A[n] * 1.7 for n in ("0.W_Q", "0.b_Q")} | {"0.W_K": A["0.W_K"] / 1.7}
    for changed in (swapped, scaled, swapped | scaled):
        assert relate(A, A.changed(**changed)).verdict == "same"
    other = relate(A, A.changed(**scaled, **{"2.b_O": A["2.b_O"] * 1.01}))
    assert other.same_function is False
    assert "2.b_O" in other.reason


def test_rounding_of_every_entry_is_no_edit(tiny):
    """A change of basis that was undone leaves rounding everywhere."""
    A = tiny("llama", torch.bfloat16)
    jitter = noisy(A, 2e-4)
    relation = relate(A, jitter)
    assert (relation.verdict, relation.edits) == ("same", ())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_change_above_the_resolution_of_a_disguise_is_seen(tiny, dtype):
    A = tiny("llama", dtype)
    same = relate(A, disguised(A, 1))
    assert same.verdict == "same"
    assert "resolution: a change of any tensor by " in str(same)
    assert "exact test" not in str(same)
    hidden, _ = same.proof.resolution
    assert same.as_json()["proof"]["resolution"] == hidden
    for name in ("0.W_Q", "1.W_V", "2.W_B", "token"):
        B = disguised(noisy(A, 2 * hidden, {name}), 1)
        assert relate(A, B).verdict != "same", name
