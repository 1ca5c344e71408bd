"""What is written back is the source's layout to the bit, loads in its library, or is not there."""

import filecmp
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import CASES, MORE, build, save
from torch import Tensor

from transformer_nfn.checkpoints.families import Model, OpenOptions, open_model, write_model
from transformer_nfn.errors import CheckpointError, SpaceError, WriteError


def tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in float64, as whoever changes weights has them."""
    for name in reversed(list(model.names)):
        yield name, model[name].double()


def assert_same_files(first: Path, second: Path) -> None:
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    _, unlike, odd = filecmp.cmpfiles(first, second, names, shallow=False)
    assert not unlike
    assert not odd


@pytest.mark.parametrize("case", CASES | MORE)
def test_a_round_trip_keeps_every_byte(case: str, tmp_path: Path) -> None:
    library: Any = save(case, tmp_path / "a")
    with open_model(tmp_path / "a") as model:
        write_model(model, tensors(model), tmp_path / "b")
    assert_same_files(tmp_path / "a", tmp_path / "b")
    again = type(library).from_pretrained(tmp_path / "b")
    before, after = library.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [("gpt2", torch.float64), ("gemma2", torch.bfloat16), ("phi3", torch.float16)],
)
def test_dtypes_and_shards_stay(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save(case, tmp_path / "a", dtype, shard="3KB")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    (tmp_path / "a" / "merges.txt").write_text("a b")
    with open_model(tmp_path / "a") as model:
        write_model(model, dict(tensors(model)), tmp_path / "b")
    assert_same_files(tmp_path / "a", tmp_path / "b")


def test_what_changes_is_written_and_nothing_else(tmp_path: Path) -> None:
    save("gemma2", tmp_path / "a", torch.bfloat16)
    changed = {"0.W_K", "1.after_2.g", "token"}
    with open_model(tmp_path / "a") as model:
        pairs = ((n, w * 2 if n in changed else w) for n, w in tensors(model))
        write_model(model, pairs, tmp_path / "b")
        with open_model(tmp_path / "b") as other:
            for name in model.names:
                factor = 2 if name in changed else 1
                expected = (model[name] * factor).double()
                close = (
                    dict(rtol=0, atol=0) if name != "1.after_2.g" else dict(rtol=0.01, atol=0.02)
                )
                torch.testing.assert_close(other[name].double(), expected, **close)


@pytest.mark.parametrize("sharded", [False, True])
def test_state_dicts_of_torch(sharded: bool, tmp_path: Path) -> None:
    library: Any = build("bert")
    folder = tmp_path / "a"
    library.config.save_pretrained(folder)
    state = library.state_dict() | {"bert.embeddings.position_ids": torch.arange(9)[None]}
    names = list(state)
    if sharded:
        parts = {"one.bin": names[::2], "two.bin": names[1::2]}
        for file, held in parts.items():
            torch.save({name: state[name].clone() for name in held}, folder / file)
        index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        torch.save(state, folder / "pytorch_model.bin")
    with open_model(folder) as model:
        # Weights that are tied stand in the file twice.
        assert len(model.binding.holders["token"]) == 2
        write_model(model, tensors(model), tmp_path / "b")
    files = sorted(path.name for path in folder.iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    for path in (tmp_path / "b").glob("*.bin"):
        before = torch.load(folder / path.name, weights_only=True)
        after = torch.load(path, weights_only=True)
        assert list(before) == list(after)
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_one_file_is_written_as_one_file(tmp_path: Path) -> None:
    library = build("t5")
    library.save_pretrained(tmp_path / "a")  # type: ignore[operator]
    file = tmp_path / "a" / "model.safetensors"
    stated = {"feed_forward_proj": "relu", "architectures": "T5ForConditionalGeneration"}
    with open_model(file, OpenOptions(settings=stated)) as model:  # sizes are in the shapes
        assert model.description.stacks[1].blocks[0].attention.d_k == 6
        write_model(model, tensors(model), tmp_path / "b.safetensors")
    assert file.read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_buffers_go_along(tmp_path: Path) -> None:
    save("gpt2", tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    state = load_file(file)
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 9, 9, dtype=torch.uint8).tril()
    state["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(state, file, {"format": "pt"})
    with open_model(tmp_path / "a") as model:
        assert not any("attn.bias" in name for name in model.names)
        write_model(model, tensors(model), tmp_path / "b")
    assert_same_files(tmp_path / "a", tmp_path / "b")


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    save("llama", tmp_path / "a", shard="3KB")
    with open_model(tmp_path / "a") as model:
        whole = dict(tensors(model))

        def breaks() -> Iterator[tuple[str, Tensor]]:
            yield from list(whole.items())[:9]
            raise RuntimeError("power cut")

        with pytest.raises(RuntimeError, match="power cut"):
            write_model(model, breaks(), tmp_path / "b")
        short = {name: w for name, w in whole.items() if name != "1.W_Q"}
        bad = {
            "'1.W_Q' .* was not given to write": short,
            "has no tensor '9.W_Q'": whole | {"9.W_Q": whole["1.W_Q"]},
            r"'1.W_Q' expected shape \[4, 16, 4\], found \[2\]": whole | {"1.W_Q": torch.ones(2)},
            "'0.W_Q' was given twice": [*whole.items(), ("0.W_Q", whole["0.W_Q"])],
        }
        for words, given in bad.items():
            with pytest.raises(SpaceError, match=words):
                write_model(model, given, tmp_path / "b")
        with pytest.raises(WriteError, match=r"norm\.weight' expected numbers that float32"):
            write_model(model, whole | {"norm.g": whole["norm.g"] * 1e300}, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_nothing_is_overwritten_by_mistake(tmp_path: Path) -> None:
    save("llama", tmp_path / "a", shard="3KB")
    save("llama", tmp_path / "b")
    with open_model(tmp_path / "a") as model:
        with pytest.raises(WriteError, match="is what the weights are read from"):
            write_model(model, tensors(model), tmp_path / "a")
        with pytest.raises(WriteError, match=r"holds other files \('config\.json'\)"):
            write_model(model, tensors(model), tmp_path / "b")
        with pytest.raises(WriteError, match="is a file"):
            write_model(model, tensors(model), tmp_path / "b" / "config.json")


def test_tensors_tied_in_the_config_must_be_equal(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state["lm_head.weight"] = state["transformer.wte.weight"] + 1
    save_file(state, file)
    with (
        open_model(tmp_path) as model,
        pytest.raises(
            CheckpointError,
            match=r"'transformer\.wte\.weight' and 'lm_head\.weight' expected the same",
        ),
    ):
        model["token"]
