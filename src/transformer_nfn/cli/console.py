"""Console of the commands: exit codes, error sentences, help layout, JSON and table output.

Codes that answer belong to the commands: 0, and 1 and 3 of `tnfn compare`, 1 of `tnfn zoo
verify`. Whatever goes wrong ends with one of the codes below and never with theirs; Python and
the library that parses the command line would both use 1.

The help of a command is its docstring: paragraphs fill the terminal, indented examples keep their
lines. Every command and group is one of the classes below, so that all versions of Typer lay the
text out in the same way.
"""

from __future__ import annotations

import inspect
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from transformer_nfn.errors import TransformerNFNError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

REFUSED = 2
"""Bad input, no room, no such place."""
INTERNAL_FAULT = 70
"""A fault of ours; EX_SOFTWARE of sysexits.h."""
INTERRUPTED = 130
"""Ctrl-C, as shells count it: 128 and the number of the signal."""
PIPE_CLOSED = 141
"""Whoever read the output has gone, as shells count it."""
TRACEBACK_VARIABLE = "TNFN_TRACEBACK"
_CRASHING = ("strict", "surrogateescape")
"""Error handlers of a stream that raise for characters its encoding lacks."""
LONGEST = 1000
"""Characters of a sentence: what a file holds may stand in it, and files are long."""
# In a pipe or a file nobody sees where a line ends, so nothing is cut to the width of a screen.
WIDE = 10_000
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


class PipeClosedError(BaseException):
    """Nobody reads the output any more; no `OSError`, which libraries catch and exit with 1."""


class Output(io.TextIOBase):
    """Standard output or error: prints a replacement for what its encoding lacks.

    Raises `PipeClosedError` where its reader has gone. It has no ``buffer``, by which Typer would
    write UTF-8 past an ASCII stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        if isinstance(stream, io.TextIOWrapper) and stream.errors in _CRASHING:
            stream.reconfigure(errors="replace")

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """As of the stream."""
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """As of the stream."""
        return self._stream.errors

    def write(self, text: str) -> int:
        """Writes a text."""
        with _written():
            return self._stream.write(text)

    def flush(self) -> None:
        """Writes what was held back."""
        with _written():
            self._stream.flush()

    def fileno(self) -> int:
        """As of the stream."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """As of the stream."""
        return self._stream.isatty()


@contextmanager
def _written() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise PipeClosedError from error
    except OSError as error:
        why = error.strerror or error
        raise TransformerNFNError(f"the output cannot be written: {why}") from error


@contextmanager
def explained_output() -> Iterator[None]:
    """Standard output and error are an `Output` each; the first is flushed at the end."""
    streams = sys.stdout, sys.stderr
    try:
        sys.stdout, sys.stderr = (s if s is None else Output(s) for s in streams)
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    finally:
        sys.stdout, sys.stderr = streams


@contextmanager
def explained() -> Iterator[None]:
    """Whatever is raised inside ends the process with one sentence and a code of this file."""
    try:
        with explained_output():
            yield
    except TransformerNFNError as error:
        _end(REFUSED, f"error: {error}", error.lines)
    except MemoryError as error:
        _end(REFUSED, f"error: there is not enough memory for this{_detail(error)}")
    except (KeyboardInterrupt, typer.Abort):
        _end(INTERRUPTED, "interrupted")
    except PipeClosedError:
        _end_quietly(PIPE_CLOSED)
    except OSError as error:
        _end(REFUSED, f"error: {_file_fault(error)}")
    except Exception as error:
        if _is_out_of_memory(error):
            _end(REFUSED, "error: there is not enough memory for this")
        if _is_of_the_command_line(error):
            raise
        if _is_of_the_gpu(error):
            _end(
                INTERNAL_FAULT,
                f"internal error: the GPU broke off{_detail(error)}; what a build or a training "
                "had finished is kept: run the same command again, and report it if it breaks "
                "off again",
            )
        _end(
            INTERNAL_FAULT,
            f"internal error: {type(error).__name__}{_detail(error)}; this is a fault of "
            f"transformer-nfn, not of yours: set {TRACEBACK_VARIABLE}=1 and run it again to see "
            "where it happened, and report it",
        )


class RootCommand(HelpGroup):
    """Explains what Typer would end with a verdict's code; other errors pass, for `explained`."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that was asked for."""
        try:
            return super().invoke(ctx)
        except (EOFError, KeyboardInterrupt, BrokenPipeError, typer.Abort):
            with explained():
                raise


def _end(code: int, sentence: str, lines: Iterable[str] = ()) -> NoReturn:
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exc()
    try:
        sys.stderr.write(f"{_one_line(sentence)}\n")
        sys.stderr.writelines(f"  {_one_line(line)}\n" for line in lines)
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError, PipeClosedError):
        _end_quietly(code)
    sys.exit(code)


def _end_quietly(code: int) -> NoReturn:
    """Without a last flush, which would fail and be told by Python with a code of its own."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            os.dup2(nowhere, stream.fileno())
    sys.exit(code)


def _one_line(text: str) -> str:
    """A sentence that any terminal can show, whatever stood in the file it speaks of."""
    flat = " ".join(text.splitlines())
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in flat)
    shown = shown.encode(errors="backslashreplace").decode()
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST // 2]} … {shown[-LONGEST // 3 :]}"


def _detail(error: BaseException) -> str:
    text = str(error)
    return f" ({text[:200]})" if text else ""


def _file_fault(error: OSError) -> str:
    why = error.strerror or str(error) or type(error).__name__
    return f"'{error.filename}': {why}" if error.filename is not None else why


def _is_out_of_memory(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in text or "not enough memory" in text or "out of memory" in text
    )


def _is_of_the_gpu(error: Exception) -> bool:
    """Whether a GPU lost its work, after which nothing in this process can use it."""
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)


def _is_of_the_command_line(error: Exception) -> bool:
    """Whether Typer itself says what is wrong: an option that is not there, a missing word."""
    return isinstance(error, typer.Exit) or hasattr(error, "format_message")


def echo_json(value: Any) -> None:
    """Prints a value as JSON; numbers that are not finite are null."""
    from transformer_nfn.io.json_fields import json_text  # a broken library is explained

    typer.echo(json_text(value))


def passing_bar(*columns: Any) -> Progress:
    """A progress bar on standard error that vanishes at its end; nothing without a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


def table_console() -> Console:
    """Where tables are printed: as wide as the terminal, or as wide as they are without one."""
    from rich.console import Console  # a broken installation is explained by `explained`

    console = Console()
    return console if console.is_terminal else Console(width=WIDE)
