"""Ways to damage a zoo or a predictor that keep its checksums right: signed, but wrong."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from expected import Damage, Right

REFUSED = Right.REFUSED


def sign_zoo(path: Path) -> None:
    """Checksums of what the small files of a zoo hold now."""
    folder = path.parent
    sums = {
        name: [_sha256(folder / name)]
        for name in ("zoo.json", "index.parquet")
        if (folder / name).is_file()
    }
    (folder / "checksums.json").write_text(json.dumps(sums))


def sign_kinds(path: Path) -> None:
    """Checksum of what ``kinds.json`` of a mixed zoo holds now."""
    sums = {path.name: [_sha256(path)]}
    (path.parent / "checksums.json").write_text(json.dumps(sums))


def sign_predictor(path: Path) -> None:
    """Checksums of what the files of a predictor hold now."""
    about = json.loads((path.parent / "predictor.json").read_text())
    about["sha256"] = {name: _sha256(path.parent / name) for name in about["sha256"]}
    (path.parent / "predictor.json").write_text(json.dumps(about))
    sign_run(path)


def sign_run(path: Path) -> None:
    """Checksums of what the files of a run hold now, given its folder or one of them."""
    folder = next(each for each in (path, *path.parents) if (each / "run.json").is_file())
    record = json.loads((folder / "run.json").read_text())
    files = {name: folder / name for name in record["files"]}
    record["files"] = {name: _sha256(file) for name, file in files.items() if file.is_file()}
    (folder / "run.json").write_text(json.dumps(record))


ANOTHER_TYPE: tuple[Any, ...] = (None, True, 7, 0.5, "x", [], {})
NULLABLE = {
    "percent", "augment", "num_parameters", "table", "target", "identity", "best_epoch", "tau_se",
    "accuracy_se", "r2", "auroc", "made", "updates",
}  # fmt: skip
OPTIONAL = {"guarded", "summary.guarded.zoo", "zoo.sha256"}
"""Of a record, what only describes a guard or a zoo."""


def wrong_fields(record: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of a record of a run, missing or of another type, and the record then."""
    for holder, key, name in _fields(record):
        if name.startswith("protocol.options."):  # arguments of a model, of any type
            continue
        right = holder[key]
        number = isinstance(right, int | float) and not isinstance(right, bool)
        for wrong in ANOTHER_TYPE:
            if type(wrong) is type(right) or (wrong is None and key in NULLABLE):
                continue
            if number and type(wrong) in ((int,) if isinstance(right, float) else ()):
                continue
            if right is None and type(wrong) in (int, float, str):
                continue
            holder[key] = wrong
            yield name, record
        holder[key] = right
        if isinstance(key, str) and not {key, name} & OPTIONAL:
            del holder[key]
            yield name, record
            holder[key] = right


def _fields(value: Any, path: str = "") -> Iterator[tuple[Any, Any, str]]:
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
    for key, inner in pairs:
        name = f"{path}.{key}".lstrip(".") if isinstance(key, str) else f"{path}[{key}]"
        yield value, key, name
        if isinstance(inner, dict | list):
            yield from _fields(inner, name)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _set(name: str, values: Callable[[int], Any]) -> Callable[[Any], Any]:
    def change(table: Any) -> Any:
        made = pa.array([values(i) for i in range(len(table))])
        return table.set_column(table.column_names.index(name), name, made)

    return change


def _metadata(value: bytes | None) -> Callable[[Any], Any]:
    return lambda t: t.replace_schema_metadata(None if value is None else {"shards": value})


TABLES: dict[str, tuple[Callable[[Any], Any], Right]] = {
    "no rows": (lambda t: t[:0], REFUSED),
    "row far off": (_set("row", lambda i: 10**9), REFUSED),
    "row negative": (_set("row", lambda i: -1), REFUSED),
    "row text": (_set("row", lambda i: "x"), REFUSED),
    "row a fraction": (_set("row", lambda i: 0.5), REFUSED),
    "row null": (_set("row", lambda i: None), REFUSED),
    "shard outside": (_set("shard", lambda i: "../../x"), REFUSED),
    "shard unknown": (_set("shard", lambda i: "99999"), REFUSED),
    "shard number": (_set("shard", lambda i: 0), REFUSED),
    "shard null": (_set("shard", lambda i: None), REFUSED),
    "checksum": (_set("checksum", lambda i: 5), REFUSED),
    "checksum huge": (_set("checksum", lambda i: 2**62), REFUSED),
    "checksum text": (_set("checksum", lambda i: "5"), REFUSED),
    "accuracy text": (_set("test_accuracy", lambda i: "x"), REFUSED),
    "accuracy 7": (_set("test_accuracy", lambda i: 7.0), REFUSED),
    "accuracy -1": (_set("test_accuracy", lambda i: -1.0), REFUSED),
    "accuracy inf": (_set("test_accuracy", lambda i: float("inf")), REFUSED),
    "run null": (_set("run", lambda i: None), REFUSED),
    "run list": (_set("run", lambda i: [i]), REFUSED),
    "crashed text": (_set("crashed", lambda i: "no"), REFUSED),
    "all crashed": (_set("crashed", lambda i: True), Right.ANSWERED),
    "best number": (_set("best", lambda i: 3.5), REFUSED),
    "percent text": (_set("percent", lambda i: "75"), REFUSED),
    "no metadata": (_metadata(None), REFUSED),
    "metadata no JSON": (_metadata(b"{"), REFUSED),
    "metadata list": (_metadata(b"[1]"), REFUSED),
    "metadata text": (_metadata(b'{"00000": "x", "00001": 1}'), REFUSED),
    "metadata empty": (_metadata(b"{}"), REFUSED),
    "metadata wrong": (_metadata(b'{"00000": 1, "00001": 1}'), REFUSED),
    "column gone": (lambda t: t.drop_columns(["run"]), REFUSED),
}


def parquet_index(chance: Random, path: Path) -> Damage:
    """An index that is Parquet, but not of this zoo."""
    table = pq.ParquetFile(pa.BufferReader(path.read_bytes())).read(use_threads=False)
    how = chance.choice(sorted(TABLES))
    change, right = TABLES[how]
    with path.open("wb") as file:
        pq.write_table(change(table), file)
    return Damage(f"{path.name}: {how}", right)


def predictions(chance: Random, path: Path) -> Damage:
    """Predictions that are Parquet, but none."""
    table = pq.ParquetFile(pa.BufferReader(path.read_bytes())).read(use_threads=False)
    how = chance.choice(("no rows", "gone", "text", "null", "split", "other"))
    name = chance.choice(("accuracy", "predicted", "seed", "row", "split"))
    right = REFUSED
    if how in ("no rows", "split"):
        right = Right.ANSWERED
    if how == "no rows":
        table = table[:0]
    elif how == "gone":
        table = table.drop_columns([name])
    elif how == "other":
        table = pa.table({"x": [1]})
    elif how == "split":
        table = _set("split", lambda i: "train")(table)
    else:
        value = {"text": "x", "null": None}[how]
        table = _set(name, lambda i: value)(table)
        number = name in ("accuracy", "predicted")
        right = REFUSED if how == "text" and number else Right.ANSWERED
    with path.open("wb") as file:
        pq.write_table(table, file)
    return Damage(f"{path.name}: {how} {name}", right)
