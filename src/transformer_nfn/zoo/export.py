"""A zoo as per-run state dicts in the layout of the authors' files."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch

from transformer_nfn.io.files import atomic_folder
from transformer_nfn.io.tensor_files import write_state_dict
from transformer_nfn.known_tasks import HEADS
from transformer_nfn.zoo.damage import read_source
from transformer_nfn.zoo.errors import StoreError
from transformer_nfn.zoo.module import HEADS_KEY, to_state_dict
from transformer_nfn.zoo.store import MixedZoo, Zoo, check_fresh, check_outside_zoos
from transformer_nfn.zoo.store.index import CONFIGURATION


def export_authors(zoo: Zoo | MixedZoo, out: Path) -> int:
    """Writes every row as a per-run state dict in the authors' layout; how many there were.

    A mixed zoo gives a folder for each kind, which `import_authors` reads back. Where a network
    has not the paper's two heads, its state dict says how many under `HEADS_KEY`.
    """
    check_outside_zoos(out)
    check_fresh(out, ())
    if not len(zoo):
        raise StoreError(f"'{zoo.path}' has no networks to export")
    with atomic_folder(out) as made:
        if isinstance(zoo, MixedZoo):
            return sum(_export(one, made / name) for name, one in zoo.zoos.items() if len(one))
        return _export(zoo, made)


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
