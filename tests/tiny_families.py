"""Tiny random models of the `transformers` library, one or more of each family, on disk.

Weights are drawn so that nothing is trivial: gains differ from one, biases from zero, scores are
far from uniform.
"""

import functools
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from transformer_nfn.checkpoints.families import open_model
from transformer_nfn.functional.description import Transformer
from transformer_nfn.functional.transformer import transformer
from transformer_nfn.zoo import NetworkSizes
from transformer_nfn.zoo.module import SmallTransformer

VOCAB, LENGTH = 61, 9
ZOO = "small_transformer"
"""The zoo's network, which is no model of the library's."""


@dataclass(frozen=True)
class Tiny:
    """How a tiny model is made."""

    model: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    inputs: str = "tokens"


_GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 24, "vocab_size": VOCAB}
_BERT = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "vocab_size": VOCAB, "max_position_embeddings": 24,
}  # fmt: skip
_LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 40, "vocab_size": VOCAB, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_VIT = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "image_size": 12, "patch_size": 4, "num_channels": 3, "num_labels": 7,
}  # fmt: skip
_NEOX = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "vocab_size": VOCAB, "max_position_embeddings": 64,
}  # fmt: skip
_T5 = {
    "d_model": 32, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4, "d_kv": 6, "d_ff": 40,
    "vocab_size": VOCAB, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6,
}  # fmt: skip
_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40,
    "vocab_size": VOCAB, "max_position_embeddings": 24,
}  # fmt: skip

TINY: dict[str, Tiny] = {
    "gpt2": Tiny("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "gpt2-untied": Tiny("GPT2LMHeadModel", "GPT2Config", {**_GPT2, "tie_word_embeddings": False}),
    "gpt2-base": Tiny("GPT2Model", "GPT2Config", _GPT2),
    "opt": Tiny("OPTForCausalLM", "OPTConfig", {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 48,
        "vocab_size": VOCAB, "max_position_embeddings": 24, "word_embed_proj_dim": 32,
    }),
    "opt-post-norm": Tiny("OPTForCausalLM", "OPTConfig", {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 48,
        "vocab_size": VOCAB, "max_position_embeddings": 24, "word_embed_proj_dim": 32,
        "do_layer_norm_before": False,
    }),
    "bert": Tiny("BertForMaskedLM", "BertConfig", _BERT),
    "bert-base": Tiny("BertModel", "BertConfig", _BERT),
    "roberta": Tiny("RobertaForMaskedLM", "RobertaConfig", {**_BERT, "pad_token_id": 1}),
    "esm": Tiny("EsmForMaskedLM", "EsmConfig", {
        **_BERT, "position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 6,
        "pad_token_id": 1,
    }),
    "albert": Tiny("AlbertForMaskedLM", "AlbertConfig", {
        **_BERT, "embedding_size": 40, "intermediate_size": 72,
    }),
    "distilbert": Tiny("DistilBertForMaskedLM", "DistilBertConfig", {
        "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "vocab_size": VOCAB,
        "max_position_embeddings": 24,
    }),
    "vit": Tiny("ViTForImageClassification", "ViTConfig", _VIT, "pixels"),
    "deit": Tiny("DeiTForImageClassification", "DeiTConfig", _VIT, "pixels"),
    "clip-text": Tiny("CLIPTextModelWithProjection", "CLIPTextConfig", {
        **_BERT, "projection_dim": 40,
    }),
    "clip-vision": Tiny("CLIPVisionModelWithProjection", "CLIPVisionConfig", {
        **_VIT, "projection_dim": 40,
    }, "pixels"),
    "llama": Tiny("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "llama-tied": Tiny("LlamaForCausalLM", "LlamaConfig", {**_LLAMA, "tie_word_embeddings": True}),
    "mistral": Tiny("MistralForCausalLM", "MistralConfig", {
        **_LLAMA, "head_dim": 10, "sliding_window": 4,
    }),
    "qwen2": Tiny("Qwen2ForCausalLM", "Qwen2Config", _LLAMA),
    "qwen3": Tiny("Qwen3ForCausalLM", "Qwen3Config", {**_LLAMA, "head_dim": 12}),
    "gemma2": Tiny("Gemma2ForCausalLM", "Gemma2Config", {
        **_LLAMA, "head_dim": 10, "query_pre_attn_scalar": 20, "sliding_window": 4,
        "tie_word_embeddings": True, "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 30.0,
    }),
    "olmo2": Tiny("Olmo2ForCausalLM", "Olmo2Config", _LLAMA),
    "mixtral": Tiny("MixtralForCausalLM", "MixtralConfig", {
        **_LLAMA, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32,
    }),
    "qwen3-moe": Tiny("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {
        **_LLAMA, "head_dim": 12, "num_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 40, "num_hidden_layers": 2,
    }),
    "olmoe": Tiny("OlmoeForCausalLM", "OlmoeConfig", {
        **_LLAMA, "num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32,
    }),
    "phi3": Tiny("Phi3ForCausalLM", "Phi3Config", {**_LLAMA, "sliding_window": 4}),
    "phi": Tiny("PhiForCausalLM", "PhiConfig", {
        **_NEOX, "num_key_value_heads": 4, "partial_rotary_factor": 0.5,
    }),
    "neox": Tiny("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_NEOX, "rotary_pct": 0.5}),
    "gptj": Tiny("GPTJForCausalLM", "GPTJConfig", {**_GPT2, "n_head": 2, "rotary_dim": 6}),
    "bloom": Tiny("BloomForCausalLM", "BloomConfig", {
        "hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": VOCAB,
    }),
    "t5": Tiny("T5ForConditionalGeneration", "T5Config", _T5, "pairs"),
    "t5-v1.1": Tiny("T5ForConditionalGeneration", "T5Config", {
        **_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    }, "pairs"),
    "bart": Tiny("BartForConditionalGeneration", "BartConfig", _BART, "pairs"),
    "bart-base": Tiny("BartModel", "BartConfig", {**_BART, "scale_embedding": True}, "pairs"),
    "marian": Tiny("MarianMTModel", "MarianConfig", {
        **_BART, "scale_embedding": True, "activation_function": "swish", "pad_token_id": 0,
    }, "pairs"),
    "whisper": Tiny("WhisperForConditionalGeneration", "WhisperConfig", {
        **_BART, "num_mel_bins": 5, "max_source_positions": 7, "max_target_positions": 24,
        **{f"{token}_token_id": 1 for token in ("pad", "bos", "eos")},
    }, "audio"),
}  # fmt: skip
QUICK = ("gpt2", "bert", "vit", "qwen3", "gemma2", "phi", "t5", "bart", "olmoe")
"""Between them these have every symmetry."""
HEADS: dict[str, Tiny] = {
    "bert-class": Tiny("BertForSequenceClassification", "BertConfig", {**_BERT, "num_labels": 5}),
    "bart-class": Tiny("BartForSequenceClassification", "BartConfig", {
        **_BART, "num_labels": 5,
    }, "pairs"),
    "gpt2-class": Tiny("GPT2ForSequenceClassification", "GPT2Config", {
        **_GPT2, "num_labels": 5, "pad_token_id": 0,
    }),
    "roberta-class": Tiny("RobertaForSequenceClassification", "RobertaConfig", {
        **_BERT, "num_labels": 5,
    }),
}  # fmt: skip
"""Classifiers of texts: heads behind a pooler, or on the last token."""


def nightly(*values: Any) -> list[Any]:
    """Parameters of a test that run in `make nightly`."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


def nightly_but_quick(names: Iterable[str]) -> list[Any]:
    """Parameters of a test; all but those of `QUICK` run in `make nightly`."""
    return [name if name in QUICK else nightly(name)[0] for name in names]


every_family = pytest.mark.parametrize("family", nightly_but_quick(TINY))


def build(
    name: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, size: float = 1.5
) -> nn.Module:
    """A tiny model of the library with random weights, nothing in it cast to float32.

    Args:
        name: see `TINY`.
        dtype: of the weights.
        seed: of the weights.
        size: of matrices, in units of 1/√inputs; biases and gains vary by a fifth of it.
    """
    transformers = pytest.importorskip("transformers")
    tiny = (TINY | HEADS)[name]
    config = getattr(transformers, tiny.config)(**tiny.options)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the others know no float64
    pytest.importorskip("safetensors.torch")  # its table of dtypes must not see the patch
    kind = getattr(transformers, tiny.model)
    with no_casts():
        model: nn.Module = kind(config).to(torch.float64)
        for part in model.modules():
            if hasattr(part, "scalar_embed_scale"):  # Gemma keeps a float32 copy of a number
                part.embed_scale = torch.tensor(part.scalar_embed_scale, dtype=torch.float64)
    randomise(model, seed, size)
    if name.startswith("t5-v1.1"):  # the library ties what its checkpoints do not
        head = model.get_submodule("lm_head")
        head.weight = nn.Parameter(_noise(head.weight.shape, torch.Generator().manual_seed(9)))
    return model.to(dtype).eval()


def _noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def randomise(model: nn.Module, seed: int, size: float) -> None:
    """Random matrices, embeddings of size one, gains about one, biases about zero."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.requires_grad:  # sinusoids
                continue
            noise = _noise(p.shape, generator)
            if p.ndim == 1:
                gain = name.endswith("weight")
                p.copy_(size / 5 * noise + float(gain and "Gemma" not in type(model).__name__))
            elif id(p) in embeddings or p.ndim == 3:
                p.copy_(noise)
            else:
                p.copy_(size * noise / p[0].numel() ** 0.5)
        for name, buffer in model.named_buffers():
            if name == "final_logits_bias":
                buffer.copy_(_noise(buffer.shape, generator))


@contextmanager
def no_casts() -> Iterator[None]:
    """Makes the library compute in float64 where it says float32: norms, softmax, rotary."""
    patch = pytest.MonkeyPatch()
    with patch.context():
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
            patch.undo()


def inputs_of(name: str, seed: int = 1) -> dict[str, Tensor]:
    """Inputs for the library's forward."""
    generator = torch.Generator().manual_seed(seed)
    if name == ZOO:
        return {"inputs": _noise((2, LENGTH, 4), generator)}
    kind = (TINY | HEADS)[name].inputs
    if kind == "pixels":
        return {"pixel_values": _noise((2, 3, 12, 12), generator)}
    if kind == "audio":
        ids = torch.randint(3, VOCAB, (2, LENGTH), generator=generator)
        return {"input_features": _noise((2, 5, 14), generator), "decoder_input_ids": ids}
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=generator)
    if kind == "tokens":
        return {"input_ids": ids}
    return {"input_ids": ids, "decoder_input_ids": ids.flip(1)[:, :-2]}


def run_library(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Logits, or final hidden states."""
    wide = next(model.parameters()).dtype == torch.float64
    with torch.no_grad():
        if wide:
            with no_casts():
                out = model(**inputs)
        else:
            out = model(**{k: v.float() if v.is_floating_point() else v for k, v in inputs.items()})
    if hasattr(out, "image_embeds"):
        return out.image_embeds.double()  # type: ignore[no-any-return]
    if hasattr(out, "text_embeds"):  # of the last token only; the projection is the same for all
        with torch.no_grad():
            found: Tensor = model.get_submodule("text_projection")(out.last_hidden_state)
        return found.double()
    found = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return found.double()


def save(model: nn.Module, folder: Path) -> Path:
    """Writes the model as the library does."""
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def save_zoo_module(file: Path, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """Writes a random network of the zoo under the names of its module, and returns it."""
    sizes = NetworkSizes(LENGTH, 7, 4, d_model=32, heads=2, d_ff=48, blocks=2)
    module = SmallTransformer(sizes).double()
    randomise(module, seed, 1.5)
    module = module.to(dtype).eval()
    save_file(module.state_dict(), file)
    return module


@dataclass(frozen=True)
class Network:
    """A tiny model under canonical names: its description, float64 tensors, inputs, outputs."""

    name: str
    description: Transformer
    weights: dict[str, Tensor]

    def outputs(self, weights: dict[str, Tensor], description: Transformer | None = None) -> Tensor:
        """Logits of other weights on this model's inputs."""
        inputs = inputs_of(self.name)
        first = next(iter(inputs.values()))
        decoder = inputs.get("decoder_input_ids")
        return transformer(description or self.description, weights, first, decoder=decoder)

    def change(self, weights: dict[str, Tensor], description: Transformer | None = None) -> float:
        """How far outputs move, in units of the largest one."""
        before = _outputs_before(self.name)
        after = self.outputs({**self.weights, **weights}, description)
        return float((after - before).abs().max() / before.abs().max())


@functools.cache
def _outputs_before(name: str) -> Tensor:
    net = network(name)
    return net.outputs(net.weights)


@functools.cache
def network(name: str) -> Network:
    """A tiny model, read by the library under test from what `transformers` wrote."""
    with tempfile.TemporaryDirectory() as folder:
        if name == ZOO:
            save_zoo_module(Path(folder) / "model.safetensors")
        else:
            save(build(name), Path(folder))
        with open_model(folder) as model:
            return Network(name, model.description, model.read(model.names, torch.float64))


def encoder(*, norm_first: bool, final: bool, activation: str) -> nn.TransformerEncoder:
    """PyTorch's own encoder in float64 with random weights, none of them trivial."""
    layer = nn.TransformerEncoderLayer(
        24, 4, 40, activation=activation, batch_first=True, norm_first=norm_first
    )
    norm = nn.LayerNorm(24) if final else None
    module = nn.TransformerEncoder(layer, 3, norm, enable_nested_tensor=False).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(0.3 * _noise(p.shape, generator))
            if "norm" in name and name.endswith("weight"):
                p.add_(1)
    return module.eval()
