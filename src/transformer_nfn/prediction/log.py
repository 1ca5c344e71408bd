"""What did a training say, epoch by epoch? ``log.jsonl``, read with care."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformer_nfn.io.files import read_regular
from transformer_nfn.prediction.records import RunError


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, each an object with its ``epoch`` and ``seed``.

    A run that was killed may leave half a line at the end, which is left out.
    """
    try:
        lines = read_regular(path).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"'{path}' is not readable: {error}") from error
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise RunError(f"'{path}', line {number}: {error}") from error
        if not isinstance(entry, dict) or type(entry.get("epoch")) is not int:
            raise RunError(f"'{path}', line {number} is not an object with a whole 'epoch'")
        entries.append(entry)
    return entries
