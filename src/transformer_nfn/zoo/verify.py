"""Verify a zoo: its checksums, and the recorded accuracies of some networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from transformer_nfn.zoo.errors import StoreError, ZooError
from transformer_nfn.zoo.sizes import SizeGroup
from transformer_nfn.zoo.store.folder import (
    INDEX,
    MODELS_KIND,
    Folder,
    is_mixed,
    read_groups,
    zoo_kind,
)
from transformer_nfn.zoo.store.index import Index
from transformer_nfn.zoo.store.shards import ShardReader
from transformer_nfn.zoo.store.zoo import Zoo
from transformer_nfn.zoo.training.plan import check_configurations
from transformer_nfn.zoo.training.tasks import Task, TextTask, load_task

# Test samples by which a re-run may differ from the record. Networks built here were tested by
# this library: one sample on which two logits tie, either way.
BUILT_TOLERANCE = 2
# Imported networks were tested by other code on other hardware, and their files keep four
# truncated digits. Rounding products to TF32, as GPUs may, was measured to change up to 2 of
# MNIST's 10,000 samples; permuted entries of a weight matrix change thousands.
IMPORTED_TOLERANCE = 10


@dataclass
class Verdict:
    """Result of `verify`.

    Attributes:
        problems: messages; empty for a valid zoo.
        networks: number of rows whose bytes were checked.
        rerun: number of rows that were tested again.
        worst: the largest difference between a recorded and a re-run accuracy.
        worst_samples: the same in test samples.
        test_samples: number of test samples of a re-run.
        tolerance: allowed difference in test samples.
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
        """Whether there are no problems."""
        return not self.problems

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Context in which a damaged file is a problem, not an error."""
        try:
            yield
        except StoreError as error:
            self.problems.append(str(error))


def verify(
    path: Path | str,
    *,
    data: Path | None = None,
    sample: int = 8,
    seed: int = 0,
    tolerance: int | None = None,
) -> Verdict:
    """Check every byte of a zoo, then test a sample of its networks again.

    Networks of a zoo of checkpoints have no task here, and are not tested.

    Args:
        path: the zoo; of a mixed zoo every size group is verified.
        data: the folder of the task's files, for the test data; None fetches them.
        sample: number of networks to test (per size group); 0 for none.
        seed: of the sample.
        tolerance: test samples by which a network may differ from its record; None for
            `BUILT_TOLERANCE`, or `IMPORTED_TOLERANCE` for an imported zoo.

    >>> from transformer_nfn.io.location import Location
    >>> verdict = verify(Location.of("mnist-sample").folder("zoo"), sample=0)
    >>> verdict.ok, verdict.networks
    (True, 160)
    """
    if tolerance is not None and tolerance < 0:
        raise ZooError(f"tolerance must be at least 0 test samples, found {tolerance}")
    path = Path(path)
    if is_mixed(path):
        one = partial(verify, data=data, sample=sample, seed=seed, tolerance=tolerance)
        return _verify_groups(path, one)
    if not (path / "zoo.json").exists():
        raise StoreError(f"'{path}' is not a zoo: it has no zoo.json")
    verdict = Verdict()
    with verdict.reporting():
        if zoo_kind(path) == MODELS_KIND:
            zoo = Zoo.open(path)
            verdict.problems, verdict.networks = zoo.verify(), len(zoo)
            verdict.note = "not re-run: targets of your own are not measured here"
            return verdict
        folder = Folder.open(path)
        _check_files(folder, verdict)
        usual = {"import": IMPORTED_TOLERANCE}.get(folder.metadata["origin"], BUILT_TOLERANCE)
        verdict.tolerance = usual if tolerance is None else tolerance
        if verdict.ok and sample:
            _rerun(Zoo.of_folder(folder), data, sample, seed, verdict)
    return verdict


def _verify_groups(path: Path, verify_one: Callable[[Path], Verdict]) -> Verdict:
    """The combined verdict on all size groups of a mixed zoo."""
    total = Verdict()
    groups: tuple[SizeGroup, ...] = ()
    with total.reporting():
        _, groups = read_groups(path)
    for group in groups:
        one = verify_one(path / group.name)
        total.problems += [f"{group.name}: {problem}" for problem in one.problems]
        total.networks += one.networks
        total.rerun += one.rerun
        total.worst = max(total.worst, one.worst)
        total.worst_samples = max(total.worst_samples, one.worst_samples)
        total.test_samples = max(total.test_samples, one.test_samples)
        total.tolerance = one.tolerance
        total.note = total.note or one.note
    return total


def _check_files(folder: Folder, verdict: Verdict) -> None:
    """Check all files but ``zoo.json``, which was checked when the folder was opened."""
    index = folder.index()
    if folder.metadata["origin"] == "build":
        check_configurations(folder, index)
    with verdict.reporting():
        folder.word_vectors()
    for shard in folder.shards:
        with verdict.reporting():
            _check_shard(folder, shard, index, verdict)


def _check_shard(folder: Folder, shard: str, index: Index, verdict: Verdict) -> None:
    path = folder.shard_path(shard)
    if not path.exists():
        raise StoreError(f"{path}: missing, the zoo is not finished")
    reader = ShardReader(path, folder.sizes.row_layout, index.shards.get(shard))
    stored = folder.read_shard(shard).columns
    listed = index.columns["shard"] == shard
    for name in ("run", "epoch", "best", "crashed", "row", "checksum"):
        if shard in index.shards and not np.array_equal(stored[name], index.columns[name][listed]):
            raise StoreError(f"{path}: '{name}' of its rows is not that of {INDEX}")
    buffer = np.empty(folder.sizes.num_weights, reader.numpy_dtype)
    for row in np.flatnonzero(~stored["crashed"]):
        reader.read(int(stored["row"][row]), int(stored["checksum"][row]), buffer)
        verdict.networks += 1


def _rerun(zoo: Zoo, data: Path | None, sample: int, seed: int, verdict: Verdict) -> None:
    recorded = np.flatnonzero(~np.isnan(zoo.table["test_accuracy"].astype(float)))
    if zoo.metadata["origin"] == "import" and not zoo.sizes.patch:
        verdict.note = "not re-run: the authors' word vectors are not part of their files"
        return
    try:
        task = load_task(
            zoo.task,
            data,
            held=0.0,
            vectors=zoo.word_vectors(),
            group=zoo.sizes.group,
        )
    except ZooError as error:
        verdict.note = f"not re-run: {error}"
        return
    chosen = np.random.default_rng(seed).permutation(recorded)[:sample]
    verdict.test_samples = task.num_samples["test"]
    for row in chosen:
        accuracy = measure_accuracy(zoo, task, int(row))
        gap = abs(accuracy - float(zoo.table["test_accuracy"][row]))
        # Rounded, because accuracies in single precision are whole numbers of samples only nearly.
        samples = round(gap * verdict.test_samples, 2)
        verdict.worst = max(verdict.worst, gap)
        verdict.worst_samples = max(verdict.worst_samples, samples)
        verdict.rerun += 1
        if samples > verdict.tolerance:
            verdict.problems.append(
                f"run {zoo.table['run'][row]} epoch {zoo.table['epoch'][row]}: recorded test "
                f"accuracy {zoo.table['test_accuracy'][row]:.4f}, re-run {accuracy:.4f}, "
                f"{samples:g} samples apart"
            )


@torch.no_grad()
def measure_accuracy(zoo: Zoo, task: Task, row: int) -> float:
    """Test accuracy of one row, run as a plain module."""
    network = zoo.network(row)
    n = task.num_samples["test"]
    hits = 0
    # Text is padded within a batch and not masked, so the batches must be those of training.
    size = zoo.metadata["recipe"]["batch"] if isinstance(task, TextTask) else 500
    for start in range(0, n, size):
        index = torch.arange(start, min(start + size, n))
        batch = task.batch("test", index[None])
        logits = network(task.module_inputs(batch.inputs[0]))
        hits += int((logits.argmax(-1) == batch.labels[0]).sum())
    return hits / n
