"""Many small matrix products at once, where PyTorch would call BLAS once for each of them.

Without MKL, ``torch.bmm`` on a CPU runs one matrix after another on one thread, at about 4 µs a
call whatever its size. NumPy's loop costs a third of that and lets go of the interpreter, so it
can run on all of PyTorch's threads. Measured by ``benchmarks/symmetry.py``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

MANY = 512
SMALL = 64


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y`` for ``[batch, …, n, k]`` and ``[batch, …, k, m]``, fast for many small ones."""
    if not _worthwhile(x, y):
        return x @ y
    out: Tensor = _ManySmall.apply(x, y)  # type: ignore[no-untyped-call]
    return out


def _worthwhile(x: Tensor, y: Tensor) -> bool:
    if torch.compiler.is_compiling() or x.ndim < 3 or x.shape[0] < MANY:
        return False
    if torch.backends.mkl.is_available():
        return False
    plain = type(x) is Tensor and type(y) is Tensor and x.device.type == y.device.type == "cpu"
    if not plain or x.dtype not in (torch.float32, torch.float64) or x.dtype != y.dtype:
        return False
    if y.ndim != x.ndim or x.shape[0] != y.shape[0]:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return bool(max(*x.shape[-2:], *y.shape[-2:]) <= SMALL)


class _ManySmall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        a, b = x.detach().numpy(), y.detach().numpy()
        lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        out = np.empty((*lead, a.shape[-2], b.shape[-1]), dtype=a.dtype)
        workers = torch.get_num_threads()
        edges = [len(out) * i // workers for i in range(workers + 1)]
        parts = [slice(i, j) for i, j in pairwise(edges)]
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda part: np.matmul(a[part], b[part], out=out[part]), parts))
        return torch.from_numpy(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return _summed(matmul(grads[0], y.mT), x), _summed(matmul(x.mT, grads[0]), y)


def _summed(grad: Tensor, like: Tensor) -> Tensor:
    """The gradient summed over axes along which ``like`` was broadcast."""
    return grad.sum_to_size(like.shape)
