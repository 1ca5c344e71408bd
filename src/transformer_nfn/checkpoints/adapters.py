"""LoRA adapters by themselves: what they change, up to the inner basis of their factors.

``B G`` and ``G⁻¹ A`` give the same change ``B A`` for any invertible ``G [r, r]``, so the factors
mean nothing one by one. Reported are singular values of the products, and two adapters are compared
by their products; neither takes more memory than the factors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.checkpoints.proof.checks import Tolerance
from transformer_nfn.io.adapter import BASE_FIELD, Adapter
from transformer_nfn.io.tensor_files import WEIGHT_DTYPES
from transformer_nfn.notebook import bound
from transformer_nfn.symmetry.rounding import is_rounding, rounding_rms, tensor_excess


@dataclass(frozen=True)
class ChangeReport:
    """What an adapter does to one matrix.

    Attributes:
        module: name of the matrix in the model.
        shape: ``[out, in]``.
        rank: of its factors.
        scale: factor on their product.
        values: singular values of ``scale · B A``, the largest first.
    """

    module: str
    shape: tuple[int, int]
    rank: int
    scale: float
    values: Tensor

    @property
    def norm(self) -> float:
        """Frobenius norm of the change."""
        return float(self.values.norm())


@dataclass(frozen=True)
class AdapterReport:
    """Report on one adapter.

    Attributes:
        where: its folder.
        base: the model that its config names.
        changes: one for each matrix.
        replaced: tensors that are stored in full.
    """

    where: str
    base: str | None
    changes: tuple[ChangeReport, ...]
    replaced: tuple[str, ...]

    @property
    def free(self) -> int:
        """Dimension of the group that leaves all products unchanged."""
        return sum(change.rank**2 for change in self.changes)

    def as_json(self) -> dict[str, Any]:
        """As plain numbers and strings."""
        return {
            "where": self.where,
            "base": self.base,
            "symmetry_parameters": self.free,
            "changes": [
                {
                    "module": c.module,
                    "shape": list(c.shape),
                    "rank": c.rank,
                    "scale": c.scale,
                    "norm": c.norm,
                    "effective_rank": effective_rank(c.values),
                    "singular_values": c.values.tolist(),
                }
                for c in self.changes
            ],
            "replaced": list(self.replaced),
        }

    def targets(self) -> dict[str, list[ChangeReport]]:
        """Changes by the last part of their names: ``q_proj``."""
        out: dict[str, list[ChangeReport]] = {}
        for change in self.changes:
            out.setdefault(re.sub(r"^.*\.", "", change.module), []).append(change)
        return out


def effective_rank(values: Tensor) -> float:
    """Exponential of the entropy of singular values, as shares of their sum; 0 for zeros.

    >>> round(effective_rank(torch.tensor([2.0, 2.0, 0.0])), 6)
    2.0
    """
    total = values.sum()
    if total == 0:
        return 0.0
    shares = values / total
    return float(torch.special.entr(shares).sum().exp())


def inspect_adapter(adapter: Adapter) -> AdapterReport:
    """Report rank, scale and singular values of every change; the inner basis does not matter."""
    changes = []
    for change in adapter.changes.values():
        B, A = adapter.factors(change.module)
        values = torch.linalg.svdvals(_core(B, A))
        changes.append(
            ChangeReport(change.module, change.shape, change.rank, change.scale, values)
        )
    base = adapter.config.get(BASE_FIELD)
    named = base if isinstance(base, str) and base else None
    return AdapterReport(adapter.where, named, tuple(changes), tuple(adapter.replaced))


def _core(B: Tensor, A: Tensor) -> Tensor:
    """A small matrix with the singular values of ``B A``."""
    core: Tensor = torch.linalg.qr(B).R @ torch.linalg.qr(A.mT).R.mT
    return core


@dataclass(frozen=True)
class ChangeComparison:
    """One matrix under two adapters.

    Attributes:
        distance: ``‖ΔA − ΔB‖ / max(‖ΔA‖, ‖ΔB‖)``; 1 where only one changes it.
        cosine: of the two changes as vectors.
        excess: distance in expected rounding errors.
    """

    distance: float
    cosine: float
    excess: float


@dataclass(frozen=True)
class AdapterComparison:
    """Two adapters, compared by their products.

    Attributes:
        same: every change agrees within rounding; None where they do and the adapters name
            different bases, which may be one model under two names.
        changes: by name of the matrix.
        single: matrices that only one of the two changes.
        replaced: tensors stored in full that differ.
        allowed: rounding errors up to which a change agrees.
        bases: the different names of their bases.
    """

    same: bool | None
    changes: Mapping[str, ChangeComparison]
    single: tuple[str, ...]
    replaced: tuple[str, ...]
    allowed: float
    bases: tuple[str, str] | None = None

    def __str__(self) -> str:
        """One sentence."""
        agree = f"all {len(self.changes)} changes agree up to the basis of their factors"
        if self.same:
            return f"same: {agree}"
        if self.same is None and self.bases is not None:
            a, b = (repr(name[:80]) for name in self.bases)
            return f"unclear: {agree}, of bases that are named {a} and {b}: compare these too"
        wrong = [name for name, c in self.changes.items() if c.excess > self.allowed]
        worst = max(wrong, key=lambda name: self.changes[name].distance, default="")
        words = [
            f"{len(wrong)} of {len(self.changes)} changes differ, most {worst} (distance "
            f"{self.changes[worst].distance:.2g}, cosine {bound(self.changes[worst].cosine)})"
        ] if wrong else []  # fmt: skip
        words += [f"only one changes {name}" for name in self.single[:3]]
        words += [f"'{name}' is stored in full and differs" for name in self.replaced[:3]]
        return f"different: {'; '.join(words)}"

    def as_json(self) -> dict[str, Any]:
        """As plain numbers and strings."""
        return {
            "same": self.same,
            "reason": str(self),
            "changes": {
                name: {"distance": c.distance, "cosine": c.cosine, "rounding_errors": c.excess}
                for name, c in self.changes.items()
            },
            "single": list(self.single),
            "replaced": list(self.replaced),
        }


def compare_adapters(a: Adapter, b: Adapter) -> AdapterComparison:
    """Compare two adapters up to the inner basis of their factors; no base is needed."""
    dtypes = {
        WEIGHT_DTYPES[side.checkpoint.info(key).dtype]
        for side in (a, b)
        for change in side.changes.values()
        for key in change.keys
        if side.checkpoint.info(key).dtype in WEIGHT_DTYPES
    }
    allowed = Tolerance.of(*dtypes).same
    unit = max(rounding_rms(dtype) for dtype in dtypes) ** 2
    changes = {
        module: _compare(a.factors(module), b.factors(module), unit)
        for module, change in a.changes.items()
        if module in b.changes and b.changes[module].shape == change.shape
    }
    single = tuple(sorted((a.changes.keys() | b.changes.keys()) - changes.keys()))
    names = a.replaced.keys() | b.replaced.keys()
    replaced = tuple(sorted(name for name in names if not _equal(a, b, name)))
    agree = all(change.excess <= allowed for change in changes.values())
    same: bool | None = agree and not single and not replaced
    bases = _different_bases(a, b)
    same = None if same and bases is not None else same
    return AdapterComparison(same, changes, single, replaced, allowed, bases)


def _different_bases(a: Adapter, b: Adapter) -> tuple[str, str] | None:
    """What two adapters call their bases, unless that is one name."""
    first, second = (side.config.get(BASE_FIELD) for side in (a, b))
    if not isinstance(first, str) or not isinstance(second, str) or first == second:
        return None
    return first, second


def _compare(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], unit: float
) -> ChangeComparison:
    (B, A), (D, C) = first, second
    pairs = [(x, y) for x, y in zip(first, second, strict=True) if x.shape == y.shape]
    if any(not is_rounding(x != y) for x, y in pairs):  # in one inner basis numbers are exact
        unit = rounding_rms(torch.float64) ** 2
    sizes = [_core(*pair).norm() for pair in (first, second)]
    residual = _core(torch.cat([B, -D], 1), torch.cat([A, C])).square().sum()
    # Both factors are rounded, and errors of products of columns and rows add up.
    error = sum(
        2 * unit * (left.square().sum(0) * right.square().sum(1)).sum()
        for left, right in (first, second)
    )
    inner = ((D.mT @ B) * (C @ A.mT)).sum()
    size = torch.stack(sizes)
    return ChangeComparison(
        float(residual.sqrt() / size.max().clamp_min(1e-300)),
        float(inner / size.prod().clamp_min(1e-300)),
        tensor_excess(residual, torch.as_tensor(error)),
    )


def _equal(a: Adapter, b: Adapter, name: str) -> bool:
    if name not in a.replaced or name not in b.replaced:
        return False
    x, y = (side.checkpoint[side.replaced[name]] for side in (a, b))
    return x.shape == y.shape and torch.equal(x.double(), y.double())
