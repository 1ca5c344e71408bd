"""Classifiers of a user's own modules around `nn.TransformerEncoder`, with their parts named."""

import csv
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_model import MemoryModel
from torch import Tensor, nn
from weight_edits import unseen_edits

from tiny_families import nightly
from tnfn_command import as_json, assert_refused, printed, tnfn
from transformer_nfn.checkpoints import OpenOptions, disguise, open_model, relate
from transformer_nfn.checkpoints.fingerprints import compare_fingerprints, take_fingerprint
from transformer_nfn.functional.transformer import transformer
from transformer_nfn.prediction.checkpoint_reader import model_features
from transformer_nfn.zoo import Zoo

D, LENGTH = 24, 9


@dataclass(frozen=True)
class RowLayout:
    """What a classifier is made of."""

    inputs: str
    norm_first: bool
    activation: str
    pooling: str
    final: str = ""
    cls: bool = False
    positions: str = ""

    def fields(self) -> dict[str, Any]:
        """What its state dict does not say."""
        fields = {"nhead": 4, "norm_first": self.norm_first, "activation": self.activation}
        fields |= {f"{self.inputs}_embedding": "embed", "classifier": "fc", "pooling": self.pooling}
        fields |= {"positions": "where"} if self.positions else {}
        fields |= {"class_token": "start"} if self.cls else {}
        return fields | ({"final_norm": "last"} if self.final == "outside" else {})


LAYOUTS = [
    RowLayout("token", True, "gelu", "mean", "inside", positions="module"),
    RowLayout("token", False, "relu", "last", positions="parameter"),
    RowLayout("vector", True, "relu", "first", "outside", cls=True, positions="parameter"),
    RowLayout("vector", False, "gelu", "mean"),
    RowLayout("vector", True, "gelu", "mean", "inside", cls=True),
    RowLayout("image", True, "gelu", "first", "inside", cls=True, positions="module"),
    RowLayout("image", False, "relu", "mean", positions="parameter"),
]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


class Classifier(nn.Module):
    """A classifier as people write them; nothing of it is this library's."""

    def __init__(self, layout: RowLayout, seed: int = 0) -> None:
        super().__init__()
        self.layout = layout
        embed: dict[str, nn.Module] = {
            "token": nn.Embedding(31, D), "vector": nn.Linear(5, D), "image": nn.Conv2d(3, D, 4, 4)
        }  # fmt: skip
        self.embed = embed[layout.inputs]
        length = LENGTH + layout.cls
        if layout.cls:
            self.start = nn.Parameter(torch.empty(1, 1, D))
        if layout.positions == "parameter":
            self.where: Any = nn.Parameter(torch.empty(1, length, D))
        elif layout.positions:
            self.where = nn.Embedding(length, D)
        block = nn.TransformerEncoderLayer(
            D, 4, 40, activation=layout.activation, batch_first=True, norm_first=layout.norm_first
        )
        norm = nn.LayerNorm(D) if layout.final == "inside" else None
        self.body = nn.TransformerEncoder(block, 2, norm, enable_nested_tensor=False)
        if layout.final == "outside":
            self.last = nn.LayerNorm(D)
        self.fc = nn.Linear(D, 7)
        self.double().eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in self.named_parameters():
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                gain = p.ndim == 1 and name.endswith("weight")
                p.copy_(0.3 * noise + float(gain))

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        if self.layout.inputs == "image":
            x = x.flatten(2).mT
        if self.layout.cls:
            x = torch.cat([self.start.expand(len(x), -1, -1), x], 1)
        if self.layout.positions:
            x = x + (self.where if self.layout.positions == "parameter" else self.where.weight)
        x = self.body(x)
        if self.layout.final == "outside":
            x = self.last(x)
        pooled = {"mean": x.mean(1), "first": x[:, 0], "last": x[:, -1]}[self.layout.pooling]
        out: Tensor = self.fc(pooled)
        return out

    def inputs(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        if self.layout.inputs == "token":
            return torch.randint(0, 31, (2, LENGTH), generator=generator)
        shape = (2, LENGTH, 5) if self.layout.inputs == "vector" else (2, 3, 12, 12)
        return torch.randn(shape, generator=generator, dtype=torch.float64)


def saved(module: nn.Module, path: Path) -> Path:
    torch.save(module.state_dict(), path)
    return path


@every_layout
def test_the_forward_is_that_of_the_module_and_a_disguise_keeps_it(
    layout: RowLayout, tmp_path: Path
) -> None:
    module = Classifier(layout)
    expected = module(module.inputs()).detach()
    options, out = OpenOptions(settings=layout.fields()), tmp_path / "other.pt"
    with open_model(saved(module, tmp_path / "own.pt"), options) as model:
        assert model.description.family == "torch_classifier"
        found = transformer(model.description, model, module.inputs())
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        drawn = disguise(model, out, torch.Generator().manual_seed(0))
        assert drawn.action != "none"
        with open_model(out, options) as hidden:
            assert relate(model, hidden).same_function is True
            torch.testing.assert_close(
                model_features(hidden), model_features(model), rtol=1e-4, atol=1e-4
            )
    state = torch.load(out, weights_only=True)
    assert not torch.equal(state["embed.weight"], module.state_dict()["embed.weight"])
    module.load_state_dict(state)
    torch.testing.assert_close(module(module.inputs()).detach(), expected, rtol=1e-9, atol=1e-9)


def test_fixed_sinusoids_and_a_scaled_embedding_are_stated(tmp_path: Path) -> None:
    module = Classifier(RowLayout("token", True, "relu", "mean", "inside"))
    rate = torch.exp(torch.arange(0, D, 2) * (-math.log(10000.0) / D))
    angle = torch.arange(LENGTH).double()[:, None] * rate
    table = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
    x = module.body(3.0 * module.embed(module.inputs()) + table)
    stated = module.layout.fields() | {"sinusoids": "neighbours", "embedding_scale": 3.0}
    with open_model(saved(module, tmp_path / "own.pt"), OpenOptions(settings=stated)) as model:
        found = transformer(model.description, model, module.inputs())
    torch.testing.assert_close(found, module.fc(x.mean(1)).detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", [LAYOUTS[3], *nightly(LAYOUTS[4], LAYOUTS[5])], ids=str)
def test_a_change_of_what_surrounds_the_encoder_is_seen(layout: RowLayout, tmp_path: Path) -> None:
    module, options = Classifier(layout), OpenOptions(settings=layout.fields())
    own = saved(module, tmp_path / "own.pt")
    names = [n for n in module.state_dict() if n.startswith(("embed", "start", "where", "fc"))]
    with open_model(own, options) as model:
        for name in names:
            state = module.state_dict()
            state[name] = state[name] + 0.05 * torch.randn_like(state[name])
            torch.save(state, tmp_path / "changed.pt")
            with open_model(tmp_path / "changed.pt", options) as changed:
                assert relate(model, changed).same_function is False, name


def in_memory(module: Classifier, file: Path) -> MemoryModel:
    options = OpenOptions(settings=module.layout.fields())
    with open_model(saved(module, file), options) as model:
        return MemoryModel.of(model)


def test_a_constant_on_the_embedding_that_a_post_norm_block_reads_is_seen(tmp_path: Path) -> None:
    model = in_memory(Classifier(LAYOUTS[3]), tmp_path / "own.pt")
    other = model.changed(patch_bias=model["patch_bias"] + 0.1)
    assert relate(model, other).same_function is False
    assert compare_fingerprints(take_fingerprint(model), take_fingerprint(other)).changed


def test_a_bias_that_only_one_of_two_has_is_seen_unless_it_is_zero(tmp_path: Path) -> None:
    module = Classifier(LAYOUTS[3])
    state, options = module.state_dict(), OpenOptions(settings=module.layout.fields())
    bias = state.pop("embed.bias")
    own = saved(module, tmp_path / "own.pt")
    torch.save(state, tmp_path / "without.pt")
    torch.save({**state, "embed.bias": 0 * bias}, tmp_path / "zero.pt")
    with (
        open_model(own, options) as model,
        open_model(tmp_path / "without.pt", options) as without,
        open_model(tmp_path / "zero.pt", options) as zero,
    ):
        assert relate(without, zero).same_function is True
        for a, b in ((model, without), (without, model), (model, zero)):
            assert relate(a, b).same_function is not True


@pytest.mark.nightly
@every_layout
def test_edits_are_seen(layout: RowLayout, tmp_path: Path) -> None:
    module = Classifier(layout)
    model, inputs = in_memory(module, tmp_path / "own.pt"), module.inputs()
    assert unseen_edits(model, lambda w: transformer(model.description, w, inputs), 10) == []


STATED = shlex.split(str(OpenOptions(settings=LAYOUTS[2].fields())))
ROLES = "token_embedding, vector_embedding, image_embedding, positions, class_token, final_norm, "


def less(name: str) -> list[str]:
    """The options without one field."""
    pairs = zip(STATED[::2], STATED[1::2], strict=True)
    return [word for pair in pairs if not pair[1].startswith(f"{name}=") for word in pair]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (less("pooling"), "does not state pooling of nn.TransformerEncoder classifier"),
        (less("vector_embedding"), "does not state token_embedding of"),
        (less("positions"), "holds 'where' [1, 10, 24], which nn.TransformerEncoder classifier "
         f"does not have; one of {ROLES}classifier can say what it is"),
        ([*less("classifier"), "--set", "classifier=out"], "lacks 'out.weight', which holds 'head"),
        ([*less("positions"), "--set", "positions=start"], "positions and class_token both name "),
        ([*less("pooling"), "--set", "pooling=max"], "expected one of first, last, mean, found"),
        ([*less("positions"), "--set", "positions=fc"], "positions and classifier both name "),
        ([*STATED, "--set", "token_embedding=embed"], "a class token before token"),
        ([*STATED, "--set", "image_embedding=embed"], "with two embeddings is not supported"),
    ],
)  # fmt: skip
def test_what_is_missing_or_wrong_is_one_sentence(
    options: list[str], message: str, tmp_path: Path
) -> None:
    done = tnfn("inspect", saved(Classifier(LAYOUTS[2]), tmp_path / "own.pt"), *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr.splitlines()[0]


def test_a_zoo_of_them_is_learned_and_a_file_predicted_with_its_mapping(tmp_path: Path) -> None:
    nets, zoo, run = tmp_path / "nets", tmp_path / "zoo", tmp_path / "run"
    nets.mkdir()
    table = tmp_path / "table.csv"
    with table.open("w", newline="") as sheet:
        rows = csv.writer(sheet)
        rows.writerow(["file", "test_accuracy"])
        for i in range(20):
            module, size = Classifier(LAYOUTS[2], seed=i).float(), 0.2 + 0.04 * i
            with torch.no_grad():
                module.fc.weight.mul_(size)
            saved(module, nets / f"{i}.pt")
            rows.writerow([f"{i}.pt", size])
    printed("zoo", "import", nets, "--targets", table, "--out", zoo, *STATED)
    added = Zoo.create(tmp_path / "added")
    added.add(Classifier(LAYOUTS[2]).float(), config=LAYOUTS[2].fields(), test_accuracy=0.5)
    assert added.table["family"].tolist() == ["torch_classifier"]
    printed("train", zoo, "--model", "invariant_mlp", "--seeds", 1, "--out", run)
    refused = tnfn("predict", run, nets / "3.pt")
    assert refused.returncode == 2
    assert "does not state nhead, classifier, norm_first" in refused.stderr.splitlines()[0]
    row, file = as_json("predict", run, f"{zoo}#3", nets / "3.pt", *STATED)
    assert file["value"] == pytest.approx(row["value"], abs=1e-6)
    assert row["mapping"] is None
    assert file["mapping"]["head"] == "fc.weight"
    assert file["mapping"]["1.W_K"] == "body.layers.1.self_attn.in_proj_weight[24:48]"
    text = printed("predict", run, nets / "3.pt", nets / "4.pt", *STATED)
    assert text.count("0.W_Q ← body.layers.0.self_attn.in_proj_weight[0:24]") == 1
    assert "position ← where" in text
    assert_refused("has residuals and gains", "predict", "mnist-whole", nets / "3.pt")
    assert_refused("is for checkpoints of a known family", "predict", "mnist-whole", zoo, *STATED)
