"""A quantised file against the model that it was made from: same up to rounding, or what is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny_families
from gguf_conversion import write_gguf
from tnfn_command import tnfn
from transformer_nfn.checkpoints import disguise, open_model
from transformer_nfn.checkpoints.conversion import quantisation_error
from transformer_nfn.checkpoints.relations import Relation, relate
from transformer_nfn.checkpoints.relations.verdicts import CONSISTENT

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "llama"
    return tiny_families.save(tiny_families.build("llama-tied", dtype=torch.float32), folder)


def _changed(folder: Path, out: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def _relate(a: Path, b: Path) -> Relation:
    with open_model(a) as A, open_model(b) as B:
        return relate(A, B)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_a_conversion_is_the_same_up_to_its_rounding(
    kind: str, llama: Path, tmp_path: Path
) -> None:
    file = write_gguf(llama, tmp_path / "model.gguf", kind)
    for pair in ((llama, file), (file, llama)):
        relation = _relate(*pair)
        assert (relation.verdict, relation.same_function) == ("same", True), relation
        if kind not in ("F16", "BF16"):
            assert f"same up to {kind}, float32 rounding" in relation.reason


def test_two_quantisations_of_one_model(llama: Path, tmp_path: Path) -> None:
    files = [write_gguf(llama, tmp_path / f"{k}.gguf", k) for k in ("Q4_1", "Q8_0")]
    assert _relate(*files).verdict == "same"
    assert "both hold the same numbers" in _relate(files[0], files[0]).reason


@pytest.mark.parametrize(("kind", "percent"), [("Q8_0", 0.65), ("Q4_1", 8.3)])
def test_a_disguise_of_the_numbers_that_were_quantised(
    kind: str, percent: float, llama: Path, tmp_path: Path
) -> None:
    file = write_gguf(llama, tmp_path / "model.gguf", kind)
    other = _changed(llama, tmp_path / "other", lambda t: t[Q].mul_(1 + torch.randn(t[Q].shape)))
    for folder, verdict in ((llama, CONSISTENT), (other, "derived")):
        hidden = tmp_path / f"disguised {folder.name}"
        with open_model(folder) as model:
            disguise(model, hidden, torch.Generator().manual_seed(0))
        for pair in ((hidden, file), (file, hidden)):
            relation = _relate(*pair)
            assert relation.verdict == verdict, relation
    with open_model(file) as model:
        assert quantisation_error(model) ** 0.5 == pytest.approx(percent / 100, rel=0.05)


CHANGES: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "scaled by 1 %": lambda t: t[Q].mul_(1.01),
    "one row": lambda t: t[Q][3].mul_(-1),
    "noise of 1 %": lambda t: t[Q].add_(0.01 * t[Q].std() * torch.randn(t[Q].shape)),
    "transposed": lambda t: t[Q].copy_(t[Q].T.clone()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_the_tensor_at_fault_is_named(kind: str, change: str, llama: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    file = write_gguf(llama, tmp_path / "model.gguf", kind)
    other = _changed(llama, tmp_path / "other", CHANGES[change])
    relation = _relate(other, file)
    assert relation.same_function is False
    assert relation.conversion is not None
    assert [tensor.key for tensor in relation.conversion.wrong] == [Q]
    assert Q in relation.reason


def test_the_rotary_order_is_recognised(llama: Path, tmp_path: Path) -> None:
    file = write_gguf(llama, tmp_path / "model.gguf", "Q4_1", permute=False)
    done = tnfn("compare", llama, file, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["same_function"]) == (1, False)
    assert "the rows of each head are in the other rotary order" in found["reason"]
    wrong = {tensor["name"] for tensor in found["conversion"]["wrong"]}
    assert wrong == {f"{i}.W_{p}" for i in range(3) for p in "QK"}


def test_a_disguise_of_the_dequantised_weights_is_the_same(llama: Path, tmp_path: Path) -> None:
    file = write_gguf(llama, tmp_path / "model.gguf", "Q4_1")
    assert tnfn("disguise", file, "--out", tmp_path / "other").returncode == 0
    relation = _relate(file, tmp_path / "other")
    assert (relation.verdict, relation.conversion) == ("same", None)
    assert relation.proof is not None


def test_neurons_of_one_block_in_another_order_are_the_same(llama: Path, tmp_path: Path) -> None:
    def change(t: dict[str, Tensor]) -> None:
        for part in ("gate", "up"):
            t[f"model.layers.1.mlp.{part}_proj.weight"] = t[
                f"model.layers.1.mlp.{part}_proj.weight"].flip(0)  # fmt: skip
        down = "model.layers.1.mlp.down_proj.weight"
        t[down] = t[down].flip(1).contiguous()

    file = write_gguf(llama, tmp_path / "model.gguf")
    assert tnfn("disguise", file, "--out", tmp_path / "plain", "--condition", "1").returncode == 0
    other = _changed(llama, tmp_path / "other", change)
    assert _relate(file, other).verdict == "same"


def test_lost_settings_are_named(tmp_path: Path) -> None:
    folder = tiny_families.save(
        tiny_families.build("mistral", dtype=torch.float32), tmp_path / "mistral"
    )
    relation = _relate(folder, write_gguf(folder, tmp_path / "model.gguf", "Q8_0"))
    assert relation.same_function is not True
    assert "window of block 0 is 4 in A and None in B" in relation.reason


def test_formats_of_vectors_are_compared_by_distance(tmp_path: Path) -> None:
    """IQ2_S has no code for each weight; noise of a third of its weights is within it."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=2, intermediate_size=64, vocab_size=61
    )
    hub = tiny_families.save(transformers.LlamaForCausalLM(config), tmp_path / "hub")
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (64, 82), dtype=torch.uint8, generator=generator).numpy()
    codes[:, :2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8).numpy()
    values = torch.from_numpy(gguf.quants.dequantize(codes, gguf.GGMLQuantizationType.IQ2_S))
    key = "model.layers.0.mlp.gate_proj.weight"
    noise = values.std() * torch.randn(values.shape, generator=generator) / 3
    for stored, right in ((values + noise, True), (values.flip(0), False)):
        folder = _changed(hub, tmp_path / f"{right}", lambda t, w=stored: t[key].copy_(w))
        raw = {"blk.0.ffn_gate.weight": ("IQ2_S", codes)}
        relation = _relate(folder, write_gguf(folder, tmp_path / "m.gguf", raw=raw))
        assert relation.conversion is not None
        assert [t.key for t in relation.conversion.wrong] == ([] if right else [key])
