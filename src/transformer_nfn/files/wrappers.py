"""What do training programs wrap around the weights of a network? Prefixes, and dicts of more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

PREFIXES = ("module.", "_orig_mod.")
"""What data-parallel and compiled modules put before every name."""
ENTRIES = ("state_dict", "model_state_dict", "model")
"""Where a training program keeps the weights beside its optimiser, its epoch and the like."""


def common_wrapper(names: Iterable[str]) -> str:
    """The wrappers that stand before every name, such as ``module._orig_mod.``; none is ``""``."""
    rest = list(names)
    wrapper = ""
    while rest:
        found = next((p for p in PREFIXES if all(name.startswith(p) for name in rest)), None)
        if found is None:
            break
        wrapper += found
        rest = [name.removeprefix(found) for name in rest]
    return wrapper


def inner_state(stored: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The state dict inside what a training program saved; what is none of that stays as it is."""
    for entry in ENTRIES:
        inner = stored.get(entry)
        if isinstance(inner, dict) and inner and all(isinstance(w, Tensor) for w in inner.values()):
            return inner
    return stored
