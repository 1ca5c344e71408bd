"""The layers are the paper's formulas: same outputs, same parameters, same counts."""

import pytest
import torch
from paper_transcription import PHI_E, PHI_I, equivariant, invariant, shape
from phi_mapping import phi_of_equivariant, phi_of_invariant

from transformer_nfn import spaces
from transformer_nfn.errors import SpaceError
from transformer_nfn.nn import Activation, Equivariant, Invariant, ReadThrough, pooled

SIZES = [
    # d, e, D, h, Dk, Dv, DA
    (1, 10, 8, 2, 4, 4, 16),
    (2, 3, 4, 3, 2, 5, 7),
    (3, 1, 5, 1, 1, 2, 3),
    (4, 4, 3, 2, 3, 1, 4),  # e = DA, where the misprinted constant of E(W)^(B) hides
    (1, 1, 1, 1, 1, 1, 1),
    (2, 2, 2, 4, 6, 3, 2),
]


@pytest.mark.parametrize("pool", ["mean", "sum"])
@pytest.mark.parametrize("sizes", SIZES)
def test_equivariant_layer_is_the_transcription(sizes: tuple[int, ...], pool: str) -> None:
    d, e, D, h, Dk, Dv, DA = sizes
    space = spaces.attention_block(D, h, Dk, Dv, DA)
    torch.manual_seed(0)
    layer = Equivariant(space, d, e, pool=pool).double()
    torch.nn.init.normal_(layer.level_maps[-1].bias)  # type: ignore[arg-type]
    phi = phi_of_equivariant(layer)
    assert {n: tuple(p.shape) for n, p in phi.items()} == {
        n: shape(axes, d=d, e=e, D=D) for n, axes in PHI_E.items()
    }
    weights = space.randn(3, d, dtype=torch.float64)
    expected = equivariant(phi, weights)
    found = layer(weights)
    assert list(found) == list(space.tensors)
    for name in expected:
        assert (found[name] - expected[name]).abs().max() < 1e-10, name
    with torch.no_grad():  # sums in place
        for name, x in layer(weights).items():
            assert (x - expected[name]).abs().max() < 1e-10, name


@pytest.mark.parametrize("pool", ["mean", "sum"])
@pytest.mark.parametrize("sizes", SIZES)
def test_invariant_layer_is_the_transcription(sizes: tuple[int, ...], pool: str) -> None:
    d, e, D, h, Dk, Dv, DA = sizes
    space = spaces.attention_block(D, h, Dk, Dv, DA)
    torch.manual_seed(0)
    layer = Invariant(space, d, e, pool=pool).double()
    torch.nn.init.normal_(layer.map.bias)  # type: ignore[arg-type]
    phi = phi_of_invariant(layer)
    assert {n: tuple(p.shape) for n, p in phi.items()} == {
        n: shape(axes, d=d, e=1, D=D, out=e) for n, axes in PHI_I.items()
    }
    weights = space.randn(3, d, dtype=torch.float64)
    assert (layer(weights) - invariant(phi, weights)[:, 0]).abs().max() < 1e-10


@pytest.mark.parametrize("D", [1, 2, 3, 5])
def test_parameter_counts_are_the_formulas(D: int) -> None:
    space = spaces.attention_block(D, 2, 3, 2, 4)
    for d, e in [(1, 1), (1, 3), (4, 2)]:
        E, I = Equivariant(space, d, e), Invariant(space, d, e)  # noqa: E741
        assert sum(p.numel() for p in E.parameters()) == (
            d * e * (2 * D**3 + 12 * D**2 + 15 * D + 12) + e * (2 * D + 2)
        )
        assert sum(p.numel() for p in I.parameters()) == d * e * (D**2 + 3 * D + 2) + e


@pytest.mark.parametrize("pool", ["mean", "sum"])
@pytest.mark.parametrize(
    "space",
    [
        spaces.multi_head(4, 2, 3, 2),
        spaces.attention_block(4, 2, 3, 2, 5),
        spaces.grouped_query_block(4, 2, 3, 3, 2, 5),
        spaces.swiglu_block(4, 2, 3, 2, 5),
        spaces.stack(spaces.attention_block(4, 2, 3, 2, 5), 2),
    ],
    ids=lambda space: space.name,
)
def test_reading_through_a_layer_changes_nothing(
    space: spaces.WeightSpace, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    E = Equivariant(space, 1, 3, pool=pool).double()
    act, I = Activation(space), Invariant(space, 3, 4, pool=pool).double()  # noqa: E741
    assert ReadThrough.fits(E, I)
    short = ReadThrough(E, act, I)
    assert not list(short.parameters())
    weights = space.randn(3, 1, dtype=torch.float64)
    long_way = I(act(E(weights)))
    short_way = short(weights)
    assert (short_way - long_way).abs().max() < 1e-10
    # Two groups of channels, each with layers of its own, at once.
    E2 = Equivariant(space, 2, 6, groups=2, pool=pool).double()
    I2 = Invariant(space, 6, 8, groups=2, pool=pool).double()
    pair = space.randn(3, 2, dtype=torch.float64)
    both = ReadThrough(E2, act, I2)
    assert (both(pair) - I2(act(E2(pair)))).abs().max() < 1e-10
    # Without gradients, where sums of any size are done in C; channels may come apart.
    monkeypatch.setattr(pooled, "WORTHWHILE", 0)
    apart = [{n: x[:, i : i + 1] for n, x in pair.items()} for i in range(2)]
    with torch.no_grad():
        assert (both(*apart) - I2(act(E2(pair)))).abs().max() < 1e-10
    with pytest.raises(SpaceError, match="the layers read 2 channels, the weights have 1"):
        both(apart[0])
    # The gradients agree too.
    parameters = [*E.parameters(), *I.parameters()]
    first = torch.autograd.grad(long_way.square().sum(), parameters)
    second = torch.autograd.grad(short_way.square().sum(), parameters)
    for x, y in zip(first, second, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_reading_through_is_refused_where_products_do_not_follow() -> None:
    space = spaces.attention_block(4, 2, 3, 2, 5)
    I = Invariant(space, 3, 4)  # noqa: E741
    assert not ReadThrough.fits(Equivariant(space, 2, 3), I)
    assert not ReadThrough.fits(Equivariant(space, 1, 3, gated=True), I)
    assert not ReadThrough.fits(Equivariant(space, 1, 3, rank=2), I)
    for other in (
        spaces.biased_block(4, 2, 3, 2, 5),
        spaces.rope_block(4, 2, 4, 2, 5),
        spaces.residual_stack(1, 4, 2, 3, 2, 5, d_in=2, d_out=2),
    ):
        assert not ReadThrough.fits(Equivariant(other, 1, 3), Invariant(other, 3, 4))
