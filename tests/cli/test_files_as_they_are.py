"""Files and folders as other programs leave them: unwrapped, copied whole or refused by name."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tnfn_command import assert_refused, printed, tnfn

CHECKPOINT_COMMANDS = ("inspect", "disguise", "compare", "diff", "align", "fingerprint", "predict")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt2") / "hub"
    tiny_checkpoints.save("gpt2", path)
    return path


def _words(command: str, path: Path, out: Path) -> tuple[object, ...]:
    return {
        "inspect": ("inspect", path),
        "disguise": ("disguise", path, "--out", out),
        "compare": ("compare", path, path),
        "diff": ("diff", path, path),
        "align": ("align", path, path, "--out", out),
        "fingerprint": ("fingerprint", path),
        "predict": ("predict", "mnist-boosting", path),
    }[command]


ONNX = b"\x08\x08\x12\x07pytorch\x1a\x052.1.0:\x10" + bytes(16)


def _adapter(path: Path) -> None:
    (path / "adapter_config.json").write_text("{}")
    save_file({"base_model.model.x.lora_A.weight": torch.ones(2, 2)}, path / ADAPTER)


def _tensors(name: str, dtype: torch.dtype) -> Callable[[Path], None]:
    return lambda path: save_file({name: torch.ones(2, 2).to(dtype)}, path / "model.safetensors")


def _bytes(name: str, data: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(data)

    return write


ADAPTER = "adapter_model.safetensors"
FILES: dict[str, tuple[str, bytes, str]] = {
    "gguf": ("net.gguf", b"GGUF\3\0\0\0" + bytes(64), "not a readable GGUF file"),
    "gguf by content": ("net.bin", b"GGUF\3\0\0\0" + bytes(8), "not a readable GGUF file"),
    "gguf called safetensors": ("net.safetensors", b"GGUF\3", "not a readable GGUF file"),
    "onnx": ("net.onnx", b"", "not a readable ONNX file"),
    "onnx by content": ("net.bin", ONNX, "not a readable ONNX file"),
}
FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "gguf": (_bytes("q4.gguf", b"GGUF"), "q4.gguf' is not a readable GGUF"),
    "onnx": (_bytes("m.onnx", ONNX), "m.onnx' is not a readable ONNX"),
    "onnx below": (_bytes("onnx/m.onnx", ONNX), "ONNX in folders below: name a file.*onnx/m.onnx"),
    "adapter": (_adapter, "peft_type expected LORA|found an adapter"),
    "gptq": (_tensors("h.0.qweight", torch.int32), "qweight' .*quantised by GPTQ or AWQ"),
    "bitsandbytes": (_tensors("h.0.weight.absmax", torch.float32), "quantised by bitsandbytes"),
    "fp8": (_tensors("h.0.weight_scale_inv", torch.float32), "quantised with scales"),
    "lora": (_tensors("h.0.lora_A.weight", torch.float32), "found an adapter"),
}


@pytest.mark.parametrize("case", [*FILES, *(f"folder: {name}" for name in FOLDERS)])
def test_other_formats_are_refused_by_name(case: str, tmp_path: Path) -> None:
    if case.startswith("folder: "):
        path = tmp_path / "folder"
        path.mkdir()
        write, words = FOLDERS[case.removeprefix("folder: ")]
        write(path)
    else:
        name, data, words = FILES[case]
        path = tmp_path / name
        path.write_bytes(data)
    for command in CHECKPOINT_COMMANDS:
        done = tnfn(*_words(command, path, tmp_path / "out"))
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done
        assert re.search(words, done.stderr), done.stderr
        assert not (tmp_path / "out").exists()


def test_a_header_that_begins_like_another_format_is_still_read(tmp_path: Path) -> None:
    # A safetensors header of 0x1208 bytes begins with bytes that an ONNX file could begin with.
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"x": entry}).encode().ljust(0x120108)
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    done = tnfn("inspect", path)
    assert "ONNX" not in done.stderr
    assert "its tensors are those of no known family" in done.stderr


WRAPPED: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "DDP": lambda s: {f"module.{k}": w for k, w in s.items()},
    "compiled": lambda s: {f"_orig_mod.{k}": w for k, w in s.items()},
    "Lightning": lambda s: {
        "state_dict": {f"model.{k}": w for k, w in s.items()}, "epoch": 3, "global_step": 9,
        "optimizer_states": [{"lr": 0.1}],
    },
    "Lightning net": lambda s: {"state_dict": {f"net.{k}": w for k, w in s.items()}},
    "compiled in DDP in Lightning": lambda s: {
        "state_dict": {f"model.module._orig_mod.{k}": w for k, w in s.items()}
    },
    "Lightning in compiled": lambda s: {
        "model": {"state_dict": {f"_orig_mod.model.{k}": w for k, w in s.items()}, "epoch": 1}
    },
}  # fmt: skip


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_wrappers_are_removed(wrapper: str, tmp_path: Path) -> None:
    tiny_checkpoints.save("gpt2", tmp_path / "hub")
    state = load_file(tmp_path / "hub/model.safetensors")
    (tmp_path / "wrapped").mkdir()
    torch.save(WRAPPED[wrapper](state), tmp_path / "wrapped/pytorch_model.bin")
    config = (tmp_path / "hub/config.json").read_bytes()
    (tmp_path / "wrapped/config.json").write_bytes(config)
    done = tnfn("compare", tmp_path / "hub", tmp_path / "wrapped", "--prove")
    assert done.returncode == 0, done
    printed("inspect", tmp_path / "wrapped")
    if wrapper in ("Lightning", "compiled in DDP in Lightning"):
        # Untied, its new output matrix stands behind the same wrapper.
        printed("disguise", tmp_path / "wrapped", "--out", tmp_path / "other")
        written = torch.load(tmp_path / "other/pytorch_model.bin", weights_only=True)
        assert all(name.startswith("model.") for name in written)
        printed("compare", tmp_path / "hub", tmp_path / "other", "--prove")


def test_wrapped_networks_of_a_zoo_are_predicted_and_inspected(tmp_path: Path) -> None:
    from made_networks import ARCH, made

    from transformer_nfn.models import tensors_of
    from transformer_nfn.zoo.module import to_state_dict

    named = {n: w[0, 0] if n.startswith("blocks.") else w[0] for n, w in tensors_of(
        made(1, 7).network).items()}  # fmt: skip
    torch.save(to_state_dict(ARCH, named), tmp_path / "plain.pt")
    expected = printed("inspect", tmp_path / "plain.pt", "--json")
    for wrap in WRAPPED.values():
        torch.save(wrap(to_state_dict(ARCH, named)), tmp_path / "w.pt")
        done = tnfn("inspect", tmp_path / "w.pt", "--json")
        assert json.loads(done.stdout)["blocks"] == json.loads(expected)["blocks"]


def _sentence_transformer(gpt2: Path, home: Path) -> None:
    for name in ("1_Pooling", "2_Dense", "3_Normalize", ".cache", "checkpoint-5", "onnx"):
        (home / name).mkdir(parents=True)
    for name in ("model.safetensors", "config.json"):
        (home / name).write_bytes((gpt2 / name).read_bytes())
        (home / "checkpoint-5" / name).write_bytes((gpt2 / name).read_bytes())
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}, {"path": "3_Normalize"}]
    (home / "modules.json").write_text(json.dumps(modules))
    (home / "1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true}')
    save_file({"linear.weight": torch.ones(2, 2)}, home / "2_Dense/model.safetensors")
    (home / ".cache/x.json").write_text("{}")
    (home / "onnx/model.onnx").write_bytes(ONNX)


def test_subfolders_are_written_too(gpt2: Path, tmp_path: Path) -> None:
    home, out = tmp_path / "home", tmp_path / "out"
    _sentence_transformer(gpt2, home)
    printed("disguise", home, "--out", out)
    written = {str(path.relative_to(out)) for path in out.rglob("*")}
    assert written == {
        "model.safetensors", "config.json", "modules.json", "1_Pooling", "1_Pooling/config.json",
        "2_Dense", "2_Dense/model.safetensors", "3_Normalize", "onnx", "checkpoint-5",
        "checkpoint-5/config.json",
    }  # fmt: skip
    pooling = (out / "1_Pooling/config.json").read_bytes()
    assert pooling == (home / "1_Pooling/config.json").read_bytes()
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


def test_links_out_of_a_folder_are_not_followed(gpt2: Path, tmp_path: Path) -> None:
    home, out = tmp_path / "home", tmp_path / "out"
    _sentence_transformer(gpt2, home)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/secret.json").write_text("{}")
    (home / "linked").symlink_to(tmp_path / "elsewhere")
    printed("disguise", home, "--out", out)
    assert not (out / "linked").exists()
    (home / "1_Pooling/config.json").unlink()
    (home / "1_Pooling/config.json").symlink_to(tmp_path / "elsewhere/secret.json")
    assert_refused(
        "'1_Pooling/config.json' is a link that leads out of its folder",
        "disguise",
        home,
        "--out",
        tmp_path / "other",
    )
    assert not list((tmp_path / "other").rglob("*.*"))


def test_nan_anywhere_is_refused_by_inspect(tmp_path: Path) -> None:
    tiny_checkpoints.save("bert classifier", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["bert.embeddings.position_ids"] = torch.zeros(1, 9)  # ignored by BERT
    for name in (
        "bert.embeddings.word_embeddings.weight", "bert.embeddings.position_ids",
        "bert.pooler.dense.bias", "bert.encoder.layer.1.output.dense.weight", "classifier.bias",
    ):  # fmt: skip
        broken = state | {name: state[name].clone()}
        broken[name].view(-1)[0] = float("nan")
        save_file(broken, tmp_path / "model.safetensors")
        assert_refused(f"'{name}' expected numbers, found NaN", "inspect", tmp_path)
    state["bert.embeddings.position_ids"][0, 0] = -float("inf")  # a mask may hold it
    save_file(state, tmp_path / "model.safetensors")
    printed("inspect", tmp_path)
