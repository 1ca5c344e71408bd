"""What do many networks answer to learned inputs, and how must those change? By C code, on the CPU.

The arithmetic is that of the zoo's network (`architectures.zoo_network`). Weights are constants:
gradients are those of the probes alone.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_nfn.errors import SpaceError
from transformer_nfn.native_network.compile import CompiledSizes, load_for
from transformer_nfn.native_network.packed import PackedSizes, pack, why_not_packed

MOST_KEPT = 1 << 29
"""Bytes; of more pairs of a network and a probe, the way back walks the way there again."""


class _Room(threading.local):
    """Memory for what the way back needs, for the latest call alone and used again by the next.

    Fresh memory would cost more time, page by page, than is saved by what stands in it.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0)
        self.guest = object()

    def let(self, size: int) -> tuple[Tensor, object]:
        """So many floats, and whoever holds them from now on."""
        if len(self.memory) < size:
            self.memory = torch.empty(0)
            self.memory = torch.empty(size)
        self.guest = object()
        return self.memory, self.guest

    def of(self, guest: object) -> Tensor | None:
        """What this one wrote, unless another has come since."""
        return self.memory if self.guest is guest else None


_room = _Room()


def why_not(network: Mapping[str, Any]) -> str:
    """Why `probe_answers` cannot be asked about these networks; nothing if it can.

    Args:
        network: a `models.Network`.
    """
    return why_not_packed(network) or library(PackedSizes.of(network).compiled)[1]


def fits(network: Mapping[str, Any]) -> bool:
    """Whether `probe_answers` can be asked about these networks."""
    return not why_not(network)


def probe_answers(
    network: Mapping[str, Any], probes: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits ``[n, P, classes]`` of every network on every probe, and spread ``[n, P, blocks]``.

    The spread behind a block is the mean square of the mean token after LayerNorm, tokens brought
    to mean square 1: 1 where all tokens are one vector. Logits are differentiable once, with
    respect to the probes; spread is not. The same bits whatever the number of threads.

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
    logits, spread = _ProbeAnswers.apply(probes, *rest)  # type: ignore[no-untyped-call]
    return logits, spread


class _ProbeAnswers(torch.autograd.Function):
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
        kept, ctx.guest = _room.let(size) if fits_in else (None, object())
        ctx.save_for_backward(probes, weights, positions)
        ctx.sizes = sizes
        pairs = len(weights), len(probes)
        logits = torch.empty(*pairs, sizes.classes)
        spread = torch.empty(*pairs, sizes.compiled.blocks)
        _run(sizes, weights, probes, positions, logits, spread, None, None, kept)
        ctx.mark_non_differentiable(spread)
        return logits, spread

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dlogits: Tensor, _: Tensor | None
    ) -> tuple[Tensor, None, None, None, None]:
        probes, weights, positions = ctx.saved_tensors
        lib = _library(ctx.sizes.compiled)
        parts = torch.zeros(lib.tnfn_slices(), *probes.shape)
        kept = _room.of(ctx.guest)
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
    """The pass compiled for networks of these sizes, or None and why there is none."""
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
