"""Config fields: what changes the outputs of `transformers` is never called the same function."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny_families import HEADS, TINY, build, every_family, inputs_of, save
from transformer_nfn.checkpoints import open_model, relate
from transformer_nfn.checkpoints.fingerprints import compare_fingerprints, take_fingerprint
from transformer_nfn.errors import CheckpointError

transformers = pytest.importorskip("transformers")

OUTPUTS = ("logits", "last_hidden_state", "pooler_output", "text_embeds", "image_embeds")
NO_SETTINGS = {"model_type", "architectures", "dtype", "id2label", "label2id", "return_dict"}
NO_SETTINGS |= {"is_encoder_decoder"}  # of T5 it only spoils the library's cache
WINDOWS = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}


def other_values(name: str, value: Any) -> Iterator[Any]:
    """Values to try instead of one of a config."""
    if name.endswith("act") or "activation" in name or name.endswith("act_fn"):
        yield from ("relu", "gelu", "gelu_new", "silu")
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, 5)
    elif isinstance(value, float):
        yield from (1.3 * value, 1e3 * value)
    elif value is None:
        yield from (True, 5, 0.5)
    elif name == "layer_types":
        yield [WINDOWS[value[0]], *value[1:]]
    elif name == "rope_parameters":
        yield from ({**value, k: v / 2} for k, v in value.items() if isinstance(v, float))
        yield {**value, "rope_type": "linear", "factor": 2.0}
        yield {**value, "rope_type": "dynamic", "factor": 2.0}


def library_outputs(kind: Any, folder: Path, inputs: dict[str, Tensor]) -> Tensor | None:
    """What the library computes with a file, None where the file does not fit its config."""
    try:
        model, info = kind.from_pretrained(
            folder, attn_implementation="eager", output_loading_info=True
        )
        with torch.no_grad():
            out = model.eval()(**inputs)
    except Exception:  # of any kind: the library refuses the config
        return None
    if any(info.values()):
        return None
    return torch.cat([out[name].flatten() for name in OUTPUTS if name in out])


def is_seen(first: Path, second: Path) -> bool:
    """Whether `relate` and fingerprints see that two functions differ, or one file is refused."""
    try:
        with open_model(first) as a, open_model(second) as b:
            relation = relate(a, b)
            fingerprints = take_fingerprint(a), take_fingerprint(b)
    except CheckpointError:
        return True
    differ = relation.same_function is False or relation.verdict == "unclear"
    return differ and bool(compare_fingerprints(*fingerprints).changed)


def unseen_fields(family: str, folder: Path, only: tuple[str, ...] = ()) -> list[str]:
    """Changed fields that change the library's outputs, and that `relate` does not see."""
    library = build(family, dtype=torch.float32)
    save(library, folder / "a")
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in inputs_of(family).items()}
    for ids in (v for v in inputs.values() if not v.is_floating_point()):
        ids[:, [2, 4, 6]] = torch.tensor([2, 5, 1])
        ids[0, -1] = 0
    if family == "bart-class":  # reads its input a second time, shifted
        del inputs["decoder_input_ids"]
    before = library_outputs(type(library), folder / "a", inputs)
    assert before is not None
    stored = json.loads((folder / "a" / "config.json").read_text())
    shutil.copytree(folder / "a", folder / "b")
    unseen, seen = [], set()
    for name, value in transformers.AutoConfig.from_pretrained(folder / "a").to_dict().items():
        if name in NO_SETTINGS or (only and name not in only):
            continue
        for other in other_values(name, value):
            (folder / "b" / "config.json").write_text(json.dumps({**stored, name: other}))
            after = library_outputs(type(library), folder / "b", inputs)
            if after is None or after.shape != before.shape:
                continue
            if not (after - before).abs().max() > 1e-5 * before.abs().max():
                continue
            seen.add(name)
            if not is_seen(folder / "a", folder / "b"):
                unseen.append(f"{name}: {other}")
    assert seen >= set(only)
    return unseen


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("clip-text", ("eos_token_id",)),
        ("gpt2-class", ("pad_token_id",)),
        pytest.param(
            "bart-class", ("eos_token_id", "decoder_start_token_id"), marks=pytest.mark.nightly
        ),
    ],
)
def test_tokens_that_say_what_is_read(family, fields, tmp_path):
    assert unseen_fields(family, tmp_path, fields) == []


@every_family
def test_omitted_fields_mean_what_the_library_takes_them_for(family, tmp_path):
    library = build(family, dtype=torch.float32)
    save(library, tmp_path)
    config = library.config.to_dict()
    usual = type(library.config)().to_dict()
    needed = {"model_type": config["model_type"], "architectures": [type(library).__name__]}
    descriptions = []
    for omitted in ({}, usual):
        stated = {k: v for k, v in config.items() if k not in omitted or v != omitted[k]}
        (tmp_path / "config.json").write_text(json.dumps({**stated, **needed}))
        with open_model(tmp_path) as model:
            descriptions.append(model.description)
    assert descriptions[0] == descriptions[1]


def test_stored_rotary_frequencies_are_those_of_the_config(tmp_path):
    """The library reads the frequencies in a file of ESM, whatever its config says."""
    save(build("esm", dtype=torch.float32), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    stored = next(name for name in tensors if name.endswith("inv_freq"))
    save_file(tensors | {stored: tensors[stored].half().float()}, file, {"format": "pt"})
    open_model(tmp_path).close()
    save_file(tensors | {stored: 1.1 * tensors[stored]}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="rotary frequencies of its config"):
        open_model(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("family", TINY | HEADS)
def test_fields_of_every_family_are_seen(family, tmp_path):
    assert unseen_fields(family, tmp_path) == []
