"""Damage drawn from whatever the input is: fields of records, scales of weights, names, streams."""

import contextlib
import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import file_damage as d
import pyarrow as pa
import pyarrow.parquet as pq
import store_damage
import torch
from expected import Damage, Right, Words
from safetensors.torch import load_file, save_file
from torch import Tensor

from transformer_nfn.zoo.store import Folder, write_shard

ANSWERED, UNCHANGED = Right.ANSWERED, Right.EQUAL_OR_REFUSED
RECORDS = (".json", ".jsonl", ".safetensors", ".parquet")
WEIGHTS = (".safetensors", ".pt")
HARMLESS_NAMES = (
    " a b ", "a\nb", "é ع", "\x1b[31m", "x" * 180, "'\"", "%s{0}[i]*?", "..a", "a:b", "$HOME",
)  # fmt: skip
NAMES = (*HARMLESS_NAMES, "-a", "--x", "#a", "a#1", "~", "\udcff\udce9", "\\", "x" * 300, "\ud800")
OUTPUTS = ("--out", "--page", "--figure", "--add")
CODES = ("F64", "F32", "I32", "F16", "BF16", "U8", "F8_E4M3", "BOOL")
"""Dtypes in a header of safetensors."""
KINDS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Document = tuple[Any, Callable[[str], None]]


def draw(chance: Random, folder: Path, words: Words) -> tuple[Words, Damage]:
    """The words to run after one damage of any kind to any file that they name."""
    named = [folder / word.partition("#")[0] for word in words[1:] if word]
    named = [path for path in named if path.exists()]
    inside = [p for n in named for p in (n.rglob("*") if n.is_dir() else (n,)) if p.is_file()]
    records = [path for path in inside if path.suffix in RECORDS]
    weights = [path for path in inside if path.suffix in WEIGHTS]
    ways: list[Callable[[], tuple[Words, Damage]]] = [lambda: renamed(chance, folder, words)]
    if named:
        ways += [lambda: (words, replaced(chance, chance.choice((*named, *inside))))]
    if records:
        ways += [lambda: (words, signed(field(chance, chance.choice(records)), folder))] * 4
    if weights:
        ways += [lambda: (words, signed(scaled(chance, chance.choice(weights)), folder))] * 3
    return chance.choice(ways)()


class _Twice(str):
    """A key that is unequal to one of the same text."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def field(chance: Random, path: Path) -> Damage:
    """One place in a record is missing, of another type, out of range, or there twice."""
    tree, write = chance.choice(_documents(path))
    holder, key, where = tree, None, []
    inner: Any = tree
    while isinstance(inner, dict | list) and inner and (key is None or chance.random() < 0.7):
        holder = inner
        key = chance.choice(sorted(inner) if isinstance(inner, dict) else range(len(inner)))
        inner = holder[key]
        where.append(str(key)[:40])
    right, how = ANSWERED, chance.choice(("gone", "type", "near", "near", "twice", "key", "order"))
    if key is None or (how in ("twice", "key", "order") and isinstance(holder, list)):
        how = "near"
    if key is None:
        tree = chance.choice(d.NONSENSE)
    elif how == "gone":
        del holder[key]
    elif how == "type":
        holder[key] = chance.choice(d.NONSENSE)
    elif how == "near":
        others = [v for _, v in _values(tree) if type(v) is type(inner) and v != inner]
        holder[key] = chance.choice([*_near(inner), *chance.sample(others, min(2, len(others)))])
    elif how == "twice":
        holder[_Twice(key)] = chance.choice((inner, chance.choice(d.NONSENSE)))
        right = UNCHANGED
    elif how == "key":
        holder[chance.choice(("", "x", *HARMLESS_NAMES, key + "x", key.upper(), "\ud800"))] = inner
        if chance.random() < 0.7:
            del holder[key]
    else:
        moved = chance.sample(list(holder.items()), len(holder))
        holder.clear()
        holder.update(moved)
        right = UNCHANGED
    value = holder.get(key) if isinstance(holder, dict) else inner
    write(json.dumps(tree))
    what = f"{how} {'/'.join(where)} {str(inner)[:30]} {str(value)[:30]!r}"
    return Damage(f"{path.name}: {what}", right)


def _near(value: Any) -> list[Any]:
    """Values of the same type that are out of range, or unlike what the rest says."""
    if isinstance(value, bool) or value is None:
        return [not value]
    if isinstance(value, int | float):
        far = (-1, 0, 1, 2**31, 2**63, 2**64, 1e300, 5e-324, float("nan"), -float("inf"))
        return [-value, value + 1, value - 1, value * 2, value + 0.5, *far]
    if isinstance(value, str):
        codes = [code for code in CODES if value in CODES]
        return ["", value * 2, value.upper(), value[:-1], value + "\n", f"../{value}", *codes]
    if isinstance(value, list):
        return [[], value[::-1], value[:-1], value[1:], value * 2, [value], [*value, *value[:1]]]
    return [{}, dict(list(value.items())[1:]), value | {"x": 1}, {"x": value}]


def _values(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield key, inner
        if isinstance(inner, dict | list):
            yield from _values(inner)


def _documents(path: Path) -> list[Document]:
    """Every JSON that a file holds, and what writes another text in its place."""
    if path.suffix == ".json":
        return [(json.loads(path.read_bytes()), path.write_text)]
    if path.suffix == ".jsonl":
        lines = path.read_text().splitlines()

        def write_line(i: int, text: str) -> None:
            path.write_text("\n".join([*lines[:i], text, *lines[i + 1 :]]) + "\n")

        return [(json.loads(line), partial(write_line, i)) for i, line in enumerate(lines)]
    if path.suffix == ".parquet":
        return _table(path)
    header, data = _split(path)
    metadata = header.get("__metadata__", {})

    def write(name: str, text: str) -> None:
        _join(path, json.dumps(header | {"__metadata__": metadata | {name: text}}), data)

    found: list[Document] = [(header, lambda text: _join(path, text, data))]
    inner = [(name, tree) for name, tree in map(_inner, metadata.items()) if tree]
    return found + [(tree, partial(write, name)) for name, tree in inner]


def _inner(item: tuple[str, str]) -> tuple[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(tree := json.loads(item[1]), dict | list):
            return item[0], tree
    return item[0], None


def _split(path: Path) -> tuple[dict[str, Any], bytes]:
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    return json.loads(whole[8:end]), whole[end:]


def _join(path: Path, header: str, data: bytes) -> None:
    raw = header.encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def _table(path: Path) -> list[Document]:
    table = pq.ParquetFile(pa.BufferReader(path.read_bytes())).read(use_threads=False)
    metadata = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}

    def write(columns: Any, metadata: dict[str, str]) -> None:
        arrays = {
            str(name): _array(values if isinstance(values, list) else [values])
            for name, values in (columns if isinstance(columns, dict) else {"x": columns}).items()
        }
        rows = min(map(len, arrays.values()), default=0)
        made = pa.table({name: values[:rows] for name, values in arrays.items()})
        with path.open("wb") as file:
            pq.write_table(made.replace_schema_metadata(metadata), file)

    columns = json.loads(json.dumps(table.to_pydict(), default=str))
    found: list[Document] = [(columns, lambda text: write(json.loads(text), metadata))]
    inner = [(name, tree) for name, tree in map(_inner, metadata.items()) if tree]
    return found + [
        (tree, lambda text, name=name: write(columns, metadata | {name: text}))
        for name, tree in inner
    ]


def _array(values: list[Any]) -> Any:
    try:
        made = pa.array(values)
        pq.write_table(pa.table({"x": made}), pa.BufferOutputStream())  # not all types can be
        return made
    except (pa.ArrowException, OverflowError, UnicodeError):
        return pa.array([ascii(value) for value in values])


def scaled(chance: Random, path: Path) -> Damage:
    """Some weights times a power of ten or something that is no number, in any dtype."""
    pickled = path.suffix == ".pt"
    shard = path.parent.name == "shards"
    state: dict[str, Tensor] = torch.load(path) if pickled else load_file(path)
    if shard:
        layout = Folder.open(path.parent.parent).sizes.row_layout
        state = {name: w.clone() for name, w in layout.views(state["weights"]).items()}
    names = sorted(name for name, w in state.items() if w.is_floating_point() and w.numel())
    if not names:
        return Damage(f"{path.name}: no weights", Right.EQUAL)
    one = chance.choice(names)
    part = chance.choice(("all", "all", "tensor", "tensor", "row", "entry"))
    power = 10.0 ** chance.randint(*chance.choice(((-30, 30), (-30, 30), (-46, -30), (30, 300))))
    odd = (float("inf"), -float("inf"), float("nan"), 0.0)
    factor = chance.choice((*odd, *[chance.choice((1, -1)) * power] * 8))
    dtype = chance.choice((None, None, *KINDS))
    for name in names if part == "all" else [one]:
        w = state[name].double()
        at = w if part in ("all", "tensor") or not w.ndim else w[chance.randrange(len(w))]
        at = at.reshape(-1)[:1] if part == "entry" else at
        at.mul_(factor)
        state[name] = w.to(dtype or state[name].dtype)
    if shard:
        _write_shard(path, state)
    elif pickled:
        torch.save(state, path)
    else:
        save_file(state, path, _split(path)[0].get("__metadata__"))
    what = one if part != "all" else ""
    return Damage(f"{path.name}: {part} {what} times {factor:g} in {dtype}", ANSWERED)


def _write_shard(path: Path, state: dict[str, Tensor]) -> None:
    """A shard as the library writes it, and the index of its zoo."""
    zoo, metadata = Folder.open(path.parent.parent), _split(path)[0]["__metadata__"]
    index = json.loads(metadata["index"])
    layout = zoo.sizes.row_layout
    weights = layout.pack({name: w.float() for name, w in state.items()})
    write_shard(path, layout, weights, index["rows"], index["made"], zoo.dtype)
    (zoo.path / "index.parquet").unlink()
    zoo.merge()


def signed(damage: Damage, folder: Path) -> Damage:
    """The damage, after every checksum that anything in the folder holds is right again."""
    signs = (
        ("shards/*.safetensors", _sign_shard), ("index.parquet", _sign_index),
        ("zoo.json", store_damage.sign_zoo), ("kinds.json", store_damage.sign_kinds),
        ("predictor.json", store_damage.sign_predictor), ("run.json", store_damage.sign_run),
    )  # fmt: skip
    for name, sign in signs:
        for path in folder.rglob(name):
            with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError, OSError):
                sign(path)
    return damage


def _sign_shard(shard: Path) -> None:
    """Checksum of the index in the header of a shard."""
    header, data = _split(shard)
    metadata = header["__metadata__"]
    crc = str(zlib.crc32(metadata["index"].encode()))
    if metadata["index_crc32"] != crc:
        metadata["index_crc32"] = crc
        _join(shard, json.dumps(header), data)


def _sign_index(index: Path) -> None:
    """Checksums of shards or of networks in the index of a zoo."""
    table = pq.ParquetFile(pa.BufferReader(index.read_bytes())).read(use_threads=False)
    made, metadata = table, dict(table.schema.metadata or {})
    if b"shards" in metadata:
        shards = json.loads(metadata[b"shards"])
        for name in shards:
            whole = (index.parent / "shards" / f"{name}.safetensors").read_bytes()
            shards[name] = zlib.crc32(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
        made = table.replace_schema_metadata(metadata | {b"shards": json.dumps(shards).encode()})
    elif "checksum" in table.column_names:
        places = [index.parent / "networks" / f"{i:05d}" for i in range(len(table))]
        wholes = [
            b"".join((place / name).read_bytes() for name in ("config.json", "model.safetensors"))
            for place in places
        ]
        sums = {"checksum": [hashlib.sha256(data).hexdigest() for data in wholes],
                "bytes": [len(data) for data in wholes]}  # fmt: skip
        for name, values in sums.items():
            made = made.set_column(made.column_names.index(name), name, pa.array(values))
    if not made.equals(table, check_metadata=True):
        with index.open("wb") as file:
            pq.write_table(made, file)


def replaced(chance: Random, path: Path) -> Damage:
    """Something else under the name of a file or a folder."""
    if path.is_file():
        return Damage(d.something_else(chance, path).what, ANSWERED)
    shutil.rmtree(path)
    how = chance.choice(("file", "pipe", "loop", "folder", "device"))
    if how == "file":
        path.write_bytes(chance.choice(d.FOREIGN))
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    else:
        path.symlink_to(path.name if how == "loop" else "/dev/full")
    # An empty folder may be one to write to.
    return Damage(f"{path.name} {how}", ANSWERED if how == "folder" else Right.REFUSED)


def renamed(chance: Random, folder: Path, words: Words) -> tuple[Words, Damage]:
    """An input or an output has a name that few files have."""
    name = chance.choice(NAMES)
    first = 2 if words[0] == "zoo" else 1
    outputs = [i + 1 for i, word in enumerate(words) if word in OUTPUTS]
    inputs = [
        i for i, word in enumerate(words)
        if i >= first and i not in outputs and word and (folder / word.partition("#")[0]).exists()
    ]  # fmt: skip
    at = chance.choice(inputs + outputs)
    old, mark, row = words[at].partition("#")
    top, *rest = Path(old).parts
    new = name + Path(top).suffix if chance.random() < 0.7 else f"{name}/{top}"
    if at in outputs:
        new = chance.choice((new, "", name, f"{top}/{new}", f"../{folder.name}/{new}"))
    with contextlib.suppress(OSError, UnicodeError):  # there is no such name
        (folder / new).parent.mkdir(exist_ok=True, parents=True)
        if at in inputs:
            (folder / top).rename(folder / new)
            new = "/".join((new, *rest))
    harmless = name in HARMLESS_NAMES and at in inputs
    written = f"./{new}" if new.startswith("-") and chance.random() < 0.7 else new
    other = tuple(
        written + mark + row if i >= first and word == words[at] else word
        for i, word in enumerate(words)
    )
    right = Right.ACCEPTED if harmless else ANSWERED
    return other, Damage(f"{words[at]} named {new[:60]!r}", right)


def streams(chance: Random) -> dict[int, str]:
    """Standard streams that are closed, whose reader has gone, or that are full; mostly none."""
    if chance.random() < 0.8:
        return {}
    chosen = chance.sample((0, 1, 2), chance.choice((1, 1, 2, 3)))
    return {
        number: chance.choice(("closed", "gone", "full") if number else ("closed", "gone"))
        for number in chosen
    }
