"""Search for an input on which two models differ by more than rounding explains.

Both reference forwards run in float64 on the same random inputs, and each once more with weights
moved at random within their rounding error. A difference many times as large as the effect of
that is no rounding.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.checkpoints.families import Model
from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.functional.description import Transformer
from transformer_nfn.functional.transformer import Weights, hidden_states, logits, pooled
from transformer_nfn.symmetry.rounding import HALF

SIGNIFICANT = 32.0
"""Differences above this multiple of the effect of rounding count; disguises stay below 4."""
SIGNIFICANT_HALF = 12.0
"""The same in half precision, where there is less room between rounding and a change."""
TILE = 1 << 20
"""Random numbers per tensor; larger tensors repeat them."""
LENGTHS = (8, 24)


@dataclass(frozen=True)
class TokenWitness:
    """An input on which two models differ.

    Attributes:
        inputs: token ids ``[1, L]`` (or pixels, or vectors).
        decoder: token ids for a decoder.
        difference: ``‖logits_A − logits_B‖ / ‖logits_A‖``.
        noise: the same, caused by rounding of the weights.
    """

    inputs: Tensor
    decoder: Tensor | None
    difference: float
    noise: float


class Perturbed:
    """A model with every weight moved at random within its rounding error, reproducibly."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.names: Mapping[str, tuple[int, ...]] = model.names

    def read(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Tensors by name, in float64 by default: narrower dtypes would round the change away."""
        read = self._model.read(names)
        return {name: self._perturb(name, w).to(dtype or torch.float64) for name, w in read.items()}

    def _perturb(self, name: str, weight: Tensor) -> Tensor:
        unit = torch.finfo(self._model.dtype).eps / 2
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        tile = torch.rand(min(weight.numel(), TILE), generator=generator, dtype=torch.float64)
        tile = tile.mul_(2 * unit).add_(1 - unit)
        out = weight.double().flatten()
        if out.data_ptr() == weight.data_ptr():
            out = out.clone()
        for start in range(0, len(out), TILE):
            part = out[start : start + TILE]
            part *= tile[: len(part)]
        return out.reshape(weight.shape)


def find_witness(A: Model, B: Model) -> TokenWitness | None:
    """Find token ids on which A and B differ significantly; both must read the same inputs.

    >>> from transformer_nfn.checkpoints import open_model
    >>> from transformer_nfn.testing import write_example_checkpoint
    >>> a, b = (write_example_checkpoint(f"model-{seed}", seed) for seed in (0, 1))
    >>> with open_model(a) as A, open_model(b) as B:
    ...     find_witness(A, A) is None, find_witness(A, B).difference > 0.1
    (True, True)
    """
    generator = torch.Generator().manual_seed(0)
    half = any(model.dtype in HALF for model in (A, B))
    needed = SIGNIFICANT_HALF if half else SIGNIFICANT
    vocab = min(A.description.vocab or 1, B.description.vocab or 1)
    for length in LENGTHS:
        inputs, decoder = random_inputs(A.description, length, vocab, generator)
        try:
            result = _compare(A, B, inputs, decoder)
        except TransformerNFNError:
            continue  # more tokens than positions
        if result.difference > needed * result.noise:
            return result
    return None


def random_inputs(
    config: Transformer, length: int, vocab: int | None, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Random inputs of a model: vectors, pixels or token ids, and those of a decoder."""
    if config.inputs == "vectors":
        shape: tuple[int, ...] = (1, length, config.input_size or config.width)
        return torch.randn(shape, generator=generator, dtype=torch.float64), None
    if config.inputs == "patches":
        rows = config.tensors.get("position", (length,))[0]
        rows -= sum(config.has(n) for n in ("cls", "dist"))
        side = config.side * round(rows**0.5)
        shape = (1, config.channels, side, side)
        if config.side == 1:  # a sequence of vectors
            shape = (1, min(length, rows), config.channels)
        return torch.randn(shape, generator=generator, dtype=torch.float64), None
    if config.inputs == "audio":
        _, mels, _ = config.tensors["kept.conv_1.W"]
        shape = (1, mels, 2 * config.tensors["encoder.position"][0])
        audio = torch.randn(shape, generator=generator, dtype=torch.float64)
        return audio, torch.randint(0, vocab or 1, (1, length), generator=generator)
    ids, decoder = (
        torch.randint(0, vocab or 1, (1, length), generator=generator) for _ in range(2)
    )
    return ids, decoder if len(config.stacks) > 1 else None


def model_outputs(
    config: Transformer, weights: Weights, inputs: Tensor, decoder: Tensor | None
) -> Tensor:
    """Logits in float64; without a head the output of the pooler, or the final stream."""
    x = hidden_states(config, weights, inputs, decoder=decoder, dtype=torch.float64)
    decodes = config.tied or config.has("head") or config.has("extra.decoder.W")
    if not decodes and not config.headless and config.pooler:
        return pooled(config, weights, x)
    return logits(config, weights, x)


def _compare(A: Model, B: Model, inputs: Tensor, decoder: Tensor | None) -> TokenWitness:
    first, second, *perturbed = (
        model_outputs(model.description, weights, inputs, decoder)
        for model, weights in ((A, A), (B, B), (A, Perturbed(A)), (B, Perturbed(B)))
    )
    size = max(float(first.norm()), float(second.norm()), 1e-300)
    changes = [float((x - y).norm()) for x, y in zip((first, second), perturbed, strict=True)]
    noise = max([*changes, 64 * torch.finfo(torch.float64).eps * size])
    return TokenWitness(inputs, decoder, float((first - second).norm()) / size, noise / size)
