"""Every predictor keeps what `check_predictor` asserts, ours and those of users alike."""

import own_models
import pytest
import torch
from own_models import EVERY
from sklearn.linear_model import Ridge
from torch import nn

from transformer_nfn.models import Tabular
from transformer_nfn.models.predictor import BUILT, names
from transformer_nfn.testing import check_predictor

SMALL = {
    "whole_network": {"probes": 6, "rank": 4, "hidden": 8},
    "transformer_nfn": {"channels": [2]},
    "transformer_nfn_gated": {"channels": [2]},
    "probegen": {"probes": 4, "latent": 4, "channels": 2, "hidden": 8, "layers": 2},
    "hidden_probe": {"probes": 4, "codes": 4, "hidden": 8, "heads": 2, "neurons": 8},
    "neural_graph": {"hidden": 8, "edges": 4, "layers": 2},
}


@pytest.mark.parametrize("name", names(BUILT))
def test_every_predictor_keeps_it(name: str) -> None:
    check_predictor(name, options=SMALL.get(name))


@pytest.mark.parametrize("own", EVERY, ids=lambda own: own.__name__)
def test_classes_of_users_keep_it(own: type[nn.Module]) -> None:
    check_predictor(own)


@pytest.mark.nightly
def test_an_estimator_keeps_it() -> None:
    check_predictor(Tabular("statistics", Ridge(10.0)))


class LooksAtTheBatch(own_models.Prepared):
    """Its answer for a network depends on the others."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(batch - batch.mean(0))


class Claims(own_models.Prepared):
    """Says that it is invariant, and is not."""

    invariant = True


class Forgets(own_models.Prepared):
    """Keeps a number that no file holds."""

    def __init__(self, layout: dict[str, tuple[int, ...]]) -> None:
        super().__init__(layout)
        self.seen = 0.0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1.0
        return super().forward(batch) + self.seen


@pytest.mark.parametrize(
    ("own", "what"),
    [
        (LooksAtTheBatch, "the same networks alone"),
        (Claims, "moved networks predicted alike"),
        (Forgets, "the same predictions after it was saved"),
    ],
)
def test_what_does_not_keep_it_is_named(own: type[nn.Module], what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        check_predictor(own)
