"""Ways to damage what `tnfn zoo import` reads: tables and zip files."""

import io
import shutil
import struct
import zipfile
from pathlib import Path
from random import Random

from expected import Damage, Right

NUMBERS = ("lr", "weight_decay", "init_std", "dropout", "train_fraction", "test_top1_accuracy")
BAD_NUMBERS = ("nan", "NaN", "inf", "-inf", "-3", "1e400", "x", "1e9", "0x1", "1,5", "1 2", "٣")
BAD_SEEDS = ("nan", "1.5", "x", "1e400", "9" * 20, "inf")


def table(chance: Random, path: Path) -> Damage:
    """A table with a value that cannot be, or that is no table."""
    rows = [line.split(",") for line in path.read_text().splitlines()]
    how = chance.choice(("number", "number", "number", "seed", "encoding", "bytes", "name"))
    right = Right.REFUSED
    if how in ("number", "seed"):
        column = "seed" if how == "seed" else chance.choice(NUMBERS)
        value = chance.choice(BAD_SEEDS if how == "seed" else BAD_NUMBERS)
        if value == "1e9" and column != "test_top1_accuracy":
            value = "-1e9"
        rows[chance.choice((1, 2, 3))][rows[0].index(column)] = f'"{value}"'
        how = f"{column} {value}"
    elif how == "name":
        rows[1][rows[0].index("ckpt_file")] = "x" * 200_000
    text = "\n".join(map(",".join, rows)) + "\n"
    data = text.encode()
    if how == "encoding":
        utf16 = b"\xff\xfe" + text.encode("utf-16-le")
        data = chance.choice((utf16, b"\xe9" + data, data + b"\xc3"))
    elif how == "bytes":
        data = data.replace(b"0.2", b"\0", 1)
    path.write_bytes(data)
    return Damage(f"{path.name}: {how}", right)


def harmless_table(chance: Random, path: Path) -> Damage:
    """The same table, written by another program."""
    text = path.read_text()
    how = chance.choice(("mark", "line ends", "quotes", "blank lines"))
    if how == "mark":
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    elif how == "line ends":
        path.write_bytes(text.replace("\r\n", "\n").replace("\n", "\r\n").encode())
    elif how == "quotes":
        lines = [",".join(f'"{word}"' for word in line.split(",")) for line in text.splitlines()]
        path.write_text("\n".join(lines))
    else:
        path.write_text(text + "\n\n")
    return Damage(f"{path.name}: {how}", Right.EQUAL)


def file_name(chance: Random, path: Path) -> Damage:
    """A file whose name says an accuracy or an epoch that cannot be."""
    name = chance.choice(
        ("run0_75_10001.pt", "run0_75_999999999999.pt", f"run0_{'9' * 25}_5000.pt")
    )  # fmt: skip
    (path.parent.parent / "metadata" / "mnist.csv").unlink()
    path.rename(path.with_name(name))
    return Damage(f"{path.name} named {name}", Right.REFUSED)


def archive(chance: Random, path: Path) -> Damage:
    """A zip that is damaged, encrypted, oddly compressed, or leads out of its folder."""
    data = bytearray(path.read_bytes())
    how = chance.choice(
        ("encrypted", "method", "checksum", "size", "outside", "absolute", "link", "bomb", "twice",
         "comment", "drive", "file and folder")
    )  # fmt: skip
    right = Right.REFUSED
    central = data.find(b"PK\x01\x02")
    if how == "encrypted":
        _patch(data, 8, 6, "<H", 1)
    elif how == "method":
        _patch(data, 10, 8, "<H", chance.choice((1, 6, 9, 12, 14, 93, 97, 99, 255)))
    elif how == "checksum":
        _patch(data, 16, 14, "<I", 12345)
    elif how == "size":
        _patch(data, 24, 22, "<I", chance.choice((1, 2**31, 2**32 - 2)))
        right = Right.EQUAL_OR_REFUSED  # Python goes by where the compressed bytes end
    elif how == "comment":
        data = data[:central] + b"\0" * 9 + data[central:]
        right = Right.EQUAL_OR_REFUSED
    else:
        data = bytearray(_with_member(path, how))
        if how in ("bomb", "file and folder"):
            right = Right.REFUSED
    path.write_bytes(data)
    return Damage(f"{path.name}: {how}", right)


def _patch(data: bytearray, central: int, local: int, kind: str, value: int) -> None:
    """One field of every entry, in both of the places where a zip keeps it."""
    for mark, at in ((b"PK\x01\x02", central), (b"PK\x03\x04", local)):
        place = data.find(mark)
        while place >= 0:
            struct.pack_into(kind, data, place + at, value)
            place = data.find(mark, place + 4)


def _with_member(path: Path, how: str) -> bytes:
    held = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(held, "a", zipfile.ZIP_DEFLATED) as opened:
        if how == "outside":
            opened.writestr("../outside.pt", b"x")
        elif how == "absolute":
            opened.writestr("/tmp/fuzz-outside.pt", b"x")
        elif how == "drive":
            opened.writestr("..\\outside.pt", b"x")
        elif how == "link":
            entry = zipfile.ZipInfo("mnist/run9_75_5000.pt")
            entry.external_attr = 0o120777 << 16
            opened.writestr(entry, "/etc/passwd")
        elif how == "twice":
            opened.writestr("mnist/run0_75_5000.pt", b"x")
        elif how == "file and folder":
            opened.writestr("mnist/run0_75_5000.pt/x_75_5000.pt", b"x")
        else:
            with opened.open("mnist/run9_75_5000.pt", "w", force_zip64=True) as file:
                for _ in range(64):
                    file.write(b"\0" * (1 << 20))
    return held.getvalue()


def no_files(chance: Random, path: Path) -> Damage:
    """A folder without anything to import."""
    shutil.rmtree(path)
    path.mkdir()
    (path / "mnist").mkdir()
    (path / "mnist" / "readme.txt").write_text("x")
    return Damage("nothing to import", Right.REFUSED)
