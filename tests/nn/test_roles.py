"""Role layers of the ablation (`benchmarks/role_layers.py`): equivariant, for any size."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from whole_networks import MOVES, Moved, Net, draw, move, move_all, whole_network

from role_layers import RoleLayers
from transformer_nfn.testing import relative_error

pytestmark = pytest.mark.nightly
POSITIONS = draw(5, 6, seed=3)


def layers(seed: int = 0, **options: Any) -> RoleLayers:
    """With parameters that are all different from each other and from zero."""
    torch.manual_seed(seed)
    made = RoleLayers(**{"channels": 4, "classes": 3, "patch": 4, "tokens": 5, **options})
    for p in made.parameters():
        torch.nn.init.normal_(p, 0.1, 0.6)
    return made.double()


def moved_nodes(nodes: dict[str, Tensor], moved: Moved) -> dict[str, Tensor]:
    """Nodes where the units of a disguise stand."""
    found = dict(nodes)
    for role, index in moved.index.items():
        x = nodes[role] if nodes[role].ndim == 4 else nodes[role].unsqueeze(1)
        placed = torch.stack([x[:, i, at] for i, at in enumerate(index)], 1)
        found[role] = placed.reshape(nodes[role].shape)
    return found


def assert_equivariant(made: RoleLayers, network: Net, moved: Moved) -> None:
    before = made.nodes(network, POSITIONS)
    after = made.nodes(moved.network, moved.positions)
    for role, expected in moved_nodes(before, moved).items():
        assert relative_error(after[role], expected) < 1e-9, role
    error = relative_error(made(moved.network, moved.positions), made(network, POSITIONS))
    assert error < 1e-9


@pytest.mark.parametrize("patch", [4, 0])
@pytest.mark.parametrize("how", MOVES, ids=lambda how: how.__name__)
def test_nodes_move_as_the_units_do(how: Callable[[Net, Tensor], Moved], patch: int) -> None:
    network = whole_network(patch=patch)
    assert_equivariant(layers(patch=patch), network, move(how, network, POSITIONS))


def test_all_symmetries_together() -> None:
    network = whole_network(depth=3, heads=4)
    moved = move_all(network, POSITIONS)
    assert set(moved.index) == {"streams", "middle_streams", "neurons", "hidden", "heads"}
    assert_equivariant(layers(), network, moved)


def test_units_differ_so_that_moving_them_is_seen() -> None:
    nodes = layers().nodes(whole_network(), POSITIONS)
    for role, x in nodes.items():
        gaps = torch.cdist(x, x) + 1e9 * torch.eye(x.shape[-2], dtype=x.dtype)
        assert float(gaps.detach().min()) > 1e-4, role


@pytest.mark.parametrize("name", ["W_A", "W_B", "W_O", "W_V", "b_A", "b_B"])
def test_half_a_permutation_is_seen(name: str) -> None:
    network = whole_network()
    broken = deepcopy(network)
    block = broken["blocks"][1]
    block[name] = block[name].roll(1, -2 if name == "W_V" else -1)
    made = layers()
    assert relative_error(made(broken, POSITIONS), made(network, POSITIONS)) > 1e-4
