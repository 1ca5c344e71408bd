"""SVG plots: axes, marks with a title that browsers show under the pointer, and keys."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

NAMESPACE = "http://www.w3.org/2000/svg"
SYMBOLS = "●■▲◆✚"
"""Characters for keys, in the order of `PATHS`."""
PATHS = (
    "M-1 0a1 1 0 1 0 2 0a1 1 0 1 0-2 0z", "M-.9-.9h1.8v1.8h-1.8z", "M0-1.2l1.2 2h-2.4z",
    "M0-1.3l1.3 1.3-1.3 1.3-1.3-1.3z", "M-.4-1.2h.8v.8h.8v.8h-.8v.8h-.8v-.8h-.8v-.8h.8z",
)  # fmt: skip
LETTER = 6.4
"""Estimated width of a letter in a key."""


@dataclass(frozen=True)
class PlotAxis:
    """Range, scale and labels of one axis.

    Attributes:
        low, high: ends of the range.
        label: quantity and unit.
        ticks: labelled values.
        text: formats the label of a tick.
        log: whether the scale is logarithmic.
    """

    low: float
    high: float
    label: str = ""
    ticks: Sequence[float] = ()
    text: Callable[[float], str] = "{:g}".format
    log: bool = False

    def share(self, value: float) -> float:
        """Position of a value along the axis, from 0 to 1."""
        change = math.log if self.log else float
        low, high = change(self.low), change(self.high)
        return (change(value) - low) / ((high - low) or 1.0)


def round_ticks(low: float, high: float, about: int) -> list[float]:
    """About so many round numbers between two."""
    raw = (high - low or 1.0) / about
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= 0.999 * raw)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-6)
    return [float(f"{i * step:.10g}") for i in range(first, last + 1)]


def tag(name: str, content: str = "", **attributes: Any) -> str:
    """One element; its content is markup, ``_`` in the name of an attribute stands for ``-``."""
    texts = (
        (key.rstrip("_").replace("_", "-"), f"{v:.1f}" if isinstance(v, float) else v)
        for key, v in attributes.items()
    )
    inside = "".join(f' {key}="{escape(str(value))}"' for key, value in texts)
    return f"<{name}{inside}>{content}</{name}>" if content else f"<{name}{inside}/>"


def titled(title: str, words: Iterable[str]) -> str:
    """Title of a mark: its name and its values."""
    return tag("title", f"{escape(title)}: {escape(', '.join(words))}")


def symbol(kind: int, x: float, y: float, r: float, title: str, **attributes: Any) -> str:
    """A mark; its shape repeats the information of its colour."""
    place = f"translate({x:.1f} {y:.1f}) scale({r:g})"
    return tag("path", title, d=PATHS[kind], transform=place, **attributes)


class Plot:
    """One plot with its axes, to which marks are added.

    Args:
        title: heading.
        description: text for screen readers.
        x: horizontal axis.
        y: vertical axis.
        width: in units of the drawing.
        height: likewise.
        margin: above, on the right, below, on the left.
    """

    def __init__(
        self, title: str, description: str, x: PlotAxis, y: PlotAxis, width: int, height: int,
        margin: tuple[int, int, int, int],
    ) -> None:  # fmt: skip
        self.title, self.x, self.y = title, x, y
        self.width, self.height, self.margin = width, height, margin
        self._parts = [tag("title", escape(title)), tag("desc", escape(description))]
        top, right, bottom, left = margin
        low, end = float(height - bottom), float(width - right)
        for value in x.ticks:
            at = self.across(value)
            self.draw("line", class_="grid", x1=at, x2=at, y1=float(top), y2=low)
            self.text(x.text(value), at, low + 17, "middle")
        for value in y.ticks:
            at = self.down(value)
            self.draw("line", class_="grid", x1=float(left), x2=end, y1=at, y2=at)
            self.text(y.text(value), left - 7.0, at + 4, "end")
        self.draw("line", class_="axis", x1=float(left), x2=end, y1=low, y2=low)
        if x.label:
            self.text(x.label, (left + end) / 2, low + 36, "middle")
        if y.label:
            self.text(y.label, 0.0, top - 9.0)

    def across(self, value: float) -> float:
        """Horizontal coordinate of a value."""
        left = self.margin[3]
        return left + self.x.share(value) * (self.width - self.margin[1] - left)

    def down(self, value: float) -> float:
        """Vertical coordinate of a value."""
        low = self.height - self.margin[2]
        return low - self.y.share(value) * (low - self.margin[0])

    def draw(self, name: str, content: str = "", **attributes: Any) -> None:
        """Add an element."""
        self._parts.append(tag(name, content, **attributes))

    def line(self, x: tuple[float, float], y: tuple[float, float], kind: str) -> None:
        """Add a straight line, in units of the axes."""
        (x1, x2), (y1, y2) = map(self.across, x), map(self.down, y)
        self.draw("line", class_=kind, x1=x1, x2=x2, y1=y1, y2=y2)

    def add(self, element: str) -> None:
        """Add a finished element."""
        self._parts.append(element)

    def text(self, text: str, x: float, y: float, anchor: str = "start", kind: str = "") -> None:
        """Add a text."""
        more = {"class_": kind} if kind else {}
        self.draw("text", escape(text), x=x, y=y, text_anchor=anchor, **more)

    def key(self, entries: Sequence[tuple[str, str]]) -> None:
        """Name the series below; the plot grows by the lines of the key."""
        names, height = key(entries, self.height + 16, self.width)
        self._parts, self.height = self._parts + names, self.height + height

    def svg(self, **place: Any) -> str:
        """The drawing; ``place`` are x, y, width and height inside of another."""
        return tag("svg", "".join(self._parts), xmlns=NAMESPACE, role="img", class_="plot",
                   viewBox=f"0 0 {self.width} {self.height}", **place)  # fmt: skip


def key(entries: Sequence[tuple[str, str]], top: int, width: int) -> tuple[list[str], int]:
    """Names of series in lines of this width, and the height of the lines.

    Args:
        entries: class and name of each series; classes of optimisers have symbols of their own.
        top: base line of the first line.
        width: of the drawing.
    """
    x, y, names = 0.0, top, []
    for kind, name in entries:
        needed = LETTER * (len(name) + 3.5)
        if x and x + needed > width:
            x, y = 0.0, y + 18
        shape = SYMBOLS[int(kind[1:])] if kind.startswith("o") else SYMBOLS[0]
        words = f"{tag('tspan', shape, class_=kind)} {escape(name)}"
        names.append(tag("text", words, x=x, y=y))
        x += needed
    return names, y - top + 22


def asset(name: str) -> str:
    """Text of a style sheet or script of this package."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def sheet(
    plots: Sequence[Plot], across: int, title: str, entries: Sequence[tuple[str, str]] = ()
) -> str:
    """An SVG file with plots side by side, all as wide as the first."""
    wide, gap = plots[0].width, 20
    names, key_height = key(entries, 36, across * (wide + gap) - gap) if entries else ([], 0)
    down, top = -(-len(plots) // across), 28 + key_height
    height = max(plot.height for plot in plots)
    size = across * (wide + gap) - gap, down * (height + gap) - gap + top
    heading = tag("text", escape(title), x=0.0, y=16.0, class_="head")
    inner = [tag("rect", width="100%", height="100%", fill="#fff"), heading, *names]
    inner += [
        plot.svg(x=i % across * (wide + gap), y=i // across * (height + gap) + top,
                 width=plot.width, height=plot.height)
        for i, plot in enumerate(plots)
    ]  # fmt: skip
    style = asset("plot.css")
    colors = dict(re.findall(r"--([\w-]+): ([^;]+);", style.partition("@media")[0]))
    rules = style.rpartition("/* plots */")[2]
    rules = re.sub(r"var\(--([\w-]+)\)", lambda match: colors[match[1]], rules)
    box = f"-12 -6 {size[0] + 24} {size[1] + 18}"
    return tag("svg", tag("style", rules) + "".join(inner), xmlns=NAMESPACE, viewBox=box,
               width=size[0] + 24, height=size[1] + 18)  # fmt: skip
