"""Remove what training programs wrap around the weights of a network: prefixes, outer dicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

PREFIXES = ("module.", "_orig_mod.", "model.", "net.")
"""What data-parallel, compiled and Lightning modules put before every name."""
ENTRIES = ("state_dict", "model_state_dict", "model")
"""Where a training program keeps the weights beside its optimiser, its epoch and the like."""
DEEPEST = 4


def common_wrappers(names: Iterable[str]) -> list[str]:
    """The wrappers that stand before every name, from none to all of them.

    ``module.model.x`` gives ``["", "module.", "module.model."]``: where one ends and the names of
    the network begin is for the reader to say, because networks have a ``model.`` too.
    """
    rest = list(names)
    found = [""]
    while rest:
        prefix = next((p for p in PREFIXES if all(name.startswith(p) for name in rest)), None)
        if prefix is None:
            break
        found.append(found[-1] + prefix)
        rest = [name.removeprefix(prefix) for name in rest]
    return found


def inner_state(stored: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The state dict inside what a training program saved; what is none of that stays as it is."""
    found = _state_in(stored, DEEPEST)
    return stored if found is None else found


def _state_in(stored: Mapping[Any, Any], depth: int) -> Mapping[Any, Any] | None:
    if stored and all(isinstance(w, Tensor) for w in stored.values()):
        return stored
    inner = (stored[entry] for entry in ENTRIES if isinstance(stored.get(entry), dict))
    states = (_state_in(entry, depth - 1) for entry in inner if depth)
    return next((state for state in states if state is not None), None)
