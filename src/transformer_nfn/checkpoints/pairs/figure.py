"""What does a folder of models look like? A heat map of all pairs, relatives side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from transformer_nfn.checkpoints.pairs.results import PairsError
from transformer_nfn.checkpoints.pairs.run import AllPairs
from transformer_nfn.io.files import blank_figure, save_figure

NUMBERED = 16
"""Models up to which each cell also says its number."""


def draw_pairs(result: AllPairs, out: str | Path) -> Path:
    """Draws the scores of all pairs into ``out`` (png, pdf or svg by its name)."""
    out = Path(out)
    names = [name for group in result.groups() for name in group]
    place = {name: i for i, name in enumerate(names)}
    scores = np.full((len(names), len(names)), np.nan)
    np.fill_diagonal(scores, 1.0)
    for pair in result.pairs:
        if pair.score is not None:
            i, j = place[pair.a], place[pair.b]
            scores[i, j] = scores[j, i] = pair.score
    size = 2.5 + (0.45 if len(names) <= NUMBERED else 0.22) * len(names)
    figure = blank_figure(size + 1, size, PairsError)
    axes = figure.subplots()
    axes.set_facecolor("0.85")
    image = axes.imshow(scores, vmin=0, vmax=1, cmap="viridis")
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    if len(names) <= NUMBERED:
        for (i, j), score in np.ndenumerate(scores):
            text = "–" if np.isnan(score) else f"{score:.2f}"
            colour = "black" if not score < 0.6 else "white"
            axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=7)
    axes.set_title("all pairs, relatives together; grey: not comparable", loc="left", fontsize=9)
    figure.colorbar(image, ax=axes, label="score (strangers 0, disguise 1)")
    return save_figure(figure, out, PairsError)
