"""Can a bias be shifted as a space says, so that folding it away is invariant?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer_nfn.errors import SpaceError
from transformer_nfn.spaces.tensors import Shift

if TYPE_CHECKING:
    from transformer_nfn.spaces.space import WeightSpace


def check_shifts(space: WeightSpace) -> None:
    """Raises `SpaceError` at the first shift that contradicts the axes or another shift."""
    for shift in space.shifts:
        for tensor in (shift.tensor, shift.through, shift.into):
            if tensor is not None and tensor not in space.tensors:
                raise SpaceError(f"a shift names tensor '{tensor}', unknown to '{space.name}'")
    moved = [shift.tensor for shift in space.shifts]
    for shift in space.shifts:
        if moved.count(shift.tensor) > 1:
            raise SpaceError(f"tensor '{shift.tensor}' of space '{space.name}' is shifted twice")
        if shift.through is not None and shift.into is not None:
            _check_taken_up(space, shift, shift.through, shift.into)


def _check_taken_up(space: WeightSpace, shift: Shift, through: str, into: str) -> None:
    """``into − Σ c through`` must move as ``into`` does, whatever acts."""
    moved = {s.tensor for s in space.shifts}
    changed = moved | {s.into for s in space.shifts}
    what = f"the shift of '{shift.tensor}' through '{through}' into '{into}'"
    if into in moved or through in changed:
        raise SpaceError(f"{what} uses a tensor that another shift changes")
    constant, via, target = (space.tensors[name] for name in (shift.tensor, through, into))
    for spec in (constant, via, target):
        if len(set(spec.axes)) < len(spec.axes):
            raise SpaceError(f"{what} needs tensors that carry every axis once")
    for word in target.words():
        if word not in via.words() or word.rstrip("*") in constant.axes:
            raise SpaceError(
                f"{what} needs '{through}', but not '{shift.tensor}', to carry every axis of "
                f"'{into}' as it does, found '{word}'"
            )
    for axis in space.rebased(through):
        if axis not in (*constant.axes, *target.axes):
            raise SpaceError(f"{what} would sum over '{axis}', on which matrices act")
    for axis in space.rebased(shift.tensor):
        opposite = (axis in constant.dual) != (axis in via.dual)
        if axis not in via.axes or not (opposite or space.axes[axis].action.self_dual):
            raise SpaceError(
                f"{what} could still change along '{axis}': one of the two must carry it plain, "
                "the other dual"
            )
