"""Outputs of many networks on probes, and their gradients, by C code on the CPU.

The same arithmetic as `functional.zoo_logits`. Weights are constants: gradients are those of the
probes alone.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_nfn.errors import SpaceError
from transformer_nfn.functional import small_transformer
from transformer_nfn.native_code import CompiledSizes, load_for

MOST_KEPT = 1 << 29
"""Bytes of activations kept for the backward pass; beyond them it computes the forward again."""


Shapes = Mapping[str, tuple[int, ...]]


def compiled_sizes(shapes: Shapes) -> CompiledSizes:
    """Constants of the C code for networks of these shapes, as a few of them state."""
    heads, width, _ = shapes["blocks.0.W_Q"]
    blocks = sum(name.endswith(".W_Q") for name in shapes)
    neurons, (classes,) = shapes["blocks.0.W_A"][1], shapes["classifier.b_2"]
    return CompiledSizes(width, heads, neurons, blocks, classes)


def _patch(shapes: Shapes) -> int:
    """Numbers in a token before the embedding; 0 where there is none."""
    return shapes["embedding.W"][0] if "embedding.W" in shapes else 0


@functools.lru_cache(maxsize=64)
def _expected(sizes: CompiledSizes, patch: int) -> Shapes:
    """Shapes of all tensors of a network of these sizes."""
    more = sizes.width, sizes.heads, sizes.neurons, sizes.blocks
    return small_transformer(1, sizes.classes, patch, *more).space.shapes


def why_not_packed(tensors: Mapping[str, Tensor]) -> str:
    """Why the C code cannot read these networks; empty if it can.

    Args:
        tensors: ``[n, *axes]`` by name; those the C code does not read are ignored.
    """
    shapes = {name: tuple(w.shape[1:]) for name, w in tensors.items()}
    try:
        sizes = compiled_sizes(shapes)
        expected = _expected(sizes, _patch(shapes))
        odd = [name for name, shape in expected.items() if shapes[name] != shape]
    except (KeyError, IndexError, ValueError, ZeroDivisionError, SpaceError) as error:
        return f"the native pass reads networks of the zoo ({error!r})"
    if odd:
        found = shapes[odd[0]]
        return f"the native pass expects '{odd[0]}' to be {expected[odd[0]]}, found {found}"
    if sizes.width % 4 or sizes.neurons % 4:
        return (
            f"the native pass is for widths that are multiples of 4, not {sizes.width} and "
            f"{sizes.neurons} neurons"
        )
    return next((problem for w in tensors.values() if (problem := _why_not_tensor(w))), "")


def _why_not_tensor(w: Tensor) -> str:
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(w):
        return "the native pass cannot be traced or transformed"
    if w.device.type != "cpu" or w.dtype != torch.float32:
        return f"the native pass is for float32 on the CPU, not {w.dtype} on {w.device}"
    if w.requires_grad and torch.is_grad_enabled():
        return "the native pass has no gradients of weights"
    return ""


def fused(tensors: Mapping[str, Tensor]) -> Tensor:
    """Rows ``[n, weights]`` of networks as the C code reads them.

    Queries, keys and values of all heads are one matrix; the bias of a matrix follows it.
    """
    parts = []
    shapes = {name: tuple(w.shape[1:]) for name, w in tensors.items()}
    for name in _expected(compiled_sizes(shapes), _patch(shapes)):
        if name.endswith("W_Q"):
            stem = name.removesuffix("Q")
            qkv = torch.stack([tensors[stem + letter] for letter in "QKV"], 1)
            parts.append(qkv.permute(0, 3, 1, 2, 4).flatten(1))
        elif name.endswith("W_B"):  # behind the bias of its inputs
            parts += [tensors[name[:-3] + "b_A"].flatten(1), tensors[name].flatten(1)]
        elif not name.endswith(("W_K", "W_V", "b_A")):
            parts.append(tensors[name].flatten(1))
    return torch.cat(parts, 1).detach()


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


def why_not(tensors: Mapping[str, Tensor]) -> str:
    """Why `probe_outputs` does not support these networks; empty if it does."""
    if problem := why_not_packed(tensors):
        return problem
    shapes = {name: tuple(w.shape[1:]) for name, w in tensors.items()}
    return library(compiled_sizes(shapes))[1]


def fits(tensors: Mapping[str, Tensor]) -> bool:
    """Whether `probe_outputs` supports these networks."""
    return not why_not(tensors)


def probe_outputs(
    tensors: Mapping[str, Tensor], probes: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits ``[n, P, classes]`` of networks on probes, and token similarity ``[n, P, blocks]``.

    The similarity behind a block is the mean square of the mean token after LayerNorm, tokens
    scaled to mean square 1: 1 where all tokens are equal. Logits are differentiable once, with
    respect to the probes; similarity is not. The bits do not depend on the number of threads.

    Args:
        tensors: of networks that `fits` accepts, ``[n, *axes]`` by name.
        probes: ``[P, tokens, patch]``, or word vectors ``[P, tokens, D]`` where the networks
            have no embedding; float32 on the CPU.
        positions: ``[≥ tokens, D]``.
    """
    if problem := why_not(tensors):
        raise SpaceError(problem)
    shapes = {name: tuple(w.shape[1:]) for name, w in tensors.items()}
    sizes, patch = compiled_sizes(shapes), _patch(shapes)
    _check("probes", probes, (None, None, patch or sizes.width))
    _check("positions", positions, (None, sizes.width))
    tokens = probes.shape[1]
    if not 0 < tokens <= len(positions):
        raise SpaceError(f"probes of 1 to {len(positions)} tokens expected, found {tokens}")
    keep = torch.is_grad_enabled() and probes.requires_grad
    rest = fused(tensors), positions[:tokens], sizes, keep
    logits, similarity = _ProbeOutputs.apply(probes, *rest)  # type: ignore[no-untyped-call]
    return logits, similarity


class _ProbeOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        probes: Tensor,
        weights: Tensor,
        positions: Tensor,
        sizes: CompiledSizes,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        probes, positions = probes.detach().contiguous(), positions.detach().contiguous()
        size = len(weights) * _library(sizes).tnfn_kept(*probes.shape[:2])
        fits_in = keep and 4 * size <= MOST_KEPT
        kept, ctx.owner = _workspace.take(size) if fits_in else (None, object())
        ctx.save_for_backward(probes, weights, positions)
        ctx.sizes = sizes
        pairs = len(weights), len(probes)
        logits = torch.empty(*pairs, sizes.classes)
        similarity = torch.empty(*pairs, sizes.blocks)
        _run(sizes, weights, probes, positions, logits, similarity, None, None, kept)
        ctx.mark_non_differentiable(similarity)
        return logits, similarity

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dlogits: Tensor, _: Tensor | None
    ) -> tuple[Tensor, None, None, None, None]:
        probes, weights, positions = ctx.saved_tensors
        lib = _library(ctx.sizes)
        parts = torch.zeros(lib.tnfn_slices(), *probes.shape)
        kept = _workspace.of(ctx.owner)
        _run(ctx.sizes, weights, probes, positions, None, None, dlogits.contiguous(), parts, kept)
        return parts.sum(0), None, None, None, None


def _run(sizes: CompiledSizes, weights: Tensor, probes: Tensor, *rest: Tensor | None) -> None:
    count, tokens, width = probes.shape
    rows = [math.prod(shape) for shape in _expected(sizes, 0).values()]
    patch = 0 if weights.shape[1] == sum(rows) else width
    failed = _library(sizes).tnfn_probe(
        len(weights), count, tokens, patch, sizes.classes,
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
