"""Description of the network in a file, from the facts that its config and tensors state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, get_args

import numpy as np

from transformer_nfn.checkpoints.families.binding import Binding, computed
from transformer_nfn.checkpoints.families.expressions import (
    MissingFieldError,
    evaluate,
    unexpected,
)
from transformer_nfn.checkpoints.families.recognise import head_lines
from transformer_nfn.errors import CheckpointError, SpaceError
from transformer_nfn.functional.description import (
    Activation,
    Attention,
    Block,
    Mlp,
    Order,
    Pooling,
    QueryKeyNorm,
    RotaryScaling,
    Stack,
    Transformer,
)
from transformer_nfn.io.checkpoint import SENTENCE_POOLING

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gated-gelu": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "gated-relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "gated-silu": "silu",
}
"""What configs call activations, and what they are."""

WITH_OUTPUT = (
    "*ForCausalLM", "*LMHeadModel", "*ForMaskedLM", "*ForConditionalGeneration", "*MTModel",
)  # fmt: skip
"""Classes of models whose output are logits of tokens."""

DEFAULTS: dict[str, Any] = {
    "order": "pre",
    "norm": "layer",
    "inputs": "tokens",
    "causal": False,
    "embedding_scale": 1.0,
    "head_scale": 1.0,
    "position_offset": 0,
    "max_distance": 0,
    "alibi": False,
    "normalised": False,
    "repeats": 1,
}
MOST_REPEATS = 4096
ROTARY_SCHEMES = ("default", "linear", "llama3")


class _Facts:
    """The facts of one file by name."""

    def __init__(self, binding: Binding, where: str) -> None:
        tensors = computed(binding.shapes)
        self.fields: dict[str, Any] = {**binding.config, **binding.sizes, **tensors}
        self._facts, self._where = binding.family.facts, where

    def get(self, name: str, **more: Any) -> Any:
        if name not in self._facts:
            return DEFAULTS.get(name)
        try:
            return evaluate(self._facts[name], {**self.fields, **more})
        except MissingFieldError as error:
            raise CheckpointError(
                f"'{self._where}' does not say '{error}', on which '{name}' depends: expected it "
                f"in config.json or as --set {error}=…"
            ) from None
        except SpaceError as error:
            raise CheckpointError(f"'{self._where}': config: '{name}': {error}") from None

    def number(self, name: str, low: float = 0.0, **more: Any) -> float:
        value = self.get(name, **more)
        if type(value) not in (int, float) or not low <= value < 1e30:
            self.refuse(name, f"a number of at least {low:g}", value)
        return float(value)

    def number_or_none(self, name: str, low: float = 0.0, **more: Any) -> float | None:
        return None if self.get(name, **more) is None else self.number(name, low, **more)

    def whole(self, name: str) -> int:
        value = self.number(name)
        if value != int(value):
            self.refuse(name, "a whole number", value)
        return int(value)

    def token(self, name: str) -> int | None:
        return None if self.get(name) is None else self.whole(name)

    def one_of(self, name: str, words: Collection[str], **more: Any) -> Any:
        value = self.get(name, **more)
        if not isinstance(value, str) or value not in words:
            self.refuse(name, f"one of {', '.join(words)}", value)
        return value

    def activation(self, name: str) -> Activation:
        return ACTIVATIONS[self.one_of(name, ACTIVATIONS)]

    def word_or_none(self, name: str, words: tuple[str, ...]) -> Any:
        return None if self.get(name) is None else self.one_of(name, words)

    def refuse(self, name: str, expected: str, found: Any) -> None:
        text = self._facts.get(name, name)
        raise unexpected(self._where, f"config: {name} ({text})", expected, found)


def describe(binding: Binding, where: str) -> Transformer:
    """The description of a network in a file; raises `CheckpointError` for what is not known."""
    facts = _Facts(binding, where)
    names = binding.shapes
    stacks = tuple(
        _stack(prefix, binding, facts, where)
        for prefix in binding.family.counters
        if f"{prefix}0.W_Q" in names
    )
    inputs = facts.one_of("inputs", ("tokens", "patches", "vectors", "audio"))
    sizes = binding.sizes
    tied, headless = _output(binding, where)
    pooling = _sentence_pooling(binding, where)
    return Transformer(
        family=binding.family.name,
        width=sizes["D"],
        norm=facts.one_of("norm", ("layer", "rms")),
        # Single precision, in which some configs write 9.999999747378752e-06 and others 1e-05.
        eps=float(str(np.float32(facts.number("eps")))),
        stacks=stacks,
        inputs=inputs,
        vocab=sizes["vocab"] if names.keys() & {"token", "kept.token"} else None,
        tied=tied,
        headless=headless or pooling is not None,
        embedding_scale=facts.number("embedding_scale", 1e-30),
        head_scale=facts.number("head_scale", 1e-30),
        final_softcap=facts.number_or_none("final_softcap", 1e-30),
        dropped_token=facts.token("dropped_token"),
        position_offset=int(facts.number("position_offset")),
        pooler=facts.get("pooler") if "extra.pooler.W" in names else None,
        pooling=_pooling(binding, facts, inputs),
        end_token=facts.token("end_token"),
        padding=_padding(binding, where),
        start_token=facts.token("start_token"),
        sentence_pooling=pooling,
        mlm=facts.activation("mlm") if "extra.mlm.W" in names else None,
        classifier=_classifier(binding, facts),
        sinusoids=facts.word_or_none("sinusoids", ("neighbours", "halves")),
        # Vectors are patches of one pixel.
        channels=(sizes.get("channel") or sizes["pixel"]) if inputs == "patches" else 0,
        side=sizes.get("side", 1) if inputs == "patches" else 0,
        tensors=dict(names),
    )


def _pooling(binding: Binding, facts: _Facts, inputs: str) -> Pooling | None:
    """What the output matrix reads of the final stream."""
    stated: Pooling | None = facts.word_or_none("pooling", get_args(Pooling))
    if stated is not None or "head" not in binding.holders:
        return stated
    if _scores(binding):
        return "last"
    return "first" if inputs == "patches" else None


def _scores(binding: Binding) -> bool:
    """Whether the output matrix is what `transformers` calls `score`: it reads the last token."""
    return binding.holders.get("head", ("",))[0].endswith("score.weight")


def _padding(binding: Binding, where: str) -> int | None:
    """The token that `score` passes over at the end of a text; -1 if there is none."""
    if not _scores(binding):
        return None
    padding = binding.config.get("pad_token_id")
    if padding is not None and type(padding) is not int:
        raise unexpected(where, "config: pad_token_id", "a whole number", padding)
    return -1 if padding is None else padding


def _sentence_pooling(binding: Binding, where: str) -> str | None:
    stated = binding.config.get(SENTENCE_POOLING)
    if stated is not None and not isinstance(stated, str):
        raise unexpected(where, f"config: {SENTENCE_POOLING}", "a word", stated)
    return stated


def _classifier(binding: Binding, facts: _Facts) -> Mlp | None:
    if "classifier.W_A" not in binding.shapes:
        return None
    return Mlp(binding.sizes["hidden"], facts.activation("activation"))


def _output(binding: Binding, where: str) -> tuple[bool, bool]:
    """Whether the output matrix is the token embedding, and whether there is none at all."""
    names, family, config = binding.shapes, binding.family, binding.config
    if "head" in names or "classifier.W_A" in names or head_lines(family, config):
        return False, False
    if "kept.token" in names:  # nothing acts on a tie of that width
        return False, "extra.decoder.W" not in names
    matrix = [line.key for line in family.lines if line.tied]
    named = config.get("architectures")
    classes = [c for c in named if isinstance(c, str)] if isinstance(named, list) else []
    speaks = any(fnmatchcase(c, pattern) for c in classes for pattern in WITH_OUTPUT)
    # A model with a transform before its output has one only if the transform is there.
    transforms = any(s.tensor == "extra.mlm.W" for line in family.lines for s in line.slots)
    output = "extra.mlm.W" in names if transforms else speaks
    if speaks and matrix and not binding.tied:
        raise CheckpointError(
            f"'{where}': lacks '{matrix[0]}', which holds 'head' of {family.title} where it is "
            "not tied to the token embedding"
        )
    tied = binding.tied and bool(matrix) and (output or binding.has_head)
    vocab = binding.sizes["vocab"] if tied else 0
    if tied and names.get("head_bias", (vocab,)) != (vocab,):
        raise CheckpointError(
            f"'{where}': '{binding.holders['head_bias'][0]}' expected shape [{vocab}], one number "
            f"for each token, found {list(names['head_bias'])}"
        )
    return tied, not tied


def _stack(prefix: str, binding: Binding, facts: _Facts, where: str) -> Stack:
    n = binding.sizes[binding.family.counters[prefix]]
    blocks = tuple(_block(prefix, i, binding, facts, where) for i in range(n))
    repeats = facts.whole("repeats")
    if not 0 < repeats <= MOST_REPEATS:
        facts.refuse("repeats", f"1 to {MOST_REPEATS}", repeats)
    final = f"{prefix}norm.g" in binding.shapes or any(b.order == "chain" for b in blocks)
    return Stack(prefix, blocks, final, repeats)


def _block(prefix: str, i: int, binding: Binding, facts: _Facts, where: str) -> Block:
    names, sizes = binding.shapes, binding.sizes
    at = f"{prefix}{i}."
    d_k = sizes["d_k"]
    more: dict[str, Any] = {"layer": i, "stack": prefix}
    rotary, base, scaling = 0, 10_000.0, None
    if facts.get("rotary") is not None:
        part = facts.number("rotary")
        rotary, base, scaling = read_rotary(binding.config, d_k, where, part)
    window = facts.number_or_none("window", 1, **more)
    table = f"{prefix}0.bias_table" in names
    norms: dict[int, QueryKeyNorm | None] = {0: None, 1: "each head", 2: "all heads"}
    attention = Attention(
        heads=sizes["head"],
        groups=sizes["group"],
        d_k=d_k,
        d_v=sizes["d_v"],
        scale=facts.number("scale", 1e-30, **more),
        causal=bool(facts.get("causal", **more)),
        rotary=rotary,
        rotary_base=base,
        rotary_scaling=scaling,
        qk_norm=norms[len(names.get(f"{at}q_norm.g", ()))],
        softcap=facts.number_or_none("softcap", 1e-30),
        window=None if window is None else int(window),
        position_bias=table,
        buckets=sizes["bucket"] if table else 0,
        max_distance=int(facts.number("max_distance")) if table else 0,
        alibi=bool(facts.get("alibi")),
    )
    if attention.heads % attention.groups:
        raise CheckpointError(
            f"'{where}': expected heads in groups of the same size, found {attention.heads} heads "
            f"in {attention.groups} groups"
        )
    experts = sizes["expert"] if f"{at}router" in names else 0
    gated = f"{at}{'expert.0.' if experts else ''}W_G" in names
    if facts.get("gated") not in (None, gated):
        raise CheckpointError(
            f"'{where}': config.json expected MLPs {'with' if not gated else 'without'} a gate, "
            f"found {'no ' if not gated else ''}'{at}W_G' in the file"
        )
    mlp = Mlp(sizes["neuron"], facts.activation("activation"), gated)
    if experts:
        active = facts.whole("active")
        if not 0 < active <= experts:
            facts.refuse("active", f"1 to {experts} of the {experts} experts", active)
        mlp = replace(mlp, experts=experts, active=active, normalised=bool(facts.get("normalised")))
    cross = None
    if f"{at}cross.W_Q" in names:
        cross = Attention(attention.heads, attention.groups, d_k, attention.d_v, attention.scale)
    order = facts.one_of("order", get_args(Order), **more)
    return Block(attention, mlp, order, cross)


def read_rotary(
    config: Mapping[str, Any], d_k: int, where: str, part: float
) -> tuple[int, float, RotaryScaling | None]:
    """How many coordinates are turned, the base of the frequencies, and how they were stretched.

    Configs of several years name these in several ways: fields of their own, ``rope_scaling``, or
    one table ``rope_parameters``.

    Args:
        config: the fields.
        d_k: size of a key.
        where: what errors call the file.
        part: of the coordinates that are turned, where the config names none.
    """
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    table = config.get(field)
    if table is None:
        table = {}
    if not isinstance(table, Mapping):
        raise unexpected(where, f"config.json: '{field}'", "a table", table)
    kind = table.get("rope_type", table.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROTARY_SCHEMES:
        schemes = f"a rotary scheme among {', '.join(ROTARY_SCHEMES)}"
        raise unexpected(where, f"config.json: '{field}'", schemes, kind)
    fields = {**config, **table}
    base = _number(fields, ("rope_theta", "rotary_emb_base"), 10_000.0, where)
    part = _number(fields, ("partial_rotary_factor", "rotary_pct"), part, where)
    rotary = int(d_k * part + 1e-9)
    if not 0 < rotary <= d_k or rotary % 2:
        even = f"an even number of coordinates up to {d_k}"
        raise unexpected(where, "config.json: rotary positions", even, rotary)
    if kind == "default":
        return rotary, base, None
    factor = _number(fields, ("factor",), None, where)
    if kind == "linear":
        return rotary, base, RotaryScaling("linear", factor)
    low, high, original = (
        _number(fields, (name,), None, where)
        for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    if not low < high:
        raise CheckpointError(
            f"'{where}': config.json: expected low_freq_factor below high_freq_factor, found "
            f"{low} and {high}"
        )
    return rotary, base, RotaryScaling("llama3", factor, low, high, original)


def _number(
    fields: Mapping[str, Any], names: tuple[str, ...], default: float | None, where: str
) -> float:
    for name in names:
        value = fields.get(name)
        if value is not None:
            if type(value) not in (int, float) or not 0 < value < 1e30:
                raise unexpected(where, f"config.json: '{name}'", "a number above 0", value)
            return float(value)
    if default is None:
        raise CheckpointError(f"'{where}': config.json lacks '{names[0]}' of its rotary scheme")
    return default
