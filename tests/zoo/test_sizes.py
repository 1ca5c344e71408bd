"""Networks of the paper's and of other sizes: every forward and gradient equals the literal one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from literal_network import literal_logits
from transformer_nfn import native_code
from transformer_nfn.functional import zoo_logits
from transformer_nfn.zoo import NetworkSizes, Recipe, SizeGroup, ZooError, size_groups, train
from transformer_nfn.zoo.module import (
    SmallTransformer,
    from_state_dict,
    load_network,
    to_state_dict,
)
from transformer_nfn.zoo.training.backends import (
    NativeRunner,
    choose_runner,
    describe_path,
    library,
)
from transformer_nfn.zoo.training.randomness import dropout_threshold, keys
from transformer_nfn.zoo.training.steps import coefficients, rules
from transformer_nfn.zoo.training.tasks import Task, load_task
from transformer_nfn.zoo.training.trainer import initial_weights

from .conftest import random_images, random_vectors, small_task
from .test_training import mixed_runs, modules, one_step, plain_inputs, runs_clear_of_kinks

# Heads narrower than a vector, heads of a vector and a half, rows of no whole wide vector.
GROUPS = [SizeGroup(16, 4, 1), SizeGroup(48, 4, 3), SizeGroup(20, 2, 1), SizeGroup()]
needs_compiler = pytest.mark.skipif(library()[0] is None, reason="no C compiler")
# The first moment becomes the gradient, and the weights do not change.
STILL = (0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0)


@pytest.fixture(params=["digits", "ag_news"])
def sized_task(request: pytest.FixtureRequest, group: SizeGroup, news_folder: Path) -> Task:
    return small_task(request.param, news_folder, group)


def test_the_paper_counts_these_parameters() -> None:
    for sizes, count in ((NetworkSizes(49, 10, 16), 18_506), (NetworkSizes(512, 4, 0), 17_764)):
        assert sizes.num_weights == sizes.space.num_weights == count
        assert sum(p.numel() for p in SmallTransformer(sizes).parameters()) == count


@pytest.mark.parametrize("group", [*GROUPS, SizeGroup(30, 3, 2)], ids=lambda g: g.name)
def test_every_forward_is_the_literal_one(sized_task: Task) -> None:
    """Many networks at once, the architecture of one, and its module; in float64."""
    sizes = sized_task.sizes
    flat = 0.3 * torch.randn(3, sizes.num_weights, generator=torch.Generator().manual_seed(0))
    batch = sized_task.batch("train", torch.tensor([[0, 5, 9], [1, 2, 3], [7, 8, 0]]))
    weights = {name: view.double() for name, view in sizes.views(flat).items()}
    positions = sizes.positions().double()
    # The mean over the tokens of a text is weighted in float32.
    close = 1e-9 if sizes.patch else 1e-6
    logits = zoo_logits(
        weights, batch.inputs.double(), positions, heads=sizes.heads, lengths=batch.lengths
    )
    named = sizes.to_named(flat.double())
    for m in range(3):
        inputs = plain_inputs(sized_task, batch, m).double()
        one = {name: w[m] for name, w in named.items()}
        state = {name: w.double() for name, w in to_state_dict(sizes, one).items()}
        expected = literal_logits(state, inputs, positions, sizes.heads)
        torch.testing.assert_close(logits[m], expected, rtol=close, atol=close)
        rows = batch.inputs[m].double()[:, : inputs.shape[1] if not sizes.patch else None]
        symmetric = torch.stack([sizes.architecture.forward(one, x) for x in rows])
        torch.testing.assert_close(symmetric, expected, rtol=close, atol=close)
        with torch.no_grad():
            module = load_network(sizes, one)(inputs.float())
        assert (module - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("group", [*GROUPS, SizeGroup(30, 3, 2)], ids=lambda g: g.name)
def test_named_tensors_and_state_dicts_round_trip_bit_for_bit(sized_task: Task) -> None:
    sizes = sized_task.sizes
    flat = torch.randn(2, sizes.num_weights)
    named = sizes.to_named(flat)
    sizes.space.check(named, lead=1)
    assert torch.equal(sizes.from_named(named), flat)
    one = {k: w[1] for k, w in named.items()}
    back = from_state_dict(sizes, to_state_dict(sizes, one))
    assert all(torch.equal(back[k], one[k]) for k in one)
    assert sum(p.numel() for p in SmallTransformer(sizes).parameters()) == sizes.num_weights
    assert NetworkSizes.from_json(sizes.to_json()) == sizes


@needs_compiler
@pytest.mark.parametrize("group", GROUPS, ids=lambda g: g.name)
def test_native_gradients_equal_autograd_in_float64(sized_task: Task) -> None:
    check_gradients(sized_task)


@pytest.mark.nightly
@needs_compiler
@pytest.mark.parametrize("vector", [4, 8, 16])
@pytest.mark.parametrize(
    "group", [*GROUPS[:2], SizeGroup(16, 2, 2), SizeGroup()], ids=lambda g: g.name
)
def test_vectors_of_other_machines_give_the_same_gradients(
    sized_task: Task, vector: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GCC and Clang compute wide vectors by narrow ones on machines without them."""
    flags = f"-DTNFN_VECTOR={vector}"
    monkeypatch.setattr(native_code, "FLAGS", (*native_code.FLAGS, "-Wno-psabi", flags))
    monkeypatch.setenv("TNFN_CACHE", str(tmp_path))
    library.cache_clear()
    try:
        check_gradients(sized_task)
    finally:
        library.cache_clear()


def check_gradients(task: Task) -> None:
    index = torch.randint(0, 100, (4, 19), generator=torch.Generator().manual_seed(5))
    sizes, configs = task.sizes, runs_clear_of_kinks(task, index)
    flat = torch.stack([initial_weights(sizes, c) for c in configs])
    runner = NativeRunner(task, flat.clone(), torch.zeros(4, dtype=torch.int32), 19)
    no_keys = torch.zeros(4, sizes.dropout_sites, 2, dtype=torch.int32)
    batch, epoch = one_step(task, index, no_keys, torch.tensor([STILL] * 4))
    runner.epoch(epoch)
    for m, module in enumerate(modules(sizes, flat)):
        module.double()
        logits = module(plain_inputs(task, batch, m).double())
        F.cross_entropy(logits, batch.labels[m]).backward()
        grads = module.state_dict() | {k: p.grad for k, p in module.named_parameters()}
        named = from_state_dict(sizes, grads)
        exact = sizes.from_named({k: w[None] for k, w in named.items()})[0]
        assert (runner.first[m] - exact).abs().max() < 2e-5 * exact.abs().max()


@needs_compiler
@pytest.mark.parametrize("group", GROUPS, ids=lambda g: g.name)
def test_both_paths_drop_the_same_entries_and_test_alike(sized_task: Task) -> None:
    sizes, configs = sized_task.sizes, mixed_runs()
    flat = torch.stack([initial_weights(sizes, c) for c in configs])
    threshold = dropout_threshold(torch.tensor([0.0, 0.05, 0.1, 0.2]))
    index = torch.randint(0, 100, (4, 16), generator=torch.Generator().manual_seed(6))
    key = keys(torch.arange(4)[:, None], 4, torch.arange(sizes.dropout_sites))
    coef = coefficients(rules(configs), torch.full((4,), 1e-2).double(), torch.ones(4))
    _, epoch = one_step(sized_task, index, key, coef)
    runners = [
        choose_runner(path, sized_task, flat.clone(), threshold, "float32", 16)
        for path in ("torch", "native")
    ]
    tested = [runner.evaluate(flat, "test") for runner in runners]
    torch.testing.assert_close(tested[0][0], tested[1][0], rtol=1e-5, atol=1e-4)
    assert torch.equal(tested[0][1], tested[1][1])
    dropped = [runner.epoch(epoch)[0] for runner in runners]
    torch.testing.assert_close(*dropped, rtol=0, atol=1e-5)


def test_sizes_that_the_c_code_lacks_train_by_pytorch() -> None:
    sizes = NetworkSizes(16, 10, 4).resized(SizeGroup(30, 3, 1))
    path, note = describe_path("auto", "cpu", sizes)
    assert path == "torch"
    assert "multiples of 4, not 30" in note
    with pytest.raises(ZooError, match="path native is not possible: "):
        describe_path("native", "cpu", sizes)
    trained = train(replace(random_images(), sizes=sizes), mixed_runs(), Recipe(1, 32))
    assert trained.weights.shape == (8, sizes.num_weights)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's compiler
def test_more_sizes_are_compiled_than_pytorch_recompiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would silently stop compiling after a few sizes."""
    monkeypatch.setattr("torch._dynamo.config.recompile_limit", 2)
    monkeypatch.setattr("torch._dynamo.config.fail_on_recompile_limit_hit", True)
    task = random_images(n=60)
    runs = [c for c in mixed_runs() if c.optimizer in ("sgd", "sgdm")]
    for group in size_groups([8, 16], [2, 4], [1]):
        sized = replace(task, sizes=task.sizes.resized(group))
        plain, compiled = (train(sized, runs, Recipe(1, 16), path=p) for p in ("torch", "compiled"))
        torch.testing.assert_close(plain.weights, compiled.weights, rtol=0, atol=1e-4)


def test_impossible_sizes_are_rejected() -> None:
    for sizes, message in (
        ((32, 3, 2), "3 heads do not divide width 32"),
        ((0, 2, 2), "width must be an even number from 2 to 512, found 0"),
        ((33, 3, 2), "found 33"),
        ((100_000, 2, 2), "found 100000"),
        ((32, -2, 2), "heads must be at least 1, found -2"),
        ((32, 2, 0), "depth must lie between 1 and 32, found 0"),
    ):
        with pytest.raises(ZooError, match=message):
            SizeGroup(*sizes)
    with pytest.raises(ZooError, match=r"'\.\./w16-h2-d1' is not a kind"):
        SizeGroup.from_name("../w16-h2-d1")
    with pytest.raises(ZooError, match="heads 2 is given twice"):
        size_groups([16], [2, 2], [1])


def test_text_needs_vectors_as_wide_as_the_network(news_folder: Path) -> None:
    with pytest.raises(ZooError, match="word vectors of width 16 expected, found 32"):
        load_task("ag_news", news_folder, vectors=random_vectors(), group=SizeGroup(16, 2, 1))
