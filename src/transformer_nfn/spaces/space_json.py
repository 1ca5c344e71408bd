"""How does a space stand in a file? As an object in JSON: axes, one line per tensor, shifts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformer_nfn.errors import SpaceError
from transformer_nfn.spaces.axis import Axis
from transformer_nfn.spaces.tensors import Shift

if TYPE_CHECKING:
    from transformer_nfn.spaces.space import WeightSpace

FORMAT = 1


def as_object(space: WeightSpace) -> dict[str, Any]:
    """The space as plain JSON values, defaults left out."""
    out: dict[str, Any] = {
        "format": FORMAT,
        "name": space.name,
        "axes": [axis.to_json() for axis in space.axes.values()],
        "tensors": {name: " ".join(spec.words()) for name, spec in space.tensors.items()},
    }
    if space.shifts:
        out["shifts"] = [
            {k: v for k, v in vars(shift).items() if v is not None} for shift in space.shifts
        ]
    if space.architecture is not None:
        out["architecture"] = space.architecture
    if space.options:
        out["options"] = dict(space.options)
    return out


def build_arguments(data: object) -> dict[str, Any]:
    """What `WeightSpace.build` takes, from what `as_object` gave; may raise TypeError too."""
    if not isinstance(data, dict) or "axes" not in data or "tensors" not in data:
        raise SpaceError("a weight space in JSON needs the keys 'axes' and 'tensors'")
    if data.get("format", FORMAT) != FORMAT:
        raise SpaceError(
            f"weight space format {data['format']!r} is not known here (expected {FORMAT})"
        )
    tensors = data["tensors"]
    if not isinstance(tensors, dict) or not all(isinstance(w, str) for w in tensors.values()):
        raise SpaceError("a weight space in JSON names the axes of each tensor as one text")
    return {
        "name": data.get("name", "space"),
        "axes": [Axis(**axis) for axis in data["axes"]],
        "tensors": data["tensors"],
        "shifts": [Shift(**shift) for shift in data.get("shifts", [])],
        "architecture": data.get("architecture"),
        "options": data.get("options"),
    }
