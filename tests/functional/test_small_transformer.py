"""The zoo's whole network is one space: its forward is the module's, and compare answers."""

import copy
import pickle

import pytest
import torch

from cases import draw, gen, perturbed, worst
from literal_network import literal_logits
from transformer_nfn import functional, symmetry
from transformer_nfn.functional.zoo_network import Normalise
from transformer_nfn.networks import read_network, save_network
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


@both
def test_the_forward_is_the_literal_one(sizes):
    U = network(sizes)
    state = to_state_dict(sizes, {n: w[0, 0] for n, w in U.items()})
    positions = sizes.positions().double()
    if sizes.patch:
        images = torch.randn(1, 1, 6, 6, generator=gen(1), dtype=torch.float64)
        X = torch.nn.functional.unfold(images, 2, stride=2)[0].T
        expected = literal_logits(state, images, positions, sizes.heads)
    else:
        X = torch.randn(7, 8, generator=gen(1), dtype=torch.float64)
        expected = literal_logits(state, X[None], positions, sizes.heads)
    found = sizes.architecture.forward(U, X)
    assert torch.allclose(found[0], expected.detach(), atol=1e-11)
    alone = sizes.architecture.forward({n: w[0, 0] for n, w in U.items()}, X)
    assert torch.allclose(alone, expected[0].detach(), atol=1e-11)


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


def test_networks_of_the_papers_size_in_float32():
    U = {n: 0.2 * w for n, w in MNIST.space.randn(1, generator=gen(3)).items()}
    g = MNIST.space.group.random(gen(4), max_condition=100)
    assert symmetry.compare(MNIST.space, U, g.act(U)).same_function is True
    other = {n: 0.2 * w for n, w in MNIST.space.randn(1, generator=gen(5)).items()}
    for V in (other, g.act(perturbed(U, 0.01))):
        found = symmetry.compare(MNIST.space, U, V)
        assert found.same_function is False
        assert found.witness.X.shape == (49, 16)


def test_a_file_knows_its_architecture(tmp_path):
    U = network(WORDS)
    save_network(tmp_path / "net.safetensors", WORDS.space, U)
    space, back = read_network(tmp_path / "net.safetensors")
    assert space == WORDS.space
    V = WORDS.architecture.disguise(U, gen(1))
    assert symmetry.compare(space, back, V).same_function is True


def test_sizes_and_architecture_go_to_other_processes():
    U = {name: w[0, 0] for name, w in network(IMAGES).items()}
    (X,) = IMAGES.architecture.inputs.draw(1, 9, generator=gen(1))
    expected = IMAGES.architecture.forward(U, X)
    assert len(pickle.dumps(IMAGES)) < 1000
    for back in (pickle.loads(pickle.dumps(IMAGES)), copy.deepcopy(IMAGES)):
        assert back == IMAGES
        assert torch.equal(back.architecture.forward(U, X), expected)


@both
def test_the_naming_is_the_modules_state_dict(sizes):
    module = SmallTransformer(sizes)
    state = module.state_dict()
    weights = sizes.architecture.read(state)
    back = sizes.architecture.write(weights)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_the_layernorm_of_a_gpu_is_pytorchs():
    x = torch.randn(5, 7, 8, generator=gen(3), dtype=torch.float64, requires_grad=True)
    expected = torch.nn.functional.layer_norm(x, (8,))
    torch.testing.assert_close(Normalise.apply(x)[0], expected, rtol=0, atol=1e-12)
    together = torch.func.vmap(lambda row: Normalise.apply(row)[0])(x)
    torch.testing.assert_close(together, expected, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: Normalise.apply(x)[0], x)
