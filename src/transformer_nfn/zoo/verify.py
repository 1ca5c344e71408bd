"""Whether a zoo is whole, and its networks do on the test data what the index says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from transformer_nfn.zoo.errors import StoreError, ZooError
from transformer_nfn.zoo.store import Folder, Zoo, read_header
from transformer_nfn.zoo.store.folder import VECTORS_FILE, Checksums
from transformer_nfn.zoo.store.shards import ShardReader
from transformer_nfn.zoo.store.zoo import is_mixed, kinds_in, read_kinds
from transformer_nfn.zoo.training.tasks import TextTask, load_task
from transformer_nfn.zoo.training.tasks.task import Task

# How many test samples a re-run may differ by from what is recorded, for each network. Networks
# built here were tested by this library: one sample that two logits tie on, either way.
BUILT_TOLERANCE = 2
# Imported ones were tested by other people's code on other hardware, and their files keep four
# digits cut off. Rounding products to TF32, as GPUs may, was measured to move up to 2 of MNIST's
# 10,000 samples (12 networks of the grid); entries of one weight matrix in the wrong order move
# thousands, those of a bias as few as rounding does, which the checksums are for.
IMPORTED_TOLERANCE = 10


@dataclass
class Verdict:
    """What `verify` found.

    Attributes:
        problems: a sentence each; empty for a zoo that is whole.
        networks: rows whose bytes were checked.
        rerun: rows that were run on the test data.
        worst: the largest difference between a recorded and a re-run accuracy.
        worst_samples: the same in test samples.
        test_samples: how many samples a re-run network was tested on.
        tolerance: how many samples of difference were allowed.
        note: what could not be checked, and why.
    """

    problems: list[str] = field(default_factory=list)
    networks: int = 0
    rerun: int = 0
    worst: float = 0.0
    worst_samples: float = 0.0
    test_samples: int = 0
    tolerance: int = BUILT_TOLERANCE
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(
    path: Path | str,
    *,
    data: Path | None = None,
    sample: int = 8,
    seed: int = 0,
    tolerance: int | None = None,
    tick: Callable[[], None] | None = None,
) -> Verdict:
    """Checks every byte of a zoo, then runs a sample of its networks again.

    Args:
        path: the zoo; of a mixed one every kind is verified.
        data: the folder of the task's files, for the test data; None fetches them.
        sample: how many networks to run (of each kind); 0 for none.
        seed: chooses them.
        tolerance: by how many test samples a network may differ from its record; None for
            `BUILT_TOLERANCE`, or `IMPORTED_TOLERANCE` for imported files.
        tick: called after every shard.
    """
    if tolerance is not None and tolerance < 0:
        raise ZooError(f"tolerance must be at least 0 test samples, found {tolerance}")
    if is_mixed(path):
        return _verify_kinds(Path(path), data, sample, seed, tolerance, tick)
    if not (Path(path) / "zoo.json").exists():
        # Not a verdict on a zoo, but a question that cannot be put.
        raise StoreError(f"'{path}' is not a zoo: it has no zoo.json")
    out = Verdict()
    try:
        folder = Folder.open(path)
        index = folder.index()
    except StoreError as error:
        out.problems.append(str(error))
        return out
    imported = folder.about.get("origin") == "import"
    default = IMPORTED_TOLERANCE if imported else BUILT_TOLERANCE
    out.tolerance = default if tolerance is None else tolerance
    _check_small_files(folder, out)
    for shard in folder.shards:
        try:
            _check_shard(folder, shard, index.shards.get(shard), out)
        except StoreError as error:
            out.problems.append(str(error))
        if tick:
            tick()
    if out.ok and sample:
        _rerun(Zoo.open(path), data, sample, seed, out)
    return out


def _verify_kinds(
    path: Path,
    data: Path | None,
    sample: int,
    seed: int,
    tolerance: int | None,
    tick: Callable[[], None] | None,
) -> Verdict:
    """The verdicts on all kinds of a mixed zoo as one; problems say whose they are."""
    out = Verdict()
    try:
        kinds = kinds_in(path, read_kinds(path))
    except StoreError as error:
        out.problems.append(str(error))
        return out
    for kind in kinds:
        one = verify(
            path / kind.name, data=data, sample=sample, seed=seed, tolerance=tolerance, tick=tick
        )
        out.problems += [f"{kind.name}: {problem}" for problem in one.problems]
        out.networks += one.networks
        out.rerun += one.rerun
        out.worst = max(out.worst, one.worst)
        out.worst_samples = max(out.worst_samples, one.worst_samples)
        out.test_samples = max(out.test_samples, one.test_samples)
        out.tolerance = one.tolerance
        out.note = out.note or one.note
    return out


def _check_small_files(folder: Folder, out: Verdict) -> None:
    for name in ("zoo.json", VECTORS_FILE):
        if (folder.path / name).exists():
            try:
                Checksums(folder.path).read(name)
            except StoreError as error:
                out.problems.append(str(error))


def _check_shard(folder: Folder, shard: str, header_crc32: int | None, out: Verdict) -> None:
    path = folder.shard_path(shard)
    if not path.exists():
        raise StoreError(f"{path}: missing, the zoo is not finished")
    reader = ShardReader(path, folder.arch, header_crc32)
    buffer = np.empty(folder.arch.num_weights, reader.kind)
    for row in read_header(path).rows:
        if not row["crashed"]:
            reader.read(row["row"], row["checksum"], buffer)
            out.networks += 1


def _rerun(zoo: Zoo, data: Path | None, sample: int, seed: int, out: Verdict) -> None:
    recorded = np.flatnonzero(~np.isnan(zoo.table["test_accuracy"].astype(float)))
    if zoo.about["origin"] == "import" and not zoo.arch.patch:
        out.note = "not re-run: the authors' word vectors are not part of their files"
        return
    try:
        task = load_task(
            zoo.about["task"]["name"],
            data,
            held=0.0,
            vectors=zoo.word_vectors(),
            kind=zoo.arch.kind,
        )
    except ZooError as error:
        out.note = f"not re-run: {error}"
        return
    chosen = np.random.default_rng(seed).permutation(recorded)[:sample]
    out.test_samples = task.sizes["test"]
    for row in chosen:
        accuracy = measure_accuracy(zoo, task, int(row))
        gap = abs(accuracy - float(zoo.table["test_accuracy"][row]))
        # Rounded because an accuracy in single precision is a whole number of samples only nearly.
        samples = round(gap * out.test_samples, 2)
        out.worst = max(out.worst, gap)
        out.worst_samples = max(out.worst_samples, samples)
        out.rerun += 1
        if samples > out.tolerance:
            out.problems.append(
                f"run {zoo.table['run'][row]} epoch {zoo.table['epoch'][row]}: recorded test "
                f"accuracy {zoo.table['test_accuracy'][row]:.4f}, re-run {accuracy:.4f}, "
                f"{samples:g} samples apart"
            )


@torch.no_grad()
def measure_accuracy(zoo: Zoo, task: Task, row: int) -> float:
    """The accuracy of one row, run as a plain module on the task's test data."""
    network = zoo.network(row)
    n = task.sizes["test"]
    hits = 0
    # Text is padded within a batch and not masked, so the batches must be the trainer's.
    size = zoo.about["recipe"]["batch"] if isinstance(task, TextTask) else 500
    for start in range(0, n, size):
        index = torch.arange(start, min(start + size, n))
        batch = task.batch("test", index[None])
        logits = network(task.module_inputs(batch.inputs[0]))
        hits += int((logits.argmax(-1) == batch.labels[0]).sum())
    return hits / n
