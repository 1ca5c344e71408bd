"""The command as the console script runs it, in this process."""

import io
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest.mock import patch

from transformer_nfn.cli import main


class Done(NamedTuple):
    """How a command ended, what it said, and what it complained of."""

    returncode: int
    stdout: str
    stderr: str


def tnfn(*words: object) -> Done:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err), patch("sys.argv", ["tnfn", *map(str, words)]):
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Done(code, out.getvalue(), err.getvalue())
