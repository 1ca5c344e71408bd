"""Page about the difference of two checkpoints: one self-contained HTML file."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from io import StringIO
from pathlib import Path

from transformer_nfn import __version__
from transformer_nfn.checkpoints.differences import Difference
from transformer_nfn.checkpoints.differences.result import (
    ROLES,
    change_text,
    difference_figure,
)
from transformer_nfn.io.files import write_text
from transformer_nfn.report.page import html_page
from transformer_nfn.report.tables import table


def write_difference_page(
    difference: Difference, out: str | Path, names: tuple[str, str] = ("A", "B")
) -> None:
    """Write one HTML page with the summary, the heat map and the table of all changes.

    Args:
        difference: of two checkpoints, from `diff`.
        out: the page.
        names: of the two models.
    """
    a, b = (escape(name) for name in names)
    summary = "".join(f"<li>{escape(line)}</li>" for line in difference.summary())
    title = f"Changes from {a} to {b}"
    body = f"<section><h2>Summary</h2><ul>{summary}</ul></section>"
    if difference.changes:
        body += f"<section><h2>By block and tensor</h2>{_figure(difference)}</section>"
        body += f"<section><h2>All numbers</h2>{_table(difference)}</section>"
    footer = (
        f"Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by transformer-nfn {escape(__version__)}. "
        "A change is relative to A, after B was brought into A’s bases."
    )
    page = html_page(title=title, kicker="diff", heading=title, body=body, footer=footer)
    write_text(Path(out), page)


def _figure(difference: Difference) -> str:
    drawn = StringIO()
    difference_figure(difference).savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    return f"<figure>{svg[svg.index('<svg') :]}</figure>"


def _table(difference: Difference) -> str:
    blocks, tensors, cells = difference.grid()
    head = [escape(ROLES[t]) for t in tensors]
    rows = []
    for block in blocks:
        row = "".join(f"<td>{change_text(cells.get((block, t)))}</td>" for t in tensors)
        rows.append(f"<tr><th>{escape(block)}</th>{row}</tr>")
    others = "".join(f"<li>{escape(c.name)}: {change_text(c)}</li>" for c in difference.others())
    changes = table("Relative changes", ["block", *head], rows)
    note = "r: rank of a change of low rank; -: no more than rounding explains."
    return f"{changes}<ul>{others}</ul><p>{note}</p>"
