"""What was changed between two checkpoints is found, with and without a disguise."""

import json
from dataclasses import replace

import pytest
import torch
from memory_model import MemoryModel, disguised, noisy

from tiny_families import TINY
from transformer_nfn.checkpoints import diff
from transformer_nfn.checkpoints.differences import Difference, draw_difference
from transformer_nfn.errors import SpaceError
from transformer_nfn.report.difference_page import write_difference_page


def adapted(model: MemoryModel, rank: int, *names: str, share: float = 0.1) -> MemoryModel:
    """The model with an adapter of a rank merged into matrices ``[in, out]``."""
    generator = torch.Generator().manual_seed(rank)
    tensors = {}
    for name in names:
        w = model.tensors[name]
        # Heads side by side, as the matrices of files have them.
        flat = w.flatten(0, 1) if name.endswith("W_O") else w if w.ndim == 2 else w.movedim(0, 1)
        shape = flat.flatten(1).shape
        left, right = (
            torch.randn(*s, generator=generator, dtype=torch.float64)
            for s in ((shape[0], rank), (rank, shape[1]))
        )
        update = left @ right
        update = (share * w.double().norm() / update.norm() * update).reshape(flat.shape)
        if not name.endswith("W_O") and w.ndim == 3:
            update = update.movedim(1, 0)
        tensors[name] = (w.double() + update.reshape(w.shape)).to(w.dtype)
    return model.changed(**tensors)


def ranks(difference: Difference) -> dict[str, int | None]:
    """Everything that changed, with its rank."""
    return {c.name: c.rank for c in difference.changes if c.kind != "unchanged"}


def reordered(model: MemoryModel, order: list[int]) -> MemoryModel:
    """The model with the blocks of an order."""
    (stack,) = model.description.stacks
    inside = tuple(f"{i}." for i in range(len(stack.blocks)))
    tensors = {n: w for n, w in model.tensors.items() if not n.startswith(inside)}
    for new, old in enumerate(order):
        for name, w in model.tensors.items():
            if name.startswith(f"{old}."):
                tensors[f"{new}.{name.removeprefix(f'{old}.')}"] = w
    cut = replace(stack, blocks=tuple(stack.blocks[i] for i in order))
    return MemoryModel(replace(model.description, stacks=(cut,)), tensors)


QUICK = ("gpt2", "llama", "bert", "qwen3", "t5-v1.1")


@pytest.mark.parametrize(
    "family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.nightly) for f in TINY]
)
def test_an_adapter_is_found_in_every_family(tiny, family):
    A = tiny(family)
    stack = A.description.stacks[-1]
    block = f"{stack.prefix}{len(stack.blocks) - 1}"
    named = {f"{block}.W_Q": "q", f"{block}.W_B": "down"}  # the experts of a mixture have others
    targets = {name: 2 for name in named if name in A.tensors}
    B = adapted(A, 2, *targets)
    for other in (B, disguised(B, 3)):
        found = diff(A, other)
        assert ranks(found) == targets, str(found)
        assert found.aligned == (other is not B)
    parts = ", ".join(named[name] for name in targets)
    assert f"Change of rank 2 on {parts} of block {block}." in found.summary()


@pytest.mark.parametrize("family", ["gpt2-untied", "llama"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 6))]
)
def test_adapters_on_both_sides_of_a_basis_are_told_from_the_basis(tiny, family, dtype, seed):
    A = B = tiny(family, dtype)
    expected = {"1.W_Q": 3, "1.W_K": 2, "1.W_V": 5, "1.W_O": 4}
    for name, rank in expected.items():
        B = adapted(B, rank, name, share=0.2)
    assert ranks(diff(A, disguised(B, seed))) == expected


def test_a_disguise_has_no_changes(tiny):
    A = tiny("llama")
    found = diff(A, disguised(A, 1))
    assert ranks(found) == {}
    assert found.summary()[-1].startswith("No tensor")


def test_a_fine_tune_is_dense(tiny):
    A = tiny("llama")
    found = diff(A, noisy(A, 0.02))
    assert not found.aligned
    assert {c.kind for c in found.changes} == {"dense"}
    matrices = [c.relative for c in found.changes if c.block and c.rank is not None]
    assert max(matrices) == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        ([0, 2], "Block 1 of A is not in B."),
        ([0, 1, 1, 2], "Block 1 of A is in B 2 times, as 1, 2."),
        ([1, 0, 2], "Blocks are in another order: B has 1, 0, 2 of A."),
    ],
)
def test_blocks_that_were_moved(tiny, order, sentence):
    A = tiny("llama")
    B = reordered(noisy(A, 0.01), order)
    for other in (B, disguised(B, 2)):
        assert sentence in diff(A, other).summary()


@pytest.mark.parametrize("family", ["llama", "gpt2-untied"])
def test_shares_of_a_merge(tiny, family):
    A = tiny(family)
    C = noisy(A, 0.05, seed=1)
    B = A.changed(**{n: torch.lerp(w, C.tensors[n], 0.3) for n, w in A.tensors.items()})
    for other in (B, disguised(B, 2)):
        merge = diff(A, other, C).merge
        assert merge is not None
        assert merge.share == pytest.approx(0.3, abs=0.02)
        assert set(merge.blocks) == {"0", "1", "2"}
    assert diff(A, B, C).merge.left < 1e-3


def test_a_stranger_is_no_part_of_a_merge(tiny):
    A = tiny("llama")
    with pytest.raises(SpaceError, match="cannot be a part of a mixture"):
        diff(A, noisy(A, 0.05), tiny("llama", seed=1))


@pytest.mark.parametrize("family", ["llama", "gpt2-untied"])
def test_added_tokens_and_a_new_output_matrix(tiny, family):
    A = tiny(family)
    more = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    token, head = (A.tensors[n] for n in ("token", "head"))
    grown = {"token": torch.cat([token, more]), "head": torch.cat([head, more.mT], 1)}
    B = MemoryModel(replace(A.description, vocab=len(token) + 3), {**A.tensors, **grown})
    for other in (B, disguised(B, 2)):
        found = diff(A, other)
        assert ranks(found) == {}, str(found)
        assert found.rows == {"token": (61, 64), "head": (61, 64)}
    new = torch.randn(head.shape, generator=torch.Generator().manual_seed(1)) * head.std()
    for other in (A.changed(head=new), disguised(A.changed(head=new), 2)):
        assert "Replaced: output matrix." in diff(A, other).summary()


@pytest.mark.parametrize("family", ["llama", "gpt2-untied"])
def test_zeroed_units_are_named_by_their_place_in_A(tiny, family):
    A = tiny(family)
    W_B, W_O = A.tensors["1.W_B"].clone(), A.tensors["2.W_O"].clone()
    W_B[[3, 7]] = 0
    W_O[2] = 0
    B = A.changed(**{"1.W_B": W_B, "2.W_O": W_O})
    for other in (B, disguised(B, 2)):
        found = diff(A, other)
        zero = {c.name: c.zero_units for c in found.changes if c.kind == "pruned"}
        assert zero == {"1.W_B": (3, 7), "2.W_O": (2,)}, str(found)
        assert "2 neurons of block 1 are zero in B: 3, 7." in found.summary()


def test_a_quantisation_grid_is_named_and_explains_the_change(tiny):
    A = tiny("llama")
    W = A.tensors["1.W_A"]
    step = W.abs().amax(0) / 7
    found = diff(A, A.changed(**{"1.W_A": (W / step).round() * step}))
    (change,) = [c for c in found.changes if c.grid]
    assert (change.name, change.kind) == ("1.W_A", "unchanged")
    assert "B's numbers lie on a grid (4 bits, groups of 32): up of block 1." in found.summary()


def test_everything_is_in_the_json_the_figure_and_the_page(tiny, tmp_path):
    A = tiny("llama")
    found = diff(A, adapted(A, 2, "1.W_Q"))
    stored = json.loads(json.dumps(found.as_json()))
    (changed,) = [t for t in stored["tensors"] if t["kind"] == "low rank"]
    assert (changed["block"], changed["tensor"], changed["rank"]) == ("1", "W_Q", 2)
    assert changed["relative_change"] == pytest.approx(0.1, rel=0.01)
    assert draw_difference(found, tmp_path / "changes.png").stat().st_size > 1000
    write_difference_page(found, tmp_path / "page.html", ("base", "<tuned>"))
    page = (tmp_path / "page.html").read_text()
    assert "Change of rank 2 on q of block 1." in page
    assert "&lt;tuned&gt;" in page
    assert "<svg" in page


def test_strangers_have_no_changes_to_list(tiny):
    found = diff(tiny("llama"), tiny("llama", seed=1))
    assert found.summary()[0].startswith("A and B are unrelated")
    with pytest.raises(SpaceError, match="no changes to draw"):
        draw_difference(found, "never.png")


@pytest.mark.parametrize(
    ("family", "name"), [("bert-class", "kept.pooled.W"), ("gpt2-class", "head"), ("vit", "head"),
                         ("bert", "extra.mlm.W")]
)  # fmt: skip
def test_a_replaced_classifier_is_named(tiny, family, name):
    A = tiny(family)
    W = A[name]
    B = A.changed(**{name: W.std() * torch.randn(W.shape, generator=gen(0))})
    for other in (B, disguised(B, 2)):
        found = diff(A, other)
        kinds = {c.name: c.kind for c in found.changes if c.kind != "unchanged"}
        assert kinds.pop(name) == "replaced", str(found)
        # What reads or follows it in the form that is compared after a disguise.
        assert kinds.keys() <= ({"head", "head_bias", "extra.mlm.b"} if found.aligned else set())
        assert found.aligned == (other is not B)


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_resized_and_added_classifiers_are_named(tiny):
    A = tiny("bert-class")
    W, b = A["kept.pooled.W"], A["kept.pooled.b"]
    more = {"kept.pooled.W": torch.cat([W, W[:, :2]], 1), "kept.pooled.b": torch.cat([b, b[:2]])}
    for other in (A.changed(**more), disguised(A.changed(**more), 2)):
        assert diff(A, other).rows == {"kept.pooled.W": (5, 7), "kept.pooled.b": (5, 7)}
    bare = {n: w for n, w in A.tensors.items() if not n.startswith("kept.")}
    found = diff(noisy(A, 0.01), MemoryModel(A.description, bare))
    assert found.only_one == {"kept.pooled.W": "A", "kept.pooled.b": "A"}


def test_an_untied_output_matrix_is_compared_with_the_tokens(tiny):
    A = tiny("llama-tied")
    head = A["token"].mT.std() * torch.randn(A["token"].mT.shape, generator=gen(0))
    untied = MemoryModel(replace(A.description, tied=False), {**A.tensors, "head": head})
    for pair in ((A, untied), (untied, A)):
        found = diff(*pair)
        assert "Replaced: output matrix." in found.summary(), str(found)


def test_a_fine_tune_of_zero_biases_has_the_bases_of_A(tiny):
    """GPT-2 starts from biases of zero: there is no ratio to them."""
    A = tiny("gpt2")
    biases = [n for n in A.names if ".b_" in n]
    A = A.changed(**{n: torch.zeros_like(A[n]) for n in biases})
    tuned = {n: 0.01 * torch.randn(A[n].shape, generator=gen(0)) for n in biases}
    found = diff(A, noisy(A, 0.02).changed(**tuned))
    assert not found.aligned
    assert found.summary()[0] == "B has the bases of A."
    assert "b_Q: from 0 in blocks 0 to 2" in str(found)
    assert {c.name for c in found.changes if c.kind == "filled"} == {*biases}
    sizes = [c["relative_change"] for c in json.loads(json.dumps(found.as_json()))["tensors"]]
    assert max(size for size in sizes if size is not None) < 1


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_strong_fine_tune_has_the_bases_of_A_and_its_disguise_has_not(tiny, share):
    A = tiny("gpt2")
    B = noisy(A, share)
    assert not diff(A, B).aligned
    assert share > 0.5 or diff(A, disguised(B, 1)).aligned


def test_replaced_pairs_of_matrices_are_in_place(tiny):
    A = tiny("gpt2")
    for names in (("1.W_Q", "1.W_K"), ("1.W_V", "1.W_O"), ("1.W_A", "1.W_B")):
        new = {n: A[n].std() * torch.randn(A[n].shape, generator=gen(1)) for n in names}
        found = diff(A, A.changed(**new))
        assert not found.aligned
        assert {c.name for c in found.changes if c.kind == "replaced"} == {*names}


def test_units_of_one_block_in_another_order_are_in_other_bases(tiny):
    A = tiny("gpt2")
    order = [1, 0, *range(2, A["1.W_A"].shape[1])]
    swapped = {n: A[n][..., order] for n in ("1.W_A", "1.b_A")} | {"1.W_B": A["1.W_B"][order]}
    found = diff(A, A.changed(**swapped))
    assert found.aligned
    assert ranks(found) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exact_mixture_leaves_nothing(tiny, dtype):
    A = tiny("gpt2-untied")
    zero = {n: torch.zeros_like(A[n]) for n in A.names if ".b_" in n}
    A, C = (m.changed(**(zero if m is A else {})).to(dtype) for m in (A, noisy(A, 0.05, seed=1)))
    B = A.changed(**{
        n: torch.lerp(w.float(), C[n].float(), 0.3).to(dtype) for n, w in A.tensors.items()
    })  # fmt: skip
    merge = diff(A, B, C).merge
    assert merge.left == 0
    assert merge.share == pytest.approx(0.3, abs=0.01)
    assert str(merge) == "B is 0.70 A + 0.30 C, which leaves nothing beyond rounding."
    left = diff(A, noisy(B, 0.01), C).merge.left
    assert left > 0.02
