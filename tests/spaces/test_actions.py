"""Every action keeps one contract: a group that acts, is solved for, and has representatives."""

import pytest
import torch
from torch import Tensor

from cases import gen
from transformer_nfn.errors import SpaceError
from transformer_nfn.spaces import Axis
from transformer_nfn.spaces.actions import ACTIONS, Action, ComplexScale, Drawing, Place

SIZE, SITES = 6, (2, 3)
every_action = pytest.mark.parametrize("action", ACTIONS.values(), ids=map("-".join, ACTIONS))
matrices = pytest.mark.parametrize(
    "action",
    [a for a in ACTIONS.values() if a.rebases],
    ids=["-".join(k) for k, a in ACTIONS.items() if a.rebases],
)


def rows(seed: int, count: int = 7) -> Tensor:
    return torch.randn(*SITES, count, SIZE, generator=gen(seed), dtype=torch.float64)


def drawn(action: Action, seed: int) -> Tensor:
    return action.draw(SIZE, SITES, Drawing(gen(seed), max_condition=50.0))


def matrix(action: Action, part: Tensor) -> Tensor:
    """The element as matrices ``[*sites, n, n]``, the oracle that rows are multiplied by."""
    eye = torch.eye(SIZE, dtype=torch.float64).expand(*SITES, SIZE, SIZE)
    if action.rebases:
        return part
    return eye.gather(-1, part.unsqueeze(-2).expand_as(eye)) if action.permutes else eye


def moved(action: Action, x: Tensor, part: Tensor, *, dual: bool = False) -> Tensor:
    if dual and action.rebases:
        part = action.invert(part)
    return action.act(x, part, Place(3, (0, 1)), dual=dual and action.rebases)


def belongs(action: Action, part: Tensor) -> bool:
    """Whether a part is an element of the group, by its definition."""
    if action.permutes:
        return torch.equal(part.sort(-1).values, torch.arange(SIZE).expand(part.shape))
    if not action.rebases:
        return part.shape == (*SITES, 0)
    scales = part.diagonal(dim1=-2, dim2=-1)
    within = {
        "scale": torch.equal(part, torch.diag_embed(scales)),
        "positive": torch.equal(part, torch.diag_embed(scales.abs())),
        "sign": torch.equal(part, torch.diag_embed(scales.sign())),
        "orthogonal": torch.allclose(part @ part.mT, torch.eye(SIZE).double(), atol=1e-9),
    }
    if isinstance(action, ComplexScale):
        turn = action.matrix(1j * torch.arange(1.0, SIZE // 2 + 1, dtype=torch.float64))
        within["linear"] = torch.allclose(part @ turn, turn @ part, rtol=1e-6, atol=1e-12)
    return within.get(action.word, True) and float(torch.linalg.cond(part).max()) < 1e12


@every_action
def test_acts_as_a_matrix_from_the_right_and_its_inverse_transposed_on_a_dual_axis(
    action: Action,
) -> None:
    g, x = drawn(action, 0), rows(0)
    G = matrix(action, g)
    assert torch.allclose(moved(action, x, g), x @ G, atol=1e-12)
    assert torch.allclose(moved(action, x, g, dual=True), x @ torch.linalg.inv(G).mT, atol=1e-9)


@every_action
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 3, 2), (3, 2, 0, 1), (2, 3, 1, 0)])
def test_the_axes_of_a_tensor_may_stand_in_any_order(
    action: Action, order: tuple[int, ...]
) -> None:
    g, x = drawn(action, 1), rows(1)
    place = Place(order.index(3), (order.index(0), order.index(1)))
    found = action.act(x.permute(order), g, place)
    assert torch.allclose(found, moved(action, x, g).permute(order), atol=1e-12)


@every_action
def test_composes_inverts_and_knows_its_elements(action: Action) -> None:
    g, h, x = drawn(action, 2), drawn(action, 3), rows(2)
    both = action.compose(g, h)
    assert torch.allclose(moved(action, x, both), moved(action, moved(action, x, g), h), atol=1e-9)
    back = action.invert(g)
    assert torch.allclose(moved(action, moved(action, x, g), back), x, atol=1e-9)
    one = action.identity(SIZE, SITES, torch.float64, None)
    assert torch.equal(moved(action, x, one), x)
    for part in (g, both, back, one):
        assert belongs(action, part)


@every_action
def test_the_pieces_of_plain_and_dual_rows_multiply_to_invariants(action: Action) -> None:
    g, x, y = drawn(action, 4), rows(4), rows(5)

    def products(a: Tensor, b: Tensor) -> Tensor:
        left, right = action.vectors(a, dual=False), action.vectors(b, dual=True)
        return torch.einsum("stxbk,styck->stxybc", left, right).diagonal(dim1=-2, dim2=-1)

    if action.rebases:
        after = products(moved(action, x, g), moved(action, y, g, dual=True))
        assert torch.allclose(after, products(x, y), atol=1e-9)
        total = products(x, y).sum(-1)
        assert torch.allclose(total.real if total.is_complex() else total, x @ y.mT, atol=1e-12)
    assert torch.equal(action.join(action.split(x, 3), 3), x)


@every_action
def test_solves_for_the_element(action: Action) -> None:
    g, p, d = drawn(action, 6), rows(6), rows(7)
    solved = action.solve((p, moved(action, p, g)), (d, moved(action, d, g, dual=True)), unit=1e-15)
    assert solved is not None
    assert torch.allclose(solved.part.double(), g.double(), atol=1e-9)
    assert torch.allclose(solved.inverse.double(), action.invert(g).double(), atol=1e-9)


@every_action
def test_balances_an_orbit_to_one_representative(action: Action) -> None:
    g, p, d = drawn(action, 8), rows(8), rows(9, 9)
    first = action.balance(p, d)
    second = action.balance(moved(action, p, g), moved(action, d, g, dual=True))
    for x, y in zip(first, second, strict=True):
        assert torch.allclose(x, y, atol=1e-8)
    if action.rebases:
        assert torch.allclose(first[0] @ first[1].mT, p @ d.mT, atol=1e-9)


@matrices
@pytest.mark.parametrize("condition", [1.0, 10.0, 1e6])
def test_a_condition_number_can_be_prescribed(action: Action, condition: float) -> None:
    G = action.draw(SIZE, SITES, Drawing(gen(0), condition=condition))
    assert belongs(action, G)
    found = torch.linalg.cond(G)
    expected = torch.full_like(found, 1.0 if action.self_dual else condition)
    assert torch.allclose(found, expected, rtol=1e-6)


FUNCTIONS = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": torch.nn.functional.gelu,
    "leaky relu": torch.nn.functional.leaky_relu,
}


@every_action
@pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_said_to_commute_do(action: Action, fn) -> None:
    x = rows(10)
    apart = 0.0
    for seed in range(4):
        g = drawn(action, seed)
        apart = max(apart, float((fn(moved(action, x, g)) - moved(action, fn(x), g)).abs().max()))
    assert action.commutes_with(fn) == (apart < 1e-9)


def test_unknown_words_are_refused():
    with pytest.raises(SpaceError, match="unknown kind 'spin'"):
        Axis("x", 3, "spin")
    with pytest.raises(SpaceError, match="perm axis 'x' has unknown form 'complex'"):
        Axis("x", 4, "perm", form="complex")
