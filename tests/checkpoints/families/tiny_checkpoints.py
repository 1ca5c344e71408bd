"""Tiny models of every family, made by the libraries whose files are read, with random weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as T
from torch import Tensor, nn
from transformers.utils import logging

logging.disable_progress_bar()
logging.set_verbosity_error()

SMALL = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 20,
}
WORDS = {"vocab_size": 17, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
GROUPED = SMALL | WORDS | {"num_key_value_heads": 2}
POSITIONS = SMALL | WORDS | {"max_position_embeddings": 9}
IMAGES = SMALL | {"image_size": 8, "patch_size": 4, "num_channels": 3}
GPT2 = {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 9} | WORDS
T5 = {"d_model": 16, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 4} | WORDS
BART = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1} | WORDS
BART |= {"max_position_embeddings": 9}
BART |= {f"{s}_attention_heads": 4 for s in ("encoder", "decoder")}
BART |= {f"{s}_ffn_dim": 20 for s in ("encoder", "decoder")}
DISTIL = {"dim": 16, "n_heads": 4, "n_layers": 2, "hidden_dim": 20, "max_position_embeddings": 9}
OPT = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "ffn_dim": 20}
OPT |= WORDS | {"max_position_embeddings": 9, "word_embed_proj_dim": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}


def _case(kind: str, model: str, fields: dict[str, Any], **more: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = getattr(T, f"{kind}Config")(**(fields | more))
        built: nn.Module = getattr(T, f"{kind}{model}")(config)
        return built

    return build


CASES: dict[str, Callable[[], nn.Module]] = {
    "gpt2": _case("GPT2", "LMHeadModel", GPT2),
    "gpt2 base": _case("GPT2", "Model", GPT2),
    "gpt2 untied": _case("GPT2", "LMHeadModel", GPT2, tie_word_embeddings=False, n_inner=12),
    "gpt2 classifier": _case("GPT2", "ForSequenceClassification", GPT2),
    "opt": _case("OPT", "ForCausalLM", OPT),
    "opt post": _case("OPT", "ForCausalLM", OPT, do_layer_norm_before=False, enable_bias=False),
    "bert": _case("Bert", "ForMaskedLM", POSITIONS),
    "bert pretraining": _case("Bert", "ForPreTraining", POSITIONS),
    "bert base": _case("Bert", "Model", POSITIONS),
    "bert classifier": _case("Bert", "ForSequenceClassification", POSITIONS),
    "bert tokens": _case("Bert", "ForTokenClassification", POSITIONS),
    "bert questions": _case("Bert", "ForQuestionAnswering", POSITIONS),
    "roberta": _case("Roberta", "ForMaskedLM", POSITIONS),
    "roberta classifier": _case("Roberta", "ForSequenceClassification", POSITIONS),
    "distilbert": _case("DistilBert", "ForMaskedLM", DISTIL | WORDS),
    "distilbert classifier": _case("DistilBert", "ForSequenceClassification", DISTIL | WORDS),
    "vit": _case("ViT", "ForImageClassification", IMAGES),
    "vit base": _case("ViT", "Model", IMAGES),
    "deit": _case("DeiT", "ForImageClassification", IMAGES),
    "deit distilled": _case("DeiT", "ForImageClassificationWithTeacher", IMAGES),
    "llama": _case("Llama", "ForCausalLM", GROUPED),
    "llama biases": _case("Llama", "ForCausalLM", GROUPED, attention_bias=True, head_dim=6),
    "llama3": _case("Llama", "ForCausalLM", GROUPED, rope_parameters=LLAMA3, head_dim=16),
    "llama linear": _case("Llama", "ForCausalLM", GROUPED, rope_parameters=LINEAR),
    "llama tied": _case("Llama", "ForCausalLM", GROUPED, tie_word_embeddings=True),
    "mistral": _case("Mistral", "ForCausalLM", GROUPED, sliding_window=5),
    "qwen2": _case("Qwen2", "ForCausalLM", GROUPED),
    "qwen2 window": _case(
        "Qwen2", "ForCausalLM", GROUPED,
        use_sliding_window=True, sliding_window=5, max_window_layers=1,
    ),
    "qwen3": _case("Qwen3", "ForCausalLM", GROUPED, head_dim=6),
    "gemma2": _case("Gemma2", "ForCausalLM", GROUPED, head_dim=6, query_pre_attn_scalar=9),
    "phi3": _case("Phi3", "ForCausalLM", GROUPED),
    "phi": _case("Phi", "ForCausalLM", SMALL | WORDS),
    "gpt_neox": _case("GPTNeoX", "ForCausalLM", SMALL | WORDS, hidden_size=32),
    "gpt_neox serial": _case(
        "GPTNeoX", "ForCausalLM", SMALL | WORDS,
        hidden_size=32, use_parallel_residual=False, attention_bias=False,
    ),
    "t5": _case("T5", "ForConditionalGeneration", T5, num_decoder_layers=1),
    "t5 v1.1": _case("T5", "ForConditionalGeneration", T5, feed_forward_proj="gated-gelu"),
    "t5 encoder": _case("T5", "EncoderModel", T5),
}  # fmt: skip
"""A model of the library by name; the first word of a name is its family, or the next of kin."""

MORE: dict[str, Callable[[], nn.Module]] = {
    "esm": _case(
        "Esm", "ForMaskedLM", POSITIONS, position_embedding_type="rotary", mask_token_id=3
    ),
    "esm tokens": _case(
        "Esm", "ForTokenClassification", POSITIONS,
        position_embedding_type="rotary", emb_layer_norm_before=True,
    ),
    "albert": _case("Albert", "ForMaskedLM", POSITIONS, embedding_size=12),
    "albert classifier": _case(
        "Albert", "ForSequenceClassification", POSITIONS, embedding_size=12, inner_group_num=2
    ),
    "clip_text": _case("CLIPText", "ModelWithProjection", POSITIONS, projection_dim=6),
    "clip_vision": _case("CLIPVision", "ModelWithProjection", IMAGES, projection_dim=6),
    "gptj": _case("GPTJ", "ForCausalLM", GPT2, rotary_dim=2),
    "mixtral": _case(
        "Mixtral", "ForCausalLM", GROUPED, num_local_experts=3, num_experts_per_tok=2
    ),
    "qwen3_moe": _case(
        "Qwen3Moe", "ForCausalLM", GROUPED,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, head_dim=6,
    ),
    "olmo2": _case("Olmo2", "ForCausalLM", GROUPED),
    "olmoe": _case("Olmoe", "ForCausalLM", GROUPED, num_experts=4, num_experts_per_tok=2),
    "bloom": _case("Bloom", "ForCausalLM", SMALL | WORDS, n_head=4, n_layer=2),
    "bart": _case("Bart", "ForConditionalGeneration", BART),
    "bart classifier": _case("Bart", "ForSequenceClassification", BART),
    "bart questions": _case("Bart", "ForQuestionAnswering", BART),
    "marian": _case("Marian", "MTModel", BART),
    "whisper": _case(
        "Whisper", "ForConditionalGeneration", BART,
        num_mel_bins=3, max_source_positions=5, max_target_positions=9,
    ),
}  # fmt: skip
"""Models whose blocks are compared with the library's as a whole, in ``tests/functional``."""


def build(case: str, seed: int = 0) -> nn.Module:
    """A model in which no two numbers are alike, norms and biases included."""
    model = (CASES | MORE)[case]()
    if case == "t5 v1.1":  # the library ties it unless a file says otherwise
        model.config.scale_decoder_outputs = False  # type: ignore[union-attr]
        model.lm_head.weight = nn.Parameter(torch.empty(17, 16))  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in filter(lambda p: p.requires_grad, model.parameters()):  # no sinusoids
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return model.eval()


def save(
    case: str, folder: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB"
) -> nn.Module:
    """Writes a model as its library does."""
    model = build(case).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)  # type: ignore[operator]
    return model


def timm_state(vit: nn.Module) -> dict[str, Tensor]:
    """The tensors of a ViT or DeiT classifier as timm names and fuses them."""
    base = next(module for name, module in vit.named_children() if name in ("vit", "deit"))
    held: Any = base
    state = {
        "cls_token": held.embeddings.cls_token,
        "pos_embed": held.embeddings.position_embeddings,
        "patch_embed.proj.weight": held.embeddings.patch_embeddings.projection.weight,
        "patch_embed.proj.bias": held.embeddings.patch_embeddings.projection.bias,
    }
    for i, layer in enumerate(held.layers):
        at = layer.attention
        for kind in ("weight", "bias"):
            qkv = [getattr(part, kind) for part in (at.q_proj, at.k_proj, at.v_proj)]
            state |= {
                f"blocks.{i}.norm1.{kind}": getattr(layer.layernorm_before, kind),
                f"blocks.{i}.attn.qkv.{kind}": torch.cat(qkv),
                f"blocks.{i}.attn.proj.{kind}": getattr(at.o_proj, kind),
                f"blocks.{i}.norm2.{kind}": getattr(layer.layernorm_after, kind),
                f"blocks.{i}.mlp.fc1.{kind}": getattr(layer.mlp.fc1, kind),
                f"blocks.{i}.mlp.fc2.{kind}": getattr(layer.mlp.fc2, kind),
            }
    heads = {"head": "classifier"}
    if hasattr(vit, "cls_classifier"):
        state["dist_token"] = held.embeddings.distillation_token
        heads = {"head": "cls_classifier", "head_dist": "distillation_classifier"}
    for kind in ("weight", "bias"):
        state[f"norm.{kind}"] = getattr(held.layernorm, kind)
        for name, module in heads.items():
            state[f"{name}.{kind}"] = getattr(getattr(vit, module), kind)
    return {name: weight.detach().clone().contiguous() for name, weight in state.items()}
