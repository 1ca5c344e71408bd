"""Comparison of two networks as functions: the paper's theorem, with a proof either way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from transformer_nfn.errors import GroupError, SpaceError
from transformer_nfn.functional import Architecture, Forward, Inputs, runnable
from transformer_nfn.notebook import bound, to_html
from transformer_nfn.spaces import Element, Weights, WeightSpace
from transformer_nfn.symmetry.element_search import align_permutations, exact_element, recover
from transformer_nfn.symmetry.enlarged import EnlargedElement, check_block, recover_enlarged
from transformer_nfn.symmetry.normal_forms import same_normal_form
from transformer_nfn.symmetry.representatives import fingerprint
from transformer_nfn.symmetry.rounding import (
    HALF,
    allowed_error,
    differing,
    is_rounding,
    rounding_rms,
    rounding_unit,
    site_excess,
    tensor_excess,
)
from transformer_nfn.symmetry.sources import Factored, Source, folded, in_float64, single, sources
from transformer_nfn.symmetry.witness import Noise, Witness, find_witness

GroupName = Literal["paper", "enlarged"]
MAX_RESOLUTION = 0.05
INVARIANTS_DECIDE = 1e-3
"""Where rounding hides more than this, equal invariants are no proof without an element."""
BORDERLINE = 4.0
STORED_PRODUCT, STORED_TENSOR = 12.0, 2.0
"""Rounding errors of one weight by which half precision may change a product, or a tensor on which
no matrix acts, relative to its norm, after an element of condition number 100 and its inverse."""
TENSOR_LIMIT = 2.0
"""Tolerated multiple of the expected error of a tensor, in the mean square."""
ARITHMETIC = 1024.0
"""Tolerated multiple of the largest rounding error in single and double precision."""


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`.

    Attributes:
        same_function: True (proved by a group element or by equal normal forms), False (proved
            by a witness), None (undecidable at this precision).
        same_orbit: whether a group element takes the first network to the second; functions can
            be equal without that (merged, dead or rank-deficient heads).
        group: the group of ``same_orbit`` and ``element``. An element of the enlarged group of an
            architecture acts on `Architecture.in_enlarged` of the weights.
        element: the group element that takes the first network to the second.
        witness: an input on which their outputs differ; in half precision after every tensor of the
            second network that rounding explains is replaced by the first one's.
        residuals: for each invariant, the relative difference after the best matching.
        element_error: largest relative error over the tensors of ``element.act(U)`` against V.
        resolution: the largest relative difference of an invariant that rounding may hide;
            "same" means up to this.
        reason: one sentence.

    >>> from transformer_nfn import spaces
    >>> space = spaces.multi_head(4, 2, 2, 2)
    >>> U = space.randn(1, dtype=torch.float64)
    >>> print(compare(space, U, U))
    same function: yes
    same orbit:    yes (group: paper)
    because        a group element takes the first network to the second
    ...
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
        lines = [f"{name:<14} {text}" for name, text in self._facts().items()]
        lines += [f"  {name}: {value:.2g}" for name, value in self.residuals.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """What notebooks show."""
        residuals = {name: f"{value:.2g}" for name, value in self.residuals.items()}
        facts = {name.rstrip(":"): text for name, text in self._facts().items()}
        return to_html("Comparison", {**facts, **residuals})

    def _facts(self) -> dict[str, str]:
        words = {True: "yes", False: "no", None: "undecidable at this precision"}
        facts = {
            "same function:": words[self.same_function],
            "same orbit:": f"{words[self.same_orbit]} (group: {self.group})",
            "because": self.reason,
            "resolution:": f"{bound(self.resolution, up=True)} (smaller relative differences may "
            "be hidden)",
        }
        if self.element_error is not None:
            facts["element error:"] = f"{self.element_error:.2g}"
        if self.witness is not None:
            facts["witness:"] = (
                f"{self.witness.X.shape[0]} tokens, outputs differ by "
                f"{self.witness.difference:.3g} (rounding explains "
                f"{bound(self.witness.noise, up=True)})"
            )
        return facts


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
    """Decide whether two networks compute the same function (Theorem 3.2).

    Works for every space. With an architecture (passed, or named by the space) or a forward, the
    networks are also run, so that a difference is proved by an input. Equal functions in different
    orbits are recognised for `spaces.multi_head`, `spaces.attention_block` and stacks of it, and
    where an element of the architecture's enlarged group joins them.

    "Same" is up to the rounding of the weights' dtype: the two networks are treated as rounded
    copies of exact ones, unless they are equal but for some tensors that differ by little. Where
    rounding hides differences over 5 %, or the gap between two heads, the result is None, unless
    the weights are equal bit by bit, as they are or permuted.

    Args:
        U: one network, ``[1, 1, *axes]`` or ``[*axes]``. V: the other.
        group: ``paper`` for the group that the axes of the space describe; ``enlarged`` for the
            larger one of the paper's block, with LayerNorm and ReLU scalings, or that of the
            architecture (`Architecture.enlarged`).
        forward: what the networks compute, ``forward(weights, X)`` with weights ``[*axes]``, in
            place of the architecture's; the group of the space must leave it unchanged.
        inputs: inputs of the forward, `Vectors` or `Ids`; those of the architecture by default.

    >>> from transformer_nfn import spaces
    >>> space = spaces.attention_block(4, 2, 2, 2, 3)
    >>> U = space.randn(1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> V = space.group.random(torch.Generator().manual_seed(1), max_condition=10).act(U)
    >>> compare(space, U, V).same_function
    True
    >>> compare(space, U, V | {"b_A": V["b_A"] + 0.1}).reason
    'the outputs differ on the witness'
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
    if _is_edited(space, u, v):  # nothing stands between the two that rounding could hide
        U, V = u, v = in_float64(u), in_float64(v)
    dtypes = next(iter(u.values())).dtype, next(iter(v.values())).dtype
    dtype = max(dtypes, key=lambda kind: torch.finfo(kind).eps)  # the less precise one
    unit = rounding_unit(dtype)
    invariants = _compare_invariants(space, u, v, dtypes)
    worst, hidden, blurred = invariants.worst, invariants.hidden, invariants.blurred

    u, v = in_float64(u), in_float64(v)
    element: Element | EnlargedElement | None = None
    if group == "enlarged":
        element = recover_enlarged(space, u, v, unit)
    elif worst <= 1 or dtype in HALF:
        element = recover(space, u, v, invariants.perms, unit)
    fit = _fit(element, u, v, dtypes)
    orbit, error = fit.orbit, fit.error
    if orbit and group == "paper" and worst > 1:
        orbit = None  # the tensors agree, the invariants do not
    certain = invariants.certain and not space.twice_rebased
    # The tensors may differ where rounding hides a difference of the invariants.
    apart = dtype in HALF and orbit is False and certain
    if orbit is False and worst <= 1 and not certain:
        orbit = None  # an element may exist that was not found

    if (blurred or orbit is not True) and worst <= 1:
        exact = exact_element(space, u, v, invariants.perms, dtype)
        if exact is not None:
            element, error, orbit, blurred = exact, 0.0, True, False

    def result(
        same: bool | None, on: bool | None, reason: str, witness: Witness | None = None
    ) -> Comparison:
        return Comparison(
            same,
            on,
            group,
            element if on else None,
            witness,
            invariants.residuals,
            error if on else None,
            hidden,
            reason,
        )

    if blurred and (worst <= 1 or orbit):
        name = str(dtype).removeprefix("torch.")
        return result(
            None,
            None,
            f"rounding to {name} hides relative differences up to {bound(100 * hidden, up=True)} % "
            "of an invariant, "
            "more than what tells heads apart",
        )
    if orbit:
        return result(True, True, "a group element takes the first network to the second")
    if worst <= 1 and not apart:
        # A function invariant under the matrices depends on the products only.
        if space.products_separate and hidden <= INVARIANTS_DECIDE:
            return result(True, orbit, "all invariants agree, though no group element was found")
        return result(None, None, "all invariants agree, but they do not tell all functions apart")
    if invariants.stored or (worst <= BORDERLINE and not apart):
        return result(None, None, "the invariants differ by hardly more than rounding explains")
    if architecture is None:
        if _fingerprints_differ(space, u, v, hidden):
            return result(None, False, "the invariants differ, and no forward is known to run")
        return result(None, None, "the invariants could not be matched, and no forward is known")
    # Running both networks resolves more than the tolerances of a normal form.
    u, v = fit.moved or u, fit.rounded or v
    witness = find_witness(architecture, u, v, Noise.of(dtype), seed=seed, thorough=False)
    if (
        witness is None
        and hidden <= INVARIANTS_DECIDE
        and same_normal_form(architecture, u, v, allowed_error(dtype))
    ):
        on = False if _fingerprints_differ(space, u, v, hidden) else None
        return result(True, on, "the normal forms of the two functions agree")
    if witness is None and architecture.enlarged is not None:
        wider = _compare_enlarged(architecture, U, V, seed)
        if wider.same_function:
            return wider
        witness = wider.witness
    if witness is None:
        witness = find_witness(architecture, u, v, Noise.of(dtype), seed=seed)
    if witness is not None:
        return result(False, False, "the outputs differ on the witness", witness)
    on = False if _fingerprints_differ(space, u, v, hidden) else None
    return result(None, on, "neither a group element nor a witness was found")


@dataclass(frozen=True)
class _Invariants:
    """Comparison of the invariants of two networks.

    Attributes:
        perms: permutations that align the first network with the second.
        certain: whether no other permutations may fit as well.
        residuals: relative difference of each invariant.
        worst: largest difference in units of the allowed error.
        hidden: largest relative difference that rounding may hide.
        blurred: whether rounding hides too much, or the gap between two heads.
        stored: whether storing in half precision explains all differences.
    """

    perms: dict[str, Tensor]
    certain: bool
    residuals: dict[str, float]
    worst: float
    hidden: float
    blurred: bool
    stored: bool


def _compare_invariants(
    space: WeightSpace, u: Weights, v: Weights, dtypes: tuple[torch.dtype, torch.dtype]
) -> _Invariants:
    from_u, from_v = (
        sources(space, folded(space, w), allowed_error(dtype))
        for w, dtype in zip((u, v), dtypes, strict=True)
    )
    alignment = align_permutations(space, from_u, from_v)
    pairs = list(zip(alignment.sources, from_v, strict=True))
    gaps = [a.gap(b) for a, b in pairs]
    unit = max(map(rounding_unit, dtypes))
    hidden = max((source.hidden() for pair in pairs for source in pair), default=0.0)
    return _Invariants(
        alignment.perms,
        alignment.certain,
        {a.name: gap.relative for (a, _), gap in zip(pairs, gaps, strict=True)},
        max((gap.ratio for gap in gaps), default=0.0),
        hidden,
        hidden > MAX_RESOLUTION or _heads_blur(pairs),
        any(dtype in HALF for dtype in dtypes)
        and all(
            gap.relative <= unit * (STORED_PRODUCT if isinstance(a, Factored) else STORED_TENSOR)
            for (a, _), gap in zip(pairs, gaps, strict=True)
        ),
    )


def _compare_enlarged(
    architecture: Architecture, U: Mapping[str, Tensor], V: Mapping[str, Tensor], seed: int
) -> Comparison:
    """The comparison in the space that describes the architecture's enlarged group."""
    enlarged = architecture.over_enlarged()
    weights = architecture.in_enlarged(U), architecture.in_enlarged(V)
    return replace(compare(enlarged, *weights, seed=seed), group="enlarged")


def _is_edited(space: WeightSpace, u: Weights, v: Weights) -> bool:
    """Whether two networks in one basis are equal but for entries or tensors that rounding hides.

    A change of basis and back leaves rounding in every tensor on which matrices act.
    """
    masks = {name: differing(w, v[name]) for name, w in u.items()}
    differ = [name for name, mask in masks.items() if bool(mask.any())]
    acted = [name for name in u if space.rebased(name) and bool(u[name].any())]
    if not differ or (acted and all(is_rounding(masks[name]) for name in acted)):
        return False
    dtype = max((w[differ[0]].dtype for w in (u, v)), key=rounding_unit)
    hidden = rounding_unit(dtype) * (STORED_PRODUCT if dtype in HALF else ARITHMETIC)
    return all(relative_error(u[n].double(), v[n].double()) <= hidden for n in differ)


def _fingerprints_differ(space: WeightSpace, u: Weights, v: Weights, hidden: float) -> bool:
    """Whether two networks cannot share an orbit because their fingerprints differ."""
    first, second = fingerprint(space, u), fingerprint(space, v)
    size = max(float(first.norm()), float(second.norm()))
    return float((first - second).norm()) > (1e-6 + 100 * hidden) * size


def _check_pair(space: WeightSpace, U: Mapping[str, Tensor], V: Mapping[str, Tensor]) -> None:
    """Raise `SpaceError` unless both are one network of the space, on one device."""
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
    """Fit of an element that takes one network to the other.

    Attributes:
        orbit: True if rounding explains every tensor, False if one is far off, None in between.
        error: largest relative error of a tensor, where ``orbit`` is True.
        moved: half precision: the first network, transformed by the element.
        rounded: half precision: the second network, with every tensor that rounding explains
            replaced by that of ``moved``.
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
    errors = misfits(element, moved, u, v, dtypes)
    worst = max(errors.values())
    if worst <= 1:
        return _Fit(True, max(relative_error(moved[name], w) for name, w in v.items()))
    if not any(dtype in HALF for dtype in dtypes):
        return _Fit(False if worst > 32 else None)
    rounded = {name: moved[name] if errors[name] <= 1 else w for name, w in v.items()}
    return _Fit(False if worst > 2 else None, None, moved, rounded)


def _heads_blur(pairs: list[tuple[Source, Source]]) -> bool:
    """Whether two heads, distinct in one network, are closer than the other's rounding error."""
    products = [(a, b) for a, b in pairs if isinstance(a, Factored) and isinstance(b, Factored)]
    for sites in {a.sites for a, _ in products if len(a.sites) == 1}:
        there = [(a, b) for a, b in products if a.sites == sites]
        if _blur(there) or _blur([(b, a) for a, b in there]):
            return True
    return False


def _blur(pairs: list[tuple[Factored, Factored]]) -> bool:
    n = len(pairs[0][0].rounding)
    if n > 64:  # neurons, not heads: no matrix inflates their rounding errors
        return False
    norms = [a.norms for a, _ in pairs]
    for i in range(n):
        for j in range(i):
            here = [float(a.rounding[i] + a.rounding[j]) for a, _ in pairs]
            there = [float(b.rounding[i] + b.rounding[j]) for _, b in pairs]
            if any(abs(float(norm[i] - norm[j])) > e for norm, e in zip(norms, there, strict=True)):
                continue  # their norms differ
            apart = [a.between(i, j) for a, _ in pairs]
            distinct = any(d > e for d, e in zip(apart, here, strict=True))
            hidden = all(d <= e for d, e in zip(apart, there, strict=True))
            if distinct and hidden:
                return True
    return False


def misfits(
    element: Element | EnlargedElement,
    moved: Weights,
    u: Weights,
    v: Weights,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> dict[str, float]:
    """Distance of each tensor of ``moved`` from ``v`` in units of the allowed error.

    In half precision every weight was rounded once, and its expected error is known entry by
    entry: its own rounding error, and that of the first network as the element transforms it. In
    single and double precision arithmetic adds to that, so the condition number is allowed for.

    Args:
        element: that should take ``u`` to ``v``.
        moved: ``element.act(u)``.
        u: one network, ``[*axes]`` in float64. v: the other.
    """
    half = any(dtype in HALF for dtype in dtypes)
    if half and isinstance(element, Element) and not element.space.shifts:
        variances = _moved_variances(element, u, dtypes[0])
        return {
            name: _excess(moved[name] - w, variances[name] + _variance(w, dtypes[1]))
            for name, w in v.items()
        }
    if half:
        allowed = 5 * max(map(rounding_rms, dtypes))
    else:
        paper = element.paper if isinstance(element, EnlargedElement) else element
        allowed = min(ARITHMETIC * max(map(rounding_unit, dtypes)) * paper.inflation(), 0.5)
    return {name: relative_error(moved[name], w) / allowed for name, w in v.items()}


def relative_error(x: Tensor, y: Tensor) -> float:
    """``‖x − y‖`` over the larger norm; 0 where both are zero."""
    size = max(float(x.norm()), float(y.norm()))
    return float((x - y).norm()) / size if size > 0 else 0.0


def _variance(w: Tensor, dtype: torch.dtype) -> Tensor:
    """Expected squared rounding errors, entry by entry."""
    smallest = torch.finfo(dtype).smallest_normal
    return (rounding_rms(dtype) * w.abs().clamp_min(smallest)).square()


def _moved_variances(element: Element, u: Weights, dtype: torch.dtype) -> Weights:
    """Expected squared errors from the rounding of ``u``, transformed by the element."""
    squares = Element(
        element.space,
        element.perms,
        {axis: G.square() for axis, G in element.linears.items()},
        {axis: G.square() for axis, G in element.inverses.items()},
    )
    return squares.act({name: _variance(w, dtype) for name, w in u.items()})


def _excess(difference: Tensor, variance: Tensor) -> float:
    """The worst error over the tensor in total, each of its slices, and each entry."""
    squares = difference.square()
    worst = [tensor_excess(squares, variance), site_excess(squares, variance, 1, floor=0.1)]
    for dim in range(difference.ndim):
        others = [d for d in range(difference.ndim) if d != dim]
        if others:
            entries = difference.numel() // difference.shape[dim]
            slices = squares.mean(others), variance.mean(others)
            worst.append(site_excess(*slices, entries, floor=0.01))
    return max(worst) / TENSOR_LIMIT
