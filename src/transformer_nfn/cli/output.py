"""How do commands print? JSON that every parser takes, and tables that cut no names."""

from __future__ import annotations

import json
import math
from typing import Any

import typer
from rich.console import Console

# In a pipe or a file nobody sees where a line ends, so nothing is cut to the width of a screen.
WIDE = 10_000


def json_text(value: Any) -> str:
    """A value as JSON; numbers that are not finite, which JSON does not have, are null."""
    return json.dumps(_finite(value), allow_nan=False)


def echo_json(value: Any) -> None:
    """Prints what `json_text` makes of a value."""
    typer.echo(json_text(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def table_console() -> Console:
    """Where tables are printed: as wide as the terminal, or as wide as they are without one."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDE)
