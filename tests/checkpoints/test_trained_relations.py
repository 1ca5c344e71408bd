"""Trained models score above unrelated ones if they are related, in every disguise."""

import argparse
import inspect
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from trained import networks
from trained.networks import BLOCK, Size, fresh
from trained.training import Course, train
from transformer_nfn.checkpoints import relate
from transformer_nfn.checkpoints.disguises import disguise
from transformer_nfn.checkpoints.families import open_model

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "relations.py"
FIRST, MORE = Course("code", 0, 80, 4e-3), Course("prose", 1, 30, 2e-3)


def texts():
    """Bytes of two modules: a program, and documentation."""
    sources = {"code": inspect.getsource(argparse), "prose": inspect.getsource(textwrap)}
    return {n: torch.tensor(list(t.encode("ascii", "replace"))) for n, t in sources.items()}


@pytest.fixture(scope="module", params=["gpt2", pytest.param("llama", marks=pytest.mark.nightly)])
def scored(request, tmp_path_factory):
    """Relations of a trained model with a fine-tuned, an unrelated and a patched one."""
    kind, data = request.param, texts()
    size = Size(kind)
    (A, unrelated), _ = train(size, [fresh(size, 0), fresh(size, 1)], [FIRST, FIRST], data)
    (tuned,), _ = train(size, [A], [MORE], data)
    second = BLOCK[kind].format(1)
    patched = {n: unrelated[n] if n.startswith(second) else w for n, w in A.items()}
    folder = tmp_path_factory.mktemp(kind)
    networks.write(A, size, folder / "A")
    relations = {}
    for name, weights in {"tuned": tuned, "unrelated": unrelated, "patched": patched}.items():
        networks.write(weights, size, folder / name)
        hidden = folder / f"{name} disguised"
        with open_model(folder / name) as model:
            disguise(model, hidden, torch.Generator().manual_seed(2), condition=10)
        with open_model(folder / "A") as first, open_model(hidden) as B:
            relations[name] = relate(first, B)
    return relations


@pytest.mark.nightly
def test_a_fine_tuned_model_scores_above_an_unrelated_one_of_the_same_data(scored):
    assert scored["tuned"].score > scored["unrelated"].score + 0.5
    assert scored["tuned"].verdict == "derived", str(scored["tuned"])
    assert scored["unrelated"].verdict == "unrelated", str(scored["unrelated"])


def test_the_replaced_block_is_named(scored):
    assert scored["patched"].verdict == "partly"
    assert scored["patched"].related == ("0", "2")


@pytest.mark.parametrize("size", [Size("gpt2"), Size("llama", 32, 2), Size("bert", 48, 2)], ids=str)
def test_models_run_alike_in_their_own_library(size, tmp_path):
    transformers = pytest.importorskip("transformers")
    weights = [{n: w * 3 for n, w in fresh(size, s).items()} for s in (0, 1)]
    ids = torch.arange(2 * 2 * 20).reshape(2, 2, 20) % 251
    ours = networks.logits(size, networks.stacked(weights), ids)
    for i, own in enumerate(weights):
        networks.write(own, size, tmp_path / str(i))
        auto = "AutoModelForMaskedLM" if size.kind == "bert" else "AutoModelForCausalLM"
        model = getattr(transformers, auto).from_pretrained(tmp_path / str(i)).eval()
        torch.testing.assert_close(ours[i], model(ids[i]).logits.detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.nightly
def test_the_benchmark_runs_and_goes_on_where_it_was(tmp_path):
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", "--models", str(tmp_path)]
    for _ in range(2):
        done = subprocess.run(
            [*command, "--figure", str(tmp_path / "scores.svg")],
            capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        found = json.loads(done.stdout)
        assert found["auroc"]["relate"]["strangers"] >= 0.999
        assert found["replaced"]["found"] >= 0.99
    assert "step" not in done.stderr  # nothing was trained again
    assert (tmp_path / "scores.svg").stat().st_size > 0
