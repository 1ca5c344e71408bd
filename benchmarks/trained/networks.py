"""How are several small language models trained at once? Weights stacked, one product for all.

Weights have the names and layouts of the files of the `transformers` library, with an axis of
models in front, so that a model is written by cutting out its part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from trained.text import VOCABULARY

Kind = Literal["gpt2", "llama"]
Weights = dict[str, Tensor]

WIDTH, HEADS, GROUPS, HEAD, LENGTH, DEPTH = 64, 4, 2, 16, 32, 3
NEURONS: dict[Kind, int] = {"gpt2": 256, "llama": 176}
CONFIGS: dict[Kind, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": WIDTH,
        "n_layer": DEPTH,
        "n_head": HEADS,
        "n_positions": LENGTH,
        "vocab_size": VOCABULARY,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD,
        "intermediate_size": NEURONS["llama"],
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}
BLOCK: dict[Kind, str] = {"gpt2": "transformer.h.{}.", "llama": "model.layers.{}."}
EMBEDDINGS: dict[Kind, tuple[str, ...]] = {
    "gpt2": ("transformer.wte.weight", "transformer.wpe.weight"),
    "llama": ("model.embed_tokens.weight",),
}


def shapes(kind: Kind) -> dict[str, tuple[int, ...]]:
    """Every tensor of a file."""
    D, f = WIDTH, NEURONS[kind]
    if kind == "gpt2":
        block = {
            "ln_1.weight": (D,), "ln_1.bias": (D,),
            "attn.c_attn.weight": (D, 3 * D), "attn.c_attn.bias": (3 * D,),
            "attn.c_proj.weight": (D, D), "attn.c_proj.bias": (D,),
            "ln_2.weight": (D,), "ln_2.bias": (D,),
            "mlp.c_fc.weight": (D, f), "mlp.c_fc.bias": (f,),
            "mlp.c_proj.weight": (f, D), "mlp.c_proj.bias": (D,),
        }  # fmt: skip
        ends = {
            "transformer.wte.weight": (VOCABULARY, D), "transformer.wpe.weight": (LENGTH, D),
            "transformer.ln_f.weight": (D,), "transformer.ln_f.bias": (D,),
        }  # fmt: skip
    else:
        block = {
            "input_layernorm.weight": (D,), "self_attn.q_proj.weight": (HEADS * HEAD, D),
            "self_attn.k_proj.weight": (GROUPS * HEAD, D),
            "self_attn.v_proj.weight": (GROUPS * HEAD, D),
            "self_attn.o_proj.weight": (D, HEADS * HEAD),
            "post_attention_layernorm.weight": (D,), "mlp.gate_proj.weight": (f, D),
            "mlp.up_proj.weight": (f, D), "mlp.down_proj.weight": (D, f),
        }  # fmt: skip
        ends = {"model.embed_tokens.weight": (VOCABULARY, D), "model.norm.weight": (D,)}
    blocks = {
        BLOCK[kind].format(i) + name: shape for i in range(DEPTH) for name, shape in block.items()
    }
    return {**ends, **blocks, "lm_head.weight": (VOCABULARY, D)}


def fresh(kind: Kind, seed: int) -> Weights:
    """One model as its library begins: normal weights of 0.02, gains of one, biases of zero."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in shapes(kind).items():
        if len(shape) == 1:
            gain = name.endswith("weight")
            out[name] = torch.ones(shape) if gain else torch.zeros(shape)
            continue
        writes = name.endswith(("c_proj.weight", "o_proj.weight", "down_proj.weight"))
        scale = 0.02 / math.sqrt(2 * DEPTH) if writes else 0.02
        out[name] = torch.randn(shape, generator=generator) * scale
    return out


def logits(kind: Kind, W: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """Of several models, each on its own tokens ``[m, rows, length]``."""
    m, rows, length = ids.shape
    token = W[EMBEDDINGS[kind][0]]
    first = torch.arange(m)[:, None, None] * VOCABULARY
    x = F.embedding(ids + first, token.flatten(0, 1)).flatten(1, 2)
    if kind == "gpt2":
        x = x + W["transformer.wpe.weight"][:, :length].repeat(1, rows, 1)
    run = _gpt2_block if kind == "gpt2" else _llama_block
    for i in range(DEPTH):
        start = BLOCK[kind].format(i)
        x = run(lambda name, start=start: W[start + name], x, rows, length)
    if kind == "gpt2":
        x = _norm(x, W["transformer.ln_f.weight"], W["transformer.ln_f.bias"])
    else:
        x = _norm(x, W["model.norm.weight"])
    return (x @ W["lm_head.weight"].mT).unflatten(1, (rows, length))


def _norm(x: Tensor, gain: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None:
        return F.rms_norm(x, (WIDTH,), eps=1e-6) * gain[:, None]
    return torch.addcmul(bias[:, None], F.layer_norm(x, (WIDTH,), eps=1e-5), gain[:, None])


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[m · rows, head, length, d] → [m · rows, length, head · d]``."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def _gpt2_block(W: Callable[[str], Tensor], x: Tensor, rows: int, length: int) -> Tensor:
    def linear(name: str, z: Tensor) -> Tensor:
        return torch.baddbmm(W(f"{name}.bias")[:, None], z, W(f"{name}.weight"))

    qkv = linear("attn.c_attn", _norm(x, W("ln_1.weight"), W("ln_1.bias")))
    q, k, v = qkv.reshape(-1, length, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
    x = x + linear("attn.c_proj", _attend(q, k, v).reshape(x.shape))
    hidden = linear("mlp.c_fc", _norm(x, W("ln_2.weight"), W("ln_2.bias")))
    return x + linear("mlp.c_proj", F.gelu(hidden, approximate="tanh"))


def _llama_block(W: Callable[[str], Tensor], x: Tensor, rows: int, length: int) -> Tensor:
    def linear(name: str, z: Tensor) -> Tensor:
        return z @ W(f"{name}.weight").mT

    z = _norm(x, W("input_layernorm.weight"))
    q, k, v = (
        linear(f"self_attn.{p}_proj", z).reshape(-1, length, n, HEAD).transpose(1, 2)
        for p, n in (("q", HEADS), ("k", GROUPS), ("v", GROUPS))
    )
    share = HEADS // GROUPS
    k, v = (t.repeat_interleave(share, 1) for t in (_turned(k), v))
    x = x + linear("self_attn.o_proj", _attend(_turned(q), k, v).reshape(x.shape))
    z = _norm(x, W("post_attention_layernorm.weight"))
    gated = F.silu(linear("mlp.gate_proj", z)) * linear("mlp.up_proj", z)
    return x + linear("mlp.down_proj", gated)


def _turned(q: Tensor) -> Tensor:
    """Rotary positions, pairs (i, i + d/2)."""
    half = HEAD // 2
    speed = 10000.0 ** (-torch.arange(half) / half)
    angle = torch.arange(q.shape[-2])[:, None] * speed
    first, second = q[..., :half], q[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def stacked(models: list[Weights]) -> Weights:
    """Models of one kind as one set of weights with an axis of models in front."""
    return {name: torch.stack([w[name] for w in models]) for name in models[0]}


def write(weights: Weights, kind: Kind, folder: Path) -> None:
    """A folder as the library's `from_pretrained` reads it; complete once its config is there."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.safetensors"
    save_file({n: w.contiguous() for n, w in weights.items()}, file, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind], indent=2))


def read(folder: Path) -> Weights:
    """The tensors of a folder."""
    return dict(load_file(folder / "model.safetensors"))
