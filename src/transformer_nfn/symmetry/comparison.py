"""Decides whether two networks are one function: the paper's theorem, with proof either way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from transformer_nfn.errors import GroupError, SpaceError
from transformer_nfn.functional import Architecture, Forward, Inputs, runnable
from transformer_nfn.spaces import Element, Weights, WeightSpace, fold
from transformer_nfn.symmetry.element_search import align_permutations, recover
from transformer_nfn.symmetry.enlarged import EnlargedElement, check_block, recover_enlarged
from transformer_nfn.symmetry.exact import exact_element
from transformer_nfn.symmetry.factored import Factored, sources
from transformer_nfn.symmetry.fingerprints import fingerprint
from transformer_nfn.symmetry.misfit import misfits, relative_error
from transformer_nfn.symmetry.normal_forms import same_normal_form
from transformer_nfn.symmetry.sources import (
    HALF,
    Source,
    allowed_error,
    folded,
    in_float64,
    rounding_unit,
    single,
)
from transformer_nfn.symmetry.witness import Noise, Witness, find_witness

GroupName = Literal["paper", "enlarged"]
MAX_RESOLUTION = 0.05
INVARIANTS_DECIDE = 1e-3
"""Where rounding hides more than this, agreeing invariants prove nothing without an element."""
BORDERLINE = 4.0
STORED_PRODUCT, STORED_TENSOR = 12.0, 2.0
"""Rounding errors of one weight by which half precision may change a product or a tensor that no
matrix acts on, relative to its norm, where a disguise of condition 100 was stored and undone."""


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
        same_function: True (proved by a group element or by equal normal forms), False (proved
            by a witness), None (undecidable at this precision).
        same_orbit: whether a group element takes the first network to the second; functions can
            be equal without that (merged, dead or rank-deficient heads).
        group: which group ``same_orbit`` and ``element`` speak of. Where it is the enlarged group
            of an architecture, the element acts on `Architecture.in_enlarged` of the weights.
        element: the group element that takes the first network to the second.
        witness: an input on which they differ, both run and measured on it; in half precision after
            every tensor of the second that rounding explains is set to the first one's.
        residuals: for each invariant, the relative difference after the best matching.
        element_error: largest relative error over the tensors of ``element.act(U)`` against V.
        resolution: the largest relative difference of an invariant that rounding could hide;
            "same" means: up to this.
        reason: one sentence.
    """

    same_function: bool | None
    same_orbit: bool | None
    group: GroupName
    element: Element | EnlargedElement | None
    witness: Witness | None
    residuals: Mapping[str, float]
    element_error: float | None
    resolution: float
    reason: str

    def __str__(self) -> str:
        words = {True: "yes", False: "no", None: "undecidable at this precision"}
        lines = [
            f"same function: {words[self.same_function]}",
            f"same orbit:    {words[self.same_orbit]} (group: {self.group})",
            f"because        {self.reason}",
            f"resolution:    {self.resolution:.2g} (relative differences below this are hidden)",
        ]
        if self.element_error is not None:
            lines.append(f"element error: {self.element_error:.2g}")
        if self.witness is not None:
            lines.append(
                f"witness:       {self.witness.X.shape[0]} tokens, outputs differ by "
                f"{self.witness.difference:.3g} (rounding explains {self.witness.noise:.1g})"
            )
        lines += [f"  {name}: {value:.2g}" for name, value in self.residuals.items()]
        return "\n".join(lines)


def compare(
    target: Architecture | WeightSpace,
    U: Mapping[str, Tensor],
    V: Mapping[str, Tensor],
    *,
    group: GroupName = "paper",
    forward: Forward | None = None,
    inputs: Inputs | None = None,
    seed: int = 0,
) -> Comparison:
    """Decides whether two networks compute the same function (Theorem 3.2).

    Works for every space; with an architecture, given or named by the space, or with a forward,
    networks are also run, so that a difference is proved by an input. Functions that are equal
    without being in one orbit are recognised for `spaces.multi_head`, `spaces.attention_block` and
    stacks of it, and where an element of the architecture's enlarged group joins them.

    "Same" is up to the rounding of the weights' dtype: the two networks are taken for rounded
    copies of exact ones. Where that rounding hides differences larger than 5 %, or the gap
    between two heads, the answer is None, unless the weights are equal to the bit as they are or
    reordered.

    Args:
        target: the architecture of both networks, or the space they lie in.
        U: one network, ``[1, 1, *axes]`` or ``[*axes]``.
        V: the other.
        group: ``paper`` for the group that the axes of the space describe; ``enlarged`` for the
            larger one of the paper's block, with LayerNorm and ReLU scalings, or that of the
            architecture (`Architecture.enlarged`).
        forward: what the networks compute, ``forward(weights, X)`` with weights ``[*axes]``, in
            place of the architecture's; the group of the space must leave it unchanged.
        inputs: what to run it on, `Vectors` or `Ids`; those of the architecture by default.
        seed: of the search for a witness.
    """
    if group not in ("paper", "enlarged"):
        raise GroupError(f"group must be 'paper' or 'enlarged', found {group!r}")
    architecture = runnable(target, forward, inputs)
    space = target.space if isinstance(target, Architecture) else target
    if group == "enlarged" and architecture is not None and architecture.enlarged is not None:
        return _compare_enlarged(architecture, U, V, seed)
    if group == "enlarged":
        check_block(space)
    _check_pair(space, U, V)
    u, v = single(space, U), single(space, V)
    dtypes = next(iter(u.values())).dtype, next(iter(v.values())).dtype
    dtype = max(dtypes, key=lambda kind: torch.finfo(kind).eps)  # which keeps fewer digits
    unit = rounding_unit(dtype)
    from_u, from_v = (
        sources(space, folded(space, w), allowed_error(kind))
        for w, kind in zip((u, v), dtypes, strict=True)
    )
    alignment = align_permutations(space, from_u, from_v)
    perms, certain = alignment.perms, alignment.certain
    pairs = list(zip(alignment.sources, from_v, strict=True))
    gaps = {a.name: a.gap(b) for a, b in pairs}
    residuals = {name: gap.relative for name, gap in gaps.items()}
    worst = max((gap.ratio for gap in gaps.values()), default=0.0)
    stored = dtype in HALF and all(
        gap.relative <= unit * (STORED_PRODUCT if isinstance(a, Factored) else STORED_TENSOR)
        for (a, _), gap in zip(pairs, gaps.values(), strict=True)
    )
    hidden = max((source.hidden() for pair in pairs for source in pair), default=0.0)
    blurred = hidden > MAX_RESOLUTION or _heads_blur(space, pairs)
    del alignment, from_u, from_v, pairs  # before the weights take twice their room

    u, v = in_float64(u), in_float64(v)
    element: Element | EnlargedElement | None = None
    if group == "enlarged":
        element = recover_enlarged(space, u, v, unit)
    elif worst <= 1 or dtype in HALF:
        element = recover(space, u, v, fold(space, u), fold(space, v), perms, unit)
    fit = _fit(element, u, v, dtypes)
    orbit, error = fit.orbit, fit.error
    if orbit and group == "paper" and worst > 1:
        orbit = None  # the tensors agree and the invariants do not
    certain = certain and not space.twice_rebased
    # Rounding an invariant may hide what the tensors themselves show.
    apart = dtype in HALF and orbit is False and certain
    if orbit is False and worst <= 1 and not certain:
        orbit = None  # an element may exist and not have been found

    if (blurred or orbit is not True) and worst <= 1:
        exact = exact_element(space, u, v, perms, dtype)
        if exact is not None:
            element, error, orbit, blurred = exact, 0.0, True, False

    def answer(
        same: bool | None, on: bool | None, reason: str, witness: Witness | None = None
    ) -> Comparison:
        keep = on is True
        return Comparison(
            same,
            on,
            group,
            element if keep else None,
            witness,
            residuals,
            error if keep else None,
            hidden,
            reason,
        )

    if blurred and (worst <= 1 or orbit):
        words = str(dtype).removeprefix("torch.")
        return answer(
            None,
            None,
            f"rounding to {words} hides relative differences up to {hidden:.1%} of an invariant, "
            "more than what tells heads apart",
        )
    if orbit:
        return answer(True, True, "a group element takes the first network to the second")
    if worst <= 1 and not apart:
        # A function that no re-basing changes depends on the products alone.
        if space.products_separate and hidden <= INVARIANTS_DECIDE:
            return answer(True, orbit, "all invariants agree, though no group element was found")
        return answer(None, None, "all invariants agree, but they do not tell all functions apart")
    if stored or (worst <= BORDERLINE and not apart):
        return answer(None, None, "the invariants differ by hardly more than rounding explains")
    if architecture is None:
        if _prints_differ(space, u, v, hidden):
            return answer(None, False, "the invariants differ, and no forward is known to run")
        return answer(None, None, "the invariants could not be matched, and no forward is known")
    # Running both networks sees more than the tolerances of a normal form, so it comes first.
    u, v = fit.moved or u, fit.rounded or v
    witness = find_witness(architecture, u, v, Noise.of(dtype), seed=seed, thorough=False)
    if (
        witness is None
        and hidden <= INVARIANTS_DECIDE
        and same_normal_form(architecture, u, v, allowed_error(dtype))
    ):
        on = False if _prints_differ(space, u, v, hidden) else None
        return answer(True, on, "the normal forms of the two functions agree")
    if witness is None and architecture.enlarged is not None:
        wider = _compare_enlarged(architecture, U, V, seed)
        if wider.same_function:
            return wider
        witness = wider.witness
    if witness is None:
        witness = find_witness(architecture, u, v, Noise.of(dtype), seed=seed)
    if witness is not None:
        return answer(False, False, "the outputs differ on the witness", witness)
    on = False if _prints_differ(space, u, v, hidden) else None
    return answer(None, on, "neither a group element nor a witness was found")


def _compare_enlarged(
    architecture: Architecture, U: Mapping[str, Tensor], V: Mapping[str, Tensor], seed: int
) -> Comparison:
    """The comparison in the space that describes the architecture's enlarged group."""
    over = architecture.over_enlarged()
    found = compare(over, architecture.in_enlarged(U), architecture.in_enlarged(V), seed=seed)
    return replace(found, group="enlarged")


def _prints_differ(space: WeightSpace, u: Weights, v: Weights, hidden: float) -> bool:
    """Whether two networks cannot share an orbit because their fingerprints differ."""
    first, second = fingerprint(space, u), fingerprint(space, v)
    size = max(float(first.norm()), float(second.norm()))
    return float((first - second).norm()) > (1e-6 + 100 * hidden) * size


def _check_pair(space: WeightSpace, U: Mapping[str, Tensor], V: Mapping[str, Tensor]) -> None:
    """Checks that both are one network of the space, on one device."""
    devices = []
    for weights in (U, V):
        space.check(weights, lead=None, finite=False)
        name, first = next((n, weights[n]) for n in space.tensors)
        lead = first.shape[: first.ndim - len(space.tensors[name].axes)]
        if lead.numel() != 1:
            raise SpaceError(
                f"compare takes one network on each side, found leading axes {list(lead)}; "
                "pick one with space.network(weights, item)"
            )
        devices.append(first.device)
    if devices[0] != devices[1]:
        raise SpaceError(f"mixed devices: one network is on {devices[0]}, one on {devices[1]}")
    for weights in (U, V):
        space.check(weights, lead=None)


@dataclass(frozen=True)
class _Fit:
    """How well an element takes one network to the other.

    Attributes:
        orbit: True if rounding explains every tensor, False if one is far away, None between.
        error: largest relative error of a tensor, where ``orbit`` is True.
        moved: half precision: the first network, moved by the element.
        rounded: half precision: the second network, every tensor that rounding explains replaced
            by that of ``moved``: what is left is what rounding does not explain.
    """

    orbit: bool | None
    error: float | None = None
    moved: Weights | None = None
    rounded: Weights | None = None


def _fit(
    element: Element | EnlargedElement | None,
    u: Weights,
    v: Weights,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> _Fit:
    if element is None:
        return _Fit(False)
    moved = element.act(u)
    found = misfits(element, moved, u, v, dtypes)
    worst = max(found.values())
    if worst <= 1:
        return _Fit(True, max(relative_error(moved[name], w) for name, w in v.items()))
    if not any(dtype in HALF for dtype in dtypes):
        return _Fit(False if worst > 32 else None)
    rounded = {name: moved[name] if found[name] <= 1 else w for name, w in v.items()}
    return _Fit(False if worst > 2 else None, None, moved, rounded)


def _heads_blur(space: WeightSpace, pairs: list[tuple[Source, Source]]) -> bool:
    """Whether two heads that one network tells apart are nearer than the other's rounding."""
    products = [(a, b) for a, b in pairs if isinstance(a, Factored) and isinstance(b, Factored)]
    for sites in {a.sites for a, _ in products if len(a.sites) == 1}:
        there = [(a, b) for a, b in products if a.sites == sites]
        if _blur(there) or _blur([(b, a) for a, b in there]):
            return True
    return False


def _blur(pairs: list[tuple[Factored, Factored]]) -> bool:
    n = len(pairs[0][0].rounding)
    if n > 64:  # neurons, not heads: nothing there inflates the rounding
        return False
    norms = [a.norms for a, _ in pairs]
    for i in range(n):
        for j in range(i):
            own = [float(a.rounding[i] + a.rounding[j]) for a, _ in pairs]
            other = [float(b.rounding[i] + b.rounding[j]) for _, b in pairs]
            if any(abs(float(norm[i] - norm[j])) > o for norm, o in zip(norms, other, strict=True)):
                continue  # their norms alone tell them apart
            apart = [a.between(i, j) for a, _ in pairs]
            distinct = any(d > o for d, o in zip(apart, own, strict=True))
            hidden = all(d <= o for d, o in zip(apart, other, strict=True))
            if distinct and hidden:
                return True
    return False
