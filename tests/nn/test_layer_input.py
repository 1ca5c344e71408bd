"""What a layer refuses, with one sentence each; an empty batch gives an empty result."""

import pytest
import torch
from layer_cases import BLOCK, KINDS, SPACES, invariant_options

from transformer_nfn import spaces
from transformer_nfn.errors import SpaceError
from transformer_nfn.nn import Activation, Equivariant, Invariant
from transformer_nfn.spaces import Axis, WeightSpace


def test_weights_of_another_space() -> None:
    other = spaces.attention_block(4, 2, 3, 2, 6)
    for layer in (Equivariant(BLOCK, 1, 2), Invariant(BLOCK, 1, 2)):
        with pytest.raises(SpaceError, match="'W_A' axis 'neuron': expected 5, found 6"):
            layer(other.randn(2))
        with pytest.raises(SpaceError, match="weights lack"):
            layer(spaces.multi_head(4, 2, 3, 2).randn(2))


@pytest.mark.parametrize("layer", [Equivariant, Invariant])
def test_sizes_and_options_that_do_not_exist(layer) -> None:
    whole = "must be a positive integer"
    for channels, options, message in (
        ((1, 0), {}, rf"out_(channels|features) {whole}, found 0"),
        ((-1, 2), {}, f"in_channels {whole}, found -1"),
        ((3, 2), {"groups": 2}, "in_channels must be a multiple of groups, found 3 and 2"),
        ((3, 2), {"groups": 0}, f"groups {whole}, found 0"),
        ((2, 2), {"groups": 2, "rank": 2}, "low rank has one group"),
        ((1, 2), {"pool": "max"}, "pool must be one of .*, found 'max'"),
        ((1, 2), {"init": "zero"}, "init must be one of .*, found 'zero'"),
        *(((1, 2), {"rank": r}, f"rank {whole} or None") for r in (0, -1, 1.5, True)),
    ):
        with pytest.raises(SpaceError, match=message):
            layer(BLOCK, *channels, **options)
    with pytest.raises(SpaceError, match="reads 3 channels, the weights have 2"):
        layer(BLOCK, 3, 2)(BLOCK.randn(2, 2))


def test_a_tensor_that_carries_an_axis_twice() -> None:
    space = WeightSpace.build("graph", [Axis.perm("node", 4)], {"W": "node node", "b": "node"})
    with pytest.raises(SpaceError, match=r"cannot write tensor 'W', .* 'node' twice"):
        Equivariant(space, 1, 1)
    # It can be read: rows, columns, the diagonal.
    layer = Invariant(space, 1, 3).double()
    weights = space.randn(2, dtype=torch.float64)
    order = torch.tensor([2, 0, 3, 1])
    moved = {"W": weights["W"][..., order, :][..., order], "b": weights["b"][..., order]}
    torch.testing.assert_close(layer(moved), layer(weights))


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_gives_an_empty_result(kind: str) -> None:
    space, options = SPACES["permuted stack"], KINDS[kind]
    weights = space.randn(0, 2)
    out = Activation(space)(Equivariant(space, 2, 3, **options)(weights))
    assert {n: tuple(x.shape) for n, x in out.items()} == {
        n: (0, 3, *s) for n, s in space.shapes.items()
    }
    assert Invariant(space, 2, 5, **invariant_options(options))(weights).shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_are_cast_to_the_layer(dtype: torch.dtype) -> None:
    weights = {name: w.to(dtype) for name, w in BLOCK.randn(2).items()}
    exact = {name: w.float() for name, w in weights.items()}
    torch.manual_seed(0)
    layer, head = Equivariant(BLOCK, 1, 2), Invariant(BLOCK, 1, 3)
    out = layer(weights)
    assert all(torch.equal(w, out[name]) for name, w in layer(exact).items())
    assert torch.equal(head(weights), head(exact))
    assert out["W_Q"].dtype == torch.float32


def test_digits_are_not_dropped_unasked() -> None:
    weights = BLOCK.randn(1, dtype=torch.float64)
    for layer in (Equivariant(BLOCK, 1, 2), Invariant(BLOCK, 1, 2)):
        with pytest.raises(SpaceError, match="layer is in float32 and the weights are in float64"):
            layer(weights)
        layer.double()(weights)
