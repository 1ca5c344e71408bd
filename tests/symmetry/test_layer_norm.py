"""The LayerNorm group (appendix B), sampled."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import gen, seeds
from transformer_nfn.errors import GroupError
from transformer_nfn.functional import layer_norm
from transformer_nfn.symmetry import random_commuting

widths = st.integers(2, 24)


def rho(x):
    return x - x.mean(-1, keepdim=True)


def tau(x):
    return x.shape[-1] ** 0.5 * x / x.norm(dim=-1, keepdim=True)


def rows(D, seed):
    return torch.randn(16, D, generator=gen(seed), dtype=torch.float64)


@given(widths, seeds)
def test_drawn_matrices_commute_with_projection_and_scaling(D, seed):
    M, x = random_commuting(D, generator=gen(seed)), rows(D, seed)
    assert torch.allclose(rho(x @ M), rho(x) @ M, atol=1e-12)
    assert torch.allclose(tau(x @ M), tau(x) @ M, atol=1e-11)
    assert torch.allclose(layer_norm(x @ M), layer_norm(x) @ M, atol=1e-9)
    assert torch.allclose(M @ M.T, torch.eye(D, dtype=torch.float64), atol=1e-12)
    sums = torch.cat([M.sum(0), M.sum(1)])
    assert torch.allclose(sums, sums[0].sign().expand_as(sums), atol=1e-12)


def test_both_signs_are_drawn_and_can_be_chosen():
    drawn = {round(float(random_commuting(5, generator=gen(s)).sum(0)[0])) for s in range(20)}
    assert drawn == {1, -1}
    assert random_commuting(5, sign=-1).sum(0)[0] == pytest.approx(-1)
    assert random_commuting(1, sign=1).tolist() == [[1.0]]


@given(widths, seeds)
def test_other_orthogonal_matrices_do_not_commute(D, seed):
    M = torch.linalg.qr(torch.randn(D, D, generator=gen(seed), dtype=torch.float64)).Q
    x = rows(D, seed)
    spread = (M.sum(1) - M.sum(1).mean()).abs().max() + (M.sum(0) - M.sum(1).mean()).abs().max()
    assert (float(spread) > 1e-6) == (not torch.allclose(rho(x @ M), rho(x) @ M, atol=1e-9))


@given(widths, seeds, st.floats(-50, 50).filter(lambda s: abs(s) > 1e-3))
def test_scaled_permutations_pass_through_with_their_sign(D, seed, scale):
    """``LayerNorm(λ x P) = sign(λ) LayerNorm(x) P``."""
    x = rows(D, seed)
    P = torch.eye(D, dtype=torch.float64)[:, torch.randperm(D, generator=gen(seed))]
    expected = (1 if scale > 0 else -1) * layer_norm(x) @ P
    assert torch.allclose(layer_norm(scale * x @ P), expected, atol=1e-9)


def test_bad_input_is_explained():
    with pytest.raises(GroupError, match="D must be positive"):
        random_commuting(0)
    with pytest.raises(GroupError, match="sign must be"):
        random_commuting(3, sign=2)
