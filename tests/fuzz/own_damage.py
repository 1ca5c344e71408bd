"""Ways to damage a user's table of targets, and the index of the zoo that was made with it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from expected import Damage, Right
from store_damage import sign_zoo

BAD_NUMBERS = ("nan", "NaN", "inf", "-Infinity", "1e400", "", "x", "0x1", "1 2", "٣", "9" * 5000)
BAD_FILES = (
    "", " ", ".", "..", "/etc/passwd", "../hub", "hub/../../x", "gone", "hub", "./hub/", "x" * 5000,
    "hub\0", "hub/config.json",
)  # fmt: skip
HEADERS = ("file,file,loss", "file,loss,loss", "net,loss,optimizer", "file,bytes,optimizer",
           "file,,optimizer", "", "file,loss")  # fmt: skip


def table(chance: Random, path: Path) -> Damage:
    """A table with a row that cannot be, or too few or too many of them, or no table."""
    header, *rows = path.read_text().splitlines()
    cells = [row.split(",") for row in rows]
    how = chance.choice(("number", "number", "file", "file", "twice", "missing", "header", "bytes"))
    at = chance.randrange(len(cells))
    if how == "number":
        cells[at][1] = chance.choice(BAD_NUMBERS)
        how = f"loss {cells[at][1][:20]!r}"
    elif how == "file":
        at = 1  # whose own name is none of the bad ones
        cells[at][0] = f'"{chance.choice(BAD_FILES)}"'
        how = f"file {cells[at][0][:20]}"
    elif how == "twice":
        cells.insert(at, list(cells[at]))
    elif how == "missing":
        del cells[at]
    elif how == "header":
        header = chance.choice(HEADERS)
    data = "\n".join([header, *map(",".join, cells)]).encode()
    if how == "bytes":
        data = chance.choice((b"\xff\xfe" + data, data + b"\xc3", data.replace(b",", b"\0,", 3)))
    path.write_bytes(data)
    return Damage(f"{path.name}: {how}", Right.REFUSED)


BAD_CELLS = (None, "nan", float("nan"), float("inf"), [], {"a": 1}, True, 10**400, "x" * 5000)


def typed_table(chance: Random, path: Path) -> Damage:
    """A table in Parquet or JSON lines with a row that cannot be, or too few or too many."""
    parquet = path.suffix == ".parquet"
    rows: list[dict[str, Any]] = (
        pq.read_table(path, use_threads=False).to_pylist()
        if parquet
        else [json.loads(line) for line in path.read_text().splitlines()]
    )
    at = chance.randrange(len(rows))
    how = chance.choice(("cell", "cell", "file", "twice", "missing", "unmatched", "no column"))
    if how == "cell":
        value = chance.choice(BAD_CELLS[:4] if parquet else BAD_CELLS)
        rows[at]["loss"] = value
        if parquet and isinstance(value, str):
            rows = [{**row, "loss": str(row["loss"])} for row in rows]
        how = f"loss {str(value)[:20]}"
    elif how == "file":
        rows[at]["file"] = None
    elif how == "twice":
        rows.append(dict(rows[at]))
    elif how == "missing":
        del rows[at]
    elif how == "unmatched":
        rows.append({**rows[at], "file": "gone"})
    else:
        rows = [{"loss": row["loss"]} for row in rows]
    if parquet:
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Numbers that are texts in Parquet are classes.
    right = Right.ANSWERED if parquet and how == "loss nan" else Right.REFUSED
    return Damage(f"{path.name}: {how}", right)


def other_family(chance: Random, path: Path) -> Damage:
    """A checkpoint of another family, or none of any."""
    shutil.rmtree(path)
    other = chance.choice(("hub", "bert", "net.safetensors"))
    found = path.parent / other
    if found.is_dir():
        shutil.copytree(found, path)
    else:
        path.mkdir()
        shutil.copy(found, path / "model.safetensors")
    return Damage(f"{path.name} is {other}", Right.REFUSED)


def _set(name: str, value: Any) -> Callable[[Any], Any]:
    def change(columns: dict[str, list[Any]]) -> None:
        columns[name][1] = value

    return change


INDICES: dict[str, Callable[[dict[str, list[Any]]], Any]] = {
    "checksum": _set("checksum", "0" * 64),
    "checksum null": _set("checksum", None),
    "family unknown": _set("family", "no_such_family"),
    "family null": _set("family", None),
    "bytes": _set("bytes", 3),
    "bytes null": _set("bytes", None),
    "loss nan": _set("loss", float("nan")),
    "loss null": _set("loss", None),
    "optimizer null": _set("optimizer", None),
    "no network": lambda columns: columns.pop("network"),
    "list": lambda columns: columns.update(loss=[[1]] * 3),
    "no row": lambda columns: [column.clear() for column in columns.values()],
}


def index(chance: Random, path: Path) -> Damage:
    """A signed index with values that cannot be; the second row is read."""
    how = chance.choice(list(INDICES))
    columns = pq.read_table(path, use_threads=False).to_pydict()
    INDICES[how](columns)
    pq.write_table(pa.table(columns), path)
    sign_zoo(path)
    right = Right.ANSWERED if how == "family unknown" else Right.REFUSED  # an export copies it
    return Damage(f"{path.name}: {how}", right)


TARGETS: dict[str, Callable[[int], list[Any]]] = {
    "constant": lambda n: [2.5] * n,
    "one class": lambda n: ["adam"] * n,
    "a class of one network": lambda n: ["adam"] * (n - 1) + ["sgd"],
    "all but one equal": lambda n: [1.5] * (n - 1) + [2.5],
    "a network without a class": lambda n: ["", *("adam", "sgd") * n][:n],
    "a class each": lambda n: [f"run-{i}" for i in range(n)],
    "huge": lambda n: [(-1) ** i * 1e308 for i in range(n)],
    "denormal": lambda n: [(i + 1) * 1e-320 for i in range(n)],
    "nan": lambda n: [1.5] * (n - 1) + [float("nan")],
    "infinite": lambda n: [*map(float, range(n - 1)), float("-inf")],
    "null": lambda n: [*map(float, range(n - 1)), None],
    "truth": lambda n: [i % 2 == 0 for i in range(n)],
    "lists": lambda n: [[i] for i in range(n)],
    "fifteen": lambda n: [*map(float, range(15))],
    "none": lambda n: [],
}  # fmt: skip


def targets(chance: Random, path: Path) -> Damage:
    """A signed index with targets that cannot be learned, or of too few networks."""
    how = chance.choice(list(TARGETS))
    columns = pq.read_table(path, use_threads=False).to_pydict()
    values = TARGETS[how](len(columns["loss"]))
    columns |= {"loss": values, "optimizer": values}
    columns = {name: cells[: len(values)] for name, cells in columns.items()}
    pq.write_table(pa.table(columns), path)
    sign_zoo(path)
    return Damage(f"targets: {how}", Right.REFUSED)
