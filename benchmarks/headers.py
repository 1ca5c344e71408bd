"""Seconds to read the header of many small tensors, beside the library of the format.

    python benchmarks/headers.py --json headers.json

One file and eight shards with an index, of 100,000 and 400,000 tensors that no family has: the
time of `open_model`, which recognises families by all names, and of `tnfn inspect` without its
imports, against `safetensors.safe_open` and the shape of every tensor. Seconds are those of a
processor, the least of several rounds; both sides run in turns in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors import safe_open

from transformer_nfn.checkpoints import open_model
from transformer_nfn.checkpoints.families import families
from transformer_nfn.cli import main as tnfn

SHARDS = 8


def main() -> None:
    """Measure every number of tensors, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", default="100000,400000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    torch.set_num_threads(1)
    families()
    rows = []
    for count in map(int, given.tensors.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            for name, files in written(Path(folder), count).items():
                rows.append({"tensors": count, "files": name, **measure(files, given.rounds)})
                print(text(rows[-1]), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps({"measured": rows}, indent=1) + "\n")


def written(folder: Path, count: int) -> dict[str, list[Path]]:
    """One file, and shards after their index."""
    names = [f"layer.{i}.weight" for i in range(count)]
    one, shards = folder / "one.safetensors", [folder / f"{i}.safetensors" for i in range(SHARDS)]
    write(one, names)
    for i, shard in enumerate(shards):
        write(shard, names[i::SHARDS])
    weight_map = {name: shards[i % SHARDS].name for i, name in enumerate(names)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return {"one": [one, one], "sharded": [index, *shards]}


def write(path: Path, names: Sequence[str]) -> None:
    """A file of tensors of one number."""
    header = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
        for i, name in enumerate(names)
    }
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(4 * len(names)))


def measure(files: Sequence[Path], rounds: int) -> dict[str, float]:
    """Seconds of each side; the first file is what is opened, the others hold tensors."""
    sides: dict[str, Callable[[], None]] = {
        "safetensors": lambda: library(files),
        "open_model": lambda: ours(files[0]),
        "inspect": lambda: command(files[0]),
    }
    seconds = {name: float("inf") for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            start = time.process_time()
            side()
            seconds[name] = min(seconds[name], time.process_time() - start)
    return seconds


def library(files: Sequence[Path]) -> None:
    """Read the shape of every tensor with the library of the format, and the index."""
    if files[0].suffix == ".json":
        json.loads(files[0].read_bytes())
    shapes = {}
    for path in files[1:]:
        with safe_open(path, "pt") as file:
            names = file.keys()
            shapes |= {name: file.get_slice(name).get_shape() for name in names}


def ours(path: Path) -> None:
    """Open the file as a model, which no family is."""
    with contextlib.suppress(ValueError):
        open_model(path)


def command(path: Path) -> None:
    """Run `tnfn inspect`, which says that no family fits."""
    words = ["tnfn", "inspect", str(path)]
    with (
        patch("sys.argv", words),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        tnfn()


def text(row: dict[str, float]) -> str:
    """One line for people."""
    library = row["safetensors"]
    sides = (f"{name} {row[name]:.2f} s ({row[name] / library:.2f})" for name in row if name in
             ("open_model", "inspect"))  # fmt: skip
    return f"{row['tensors']:,} tensors, {row['files']}: safetensors {library:.2f} s, " + ", ".join(
        sides
    )


if __name__ == "__main__":
    main()
