"""How is a JSON object read that somebody hands in? One way, with one sentence for each fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.io.errors import CheckpointError
from transformer_nfn.io.regular import read_regular


def read_object(path: Path, kind: type[TransformerNFNError] = CheckpointError) -> dict[str, Any]:
    """The object in a JSON file; anything else is refused by an error of ``kind``."""
    try:
        data = read_regular(path)
    except OSError as error:
        raise kind(f"'{path}' cannot be read: {error.strerror or error}") from error
    return parse_object(data, str(path), kind)


def parse_object(
    text: str | bytes, where: str, kind: type[TransformerNFNError] = CheckpointError
) -> dict[str, Any]:
    """The object that a text in JSON (bytes: UTF-8) holds, as `read_object` reads it.

    Args:
        text: the JSON.
        where: the file it comes from, for messages.
        kind: the error that refuses it.
    """
    try:
        data = json.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except (ValueError, RecursionError) as error:
        raise kind(f"'{where}' is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise kind(f"'{where}' is not an object in JSON: it holds {_article(data)}")
    return data


def _article(data: object) -> str:
    words = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return words.get(type(data), "a number")
