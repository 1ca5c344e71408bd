"""Hub folders converted to GGUF by the rules of llama.cpp, written down a second time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

LLAMA = {
    r"model\.embed_tokens\.": "token_embd.",
    r"model\.norm\.": "output_norm.",
    r"lm_head\.": "output.",
    r"model\.layers\.(\d+)\.input_layernorm\.": r"blk.\1.attn_norm.",
    r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.": r"blk.\1.attn_\2.",
    r"model\.layers\.(\d+)\.self_attn\.([qk])_norm\.": r"blk.\1.attn_\2_norm.",
    r"model\.layers\.(\d+)\.self_attn\.o_proj\.": r"blk.\1.attn_output.",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.": r"blk.\1.ffn_norm.",
    r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.": r"blk.\1.ffn_\2.",
}
NAMES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma2": LLAMA | {
        r"model\.layers\.(\d+)\.post_attention_layernorm\.": r"blk.\1.post_attention_norm.",
        r"model\.layers\.(\d+)\.pre_feedforward_layernorm\.": r"blk.\1.ffn_norm.",
        r"model\.layers\.(\d+)\.post_feedforward_layernorm\.": r"blk.\1.post_ffw_norm.",
    },
    "phi3": LLAMA | {
        r"model\.layers\.(\d+)\.self_attn\.qkv_proj\.": r"blk.\1.attn_qkv.",
        r"model\.layers\.(\d+)\.mlp\.gate_up_proj\.": r"blk.\1.ffn_up.",
    },
    "phi": LLAMA | {
        r"model\.final_layernorm\.": "output_norm.",
        r"model\.layers\.(\d+)\.self_attn\.dense\.": r"blk.\1.attn_output.",
        r"model\.layers\.(\d+)\.mlp\.fc1\.": r"blk.\1.ffn_up.",
        r"model\.layers\.(\d+)\.mlp\.fc2\.": r"blk.\1.ffn_down.",
    },
    "gpt2": {
        r"transformer\.wte\.": "token_embd.",
        r"transformer\.wpe\.": "position_embd.",
        r"transformer\.ln_f\.": "output_norm.",
        r"lm_head\.": "output.",
        r"transformer\.h\.(\d+)\.ln_1\.": r"blk.\1.attn_norm.",
        r"transformer\.h\.(\d+)\.ln_2\.": r"blk.\1.ffn_norm.",
        r"transformer\.h\.(\d+)\.attn\.c_attn\.": r"blk.\1.attn_qkv.",
        r"transformer\.h\.(\d+)\.attn\.c_proj\.": r"blk.\1.attn_output.",
        r"transformer\.h\.(\d+)\.mlp\.c_fc\.": r"blk.\1.ffn_up.",
        r"transformer\.h\.(\d+)\.mlp\.c_proj\.": r"blk.\1.ffn_down.",
    },
    "bert": {
        r"embeddings\.word_embeddings\.": "token_embd.",
        r"embeddings\.position_embeddings\.": "position_embd.",
        r"embeddings\.token_type_embeddings\.": "token_types.",
        r"embeddings\.LayerNorm\.": "token_embd_norm.",
        r"encoder\.layer\.(\d+)\.attention\.self\.(q|k|v)\w+\.": r"blk.\1.attn_\2.",
        r"encoder\.layer\.(\d+)\.attention\.output\.dense\.": r"blk.\1.attn_output.",
        r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.": r"blk.\1.attn_output_norm.",
        r"encoder\.layer\.(\d+)\.intermediate\.dense\.": r"blk.\1.ffn_up.",
        r"encoder\.layer\.(\d+)\.output\.dense\.": r"blk.\1.ffn_down.",
        r"encoder\.layer\.(\d+)\.output\.LayerNorm\.": r"blk.\1.layer_output_norm.",
    },
}  # fmt: skip
ARCHITECTURES = {"mistral": "llama", "phi": "phi2"}


def write_gguf(
    folder: Path,
    out: Path,
    kind: str = "F32",
    *,
    permute: bool = True,
    extra: dict[str, Tensor] | None = None,
    raw: dict[str, tuple[str, np.ndarray]] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Convert a hub folder.

    Args:
        folder: ``model.safetensors`` and ``config.json``.
        out: the file.
        kind: type of matrices whose rows are whole blocks; other tensors are float32.
        permute: reorder the queries and keys of Llama, which its rotary positions need.
        extra: further tensors.
        raw: tensors whose type and bytes are given.
        metadata: values by key without the architecture; None takes a key away.
    """
    config = json.loads((folder / "config.json").read_text())
    model_type = config["model_type"]
    writer = gguf.GGUFWriter(out, ARCHITECTURES.get(model_type, model_type))
    _write_config(writer, config)
    pooling = folder / "1_Pooling" / "config.json"
    if pooling.is_file():
        modes = json.loads(pooling.read_text())
        for mode, kind_ in (("mean_tokens", "MEAN"), ("cls_token", "CLS")):
            if modes.get(f"pooling_mode_{mode}"):
                writer.add_pooling_type(gguf.PoolingType[kind_])
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(f"{writer.arch}.{key}", None)
        if value is not None:
            writer.add_key_value(f"{writer.arch}.{key}", value, gguf.GGUFValueType.get_type(value))
    for key, stored in load_file(folder / "model.safetensors").items():
        name = _renamed(key.removeprefix("bert."), NAMES[model_type])
        if name is None:
            continue
        if name in (raw or {}):
            type_ = gguf.GGMLQuantizationType[raw[name][0]]
            writer.add_tensor(name, raw[name][1], raw_dtype=type_)
            continue
        w = _changed(model_type, name, stored.float(), config, permute).contiguous().numpy()
        type_ = gguf.GGMLQuantizationType[kind]
        block = gguf.GGML_QUANT_SIZES[type_][0]
        if w.ndim == 1 or w.shape[-1] % block or kind == "F32":
            writer.add_tensor(name, w)
        else:
            writer.add_tensor(name, gguf.quants.quantize(w, type_), raw_dtype=type_)
    for name, w in (extra or {}).items():
        writer.add_tensor(name, w.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _renamed(key: str, names: dict[str, str]) -> str | None:
    for pattern, name in names.items():
        if re.match(pattern, key):
            return re.sub(pattern, name, key)
    return None


def _changed(model_type: str, name: str, w: Tensor, config: dict, permute: bool) -> Tensor:
    if model_type in ("llama", "mistral") and permute:
        for part, field in (("attn_q.", "num_attention_heads"), ("attn_k.", "num_key_value_heads")):
            if part in name:
                heads = config[field]
                half = len(w) // heads // 2
                return torch.stack([
                    w[head * 2 * half + pair + second * half]
                    for head in range(heads) for pair in range(half) for second in (0, 1)
                ])  # fmt: skip
    if model_type == "gpt2" and w.ndim == 2 and name.startswith("blk."):
        return w.T
    if model_type == "gemma2" and name.endswith("norm.weight"):
        return w + 1
    return w


def _write_config(writer: gguf.GGUFWriter, config: dict) -> None:
    rope = config.get("rope_parameters") or {}
    writer.add_vocab_size(config["vocab_size"])
    writer.add_token_list([f"token {i}" for i in range(config["vocab_size"])])
    writer.add_embedding_length(config.get("hidden_size") or config["n_embd"])
    writer.add_block_count(config.get("num_hidden_layers") or config["n_layer"])
    heads = config.get("num_attention_heads") or config["n_head"]
    writer.add_head_count(heads)
    writer.add_context_length(config.get("max_position_embeddings") or config["n_positions"])
    width = config.get("hidden_size") or config["n_embd"]
    writer.add_feed_forward_length(config.get("intermediate_size") or 4 * width)
    size = config.get("head_dim") or width // heads
    if "num_key_value_heads" in config:
        writer.add_head_count_kv(config["num_key_value_heads"])
        part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        writer.add_rope_dimension_count(int(part * size))
        writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if config.get("head_dim"):
        writer.add_key_length(size)
        writer.add_value_length(size)
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        names = ("layer_norm_epsilon", "layer_norm_eps")
        writer.add_layer_norm_eps(next(config[name] for name in names if name in config))
    if config["model_type"] == "bert":
        writer.add_causal_attention(False)
    if config["model_type"] in ("gemma2", "phi3"):
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
