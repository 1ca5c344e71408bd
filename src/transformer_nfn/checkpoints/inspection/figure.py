"""What do the spectra of a network look like? One panel per map, one line per block or head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from transformer_nfn.errors import SpaceError
from transformer_nfn.io.files import blank_figure, save_figure

if TYPE_CHECKING:
    from transformer_nfn.checkpoints.inspection.whole import Inspection

PANELS = ("QK", "VO", "cross.QK", "cross.VO", "W_A", "W_G", "W_B")
VISIBLE = 3e-4
"""Singular values smaller than this, in units of the largest, are rounding errors."""


def draw_spectra(found: Inspection, out: str | Path) -> Path:
    """Draws singular values by block and head into ``out`` (png, pdf or svg by its name)."""
    out = Path(out)
    shown = [p for p in PANELS if any(p in b.spectra for b in found.blocks)]
    if not shown:
        raise SpaceError(f"'{found.where}' has no block whose spectra could be drawn")
    columns = len(shown)
    figure = blank_figure(0.8 + 3.0 * columns, 3.2, SpaceError)
    panels = figure.subplots(1, columns, squeeze=False)[0]
    for axes, panel in zip(panels, shown, strict=True):
        _panel(axes, found, panel)
    panels[0].set_ylabel("singular value")
    figure.suptitle(f"{Path(found.where).name}: {found.family}", x=0.01, ha="left")
    _colour_bar(figure, panels, len(found.blocks))
    return save_figure(figure, out, SpaceError)


def _panel(axes: Any, found: Inspection, panel: str) -> None:
    from matplotlib import colormaps

    last = max(len(found.blocks) - 1, 1)
    for i, block in enumerate(found.blocks):
        values = block.spectra.get(panel)
        if values is None:
            continue
        colour = colormaps["viridis"](i / last)
        for line in torch.atleast_2d(values):
            positive = line[line > VISIBLE * line.max()]
            axes.plot(range(1, len(positive) + 1), positive, color=colour, lw=0.6, alpha=0.7)
    per_head = " (a line per head)" if panel.endswith(("QK", "VO")) else ""
    axes.set_title(f"{panel}{per_head}", loc="left", fontsize=9)
    axes.set(yscale="log", xlabel="rank")
    axes.spines[["top", "right"]].set_visible(False)


def _colour_bar(figure: Any, panels: Any, blocks: int) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    if blocks > 1:
        scale = ScalarMappable(Normalize(0, blocks - 1), cmap="viridis")
        figure.colorbar(scale, ax=list(panels), label="block", shrink=0.9)
