"""Files and folders as other programs leave them: unwrapped, copied whole or refused by name."""

import json
import os
import re
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tiny_checkpoints
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_folders import write_adapter
from tnfn_command import assert_refused, printed, tnfn
from transformer_nfn.io import tensor_files

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


def _header(raw: bytes, size: int = 8) -> bytes:
    return struct.pack("<Q", len(raw)) + raw + bytes(size)


ENTRY = '{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
FIRST, SECOND = ENTRY % (0, 4), ENTRY % (4, 8)
ODD: dict[str, tuple[str, bytes, str]] = {
    "no name": ("x.safetensors", _header(f'{{"":{FIRST},"a":{SECOND}}}'.encode()),
                "holds a tensor whose name is empty"),
    "no name in a prefix": ("x.safetensors", _header(f'{{"model.":{FIRST},"model.a":{SECOND}}}'
                                                     .encode()), "of no known family"),
    "Latin-1": ("x.safetensors", _header(f'{{"é":{FIRST}}}'.encode("latin-1"), 4), "is not UTF-8"),
    "half a character": ("x.safetensors", _header(f'{{"\\ud800":{FIRST}}}'.encode(), 4),
                         "is not UTF-8"),
    "twice": ("x.safetensors", _header(f'{{"a":{FIRST},"b":{FIRST},"a":{SECOND}}}'.encode()),
              "'a' stands in it twice"),
    "shape twice": ("x.safetensors",
                    _header(f'{{"a":{FIRST}}}'.replace("[1]", '[2],"shape":[1]').encode(), 4),
                    "'shape' stands in it twice"),
    "config": ("hub/config.json", b'{"model_type": "gpt2", "n_head": 2, "n_head": 4}',
               "config.json' is ambiguous: 'n_head' stands in it twice"),
    "index": ("hub/model.safetensors.index.json",
              b'{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}',
              "index.json' is ambiguous: 'a' stands in it twice"),
    "module": ("hub/1_Pooling/config.json", b'{"pooling_mode_mean_tokens": true, '
               b'"pooling_mode_mean_tokens": false}', "'pooling_mode_mean_tokens' stands in it"),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_odd_names_are_one_sentence(case: str, gpt2: Path, tmp_path: Path) -> None:
    name, data, words = ODD[case]
    shutil.copytree(gpt2, tmp_path / "hub")
    if case == "index":
        (tmp_path / "hub/model.safetensors").unlink()
    if case == "module":
        (tmp_path / "hub/1_Pooling").mkdir()
        modules = [{"path": "1_Pooling", "type": "models.Pooling"}]
        (tmp_path / "hub/modules.json").write_text(json.dumps(modules))
    (tmp_path / name).write_bytes(data)
    path = tmp_path / name.split("/")[0]
    assert_refused(words, "inspect", path)
    assert_refused(words, "compare", path, gpt2)


@pytest.mark.parametrize("name", ["", b"\xff", "\ud800"])
def test_odd_names_in_a_state_dict_are_one_sentence(name: Any, tmp_path: Path) -> None:
    torch.save({name: torch.ones(2), "a": torch.ones(2)}, tmp_path / "x.pt")
    words = {"": "name is empty", b"\xff": "the name b'\\xff' is of kind bytes"}
    assert_refused(words.get(name, "name is not UTF-8"), "inspect", tmp_path / "x.pt")


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [_pipe, _device, Path.mkdir])
@pytest.mark.parametrize("name", [
    "config.json", "model.safetensors", "modules.json", "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors", "x.pt", "x.gguf", "x.index.json",
])  # fmt: skip
def test_what_is_no_file_is_named(
    name: str, make: Callable[[Path], None], gpt2: Path, tmp_path: Path
) -> None:
    path, place = tmp_path / "hub", tmp_path / "hub" / name
    shutil.copytree(gpt2, path)
    if name.startswith("adapter"):
        path = place.parent
        path.mkdir()
        (path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    elif name.startswith("x."):
        path = place
    place.unlink(missing_ok=True)
    make(place)
    if path == place and place.is_dir():
        words = "holds no weights"
    elif make is _device and path != place and name != "config.json":
        words = f"'{place.name}' is a link that leads out of its folder"
    else:
        words = f"'{place}' cannot be read: it is not a regular file"
    assert_refused(words, "inspect", path)


def test_a_folder_of_networks_is_no_network(gpt2: Path, tmp_path: Path) -> None:
    shutil.copytree(gpt2, tmp_path / "nets" / "one")
    words = f"is a folder of networks, and no network: name one, such as '{tmp_path}/nets/one'"
    for command in CHECKPOINT_COMMANDS:
        assert_refused(words, *_words(command, tmp_path / "nets", tmp_path / "out"))


@pytest.mark.parametrize("rank", ["2", 2.0, None, True])
def test_the_rank_of_an_adapter_is_a_number(rank: Any, gpt2: Path, tmp_path: Path) -> None:
    write_adapter(gpt2, tmp_path / "lora", ("c_attn",), fan_in_fan_out=True)
    config = json.loads((tmp_path / "lora/adapter_config.json").read_text())
    (tmp_path / "lora/adapter_config.json").write_text(json.dumps(config | {"r": rank}))
    words = f"r and rank_pattern expected whole numbers, found {str(rank)!r}"
    assert_refused(words, "inspect", tmp_path / "lora")


MANY = 20_000


def test_headers_are_read_as_fast_as_the_library_of_the_format_does(tmp_path: Path) -> None:
    """Of one file and of shards, once each; the measured ratio is 1.3."""
    names = [f"layer.{i}.weight" for i in range(MANY)]
    shards = {"x.safetensors": names, "a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        header = {name: json.loads(ENTRY % (4 * i, 4 * i + 4)) for i, name in enumerate(held)}
        (tmp_path / file).write_bytes(_header(json.dumps(header).encode(), 4 * len(held)))
    index = {name: "ab"[i % 2] + ".safetensors" for i, name in enumerate(names)}
    (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": index}))
    tnfn("inspect", tmp_path / "none")  # imports
    start = time.process_time()
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        names = file.keys()
        assert len([file.get_slice(name).get_shape() for name in names]) == MANY
    allowed = 4 * (time.process_time() - start) + 0.5
    for path, files in (("x.safetensors", 1), ("x.index.json", 2)):
        start = time.process_time()
        with patch.object(tensor_files, "parse_header", wraps=tensor_files.parse_header) as parse:
            assert_refused("are those of no known family", "inspect", tmp_path / path)
        assert time.process_time() - start < allowed
        assert parse.call_count == files


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

    from transformer_nfn.zoo.module import to_state_dict

    named = {name: w[0] for name, w in made(1, 7).network.views.items()}
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
