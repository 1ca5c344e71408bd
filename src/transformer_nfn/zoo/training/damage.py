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
from transformer_nfn.zoo.store.folder import Folder, check_fresh, check_outside_zoos, claim
from transformer_nfn.zoo.store.index import CONFIGURATION
from transformer_nfn.zoo.store.shards import write_shard
from transformer_nfn.zoo.store.zoo import Zoo
from transformer_nfn.zoo.training.backends import choose_runner
from transformer_nfn.zoo.training.grid import Config
from transformer_nfn.zoo.training.tasks import Task, load_task
from transformer_nfn.zoo.training.trainer import initial_weights

SHARD_ROWS = 128
BATCH = 128
BATCH_CUDA = 512
"""Test samples at a time on a GPU, which smaller batches would leave idle."""
Tick = Callable[[int, int], None]
"""Called with the number of finished networks and the total."""
_ANY_RUN = Config("", "sgd", 0.0, 0.0, 0.0, 0.0, 1.0, 0)


@dataclass(frozen=True)
class Patient:
    """A network to damage.

    Attributes:
        sizes: its sizes.
        weights: the tensors of its space, ``[*axes]`` each.
        init_std: of its run's initial weights; NaN if unknown.
        name: in error messages.
        donor: another network, for exchanged blocks.
    """

    sizes: NetworkSizes
    weights: Mapping[str, Tensor]
    init_std: float
    name: str
    donor: Mapping[str, Tensor] | None = None


Change = Callable[[Patient, float, torch.Generator], tuple[Weights, str]]
"""Returns the damaged weights and the damaged tensor or block (empty for all)."""


def damage(
    patient: Patient, kind: str, strength: float, generator: torch.Generator
) -> tuple[Weights, str]:
    """The damaged weights of a network, and the damaged tensor or block (empty for all).

    - ``shuffled``: a random share of the entries of every tensor is permuted.
    - ``tensor``: one matrix is initialised again, with the std of the run.
    - ``block``: one block is initialised again, its biases to zero.
    - ``exchanged``: one block comes from the donor.
    - ``untrained``: everything is initialised again.
    - ``noise``: normal noise, scaled by the std of each matrix.
    - ``pruned``: the share of smallest entries of each matrix becomes zero.
    - ``quantised``: each matrix is rounded to that many bits, evenly up to its largest entry.

    >>> sizes = NetworkSizes(16, 10, 4)
    >>> patient = Patient(sizes, {n: w[0] for n, w in sizes.space.randn(1).items()}, 0.1, "it")
    >>> weights, part = damage(patient, "pruned", 0.5, torch.Generator())
    >>> int((weights["blocks.0.W_A"] == 0).sum()), weights["blocks.0.W_A"].numel()
    (1024, 2048)
    """
    return KINDS[kind](patient, strength, generator)


def damage_generator(*identity: object) -> torch.Generator:
    """A random generator seeded by an identity, independent of other networks."""
    text = " ".join(map(str, identity)).encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
    return torch.Generator().manual_seed(seed)


def shuffled(w: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """A tensor with a random share of its entries permuted."""
    flat = w.flatten().clone()
    chosen = torch.randperm(len(flat), generator=generator)[: round(share * len(flat))]
    flat[chosen] = flat[chosen[torch.randperm(len(chosen), generator=generator)]]
    return flat.view_as(w)


def pruned(w: Tensor, share: float) -> Tensor:
    """A tensor with the share of its smallest entries set to zero."""
    smallest = w.flatten().abs().argsort()[: round(share * w.numel())]
    return w.flatten().index_fill(0, smallest, 0.0).view_as(w)


def _shuffled(patient: Patient, strength: float, generator: torch.Generator) -> tuple[Weights, str]:
    return {name: shuffled(w, strength, generator) for name, w in patient.weights.items()}, ""


def _tensor(patient: Patient, _: float, generator: torch.Generator) -> tuple[Weights, str]:
    matrices = [name for name in patient.weights if is_matrix(name)]
    name = matrices[int(torch.randint(len(matrices), (), generator=generator))]
    return {**patient.weights, name: _fresh(patient, generator)[name]}, name


def _block(patient: Patient, _: float, generator: torch.Generator) -> tuple[Weights, str]:
    part = _random_block(patient, generator)
    return _with_part(patient, _fresh(patient, generator), part), part


def _exchanged(patient: Patient, _: float, generator: torch.Generator) -> tuple[Weights, str]:
    assert patient.donor is not None
    part = _random_block(patient, generator)
    return _with_part(patient, patient.donor, part), part


def _untrained(patient: Patient, _: float, generator: torch.Generator) -> tuple[Weights, str]:
    return _fresh(patient, generator), ""


def _noise(patient: Patient, strength: float, generator: torch.Generator) -> tuple[Weights, str]:
    def noisy(w: Tensor) -> Tensor:
        draw = torch.randn(w.shape, generator=generator)
        return w + strength * w.std(correction=0) * draw

    return _on_matrices(patient, noisy), ""


def _pruned(patient: Patient, strength: float, _: torch.Generator) -> tuple[Weights, str]:
    return _on_matrices(patient, lambda w: pruned(w, strength)), ""


def _quantised(patient: Patient, strength: float, _: torch.Generator) -> tuple[Weights, str]:
    steps = 2 ** (int(strength) - 1) - 1

    def quantised(w: Tensor) -> Tensor:
        unit = w.abs().max().clamp(min=1e-30) / steps
        rounded: Tensor = (w / unit).round() * unit
        return rounded

    return _on_matrices(patient, quantised), ""


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


def is_matrix(name: str) -> bool:
    """Whether a tensor of a network is a matrix and not a bias."""
    return name.rpartition(".")[2].startswith("W")


def _on_matrices(patient: Patient, change: Callable[[Tensor], Tensor]) -> Weights:
    return {n: change(w) if is_matrix(n) else w for n, w in patient.weights.items()}


def _random_block(patient: Patient, generator: torch.Generator) -> str:
    return f"blocks.{int(torch.randint(patient.sizes.blocks, (), generator=generator))}"


def _with_part(patient: Patient, other: Mapping[str, Tensor], part: str) -> Weights:
    return {n: other[n] if n.startswith(f"{part}.") else w for n, w in patient.weights.items()}


def _fresh(patient: Patient, generator: torch.Generator) -> Weights:
    """Initial weights as drawn for the run, from another seed."""
    if not patient.init_std > 0:
        raise ZooError(
            f"{patient.name}: its run's init_std is not known, so it has no initial weights to "
            "draw again; leave out tensor, block and untrained"
        )
    seed = int(torch.randint(2**62, (), generator=generator))
    config = replace(_ANY_RUN, init_std=patient.init_std, seed=seed)
    flat = initial_weights(patient.sizes, config)
    return {name: w[0] for name, w in patient.sizes.to_named(flat[None]).items()}


@dataclass(frozen=True)
class DamageOptions:
    """Options of `damage_zoo`.

    Attributes:
        kinds: see `zoo.damage.parse_damages`; None for all of them.
        count: networks per kind; None for one of each chosen row.
        seed: of the damage.
        percent: the checkpoint of each run to damage; None for all.
        rows: rows of the zoo, instead of those at ``percent``.
        data: the folder of the task's files; None fetches them.
        device: on which networks are tested, ``cpu`` or ``cuda``.

    >>> DamageOptions(kinds="noise:0.3", count=8).percent
    75
    """

    kinds: str | Sequence[str] | None = None
    count: int | None = None
    seed: int = 0
    percent: int | None = 75
    rows: Sequence[int] | np.ndarray | None = None
    data: Path | str | None = None
    device: str = "cpu"

    @property
    def strengths(self) -> dict[str, tuple[float, ...]]:
        """Kinds of damage with their strengths."""
        return parse_damages(STRENGTHS if self.kinds is None else self.kinds)


_Item = tuple[int, Damage]
"""One network to make: its number among those of its kind, and the damage."""


def damage_zoo(
    zoo: Zoo | Path | str,
    out: Path | str,
    options: DamageOptions | None = None,
    tick: Tick | None = None,
) -> Zoo:
    """Damage networks of a zoo, test them, and store them as a zoo; resumes if interrupted.

    Run, configuration and checkpoint of a row are those of the original network;
    `zoo.damage.damages` returns what was done to it.

    Args:
        zoo: open, its folder or its name.
        out: the folder; empty, missing, or that of the same call.
        tick: receives progress.
    """
    zoo = Zoo.open(zoo) if isinstance(zoo, str | Path) else zoo
    out, options, sizes = Path(out), options or DamageOptions(), zoo.sizes
    if options.rows is None:
        rows = zoo.select(percent=options.percent)
    else:
        rows = np.asarray(options.rows, dtype=np.int64)
    items = _plan(zoo, rows, options)
    metadata = _describe(zoo, rows, len(items), options)
    check_outside_zoos(out, new=True)
    if not (out / "zoo.json").exists():
        check_fresh(out)
    else:
        _check_same(out, metadata)
    task = _load_task(zoo, options.data).to(options.device)
    Folder.create_once(out, sizes, metadata, zoo.word_vectors())
    folder = Folder.open(out)
    _check_same(out, metadata)
    folder.check_shards()
    for i, shard in enumerate(folder.shards):
        with claim(folder.path, shard, wait=True):
            if not folder.shard_path(shard).exists():
                part = items[i * SHARD_ROWS : (i + 1) * SHARD_ROWS]
                _make_shard(zoo, folder, shard, part, task, options)
        if tick is not None:
            tick(min((i + 1) * SHARD_ROWS, len(items)), len(items))
    folder.merge()
    return Zoo.open(out)


def _plan(zoo: Zoo, rows: np.ndarray, options: DamageOptions) -> list[_Item]:
    """All networks to make; those of one kind do not depend on the other kinds."""
    kinds, count = options.strengths, options.count
    if len(rows) == 0:
        raise ZooError(f"'{zoo.path}' has no networks there to damage")
    if count is not None and count < 1:
        raise ZooError(f"count must be at least 1, found {count}")
    runs = zoo.table["run"].astype(str)
    if "exchanged" in kinds and len(np.unique(runs[rows])) < 2:
        raise ZooError(f"'{zoo.path}' has one run only, so there is no block to exchange")
    items = []
    for kind, strengths in kinds.items():
        rng = np.random.default_rng([options.seed, zlib.crc32(kind.encode())])
        order = rng.permutation(rows)
        for i in range(len(rows) if count is None else count):
            row = int(order[i % len(rows)])
            # Each pass over the rows gives a row the next strength.
            strength = strengths[(i % len(rows) + i // len(rows)) % len(strengths)]
            item = Damage(kind, strength, row)
            if kind == "exchanged":
                other = int(rng.choice(rows[runs[rows] != runs[row]]))
                item = replace(item, other_row=other, other_run=str(runs[other]))
            items.append((i, item))
    return items


def _describe(
    zoo: Zoo, rows: np.ndarray, networks: int, options: DamageOptions
) -> dict[str, Any]:
    inherited = ("task", "recipe", "positions")
    sums = np.stack([rows, zoo.table["checksum"][rows].astype(np.int64)])
    kinds = options.strengths.items()
    return {
        "origin": ORIGIN,
        **{key: zoo.metadata[key] for key in inherited if key in zoo.metadata},
        "seeds": zoo.seeds,
        "dtype": zoo.metadata["dtype"],
        "shards": -(-networks // SHARD_ROWS),
        "damage": {
            "zoo": zoo.path.name,
            "networks": zlib.crc32(sums.tobytes()),
            "kinds": [damage_name(kind, s) for kind, strengths in kinds for s in strengths],
            "count": options.count,
            "seed": options.seed,
            "percent": options.percent,
        },
    }


def _check_same(out: Path, metadata: Mapping[str, Any]) -> None:
    """Reject a folder of another zoo, or of other damage."""
    stored = Folder.open(out).metadata
    if stored["origin"] != ORIGIN:
        raise StoreError(f"'{out}' holds another zoo: name an empty folder")
    for key, wanted in {"shards": metadata["shards"], **metadata["damage"]}.items():
        value = {**stored, **stored["damage"]}.get(key)
        if value != wanted:
            raise StoreError(
                f"'{out}' holds another zoo of damaged networks: {key} {value}, asked for {wanted}"
            )


def _load_task(zoo: Zoo, data: Path | str | None) -> Task:
    name, vectors = zoo.task, zoo.word_vectors()
    if not zoo.sizes.patch and vectors is None:
        raise ZooError(
            f"'{zoo.path}' keeps no word vectors (the authors' are not part of their files), so "
            "its networks cannot be tested"
        )
    return load_task(name, data, held=0.0, vectors=vectors, group=zoo.sizes.group)


def _make_shard(
    zoo: Zoo,
    folder: Folder,
    shard: str,
    items: Sequence[_Item],
    task: Task,
    options: DamageOptions,
) -> None:
    donor_rows = [item.other_row if item.other_row >= 0 else item.row for _, item in items]
    originals, donors = zoo.weights([item.row for _, item in items]), zoo.weights(donor_rows)
    damaged, records = [], []
    for i, (number, item) in enumerate(items):
        patient = Patient(
            zoo.sizes,
            {name: w[i].float() for name, w in originals.items()},
            float(zoo.table["init_std"][item.row]),
            f"row {item.row} of '{zoo.path}'",
            {name: w[i].float() for name, w in donors.items()},
        )
        generator = damage_generator(options.seed, item.kind, item.strength, number)
        weights, part = damage(patient, item.kind, item.strength, generator)
        damaged.append(zoo.sizes.from_named({name: w[None] for name, w in weights.items()}))
        records.append((number, replace(item, part=part)))
    # Rounded first, so that the stored weights are those that are tested.
    flat = torch.cat(damaged).to(folder.dtype).float()
    cuda = "cuda" in options.device
    batch = BATCH_CUDA if cuda else zoo.metadata["recipe"]["batch"]
    loss, accuracy = measure(task, flat.to(options.device), batch)
    rows = [
        _row(zoo, number, record, float(loss[i]), float(accuracy[i]))
        for i, (number, record) in enumerate(records)
    ]
    made = {"damaged": zoo.path.name, "torch": torch.__version__}
    layout, stored = folder.sizes.row_layout, folder.sizes.to_rows(flat)
    write_shard(folder.shard_path(shard), layout, stored, rows, made, folder.dtype)


def measure(task: Task, weights: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Mean loss and accuracy of networks ``[n, weights]`` on the test data, as in a build."""
    no_dropout = torch.zeros(len(weights), dtype=torch.int32, device=weights.device)
    # Compiling would take longer than it saves without training.
    path = "torch" if weights.is_cuda else "auto"
    runner = choose_runner(path, task, weights, no_dropout, "float32", batch)
    loss, hits = runner.evaluate(weights, "test")
    n = task.num_samples["test"]
    return (loss / n).cpu(), (hits / n).cpu()


def _row(zoo: Zoo, number: int, record: Damage, loss: float, accuracy: float) -> dict[str, Any]:
    original = zoo.config(record.row)
    inherited = ("run", *CONFIGURATION, "seed", "epoch", "percent")
    digits = int(round(accuracy * 10000, 6))
    name = record.name.replace(":", "-").replace(".", "")
    file = f"{original['run']}-{name}-{number}_{original['epoch']}_{digits}.pt"
    return {key: original[key] for key in inherited} | {
        "best": False,
        "crashed": False,
        "test_loss": loss,
        "test_accuracy": accuracy,
        "source": source_text(record, file, original["seed"]),
    }
