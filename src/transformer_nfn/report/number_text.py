"""Formatting of numbers on the page.

Every computed number is in an element with ``data-n``, whose key identifies it, so that it can be
recomputed from the run folders. Text quoted from a name or a record is in one with ``data-quoted``.
"""

from __future__ import annotations

import json
import shlex
from decimal import ROUND_HALF_UP, Decimal
from html import escape
from typing import Any

from transformer_nfn.paper.rows import finite
from transformer_nfn.report.held_out import plain

HEADINGS = {
    "optimizer": "Optimiser",
    "learning_rate": "Learning rate",
    "l2": "L2",
    "init_std": "Init std",
    "dropout": "Dropout",
    "train_fraction": "Train fraction",
}
"""Names of training settings."""
NOTHING = '<span class="none">–</span>'


def shown(key: str, html: str) -> str:
    """A computed number under its key."""
    return f'<span data-n="{escape(key)}">{html}</span>'


def quoted(text: str) -> str:
    """Text quoted from a name or a record; its digits are not computed."""
    return f"<span data-quoted>{escape(text)}</span>"


def fixed(value: float, digits: int) -> str:
    """Format with ``digits`` decimals; halves away from zero."""
    step = Decimal(1).scaleb(-digits)
    return f"{Decimal(value).quantize(step, ROUND_HALF_UP):f}".replace("-", "−")


def decimal(value: Any, factor: int = 1, digits: int = 3, unit: str = "") -> str:
    """A number with its decimals, or a dash."""
    known = finite(value)
    return NOTHING if known is None else f"{fixed(factor * known, digits)}{unit}"


def percent(value: Any) -> str:
    """A share in percent, or a dash."""
    return decimal(value, 100, 1, " %")


def points(value: Any) -> str:
    """A difference of accuracies in percentage points."""
    return decimal(value, 100, 1, " points")


def count(value: Any) -> str:
    """A number of networks, or a dash."""
    return f"{value:,}" if isinstance(value, int) else NOTHING


def counted(number: int, what: str) -> str:
    """``1 model``, ``2 models``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def threshold(value: Any) -> str:
    """Smallest accuracy of the chosen networks."""
    return "all" if not value else f"{100 * float(value):g} %"


def setting(value: Any) -> str:
    """A value of a configuration in the shortest form."""
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    value = plain(value)
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _short(value) if isinstance(value, float) else str(value)


def network_name(zoo: str, place: str | None, run: Any = None) -> str:
    """A network of a zoo, quoted for a shell and ``tnfn predict``; without a place, its run."""
    if place is None:
        return f"run {run}"
    return zoo + place if shlex.quote(zoo) == zoo else shlex.quote(zoo + place)


def _short(value: float) -> str:
    if value == 0 or abs(value) >= 1e-3:
        return f"{value:g}".replace("-", "−")
    mantissa, _, exponent = f"{Decimal(repr(value)).normalize():E}".partition("E")
    return f"{mantissa}e{int(exponent)}".replace("-", "−")
