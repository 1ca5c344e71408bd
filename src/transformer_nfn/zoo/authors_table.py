"""What does the authors' table say of their files? Read with care: a zoo is made of it."""

from __future__ import annotations

import csv
import io
import math
import re
from pathlib import Path, PurePosixPath

from transformer_nfn.zoo.errors import ImportFileError

_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")
LARGEST_SEED = 2**63 - 1


def read_table(path: Path) -> dict[str, dict[str, str]]:
    """The rows of a table by the file they speak of, without empty cells."""
    if not path.is_file():
        raise ImportFileError(f"'{path.name}' is not a file")
    try:
        # Some programs put a mark before the text that is no part of its first word.
        text = path.read_bytes().decode("utf-8-sig")
        rows = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
    except UnicodeDecodeError as error:
        raise ImportFileError(f"'{path.name}' is not UTF-8: {error}") from error
    except (csv.Error, OSError) as error:
        raise ImportFileError(f"'{path.name}' is not a table in CSV: {error}") from error
    table: dict[str, dict[str, str]] = {}
    for number, row in enumerate(rows, 1):
        if None in row or "\0" in "".join(value or "" for value in row.values()):
            raise ImportFileError(f"'{path.name}', row {number}: more cells than columns, or a NUL")
        if row.get("ckpt_file"):
            key = PurePosixPath(row["ckpt_file"]).name
            table[key] = {k: v for k, v in row.items() if k and v}
    return table


def number(column: str, text: str, file: str, most: float = math.inf) -> float:
    """A finite number that is not negative.

    Args:
        column: of the table, for messages.
        text: what stands in it.
        file: of which it speaks.
        most: the largest that it can be.
    """
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not 0 <= value <= most or math.isinf(value):
        span = "at least 0" if math.isinf(most) else f"from 0 to {most:g}"
        raise ImportFileError(
            f"the table's '{column}' of {file} expected a number {span}, found '{text[:40]}'"
        )
    return value


def seed(text: str, file: str) -> int:
    """A whole number, also one that a table wrote as ``3.0``; seeds have up to 63 bits."""
    stripped = text.strip()
    whole = None
    if _NUMBER.fullmatch(stripped):
        value = float(stripped)
        if re.fullmatch(r"[+-]?[0-9]{1,20}", stripped):
            whole = int(stripped)
        elif value.is_integer() and abs(value) < 2**53:
            whole = int(value)
    if whole is None or abs(whole) > LARGEST_SEED:
        raise ImportFileError(
            f"the table's 'seed' of {file} expected a whole number of 63 bits, found '{text[:40]}'"
        )
    return whole


def fraction(accuracy: float) -> float:
    """An accuracy between 0 and 1, also one in percent."""
    return accuracy / 100 if accuracy > 1 else accuracy
