"""The layers contain all equivariant maps of the paper's form, solved for numerically.

A map of the paper's form is a matrix L on the entries of all tensors, all per-head products and
a constant. Each of those transforms linearly among itself, ``φ(gU) = ρ(g) φ(U)``, so E commutes
with the group exactly when ``L ρ(g) = g L`` for all g: a linear system, block by block, whose
null space is the space of all equivariant maps. Here it is solved with sampled g, the ρ(g) being
measured from the action and never taken from the layers.
"""

import pytest
import torch
from torch import Tensor

from transformer_nfn import spaces
from transformer_nfn.nn import Equivariant, Invariant
from transformer_nfn.spaces import Weights, WeightSpace
from transformer_nfn.symmetry import Element, product

SAMPLES = 16  # enough for the permutations to generate their groups together


def features(space: WeightSpace, weights: Weights) -> dict[str, Tensor]:
    """What the paper's form reads, flat: tensors, per-head products (eq. 17), a constant."""
    silent = {shift.tensor for shift in space.shifts}
    out = {n: x.flatten(1) for n, x in weights.items() if n not in silent}
    out |= {p.name: product(space, weights, p).flatten(1) for p in space.products}
    return out | {"1": torch.ones(next(iter(weights.values())).shape[0], 1, dtype=torch.float64)}


def representation(space: WeightSpace, g: Element) -> dict[str, Tensor]:
    """For each of `features` the matrix ρ(g) with φ(gU) = ρ(g) φ(U), by least squares."""
    size = max(x.shape[1] for x in features(space, space.randn(1, dtype=torch.float64)).values())
    weights = space.randn(size + 10, dtype=torch.float64)
    before, after = features(space, weights), features(space, g.act(weights))
    out = {}
    for name, x in before.items():
        rho = torch.linalg.lstsq(x, after[name]).solution.T
        assert (x @ rho.T - after[name]).abs().max() < 1e-8
        out[name] = rho
    return out


def action(space: WeightSpace, g: Element) -> dict[str, Tensor]:
    """The matrix by which g acts on each tensor (without shifts)."""
    largest = max(torch.Size(s).numel() for s in space.shapes.values())
    unit = {
        n: torch.eye(largest, dtype=torch.float64)[:, : torch.Size(s).numel()].reshape(-1, 1, *s)
        for n, s in space.shapes.items()
    }
    moved = g.linear_part().act(unit)
    return {n: moved[n].flatten(1)[: torch.Size(s).numel()].T for n, s in space.shapes.items()}


def dimension(out: list[Tensor], inside: list[Tensor]) -> int:
    """dim {L : L ρ(g) = σ(g) L for all sampled g}."""
    rows = []
    for sigma, rho in zip(out, inside, strict=True):
        one = torch.eye(sigma.shape[0], dtype=torch.float64)
        two = torch.eye(rho.shape[0], dtype=torch.float64)
        rows.append(torch.kron(one, rho.T.contiguous()) - torch.kron(sigma.contiguous(), two))
    system = torch.cat(rows)
    values = torch.linalg.svdvals(system)
    return int((values < 1e-7 * max(1.0, float(values[0]))).sum()) + max(
        0, system.shape[1] - len(values)
    )


def all_maps(space: WeightSpace) -> tuple[int, int]:
    """How many equivariant maps there are, and how many invariant ones."""
    torch.manual_seed(0)
    group = [space.group.random(max_condition=20).linear_part() for _ in range(SAMPLES)]
    inside = [representation(space, g) for g in group]
    outside = [action(space, g) for g in group]
    trivial = [torch.ones(1, 1, dtype=torch.float64)] * SAMPLES
    equivariant = sum(
        dimension([o[t] for o in outside], [i[f] for i in inside])
        for t in space.tensors
        for f in inside[0]
    )
    invariant = sum(dimension(trivial, [i[f] for i in inside]) for f in inside[0])
    return equivariant, invariant


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("D", "h", "Dk", "Dv", "DA"),
    [(2, 2, 1, 2, 2), (2, 1, 2, 1, 3), pytest.param(3, 2, 1, 1, 3, marks=pytest.mark.nightly)],
)
def test_the_papers_block_has_all_maps(D: int, h: int, Dk: int, Dv: int, DA: int) -> None:
    space = spaces.attention_block(D, h, Dk, Dv, DA)
    equivariant, invariant = all_maps(space)
    assert equivariant == 2 * D**3 + 12 * D**2 + 15 * D + 12 + 2 * D + 2
    assert invariant == D**2 + 3 * D + 2 + 1
    assert equivariant == count(Equivariant(space, 1, 1))
    assert invariant == count(Invariant(space, 1, 1))


def matched(axis: spaces.Axis, free: int = 2) -> WeightSpace:
    """One axis under test, carried plain by two tensors and dual by one."""
    axes = [spaces.Axis.free("f", free), spaces.Axis.perm("p", 3), axis]
    tensors = {"X": f"p f {axis.name}", "x": f"p {axis.name}", "Y": f"p {axis.name}* f", "z": "p"}
    return WeightSpace.build(f"{axis.kind} {axis.form}", axes, tensors)


@pytest.mark.parametrize(
    "space",
    [
        spaces.multi_head(2, 2, 1, 2),
        spaces.biased_block(2, 2, 1, 1, 2),
        spaces.grouped_query_block(2, 2, 2, 1, 1, 2),
        spaces.rope_block(2, 2, 4, 1, 2),
        spaces.swiglu_block(2, 2, 1, 1, 2),
        pytest.param(
            spaces.residual_stack(1, 3, 2, 1, 1, 2, d_in=2, d_out=1), marks=pytest.mark.nightly
        ),
        pytest.param(
            spaces.stack(spaces.attention_block(2, 2, 1, 1, 2), 2), marks=pytest.mark.nightly
        ),
        matched(spaces.Axis.scale("s", 2, of="p")),
        matched(spaces.Axis.positive("s", 2, of="p")),
        matched(spaces.Axis.scale("s", 2), free=1),
        matched(spaces.Axis.linear("s", 2, of="p", form="complex_halves")),
        matched(spaces.Axis.linear("s", 4, of="p", form="complex_halves"), free=1),
    ],
    ids=lambda space: space.name,
)
def test_spaces_without_self_products_have_all_maps(space: WeightSpace) -> None:
    equivariant, invariant = all_maps(space)
    assert count(Equivariant(space, 1, 1)) == equivariant
    assert count(Invariant(space, 1, 1)) == invariant


@pytest.mark.parametrize("sizes", [(1, 2, 1, 1, 2), (2, 1, 1, 1, 1)])
def test_axes_of_size_one_make_levels_coincide(sizes: tuple[int, ...]) -> None:
    # With one neuron "the sum over neurons" and "this neuron" are the same number, so the layer
    # has more parameters than there are maps; it still has all the maps.
    D, h, Dk, Dv, DA = sizes
    space = spaces.attention_block(D, h, Dk, Dv, DA)
    equivariant, invariant = all_maps(space)
    layer = Equivariant(space, 1, 1)
    assert equivariant < count(layer)
    assert jacobian_rank(space, layer) == equivariant
    assert invariant == count(Invariant(space, 1, 1))


def test_no_parameter_is_redundant() -> None:
    for space in (spaces.attention_block(2, 2, 2, 2, 2), spaces.attention_block(3, 2, 1, 2, 2)):
        layer = Equivariant(space, 1, 1)
        assert jacobian_rank(space, layer) == count(layer)


def jacobian_rank(space: WeightSpace, layer: Equivariant) -> int:
    """How many independent functions the parameters span, on random weights."""
    layer = layer.double()
    parameters = dict(layer.named_parameters())
    batch = 32  # more than the D² + 3D + 3 numbers that meet at the level ∅
    weights = space.randn(batch, dtype=torch.float64)

    def outputs(p: dict[str, Tensor]) -> Tensor:
        out = torch.func.functional_call(layer, p, (weights,))
        return torch.cat([x.flatten() for x in out.values()])

    jacobian = torch.func.jacrev(outputs)(parameters)
    matrix = torch.cat([j.flatten(1) for j in jacobian.values()], 1)
    return int(torch.linalg.matrix_rank(matrix, rtol=1e-9))
