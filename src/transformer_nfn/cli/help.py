"""Layout of `--help`: paragraphs fill the terminal, examples keep their lines.

A docstring holds paragraphs, and examples as indented lines. Every command and group of `tnfn` is
one of the classes below, so that all help texts are laid out in the same way by every version of
Typer: some keep the line breaks of a paragraph, some join the lines of examples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

KEEP_LINES = "\b"
"""Marks a paragraph whose lines Typer must not join; Rich does not print it."""


class HelpCommand(TyperCommand):
    """A command whose help is laid out as this module says."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the help of the command."""
        _lay_out(self, ctx)
        super().format_help(ctx, formatter)


class HelpGroup(TyperGroup):
    """A group of commands whose help is laid out as this module says."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the help of the group."""
        _lay_out(self, ctx)
        super().format_help(ctx, formatter)


class HelpTyper(typer.Typer):
    """A Typer application that makes a `HelpCommand` of every command."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Registers a command; see `typer.Typer.command`."""
        return super().command(name, **{"cls": HelpCommand, **settings})


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a docstring, each in one line; indented lines in a row are one block."""
    blocks: list[list[str]] = []
    after_blank = True
    for line in inspect.cleandoc(text).splitlines():
        indented = line.startswith(" ")
        if line.strip():
            in_examples = bool(blocks) and blocks[-1][0].startswith(" ")
            if indented is in_examples and (indented or not after_blank):
                blocks[-1].append(line)
            else:
                blocks.append([line])
        after_blank = not line.strip()
    return [("\n" if block[0].startswith(" ") else " ").join(block) for block in blocks]


def _lay_out(command: Any, ctx: Any) -> None:
    command.help = "\n\n".join(
        f"{KEEP_LINES}{block}" if block.startswith(" ") else block
        for block in paragraphs((command.help or "").replace(KEEP_LINES, ""))
    )
    for option in command.get_params(ctx):
        if getattr(option, "is_flag", False):
            option.metavar = ""
