"""Damage the networks of a zoo, test them, and store them as a zoo."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.spaces import Weights
from transformer_nfn.zoo.damage import (
    ORIGIN,
    STRENGTHS,
    Damage,
    damage_name,
    parse_damages,
    source_text,
)
from transformer_nfn.zoo.errors import StoreError, ZooError
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.store import Folder, Zoo, check_fresh, check_outside_zoos, write_shard
from transformer_nfn.zoo.store.folder import VECTORS_FILE, Checksums, claim
from transformer_nfn.zoo.store.index import CONFIGURATION
from transformer_nfn.zoo.training.backends import choose_runner
from transformer_nfn.zoo.training.grid import Config
from transformer_nfn.zoo.training.local_engine import DTYPES
from transformer_nfn.zoo.training.tasks import Task, load_task
from transformer_nfn.zoo.training.trainer import initial_weights


@dataclass(frozen=True)
class Patient:
    """A network to be damaged, and what that takes.

    Attributes:
        arch: its sizes.
        weights: the tensors of its space, ``[*axes]`` each.
        init_std: of its run's initial weights; NaN where nobody knows.
        name: how errors call it.
        donor: another network, for what is exchanged.
    """

    arch: NetworkSizes
    weights: Mapping[str, Tensor]
    init_std: float
    name: str
    donor: Mapping[str, Tensor] | None = None


Change = Callable[[Patient, float, torch.Generator], tuple[Weights, str]]
"""The damaged weights, and the tensor or block that was touched (nothing for all)."""


def damage(
    patient: Patient, kind: str, strength: float, generator: torch.Generator
) -> tuple[Weights, str]:
    """The network with one kind of damage; what it was is left alone.

    - ``shuffled``: of every tensor a share of the entries, drawn at random, change places.
    - ``tensor``: one matrix is initialised anew, with the std of the run.
    - ``block``: one block is, its biases to zero.
    - ``exchanged``: one block comes from the donor.
    - ``untrained``: everything is initialised anew.
    - ``noise``: normal noise, of so many times the std of each matrix's entries.
    - ``pruned``: of each matrix the share with the smallest entries becomes zero.
    - ``quantised``: each matrix is rounded to so many bits, evenly up to its largest entry.
    """
    return KINDS[kind](patient, strength, generator)


def damage_generator(*identity: object) -> torch.Generator:
    """Randomness that its identity alone decides: the same network whoever else is damaged."""
    text = " ".join(map(str, identity)).encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
    return torch.Generator().manual_seed(seed)


def _shuffled(patient: Patient, strength: float, generator: torch.Generator) -> tuple[Weights, str]:
    out = {}
    for name, w in patient.weights.items():
        flat = w.flatten().clone()
        chosen = torch.randperm(len(flat), generator=generator)[: round(strength * len(flat))]
        flat[chosen] = flat[chosen[torch.randperm(len(chosen), generator=generator)]]
        out[name] = flat.view_as(w)
    return out, ""


def _tensor(patient: Patient, _: float, generator: torch.Generator) -> tuple[Weights, str]:
    matrices = [name for name in patient.weights if is_matrix(name)]
    name = matrices[int(torch.randint(len(matrices), (), generator=generator))]
    return {**patient.weights, name: _fresh(patient, generator)[name]}, name


def _block(patient: Patient, _: float, generator: torch.Generator) -> tuple[Weights, str]:
    part = _any_block(patient, generator)
    return _with_part(patient, _fresh(patient, generator), part), part


def _exchanged(patient: Patient, _: float, generator: torch.Generator) -> tuple[Weights, str]:
    assert patient.donor is not None
    part = _any_block(patient, generator)
    return _with_part(patient, patient.donor, part), part


def _untrained(patient: Patient, _: float, generator: torch.Generator) -> tuple[Weights, str]:
    return _fresh(patient, generator), ""


def _noise(patient: Patient, strength: float, generator: torch.Generator) -> tuple[Weights, str]:
    def noisy(w: Tensor) -> Tensor:
        draw = torch.randn(w.shape, generator=generator)
        return w + strength * w.std(correction=0) * draw

    return _matrices(patient, noisy), ""


def _pruned(patient: Patient, strength: float, _: torch.Generator) -> tuple[Weights, str]:
    def pruned(w: Tensor) -> Tensor:
        gone = w.flatten().abs().argsort()[: round(strength * w.numel())]
        return w.flatten().index_fill(0, gone, 0.0).view_as(w)

    return _matrices(patient, pruned), ""


def _quantised(patient: Patient, strength: float, _: torch.Generator) -> tuple[Weights, str]:
    steps = 2 ** (int(strength) - 1) - 1

    def quantised(w: Tensor) -> Tensor:
        unit = w.abs().max().clamp(min=1e-30) / steps
        rounded: Tensor = (w / unit).round() * unit
        return rounded

    return _matrices(patient, quantised), ""


KINDS: Mapping[str, Change] = {
    "shuffled": _shuffled,
    "tensor": _tensor,
    "block": _block,
    "exchanged": _exchanged,
    "untrained": _untrained,
    "noise": _noise,
    "pruned": _pruned,
    "quantised": _quantised,
}
assert list(KINDS) == list(STRENGTHS)


def is_matrix(name: str) -> bool:
    """Whether a tensor of a network is no bias."""
    return name.rpartition(".")[2].startswith("W")


def _matrices(patient: Patient, change: Callable[[Tensor], Tensor]) -> Weights:
    return {n: change(w) if is_matrix(n) else w for n, w in patient.weights.items()}


def _any_block(patient: Patient, generator: torch.Generator) -> str:
    return f"blocks.{int(torch.randint(patient.arch.blocks, (), generator=generator))}"


def _with_part(patient: Patient, other: Mapping[str, Tensor], part: str) -> Weights:
    return {n: other[n] if n.startswith(f"{part}.") else w for n, w in patient.weights.items()}


def _fresh(patient: Patient, generator: torch.Generator) -> Weights:
    """Initial weights as the run's were drawn, from another seed."""
    if not patient.init_std > 0:
        raise ZooError(
            f"{patient.name}: its run's init_std is not known, so it has no initial weights to "
            "draw again; leave out tensor, block and untrained"
        )
    seed = int(torch.randint(2**62, (), generator=generator))
    flat = initial_weights(patient.arch, replace(_ANY_RUN, init_std=patient.init_std, seed=seed))
    return {name: w[0] for name, w in patient.arch.to_named(flat[None]).items()}


_ANY_RUN = Config("", "sgd", 0.0, 0.0, 0.0, 0.0, 1.0, 0)


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
