"""Ends of a process: exit codes, error sentences, closed streams. Imports no other library.

Codes that answer belong to the commands: 0, and 1 and 3 of `tnfn compare`, 1 of `tnfn zoo
verify`. Whatever goes wrong ends here with one of the codes below and never with theirs; Python
and the library that parses the command line would both use 1.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO

from transformer_nfn.errors import TransformerNFNError

REFUSED = 2
"""Bad input, no room, no such place."""
INTERNAL_FAULT = 70
"""A fault of ours; EX_SOFTWARE of sysexits.h."""
INTERRUPTED = 130
"""Ctrl-C, as shells count it: 128 and the number of the signal."""
PIPE_CLOSED = 141
"""Whoever read the output has gone, as shells count it."""
TRACEBACK_VARIABLE = "TNFN_TRACEBACK"
JSON_OPTION = "--json"
_CRASHING = ("strict", "surrogateescape")
"""Error handlers of a stream that raise for characters its encoding lacks."""
LONGEST = 1000
"""Characters of a sentence: what a file holds may stand in it, and files are long."""


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
    """Standard output and error are an `Output` each; the first is flushed at the end.

    One that the caller closed becomes the null device, so that no other file gets its number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    streams = sys.stdout, sys.stderr
    try:
        sys.stdout, sys.stderr = map(Output, streams)
        try:
            yield
        finally:
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
    except KeyboardInterrupt:
        # Python ends by the signal itself after some interrupted imports, if it is not blocked.
        atexit.register(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGINT})
        _end(INTERRUPTED, "interrupted")
    except PipeClosedError:
        _end_quietly(PIPE_CLOSED)
    except OSError as error:
        _end(REFUSED, f"error: {_file_fault(error)}")
    except UnicodeEncodeError as error:  # names of files may be any bytes, and stand in new files
        name = error.object[max(error.start - 40, 0) : error.end + 40]
        _end(REFUSED, f"error: {name!r} is not UTF-8 and cannot be written: rename the file")
    except Exception as error:
        if _is_out_of_memory(error):
            _end(REFUSED, "error: there is not enough memory for this")
        if _is_overflow(error):
            _end(REFUSED, "error: numbers computed from the weights overflow: some are too large")
        if hasattr(error, "format_message"):  # the parser of the command line rejected a word
            _end_misuse(error)
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


def _end(code: int, sentence: str, lines: Collection[str] = ()) -> NoReturn:
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exc()
    try:
        sys.stderr.write(f"{_one_line(sentence)}\n")
        sys.stderr.writelines(f"  {_one_line(line)}\n" for line in lines)
        sys.stderr.flush()
        if JSON_OPTION in sys.argv:
            more = {"lines": list(lines)} if lines else {}
            message = {"error": _one_line(sentence).removeprefix("error: "), "exit_code": code}
            sys.stdout.write(json.dumps(message | more) + "\n")
        sys.stdout.flush()
    except (OSError, ValueError, PipeClosedError):
        _end_quietly(code)
    leave(code)


def leave(code: int | None) -> NoReturn:
    """End the process with the code of a command."""
    sys.exit(code or 0)


def _end_quietly(code: int) -> NoReturn:
    """Without a last flush, which would fail and be told by Python with a code of its own."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            os.dup2(nowhere, stream.fileno())
    leave(code)


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


def _is_overflow(error: Exception) -> bool:
    """Whether a decomposition or an assignment was given numbers that are not finite."""
    words = ("non-finite", "failed to converge", "invalid numeric entries", "infs or NaNs")
    return isinstance(error, RuntimeError | ValueError) and any(w in str(error) for w in words)


def _is_of_the_gpu(error: Exception) -> bool:
    """Whether a GPU lost its work, after which nothing in this process can use it."""
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)


def _end_misuse(error: Any) -> NoReturn:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        leave(REFUSED)
    path = getattr(error.ctx, "command_path", "tnfn")
    _end(REFUSED, f"error: {error.format_message().rstrip('.')}; see `{path} --help`")
