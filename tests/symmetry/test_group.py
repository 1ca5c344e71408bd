"""The group acts as the paper says, composes, is undone, and keeps every function."""

import pytest
import torch
from hypothesis import given
from paper_action import act as paper_act

from cases import ALL, SIX, blocks, draw, gen, seeds, trials, worst
from transformer_nfn import spaces
from transformer_nfn.errors import GroupError, SpaceError
from transformer_nfn.symmetry import fold, products
from transformer_nfn.testing import assert_same_function

BLOCK = SIX["attention_block"]
every_space = pytest.mark.parametrize("space", ALL.values(), ids=ALL)


def bare(weights):
    return {name: w[0, 0] for name, w in weights.items()}


@given(blocks(), seeds)
def test_acts_as_equation_14_says(space, seed):
    U, g = draw(space, seed), space.group.random(gen(seed))
    assert worst(bare(g.act(U)), paper_act(g, bare(U))) < 1e-9


@given(blocks(), seeds)
def test_keeps_the_function_composes_and_inverts(space, seed):
    source = gen(seed)
    U = draw(space, seed)
    g, h = space.group.random(source), space.group.random(source)
    assert_same_function(space, U, g.act(U), seed=seed)
    assert worst((g @ h).act(U), g.act(h.act(U))) < 1e-9
    assert worst(g.inverse().act(g.act(U)), U) < 1e-9
    assert worst((g @ g.inverse()).act(U), U) < 1e-9
    assert worst((g @ h).inverse().act(U), (h.inverse() @ g.inverse()).act(U)) < 1e-9
    assert worst(space.group.identity().act(U), U) == 0


@every_space
@pytest.mark.parametrize("batch", [None, 4])
def test_every_space_keeps_its_function(space, batch):
    U = draw(space, 1, batch=4)
    for seed in range(trials(1, 5)):
        g = space.group.random(gen(seed), batch=batch)
        assert_same_function(space, U, g.act(U), seed=seed)


@every_space
@pytest.mark.parametrize("batches", [(None, 4), (4, None)])
def test_every_space_composes_and_inverts(space, batches):
    source = gen(2)
    U = draw(space, 2, batch=4, channels=2)
    g, h = (space.group.random(source, batch=b) for b in batches)
    assert worst((g @ h).act(U), g.act(h.act(U))) < 1e-9
    assert worst(g.inverse().act(g.act(U)), U) < 1e-9


@every_space
def test_one_element_for_each_item_acts_like_a_loop(space):
    U = draw(space, 3, batch=4, channels=2)
    g = space.group.random(gen(3), batch=4)
    together = g.act(U)
    for i in range(4):
        alone = g[i].act({name: w[i : i + 1] for name, w in U.items()})
        assert worst(alone, {name: w[i : i + 1] for name, w in together.items()}) < 1e-12
    one = space.network(U)
    repeated = {name: w.expand(4, *w.shape[1:]) for name, w in one.items()}
    assert worst(g.act(one), g.act(repeated)) == 0


@every_space
def test_products_only_permute_and_fold_takes_shifts_out(space):
    U, g = draw(space, 4), space.group.random(gen(4))
    before, after = products(space, U), products(space, g.act(U))
    for name in before:
        assert torch.allclose(
            before[name].flatten().sort().values, after[name].flatten().sort().values, atol=1e-8
        )
    assert worst(fold(space, g.act(U)), g.linear_part().act(fold(space, U))) < 1e-9
    if space.architecture is not None:
        assert_same_function(space, U, fold(space, U))


def test_differentiable_in_the_weights():
    U = {name: w.requires_grad_() for name, w in draw(BLOCK, 5).items()}
    g = BLOCK.group.random(gen(5))
    flat = torch.cat([w.flatten() for w in g.act(U).values()])
    (flat * torch.arange(len(flat), dtype=torch.float64)).sum().backward()
    # The action is linear: its gradient is the transposed action, checked by a difference.
    step = draw(BLOCK, 6)
    moved = torch.cat([w.flatten() for w in g.act(step).values()])
    expected = (moved * torch.arange(len(flat), dtype=torch.float64)).sum()
    found = sum((U[name].grad * step[name]).sum() for name in U)
    assert torch.allclose(found, expected, rtol=1e-10)


def test_float32_weights_are_moved_in_float64_and_rounded_once():
    U = BLOCK.randn(1, generator=gen(7))
    g = BLOCK.group.random(gen(7))
    exact = g.act({name: w.double() for name, w in U.items()})
    found = g.act(U)
    for name, w in found.items():
        assert w.dtype == torch.float32
        assert torch.equal(w, exact[name].float())


def test_random_is_reproducible_and_well_conditioned():
    g, h = (BLOCK.group.random(gen(1), batch=50, max_condition=20.0) for _ in range(2))
    for part in ("perms", "linears", "inverses"):
        for name in getattr(g, part):
            assert torch.equal(getattr(g, part)[name], getattr(h, part)[name])
    assert max(g.condition().values()) <= 20.0


@pytest.mark.parametrize("bound", [1.0, 10.0, 100.0])
def test_entries_are_uniform_on_the_papers_ranges(bound):
    space = spaces.attention_block(8, 2, 4, 4, 8)
    g = space.group.random(gen(0), batch=500, entries=(-bound, bound))
    entries = torch.cat([m.flatten() for m in g.linears.values()])
    assert entries.abs().max() <= bound
    assert abs(float(entries.mean())) < 0.03 * bound
    assert abs(float(entries.std()) / bound - 3**-0.5) < 0.02


# Wrong variants: each must be caught by the same check that passes the right one.


def wrong_spaces():
    """Spaces that declare a symmetry too many."""

    def changed(name, axes, tensors=None, **options):
        right = SIX[name]
        words = {n: " ".join(spec.words()) for n, spec in right.tensors.items()}
        return spaces.WeightSpace.build(
            name,
            {**right.axes, **{axis.name: axis for axis in axes}}.values(),
            {**words, **(tensors or {})},
            architecture=right.architecture,
            options=right.options,
            **options,
        )

    one_block = {"0.W_O": "0.head 0.vo* 0.feature", "0.W_A": "0.feature 0.neuron"}
    yield changed("residual_stack", [spaces.Axis.perm("0.feature", 8)], one_block)
    yield changed("rope_block", [spaces.Axis.linear("qk", 6, of="head")])
    yield changed("biased_block", [], shifts=[spaces.Shift("b_V")])  # not into b_O


@pytest.mark.parametrize("wrong", [*wrong_spaces()], ids=lambda space: space.name)
def test_a_symmetry_too_many_changes_the_function(wrong):
    U = draw(wrong, 9)
    with pytest.raises(AssertionError, match="not the same function"):
        assert_same_function(wrong, U, wrong.group.random(gen(9)).act(U))


# Bad input.

GROUP = BLOCK.group
BAD_ELEMENTS = {
    "other spaces": (
        lambda: GROUP.identity() @ SIX["rope_block"].group.identity(),
        "cannot compose elements of 'attention_block' and 'rope_block'",
    ),
    "other batches": (
        lambda: GROUP.identity(batch=2) @ GROUP.identity(batch=3),
        "cannot compose 2 elements with 3",
    ),
    "other dtypes": (
        lambda: GROUP.identity() @ GROUP.identity(dtype=torch.float32),
        "mixed dtypes",
    ),
    "empty range": (lambda: GROUP.random(entries=(1.0, 1.0)), "low < high"),
    "impossible condition": (
        lambda: GROUP.random(max_condition=1.0),
        "no 3×3 matrix of condition at most 1 for axis 'qk'",
    ),
    "condition below one": (lambda: GROUP.random(max_condition=0.5), "at least 1, found 0.5"),
    "one element indexed": (lambda: GROUP.identity()[0], "not a batch"),
}


@pytest.mark.parametrize(("make", "message"), BAD_ELEMENTS.values(), ids=BAD_ELEMENTS)
def test_an_element_that_does_not_exist_is_refused(make, message):
    with pytest.raises(GroupError, match=message):
        make()


def test_acting_on_weights_of_another_space_or_batch_or_device_is_refused():
    g = GROUP.random(gen(0))
    with pytest.raises(SpaceError, match="lack 'W_A'"):
        g.act(draw(SIX["swiglu_block"]))
    with pytest.raises(SpaceError, match="axis 'batch': expected 1 or 3 as in the group element"):
        GROUP.identity(batch=3).act(draw(BLOCK, batch=2))
    with pytest.raises(SpaceError, match="need weights with a batch axis"):
        GROUP.identity(batch=3).act(bare(draw(BLOCK)))
    with pytest.raises(GroupError, match="weights are on cpu but the group element is on meta"):
        g.to("meta").act(draw(BLOCK))
