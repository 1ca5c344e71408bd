"""Tables in HTML, as notebooks show an object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape


def to_html(title: str, facts: Mapping[str, object], head: Sequence[str] = ()) -> str:
    """A small HTML table of facts.

    Args:
        title: stands above.
        facts: a row each; the cells of a row are a tuple where there are several.
        head: names of the columns.

    >>> to_html("Zoo", {"networks": "1 < 2"})
    '<table><caption>Zoo</caption><tr><th>networks</th><td>1 &lt; 2</td></tr></table>'
    """
    rows = ["".join(f"<th>{escape(name)}</th>" for name in head)] if head else []
    for name, value in facts.items():
        cells = value if isinstance(value, tuple) else (value,)
        row = "".join(f"<td>{escape(str(cell))}</td>" for cell in cells)
        rows.append(f"<th>{escape(name)}</th>{row}")
    inside = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption>{inside}</table>"
