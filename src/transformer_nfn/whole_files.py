"""Files that appear whole or not at all: written beside, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformer_nfn.errors import TransformerNFNError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives a path beside ``path`` to write to; on success it takes the name of ``path``.

    Whatever goes wrong before that leaves what was there as it was, and nothing beside it.
    """
    beside = path.with_name(f".{os.getpid()}.{path.name}")  # some writers go by the ending
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        os.replace(beside, path)
    except OSError as error:
        reason = error.strerror or error
        raise TransformerNFNError(f"'{path}' cannot be written: {reason}") from error
    finally:
        if beside.exists():
            beside.unlink()


def write_text(path: Path, text: str) -> None:
    """Writes a text file, whole or not at all."""
    with whole_file(path) as beside:
        beside.write_text(text, encoding="utf-8")
