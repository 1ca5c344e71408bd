"""Group elements are recovered from rows that they moved."""

import torch

from transformer_nfn.spaces.actions.permutation import assign_in_groups
from transformer_nfn.spaces.actions.solvers import (
    Products,
    least_squares_matrix,
    least_squares_scales,
    nearest_complex,
    nearest_matrix,
    nearest_scales,
    polar_fixing_ones,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_change_of_basis_is_recovered() -> None:
    P, D = (torch.randn(4, 20, 5, generator=generator(i)).double() for i in (0, 1))
    P[1, :, 0] = 0  # a head of low rank
    P[2, :, 0], D[3, :, 1] = P[2, :, 0] / 1e4, D[3, :, 1] / 1e4
    G = torch.randn(4, 5, 5, generator=generator(2)).double()
    found = nearest_matrix((P, P @ G), (D, D @ torch.linalg.inv(G).mT))
    torch.testing.assert_close(found, G, rtol=1e-9, atol=1e-9)
    weights = (torch.ones(4).double(), torch.ones(4).double())
    found = least_squares_matrix((P, P @ G), (D, D @ torch.linalg.inv(G).mT), weights)
    torch.testing.assert_close(found, G, rtol=1e-6, atol=1e-6)
    other = nearest_matrix((P, P.roll(1, 1)), (D, D.roll(3, 1)))  # strangers: better than nothing
    products = Products.of((P, P.roll(1, 1)), (D, D.roll(3, 1)))
    still = torch.eye(5).double().expand(4, 5, 5)
    assert bool((products.objective(other) < products.objective(still)).all())


def test_scales_are_recovered() -> None:
    p, d = (torch.randn(6, 7, generator=generator(i)).double() for i in (0, 1))
    s = torch.tensor([-2.0, 0.5, 1.0, 3.0, -0.1, 7.0, -1.0]).double()
    found = nearest_scales((p, p * s), (d, d / s), positive=False)
    torch.testing.assert_close(found, s, rtol=1e-12, atol=1e-12)
    weights = (torch.ones(7), torch.ones(7))
    found = least_squares_scales((p, p * s), (d, d / s), weights)
    torch.testing.assert_close(found, s, rtol=1e-12, atol=1e-12)


def test_complex_scales_are_recovered() -> None:
    z = torch.polar(torch.linspace(0.1, 7, 7), torch.arange(7.0)).to(torch.complex128)
    P, D = (torch.randn(1, 9, 7, generator=generator(i), dtype=torch.complex128) for i in (3, 4))
    pairs = (P, P * z), (D, D / z.conj())
    for found in (nearest_complex(*pairs), least_squares_scales(*pairs, (torch.ones(1),) * 2)):
        torch.testing.assert_close(found[0], z, rtol=1e-12, atol=1e-12)


def test_procrustes_fixes_the_ones() -> None:
    T = polar_fixing_ones(torch.randn(6, 6, generator=generator()).double())
    torch.testing.assert_close(T @ T.mT, torch.eye(6).double())
    torch.testing.assert_close(torch.ones(6).double() @ T, torch.ones(6).double())


def test_groups_stay_together() -> None:
    alike = torch.randn(6, 6, generator=generator()).double()
    units, groups = assign_in_groups(alike, 3)
    assert units.sort().values.tolist() == list(range(6))
    assert (units.reshape(3, 2) // 2 == groups[:, None]).all()
    order = torch.tensor([3, 2, 4, 5, 1, 0])
    units, groups = assign_in_groups(torch.eye(6)[order], 3)
    assert units.tolist() == order.tolist()
    assert groups.tolist() == [1, 2, 0]
