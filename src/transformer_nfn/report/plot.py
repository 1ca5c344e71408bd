"""SVG plots as text: axes, marks of which each has a title that a pointer shows, and keys."""

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
"""Of the shapes that `symbol` draws, for keys."""
PATHS = (
    "M-1 0a1 1 0 1 0 2 0a1 1 0 1 0-2 0z", "M-.9-.9h1.8v1.8h-1.8z", "M0-1.2l1.2 2h-2.4z",
    "M0-1.3l1.3 1.3-1.3 1.3-1.3-1.3z", "M-.4-1.2h.8v.8h.8v.8h-.8v.8h-.8v-.8h-.8v-.8h.8z",
)  # fmt: skip
LETTER = 6.4
"""Width of a letter of a key."""


@dataclass(frozen=True)
class PlotAxis:
    """What an axis measures.

    Attributes:
        low, high: its ends.
        label: what it measures, with the unit.
        ticks: values that are labelled.
        text: of such a value.
        log: whether the scale is logarithmic.
    """

    low: float
    high: float
    label: str = ""
    ticks: Sequence[float] = ()
    text: Callable[[float], str] = "{:g}".format
    log: bool = False

    def share(self, value: float) -> float:
        """How far along the axis a value is, from 0 to 1."""
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
    """The title of a mark: a name, and what is known of it."""
    return tag("title", f"{escape(title)}: {escape(', '.join(words))}")


def symbol(kind: int, x: float, y: float, r: float, title: str, **attributes: Any) -> str:
    """A mark whose shape says what its colour says."""
    place = f"translate({x:.1f} {y:.1f}) scale({r:g})"
    return tag("path", title, d=PATHS[kind], transform=place, **attributes)


class Plot:
    """A plot that is drawn on.

    Args:
        title: what it shows.
        about: a sentence for those who do not see it.
        x: horizontal axis.
        y: vertical axis.
        width: in units of the drawing.
        height: likewise.
        margin: above, on the right, below, on the left.
    """

    def __init__(
        self, title: str, about: str, x: PlotAxis, y: PlotAxis, width: int, height: int,
        margin: tuple[int, int, int, int],
    ) -> None:  # fmt: skip
        self.title, self.x, self.y = title, x, y
        self.width, self.height, self.margin = width, height, margin
        self._parts = [tag("title", escape(title)), tag("desc", escape(about))]
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
        """Where a value of the horizontal axis is."""
        left = self.margin[3]
        return left + self.x.share(value) * (self.width - self.margin[1] - left)

    def down(self, value: float) -> float:
        """Where a value of the vertical axis is."""
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
        """Add an element that is drawn already."""
        self._parts.append(element)

    def text(self, text: str, x: float, y: float, anchor: str = "start", kind: str = "") -> None:
        """Add a text."""
        more = {"class_": kind} if kind else {}
        self.draw("text", escape(text), x=x, y=y, text_anchor=anchor, **more)

    def key(self, entries: Sequence[tuple[str, str]]) -> None:
        """Name the series below: a class, and the name; the plot grows by as many lines."""
        x = 0.0
        self.height += 22
        for kind, name in entries:
            wide = LETTER * (len(name) + 3.5)
            if x and x + wide > self.width:
                self.height, x = self.height + 18, 0.0
            self.add(key_entry(kind, name, x, self.height - 6.0))
            x += wide

    def svg(self, **place: Any) -> str:
        """The drawing; ``place`` are x, y, width and height inside of another."""
        return tag("svg", "".join(self._parts), xmlns=NAMESPACE, role="img", class_="plot",
                   viewBox=f"0 0 {self.width} {self.height}", **place)  # fmt: skip


def key_entry(kind: str, name: str, x: float, y: float) -> str:
    """One name of a key: its symbol in its colour."""
    shape = SYMBOLS[int(kind[1:])] if kind.startswith("o") else SYMBOLS[0]
    return tag("text", f"{tag('tspan', shape, class_=kind)} {escape(name)}", x=x, y=y)


def asset(name: str) -> str:
    """Text of a style sheet or script of this package."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def sheet(
    plots: Sequence[Plot], across: int, title: str, key: Sequence[tuple[str, str]] = ()
) -> str:
    """A file of its own with plots side by side, all of the size of the first."""
    wide, gap, top = plots[0].width, 20, 48 if key else 28
    down = -(-len(plots) // across)
    height = max(plot.height for plot in plots)
    size = across * (wide + gap) - gap, down * (height + gap) - gap + top
    inner = [tag("rect", width="100%", height="100%", fill="#fff")]
    inner.append(tag("text", escape(title), x=0.0, y=16.0, class_="head"))
    x = 0.0
    for kind, name in key:
        inner.append(key_entry(kind, name, x, 36.0))
        x += LETTER * (len(name) + 3.5)
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
