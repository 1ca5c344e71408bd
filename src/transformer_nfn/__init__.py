"""Software that reads the weights of transformers."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = [
    "checkpoints",
    "errors",
    "functional",
    "io",
    "models",
    "networks",
    "nn",
    "paper",
    "prediction",
    "report",
    "spaces",
    "symmetry",
    "testing",
    "zoo",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """Import a package on first use: `tnfn --help` need not wait for PyTorch."""
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return importlib.import_module(f"{__name__}.{name}")
