"""Zoos as tables: data frames of pandas, and HTML for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from transformer_nfn.errors import missing_extra
from transformer_nfn.zoo.errors import ZooError

if TYPE_CHECKING:
    import pandas as pd


def to_frame(columns: Mapping[str, Any]) -> pd.DataFrame:
    """Columns as a ``pandas.DataFrame``."""
    try:
        import pandas as pd
    except ImportError as error:
        raise missing_extra(ZooError, "pandas", "pandas", "a data frame of a zoo") from error
    return pd.DataFrame(dict(columns))


def to_html(title: str, facts: Mapping[str, object]) -> str:
    """A small HTML table of facts, as notebooks show an object.

    >>> to_html("Zoo", {"networks": "1 < 2"})
    '<table><caption>Zoo</caption><tr><th>networks</th><td>1 &lt; 2</td></tr></table>'
    """
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
        for name, value in facts.items()
    )
    return f"<table><caption>{escape(title)}</caption>{rows}</table>"
