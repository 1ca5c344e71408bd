"""Every family is read as its library reads it: the library's own modules are the oracle."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tiny_checkpoints import CASES, MORE, build, save, timm_state
from torch import Tensor, nn

from transformer_nfn.checkpoints.families import (
    Model,
    OpenOptions,
    families,
    open_model,
)
from transformer_nfn.errors import CheckpointError
from transformer_nfn.functional.transformer import transformer


def _rotary(library: nn.Module) -> nn.Module | None:
    return next((m for name, m in library.named_modules() if name.endswith("rotary_emb")), None)


@pytest.mark.parametrize("case", CASES)
def test_facts_are_those_of_the_library(case: str, tmp_path: Path) -> None:
    library: Any = save(case, tmp_path)
    with open_model(tmp_path) as model:
        description = model.description
    attention = description.stacks[0].blocks[0].attention
    rotary: Any = _rotary(library)
    if rotary is None:
        assert attention.rotary == 0
    else:
        expected = rotary.inv_freq.double()
        torch.testing.assert_close(attention.frequencies(), expected, rtol=1e-6, atol=0)
    layers: list[Any] = [
        module
        for name, module in library.named_modules()
        if hasattr(module, "scaling") and hasattr(module, "is_causal")
        if not name.startswith("decoder.block")
    ]
    for module in layers:
        assert attention.scale == pytest.approx(module.scaling)
        assert attention.causal == module.is_causal
    if case.startswith("t5"):
        assert attention.scale == 1
    windows = [getattr(m, "sliding_window", None) for m in layers]
    if any(windows):
        assert [b.attention.window for b in description.stacks[0].blocks] == windows
    embedding, output = library.get_input_embeddings(), library.get_output_embeddings()
    assert description.tied == (output is not None and output.weight is embedding.weight)
    assert description.headless == (case in ("gpt2 base", "bert base", "vit base", "t5 encoder"))


@pytest.mark.parametrize(
    ("case", "group"),
    [
        ("gpt2", "permutation and sign"),
        ("gpt2 untied", "orthogonal fixing ones"),
        ("bert", "permutation and sign"),
        ("vit", "orthogonal fixing ones"),
        ("llama", "orthogonal"),
        ("llama tied", "signed permutation"),
        ("gemma2", "signed permutation"),
        ("phi", "orthogonal fixing ones"),
        ("t5", "signed permutation"),
        ("t5 v1.1", "orthogonal"),
    ],
)
def test_what_acts_on_the_stream(case: str, group: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    with open_model(tmp_path) as model:
        assert model.description.stream_group == group


def test_ends(tmp_path: Path) -> None:
    library: Any = save("deit distilled", tmp_path / "deit").double()
    with open_model(tmp_path / "deit") as model, torch.no_grad():
        ends = model.read(model.names, torch.float64)
        image = torch.randn(1, 3, 8, 8, dtype=torch.float64)
        patches = image.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(4, -1)
        stream = torch.cat(
            [ends["cls"][None], ends["dist"][None], patches @ ends["patch"] + ends["patch_bias"]]
        )
        expected = library.deit.embeddings(image)[0]
        torch.testing.assert_close(stream + ends["position"], expected)
        x = torch.randn(2, 16, dtype=torch.float64)
        torch.testing.assert_close(
            x @ ends["extra.distillation.W"] + ends["extra.distillation.b"],
            library.distillation_classifier(x),
        )
        assert (model.description.channels, model.description.side) == (3, 4)
    library = save("bert", tmp_path / "bert").double()
    with open_model(tmp_path / "bert") as model, torch.no_grad():
        ends = model.read(model.names, torch.float64)
        hidden = nn.functional.gelu(x @ ends["extra.mlm.W"] + ends["extra.mlm.b"])
        hidden = nn.functional.layer_norm(
            hidden, (16,), ends["extra.mlm_norm.g"], ends["extra.mlm_norm.b"], 1e-12
        )
        torch.testing.assert_close(
            hidden @ ends["token"].T + ends["head_bias"], library.cls(x[None])[0]
        )
    library = save("t5", tmp_path / "t5").double()
    with open_model(tmp_path / "t5") as model:
        decoder = model.block(0, "decoder.")
        cross = library.decoder.block[0].layer[1].EncDecAttention
        torch.testing.assert_close(decoder["cross.W_K"], cross.k.weight.detach().view(4, 6, 16).mT)
        table = library.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        torch.testing.assert_close(decoder["bias_table"], table.detach())
        assert "bias_table" not in model.block(1, "encoder.")
        assert model.description.head_scale == 16**-0.5


@pytest.mark.parametrize("case", ["vit", "deit distilled"])
def test_the_layout_of_timm_holds_the_same_network(case: str, tmp_path: Path) -> None:
    library = save(case, tmp_path / "hub")
    folder = tmp_path / "timm"
    folder.mkdir()
    save_file(timm_state(library), folder / "model.safetensors")
    (folder / "config.json").write_text('{"architecture": "vit_x_patch4_8", "num_heads": 4}')
    with open_model(tmp_path / "hub") as hub, open_model(folder) as timm:
        assert timm.description.family == "vit_timm"
        assert hub.names.keys() == timm.names.keys()
        for name in hub.names:
            assert torch.equal(hub[name], timm[name]), name


@pytest.mark.parametrize(
    "changed",
    [
        {"global_pool": "avg"}, {"pretrained_cfg": {"global_pool": "avg"}},
        {"model_args": {"global_pool": "avg"}}, {"model_args": {"num_heads": 2}},
        {"model_args": {"no_embed_class": True}}, {"model_args": {"norm_layer": "rmsnorm"}},
        {"model_args": {"attn_layer": "diff"}}, {"architecture": "vit_x_patch4_rope_ape_8"},
    ],
)  # fmt: skip
def test_a_config_of_timm_that_changes_the_function_is_refused(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    save_file(timm_state(save("vit", tmp_path / "hub")), tmp_path / "model.safetensors")
    config: dict[str, Any] = {"architecture": "vit_x_patch4_8", "num_heads": 4}
    config["model_args"] = {"global_pool": "token", "img_size": 8, "num_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    open_model(tmp_path).close()
    del config["model_args"]
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(CheckpointError, match="is not supported"):
        open_model(tmp_path)


def test_a_whole_clip_is_read_one_tower_at_a_time(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2}
    text = {**small, "intermediate_size": 20, "vocab_size": 17, "max_position_embeddings": 9}
    text["eos_token_id"] = 2
    vision = {**small, "hidden_size": 24, "intermediate_size": 28, "image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=6)
    library: Any = transformers.CLIPModel(config).eval()
    library.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="--family clip_text or --family clip_vision"):
        open_model(tmp_path)
    ids, pixels = torch.randint(3, 17, (2, 7)), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = library(input_ids=ids, pixel_values=pixels)
    towers = {"clip_text": (ids, "text_embeds"), "clip_vision": (pixels, "image_embeds")}
    for family, (inputs, output) in towers.items():
        with open_model(tmp_path, OpenOptions(family=family)) as model:
            found = transformer(model.description, model, inputs)
        if family == "clip_text":  # the library takes the token with the largest id
            found = found[torch.arange(2), ids.argmax(-1)]
        found = found / found.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(found, expected[output], rtol=1e-4, atol=1e-5)


def test_every_family_is_tried() -> None:
    tried = {case.split()[0] for case in CASES | MORE} - {"llama3"}
    zoo = {"small_transformer", "small_transformer_module"}  # tests/checkpoints/test_chain.py
    own = {"torch_encoder", "torch_classifier"}  # tests/checkpoints/test_own_classifier.py
    assert tried | {"vit_timm"} | own | zoo == set(families())


def test_tensors_come_in_the_dtype_of_the_file(tmp_path: Path) -> None:
    save("phi3", tmp_path, torch.bfloat16)
    with open_model(tmp_path) as model:
        assert model.dtype == torch.bfloat16
        assert model["0.W_K"].dtype == torch.bfloat16
        assert model["0.W_K"].is_contiguous()
        assert model.block(0)["W_K"].dtype == torch.float64
        assert repr(model).endswith("phi3, 21 tensors)")


def _tensors(model: Model) -> dict[str, Tensor]:
    return {name: model[name] for name in model.names}


def test_wrappers_and_old_names_are_seen_through(tmp_path: Path) -> None:
    library = build("bert")
    state = {k: v for k, v in library.state_dict().items() if "decoder" not in k}
    renamed = {
        "module."
        + k.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): v.contiguous()
        for k, v in state.items()
    }
    renamed["module.bert.embeddings.position_ids"] = torch.arange(9)[None]
    library.save_pretrained(tmp_path)  # type: ignore[operator]
    with open_model(tmp_path) as model:
        before = _tensors(model)
    save_file(renamed, tmp_path / "model.safetensors")
    with open_model(tmp_path) as model:
        after = _tensors(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_data_file_of_the_documentation(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "add-a-family.md").read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(text.split("```toml\n")[2].split("```")[0])
    D, kv, f = 16, 8, 20
    shapes = {"emb.weight": (17, D), "norm.weight": (D,), "blocks.0.mask": (3,)}
    for i in range(2):
        shapes |= {
            f"blocks.{i}.norm1.weight": (D,),
            f"blocks.{i}.qkv.weight": (D + 2 * kv, D),
            f"blocks.{i}.out.weight": (D, D),
            f"blocks.{i}.norm2.weight": (D,),
            f"blocks.{i}.up.weight": (2 * f, D),
            f"blocks.{i}.down.weight": (D, f),
        }
    state = {f"model.{name}": torch.randn(shape) for name, shape in shapes.items()}
    save_file(state | {"head.weight": torch.randn(17, D)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"width": 16, "heads": 4, "kv_heads": 2}')
    with open_model(tmp_path, OpenOptions(tmp_path / "mine.toml")) as model:
        description = model.description
        assert (description.family, description.stream_group, description.vocab) == (
            "mine",
            "orthogonal",
            17,
        )
        assert description.stacks[0].blocks[1].attention.rotary == 4
        assert torch.equal(
            model["1.W_V"], state["model.blocks.1.qkv.weight"][-kv:].view(2, 4, D).mT
        )
        assert torch.equal(model["0.W_A"], state["model.blocks.0.up.weight"][f:].T)


def test_sinusoids_that_a_file_holds_are_weights(tmp_path: Path) -> None:
    library: Any = save("marian", tmp_path)
    with open_model(tmp_path) as model:
        assert model.description.stream_group == "none"
    save_file(
        {n: w.contiguous() for n, w in library.state_dict().items() if "embed_tokens" not in n}
        | {"lm_head.weight": library.lm_head.weight.detach().clone()},
        tmp_path / "model.safetensors",
    )
    with open_model(tmp_path) as model:
        assert model.description.stream_group == "permutation and sign"
        assert model.description.tied
        table = library.model.encoder.embed_positions.weight.detach()
        assert torch.equal(model["encoder.position"], table)
