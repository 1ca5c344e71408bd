"""What does a file in universal binary JSON hold? Read here, so that no library reads it first.

The format (ubjson.org, draft 12) is what XGBoost writes: a letter for the type, then the value;
arrays and objects may say their type (``$``) and count (``#``) once for all their items.
"""

from __future__ import annotations

import struct
from typing import Any

NUMBERS = {"i": ">b", "U": ">B", "I": ">h", "l": ">i", "L": ">q", "d": ">f", "D": ">d"}
DEEPEST = 64


class UbjsonError(ValueError):
    """Bytes that are not universal binary JSON."""


def parse_ubjson(data: bytes) -> Any:
    """The one value that the bytes hold."""
    reader = _Reader(data)
    value = reader.value(reader.letter(), 0)
    if reader.at != len(data):
        raise UbjsonError(f"it goes on after its end at byte {reader.at}")
    return value


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if size < 0 or self.at + size > len(self.data):
            raise UbjsonError(f"{size} bytes are claimed at byte {self.at} of {len(self.data)}")
        self.at += size
        return self.data[self.at - size : self.at]

    def letter(self) -> str:
        return self.take(1).decode("latin-1")

    def peek(self) -> str:
        return self.data[self.at : self.at + 1].decode("latin-1")

    def value(self, kind: str, depth: int) -> Any:
        if kind in NUMBERS:
            layout = NUMBERS[kind]
            return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        if kind in "ZTF":
            return {"Z": None, "T": True, "F": False}[kind]
        if kind == "S":
            return self.text()
        if kind == "C":
            return self.letter()
        if kind in "[{" and depth < DEEPEST:
            return self.array(depth) if kind == "[" else self.object(depth)
        raise UbjsonError(f"byte {self.at - 1} has the unknown type {kind!r}, or lies too deep")

    def count(self) -> int:
        kind = self.letter()
        found = self.value(kind, 0) if kind in "iUIlL" else -1
        # Every item takes a byte at least, but for types without a value, which nobody writes.
        if not 0 <= found <= len(self.data):
            raise UbjsonError(f"byte {self.at} has the count {found}")
        return int(found)

    def text(self) -> str:
        return self.take(self.count()).decode("utf-8")

    def header(self) -> tuple[str | None, int | None]:
        kind = None
        if self.peek() == "$":
            self.take(1)
            kind = self.letter()
        if self.peek() == "#":
            self.take(1)
            return kind, self.count()
        if kind is not None:
            raise UbjsonError(f"byte {self.at} has a type and no count")
        return None, None

    def array(self, depth: int) -> list[Any]:
        kind, count = self.header()
        if count is None:
            found = []
            while self.peek() != "]":
                found.append(self.value(self.letter(), depth + 1))
            self.take(1)
            return found
        if kind in NUMBERS:
            one = NUMBERS[kind]
            many = f">{count}{one[1]}"
            return list(struct.unpack(many, self.take(count * struct.calcsize(one))))
        return [self.value(kind or self.letter(), depth + 1) for _ in range(count)]

    def object(self, depth: int) -> dict[str, Any]:
        kind, count = self.header()
        found: dict[str, Any] = {}
        while len(found) != count and (count is not None or self.peek() != "}"):
            name = self.text()
            if name in found:
                raise UbjsonError(f"'{name}' stands in an object twice")
            found[name] = self.value(kind or self.letter(), depth + 1)
        if count is None:
            self.take(1)
        return found
