"""GGUF files, converted as llama.cpp does, are read as the folders they come from."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tiny_families
from gguf_conversion import write_gguf
from tnfn_command import tnfn
from transformer_nfn.checkpoints import open_model, relate
from transformer_nfn.checkpoints.families.gguf import architectures
from transformer_nfn.errors import CheckpointError
from transformer_nfn.functional.description import RotaryScaling
from transformer_nfn.io import Checkpoint

CASES = (
    "llama", "llama-tied", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "phi", "gpt2", "bert-base"
)  # fmt: skip
KINDS = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = {}
    for case in CASES:
        folder = tmp_path_factory.mktemp("hub") / case
        tiny_families.save(tiny_families.build(case, dtype=torch.float32), folder)
        if case == "gemma2":  # GGUF does not say it
            config = json.loads((folder / "config.json").read_text())
            config["query_pre_attn_scalar"] = config["head_dim"]
            (folder / "config.json").write_text(json.dumps(config))
        out[case] = folder
    return out


@pytest.mark.parametrize("case", CASES)
def test_every_architecture_is_read_as_its_folder(
    case: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    file = write_gguf(folders[case], tmp_path / "model.gguf")
    with open_model(folders[case]) as folder, open_model(file) as model:
        if case == "mistral":  # GGUF calls it Llama, and drops the sliding window
            assert model.description.family == "llama"
        else:
            left = {"tensors": model.description.tensors, "pooler": model.description.pooler}
            assert model.description == replace(folder.description, **left)
        left_out = {"extra.pooler.W", "extra.pooler.b"} if case == "bert-base" else set()
        assert set(folder.names) - set(model.names) == left_out
        for name in model.names:
            torch.testing.assert_close(model[name], folder[name], rtol=1e-6, atol=1e-6,
                                       check_dtype=False)  # fmt: skip


def test_every_architecture_of_the_table_is_tested() -> None:
    tested = {"phi2" if case == "phi" else case.split("-")[0] for case in CASES} - {"mistral"}
    assert tested == set(architectures())


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights_are_those_of_the_package(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    file = write_gguf(folders["qwen2"], tmp_path / "model.gguf", kind)
    stored = load_file(folders["qwen2"] / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    type_ = gguf.GGMLQuantizationType[kind]
    expected = gguf.quants.dequantize(gguf.quants.quantize(stored.numpy(), type_), type_)
    with open_model(file) as model, Checkpoint.open(file) as plain:
        found = model["1.W_A"].mT
        torch.testing.assert_close(found.float(), torch.from_numpy(expected), rtol=0, atol=0)
        info = plain.info("blk.1.ffn_up.weight")
        assert info.quantised == (kind if kind.startswith("Q") else "")


BLOCKS, TRIES = 8, 4000
HALVES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "Q4_1": (0, 2),
    "Q5_1": (0, 2), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,),
}  # fmt: skip
SCALES = {
    "Q2_K": range(16), "Q3_K": range(96, 108), "Q4_K": range(4, 16), "Q5_K": range(4, 16),
    "Q6_K": range(192, 208), "IQ4_XS": range(2, 8), "MXFP4": range(1), "NVFP4": range(4),
}  # fmt: skip
"""Bytes of scales: in half precision, and in formats of their own. All others are codes."""


def _random_blocks(kind: gguf.GGMLQuantizationType, blocks: int, seed: int) -> np.ndarray:
    """Blocks with random codes and scales of ordinary size."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (blocks, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for at in HALVES.get(kind.name, ()):
        raw[:, at : at + 2] = rng.uniform(0.01, 0.1, (blocks, 1)).astype(np.float16).view(np.uint8)
    if kind.name == "MXFP4":
        raw[:, 0] = 120
    if kind.name == "NVFP4":
        raw[:, :4] = 0x38
    if kind.name == "TQ1_0":  # codes are digits to base three
        raw[:, :52] = rng.choice([0, 128, 255], (blocks, 52))
    if kind.name == "TQ2_0":
        raw[:, :64] = rng.choice([0x00, 0x55, 0xAA], (blocks, 64))
    return raw


@pytest.mark.parametrize("kind", [
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0",
])  # fmt: skip
def test_a_stored_weight_stands_for_the_numbers_between_its_neighbours(
    kind: str, tmp_path: Path
) -> None:
    """Values that a block can hold are listed by trying out every code."""
    type_ = gguf.GGMLQuantizationType[kind]
    raw = _random_blocks(type_, BLOCKS, seed=0)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=type_)
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    with Checkpoint.open(tmp_path / "x.gguf") as checkpoint:
        value, interval = checkpoint["w"].double(), checkpoint.interval("w")
    assert interval is not None
    low, high = (x.double() for x in interval)
    tried = _random_blocks(type_, TRIES * BLOCKS, seed=1).reshape(TRIES, BLOCKS, -1)
    for at in HALVES.get(kind, ()):
        tried[..., at : at + 2] = raw[:, at : at + 2]
    for at in SCALES.get(kind, ()):
        tried[..., at] = raw[:, at]
    values = gguf.quants.dequantize(tried.reshape(TRIES * BLOCKS, -1), type_)
    grid = torch.from_numpy(values).reshape(TRIES, BLOCKS, -1)
    near = value.float()
    above = torch.where(grid > near + 1e-6, grid, torch.inf).amin(0).double()
    below = torch.where(grid < near - 1e-6, grid, -torch.inf).amax(0).double()
    # A number belongs to the nearest value; the widest gap of a format is allowed everywhere.
    assert bool((above.isinf() | (high >= (value + above) / 2 - 1e-6)).all())
    assert bool((below.isinf() | (low <= (value + below) / 2 + 1e-6)).all())
    inner = ~(above.isinf() | below.isinf())
    gaps = [torch.where(x.isinf(), 0.0, (x - value).abs()) for x in (above, below)]
    allowed = (0.5 + 0.2) * torch.maximum(*gaps).amax(-1, keepdim=True).expand_as(value)
    assert bool(inner.any())
    assert bool((torch.maximum(high - value, value - low)[inner] <= allowed[inner]).all())


def test_llama_3_factors_of_frequencies(folders: dict[str, Path], tmp_path: Path) -> None:
    """The factors that llama.cpp stores, after `transformers`."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scheme = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, rope_parameters=scheme,
        max_position_embeddings=131072,
    )  # fmt: skip
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-torch.arange(0, 8, 2) / 8)
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(
        (folders["llama"] / "model.safetensors").read_bytes()
    )
    fields = json.loads((folders["llama"] / "config.json").read_text())
    fields["rope_parameters"] = scheme
    (folder / "config.json").write_text(json.dumps(fields))
    for factors, right in ((plain / scaled, True), (plain / scaled + 0.5, False)):
        file = write_gguf(folder, tmp_path / "m.gguf", extra={"rope_freqs.weight": factors})
        if right:
            with open_model(file) as model, open_model(folder) as original:
                assert model.description == original.description
        else:
            with pytest.raises(CheckpointError, match=r"rope_freqs.* expected the factors"):
                open_model(file)


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_rotary_factor_without_a_type_is_linear(
    key: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    plain = write_gguf(folders["qwen2"], tmp_path / "plain.gguf")
    file = write_gguf(folders["qwen2"], tmp_path / "scaled.gguf", metadata={key: 4.0})
    with open_model(file) as model, open_model(plain) as other:
        scaling = model.description.stacks[0].blocks[0].attention.rotary_scaling
        assert scaling == RotaryScaling("linear", 4.0)
        assert relate(other, model).same_function is False


def test_metadata_that_change_rotary_positions(folders: dict[str, Path], tmp_path: Path) -> None:
    half = shutil.copytree(folders["qwen2"], tmp_path / "half")
    config = json.loads((half / "config.json").read_text())
    config["rope_parameters"]["partial_rotary_factor"] = 0.5
    (half / "config.json").write_text(json.dumps(config))
    with open_model(write_gguf(half, tmp_path / "half.gguf")) as model:
        assert model.description.stacks[0].blocks[0].attention.rotary == 4
    file = write_gguf(folders["phi"], tmp_path / "m.gguf", metadata={"rope.dimension_count": None})
    with open_model(file) as model:
        attention = model.description.stacks[0].blocks[0].attention
        assert attention.rotary == attention.d_k
    file = write_gguf(
        folders["qwen2"], tmp_path / "m.gguf", metadata={"rope.scaling.attn_factor": 1.2}
    )
    with pytest.raises(CheckpointError, match=r"attn_factor expected 1, found 1\.2"):
        open_model(file)


def test_a_disguise_of_a_file_is_a_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    file = write_gguf(folders["llama-tied"], tmp_path / "model.gguf", "Q4_1")
    done = tnfn("disguise", file, "--out", tmp_path / "other")
    assert done.returncode == 0, done.stderr
    assert {p.name for p in (tmp_path / "other").iterdir()} == {"model.safetensors", "config.json"}
    done = tnfn("compare", file, tmp_path / "other")
    assert (done.returncode, "same" in done.stdout) == (0, True), done.stdout
    for words in (["inspect", file], ["fingerprint", file], ["inspect", tmp_path / "other"]):
        assert tnfn(*words).returncode == 0


def test_a_folder_with_one_file(folders: dict[str, Path], tmp_path: Path) -> None:
    file = write_gguf(folders["llama"], tmp_path / "model.gguf", "Q8_0")
    assert tnfn("inspect", tmp_path).returncode == 0
    (tmp_path / "b.gguf").write_bytes(file.read_bytes())
    done = tnfn("inspect", tmp_path)
    assert (done.returncode, "holds 2 GGUF files: name one" in done.stderr) == (2, True)


def _refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        open_model(path)
    return str(error.value)


def test_bad_files_are_refused_in_one_sentence(folders: dict[str, Path], tmp_path: Path) -> None:
    file = write_gguf(folders["llama"], tmp_path / "model.gguf", "Q4_0")
    data = file.read_bytes()
    bad = tmp_path / "bad.gguf"
    for size in (0, 3, 8, 20, 30, 200, len(data) // 4, len(data) // 2, len(data) - 40):
        bad.write_bytes(data[:size])
        assert "is not a readable GGUF file" in _refusal(bad), size
    done = tnfn("inspect", bad)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done
    bad.write_bytes(data.replace(b"llama", b"klama"))
    assert "general.architecture of GGUF expected one of llama, qwen2" in _refusal(bad)
    assert "found 'klama'" in _refusal(bad)
    bad.write_bytes(data[:4] + b"\7" + data[5:])
    assert "version 7" in _refusal(bad)
    bad.write_bytes(data.replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"))
    assert "lacks 'model.layers.1.self_attn.q_proj.weight'" in _refusal(bad)
    bad.write_bytes(data.replace(b"attention.head_count_kv", b"attention.head_count_xx"))
    assert "metadata 'llama.attention.head_count_xx' is not supported for Llama" in _refusal(bad)
    for key, words in {
        "attention.head_count_kv": "k_proj.weight' expected shape",
        "attention.head_count": "metadata lacks 'llama.attention.head_count'",
    }.items():
        file = write_gguf(folders["llama"], tmp_path / "model.gguf", metadata={key: None})
        assert words in _refusal(file)
