"""What is not read is refused in one sentence that names file, tensor or field, and why."""

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save
from torch import Tensor

import tiny_families
from tiny_families import nightly
from transformer_nfn.checkpoints.families import (
    OpenOptions,
    UnknownFamilyError,
    UnstatedFactError,
    open_model,
    read_family,
)
from transformer_nfn.errors import CheckpointError, SpaceError, TransformerNFNError

Change = Callable[[dict[str, Any], dict[str, Tensor]], object]
MLP = "model.layers.0.mlp.down_proj.weight"
NORM = "model.norm.weight"
# What the shapes in a file do not say.
UNSAID = (
    "hidden_act", "hidden_activation", "feed_forward_proj", "num_attention_heads",
    "num_key_value_heads", "sliding_window", "use_parallel_residual", "rope_parameters",
    "architectures", "num_heads", "head_dim", "num_experts_per_tok", "norm_topk_prob",
)  # fmt: skip


def _set(**fields: Any) -> Change:
    return lambda config, state: config.update(fields)


def _tensor(name: str, value: Tensor) -> Change:
    return lambda config, state: state.update({name: value})


def _without(*names: str) -> Change:
    return lambda config, state: [state.pop(name) for name in names]


def _drop(*fields: str) -> Change:
    return lambda config, state: [config.pop(name) for name in fields]


ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
BAD: dict[str, tuple[Change, str]] = {
    "model type": (_set(model_type="mamba"), "model_type expected one of .*llama.*, found 'mamba'"),
    "experts": (_set(num_local_experts=8), "'num_local_experts = 8' .*found a mixture of experts"),
    "experts by name": (
        _tensor("model.layers.0.mlp.experts.0.up_proj.weight", torch.ones(2)),
        r"'model\.layers\.0\.mlp\.experts\.0\.up_proj\.weight' .*found a mixture of experts",
    ),
    "quantised": (
        _set(quantization_config={"quant_method": "gptq"}),
        "'quantization_config' .*found weights quantised by gptq",
    ),
    "gptq": (
        _tensor("model.layers.0.mlp.up_proj.qweight", torch.ones(2, dtype=torch.int32)),
        "up_proj.qweight' .*found weights quantised by GPTQ or AWQ",
    ),
    "bitsandbytes": (
        _tensor(f"{MLP}.absmax", torch.ones(2)),
        "absmax' .*found weights quantised by bitsandbytes",
    ),
    "lora": (
        _tensor("model.layers.0.mlp.up_proj.lora_A.weight", torch.ones(2)),
        r"lora_A\.weight' .*found an adapter",
    ),
    "rotary": (_set(rope_parameters=ROPE), "'rope_parameters' expected a rotary scheme .*'yarn'"),
    "old rotary": (
        lambda config, state: (
            config.pop("rope_parameters"),
            config.update(rope_scaling={"type": "dynamic", "factor": 2.0}),
        ),
        "'rope_scaling' expected a rotary scheme .*'dynamic'",
    ),
    "rotary list": (_set(rope_parameters=[1]), r"'rope_parameters' expected a table, found \[1\]"),
    "rotary factor": (
        _set(rope_parameters={"rope_type": "linear"}),
        "config.json lacks 'factor' of its rotary scheme",
    ),
    "rotary base": (
        _set(rope_parameters={"rope_theta": -1}),
        "'rope_theta' expected a number above 0, found -1",
    ),
    "activation": (_set(hidden_act="mish"), r"activation \(.*\) expected one of .*, found 'mish'"),
    "width": (
        _set(hidden_size=20),
        r"expected shape \[17, 20\] \(vocab D; vocab = 17, D = 20\), found \[17, 16\]",
    ),
    "heads": (
        _set(num_attention_heads=8, head_dim=4),
        r"q_proj\.weight' expected shape \[32, 16\]",
    ),
    "groups": (_set(num_key_value_heads=3), r"k_proj\.weight' expected shape \[12, 16\]"),
    "blocks": (_set(num_hidden_layers=3), "says layer = 3 .*the file holds 2 blocks"),
    "no blocks": (
        _set(num_hidden_layers=0),
        "size layer .*expected a whole number above 0, found 0",
    ),
    "words": (_set(hidden_size="16"), "size D .*expected a whole number above 0, found '16'"),
    "half": (
        _set(intermediate_size=2.5),
        "size neuron .*expected a whole number above 0, found 2.5",
    ),
    "missing": (_without(MLP), rf"lacks '{MLP}', which holds '0.W_B' of Llama"),
    "missing end": (_without(NORM), rf"lacks '{NORM}', which holds 'norm.g' of Llama"),
    "missing head": (_without("lm_head.weight"), "lacks 'lm_head.weight', which holds 'head'"),
    "one bias": (
        _tensor("model.layers.0.self_attn.q_proj.bias", torch.ones(16)),
        r"lacks 'model\.layers\.1\.self_attn\.q_proj\.bias', which holds '1\.b_Q'",
    ),
    "wild number": (
        _tensor("model.layers.99999999.input_layernorm.weight", torch.ones(16)),
        "says layer = 2 .*, the file holds 22 blocks",
    ),
    "unknown": (
        _tensor("model.layers.0.self_attn.sinks", torch.ones(4)),
        r"holds 'model\.layers\.0\.self_attn\.sinks' \[4\], which Llama does not have",
    ),
    "integers": (
        _tensor(NORM, torch.ones(16, dtype=torch.int8)),
        f"'{NORM}' holds int8, expected weights in float64, float32",
    ),
    "float8": (
        _tensor(NORM, torch.ones(16).to(torch.float8_e4m3fn)),
        f"'{NORM}' holds float8_e4m3fn, expected weights in float64, float32",
    ),
    "shape": (
        _tensor(NORM, torch.ones(16, 1)),
        rf"'{NORM}' expected shape \[16\] .*found \[16, 1\]",
    ),
    "no type": (_drop("model_type"), "its tensors could be those of Llama or Mistral"),
}


ROUTER = "model.layers.0.block_sparse_moe.gate.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.{}.w2.weight"
BAD_MIXTURES: dict[str, tuple[Change, str]] = {
    "router": (
        _tensor(ROUTER, torch.ones(4, 16)),
        rf"'{ROUTER}' expected shape \[3, 16\] \(expert D; D = 16, expert = 3\), found \[4, 16\]",
    ),
    "missing expert": (
        _without(EXPERT.format(2)),
        rf"lacks '{EXPERT.format(2)}', which holds '1\.expert\.2\.W_B' of Mixtral",
    ),
    "more experts in the config": (
        _set(num_local_experts=4),
        r"lacks 'model\.layers\.0\.block_sparse_moe\.experts\.3\.w1\.weight'",
    ),
    "fewer experts in the config": (
        _set(num_local_experts=2), r"gate\.weight' expected shape \[2, 16\].*found \[3, 16\]",
    ),
    "a million experts": (_set(num_local_experts=1 << 20), r"lacks .*experts\.3\.w1\.weight'"),
    "a wild number": (
        _tensor(EXPERT.format(99999999), torch.ones(16, 20)),
        r"experts\.99999999\.w2\.weight' \[16, 20\], which Mixtral does not have",
    ),
    "active experts": (
        _set(num_experts_per_tok=4), r"active .* expected 1 to 3 of the 3 experts, found 4",
    ),
    "no router": (_without(ROUTER), f"lacks '{ROUTER}', which holds '0.router' of Mixtral"),
}  # fmt: skip
CASES = {name: ("llama", *bad) for name, bad in BAD.items()} | {
    f"mixture: {name}": ("mixtral", *bad) for name, bad in BAD_MIXTURES.items()
}
CASES["repeats"] = (
    "albert", _set(num_hidden_layers=1 << 40), r"repeats .*expected 1 to 4096, found 1099511627776",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_checkpoints(case: str, tmp_path: Path) -> None:
    family, change, words = CASES[case]
    save(family, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    state = load_file(tmp_path / "model.safetensors")
    change(config, state)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=words) as caught:
        open_model(tmp_path)
    text = str(caught.value)
    assert text.startswith(f"'{tmp_path}")
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1e38])
def test_what_is_no_number_is_refused_where_it_is_read(value: float, tmp_path: Path) -> None:
    save("llama", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state[MLP][1, 1] = value
    save_file(state, tmp_path / "model.safetensors")
    with open_model(tmp_path) as model:
        model.block(1)
        with pytest.raises(CheckpointError, match=f"'{MLP}' expected numbers, found (NaN|1e)"):
            model.block(0)


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("opt", {"word_embed_proj_dim": 8}, "OPT with an embedding of another width"),
        ("phi", {"qk_layernorm": True}, "Phi with a norm of queries and keys is not supported"),
        ("olmoe", {"clip_qkv": 8.0}, "OLMoE with clipped queries, keys and values"),
        ("t5", {"is_gated_act": True}, "expected MLPs with a gate, found no 'encoder.0.W_G'"),
        ("gemma2", {"layer_types": 3}, "'window': .*has no value"),
        ("gpt2", {"layer_norm_epsilon": "x"}, r"eps \(.*\) expected a number .*, found 'x'"),
        (
            "vit",
            {"patch_size": 2},
            r"projection.weight' expected shape \[16, 3, 2, 2\] \(D channel",
        ),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.4}}, "even number.*found 3"),
        ("bert", {"vocab_size": 18}, r"word_embeddings.weight' expected shape \[18, 16\]"),
    ],
)
def test_fields_that_do_not_fit(
    family: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    save(family, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(CheckpointError, match=words):
        open_model(tmp_path)


NONSENSE = (
    None, True, 0, -1, 3, 2**70, 10**400, 10**4000, 0.5, float("nan"), 1e308, "", "x", "gelu", [],
    [None], {}, {"rope_type": []}, ["sliding_attention"],
)  # fmt: skip


@pytest.mark.parametrize("each", [60, pytest.param(400, marks=pytest.mark.nightly)])
def test_mutated_checkpoints_are_read_or_refused(each: int, tmp_path: Path) -> None:
    chance = random.Random(0)
    sentences = []
    for family in ("gpt2", "bert", "gemma2", "t5", "vit", "mixtral"):
        save(family, tmp_path / family)
        config = json.loads((tmp_path / family / "config.json").read_text())
        file = tmp_path / family / "model.safetensors"
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for _ in range(each):
            changed = dict(config)
            for field in chance.sample(sorted(config), chance.randint(0, 2)):
                changed[field] = chance.choice(NONSENSE)
            broken = bytearray(data)
            for _ in range(chance.choice((0, 0, 1, 3))):
                broken[8 + chance.randrange(size)] = chance.randrange(256)
            (tmp_path / family / "config.json").write_text(json.dumps(changed))
            file.write_bytes(broken)
            try:
                with open_model(tmp_path / family) as model:
                    model.read(model.names)
            except TransformerNFNError as error:
                sentences.append(str(error))
    assert each < len(sentences) < 6 * each
    assert all(len(text.splitlines()) == 1 for text in sentences)


@pytest.mark.parametrize(
    "case",
    ["t5", "t5 encoder", "qwen3", "qwen3_moe", "olmoe", "gemma2", "phi3", "gpt_neox", "deit"],
)
def test_families_are_known_by_their_tensors(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    said = {field: config[field] for field in UNSAID if field in config}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with open_model(tmp_path) as model:
        assert model.description.family == case.split()[0]
    del said[next(iter(said))]
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(UnstatedFactError, match="does not state"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("gpt2", ("n_head", "activation_function", "architectures")),
        ("gpt2 untied", ("n_head", "activation_function")),
        ("bert", ("num_attention_heads", "hidden_act")),
        ("bert classifier", ("num_attention_heads", "hidden_act", "architectures")),
        ("vit base", ("num_attention_heads", "hidden_act", "pooler_act")),
        ("opt", ("num_attention_heads", "do_layer_norm_before", "activation_function",
                 "architectures")),
        ("llama", ("num_attention_heads", "num_key_value_heads", "hidden_act")),
        ("gpt_neox", ("num_attention_heads", "use_parallel_residual", "hidden_act",
                      "rotary_pct")),
        ("t5", ("feed_forward_proj", "architectures")),
    ],
)  # fmt: skip
def test_every_unstated_fact_is_asked_for_at_once(
    case: str, fields: tuple[str, ...], tmp_path: Path
) -> None:
    save(case, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").rename(tmp_path / "stated.json")
    families = {"bert classifier": "bert", "bert": "bert", "llama": "llama"}
    chosen = families.get(case)  # these have the tensors of another family too
    with pytest.raises(UnstatedFactError) as caught:
        open_model(tmp_path, OpenOptions(family=chosen))
    asked = re.findall(r"--set (\w+)=", str(caught.value))
    assert sorted(asked) == sorted(fields)
    assert len(str(caught.value).splitlines()) == 1
    pasted = tmp_path / "pasted.toml"
    pasted.write_text("\n".join(caught.value.lines))
    assert set(read_family(pasted).config) == set(fields)
    config["rotary_pct"] = config.get("rope_parameters", {}).get("partial_rotary_factor")
    config["architectures"] = config["architectures"][0]
    stated = OpenOptions(family=chosen, settings={field: config[field] for field in fields})
    with open_model(tmp_path, stated) as bare:
        description = bare.description
    (tmp_path / "stated.json").rename(tmp_path / "config.json")
    with open_model(tmp_path) as model:
        assert description.stacks == model.description.stacks
        assert (description.tied, description.headless) == (
            model.description.tied,
            model.description.headless,
        )


def test_a_config_that_names_its_model_type_has_the_defaults_of_its_library(
    tmp_path: Path,
) -> None:
    for case, field, family in (
        ("gpt2", "activation_function", "GPT2"), ("opt", "do_layer_norm_before", "OPT"),
        ("gpt_neox", "use_parallel_residual", "GPTNeoX"), ("bert", "hidden_act", "Bert"),
        ("mistral", "hidden_act", "Mistral"), ("distilbert", "activation", "DistilBert"),
        ("phi", "hidden_act", "Phi"), ("gemma2", "hidden_activation", "Gemma2"),
    ):  # fmt: skip
        save(case, tmp_path / case)
        with open_model(tmp_path / case) as model:
            before = model.description
        config = json.loads((tmp_path / case / "config.json").read_text())
        assert config.pop(field) == getattr(getattr(transformers, f"{family}Config")(), field)
        (tmp_path / case / "config.json").write_text(json.dumps(config))
        with open_model(tmp_path / case) as model:
            assert model.description == before


def test_what_a_file_cannot_say_is_asked_for(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    (tmp_path / "config.json").unlink()
    file = tmp_path / "other.safetensors"
    save_file({"W_Q": torch.ones(2, 2)}, file)
    with pytest.raises(UnknownFamilyError, match="its tensors are those of no known family"):
        open_model(file)
    own = tmp_path / "own.toml"
    own.write_text(
        'extends = "gpt2"\n[config]\nn_head = 4\nactivation_function = "relu"\n'
        'architectures = ["GPT2LMHeadModel"]\n'
    )
    with open_model(tmp_path, OpenOptions(own)) as model:
        assert model.description.stacks[0].blocks[0].attention.d_k == 4
        assert (model.description.vocab, model.description.tied) == (17, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = [", "is no data file"),
        ('extends = "gpt5"', "extends 'gpt5', expected one of albert, bart, "),
        ('extends = "gpt2"\nweights = 3', "'weights' is not a table of a data file"),
        ('extends = "gpt2"\n[sizes]\nD = "import os"', "'import os' is no expression"),
        ('extends = "gpt2"\n[names]\n"x" = "W_X: D"', "the line 'x' must say 'TENSOR: LAYOUT'"),
        ('extends = "gpt2"\n[names]\n"x" = "norm.g: D D"', "must name D once each, found 'D D'"),
        ('extends = "gpt2"\nstacks = 3', "is no data file"),
        ('[[stacks]]\nat = "h."\n[stacks.names]\n', "must name one size that counts the blocks"),
    ],
)
def test_bad_data_files(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(SpaceError, match=words) as caught:
        read_family(path)
    assert str(path) in str(caught.value)
    with pytest.raises(SpaceError, match="cannot be read"):
        read_family(tmp_path / "none.toml")


def test_code_in_a_data_file_is_never_run(tmp_path: Path) -> None:
    path, ran = tmp_path / "own.toml", tmp_path / "ran"
    save("gpt2", tmp_path)
    for text in (f"open('{ran}', 'w')", "().__class__", "[x for x in n_embd]", "lambda: 1"):
        path.write_text(f'extends = "gpt2"\n[sizes]\nD = "{text}"\n')
        with pytest.raises(TransformerNFNError):
            open_model(tmp_path, OpenOptions(path))
    assert not ran.exists()


def test_the_core_never_imports_the_library_of_others() -> None:
    code = "import sys, transformer_nfn.checkpoints.families as f; f.families(); "
    code += "assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


HEADS = ("bert", "albert", *nightly("bert-base", "roberta", "esm", "distilbert"))


@pytest.mark.parametrize("name", HEADS)
def test_a_part_beside_the_stacks_is_there_as_a_whole(name: str, tmp_path: Path) -> None:
    """The head of a masked language model without its bias is another function, not an option."""
    file = tiny_families.save(tiny_families.build(name), tmp_path) / "model.safetensors"
    with open_model(tmp_path) as model:
        entries = model.binding.entries.items()
        names = [n for n, e in entries if any(s.tensor.startswith("extra.") for s in e.slots)]
    state = load_file(file)
    assert names
    for gone in names:
        save_file({key: w for key, w in state.items() if key != gone}, file)
        with pytest.raises(CheckpointError, match=f"lacks '.*{re.escape(gone.split('.', 1)[1])}'"):
            open_model(tmp_path)
