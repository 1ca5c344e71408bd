"""Sums of the entries of an activated linear map, ``S = Σ_jk fn(W x_jk + a_j + c_k)``.

An invariant layer reads these from the output of an equivariant layer. ReLU on a CPU without
gradients runs in C, where each network stays in the cache; otherwise PyTorch, without gradients a
few networks at a time.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import forward_ad

from transformer_nfn.native_code import load

SOURCES = ("pooled_relu.c", "pooled_relu.h")
FUNCTIONS = {torch.float32: "tnfn_pooled_relu_float", torch.float64: "tnfn_pooled_relu_double"}
PORTION = 128
"""Networks at a time in PyTorch without gradients."""
WORTHWHILE = 1 << 22
"""Multiplications that take a tenth of a millisecond; below, the compiler is not called."""


def pooled(
    fn: Callable[[Tensor], Tensor], weight: Tensor, x: Tensor, a: Tensor, c: Tensor | None
) -> Tensor:
    """The sums ``[groups, m, batch]``.

    Args:
        fn: the activation, entry by entry.
        weight: ``[groups, m, q]``.
        x: ``[groups, q, batch, j, k]``.
        a: ``[groups, m, batch, j]``, the same for all k.
        c: ``[groups, m, batch, k]``, the same for all j; None for zero.
    """
    products = weight.shape[1] * x.numel()
    operands = [t for t in (weight, x, a, c) if t is not None]
    if fn is torch.relu and products >= WORTHWHILE and _plain(operands):
        lib, _ = library()
        out = _in_c(lib, weight, x, a, c) if lib is not None else None
        if out is not None:
            return out
    batch = x.shape[2]
    if torch.is_grad_enabled() or batch <= PORTION:
        return _in_torch(fn, weight, x, a, c)
    parts = []
    for start in range(0, batch, PORTION):
        size = min(PORTION, batch - start)
        some = (None if t is None else t.narrow(2, start, size) for t in (x, a, c))
        parts.append(_in_torch(fn, weight, *some))  # type: ignore[arg-type]
    return torch.cat(parts, -1)


def _in_torch(
    fn: Callable[[Tensor], Tensor], weight: Tensor, x: Tensor, a: Tensor, c: Tensor | None
) -> Tensor:
    groups, _, *places = x.shape
    flat = x.reshape(groups, weight.shape[2], x.shape[2:].numel())
    # An outer product is faster as a multiplication.
    y = weight * flat if weight.shape[2] == 1 else torch.bmm(weight, flat)
    y = y.view(groups, weight.shape[1], *places)
    if torch.is_grad_enabled():
        y = y + a.unsqueeze(-1)
        y = fn(y if c is None else y + c.unsqueeze(-2))
    else:
        y += a.unsqueeze(-1)
        if c is not None:
            y += c.unsqueeze(-2)
        y = y.relu_() if fn is torch.relu else fn(y)
    return y.flatten(-2).sum(-1)


def _plain(operands: list[Tensor]) -> bool:
    """Whether these are plain CPU tensors without autograd, vmap or tracing."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if forward_ad._current_level >= 0:
        return False
    dtype = operands[0].dtype
    return (
        dtype in FUNCTIONS
        and all(type(t) in (Tensor, torch.nn.Parameter) and t.dtype == dtype for t in operands)
        and all(t.device.type == "cpu" for t in operands)
        and not any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in operands)
    )


@functools.cache
def library() -> tuple[ctypes.CDLL | None, str]:
    """The compiled sums, or None and the reason."""
    here = Path(__file__).parent
    # OpenMP shares the threads of PyTorch; a compiler may lack it.
    return load([here / name for name in SOURCES], "pooled-relu", _declare, (["-fopenmp"], []))


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    for name in FUNCTIONS.values():
        function = getattr(lib, name)
        function.argtypes = [ctypes.c_long] * 6 + [ctypes.c_void_p] * 5 + [ctypes.c_int]
        function.restype = ctypes.c_int
    return lib


def _in_c(
    lib: ctypes.CDLL, weight: Tensor, x: Tensor, a: Tensor, c: Tensor | None
) -> Tensor | None:
    groups, rows, features = weight.shape
    batch, j, k = x.shape[2:]
    out = x.new_zeros(groups, rows, batch)
    # Named, so that they outlive the call.
    weight, x, a = weight.contiguous(), x.contiguous(), a.contiguous()
    c = c.contiguous() if c is not None else None
    pointers = [t.data_ptr() if t is not None else None for t in (weight, x, a, c, out)]
    run = getattr(lib, FUNCTIONS[x.dtype])
    done = run(groups, rows, features, batch, j, k, *pointers, torch.get_num_threads())
    return out if done else None
