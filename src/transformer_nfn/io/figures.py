"""How does a figure get to disk? In the format its name says, whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_nfn.errors import TransformerNFNError, missing_extra
from transformer_nfn.io.whole import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 160


def blank_figure(
    width: float, height: float, error: type[TransformerNFNError], what: str = "a figure"
) -> Figure:
    """A figure of so many inches, drawn with Agg whatever screen there is or is not.

    Args:
        width: in inches. height: likewise.
        error: raised where matplotlib is missing.
        what: is to be drawn.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise missing_extra(error, "matplotlib", "plot", what) from missing
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(
    figure: Figure,
    out: Path,
    error: type[TransformerNFNError],
    metadata: Mapping[str, str | None] | None = None,
) -> Path:
    """Writes a figure (png, pdf or svg by its name); ``error`` where there is no such format."""
    try:
        with whole_file(out) as beside:
            figure.savefig(beside, dpi=DOTS_PER_INCH, metadata=dict(metadata or {}))
    except ValueError as fault:
        if isinstance(fault, TransformerNFNError):
            raise
        raise error(f"'{out}' could not be drawn ({fault})") from fault
    return out
