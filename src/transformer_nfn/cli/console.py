"""Console of the commands: words of a command line, help layout, JSON and table output.

The help of a command is its docstring: paragraphs fill the terminal, indented examples keep their
lines. Every command and group is one of the classes below, so that all versions of Typer lay the
text out in the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from transformer_nfn.cli.endings import explained
from transformer_nfn.errors import TransformerNFNError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

# In a pipe or a file nobody sees where a line ends, so nothing is cut to the width of a screen.
WIDE = 10_000
KEEP_LINES = "\b"
"""Marks a paragraph whose lines Typer must not join; Rich does not print it."""


class HelpCommand(TyperCommand):
    """A command whose help is laid out as this module says."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words; an empty one where a path or a name belongs is no working directory."""
        given = self.make_parser(ctx).parse_args(list(args))[0]
        for option in self.get_params(ctx):
            words = given.get(option.name)
            empty = "" in words if isinstance(words, list | tuple) else words == ""
            if empty and (option.param_type_name == "argument" or _takes_path(option)):
                raise TransformerNFNError(f"{option.opts[0]} expected a path or name, found ''")
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the help of the command."""
        _lay_out(self, ctx)
        super().format_help(ctx, formatter)


def _takes_path(option: Any) -> bool:
    """Whether an option takes a path, in any version of Typer."""
    kind = getattr(option, "type", None) or option.type_descriptor
    return getattr(kind, "is_path", False) or getattr(kind, "name", "") == "path"


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


class RootCommand(HelpGroup):
    """Ends what Typer would end with a verdict's code; other errors pass, for `explained`."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that was asked for."""
        try:
            return super().invoke(ctx)
        except (EOFError, KeyboardInterrupt, BrokenPipeError):
            with explained():
                raise


def echo_json(value: Any) -> None:
    """Prints a value as JSON; numbers that are not finite are null."""
    from transformer_nfn.io.json_fields import json_text  # a broken library is explained

    typer.echo(json_text(value))


def echo_result(result: Any, as_json: bool) -> None:
    """Prints a result as JSON, or as its own text."""
    if as_json:
        echo_json(result.as_json())
    else:
        typer.echo(str(result))


def passing_bar(*columns: Any) -> Progress:
    """A progress bar on standard error that vanishes at its end; nothing without a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


@contextmanager
def passing_count(what: str, *columns: Any) -> Iterator[Callable[[int, int], None]]:
    """A `passing_bar`, moved by how many are done and how many there are."""
    with passing_bar(*columns) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def table_console() -> Console:
    """Where tables are printed: as wide as the terminal, or as wide as they are without one."""
    from rich.console import Console  # a broken installation is explained by `explained`

    console = Console()
    return console if console.is_terminal else Console(width=WIDE)
