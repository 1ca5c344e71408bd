"""What does a relation look like? A heat map of blocks of A against blocks of B."""

from __future__ import annotations

from pathlib import Path

from transformer_nfn.checkpoints.relations.relation import Relation
from transformer_nfn.errors import SpaceError
from transformer_nfn.io.files import blank_figure, save_figure


def draw_relation(relation: Relation, out: str | Path, names: tuple[str, str] = ("A", "B")) -> Path:
    """Draws the matrix of blocks into ``out`` (png, pdf or svg by its name).

    Args:
        relation: with a matrix, which identical files and streams of different width lack.
        out: the picture to write.
        names: of the two models, for the axes.
    """
    if relation.matrix is None:
        raise SpaceError(f"there is no matrix of blocks to draw: {relation.reason}")
    out = Path(out)
    rows, columns = relation.matrix.shape
    figure = blank_figure(2.2 + 0.3 * columns, 1.6 + 0.3 * rows, SpaceError)
    axes = figure.subplots()
    image = axes.imshow(relation.matrix.numpy(), vmin=0, vmax=1, cmap="viridis")
    axes.set_xticks(range(columns), relation.columns, rotation=90 if columns > 12 else 0)
    axes.set_yticks(range(rows), relation.rows)
    axes.set(xlabel=f"blocks of {names[1]}", ylabel=f"blocks of {names[0]}")
    axes.set_title(relation.verdict, loc="left")
    figure.colorbar(image, ax=axes, label="score (strangers 0, disguise 1)")
    return save_figure(figure, out, SpaceError)
