"""From a zoo to a zoo of its damaged relatives, each tested on the task's test data."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.zoo.damage_record import (
    ORIGIN,
    STRENGTHS,
    Damage,
    damage_name,
    parse_damages,
    source_text,
)
from transformer_nfn.zoo.errors import StoreError, ZooError
from transformer_nfn.zoo.store import Folder, Zoo, check_fresh, check_outside_zoos, write_shard
from transformer_nfn.zoo.store.files import Checksums
from transformer_nfn.zoo.store.folder import claim
from transformer_nfn.zoo.store.index import CONFIGURATION
from transformer_nfn.zoo.training.damage import Patient, damage, damage_generator
from transformer_nfn.zoo.training.engines.shard import DTYPES
from transformer_nfn.zoo.training.paths import choose_runner
from transformer_nfn.zoo.training.tasks import Task, load_task
from transformer_nfn.zoo.word_vectors import VECTORS_FILE

PERCENT = 75
SHARD_ROWS = 128
BATCH = 128
BATCH_CUDA = 512
"""Samples at a time on a GPU: few of them would leave it idle."""
Tick = Callable[[int, int], None]
"""Called with how many networks are done, and of how many."""


@dataclass(frozen=True)
class _Item:
    """One network to be made: which row, what is done to it, its number among its kind."""

    row: int
    kind: str
    strength: float
    number: int
    other: int = -1


def damage_zoo(
    zoo: Zoo | Path | str,
    out: Path | str,
    *,
    kinds: str | Sequence[str] | None = None,
    count: int | None = None,
    seed: int = 0,
    percent: int | None = PERCENT,
    rows: np.ndarray | None = None,
    data: Path | str | None = None,
    device: str = "cpu",
    tick: Tick | None = None,
) -> Zoo:
    """Makes damaged relatives of a zoo's networks, tests them, and stores them as a zoo.

    Killed, the same call goes on where it was. Run, configuration and checkpoint of a row are
    those of the network it came from; what was done to it, `damage_record.damages` says.

    Args:
        zoo: whose networks; open, its folder or its name.
        out: the folder; empty, not there yet, or one that this very call was begun in.
        kinds: see `damage_record.parse_damages`; None for all of them.
        count: networks of each kind; None for one of each row chosen.
        seed: another seed gives other damage.
        percent: which checkpoint of each run; None for all of them.
        rows: which rows of the zoo, instead of those at ``percent``.
        data: the folder of the task's files; None fetches them.
        device: where networks are tested, ``cpu`` or ``cuda``.
        tick: told of progress.
    """
    zoo = zoo if isinstance(zoo, Zoo) else Zoo.open(zoo)
    out = Path(out)
    asked = parse_damages(STRENGTHS if kinds is None else kinds)
    chosen = zoo.select(percent=percent) if rows is None else np.asarray(rows, dtype=np.int64)
    items = _plan(zoo, chosen, asked, count, seed)
    about = _describe(zoo, chosen, asked, len(items), count, seed, percent)
    check_outside_zoos(out.parent)
    if not (out / "zoo.json").exists():
        check_fresh(out)
    else:
        _check_same(out, about)
    task = _load_task(zoo, data).to(device)
    folder = _folder(zoo, out, about)
    _check_same(out, about)
    for i, shard in enumerate(folder.shards):
        with folder.claim(shard, wait=True):
            if not folder.shard_path(shard).exists():
                part = items[i * SHARD_ROWS : (i + 1) * SHARD_ROWS]
                _make_shard(zoo, folder, shard, part, task, seed, device)
        if tick is not None:
            tick(min((i + 1) * SHARD_ROWS, len(items)), len(items))
    folder.merge()
    return Zoo.open(out)


def _plan(
    zoo: Zoo,
    rows: np.ndarray,
    kinds: Mapping[str, tuple[float, ...]],
    count: int | None,
    seed: int,
) -> list[_Item]:
    """Every network to be made; those of one kind do not depend on which others are asked for."""
    if len(rows) == 0:
        raise ZooError(f"'{zoo.path}' has no networks there to damage")
    if count is not None and count < 1:
        raise ZooError(f"count must be at least 1, found {count}")
    runs = zoo.table["run"].astype(str)
    if "exchanged" in kinds and len(np.unique(runs[rows])) < 2:
        raise ZooError(f"'{zoo.path}' has one run only, so there is no block to exchange")
    items = []
    for kind, strengths in kinds.items():
        source = np.random.default_rng([seed, zlib.crc32(kind.encode())])
        order = source.permutation(rows)
        for i in range(len(rows) if count is None else count):
            row = int(order[i % len(rows)])
            other = -1
            if kind == "exchanged":
                other = int(source.choice(rows[runs[rows] != runs[row]]))
            # Each round over the rows gives a row the next strength.
            strength = strengths[(i % len(rows) + i // len(rows)) % len(strengths)]
            items.append(_Item(row, kind, strength, i, other))
    return items


def _describe(
    zoo: Zoo,
    rows: np.ndarray,
    kinds: Mapping[str, tuple[float, ...]],
    networks: int,
    count: int | None,
    seed: int,
    percent: int | None,
) -> dict[str, Any]:
    about: dict[str, Any] = {
        "origin": ORIGIN,
        **{key: zoo.about[key] for key in ("task", "recipe", "positions") if key in zoo.about},
        "seeds": zoo.seeds,
        "dtype": zoo.about.get("dtype", "float32"),
        "shards": -(-networks // SHARD_ROWS),
    }
    sums = np.stack([rows, zoo.table["checksum"][rows].astype(np.int64)])
    about["damage"] = {
        "zoo": zoo.path.name,
        "networks": zlib.crc32(sums.tobytes()),
        "kinds": [damage_name(kind, s) for kind, strengths in kinds.items() for s in strengths],
        "count": count,
        "seed": seed,
        "percent": percent,
    }
    return about


def _check_same(out: Path, about: Mapping[str, Any]) -> None:
    """Refuses a folder of another zoo, or of other damage."""
    found = Folder.open(out).about
    if found.get("origin") != ORIGIN:
        raise StoreError(f"'{out}' holds another zoo: name an empty folder")
    for key, wanted in about["damage"].items():
        there = found.get("damage", {}).get(key)
        if there != wanted:
            raise StoreError(
                f"'{out}' holds another zoo of damaged networks: {key} {there}, asked for {wanted}"
            )


def _folder(zoo: Zoo, out: Path, about: dict[str, Any]) -> Folder:
    with claim(out, "create", wait=True):
        if not (out / "zoo.json").exists():
            vectors = zoo.word_vectors()
            if vectors is not None:
                Checksums(out).replace(VECTORS_FILE, vectors.to_bytes())
            Folder.create(out, zoo.arch, about)
    return Folder.open(out)


def _load_task(zoo: Zoo, data: Path | str | None) -> Task:
    about, vectors = zoo.about["task"], zoo.word_vectors()
    if not zoo.arch.patch and vectors is None:
        raise ZooError(
            f"'{zoo.path}' keeps no word vectors (the authors' are not part of their files), so "
            "its networks cannot be tested"
        )
    return load_task(about["name"], data, held=0.0, vectors=vectors, kind=zoo.arch.kind)


def _make_shard(
    zoo: Zoo,
    folder: Folder,
    shard: str,
    items: Sequence[_Item],
    task: Task,
    seed: int,
    device: str,
) -> None:
    dtype = DTYPES[folder.about["dtype"]]
    donors = [item.other if item.other >= 0 else item.row for item in items]
    healthy, given = zoo.weights([item.row for item in items]), zoo.weights(donors)
    made, records = [], []
    for i, item in enumerate(items):
        patient = Patient(
            zoo.arch,
            {name: w[i].float() for name, w in healthy.items()},
            float(zoo.table["init_std"][item.row]),
            f"row {item.row} of '{zoo.path}'",
            {name: w[i].float() for name, w in given.items()},
        )
        source = damage_generator(seed, item.kind, item.strength, item.number)
        weights, part = damage(patient, item.kind, item.strength, source)
        made.append(zoo.arch.from_named({name: w[None] for name, w in weights.items()}))
        run = str(zoo.table["run"][item.other]) if item.other >= 0 else ""
        records.append(Damage(item.kind, item.strength, item.row, part, item.other, run))
    # What is tested is what will be read back.
    flat = torch.cat(made).to(dtype).float()
    batch = BATCH_CUDA if "cuda" in device else zoo.about["recipe"].get("batch", BATCH)
    loss, accuracy = measure(task, flat.to(device), batch)
    rows = [
        _row(zoo, item, record, float(loss[i]), float(accuracy[i]))
        for i, (item, record) in enumerate(zip(items, records, strict=True))
    ]
    how = {"damaged": zoo.path.name, "torch": torch.__version__}
    write_shard(folder.shard_path(shard), folder.arch, flat, rows, how, dtype)


def measure(task: Task, weights: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Mean loss and accuracy of networks ``[n, weights]`` on the test data, as a build does it."""
    no_dropout = torch.zeros(len(weights), dtype=torch.int32, device=weights.device)
    # Nothing is trained: compiling for it would take longer than it saves.
    path = "torch" if weights.is_cuda else "auto"
    runner = choose_runner(path, task, weights, no_dropout, "float32", batch)
    loss, hits = runner.evaluate(weights, "test")
    n = task.sizes["test"]
    return (loss / n).cpu(), (hits / n).cpu()


def _row(zoo: Zoo, item: _Item, record: Damage, loss: float, accuracy: float) -> dict[str, Any]:
    base = zoo.config(item.row)
    kept = ("run", *CONFIGURATION, "seed", "epoch", "percent")
    said = int(round(accuracy * 10000, 6))
    name = record.words.replace(":", "-").replace(".", "")
    file = f"{base['run']}-{name}-{item.number}_{base['epoch']}_{said}.pt"
    return {key: base[key] for key in kept} | {
        "best": False,
        "crashed": False,
        "test_loss": loss,
        "test_accuracy": accuracy,
        "source": source_text(record, file, base["seed"]),
    }
