"""LoRA folders: merged into their base, and by themselves up to the inner basis."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_families
from gguf_conversion import write_gguf
from hub_server import Hub
from lora_folders import PREFIX, merge, rebase, write_adapter
from tnfn_command import tnfn
from transformer_nfn.checkpoints import open_model
from transformer_nfn.checkpoints.adapters import compare_adapters, inspect_adapter
from transformer_nfn.checkpoints.families import OpenOptions
from transformer_nfn.errors import CheckpointError
from transformer_nfn.io.adapter import Adapter


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("bases")
    return {
        case: tiny_families.save(tiny_families.build(case, dtype=torch.float32), place / case)
        for case in ("llama", "gpt2")
    }


CASES: dict[str, tuple[str, dict[str, Any], dict[str, float]]] = {
    "plain": ("llama", {}, {"_proj": 6 / 4}),
    "rslora": ("llama", {"use_rslora": True}, {"_proj": 3.0}),
    "patterns": (
        "llama",
        {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 10}},
        {"v_proj": 5.0, "q_proj": 1.5},
    ),
    "in first": ("gpt2", {"fan_in_fan_out": True, "targets": ("c_attn",)}, {"c_attn": 1.5}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_is_merged_into_its_base(
    case: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    name, fields, scales = CASES[case]
    adapter = write_adapter(bases[name], tmp_path / "adapter", **fields)
    expected = merge(bases[name], adapter, tmp_path / "merged", scales)
    with (
        open_model(adapter, OpenOptions(base=bases[name])) as model,
        open_model(expected) as merged,
        open_model(bases[name]) as base,
    ):
        assert model.description == merged.description
        changed = 0
        for tensor in merged.names:
            torch.testing.assert_close(model[tensor], merged[tensor], rtol=1e-5, atol=1e-6)
            changed += not torch.equal(base[tensor], merged[tensor])
        assert changed == (6 if name == "llama" else 9)


def test_commands_find_the_base(bases: dict[str, Path], tmp_path: Path) -> None:
    base = bases["llama"]
    adapter = write_adapter(base, tmp_path / "adapter")
    merged = merge(base, adapter, tmp_path / "merged", {"_proj": 1.5})
    done = tnfn("compare", adapter, merged, "--base", base, "--json")
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (0, "same"), done
    done = tnfn("disguise", adapter, "--base", base, "--out", tmp_path / "disguised")
    assert done.returncode == 0, done.stderr
    assert tnfn("compare", merged, tmp_path / "disguised").returncode == 0
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "/no/model of a hub"
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    done = tnfn("compare", base, adapter, "--json")
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (1, "derived"), done


def test_commands_fetch_the_base(bases: dict[str, Path], tmp_path: Path, hub: Hub) -> None:
    base = bases["llama"]
    adapter = write_adapter(base, tmp_path / "adapter")
    merged = merge(base, adapter, tmp_path / "merged", {"_proj": 1.5})
    hub.put("somebody/some-model", base)
    assert tnfn("compare", merged, adapter).returncode == 0
    assert tnfn("compare", "somebody/some-model", adapter, "--offline").returncode == 1
    done = tnfn("fingerprint", adapter, merged, "--json")
    assert json.loads(done.stdout)["distances"][0][1] < 1e-3


def test_a_quantised_base(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = write_adapter(bases["llama"], tmp_path / "adapter")
    file = write_gguf(bases["llama"], tmp_path / "model.gguf", "Q8_0")
    done = tnfn("compare", file, adapter, "--base", file, "--json")
    assert done.returncode == 1, done
    wrong = {t["name"] for t in json.loads(done.stdout)["conversion"]["wrong"]}
    assert wrong == {f"{i}.W_{p}" for i in range(3) for p in "QV"}


def test_the_inner_basis_does_not_matter(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = write_adapter(bases["llama"], tmp_path / "a")
    other = rebase(adapter, tmp_path / "b")
    stranger = write_adapter(bases["llama"], tmp_path / "c", seed=9)
    factors = load_file(adapter / "adapter_model.safetensors")
    with Adapter.open(adapter) as a, Adapter.open(other) as b, Adapter.open(stranger) as c:
        first, second = inspect_adapter(a), inspect_adapter(b)
        assert first.free == 6 * 16
        for x, y in zip(first.changes, second.changes, strict=True):
            B, A = (factors[f"{PREFIX}{x.module}.lora_{p}.weight"].double() for p in "BA")
            full = torch.linalg.svdvals(1.5 * B @ A)[:4]
            torch.testing.assert_close(x.values, full, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(y.values, full, rtol=1e-5, atol=1e-6)
        assert compare_adapters(a, b).same
        result = compare_adapters(a, c)
        assert not result.same
        change = result.changes["model.layers.0.self_attn.q_proj"]
        assert abs(change.cosine) < 0.5
        assert change.distance > 0.7
    done = tnfn("compare", adapter, other)
    assert (done.returncode, done.stdout.split(":")[0]) == (0, "same")
    assert tnfn("compare", adapter, stranger).returncode == 1
    done = tnfn("inspect", adapter)
    assert done.returncode == 0, done.stderr
    assert "q_proj" in done.stdout
    assert json.loads(tnfn("inspect", adapter, "--json").stdout)["symmetry_parameters"] == 96


def test_adapters_of_bases_by_other_names(bases: dict[str, Path], tmp_path: Path) -> None:
    """The same change of two models is not one function."""
    adapter = write_adapter(bases["llama"], tmp_path / "a")
    other = rebase(adapter, tmp_path / "b")
    config = json.loads((other / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "somebody/another-model"
    (other / "adapter_config.json").write_text(json.dumps(config))
    done = tnfn("compare", adapter, other)
    assert (done.returncode, done.stdout.split(":")[0]) == (3, "unclear")
    assert "'somebody/some-model' and 'somebody/another-model'" in done.stdout


def test_a_small_change_of_one_factor_is_seen(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = write_adapter(bases["llama"], tmp_path / "a")
    other = rebase(adapter, tmp_path / "b")
    file = other / "adapter_model.safetensors"
    factors = load_file(file)
    key = next(key for key in factors if key.endswith("1.self_attn.v_proj.lora_B.weight"))
    factors[key] *= 1.001
    save_file(factors, file)
    with Adapter.open(adapter) as a, Adapter.open(other) as b:
        result = compare_adapters(a, b)
    wrong = [name for name, c in result.changes.items() if c.excess > result.allowed]
    assert wrong == ["model.layers.1.self_attn.v_proj"]


def test_biases_and_modules_that_are_stored_in_full(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = write_adapter(bases["llama"], tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    base = load_file(bases["llama"] / "model.safetensors")
    head, tokens = 2 * base["lm_head.weight"], -base["model.embed_tokens.weight"]
    A, B = torch.randn(4, len(tokens)), torch.randn(tokens.shape[1], 4)
    at = f"{PREFIX}model.embed_tokens."
    full = {
        f"{PREFIX}lm_head.weight": head, f"{at}base_layer.weight": tokens,
        f"{at}lora_embedding_A": A, f"{at}lora_embedding_B": B,
    }  # fmt: skip
    save_file(load_file(file) | full, file)
    with open_model(adapter, OpenOptions(base=bases["llama"])) as model:
        torch.testing.assert_close(model["head"].mT, head)
        torch.testing.assert_close(model["token"], tokens + 1.5 * (B @ A).T)


def _message(path: Path, base: Path | None) -> str:
    with pytest.raises(CheckpointError) as error:
        open_model(path, OpenOptions(base=base))
    return str(error.value)


def test_bad_adapters_are_refused_in_one_sentence(bases: dict[str, Path], tmp_path: Path) -> None:
    llama, gpt2 = bases["llama"], bases["gpt2"]
    adapter = write_adapter(llama, tmp_path / "adapter")
    done = tnfn("fingerprint", adapter, "--offline")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done
    assert "the base of the adapter" in done.stderr
    assert "q_proj.weight', which its base" in _message(adapter, gpt2)
    assert "the base" in _message(adapter, adapter)
    other = write_adapter(llama, tmp_path / "narrow")
    factors = load_file(other / "adapter_model.safetensors")
    key = next(iter(factors))
    bad = {key: factors[key][:, :-1].contiguous()}
    save_file(factors | bad, other / "adapter_model.safetensors")
    assert "expected shape [" in _message(other, llama)
    save_file(factors | {key: factors[key][:1]}, other / "adapter_model.safetensors")
    assert "expected factors [r, in] and [out, r]" in _message(other, llama)
    save_file({key: factors[key]}, other / "adapter_model.safetensors")
    assert "expected factors A and B" in _message(other, llama)
    for field, value, words in (
        ("r", 3, "expected rank 3"), ("lora_alpha", "x", "lora_alpha expected a number"),
        ("use_dora", True, "DoRA"), ("init_lora_weights", "pissa_niter_4", "taken from its base"),
        ("layer_replication", [[1, 2], [0, 1]], "repeated blocks"),
        ("peft_type", "IA3", "peft_type expected LORA, found 'IA3'"),
    ):  # fmt: skip
        folder = write_adapter(llama, tmp_path / field, **({} if field == "r" else {field: value}))
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | {field: value}))
        assert words in _message(folder, llama)
    done = tnfn("compare", llama, llama, "--base", llama)
    assert (done.returncode, "--base is for adapters" in done.stderr) == (2, True)


def test_one_entry_of_a_factor_in_one_inner_basis_is_seen(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = write_adapter(bases["llama"], tmp_path / "a")
    other = shutil.copytree(adapter, tmp_path / "b")
    file = other / "adapter_model.safetensors"
    for at in (adapter, other):
        factors = load_file(at / file.name)
        save_file({k: w.bfloat16() for k, w in factors.items()}, at / file.name)
    assert tnfn("compare", adapter, other).returncode == 0
    factors = load_file(file)
    key = next(key for key in factors if key.endswith("1.self_attn.v_proj.lora_B.weight"))
    factors[key].view(-1)[0] *= 1.01
    save_file(factors, file)
    done = tnfn("compare", adapter, other)
    assert (done.returncode, done.stdout.split(":")[0]) == (1, "different")
    assert "most model.layers.1.self_attn.v_proj" in done.stdout
