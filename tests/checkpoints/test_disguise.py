"""A disguised checkpoint is the same function with other weights, and its own library loads it."""

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from memory_model import MemoryModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tiny_families import (
    TINY,
    Network,
    build,
    encoder,
    every_family,
    inputs_of,
    network,
    nightly_but_quick,
    run_library,
    save,
)
from transformer_nfn.checkpoints import disguises, relate
from transformer_nfn.checkpoints.disguises import Disguise, disguise
from transformer_nfn.checkpoints.families import OpenOptions, open_model
from transformer_nfn.errors import CheckpointError
from transformer_nfn.functional.transformer import transformer

transformers = pytest.importorskip("transformers")

ROUNDINGS = 2.0
"""A disguise rounds every weight anew; that may cost this many times what the first time did."""
MIXTURES = ("mixtral", "qwen3-moe", "olmoe")
"""Rounding may give a token to another expert, and that changes its output at a step."""
TIED = (
    "gpt2", "opt", "bloom", "bert", "roberta", "esm", "distilbert", "llama-tied", "gemma2", "t5",
    "bart", "marian",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def load(model: nn.Module, folder: Path) -> nn.Module:
    """The library's model from a folder, in float32, as it loads it for anyone."""
    kind: type = type(model)
    loaded: nn.Module = kind.from_pretrained(folder, attn_implementation="eager")  # type: ignore[attr-defined]
    return loaded.float().eval()


def apart(first: Tensor, second: Tensor) -> float:
    return float((first - second).norm() / first.norm())


@pytest.mark.parametrize("keep_tie", [False, True])
@every_family
def test_every_symmetry_at_once_changes_no_output(family: str, keep_tie: bool) -> None:
    net = network(family)
    drawn = Disguise(net.description, net.weights, seeded(), keep_tie=keep_tie)
    weights = dict(drawn)
    shapes = {n: tuple(w.shape) for n, w in weights.items()}
    assert shapes == {
        n: s for n, s in drawn.description.tensors.items() if not n.startswith("kept.")
    }
    assert net.change(weights, drawn.description) < 1e-10
    assert drawn.description.tied == (keep_tie and net.description.tied)
    same = [n for n, w in net.weights.items() if n in weights and torch.equal(weights[n], w)]
    fixed = ("extra",) if net.description.headless else ("extra.decoder.b",)
    fixed += ("token",) if net.description.fixed_stream else ()
    assert not [n for n in same if "norm" not in n and not n.startswith(fixed)]


@every_family
def test_the_library_loads_it_and_computes_the_same(family: str, tmp_path: Path) -> None:
    model, inputs = build(family, dtype=torch.float32), inputs_of(family)
    expected = run_library(model, inputs)
    with open_model(save(model, tmp_path / "a")) as source:
        disguise(source, tmp_path / "b", seeded())
    assert apart(expected, run_library(load(model, tmp_path / "b"), inputs)) < 1e-5


@pytest.mark.parametrize("family", nightly_but_quick(f for f in TINY if f not in MIXTURES))
def test_in_bfloat16_it_costs_what_rounding_does(family: str, tmp_path: Path) -> None:
    inputs = inputs_of(family)
    exact = _outputs(build(family, size=0.25), family, tmp_path / "exact")
    model = build(family, size=0.25, dtype=torch.bfloat16)
    with open_model(save(model, tmp_path / "a")) as source:
        disguise(source, tmp_path / "b", seeded(), condition=10.0)
    expected = run_library(model.float(), inputs)
    found = run_library(load(model, tmp_path / "b"), inputs)
    assert apart(expected, found) < max(3e-3, ROUNDINGS * apart(exact, expected))


def _outputs(model: nn.Module, name: str, folder: Path) -> Tensor:
    inputs = inputs_of(name)
    with open_model(save(model, folder)) as read:
        first, decoder = next(iter(inputs.values())), inputs.get("decoder_input_ids")
        return transformer(read.description, read, first, decoder=decoder)


def test_a_head_that_reads_attention_maps_follows_the_heads(tmp_path: Path) -> None:
    model, ids = build("esm", dtype=torch.float32), inputs_of("esm")["input_ids"]
    with open_model(save(model, tmp_path / "a")) as source:
        disguise(source, tmp_path / "b", seeded())
    files = [load_file(tmp_path / x / "model.safetensors") for x in "ab"]
    key = "esm.contact_head.regression.weight"
    assert not torch.equal(files[0][key], files[1][key])
    with torch.no_grad():
        models = (model, load(model, tmp_path / "b"))
        maps = [m.predict_contacts(ids, torch.ones_like(ids)) for m in models]  # type: ignore[operator]
    torch.testing.assert_close(maps[0], maps[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "phi3"])
def test_keys_shapes_and_dtypes_stay(name: str, tmp_path: Path) -> None:
    with open_model(save(build(name, dtype=torch.bfloat16), tmp_path / "a")) as source:
        disguise(source, tmp_path / "b", seeded(), keep_tie=True)
    first, second = (load_file(tmp_path / x / "model.safetensors") for x in "ab")
    assert {k: (w.shape, w.dtype) for k, w in first.items()} == {
        k: (w.shape, w.dtype) for k, w in second.items()
    }
    assert (tmp_path / "a/config.json").read_text() == (tmp_path / "b/config.json").read_text()


@pytest.mark.parametrize("name", nightly_but_quick(TIED))
def test_a_tied_model_is_written_untied_unless_ties_are_kept(name: str, tmp_path: Path) -> None:
    model, inputs = build(name, dtype=torch.float32), inputs_of(name)
    expected = run_library(model, inputs)
    with open_model(save(model, tmp_path / "a")) as source:
        assert source.description.tied
        disguise(source, tmp_path / "untied", seeded())
        disguise(source, tmp_path / "tied", seeded(), keep_tie=True)
    config = json.loads((tmp_path / "untied/config.json").read_text())
    assert config["tie_word_embeddings"] is False
    for folder, tied in (("untied", False), ("tied", True)):
        loaded = load(model, tmp_path / folder)
        one = loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight  # type: ignore[operator]
        assert one == tied
        assert apart(expected, run_library(loaded, inputs)) < 1e-5
        with open_model(tmp_path / folder) as read:
            assert read.description.tied == tied


@pytest.mark.parametrize("keep_tie", [False, True])
def test_shards_stay_shards(keep_tie: bool, tmp_path: Path) -> None:
    model, inputs = build("gpt2", dtype=torch.float32), inputs_of("gpt2")
    model.save_pretrained(tmp_path / "a", max_shard_size="30KB")  # type: ignore[operator]
    with open_model(tmp_path / "a") as source:
        disguise(source, tmp_path / "b", seeded(), keep_tie=keep_tie)
    first, second = ({path.name for path in (tmp_path / x).iterdir()} for x in "ab")
    assert first == second
    index = json.loads((tmp_path / "b/model.safetensors.index.json").read_text())
    sizes = 0
    for shard in set(index["weight_map"].values()):
        with safe_open(tmp_path / "b" / shard, "pt") as file:
            keys = list(file.keys())
            assert all(index["weight_map"][key] == shard for key in keys)
            sizes += sum(file.get_tensor(key).nbytes for key in keys)
    assert index["metadata"]["total_size"] == sizes
    loaded = load(model, tmp_path / "b")
    assert apart(run_library(model, inputs), run_library(loaded, inputs)) < 1e-5


def test_files_without_a_prefix_can_be_untied_too(tmp_path: Path) -> None:
    model, inputs = build("gpt2", dtype=torch.float32), inputs_of("gpt2")
    save(model, tmp_path / "a")
    file = tmp_path / "a/model.safetensors"
    bare = {key.removeprefix("transformer."): w for key, w in load_file(file).items()}
    save_file(bare, file, {"format": "pt"})
    with open_model(tmp_path / "a") as source:
        disguise(source, tmp_path / "b", seeded())
    loaded = load(model, tmp_path / "b")
    assert apart(run_library(model, inputs), run_library(loaded, inputs)) < 1e-5


def test_a_lone_file_keeps_its_tie_or_is_refused(tmp_path: Path) -> None:
    save(build("gpt2", dtype=torch.float32), tmp_path)
    stated = 'n_head = 4\nactivation_function = "gelu_new"\narchitectures = "GPT2LMHeadModel"\n'
    (tmp_path / "mine.toml").write_text(f'extends = "gpt2"\n[config]\n{stated}')
    (tmp_path / "model.safetensors").rename(tmp_path / "lone.safetensors")
    out = tmp_path / "out.safetensors"
    with open_model(tmp_path / "lone.safetensors", OpenOptions(tmp_path / "mine.toml")) as source:
        with pytest.raises(CheckpointError, match=r"lone\.safetensors.*keep the tie"):
            disguise(source, out, seeded())
        assert not out.exists()
        disguise(source, out, seeded(), keep_tie=True)
    assert load_file(out).keys() == load_file(tmp_path / "lone.safetensors").keys()


def test_long_vocabularies_are_moved_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gpt2", "bert", "t5", "vit"):
        net = network(name)
        at_once = dict(Disguise(net.description, net.weights, seeded()))
        monkeypatch.setattr(disguises, "CHUNK", 7)
        for key, w in Disguise(net.description, net.weights, seeded()):
            torch.testing.assert_close(w, at_once[key], rtol=1e-12, atol=1e-12)
        monkeypatch.undo()


def test_a_network_is_read_block_by_block(tmp_path: Path) -> None:
    asked: list[list[str]] = []
    with open_model(save(build("llama"), tmp_path)) as model:

        def read(names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
            asked.append(list(names))
            return model.read(asked[-1], dtype)

        dict(Disguise(model.description, SimpleNamespace(names=model.names, read=read), seeded()))
    matrices = [{n.split(".")[0] for n in names if ".W_" in n} for names in asked]
    assert max(len(blocks) for blocks in matrices) == 1


def test_zero_gains_with_biases_leave_a_permutation() -> None:
    net = network("gpt2-untied")
    gain = net.weights["norm.g"].clone()
    gain[3] = 0
    dead = Network(net.name, net.description, {**net.weights, "norm.g": gain})
    drawn = Disguise(net.description, dead.weights, seeded())
    before, after = dead.outputs(dead.weights), dead.outputs(dict(drawn))
    assert drawn.action == "permutation and sign"
    assert apart(before, after) < 1e-10


@pytest.mark.parametrize(
    ("norm_first", "final", "activation"),
    [(True, True, "gelu"), (True, False, "relu"), (False, False, "relu")],
)
def test_an_encoder_of_pytorch(norm_first, final, activation, tmp_path) -> None:
    module = encoder(norm_first=norm_first, final=final, activation=activation)
    (tmp_path / "a").mkdir()
    save_file(module.state_dict(), tmp_path / "a/model.safetensors")
    config = {"nhead": 4, "norm_first": norm_first, "activation": activation}
    (tmp_path / "a/config.json").write_text(json.dumps(config))
    x = torch.randn(2, 7, 24, generator=seeded(1), dtype=torch.float64)
    # Gradients keep the module off its fast path, which has a forward of its own.
    expected = module(x).detach()
    with open_model(tmp_path / "a") as source:
        found = transformer(source.description, source, x)
        drawn = disguise(source, tmp_path / "b", seeded())
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert drawn.action == "none"  # the stream is input and output
        assert bool(drawn.acted["neurons scaled"]) == (activation == "relu")
        A = MemoryModel.of(source)
        turned = {n: w.roll(1) for n, w in A.tensors.items() if n.endswith((".b_O", ".b_B"))}
        assert relate(A, A.changed(**turned)).same_function is False
        with open_model(tmp_path / "b") as hidden:
            assert relate(source, hidden).same_function is True
    state = load_file(tmp_path / "b/model.safetensors")
    assert not any(torch.equal(w, state[k]) for k, w in module.state_dict().items() if w.ndim > 1)
    module.load_state_dict(state)
    torch.testing.assert_close(module(x).detach(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "config"), [("GPT2LMHeadModel", "GPT2Config"), ("BertForMaskedLM", "BertConfig")]
)
def test_models_of_full_size(kind: str, config: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)()).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # gains of one and biases of zero would hide mistakes
            parameter.data += 0.1 * torch.randn(parameter.shape)
    inputs = {"input_ids": torch.randint(1000, 20000, (2, 32))}
    exact = run_library(model, inputs)
    model = model.to(dtype)
    with open_model(save(model, tmp_path / "a")) as source:
        disguise(source, tmp_path / "b", seeded(), condition=10.0)
    expected = run_library(model.float(), inputs)
    difference = apart(expected, run_library(load(model, tmp_path / "b"), inputs))
    rounding = max(3e-3, ROUNDINGS * apart(exact, expected))
    assert difference < (1e-5 if dtype == torch.float32 else rounding)
