"""Invariants of whole networks: no symmetry changes them, sizes do not change their number."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from whole_networks import MOVES, Moved, Net, batch_of, draw, move, move_all, whole_network

from transformer_nfn.errors import SpaceError
from transformer_nfn.functional import small_transformer
from transformer_nfn.models.whole_network import whole_invariants
from transformer_nfn.testing import relative_error

POSITIONS = draw(5, 6, seed=3)


def invariants(network: Net, positions: Tensor | None = None) -> Tensor:
    return whole_invariants(batch_of(network), positions)


def differ(one: Tensor, two: Tensor) -> float:
    """The largest difference of a number, relative to its size or to 1."""
    return float(((one - two).abs() / one.abs().clamp(min=1)).max())


@pytest.mark.parametrize("patch", [4, 0])
@pytest.mark.parametrize("how", MOVES, ids=lambda how: how.__name__)
def test_no_symmetry_changes_them(how: Callable[[Net, Tensor], Moved], patch: int) -> None:
    network = whole_network(patch=patch)
    moved = move(how, network, POSITIONS)
    one = invariants(network, POSITIONS)
    assert one.dtype == torch.float64
    assert differ(one, invariants(*moved)) < 1e-9


def test_nor_all_of_them_together() -> None:
    network = whole_network(depth=3, heads=4)
    moved = move_all(network, POSITIONS)
    one = invariants(network, POSITIONS)
    assert differ(one, invariants(*moved)) < 1e-9


@pytest.mark.parametrize("how", MOVES, ids=lambda how: how.__name__)
def test_the_symmetries_tried_leave_the_function(how: Callable[[Net, Tensor], Moved]) -> None:
    """Nearly, where LayerNorm's ε sees a scale."""
    network = whole_network(v=3)
    moved = move(how, network, POSITIONS)
    inputs = draw(5, 4, seed=4)
    before, after = (_logits(*x, inputs) for x in [(network, POSITIONS), moved])
    assert relative_error(after, before) < 3e-4


@pytest.mark.parametrize(
    "name", ["W_A", "W_B", "W_O", "W_Q", "W_K", "W_V", "b_A", "b_B", "W_1", "W_2", "b_1"]
)
def test_half_a_permutation_changes_them(name: str) -> None:
    network = whole_network()
    broken = deepcopy(network)
    part = broken["classifier"] if name[2] in "12" else broken["blocks"][1]
    axis = {"W_1": 1, "W_2": 1, "b_1": 1}.get(name, -1)
    if name in ("W_Q", "W_K", "W_V"):
        axis = -2
    part[name] = part[name].roll(1, axis)
    one, two = (invariants(x, POSITIONS) for x in (network, broken))
    assert differ(one, two) > 1e-3


def test_first_stream_without_its_positions_changes_them() -> None:
    network = whole_network()
    moved = move(MOVES[2], network, POSITIONS)
    one, two = invariants(network, POSITIONS), invariants(moved.network, POSITIONS)
    assert differ(one, two) > 1e-3
    alone = invariants(network), invariants(moved.network)
    assert differ(*alone) < 1e-9


def test_as_many_numbers_for_any_width_heads_and_depth() -> None:
    count = invariants(whole_network(), POSITIONS).shape[1]
    for sizes in (
        dict(D=8, heads=1, d=2),
        dict(heads=4, d=1, F=9),
        dict(depth=1),
        dict(depth=4, hidden=7, classes=5, patch=9),
    ):
        network: Any = whole_network(**sizes)
        features = invariants(network, draw(4, sizes.get("D", 6), seed=3))
        assert features.shape == (3, count)
        assert bool(features.isfinite().all())


def test_networks_come_out_as_they_would_alone() -> None:
    network = whole_network(n=260)
    features = invariants(network, POSITIONS)
    one = {
        "embedding": {k: w[257:258] for k, w in network["embedding"].items()},
        "blocks": [{k: w[257:258] for k, w in block.items()} for block in network["blocks"]],
        "classifier": {k: w[257:258] for k, w in network["classifier"].items()},
    }
    assert differ(features[257:258], invariants(one, POSITIONS)) < 1e-9
    distances = torch.cdist(features, features) + torch.eye(260) * 1e9
    assert float(distances.min()) > 0.1


def test_dead_weights_give_finite_features() -> None:
    network = whole_network()
    zero = batch_of(network).map(torch.zeros_like)
    assert bool(whole_invariants(zero, POSITIONS).isfinite().all())


def test_what_does_not_fit_together_is_refused() -> None:
    network = whole_network()
    with pytest.raises(SpaceError, match=r"axis D of tensor 'classifier\.W_1' must have 6"):
        invariants({**network, "classifier": whole_network(D=5)["classifier"]})
    with pytest.raises(SpaceError, match=r"'classifier\.W_1' is missing"):
        invariants({"blocks": network["blocks"]})
    short = {k: w for k, w in network["blocks"][1].items() if k != "b_B"}
    with pytest.raises(SpaceError, match=r"'blocks\.1\.b_B' is missing"):
        invariants({**network, "blocks": [network["blocks"][0], short]})
    with pytest.raises(SpaceError, match="positions must be"):
        invariants(network, torch.zeros(5, 7))


def _logits(network: Net, positions: Tensor, inputs: Tensor) -> Tensor:
    """Logits of the reference forward."""
    architecture = small_transformer(
        5, 3, 4, d_model=6, heads=2, d_ff=5, blocks=2, positions=positions
    )
    out: Tensor = architecture.forward(batch_of(network).views, inputs)
    return out
