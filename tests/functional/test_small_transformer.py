"""The zoo's whole network is one space: its forward is the module's, and compare answers."""

import pytest
import torch

from cases import draw, gen, perturbed, worst
from transformer_nfn import functional, symmetry
from transformer_nfn.spaces import Axis, WeightSpace
from transformer_nfn.testing import assert_same_function
from transformer_nfn.zoo import NetworkSizes, SmallTransformer
from transformer_nfn.zoo.module import to_state_dict

IMAGES = NetworkSizes(tokens=9, classes=3, patch=4, d_model=8, heads=2, d_ff=10, blocks=2)
WORDS = NetworkSizes(tokens=12, classes=4, patch=0, d_model=8, heads=2, d_ff=10, blocks=3)
MNIST = NetworkSizes(49, 10, 16)
both = pytest.mark.parametrize("sizes", [IMAGES, WORDS], ids=["images", "words"])


def network(sizes, seed=0):
    return {name: 0.5 * w for name, w in draw(sizes.space, seed).items()}


def test_positions_of_imported_files_are_taken_over():
    U = {name: w[0, 0] for name, w in network(WORDS).items()}
    table = torch.randn(12, 8, generator=gen(2), dtype=torch.float64)
    theirs = functional.small_transformer(**WORDS.to_json(), positions=table)
    theirs.check_invariance()
    module = SmallTransformer(WORDS).double().eval()
    module.load_state_dict(to_state_dict(WORDS, U))
    module.embedding.pos_embedding = table
    X = torch.randn(5, 8, generator=gen(3), dtype=torch.float64)
    assert torch.allclose(theirs.forward(U, X), module(X[None])[0].detach(), atol=1e-11)


@both
def test_the_group_leaves_the_function_alone(sizes):
    sizes.architecture.check_invariance()
    U = network(sizes)
    for seed in range(5):
        g = sizes.space.group.random(gen(seed), max_condition=100)
        assert_same_function(sizes.architecture, U, g.act(U))


def test_positions_keep_the_first_stream_where_it_is():
    right = IMAGES.architecture
    axes = {**right.space.axes, "stream0": Axis.perm("stream0", 8)}.values()
    tensors = {name: " ".join(spec.words()) for name, spec in right.space.tensors.items()}
    wrong = WeightSpace.build("every stream permuted", axes, tensors)
    claim = functional.Architecture(wrong, right.forward, right.inputs)
    with pytest.raises(AssertionError, match="'every stream permuted' changes its function"):
        claim.check_invariance()


def test_a_negative_scale_of_a_relu_neuron_is_caught():
    right = IMAGES.architecture
    scales = [functional.Rescaling(s.name, s.of, s.plain, s.dual) for s in right.freedoms]
    claim = functional.Architecture(
        right.space, right.forward, right.inputs, freedoms=tuple(scales)
    )
    with pytest.raises(AssertionError, match="enlarged' changes its function"):
        claim.check_invariance()


@both
def test_compare_answers_on_whole_networks(sizes):
    U = network(sizes)
    for seed in range(5):
        g = sizes.space.group.random(gen(seed), max_condition=100)
        V = g.act(U)
        found = symmetry.compare(sizes.architecture, U, V)
        assert (found.same_function, found.same_orbit, found.group) == (True, True, "paper")
        assert worst(found.element.act(U), V) < 1e-9
        for axis, perm in g.perms.items():
            assert torch.equal(found.element.perms[axis], perm)
        V = g.act(perturbed(U, 1e-6, seed))
        found = symmetry.compare(sizes.space, U, V)
        assert (found.same_function, found.same_orbit) == (False, False)
        outputs = [sizes.architecture.forward(w, found.witness.X)[0, 0] for w in (U, V)]
        apart = float((outputs[0] - outputs[1]).norm() / outputs[0].norm())
        assert apart == pytest.approx(found.witness.difference, rel=1e-3)
        assert apart > 10 * found.witness.noise


@both
def test_scales_of_relu_neurons_are_recognised_as_the_same_function(sizes):
    U, V = network(sizes), network(sizes)
    s = torch.rand(10, generator=gen(1), dtype=torch.float64) + 0.5
    V["blocks.1.W_A"], V["blocks.1.b_A"] = V["blocks.1.W_A"] * s, V["blocks.1.b_A"] * s
    V["blocks.1.W_B"] = V["blocks.1.W_B"] / s[:, None]
    found = symmetry.compare(sizes.architecture, U, V)
    assert (found.same_function, found.same_orbit, found.group) == (True, True, "enlarged")
    moved = found.element.act(sizes.architecture.in_enlarged(U))
    assert worst(sizes.architecture.from_enlarged(moved), V) < 1e-9
    prints = [symmetry.fingerprint(sizes.architecture, w) for w in (U, V)]
    assert float((prints[0] - prints[1]).norm() / prints[0].norm()) < 1e-8
    V["blocks.1.W_B"][..., 0, :] *= 1.01
    assert symmetry.compare(sizes.architecture, U, V).same_function is False
