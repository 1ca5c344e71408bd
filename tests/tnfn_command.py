"""The command as the console script runs it, in this process."""

import functools
import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple
from unittest.mock import patch

import typer.main

from transformer_nfn.cli import main

# The tree of commands is a tenth of a second's work, and the same for all tests of a process.
typer.main.get_command = functools.cache(typer.main.get_command)


class Done(NamedTuple):
    """How a command ended, what it printed, and its errors."""

    returncode: int
    stdout: str
    stderr: str


def tnfn(*words: object) -> Done:
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv, environment = patch("sys.argv", ["tnfn", *map(str, words)]), patch.dict(os.environ)
    with redirect_stdout(out), redirect_stderr(err), argv, environment:
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def printed(*words: object, code: int = 0) -> str:
    """The output of a command that ends with ``code``."""
    done = tnfn(*words)
    assert done.returncode == code, f"{done.stdout}{done.stderr}"
    return done.stdout


def as_json(*words: object, code: int = 0) -> Any:
    """The JSON of a command that ends with ``code``; NaN and infinities are not JSON."""
    return json.loads(printed(*words, "--json", code=code), parse_constant=_not_json)


def _not_json(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def assert_refused(message: str, *words: object) -> None:
    """A command prints nothing but one sentence that holds ``message``, and ends with 2.

    With ``--json`` the sentence is also an object on standard output.
    """
    done = tnfn(*words)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done
    if "--json" in words:
        error = done.stderr.removeprefix("error: ").strip()
        assert json.loads(done.stdout) == {"error": error, "exit_code": 2}
    else:
        assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
