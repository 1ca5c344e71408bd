"""Networks of other sizes than the paper's train by the same code, to the same numbers."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from literal_network import literal_logits
from transformer_nfn import native_code
from transformer_nfn.functional import zoo_logits
from transformer_nfn.zoo import Kind, NetworkSizes, Recipe, ZooError, all_kinds, train
from transformer_nfn.zoo.module import SmallTransformer, from_state_dict, to_state_dict
from transformer_nfn.zoo.training.backends import (
    NativeStepper,
    choose_runner,
    describe_path,
    library,
)
from transformer_nfn.zoo.training.randomness import dropout_threshold, keys
from transformer_nfn.zoo.training.steps import coefficients, rules
from transformer_nfn.zoo.training.tasks import Task, WordVectors
from transformer_nfn.zoo.training.tasks.text import ag_news
from transformer_nfn.zoo.training.trainer import initial_weights

from ..conftest import random_images, random_vectors, write_news
from .test_training import mixed_runs, modules, runs_clear_of_kinks

# Heads narrower than a vector, heads of a vector and a half, rows of no whole wide vector.
KINDS = [Kind(16, 4, 1), Kind(48, 4, 3), Kind(20, 2, 1)]
needs_compiler = pytest.mark.skipif(library()[0] is None, reason="no C compiler")
STILL = (0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0)


def news_of(kind: Kind, folder: Path) -> Task:
    words = random_vectors()
    wide = words.vectors.repeat(1, 2)[:, : kind.width]
    vectors = WordVectors(words.vocabulary, wide.contiguous(), "test")
    return ag_news(write_news(folder), 0.1, None, vectors, kind)


@pytest.fixture(params=["images", "text"])
def sized_task(request: pytest.FixtureRequest, kind: Kind, tmp_path: Path) -> Task:
    if request.param == "text":
        return news_of(kind, tmp_path / "news")
    task = random_images(8, 2, 16)
    return replace(task, arch=task.arch.resized(kind))


@pytest.fixture(scope="module")
def compiled_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where code for other machines goes: the cache knows flags of ours only."""
    return tmp_path_factory.mktemp("compiled")


def plain_inputs(task: Task, batch, m: int) -> torch.Tensor:
    inputs = task.module_inputs(batch.inputs[m]).double()
    return inputs if batch.lengths is None else inputs[:, : int(batch.lengths[m])]


@pytest.mark.parametrize("kind", [*KINDS, Kind(30, 3, 2)], ids=lambda k: k.name)
def test_every_forward_is_the_literal_one(sized_task: Task) -> None:
    """Many networks at once, and the architecture of one as symmetry knows it; in float64."""
    arch = sized_task.arch
    flat = 0.3 * torch.randn(3, arch.num_weights, generator=torch.Generator().manual_seed(0))
    batch = sized_task.batch("train", torch.tensor([[0, 5, 9], [1, 2, 3], [7, 8, 0]]))
    weights = {name: view.double() for name, view in arch.views(flat).items()}
    positions = arch.positions().double()
    # The mean over the tokens of a text is weighted in float32.
    close = 1e-9 if arch.patch else 1e-6
    logits = zoo_logits(
        weights, batch.inputs.double(), positions, heads=arch.heads, lengths=batch.lengths
    )
    named = arch.to_named(flat.double())
    for m in range(3):
        inputs = plain_inputs(sized_task, batch, m)
        one = {name: w[m] for name, w in named.items()}
        state = {name: w.double() for name, w in to_state_dict(arch, one).items()}
        expected = literal_logits(state, inputs, positions, arch.heads)
        torch.testing.assert_close(logits[m], expected, rtol=close, atol=close)
        rows = batch.inputs[m].double()[:, : inputs.shape[1] if not arch.patch else None]
        symmetric = torch.stack([arch.architecture.forward(one, x) for x in rows])
        torch.testing.assert_close(symmetric, expected, rtol=close, atol=close)


@needs_compiler
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_native_gradients_equal_autograd_in_float64(sized_task: Task) -> None:
    check_gradients(sized_task)


@pytest.mark.nightly
@needs_compiler
@pytest.mark.parametrize("vector", [4, 8, 16])
@pytest.mark.parametrize("kind", [*KINDS[:2], Kind(16, 2, 2), Kind()], ids=lambda k: k.name)
def test_vectors_of_other_machines_give_the_same_gradients(
    sized_task: Task, vector: int, compiled_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GCC and Clang compute wide vectors by narrow ones where a machine has none."""
    flags = f"-DTNFN_VECTOR={vector}"
    monkeypatch.setattr(native_code, "FLAGS", (*native_code.FLAGS, "-Wno-psabi", flags))
    monkeypatch.setenv("TNFN_CACHE", str(compiled_here / f"{vector}"))
    library.cache_clear()
    try:
        check_gradients(sized_task)
    finally:
        library.cache_clear()


def check_gradients(sized_task: Task) -> None:
    index = torch.randint(0, 100, (4, 19), generator=torch.Generator().manual_seed(5))
    arch, configs = sized_task.arch, runs_clear_of_kinks(sized_task, index)
    flat = torch.stack([initial_weights(arch, c) for c in configs])
    batch = sized_task.batch("train", index)
    stepper = NativeStepper(arch, flat.clone(), torch.zeros(4, dtype=torch.int32))
    no_keys = torch.zeros(4, arch.dropout_sites, 2, dtype=torch.int32)
    stepper.step(batch, no_keys, torch.tensor([STILL] * 4))
    for m, module in enumerate(modules(arch, flat)):
        module.double()
        F.cross_entropy(module(plain_inputs(sized_task, batch, m)), batch.labels[m]).backward()
        grads = module.state_dict() | {k: p.grad for k, p in module.named_parameters()}
        named = from_state_dict(arch, grads)
        exact = arch.from_named({k: w[None] for k, w in named.items()})[0]
        assert (stepper.grad[m] - exact).abs().max() < 2e-5 * exact.abs().max()


@needs_compiler
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_both_paths_drop_the_same_entries_and_test_alike(sized_task: Task) -> None:
    arch, configs = sized_task.arch, mixed_runs()
    flat = torch.stack([initial_weights(arch, c) for c in configs])
    threshold = dropout_threshold(torch.tensor([0.0, 0.05, 0.1, 0.2]))
    batch = sized_task.batch(
        "train", torch.randint(0, 100, (4, 16), generator=torch.Generator().manual_seed(6))
    )
    key = keys(torch.arange(4)[:, None], 4, torch.arange(arch.dropout_sites))
    coef = coefficients(rules(configs), torch.full((4,), 1e-2).double(), torch.ones(4))
    steppers = [
        choose_runner(path, sized_task, flat.clone(), threshold, "float32", 16).stepper
        for path in ("torch", "native")
    ]
    shared = sized_task.batch("test", torch.arange(24)[None])
    tested = [stepper.evaluate(flat, shared) for stepper in steppers]
    torch.testing.assert_close(tested[0][0], tested[1][0], rtol=1e-5, atol=1e-4)
    assert torch.equal(tested[0][1], tested[1][1])
    dropped = [stepper.step(batch, key, coef)[0] for stepper in steppers]
    torch.testing.assert_close(*dropped, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [*KINDS, Kind(30, 3, 2)], ids=lambda k: k.name)
def test_named_tensors_and_state_dicts_round_trip_bit_for_bit(sized_task: Task) -> None:
    arch = sized_task.arch
    flat = torch.randn(2, arch.num_weights)
    named = arch.to_named(flat)
    assert torch.equal(arch.from_named(named), flat)
    one = {k: w[1] for k, w in named.items()}
    back = from_state_dict(arch, to_state_dict(arch, one))
    assert all(torch.equal(back[k], one[k]) for k in one)
    assert sum(p.numel() for p in SmallTransformer(arch).parameters()) == arch.num_weights
    assert NetworkSizes.from_json(arch.to_json()) == arch


def test_where_the_c_code_does_not_fit_another_path_is_taken_and_said() -> None:
    arch = NetworkSizes(16, 10, 4).resized(Kind(30, 3, 1))
    path, words = describe_path("auto", "cpu", arch)
    assert path == "torch"
    assert "multiples of 4, not 30" in words
    with pytest.raises(ZooError, match="path native was asked for, but"):
        describe_path("native", "cpu", arch)
    task = random_images(8, 2, 16)
    trained = train(replace(task, arch=arch), mixed_runs(), Recipe(1, 32))
    assert trained.weights.shape == (8, arch.num_weights)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
def test_on_a_gpu_kernels_are_taken_where_they_fit() -> None:
    sizes = NetworkSizes(49, 10, 16)
    for kind, expected in ((Kind(), "fused"), (Kind(depth=3), "fused"), (Kind(16), "compiled")):
        path, words = describe_path("auto", "cuda", sizes.resized(kind), "bf16")
        assert path == expected
        assert ("width 32 and 2 heads, not for width 16, 2 heads, 2" in words) is (kind.width == 16)
    with pytest.raises(ZooError, match="path fused was asked for, but"):
        describe_path("fused", "cuda", sizes.resized(Kind(32, 4)), "bf16")


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's compiler warns of itself
def test_more_kinds_are_compiled_than_pytorch_recompiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would stop compiling after a few kinds, without a word."""
    monkeypatch.setattr("torch._dynamo.config.recompile_limit", 2)
    monkeypatch.setattr("torch._dynamo.config.fail_on_recompile_limit_hit", True)
    task = random_images(8, 2, 16, n=60)
    runs = [c for c in mixed_runs() if c.optimizer in ("sgd", "sgdm")]
    for kind in all_kinds([8, 16], [2, 4], [1]):
        sized = replace(task, arch=task.arch.resized(kind))
        plain, fused = (train(sized, runs, Recipe(1, 16), path=p) for p in ("torch", "compiled"))
        torch.testing.assert_close(plain.weights, fused.weights, rtol=0, atol=1e-4)


def test_a_wider_network_has_a_wider_mlp_and_classifier() -> None:
    arch = NetworkSizes(16, 10, 4).resized(Kind(48, 4, 3))
    assert arch.layout["blocks.2.W_A"] == (48, 96)
    assert arch.layout["classifier.W_1"] == (48, 48)
    assert arch.kind == Kind(48, 4, 3)
    assert NetworkSizes(49, 10, 16).resized(Kind()) == NetworkSizes(49, 10, 16)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((32, 3, 2), "3 heads do not divide width 32"),
        ((0, 2, 2), "width must be an even number from 2 to 512, found 0"),
        ((-16, 2, 2), "found -16"),
        ((33, 3, 2), "found 33"),
        ((100_000, 2, 2), "found 100000"),
        ((32, 0, 2), "heads must be at least 1, found 0"),
        ((32, -2, 2), "heads must be at least 1, found -2"),
        ((32, 2, 0), "depth must lie between 1 and 32, found 0"),
        ((32, 2, 1000), "found 1000"),
    ],
)
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int], words: str) -> None:
    with pytest.raises(ZooError, match=words):
        Kind(*sizes)


def test_kinds_have_names() -> None:
    kinds = all_kinds([16, 48], [2, 4], [1])
    assert [kind.name for kind in kinds] == ["w16-h2-d1", "w16-h4-d1", "w48-h2-d1", "w48-h4-d1"]
    assert [Kind.named(kind.name) for kind in kinds] == list(kinds)
    with pytest.raises(ZooError, match=r"'\.\./w16-h2-d1' is not a kind"):
        Kind.named("../w16-h2-d1")
    with pytest.raises(ZooError, match="heads 2 was asked for twice"):
        all_kinds([16], [2, 2], [1])


def test_text_needs_vectors_as_wide_as_the_network(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match="word vectors of width 16 expected, found 32"):
        ag_news(write_news(tmp_path), 0.1, None, random_vectors(), Kind(16, 2, 1))
