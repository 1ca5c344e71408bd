"""Invariant features: no group element changes them, in any space, and they are quick."""

import pytest
import torch
from whole_networks import Net, batch_of

from transformer_nfn import spaces
from transformer_nfn.errors import SpaceError
from transformer_nfn.models import Batch, InvariantMLP, invariant_features

BLOCK = spaces.attention_block(6, 2, 3, 2, 5)
SPACES = [
    BLOCK,
    spaces.attention_block(4, 3, 5, 6, 3),  # heads wider than the stream
    spaces.multi_head(6, 2, 3, 2),
    spaces.biased_block(6, 2, 3, 2, 5),
    spaces.grouped_query_block(6, 2, 2, 3, 2, 5),
    spaces.rope_block(6, 2, 4, 2, 5),
    spaces.swiglu_block(6, 2, 3, 2, 5),
    spaces.residual_stack(2, 6, 2, 3, 2, 5, d_in=4, d_out=3),
    spaces.stack(BLOCK, 2, between="permuted"),
]


@pytest.mark.parametrize("space", SPACES, ids=lambda s: s.name)
def test_no_group_element_changes_them(space: spaces.WeightSpace) -> None:
    draw = torch.Generator().manual_seed(0)
    weights = space.randn(6, generator=draw, dtype=torch.float64)
    moved = space.group.random(draw, batch=6).act(weights)
    one, two = (invariant_features(batch_of({"blocks": [w]}), space) for w in (weights, moved))
    assert one.dtype == torch.float64
    torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-8)


def test_different_networks_differ_in_them() -> None:
    features = invariant_features(batch_of({"blocks": [BLOCK.randn(20)]}), BLOCK)
    distances = torch.cdist(features, features) + torch.eye(20) * 1e9
    assert float(distances.min()) > 0.1


def test_singular_values_are_among_them() -> None:
    weights = BLOCK.randn(1, dtype=torch.float64)
    features = invariant_features(batch_of({"blocks": [weights]}), BLOCK)[0]
    w = {name: x[0, 0] for name, x in weights.items()}
    matrices = [w["W_A"], w["W_B"], w["W_A"] @ w["W_B"]]
    matrices += [w["W_Q"][h] @ w["W_K"][h].mT for h in range(2)]
    matrices += [w["W_V"][h] @ w["W_O"][h] for h in range(2)]
    for matrix in matrices:
        for value in torch.linalg.svdvals(matrix):
            if value > 1e-2:
                assert float((features - value).abs().min()) < 1e-6


def test_networks_come_out_as_they_would_alone() -> None:
    network: Net = {
        "embedding": torch.randn(600, 7),
        "blocks": [BLOCK.randn(600), BLOCK.randn(600)],
        "classifier": {"W": torch.randn(600, 6, 3), "b": torch.randn(600, 3)},
    }
    features = invariant_features(batch_of(network), BLOCK)
    at = slice(400, 401)
    one: Net = {
        "embedding": network["embedding"][at],
        "blocks": [{k: w[at] for k, w in block.items()} for block in network["blocks"]],
        "classifier": {k: w[at] for k, w in network["classifier"].items()},
    }
    torch.testing.assert_close(invariant_features(batch_of(one), BLOCK), features[at])


def test_dead_weights_give_finite_features() -> None:
    zero = {name: torch.zeros(2, 1, *shape) for name, shape in BLOCK.shapes.items()}
    assert bool(torch.isfinite(invariant_features(batch_of({"blocks": [zero]}), BLOCK)).all())


def test_what_is_no_network_is_refused() -> None:
    with pytest.raises(SpaceError, match="blocks, a classifier or an embedding, found none"):
        invariant_features(Batch.of({"head.W": torch.randn(2, 3)}), BLOCK)
    other = spaces.attention_block(8, 2, 3, 2, 5).randn(2)
    with pytest.raises(SpaceError, match="'W_Q' axis 'input': expected 6, found 8"):
        invariant_features(batch_of({"blocks": [BLOCK.randn(2), other]}), BLOCK)


def test_predictions_do_not_see_the_group() -> None:
    weights = BLOCK.randn(40)
    draw = torch.Generator().manual_seed(0)
    moved = BLOCK.group.random(draw, batch=40, dtype=torch.float32, max_condition=100).act(weights)
    before, after = (batch_of({"blocks": [w]}) for w in (weights, moved))
    model = InvariantMLP(epochs=20).fit(before, torch.rand(40))
    one, two = (model.predict(batch) for batch in (before, after))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-4)
