"""Predictors of accuracy: data, training, prediction, evaluation, guard."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["RunFolder", "train"]


def __getattr__(name: str) -> Any:
    """Import the functions for users on first use."""
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.api"), name)
