"""Results as text: numbers in sentences, and tables in HTML for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from html import escape


def bound(value: float, *, up: bool = False) -> str:
    """Two digits of a number rounded down, or up: a bound that holds for the number itself.

    >>> bound(0.998), bound(0.0512, up=True)
    ('0.99', '0.052')
    """
    context = Context(prec=2, rounding=ROUND_CEILING if up else ROUND_FLOOR)
    return f"{float(context.create_decimal(repr(value))):g}"


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
