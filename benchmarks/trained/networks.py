"""Several small language models as one stack of weights: one product serves all of them.

Weights have the names and layouts of the files of the `transformers` library, with an axis of
models in front, so that a model is written by cutting out its part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

Kind = Literal["gpt2", "llama", "bert"]
Weights = dict[str, Tensor]
Read = Callable[[str], Tensor]

BLOCK: dict[Kind, str] = {
    "gpt2": "transformer.h.{}.",
    "llama": "model.layers.{}.",
    "bert": "bert.encoder.layer.{}.",
}
EMBEDDINGS: dict[Kind, tuple[str, ...]] = {
    "gpt2": ("transformer.wte.weight", "transformer.wpe.weight"),
    "llama": ("model.embed_tokens.weight",),
    "bert": (
        "bert.embeddings.word_embeddings.weight",
        "bert.embeddings.position_embeddings.weight",
        "bert.embeddings.token_type_embeddings.weight",
    ),
}
WRITERS = ("c_proj.weight", "o_proj.weight", "down_proj.weight", "output.dense.weight")
"""Ends of the names of matrices that write to the stream: they start smaller."""


@dataclass(frozen=True)
class Size:
    """Architecture and sizes of a small language model.

    GPT-2 and Llama have an output matrix of their own; BERT's is its token embedding.
    """

    kind: Kind
    width: int = 64
    depth: int = 3
    length: int = 32
    vocabulary: int = 256
    head: int = 16

    def __str__(self) -> str:
        return f"{self.kind}-{self.width}x{self.depth}"

    @property
    def heads(self) -> int:
        return self.width // self.head

    @property
    def groups(self) -> int:
        """Heads of keys and values: half as many in a Llama with an even number of heads."""
        return self.heads // 2 if self.kind == "llama" and self.heads % 2 == 0 else self.heads

    @property
    def neurons(self) -> int:
        return self.width * 11 // 4 if self.kind == "llama" else 4 * self.width

    @property
    def config(self) -> dict[str, Any]:
        """What `config.json` holds."""
        if self.kind == "gpt2":
            return {
                "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"],
                "n_embd": self.width, "n_layer": self.depth, "n_head": self.heads,
                "n_positions": self.length, "vocab_size": self.vocabulary,
                "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
                "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
            }  # fmt: skip
        config = {
            "hidden_size": self.width, "num_hidden_layers": self.depth,
            "num_attention_heads": self.heads, "intermediate_size": self.neurons,
            "vocab_size": self.vocabulary, "max_position_embeddings": self.length,
        }  # fmt: skip
        if self.kind == "bert":
            return config | {
                "model_type": "bert", "architectures": ["BertForMaskedLM"],
                "type_vocab_size": 1, "hidden_act": "gelu", "layer_norm_eps": 1e-5,
                "tie_word_embeddings": True, "pad_token_id": 0,
            }  # fmt: skip
        return config | {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"],
            "num_key_value_heads": self.groups, "head_dim": self.head,
            "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
            "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
        }  # fmt: skip

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a file."""
        block, ends = {"gpt2": _gpt2, "llama": _llama, "bert": _bert}[self.kind](self)
        start = BLOCK[self.kind]
        blocks = {start.format(i) + n: s for i in range(self.depth) for n, s in block.items()}
        return {**ends, **blocks}


Shapes = dict[str, tuple[int, ...]]


def _gpt2(size: Size) -> tuple[Shapes, Shapes]:
    D, f, vocabulary = size.width, size.neurons, size.vocabulary
    block: Shapes = {
        "ln_1.weight": (D,), "ln_1.bias": (D,),
        "attn.c_attn.weight": (D, 3 * D), "attn.c_attn.bias": (3 * D,),
        "attn.c_proj.weight": (D, D), "attn.c_proj.bias": (D,),
        "ln_2.weight": (D,), "ln_2.bias": (D,),
        "mlp.c_fc.weight": (D, f), "mlp.c_fc.bias": (f,),
        "mlp.c_proj.weight": (f, D), "mlp.c_proj.bias": (D,),
    }  # fmt: skip
    return block, {
        "transformer.wte.weight": (vocabulary, D), "transformer.wpe.weight": (size.length, D),
        "transformer.ln_f.weight": (D,), "transformer.ln_f.bias": (D,),
        "lm_head.weight": (vocabulary, D),
    }  # fmt: skip


def _llama(size: Size) -> tuple[Shapes, Shapes]:
    D, f, grouped = size.width, size.neurons, size.groups * size.head
    block: Shapes = {
        "input_layernorm.weight": (D,), "self_attn.q_proj.weight": (D, D),
        "self_attn.k_proj.weight": (grouped, D), "self_attn.v_proj.weight": (grouped, D),
        "self_attn.o_proj.weight": (D, D), "post_attention_layernorm.weight": (D,),
        "mlp.gate_proj.weight": (f, D), "mlp.up_proj.weight": (f, D),
        "mlp.down_proj.weight": (D, f),
    }  # fmt: skip
    ends: Shapes = {"model.embed_tokens.weight": (size.vocabulary, D), "model.norm.weight": (D,)}
    return block, ends | {"lm_head.weight": (size.vocabulary, D)}


def _bert(size: Size) -> tuple[Shapes, Shapes]:
    D, f = size.width, size.neurons

    def linear(name: str, outputs: int, inputs: int) -> Shapes:
        return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}

    def norm(name: str) -> Shapes:
        return {f"{name}.LayerNorm.weight": (D,), f"{name}.LayerNorm.bias": (D,)}

    block: Shapes = {}
    for part in ("query", "key", "value"):
        block |= linear(f"attention.self.{part}", D, D)
    block |= linear("attention.output.dense", D, D) | norm("attention.output")
    block |= linear("intermediate.dense", f, D) | linear("output.dense", D, f) | norm("output")
    rows = (size.vocabulary, size.length, 1)
    ends: Shapes = {name: (n, D) for name, n in zip(EMBEDDINGS["bert"], rows, strict=True)}
    ends |= norm("bert.embeddings") | linear("cls.predictions.transform.dense", D, D)
    ends |= norm("cls.predictions.transform") | {"cls.predictions.bias": (size.vocabulary,)}
    return block, ends


def fresh(size: Size, seed: int) -> Weights:
    """One model as its library begins: normal weights of 0.02, gains of one, biases of zero."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in size.shapes.items():
        if len(shape) == 1:
            gain = name.endswith("weight")
            out[name] = torch.ones(shape) if gain else torch.zeros(shape)
            continue
        scale = 0.02 / math.sqrt(2 * size.depth) if name.endswith(WRITERS) else 0.02
        out[name] = torch.randn(shape, generator=generator) * scale
    return out


def logits(
    size: Size,
    W: Mapping[str, Tensor],
    ids: Tensor,
    dtype: torch.dtype = torch.float32,
    at: Tensor | None = None,
) -> Tensor:
    """Of several models, each on its own tokens ``[m, rows, length]``.

    With ``at``, ``[m, rows, k]``, at those positions of each row alone.
    Matrices are multiplied in ``dtype``; the stream, the norms and the logits stay in float32.
    """
    rows, length = ids.shape[1:]
    run = _Blocks(size, length, dtype)

    def under(start: str) -> Read:
        return lambda name: W[start + name]

    token = W[EMBEDDINGS[size.kind][0]]
    # As a product, whose gradient is a product too.
    chosen = ids.flatten(1).unsqueeze(-1) == torch.arange(size.vocabulary, device=ids.device)
    x = run.times(chosen, token).float()
    for table in EMBEDDINGS[size.kind][1:]:
        position = W[table][:, :length].expand(-1, length, -1)  # one row of types for all
        x = x + position.repeat(1, rows, 1)
    if size.kind == "bert":
        x = run.norm(under("bert.embeddings.LayerNorm"), x)
    for i in range(size.depth):
        x = getattr(run, size.kind)(under(BLOCK[size.kind].format(i)), x)
    if at is not None:
        width, length = x.shape[-1], at.shape[-1]
        x = x.unflatten(1, ids.shape[1:]).gather(2, at.unsqueeze(-1).expand(-1, -1, -1, width))
        x = x.flatten(1, 2)
    if size.kind == "bert":
        start = "cls.predictions.transform."
        x = F.gelu(run.linear(under(start + "dense"), x))
        x = run.norm(under(start + "LayerNorm"), x)
        out = run.times(x, token.mT).float() + W["cls.predictions.bias"].unsqueeze(1)
    else:
        x = run.norm(under("transformer.ln_f" if size.kind == "gpt2" else "model.norm"), x)
        out = run.times(x, W["lm_head.weight"].mT).float()
    return out.unflatten(1, (rows, length))


@dataclass(frozen=True)
class _Blocks:
    """The blocks of a size on a stream ``[m, rows · length, D]``."""

    size: Size
    length: int
    dtype: torch.dtype

    def times(self, z: Tensor, w: Tensor) -> Tensor:
        return torch.bmm(z.to(self.dtype), w.to(self.dtype))

    def linear(self, W: Read, z: Tensor) -> Tensor:
        """``z W + b``; files of GPT-2 hold ``[in, out]``, others ``[out, in]``."""
        w, bias = W(".weight").to(self.dtype), W(".bias").to(self.dtype).unsqueeze(1)
        return torch.baddbmm(bias, z.to(self.dtype), w if self.size.kind == "gpt2" else w.mT)

    def norm(self, W: Read, x: Tensor) -> Tensor:
        width, gain = (self.size.width,), W(".weight").unsqueeze(1)
        if self.size.kind == "llama":
            return F.rms_norm(x.float(), width, eps=1e-6) * gain
        bias = W(".bias").unsqueeze(1)
        return torch.addcmul(bias, F.layer_norm(x.float(), width, eps=1e-5), gain)

    def heads(self, z: Tensor, count: int) -> Tensor:
        """``[m, rows · length, count · d] → [m · rows, count, length, d]``."""
        return z.reshape(-1, self.length, count, self.size.head).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, like: Tensor) -> Tensor:
        causal = self.size.kind != "bert"
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return mixed.transpose(1, 2).reshape(like.shape)

    def gpt2(self, W: Read, x: Tensor) -> Tensor:
        def linear(name: str, z: Tensor) -> Tensor:
            return self.linear(lambda end: W(name + end), z)

        z = self.norm(lambda end: W("ln_1" + end), x)
        q, k, v = (self.heads(t, self.size.heads) for t in linear("attn.c_attn", z).chunk(3, -1))
        x = x + linear("attn.c_proj", self.attend(q, k, v, x))
        hidden = linear("mlp.c_fc", self.norm(lambda end: W("ln_2" + end), x))
        return x + linear("mlp.c_proj", F.gelu(hidden, approximate="tanh"))

    def llama(self, W: Read, x: Tensor) -> Tensor:
        def linear(name: str, z: Tensor) -> Tensor:
            return self.times(z, W(f"{name}.weight").mT)

        z = self.norm(lambda end: W("input_layernorm" + end), x)
        q, k, v = (
            self.heads(linear(f"self_attn.{p}_proj", z), n)
            for p, n in (("q", self.size.heads), ("k", self.size.groups), ("v", self.size.groups))
        )
        share = self.size.heads // self.size.groups
        k, v = (t.repeat_interleave(share, 1) for t in (_turned(k), v))
        x = x + linear("self_attn.o_proj", self.attend(_turned(q), k, v, x))
        z = self.norm(lambda end: W("post_attention_layernorm" + end), x)
        gated = F.silu(linear("mlp.gate_proj", z)) * linear("mlp.up_proj", z)
        return x + linear("mlp.down_proj", gated)

    def bert(self, W: Read, x: Tensor) -> Tensor:
        def linear(name: str, z: Tensor) -> Tensor:
            return self.linear(lambda end: W(name + end), z)

        q, k, v = (
            self.heads(linear(f"attention.self.{p}", x), self.size.heads)
            for p in ("query", "key", "value")
        )
        x = x + linear("attention.output.dense", self.attend(q, k, v, x))
        x = self.norm(lambda end: W("attention.output.LayerNorm" + end), x)
        x = x + linear("output.dense", F.gelu(linear("intermediate.dense", x)))
        return self.norm(lambda end: W("output.LayerNorm" + end), x)


def _turned(q: Tensor) -> Tensor:
    """Rotary positions, pairs (i, i + d/2)."""
    half = q.shape[-1] // 2
    steps = torch.arange(max(half, q.shape[-2]), device=q.device)
    angle = steps[: q.shape[-2], None] * 10000.0 ** (-steps[:half] / half)
    first, second = q[..., :half], q[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(q.dtype)


def stacked(models: list[Weights]) -> Weights:
    """Models of one size as one set of weights with an axis of models in front."""
    return {name: torch.stack([w[name] for w in models]) for name in models[0]}


def write(weights: Weights, size: Size, folder: Path, changes: Mapping[str, Any] = {}) -> None:
    """A folder as the library's `from_pretrained` reads it; complete once its config is there."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.safetensors"
    save_file({n: w.contiguous() for n, w in weights.items()}, file, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(size.config | dict(changes), indent=2))


def read(folder: Path) -> Weights:
    """The tensors of a folder."""
    return dict(load_file(folder / "model.safetensors"))
