"""Evidence of common ancestry: p is uniform for strangers, valid in its tail, tiny for kin."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
import torch
from memory_model import MemoryModel, disguised, noisy
from scipy.stats import kstest

from calibration import fit_strangers
from tiny_families import TINY
from trained.networks import Size, fresh, write
from transformer_nfn.checkpoints import relate
from transformer_nfn.checkpoints.calibration import (
    calibrated_families,
    calibrated_test,
)
from transformer_nfn.checkpoints.evidence import chernoff_bound, exact_test
from transformer_nfn.checkpoints.sketches import Directions
from transformer_nfn.checkpoints.symmetries.attention import HeadOrder, HeadPermutation
from transformer_nfn.checkpoints.symmetries.neurons import NeuronPermutation
from transformer_nfn.functional.description import Attention, Block, Mlp, Stack, Transformer
from transformer_nfn.spaces.actions import Drawing

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "calibration.py"
HEADS, NEURONS, BLOCKS = 4, 30, 2


def described(position_bias: bool = False) -> Transformer:
    """Two blocks of four heads and thirty neurons."""
    attention = Attention(HEADS, HEADS, 8, 8, 1.0, position_bias=position_bias)
    block = Block(attention, Mlp(NEURONS, "gelu"), "pre")
    names = ("W_Q", "W_K", "W_V", "W_O", "W_A", "W_B")
    tensors = {f"{i}.{name}": (1,) for i in range(BLOCKS) for name in names}
    return Transformer("mine", 16, "rms", 1e-6, (Stack("", (block,) * BLOCKS, True),),
                       tensors=tensors)  # fmt: skip


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=1, keepdim=True)


def sketch(generator: np.random.Generator, pool: torch.Tensor) -> Directions:
    """A block whose units are drawn from a pool of features that all models share."""

    def units(n: int) -> torch.Tensor:
        noise = torch.tensor(generator.normal(size=(n, pool.shape[1])))
        return unit(pool[generator.integers(len(pool), size=n)] + 0.5 * noise)

    QK, VO = units(HEADS), units(HEADS)
    return Directions(
        {"": (QK, VO, QK)}, units(NEURONS), torch.zeros(0), (units(NEURONS),), {},
        (torch.zeros(0), torch.zeros(0)),
    )  # fmt: skip


def pair_of(seed: int) -> list[tuple[str, str, Directions, Directions]]:
    generator = np.random.default_rng(seed)
    pool = torch.tensor(generator.normal(size=(8, 16)))
    return [
        (str(i), str(i), sketch(generator, pool), sketch(generator, pool)) for i in range(BLOCKS)
    ]


def cosines(pairs: list[tuple[str, str, Directions, Directions]]) -> list[np.ndarray]:
    """Similarities of all units, of heads and neurons of each block."""
    out = []
    for _, _, a, b in pairs:
        out.append(
            sum((x @ y.T).numpy() for x, y in zip(a.heads[""][:2], b.heads[""][:2], strict=True))
        )
        out.append((a.read @ b.read.T + a.written[0] @ b.written[0].T).numpy())
    return out


def monte_carlo(tables: list[np.ndarray], draws: int) -> tuple[np.ndarray, float]:
    """The statistic under random orders of units within fours, and as observed."""
    generator = np.random.default_rng(1)
    total, observed = np.zeros(draws), 0.0
    for C in tables:
        n = len(C)
        fours = [range(i, min(i + 4, n)) for i in range(0, n, 4)]
        drawn = [np.concatenate([generator.permutation(f) for f in fours]) for _ in range(draws)]
        sums = C[np.arange(n), np.stack(drawn)].sum(1)
        orders = [[C[list(f), p].sum() for p in permutations(f)] for f in fours]
        mean, deviation = sum(map(np.mean, orders)), math.sqrt(sum(map(np.var, orders)))
        total += (sums - mean) / deviation
        observed += (np.trace(C) - mean) / deviation
    return total, observed


@pytest.mark.parametrize("seed", range(2))
def test_p_agrees_with_ten_thousand_permutations(seed):
    pairs = pair_of(seed)
    found = exact_test(pairs, described())
    drawn, observed = monte_carlo(cosines(pairs), 10_000)
    assert found.total.z == pytest.approx(observed / math.sqrt(2 * BLOCKS), abs=1e-9)
    p = np.mean(drawn >= observed)
    assert 10**found.total.log10_p == pytest.approx(p, abs=0.005 + 4 * math.sqrt(p * (1 - p) / 999))


@pytest.mark.parametrize(
    ("pairs", "position_bias"),
    [
        (200, False),
        *(pytest.param(1000, bias, marks=pytest.mark.nightly) for bias in (False, True)),
    ],
)
def test_p_is_uniform_for_strangers_that_share_features(pairs, position_bias):
    about = described(position_bias)
    tests = [exact_test(pair_of(seed), about) for seed in range(pairs)]
    assert kstest([10**t.total.log10_p for t in tests], "uniform").pvalue > 0.01
    assert kstest([10 ** t.blocks["1"].log10_p for t in tests], "uniform").pvalue > 0.01


def test_the_bound_holds_and_is_sharp_at_the_end():
    table = torch.tensor(np.random.default_rng(0).gamma(0.3, size=(4, 12))).sort(1).values
    sums = np.array([sum(values) for values in product(*table.tolist())])
    for shift in range(12):
        seen = table.roll(shift, 1)
        p = np.mean(sums >= float(seen[:, 0].sum()) - 1e-12)
        assert chernoff_bound(seen) >= math.log(p) - 1e-9
    largest = chernoff_bound(table.flip(1))
    assert largest == pytest.approx(-4 * math.log(12), abs=1e-9)


@pytest.mark.parametrize("family", TINY)
def test_a_model_and_its_fine_tune_are_no_strangers(tiny, family):
    A = tiny(family)
    relation = relate(A, noisy(A, 0.1), prove=False)
    assert relation.exact.total.log10_p < -20
    assert all(block.log10_p < -5 for block in relation.exact.blocks.values())
    assert relation.as_json()["exact_test"]["null"] in str(relation)
    json.dumps(relation.as_json())


def test_no_p_value_is_shown_beside_a_proof(tiny):
    """Permuted units make p uniform, which reads as if a proved copy were a stranger."""
    A = tiny("gpt2")
    relation = relate(A, disguised(A, 3))
    assert relation.verdict == "same"
    for text in (str(relation), relation._repr_html_()):
        assert "exact test" not in text
        assert "calibrated test" not in text
    assert relation.as_json()["exact_test"] is not None


def shuffled(model: MemoryModel, seed: int) -> MemoryModel:
    """The same model with its heads and neurons in another order."""
    how = Drawing(torch.Generator().manual_seed(seed), 10.0)
    for symmetry in (HeadPermutation(), NeuronPermutation()):
        for site in symmetry.sites(model.description):
            weights = site.pick(model.tensors)
            moved = symmetry.act(site, weights, symmetry.draw(site, weights, how))
            model = model.changed(**site.put(moved))
    return model


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5"])
def test_p_is_uniform_for_the_orders_of_units(tiny, family):
    A, B = tiny(family), noisy(tiny(family), 0.1)
    found = [relate(A, shuffled(B, seed), prove=False).exact.total.log10_p for seed in range(40)]
    assert kstest([10**log10_p for log10_p in found], "uniform").pvalue > 0.01


def test_dropped_and_moved_blocks_are_tested_against_their_originals(tiny):
    A = tiny("gpt2")
    moved = {
        name.replace(old, new, 1): w
        for old, new in (("0.", "2."), ("1.", "0."), ("2.", "1."))
        for name, w in noisy(A, 0.1).tensors.items()
        if name.startswith(old)
    }
    exact = relate(A, A.changed(**moved), prove=False).exact
    assert exact.partners == {"0": "2", "1": "0", "2": "1"}
    assert exact.total.log10_p < -20


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "qwen3"])
def test_a_disguise_defeats_it_only_by_the_order_of_units(tiny, family, monkeypatch):
    A = tiny(family)
    assert relate(A, disguised(A, 3), prove=False).exact.total.log10_p > -4

    def unmoved(self, site, weights, how):
        return torch.arange(site.shape("W_B")[0])

    def unmoved_heads(self, site, weights, how):
        return HeadOrder(*(torch.arange(n) for n in (site.detail.heads, site.detail.groups)))

    monkeypatch.setattr(NeuronPermutation, "draw", unmoved)
    monkeypatch.setattr(HeadPermutation, "draw", unmoved_heads)
    assert relate(A, disguised(A, 3), prove=False).exact.total.log10_p < -20


# Calibrated test


def scores_of(sizes, pairs, seed):
    """Scores of strangers that fall with width and depth."""
    generator = np.random.default_rng(seed)
    return [
        ((w, d), w**-0.5 * d**-0.4 * math.exp(0.2 * generator.normal()))
        for w, d in sizes
        for _ in range(pairs)
    ]


def test_of_held_out_strangers_one_percent_are_rejected():
    sizes = [(32, 2), (32, 4), (64, 2), (64, 4), (128, 3)]
    p = {}
    for left_out in (None, (64, 4)):
        fitted = [size for size in sizes if size != left_out]
        strangers = fit_strangers(scores_of(fitted, 400, 0))
        p[left_out] = [strangers.p_value(*pair) for pair in scores_of(sizes, 4000, 1)]
    assert 0.005 < np.mean(np.array(p[None]) <= 0.01) < 0.015
    assert np.mean(np.array(p[64, 4]) <= 0.01) < 0.015


def test_p_counts_strangers_of_the_same_size():
    scores = [((64, 2), x) for x in np.linspace(0, 0.1, 99)]
    strangers = fit_strangers(scores)
    for score in (-1.0, 0.0333, 0.0999, 0.2):
        higher = sum(x >= score for _, x in scores)
        assert strangers.p_value((64, 2), score) == pytest.approx((1 + higher) / 100)
    assert strangers.covers((64, 2))
    assert not strangers.covers((128, 2))
    assert strangers.p_value((128, 2), 0.05) == strangers.p_value((64, 2), 0.05)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_a_disguised_fine_tune_scores_above_all_strangers(tiny, family):
    A, other = tiny(family), tiny(family, seed=1)
    tuned, unrelated = (relate(A, disguised(B, 2), prove=False) for B in (noisy(A, 0.1), other))
    strangers = calibrated_families()[family]
    assert tuned.calibrated.p == 1 / (1 + len(strangers.residuals)) <= 0.01
    assert tuned.calibrated.extrapolated is None
    assert "none of" in str(tuned)
    assert unrelated.calibrated.p > 0.01
    assert unrelated.as_json()["calibrated_test"]["family"] == family


def test_models_outside_the_calibrated_range_are_labelled(tiny):
    A = tiny("t5")
    assert "no strangers of family t5" in str(relate(A, noisy(A, 0.1), prove=False))
    about = replace(tiny("gpt2").description, width=4096)
    assert "width 4096" in str(calibrated_test(about, 0.9))


@pytest.mark.nightly
def test_the_benchmark_scores_strangers_and_goes_on_where_it_was(tmp_path):
    size = Size("gpt2", 32, 2)
    for steps, seeds in ((10, 8), (20, 4)):
        for seed in range(seeds):
            folder = tmp_path / str(size) / str(steps) / f"news-{seed}" / "base"
            write(fresh(size, 100 * steps + seed), size, folder)
    tuned = tmp_path / str(size) / "10" / "news-0" / "fine-tuned"
    write({n: 1.01 * w for n, w in fresh(size, 1000).items()}, size, tuned)
    kept = tmp_path / "pairs.jsonl"
    command = [sys.executable, str(BENCHMARK), "--models", str(tmp_path), "--pairs", str(kept)]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "strangers, held-out seeds" in first.stdout
    assert len(kept.read_text().splitlines()) == 6 + 6 + 1 + 1 + 1
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert again.stdout == first.stdout
    assert len(kept.read_text().splitlines()) == 15
