"""Actions by invertible matrices: what they share, GL(n), and O(n).

Without MKL, ``torch.bmm`` on a CPU runs one matrix after another on one thread, about 4 µs a call
whatever its size. NumPy's loop costs a third of that and releases the interpreter lock, so `matmul`
runs it on all of PyTorch's threads.
"""

from __future__ import annotations

from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from transformer_nfn.errors import GroupError
from transformer_nfn.spaces.actions.base import (
    LOG10_2,
    Action,
    Device,
    Drawing,
    Place,
    Pointwise,
    Sites,
    Size,
    Solution,
    line_up,
    spread,
)
from transformer_nfn.spaces.actions.solvers import Pair, exact_matrix, polar

MAX_DRAWS = 1000
SINGULAR = 1 / torch.finfo(torch.float64).eps


class MatrixAction(Action):
    """A group of invertible matrices ``G [*sites, n, n]``; a subgroup of GL(n)."""

    rebases: ClassVar[bool] = True

    @abstractmethod
    def sample(self, count: int, size: int, how: Drawing) -> Tensor:
        """``count`` random matrices ``[count, n, n]`` in float64, of any condition number."""

    @abstractmethod
    def sample_conditioned(self, count: int, size: int, how: Drawing, condition: float) -> Tensor:
        """Random matrices with a prescribed condition number (where the group allows it)."""

    def identity(self, size: int, sites: Sites, dtype: torch.dtype, device: Device) -> Tensor:
        eye = torch.eye(size, dtype=dtype, device=device)
        return eye.expand(*sites, size, size).contiguous()

    def draw(self, size: int, sites: Sites, how: Drawing) -> Tensor:
        """Random matrices; those over ``how.max_condition`` are redrawn."""
        count = prod(sites)
        if how.condition is not None:
            flat = self.sample_conditioned(count, size, how, how.condition)
            return flat.reshape(*sites, size, size)
        flat = self.sample(count, size, how)
        limit = how.max_condition if how.max_condition is not None else SINGULAR
        for _ in range(MAX_DRAWS):
            bad = ~(torch.linalg.cond(flat) <= limit * (1 + 1e-12))
            again = int(bad.sum())
            if again == 0:
                return flat.reshape(*sites, size, size)
            flat[bad] = self.sample(again, size, how)
        raise GroupError(
            f"{MAX_DRAWS} draws gave no {size}×{size} matrix of condition at most {limit:g}"
        )

    def invert(self, part: Tensor) -> Tensor:
        """``G⁻¹``, computed in float64 whatever the dtype."""
        inverse: Tensor = torch.linalg.inv(part.double())
        return inverse.to(part.dtype)

    def compose(self, first: Tensor, then: Tensor) -> Tensor:
        """``G_first G_then``: rows are multiplied from the right."""
        return first @ then

    def act(self, x: Tensor, part: Tensor, place: Place, *, dual: bool = False) -> Tensor:
        """Plain ``x G``, dual ``G⁻¹ x``; ``part`` is the inverse for a dual axis."""
        x = spread(x, part, place)
        dim, last, sites = place.dim, x.ndim - 1, place.sites
        if dual and dim == last - 1 and last not in sites:
            return matmul(line_up(part, sites, last - 1), x)
        # A row vector times the matrix; a dual axis takes the inverse from the left: its transpose.
        right = part.mT if dual else part
        if dim == last and last >= 1 and last - 1 not in sites:
            return matmul(x, line_up(right, sites, last - 1))
        moved = x.movedim(dim, -1).unsqueeze(-2)
        rest = tuple(site - (site > dim) for site in sites)
        return (moved @ line_up(right, rest, last)).squeeze(-2).movedim(-1, dim)

    def reads_through(self, size: int) -> bool:
        """Only where the axis is one piece and plain and dual differ."""
        return self.pieces(size).single and not self.self_dual

    def commutes_with(self, fn: Pointwise) -> bool:
        return False


class Linear(MatrixAction):
    """GL(n): ``Q → Q G`` and ``K → K G⁻ᵀ`` with any invertible G (M and N of the paper).

    >>> Linear().describe(16)
    'GL(16)'
    """

    word: ClassVar[str] = "linear"

    def axis_error(self, name: str, size: int, of: str | None) -> str | None:
        if of is None:
            return f"linear axis '{name}' must say which perm axis it belongs to"
        return None

    def describe(self, size: int) -> str:
        return f"GL({size})"

    def size(self, n: int) -> Size:
        return Size(n**2)

    def sample(self, count: int, size: int, how: Drawing) -> Tensor:
        return normal((count, size, size), how)

    def sample_conditioned(self, count: int, size: int, how: Drawing, condition: float) -> Tensor:
        """``X diag(s) Y`` with X and Y uniform and s geometric."""
        left, right = orthogonal(count, size, how), orthogonal(count, size, how)
        return left * geometric(count, size, how, condition).unsqueeze(-2) @ right

    def solve(self, plain: Pair, dual: Pair, unit: float) -> Solution | None:
        """``P_V = P_U G`` and ``D_V = D_U G⁻ᵀ`` at every site, by `exact_matrix`."""
        sites, n = plain[0].shape[:-2], plain[0].shape[-1]
        flat = [f.reshape(sites.numel(), *f.shape[-2:]) for f in (*plain, *dual)]
        pairs = []
        for i in range(sites.numel()):
            pair = exact_matrix(*(f[i] for f in flat), unit=unit)
            if pair is None:
                return None
            pairs.append(pair)
        G, inverse = (torch.stack(list(m)).reshape(*sites, n, n) for m in zip(*pairs, strict=True))
        return Solution(G, inverse)

    def balance(self, plain: Tensor, dual: Tensor) -> Pair:
        """``P Dᵀ = X Σ Yᵀ`` as ``(X Σ^½)(Y Σ^½)ᵀ``, the largest entry of X's columns positive."""
        n = plain.shape[-1]
        Q_p, R_p = torch.linalg.qr(plain)
        Q_d, R_d = torch.linalg.qr(dual)
        X, values, Yh = torch.linalg.svd(R_p @ R_d.mT, full_matrices=False)
        root = values.sqrt().unsqueeze(-2)
        left, right = Q_p @ (X * root), Q_d @ (Yh.mT * root)
        if left.shape[-2]:
            sign = column_signs(left)
            left, right = left * sign, right * sign
        margin = (0, n - left.shape[-1])
        return pad(left, margin), pad(right, margin)


def column_signs(rows: Tensor) -> Tensor:
    """±1 for each column, ``[*sites, 1, n]``, that makes its largest entry positive."""
    top = rows.abs().argmax(-2, keepdim=True)
    return torch.where(rows.gather(-2, top) < 0, -1.0, 1.0).to(rows.dtype)


class Orthogonal(MatrixAction):
    """O(n): plain and dual agree, so the product of any two tensors is invariant.

    >>> G = Orthogonal().draw(3, (), Drawing(torch.Generator().manual_seed(0)))
    >>> torch.allclose(G @ G.mT, torch.eye(3).double())
    True
    """

    word: ClassVar[str] = "orthogonal"
    self_dual: ClassVar[bool] = True

    def describe(self, size: int) -> str:
        return f"O({size})"

    def size(self, n: int) -> Size:
        return Size(n * (n - 1) // 2, LOG10_2)

    def sample(self, count: int, size: int, how: Drawing) -> Tensor:
        return orthogonal(count, size, how)

    def sample_conditioned(self, count: int, size: int, how: Drawing, condition: float) -> Tensor:
        return orthogonal(count, size, how)

    def invert(self, part: Tensor) -> Tensor:
        return part.mT.contiguous()

    def solve(self, plain: Pair, dual: Pair, unit: float) -> Solution | None:
        """Orthogonal Procrustes on all rows."""
        first, second = (torch.cat(pair, -2) for pair in zip(plain, dual, strict=True))
        G = polar(first.mT @ second)
        return Solution(G, G.mT.contiguous())

    def balance(self, plain: Tensor, dual: Tensor) -> Pair:
        """All rows ``X Σ Yᵀ`` as ``X Σ``, the largest entry of each column positive."""
        rows, n = torch.cat([plain, dual], -2), plain.shape[-1]
        if rows.shape[-2] == 0:
            return plain, dual
        X, values, _ = torch.linalg.svd(rows, full_matrices=False)
        turned = X * values.unsqueeze(-2)
        turned = pad(turned * column_signs(turned), (0, n - turned.shape[-1]))
        return turned[..., : plain.shape[-2], :], turned[..., plain.shape[-2] :, :]


def normal(shape: tuple[int, ...], how: Drawing) -> Tensor:
    """Standard normal float64 numbers, or uniform ones on ``how.entries``."""
    if how.entries is None:
        return torch.randn(shape, generator=how.generator, dtype=torch.float64, device=how.device)
    low, high = how.entries
    x = torch.rand(shape, generator=how.generator, dtype=torch.float64, device=how.device)
    return low + (high - low) * x


def geometric(count: int, size: int, how: Drawing, condition: float) -> Tensor:
    """Positive numbers ``[count, size]`` spread over a factor of ``condition``, in random order."""
    steps = torch.linspace(0.5, -0.5, size, dtype=torch.float64) if size > 1 else torch.zeros(1)
    values = (torch.log(torch.tensor(condition, dtype=torch.float64)) * steps).exp()
    noise = torch.rand((count, size), generator=how.generator, device=how.device)
    return values.to(noise.device)[noise.argsort(-1)]


def orthogonal(count: int, size: int, how: Drawing) -> Tensor:
    """Uniform over the orthogonal group, ``[count, n, n]``."""
    noise = torch.randn(
        (count, size, size), generator=how.generator, dtype=torch.float64, device=how.device
    )
    Q, R = torch.linalg.qr(noise)
    signs = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    uniform: Tensor = Q * signs.unsqueeze(-2)
    return uniform


MANY = 512
SMALL = 64


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y`` for ``[batch, …, n, k]`` and ``[batch, …, k, m]``, fast for many small matrices."""
    if not _many_small(x, y):
        return x @ y
    out: Tensor = _ManySmall.apply(x, y)  # type: ignore[no-untyped-call]
    return out


def _many_small(x: Tensor, y: Tensor) -> bool:
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
        left, right = matmul(grads[0], y.mT), matmul(x.mT, grads[0])
        return left.sum_to_size(x.shape), right.sum_to_size(y.shape)  # undo broadcasting


