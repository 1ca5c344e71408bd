"""How do the weights of many networks lie for the C code? One flat row for each network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.native_network.compile import CompiledSizes


@dataclass(frozen=True)
class PackedSizes:
    """Sizes of a batch of networks.

    Attributes:
        compiled: those that are constants of the C code.
        patch: numbers in a token before the embedding; 0 where there is none.
        classes: logits.
    """

    compiled: CompiledSizes
    patch: int
    classes: int

    @staticmethod
    def of(network: Mapping[str, Any]) -> PackedSizes:
        """Read off a few tensors; `shapes` says what all must be then."""
        first = network["blocks"][0]
        heads, width = first["W_Q"].shape[2:4]
        classes = network["classifier"]["W_2"].shape[-1]
        neurons = first["W_A"].shape[-1]
        patch = network["embedding"]["W"].shape[1] if "embedding" in network else 0
        compiled = CompiledSizes(width, heads, neurons, len(network["blocks"]), classes)
        return PackedSizes(compiled, patch, classes)

    def shapes(self, n: int) -> dict[str, tuple[int, ...]]:
        """The tensors of n networks in the order of the rows, and their shapes."""
        c = self.compiled
        D, h, F, d = c.width, c.heads, c.neurons, c.width // c.heads
        out: dict[str, tuple[int, ...]] = {}
        if self.patch:
            out |= {"embedding.W": (n, self.patch, D), "embedding.b": (n, D)}
        for i in range(c.blocks):
            block = {letter: (n, 1, h, D, d) for letter in ("W_Q", "W_K", "W_V")} | {
                "W_O": (n, 1, h, d, D),
                "W_A": (n, 1, D, F),
                "b_A": (n, 1, F),
                "W_B": (n, 1, F, D),
                "b_B": (n, 1, D),
            }
            out |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
        return out | {
            "classifier.W_1": (n, D, D),
            "classifier.b_1": (n, D),
            "classifier.W_2": (n, D, self.classes),
            "classifier.b_2": (n, self.classes),
        }


def why_not_packed(network: Mapping[str, Any]) -> str:
    """Why the C code cannot read these networks; nothing if it can.

    Args:
        network: a `models.Network`; parts the C code does not read are left alone.
    """
    try:
        sizes = PackedSizes.of(network)
        named = _named(network)
        n = len(named["classifier.W_1"])
        odd = [name for name, shape in sizes.shapes(n).items() if named[name].shape != shape]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        return f"the native pass reads networks of the zoo's kind ({error!r})"
    if odd:
        found, expected = tuple(named[odd[0]].shape), sizes.shapes(n)[odd[0]]
        return f"the native pass expects '{odd[0]}' to be {expected}, found {found}"
    width, neurons = sizes.compiled.width, sizes.compiled.neurons
    if width % 4 or neurons % 4:
        return (
            f"the native pass is for widths that are multiples of 4, not {width} and "
            f"{neurons} neurons"
        )
    return next((problem for w in named.values() if (problem := _why_not_tensor(w))), "")


def _why_not_tensor(w: Tensor) -> str:
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(w):
        return "the native pass cannot be traced or transformed"
    if w.device.type != "cpu" or w.dtype != torch.float32:
        return f"the native pass is for float32 on the CPU, not {w.dtype} on {w.device}"
    if w.requires_grad and torch.is_grad_enabled():
        return "the native pass has no gradients of weights"
    return ""


def pack(network: Mapping[str, Any]) -> Tensor:
    """Networks that `why_not_packed` has nothing against as rows ``[n, weights]``."""
    named, parts = _named(network), []
    sizes = PackedSizes.of(network)
    for name in sizes.shapes(1):
        if name.endswith("W_Q"):
            stem = name.removesuffix("Q")
            qkv = torch.stack([named[stem + letter][:, 0] for letter in "QKV"], 1)
            parts.append(qkv.permute(0, 3, 1, 2, 4).flatten(1))
        elif not name.endswith(("W_K", "W_V")):
            parts.append(named[name].flatten(1))
    return torch.cat(parts, 1).detach()


def _named(network: Mapping[str, Any]) -> dict[str, Tensor]:
    named = {f"blocks.{i}.{k}": w for i, block in enumerate(network["blocks"])
             for k, w in block.items()}
    for part in ("embedding", "classifier"):
        named |= {f"{part}.{k}": w for k, w in network.get(part, {}).items()}
    return named
