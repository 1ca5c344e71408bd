"""Unrelated models and their descendants, as the training script writes them."""

import json

import pytest
import torch

from strangers import KINDS, NEWS, PYTHON, Plan, groups, train_group
from trained.networks import read
from transformer_nfn.checkpoints.families import open_model

PLAN = Plan({(32, 2): 2}, {(32, 2): 1}, (4, 8), (32, 2, 1, 12), rows=1)
TEXTS = {name: torch.arange(400) % 251 for name in (NEWS, PYTHON)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Every model of a small plan, for GPT-2s only."""
    out = tmp_path_factory.mktemp("strangers")
    for group in groups(PLAN):
        if group[0].size.kind == "gpt2":
            train_group(group, out / "models", TEXTS, PLAN.rows)
    return out


def test_every_base_starts_from_weights_of_its_own():
    models = [m for group in groups(PLAN) for m in group if m.relation == "base"]
    assert {m.size.kind for m in models} == set(KINDS)
    first = [m.start(None)["transformer.wte.weight"] for m in models if m.size.kind == "gpt2"]
    assert all(not torch.equal(a, b) for i, a in enumerate(first) for b in first[i + 1 :])


def test_models_open_and_descendants_change_what_they_should(trained):
    base = trained / "models" / "gpt2-32x2" / "8" / "news-0"
    start = read(base / "base")
    names = {path.name for path in base.iterdir()}
    assert names == {"base", "fine-tuned", "fine-tuned-other", "lora", "continued",
                     "retrained-other", "distilled"}  # fmt: skip
    for name in names:
        with open_model(base / name) as model:
            assert model.description.family == "gpt2"
        assert json.loads((base / name / "training.json").read_text())["loss"] > 0
    changed = {n for n, w in read(base / "lora").items() if not torch.equal(w, start[n])}
    assert changed == {f"transformer.h.{i}.attn.c_attn.weight" for i in range(2)}
