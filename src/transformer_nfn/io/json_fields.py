"""JSON objects read from files: parsing, and fields with type and range checks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from transformer_nfn.errors import CheckpointError, TransformerNFNError
from transformer_nfn.io.files import explained_read, read_regular

Value = TypeVar("Value")
LARGEST = 2**53
"""Whole numbers beyond this are not the same in every program that reads JSON."""


class Fields:
    """A JSON object whose fields are read with type and range checks.

    Args:
        kind: class of the error for an invalid field.
        path: of this object within the file, such as ``zoo.architecture``.

    >>> Fields({"width": 32}, "run.json", CheckpointError).whole("width", least=1)
    32
    """

    def __init__(
        self, data: object, where: str, kind: type[TransformerNFNError], path: str = ""
    ) -> None:
        self._where, self._kind, self._path = where, kind, path
        if not isinstance(data, Mapping):
            self._refuse("", "an object", data)
        self.data: Mapping[str, Any] = data

    def whole(self, key: str, least: int = 0, most: int = LARGEST) -> int:
        """An integer; booleans are rejected."""
        value = self._get(key)
        if type(value) is not int or not least <= value <= most:
            span = f"at least {least}" if most == LARGEST else f"from {least} to {most}"
            self._refuse(key, f"a whole number {span}", value)
        return value

    def number(self, key: str, least: float = -math.inf, most: float = math.inf) -> float:
        """A finite number."""
        value = self._get(key)
        if type(value) not in (int, float) or not least <= value <= most or abs(value) > 1e308:
            span = "" if math.isinf(most) else f" from {least:g} to {most:g}"
            self._refuse(key, f"a finite number{span}", value)
        return float(value)

    def text(self, key: str) -> str:
        """A text."""
        return self._typed(key, str, "a text")

    def choice(self, key: str, values: Collection[str]) -> str:
        """One of these texts."""
        value = self._get(key)
        if not isinstance(value, str) or value not in values:
            self._refuse(key, f"one of {', '.join(values)}", value)
        return value

    def items(self, key: str) -> list[Any]:
        """A list."""
        return self._typed(key, list, "a list")

    def inner(self, key: str) -> Fields:
        """An object within this one."""
        return Fields(self._get(key), self._where, self._kind, self._name(key))

    def each(self, key: str, read: Callable[[Fields, str], Value]) -> list[Value]:
        """The items of a list, each read as a field, such as ``each("names", Fields.text)``."""
        named = {f"{key}[{i}]": item for i, item in enumerate(self.items(key))}
        items = Fields(named, self._where, self._kind, self._path)
        return [read(items, name) for name in named]

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Refuse a field that does not agree with others."""
        self._refuse(key, expected, self._get(key))

    def has(self, key: str) -> bool:
        """Whether the field is there and not null."""
        return self.data.get(key) is not None

    def known(self, key: str) -> bool:
        """Whether the field, which must be there, is not null."""
        return self._get(key) is not None

    def _typed(self, key: str, kind: type[Value], words: str) -> Value:
        value = self._get(key)
        if not isinstance(value, kind):
            self._refuse(key, words, value)
        return value

    def _get(self, key: str) -> Any:
        if key not in self.data:
            raise self._kind(f"'{self._where}' lacks '{self._name(key)}'")
        return self.data[key]

    def _name(self, key: str) -> str:
        return ".".join(part for part in (self._path, key) if part)

    def _refuse(self, key: str, expected: str, found: object) -> NoReturn:
        shown = repr(found)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}…"
        name = self._name(key)
        of = f"'{name}' " if name else ""
        raise self._kind(f"'{self._where}': {of}expected {expected}, found {shown}")


def read_object(
    path: Path, kind: type[TransformerNFNError] = CheckpointError, *, strict: bool = False
) -> dict[str, Any]:
    """Read the object in a JSON file; raises ``kind`` for anything else."""
    with explained_read(path, kind):
        data = read_regular(path)
    return parse_object(data, str(path), kind, strict=strict)


def parse_object(
    text: str | bytes, where: str, kind: type[TransformerNFNError], *, strict: bool = False
) -> dict[str, Any]:
    """Parse a JSON object from text or UTF-8 bytes.

    Args:
        kind: class of the error for anything else.
        strict: whether ``NaN`` and ``Infinity``, which JSON does not have, are rejected.

    >>> parse_object('{"a": 1}', "notes.json", CheckpointError)
    {'a': 1}
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        constant = _no_constant if strict else None
        data = json.loads(text, object_pairs_hook=distinct, parse_constant=constant)
        if "\\u" in text:  # half of a surrogate pair is no text, and could not be written
            json.dumps(data, ensure_ascii=False).encode("utf-8")
    except RepeatedNameError as error:
        raise kind(f"'{where}' is ambiguous: {error}") from error
    except (ValueError, RecursionError) as error:
        raise kind(f"'{where}' is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise kind(f"'{where}' is not an object in JSON: it holds {_article(data)}")
    return data


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number in JSON")


def json_text(value: Any, **layout: Any) -> str:
    """A value as JSON that every program reads.

    Numbers that are not finite, which JSON does not have, are null; bytes of a file's name that
    are not UTF-8 are spelled.

    >>> json_text({"tau": 0.5, "error": math.nan})
    '{"tau": 0.5, "error": null}'
    """
    return json.dumps(_representable(value), allow_nan=False, **layout)


def _representable(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_representable(key): _representable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_representable(inner) for inner in value]
    return value


class RepeatedNameError(ValueError):
    """A name that stands twice in an object of JSON."""


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, of which programs keep different fields where a name stands twice."""
    out = dict(pairs)
    if len(out) < len(pairs):
        names = sorted(name for name, _ in pairs)
        twice = next(name for i, name in enumerate(names) if name == names[i + 1])
        raise RepeatedNameError(f"'{twice}' stands in it twice")
    return out


def _article(data: object) -> str:
    words = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return words.get(type(data), "a number")
