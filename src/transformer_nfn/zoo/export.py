"""Export of a zoo to files: state dicts in the authors' layout, or folders of checkpoints."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import torch

from transformer_nfn.io.files import atomic_folder
from transformer_nfn.io.tensor_files import write_state_dict, write_tensors
from transformer_nfn.known_tasks import HEADS
from transformer_nfn.zoo.damage import read_source
from transformer_nfn.zoo.errors import StoreError
from transformer_nfn.zoo.module import HEADS_KEY, to_state_dict
from transformer_nfn.zoo.store import Zoo, check_fresh, check_outside_zoos
from transformer_nfn.zoo.store.index import CONFIGURATION
from transformer_nfn.zoo.targets import FILE, write_csv

TABLE, ARRAYS_FILE = "targets.csv", "weights.safetensors"
"""The table of exported networks of a user, and the file of arrays."""


def export_zoo(zoo: Zoo, out: Path) -> int:
    """Write every network of a zoo as a file or folder, with a table; how many there were.

    Networks that were trained here become state dicts in the authors' layout, those of each size in
    a folder, which `import_authors` reads back. Where a network has not the paper's two heads, its
    state dict says how many under `HEADS_KEY`. Checkpoints become folders of their names, as model
    hubs lay them out, which `import_networks` reads back; arrays one file with a tensor
    ``[networks, *shape]`` for each name.
    """
    check_outside_zoos(out)
    check_fresh(out, ())
    if not len(zoo):
        raise StoreError(f"'{zoo.path}' has no networks to export")
    with atomic_folder(out) as made:
        if zoo.layout is not None and zoo.named:
            write_tensors(made / ARRAYS_FILE, zoo.weights(range(len(zoo))))
            return _export_table(zoo, made)
        if zoo.named:
            return _export_checkpoints(zoo, made)
        return sum(_export(part, made / name) for name, part in zoo.parts.items() if len(part))


def _export_checkpoints(zoo: Zoo, out: Path) -> int:
    names = zoo.table["network"].tolist()
    if TABLE in names:
        raise StoreError(f"'{zoo.path}': the network '{TABLE}' has the name of the table")
    for row, name in enumerate(names):
        shutil.copytree(zoo.folder(row), out / name, dirs_exist_ok=True)
    return _export_table(zoo, out)


def _export_table(zoo: Zoo, out: Path) -> int:
    columns = {  # a missing number, NaN, becomes an empty cell
        name: ["" if value != value else value for value in column.tolist()]
        for name, column in zoo.targets.items()
    }
    write_csv(out / TABLE, {FILE: zoo.table["network"].tolist(), **columns})
    return len(zoo)


def _export(zoo: Zoo, out: Path) -> int:
    name = zoo.task
    (out / name).mkdir(parents=True)
    (out / "metadata").mkdir()
    table: list[dict[str, Any]] = []
    for rows, named in zoo.batches(size=256):
        for i, row in enumerate(rows):
            config = zoo.config(int(row))
            epoch = _best_name(name) if config["best"] else str(config["epoch"])
            accuracy = config["test_accuracy"]
            said = 0 if accuracy != accuracy else int(round(accuracy * 10000, 6))
            file = f"{config['run']}_{epoch}_{said}.pt"
            file = read_source(config["source"]).text("file") or file
            state = to_state_dict(zoo.sizes, {k: w[i] for k, w in named.items()})
            if "embedding.pos_embedding" in state:
                state["embedding.pos_embedding"] = zoo.positions()
            if zoo.sizes.heads != HEADS:
                state[HEADS_KEY] = torch.tensor(float(zoo.sizes.heads))
            write_state_dict(out / name / file, state)
            table.append(_metadata(config, name, epoch, file))
    with (out / "metadata" / f"{name}.csv").open("w", newline="", encoding="utf-8") as sheet:
        writer = csv.DictWriter(sheet, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    return len(table)


def _best_name(name: str) -> str:
    return "best" if name == "ag_news" else "best1"


def _metadata(config: dict[str, Any], name: str, epoch: str, file: str) -> dict[str, Any]:
    accuracy = "test_accuracy" if name == "ag_news" else "test_top1_accuracy"
    return {name: config[name] for name in ("run", *CONFIGURATION)} | {
        "seed": config["seed"] if _knows_seed(config["source"]) else "",
        "ckpt_epoch": epoch,
        "ckpt_file": file,
        accuracy: config["test_accuracy"],
        "percent": "" if config["best"] else config["percent"],
    }


def _knows_seed(source: str) -> bool:
    """Whether a row's seed is more than the index's default; imported files may have none."""
    return not source or "seed" in read_source(source).data
