"""Outputs of many networks on probes, and their gradients, by C code on the CPU.

The same arithmetic as `functional.zoo_logits`. Weights are constants: gradients are those of the
probes alone.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_nfn.errors import SpaceError
from transformer_nfn.native_code import CompiledSizes, load_for

MOST_KEPT = 1 << 29
"""Bytes of activations kept for the backward pass; beyond them it computes the forward again."""


@dataclass(frozen=True)
class PackedSizes:
    """Sizes of a batch of networks.

    Attributes:
        compiled: constants of the C code.
        patch: numbers in a token before the embedding; 0 where there is none.
        classes: number of logits.
    """

    compiled: CompiledSizes
    patch: int
    classes: int

    @staticmethod
    def of(network: Mapping[str, Any]) -> PackedSizes:
        """Sizes from a few tensors; `shapes` states what all tensors must be."""
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
    """Why the C code cannot read these networks; empty if it can.

    Args:
        network: a `models.Network`; parts the C code does not read are ignored.
    """
    try:
        sizes = PackedSizes.of(network)
        named = _named(network)
        n = len(named["classifier.W_1"])
        odd = [name for name, shape in sizes.shapes(n).items() if named[name].shape != shape]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        return f"the native pass reads networks of the zoo ({error!r})"
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
    """Networks that `why_not_packed` accepts as rows ``[n, weights]``."""
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


class _Workspace(threading.local):
    """Memory for the activations of the latest forward pass, reused by the next.

    Fresh memory would cost more time, page by page, than the activations save.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0)
        self.owner = object()

    def take(self, size: int) -> tuple[Tensor, object]:
        """Memory for ``size`` floats, and its owner until the next call."""
        if len(self.memory) < size:
            self.memory = torch.empty(0)
            self.memory = torch.empty(size)
        self.owner = object()
        return self.memory, self.owner

    def of(self, owner: object) -> Tensor | None:
        """The memory, if ``owner`` was the last to take it."""
        return self.memory if self.owner is owner else None


_workspace = _Workspace()


def why_not(network: Mapping[str, Any]) -> str:
    """Why `probe_outputs` does not support these networks; empty if it does.

    Args:
        network: a `models.Network`.
    """
    return why_not_packed(network) or library(PackedSizes.of(network).compiled)[1]


def fits(network: Mapping[str, Any]) -> bool:
    """Whether `probe_outputs` supports these networks."""
    return not why_not(network)


def probe_outputs(
    network: Mapping[str, Any], probes: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits ``[n, P, classes]`` of networks on probes, and token similarity ``[n, P, blocks]``.

    The similarity behind a block is the mean square of the mean token after LayerNorm, tokens
    scaled to mean square 1: 1 where all tokens are equal. Logits are differentiable once, with
    respect to the probes; similarity is not. The bits do not depend on the number of threads.

    Args:
        network: a `models.Network` that `fits`.
        probes: ``[P, tokens, patch]``, or word vectors ``[P, tokens, D]`` where the networks
            have no embedding; float32 on the CPU.
        positions: ``[≥ tokens, D]``.
    """
    if problem := why_not(network):
        raise SpaceError(problem)
    sizes = PackedSizes.of(network)
    _check("probes", probes, (None, None, sizes.patch or sizes.compiled.width))
    _check("positions", positions, (None, sizes.compiled.width))
    tokens = probes.shape[1]
    if not 0 < tokens <= len(positions):
        raise SpaceError(f"probes of 1 to {len(positions)} tokens expected, found {tokens}")
    keep = torch.is_grad_enabled() and probes.requires_grad
    rest = pack(network), positions[:tokens], sizes, keep
    logits, similarity = _ProbeOutputs.apply(probes, *rest)  # type: ignore[no-untyped-call]
    return logits, similarity


class _ProbeOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        probes: Tensor,
        weights: Tensor,
        positions: Tensor,
        sizes: PackedSizes,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        probes, positions = probes.detach().contiguous(), positions.detach().contiguous()
        size = len(weights) * _library(sizes.compiled).tnfn_kept(*probes.shape[:2])
        fits_in = keep and 4 * size <= MOST_KEPT
        kept, ctx.owner = _workspace.take(size) if fits_in else (None, object())
        ctx.save_for_backward(probes, weights, positions)
        ctx.sizes = sizes
        pairs = len(weights), len(probes)
        logits = torch.empty(*pairs, sizes.classes)
        similarity = torch.empty(*pairs, sizes.compiled.blocks)
        _run(sizes, weights, probes, positions, logits, similarity, None, None, kept)
        ctx.mark_non_differentiable(similarity)
        return logits, similarity

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dlogits: Tensor, _: Tensor | None
    ) -> tuple[Tensor, None, None, None, None]:
        probes, weights, positions = ctx.saved_tensors
        lib = _library(ctx.sizes.compiled)
        parts = torch.zeros(lib.tnfn_slices(), *probes.shape)
        kept = _workspace.of(ctx.owner)
        _run(ctx.sizes, weights, probes, positions, None, None, dlogits.contiguous(), parts, kept)
        return parts.sum(0), None, None, None, None


def _run(sizes: PackedSizes, weights: Tensor, probes: Tensor, *rest: Tensor | None) -> None:
    count, tokens, _ = probes.shape
    failed = _library(sizes.compiled).tnfn_probe(
        len(weights), count, tokens, sizes.patch, sizes.classes,
        *(t if t is None else t.data_ptr() for t in (weights, probes, *rest)),
        torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError("the native pass could not get its scratch memory")


def _check(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    same = tensor.ndim == len(shape) and all(
        size is None or size == found for size, found in zip(shape, tensor.shape, strict=True)
    )
    if not same or tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise SpaceError(
            f"the native pass expects {name} [{expected}] of float32 on the CPU, found "
            f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
        )


def _library(sizes: CompiledSizes) -> ctypes.CDLL:
    lib, problem = library(sizes)
    if lib is None:
        raise SpaceError(problem)
    return lib


@functools.cache
def library(sizes: CompiledSizes) -> tuple[ctypes.CDLL | None, str]:
    """The code compiled for networks of these sizes, or None and the reason."""
    source = Path(__file__).parent / "probes.c"
    # OpenMP shares the threads of PyTorch; a compiler may lack it.
    return load_for(sizes, [source], "probes", _declare, (["-fopenmp"], []))


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    lib.tnfn_probe.argtypes = [ctypes.c_int] * 5 + [ctypes.c_void_p] * 8 + [ctypes.c_int]
    lib.tnfn_probe.restype = ctypes.c_int
    lib.tnfn_kept.argtypes = [ctypes.c_int] * 2
    lib.tnfn_kept.restype = ctypes.c_long
    lib.tnfn_slices.argtypes = []
    lib.tnfn_slices.restype = ctypes.c_int
    return lib
