"""Check that a quantised file was made from a model: tensor by tensor, without any disguise.

A stored weight stands for an interval of numbers (`Model.interval`); an unquantised one for those
that its dtype rounds to it. Two files can come from the same numbers only if the intervals of every
weight overlap. That is sharp: of a million normal weights that all grow by 1 %, 1.1 % leave their
intervals in Q4_1 and 31 % in Q8_0, and none do before; Q4_1 itself moves a tensor by 8 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.checkpoints.families import Model
from transformer_nfn.checkpoints.settings import differing_settings
from transformer_nfn.functional.description import EXTRA, KEPT

PLAIN_ERROR = 2.0**-20
"""Least relative error of a plain number: converters compute in single precision."""
SMALLEST = 2.0**-24
"""Error of numbers near zero, where half precision has its last digit."""
FAR = 0.75
"""Relative distance from which on a tensor in a format of vectors is another: IQ1_S, the coarsest,
causes less, and strangers are at 1 or more."""
LOOK = 16
"""Tensors after which a pair that mostly disagrees is left to scores."""


@dataclass(frozen=True)
class TensorConversion:
    """One tensor of two files.

    Attributes:
        name: canonical name.
        key: name in the second file, or in the first where that one is quantised.
        format: that it was quantised to.
        outside: share of its weights that cannot come from the same numbers.
        distance: ``‖a − b‖ / ‖a‖``.
        rotary: it agrees with the rows of each head in the other rotary order, pairs next to each
            other or in two halves.
    """

    name: str
    key: str
    format: str
    outside: float
    distance: float
    rotary: bool = False

    @property
    def fits(self) -> bool:
        """Whether rounding explains the difference."""
        return self.outside == 0


@dataclass(frozen=True)
class Conversion:
    """Two files of which at least one is quantised, compared as they lie.

    Attributes:
        tensors: every tensor that both have.
        equal: all numbers are equal.
        facts: sizes and settings that differ, a sentence each.
        single: tensors that only one of the two has.
        alike: both store every tensor in one format.
    """

    tensors: tuple[TensorConversion, ...]
    equal: bool
    facts: tuple[str, ...] = ()
    single: tuple[str, ...] = ()
    alike: bool = False

    @property
    def wrong(self) -> tuple[TensorConversion, ...]:
        """Tensors that rounding does not explain."""
        return tuple(tensor for tensor in self.tensors if not tensor.fits)

    @property
    def same(self) -> bool:
        """Whether both are one model up to rounding."""
        return not self.wrong and not self.facts

    def __str__(self) -> str:
        """One sentence.

        >>> tensor = TensorConversion("0.W_Q", "layers.0.self_attn.q_proj.weight", "Q4_1", 0, 0.1)
        >>> print(Conversion((tensor,), False))
        same up to Q4_1 rounding, 1 tensor checked as the files have it
        """
        count = len(self.tensors)
        formats = ", ".join(sorted({tensor.format for tensor in self.tensors}))
        checked = f"{count} tensor{'s' if count > 1 else ''} checked as the files have them"
        if count == 1:
            checked = "1 tensor checked as the files have it"
        if self.equal:
            words = f"both hold the same numbers, stored in {formats}; {checked}"
        elif not self.wrong:
            words = f"same up to {formats} rounding, {checked}"
        else:
            words = f"{count - len(self.wrong)} of {count} tensors agree up to {formats} rounding"
            worst = sorted(self.wrong, key=lambda t: -t.outside)
            named = ", ".join(
                f"{t.key} ({100 * t.outside:.3g} % of its weights)" for t in worst[:3]
            )
            words += f"; not so {named}{' …' if len(worst) > 3 else ''}"
            if all(tensor.rotary for tensor in self.wrong):
                words += ": the rows of each head are in the other rotary order"
        return "; ".join([words, *self.facts])

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "same": self.same,
            "equal": self.equal,
            "checked": len(self.tensors),
            "formats": sorted({tensor.format for tensor in self.tensors}),
            "wrong": [
                {
                    "name": t.name, "key": t.key, "format": t.format, "outside": t.outside,
                    "distance": t.distance, "rotary_order": t.rotary,
                }
                for t in self.wrong
            ],
            "facts": list(self.facts),
            "single": list(self.single),
        }  # fmt: skip


def check_conversion(A: Model, B: Model) -> Conversion | None:
    """Compare two files tensor by tensor, in the bases and orders that they have.

    Returns:
        None where neither is quantised, where tensors have other names or shapes, and where most
        of them disagree: a disguise, a relative or a stranger, which `relate` tells apart.
    """
    if not any(_quantised(model) for model in (A, B)):
        return None
    pairs = [(name, name) for name, shape in A.names.items() if B.names.get(name) == shape]
    single = sorted((A.names.keys() | B.names.keys()) - {name for name, _ in pairs})
    if "head" in single and "token" in A.names and "token" in B.names:
        # One stores its token embedding a second time as output matrix.
        pairs.append(("head", "token") if "head" in A.names else ("token", "head"))
        single.remove("head")
    if any(not name.startswith((EXTRA, KEPT)) and name != "head_bias" for name in single):
        return None
    tensors: list[TensorConversion] = []
    equal = True
    for a, b in pairs:
        tensor, same = _compare(A, B, a, b)
        tensors.append(tensor)
        equal &= same
        if len(tensors) in (LOOK, len(pairs)) and 2 * sum(t.fits for t in tensors) < len(tensors):
            return None
    facts = tuple(differing_settings(A.description, B.description))
    alike = all(a == b and A.format(a) == B.format(b) for a, b in pairs)
    return Conversion(tuple(tensors), equal, facts, tuple(single), alike)


def quantisation_error(model: Model) -> float:
    """Expected square of the relative error of a weight from quantisation, over all matrices.

    0 for a model without quantised tensors.
    """
    if not _quantised(model):
        return 0.0
    error = size = 0.0
    for name in (n for n, shape in model.names.items() if len(shape) > 1):
        value, ends = model[name].float(), model.interval(name)
        size += float(value.square().sum())
        if ends is not None:
            width = (ends[1] - ends[0]).float().flatten()
            error += float(width[width.isfinite()].median()) ** 2 / 12 * value.numel()
    return error / max(size, 1e-300)


def _quantised(model: Model) -> bool:
    return any(model.checkpoint.info(key).quantised for key in model.checkpoint)


def _compare(A: Model, B: Model, a: str, b: str) -> tuple[TensorConversion, bool]:
    """One tensor, and whether its numbers are equal."""
    rounded = B.checkpoint.info(B.key(b)).quantised or not A.checkpoint.info(A.key(a)).quantised
    key, form = (B.key(b), B.format(b)) if rounded else (A.key(a), A.format(a))
    turned = a != b
    x, y = (_oriented(m[n], n, turned) for m, n in ((A, a), (B, b)))
    if torch.equal(x.double(), y.double()):
        return TensorConversion(a, key, form, 0.0, 0.0), True
    distance = float((x.float() - y.float()).norm() / x.float().norm().clamp_min(1e-30))
    first, second = (_interval(m, n, turned) for m, n in ((A, a), (B, b)))
    if first is None or second is None:
        return TensorConversion(a, key, form, float(distance > FAR), distance), False
    outside, rotary = _outside(first, second), False
    if outside and a.rpartition(".")[2] in ("W_Q", "W_K", "b_Q", "b_K"):
        rotary = any(
            _outside(first, (_repaired(second[0], sizes), _repaired(second[1], sizes))) == 0
            for sizes in ((2, -1), (-1, 2))
        )
    return TensorConversion(a, key, form, outside, distance, rotary), False


def _oriented(w: Tensor, name: str, turned: bool) -> Tensor:
    """A token embedding as an output matrix."""
    return w.mT if turned and name == "token" else w


def _interval(model: Model, name: str, turned: bool) -> tuple[Tensor, Tensor] | None:
    if model.checkpoint.info(model.key(name)).quantised:
        ends = model.interval(name)
    else:
        value = model[name]
        wide = value.float()
        error = max(torch.finfo(value.dtype).eps / 2, PLAIN_ERROR) * wide.abs() * 1.01 + SMALLEST
        ends = wide - error, wide + error
    if ends is None:
        return None
    return _oriented(ends[0], name, turned), _oriented(ends[1], name, turned)


def _outside(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> float:
    """Share of weights whose intervals do not overlap."""
    return float(((a[0] > b[1]) | (b[0] > a[1])).float().mean())


def _repaired(w: Tensor, sizes: tuple[int, int]) -> Tensor:
    """The last axis from two halves, ``(2, -1)``, to pairs next to each other, or back."""
    parts: Tensor = w.unflatten(-1, sizes)
    return parts.transpose(-1, -2).reshape(w.shape)
