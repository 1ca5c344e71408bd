"""Griffe extension: examples in docstrings are shown as code blocks in the API reference."""

from __future__ import annotations

import re
from typing import Any

import griffe

# An example is a line that begins with >>> and all lines up to the next empty one.
EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?!\s*\n|\s*\Z).+)*", re.MULTILINE)


def fenced(text: str) -> str:
    """A docstring with a fence around every example."""
    return EXAMPLE.sub(lambda m: f"{m['indent']}```pycon\n{m[0]}\n{m['indent']}```", text)


class DoctestFences(griffe.Extension):
    """Puts fences around the examples of every object."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object that Griffe loads."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
