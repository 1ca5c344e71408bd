"""How does a command end? With its answer, or with one sentence and a code that is no answer.

Codes that answer belong to the commands: 0, and 1 and 3 of `tnfn compare`, 1 of `tnfn zoo
verify`. Whatever goes wrong ends with one of the codes below and never with theirs; Python and
the library that parses the command line would both use 1.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer

from transformer_nfn.cli.help import HelpGroup
from transformer_nfn.errors import TransformerNFNError

REFUSED = 2
"""What a user asked for cannot be done: bad input, no room, no such place."""
INTERNAL_FAULT = 70
"""A fault of ours; EX_SOFTWARE of sysexits.h."""
INTERRUPTED = 130
"""Ctrl-C, as shells count it: 128 and the number of the signal."""
PIPE_CLOSED = 141
"""Whoever read the output has gone, as shells count it."""
TRACEBACK_VARIABLE = "TNFN_TRACEBACK"
LONGEST = 1000
"""Characters of a sentence: what a file holds may stand in it, and files are long."""


@contextmanager
def explained() -> Iterator[None]:
    """Whatever is raised inside ends the process with one sentence and a code of this file."""
    try:
        yield
    except TransformerNFNError as error:
        _end(REFUSED, f"error: {error}")
    except MemoryError as error:
        _end(REFUSED, f"error: there is not enough memory for this{_detail(error)}")
    except (KeyboardInterrupt, typer.Abort):
        _end(INTERRUPTED, "interrupted")
    except BrokenPipeError:
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


def explain_errors(run: Callable[[], Any]) -> None:
    """Runs a command; see `explained`."""
    with explained():
        run()


def _end(code: int, sentence: str) -> NoReturn:
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exc()
    try:
        sys.stderr.write(f"{_one_line(sentence)}\n")
    except (OSError, ValueError):
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
