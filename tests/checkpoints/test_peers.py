"""Published measures of ancestry, as the benchmark of disguises runs them."""

import pytest
import torch

from disguise_bench import permute
from trained import networks
from trained.families import MIXTURE, upcycled
from trained.networks import Size, fresh
from trained.peers import PEERS
from transformer_nfn.checkpoints.families import open_model
from transformer_nfn.functional.transformer import transformer

IDS = torch.arange(24 * 16).reshape(24, 16) % 61
SIZES = [Size(kind, 32, 2, vocabulary=64) for kind in ("gpt2", "llama", "bert")]
SAME = {"AWM": 1.0, "HuRef": 1.0, "GhostSpec": 0.0, "REEF": 1.0}
"""What each gives for a model and itself."""


@pytest.fixture(scope="module", params=SIZES, ids=str)
def folders(request, tmp_path_factory):
    """A model with a noisy copy, an unrelated one, and the copy permuted."""
    size, root = request.param, tmp_path_factory.mktemp("peers")
    # Weights large enough that hidden states depend on what the blocks do.
    models = {n: {k: w * 5 for k, w in fresh(size, s).items()} for n, s in (("A", 0), ("C", 1))}
    noise = fresh(size, 2)
    models["B"] = {n: w + noise[n] if w.ndim > 1 else w for n, w in models["A"].items()}
    for name, weights in models.items():
        networks.write({n: w.double() for n, w in weights.items()}, size, root / name)
    with open_model(root / "B") as model:
        (root / "permuted").mkdir()
        permute(model, root / "permuted", torch.Generator().manual_seed(3))
    return root


def score(folders, method, a, b):
    with open_model(folders / a) as A, open_model(folders / b) as B:
        return PEERS[method](A, B, IDS)


def test_a_permuted_model_has_the_same_function(folders):
    with open_model(folders / "B") as B, open_model(folders / "permuted") as P:
        before, after = (transformer(m.description, m, IDS, dtype=torch.float64) for m in (B, P))
        assert not torch.equal(B["token"], P["token"])
    torch.testing.assert_close(before, after, rtol=1e-9, atol=1e-9)


def test_an_upcycled_mixture_scores_above_an_unrelated_model(tmp_path):
    size = SIZES[1]
    dense = {seed: fresh(size, seed) for seed in (0, 1)}
    for seed, weights in dense.items():
        networks.write(weights, size, tmp_path / str(seed))
    networks.write(upcycled(dense[0], size), size, tmp_path / "mixture", MIXTURE)
    for method in ("AWM", "GhostSpec", "REEF"):
        related, unrelated = (score(tmp_path, method, str(s), "mixture") for s in (0, 1))
        assert related > unrelated, method
    assert score(tmp_path, "CSU", "0", "mixture") is None


@pytest.mark.parametrize("method", [m for m in PEERS if m != "MATCH"])
def test_related_models_score_above_unrelated_ones(folders, method):
    assert score(folders, method, "A", "B") > score(folders, method, "A", "C")


def test_match_needs_gates(folders):
    related, unrelated = (score(folders, "MATCH", "A", name) for name in ("permuted", "C"))
    if "llama" in (folders / "A" / "config.json").read_text():
        assert related > 10 > unrelated
    else:
        assert related is None


@pytest.mark.parametrize("method", SAME)
def test_a_model_and_itself(folders, method):
    assert score(folders, method, "A", "A") == pytest.approx(SAME[method], abs=1e-6)


@pytest.mark.parametrize("method", SAME)
def test_no_order_of_stream_heads_and_neurons_changes_a_score(folders, method):
    plain, moved = (score(folders, method, "A", name) for name in ("B", "permuted"))
    assert plain == pytest.approx(moved, rel=1e-4, abs=1e-6)
