"""Ways to damage a file, each with what is right for a command that reads it afterwards."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random
from typing import Any

import safetensors
from expected import Damage, Right

Damager = Callable[[Random, Path], Damage]
NONSENSE: tuple[Any, ...] = (
    None, True, False, 0, -1, 3, 2**31, 2**70, 10**400, -0.5, 2.5, 1e308, float("nan"),
    float("inf"), "", "x", "3", "../../x", "\ud800", "\0", "x" * 5000, [], [None], [[]], [3, "x"],
    {}, {"x": None}, {"seed": []},
)  # fmt: skip
NO_TEXT = tuple(x for x in NONSENSE if not isinstance(x, str | None))
FOREIGN = (
    b"", b"\0", b"\0" * 4096, b"\xff" * 64, b"<html></html>", b"\x89PNG\r\n\x1a\n" + b"\0" * 64,
    b"PK\x03\x04", b"PK\x05\x06" + b"\0" * 18, b"PAR1", b"PAR1" + b"\0" * 8 + b"PAR1", b"[", b"[]",
    b"3", b"null", b'"x"', b"{}", b"\x80\x02.", b"\x80\x04N.", b"[" * 100_000, b"\xef\xbb\xbf{}",
    "{\"é\": 1}".encode("utf-16"), b"GGUF\3\0\0\0", b"\x08\x08\x12\x07pytorch:\0",
    struct.pack("<Q", 2) + b"{}",
    struct.pack("<Q", 2**63) + b"{}",
)  # fmt: skip


def unreadable(chance: Random, path: Path) -> Damage:
    """Not the file at all: gone, or there and something else."""
    if chance.random() < 0.1:
        path.unlink()
        return Damage(f"{path.name} missing", Right.REFUSED)
    return something_else(chance, path)


def other_bytes(chance: Random, path: Path) -> Damage:
    """A foreign file under its name, or the beginning of the file."""
    data = path.read_bytes()
    how = chance.choice(("foreign", "cut"))
    if how == "foreign":
        path.write_bytes(found := chance.choice(FOREIGN))
        return Damage(f"{path.name} foreign: {found[:12]!r}", Right.REFUSED)
    size = chance.choice((1, 7, 8, 9, len(data) // 2, len(data) - 1, len(data) - 2))
    path.write_bytes(data[: min(size, len(data) - 2)])
    return Damage(f"{path.name} cut to {path.stat().st_size} bytes", Right.REFUSED)


def cut(chance: Random, path: Path) -> Damage:
    """The file ends anywhere before its end."""
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data) - 1)])
    return Damage(f"{path.name} cut to {path.stat().st_size} bytes", Right.REFUSED)


def replaced(old: bytes, new: bytes) -> Damager:
    """Other bytes wherever some bytes stand."""

    def damage(chance: Random, path: Path) -> Damage:
        path.write_bytes(path.read_bytes().replace(old, new))
        return Damage(f"{path.name} {new!r} for {old!r}", Right.REFUSED)

    return damage


def answered(damager: Damager) -> Damager:
    """The same damage to an input that may hold that too."""
    return lambda chance, path: Damage(damager(chance, path).what, Right.ANSWERED)


def something_else(chance: Random, path: Path) -> Damage:
    """Something else under its name: other bytes, a folder, a pipe, a device."""
    how = chance.choice(("bytes", "bytes", "bytes", "folder", "pipe", "link", "loop"))
    if how == "bytes":
        return other_bytes(chance, path)
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "link":
        path.symlink_to(chance.choice(("/proc/self/mem", "/dev/zero", "/dev/full")))
    elif how == "loop":
        path.symlink_to(path.name)
    return Damage(f"{path.name} {how}", Right.REFUSED)


def flipped(right: Right, *, within: int | None = None) -> Damager:
    """Some bytes are others, of the whole file or of its first ones."""

    def damage(chance: Random, path: Path) -> Damage:
        data = bytearray(path.read_bytes())
        places = sorted(chance.randrange(min(len(data), within or len(data))) for _ in range(
            chance.choice((1, 1, 2, 8))
        ))  # fmt: skip
        before = bytes(data)
        for place in places:
            data[place] = chance.choice((data[place] ^ (1 << chance.randrange(8)), 0, 255))
        path.write_bytes(data)
        harmless = bytes(data) == before
        return Damage(f"{path.name} bytes {places}", Right.EQUAL if harmless else right)

    return damage


def json_text(right: Right) -> Damager:
    """Bytes of a JSON file; Python's own reader says what they mean now."""

    def damage(chance: Random, path: Path) -> Damage:
        before = json.loads(path.read_bytes())
        told = flipped(right)(chance, path)
        try:
            after = json.loads(path.read_bytes().decode("utf-8"))
        except (ValueError, RecursionError):
            return Damage(told.what, Right.REFUSED)
        return Damage(told.what, Right.EQUAL if after == before else right)

    return damage


def reformatted(chance: Random, path: Path) -> Damage:
    """The same JSON in other words."""
    data = json.loads(path.read_bytes())
    if isinstance(data, dict):
        data = dict(chance.sample(sorted(data.items()), len(data)))
    path.write_text(json.dumps(data, indent=chance.choice((None, 0, 7))) + "\n\n")
    return Damage(f"{path.name} reformatted", Right.EQUAL)


def field_of_wrong_type(refused: tuple[str, ...], otherwise: Right) -> Damager:
    """A field of a JSON file holds what it cannot.

    Args:
        refused: paths of fields, such as ``zoo/architecture/*``, that no command may swallow.
        otherwise: what is right for the other fields.
    """

    def damage(chance: Random, path: Path) -> Damage:
        data = json.loads(path.read_bytes())
        wanted = chance.random() < 0.7
        fields = [f for f in _fields(data) if not wanted or _matches(f, refused)]
        place = chance.choice(fields)
        old = _get(data, place)
        new = chance.choice([x for x in NONSENSE if not _same_kind(x, old)])
        _set(data, place, new)
        path.write_text(json.dumps(data))
        right = Right.REFUSED if _matches(place, refused) else otherwise
        return Damage(f"{path.name} {'/'.join(map(str, place))} = {str(new)[:30]!r}", right)

    return damage


def field_set(field: str, values: tuple[Any, ...]) -> Damager:
    """A field of a JSON file holds one of some values that do not fit."""

    def damage(chance: Random, path: Path) -> Damage:
        data = json.loads(path.read_bytes())
        data[field] = chance.choice(values)
        path.write_text(json.dumps(data))
        return Damage(f"{path.name} {field} = {str(data[field])[:30]!r}", Right.REFUSED)

    return damage


def linked_out(chance: Random, path: Path) -> Damage:
    """The file is a link to one outside of its model's folder."""
    path.unlink()
    path.symlink_to(chance.choice(("/etc/passwd", "../../disguised/config.json")))
    return Damage(f"{path.name} is a link to {path.readlink()}", Right.REFUSED)


def field_missing(refused: tuple[str, ...], otherwise: Right) -> Damager:
    """A field of a JSON file is not there."""

    def damage(chance: Random, path: Path) -> Damage:
        data = json.loads(path.read_bytes())
        fields = [f for f in _fields(data) if isinstance(f[-1], str)]
        place = chance.choice([f for f in fields if _matches(f, refused)] or fields)
        del _get(data, place[:-1])[place[-1]]
        path.write_text(json.dumps(data))
        right = Right.REFUSED if _matches(place, refused) else otherwise
        return Damage(f"{path.name} lacks {'/'.join(map(str, place))}", right)

    return damage


def safetensors_header(right: Right) -> Damager:
    """Bytes of the header; the reference implementation says whether they can be read."""

    def damage(chance: Random, path: Path) -> Damage:
        size = int.from_bytes(path.read_bytes()[:8], "little")
        told = flipped(right, within=8 + size)(chance, path)
        try:
            safetensors.deserialize(path.read_bytes())
        except (safetensors.SafetensorError, UnicodeDecodeError):
            return Damage(told.what, Right.REFUSED)
        return told

    return damage


def swapped(other: str, right: Right = Right.REFUSED) -> Damager:
    """The file is another valid one, of another kind or another network."""

    def damage(chance: Random, path: Path) -> Damage:
        found = path.parent
        while not (found / other).exists():
            found = found.parent
        shutil.copy(found / other, path)
        return Damage(f"{path.name} is a copy of {other}", right)

    return damage


def _fields(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = data.items() if isinstance(data, dict) else enumerate(data)
    found = []
    for key, value in inner:
        found.append((*at, key))
        if isinstance(value, dict | list):
            found += _fields(value, (*at, key))
    return found


def _matches(place: tuple[Any, ...], patterns: tuple[str, ...]) -> bool:
    path = "/".join(map(str, place))
    return any(fnmatchcase(path, p) and path.count("/") == p.count("/") for p in patterns)


def _get(data: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        data = data[key]
    return data


def _set(data: Any, place: tuple[Any, ...], value: Any) -> None:
    _get(data, place[:-1])[place[-1]] = value


def _same_kind(new: Any, old: Any) -> bool:
    """Whether a value might be meant: then it is no nonsense."""
    if isinstance(new, bool) or isinstance(old, bool) or new is None or old is None:
        return new is old or (isinstance(new, bool) and isinstance(old, bool))
    if isinstance(new, int | float) and isinstance(old, int | float):
        return new == old or (isinstance(new, int) and 0 <= new < 2**31 and isinstance(old, int))
    if isinstance(new, str) and isinstance(old, str):
        return new == old
    return isinstance(new, list | dict) and isinstance(old, type(new))
