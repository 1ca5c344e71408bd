"""Zoos as datasets: select rows, read and run their networks; mixed zoos of several sizes."""

from __future__ import annotations

import base64
import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.io.json_fields import Fields
from transformer_nfn.io.location import Location
from transformer_nfn.known_tasks import SEED_KINDS, TASKS, UNKNOWN_SEEDS, seeds_text
from transformer_nfn.models import Network, network_of
from transformer_nfn.notebook import to_html
from transformer_nfn.spaces import Weights, WeightSpace
from transformer_nfn.zoo.errors import StoreError, ZooError
from transformer_nfn.zoo.module import SmallTransformer, load_network
from transformer_nfn.zoo.sizes import SizeGroup
from transformer_nfn.zoo.store.folder import (
    GROUPS_FILE,
    MODELS_KIND,
    Checksums,
    Folder,
    WordVectors,
    zoo_kind,
)
from transformer_nfn.zoo.store.index import COLUMNS, IndexedRows, Rows, split_rows, to_frame
from transformer_nfn.zoo.store.model_zoo import ModelZoo
from transformer_nfn.zoo.store.shards import ShardReader

if TYPE_CHECKING:
    import pandas as pd

Item = tuple[Weights, Tensor]
"""The weights of one network, ``[*axes]`` each, and its test accuracy, a scalar."""
# An open shard costs a file handle, and systems allow about a thousand.
OPEN_SHARDS = 256
# Networks that iterating over a zoo reads at once.
ITERATED = 64
# Batches prefetched from disk.
FETCH_AHEAD = 4


class Zoo(IndexedRows):
    """A zoo on disk, as a map-style dataset of networks. Crashed runs have no rows.

    Attributes:
        path: the folder.
        metadata: the content of ``zoo.json``.
        sizes: sizes of every network.
        table: the index as columns (NumPy arrays), one row per checkpoint.
        crashed: ids of the runs without a checkpoint.

    >>> zoo = Zoo.open("mnist-sample")
    >>> len(zoo), zoo.space.num_weights
    (160, 18506)
    >>> rows = zoo.select(optimizer="adam", min_accuracy=0.9)
    >>> zoo.weights(rows[:2])["blocks.0.W_Q"].shape
    torch.Size([2, 2, 32, 16])
    >>> zoo.network(rows[0])(torch.zeros(1, 1, 28, 28)).shape
    torch.Size([1, 10])
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.path = folder.path
        self.metadata = folder.metadata
        self.sizes = folder.sizes
        index = folder.index()
        alive = ~index.columns["crashed"].astype(bool)
        self.table: dict[str, np.ndarray] = {k: v[alive] for k, v in index.columns.items()}
        self.crashed: list[str] = sorted(index.columns["run"][~alive].tolist())
        self._headers = index.shards
        self._readers: OrderedDict[str, ShardReader] = OrderedDict()

    @staticmethod
    def open(path: Path | str) -> Zoo:
        """Open a zoo, finished or not, by its folder or asset name; reads no weights."""
        return Zoo(Folder.open(Location.of(path).folder("zoo")))

    def __repr__(self) -> str:
        runs = len(set(self.table["run"].tolist()))
        state = "" if self.finished else ", not finished"
        return (
            f"Zoo('{self.path}', {self.task}, {len(self):,} networks of "
            f"{runs:,} runs, {self.space.num_weights:,} weights each{state})"
        )

    def _repr_html_(self) -> str:
        """What notebooks show."""
        accuracy = self.table["test_accuracy"]
        known = accuracy[~np.isnan(accuracy)]
        spread = f"{known.min():.1%} to {known.max():.1%}" if len(known) else "unknown"
        facts = {
            "task": self.task,
            "networks": f"{len(self):,}{'' if self.finished else ', not finished'}",
            "weights of each": f"{self.space.num_weights:,}",
            "seeds": seeds_text(self.seeds),
            "test accuracy": spread,
        }
        return to_html(f"Zoo {self.path}", facts)

    def __getitem__(self, row: int) -> Item:
        """One network ``[*axes]`` and its test accuracy, as a `DataLoader` takes them."""
        return self.__getitems__([self._at(row)])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Item]:
        """Several rows at once, as a `DataLoader` reads them."""
        named = self.weights(rows)
        accuracies = self.table["test_accuracy"][np.asarray(rows, dtype=np.int64)]
        return [
            ({name: w[i] for name, w in named.items()}, torch.tensor(accuracy))
            for i, accuracy in enumerate(accuracies.astype(np.float32).tolist())
        ]

    def __iter__(self) -> Iterator[Item]:
        """All networks with their accuracies, in row order."""
        for start in range(0, len(self), ITERATED):
            yield from self.__getitems__(range(start, min(start + ITERATED, len(self))))

    def __getstate__(self) -> dict[str, Any]:
        """State for another process, such as a `DataLoader` worker: without open files."""
        return {**vars(self), "_readers": OrderedDict()}

    @property
    def space(self) -> WeightSpace:
        """The weight space of the networks."""
        return self.sizes.space

    @property
    def block_space(self) -> WeightSpace:
        """The weight space of one block, the paper's U."""
        return self.sizes.block_space

    @property
    def task(self) -> str:
        """The name of the task."""
        return str(self.metadata["task"]["name"])

    @property
    def runs(self) -> np.ndarray:
        """The run of each network."""
        return self.table["run"].astype(str)

    @property
    def seeds(self) -> str:
        """``one`` if all runs share a seed, ``each`` if every run has its own, ``unknown``."""
        return self._folder.seeds

    @property
    def finished(self) -> bool:
        """Whether all shards are on disk."""
        return len(self._headers) == len(self._folder.shards)

    def select(
        self,
        *,
        epoch: int | None = None,
        percent: int | None = None,
        best: bool | None = None,
        min_accuracy: float | None = None,
        max_accuracy: float | None = None,
        optimizer: str | None = None,
        runs: Sequence[str] | None = None,
    ) -> np.ndarray:
        """Numbers of the matching rows, ``int64``.

        Args:
            epoch: checkpoints of this epoch. With ``epoch`` or ``percent`` and without ``best``,
                rows stored only as a run's best are left out.
            percent: checkpoints at 50, 75 or 100 percent of the training. In short trainings
                one checkpoint counts as several: of three epochs the last is at 75 and 100.
            best: only rows that are (are not) the best of their run.
            min_accuracy: minimum test accuracy.
            max_accuracy: maximum test accuracy.
            optimizer: only runs of this optimiser.
            runs: only these runs.
        """
        t = self.table
        match = np.ones(len(self), dtype=bool)
        if best is None and (epoch is not None or percent is not None):
            best = False
        if percent is not None:
            match &= self._at_percent(percent)
        for column, value in (
            ("epoch", epoch),
            ("best", best),
            ("optimizer", optimizer),
        ):
            if value is not None:
                match &= t[column] == value
        if min_accuracy is not None:
            match &= t["test_accuracy"] >= min_accuracy
        if max_accuracy is not None:
            match &= t["test_accuracy"] <= max_accuracy
        if runs is not None:
            match &= np.isin(t["run"].astype(str), np.array(list(runs), dtype=str))
        return np.flatnonzero(match)

    def _at_percent(self, percent: int) -> np.ndarray:
        """Which rows are the checkpoint at ``percent`` of their run."""
        labels = self.table["percent"]
        recipe = self.metadata.get("recipe", {})
        if "epochs" not in recipe or percent not in recipe.get("percents", ()):
            return np.asarray(labels == percent)
        epoch = max(1, math.ceil(recipe["epochs"] * percent / 100))
        return np.asarray((self.table["epoch"] == epoch) & (labels > 0))

    def split(
        self,
        rows: Rows | None = None,
        fractions: Sequence[float] = (0.7, 0.15, 0.15),
        seed: int = 0,
    ) -> list[np.ndarray]:
        """Split rows by run, so that no run has checkpoints in two parts.

        Args:
            rows: the rows to split; None for all.
            fractions: the share of the runs in each part; they add up to 1.
            seed: of the random split.
        """
        chosen = self._rows(rows)
        return split_rows(chosen, self.runs[chosen], fractions, seed)

    def weights(self, rows: Rows) -> Weights:
        """Weights of some rows, ``[n, *axes]`` per tensor of `space`, each row verified."""
        chosen = self._rows(rows)
        return self._read(chosen, self._fetch(chosen))

    def _read(self, chosen: np.ndarray, readers: list[ShardReader]) -> Weights:
        at, sums = self.table["row"][chosen].tolist(), self.table["checksum"][chosen].tolist()
        dtype = readers[0].dtype if readers else torch.float32
        flat = torch.empty(len(chosen), self.space.num_weights, dtype=dtype)
        rows_out = flat.numpy()
        for i, reader in enumerate(readers):
            reader.read(at[i], sums[i], rows_out[i])
        shapes = self.space.shapes
        parts = flat.split([math.prod(shape) for shape in shapes.values()], dim=1)
        return {
            name: part.unflatten(1, shape).contiguous()
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    def _fetch(self, rows: np.ndarray) -> list[ShardReader]:
        """The readers of some rows, whose pages are being prefetched."""
        readers = [self._reader(shard) for shard in self.table["shard"][rows]]
        for reader, row in zip(readers, self.table["row"][rows].tolist(), strict=True):
            reader.prefetch(row)
        return readers

    def batch(self, rows: Rows) -> Network:
        """Rows in parts and in float32, the input of models; blocks are ``[n, 1, *axes]``."""
        return network_of({name: w.float() for name, w in self.weights(rows).items()})

    def batches(
        self, rows: Rows | None = None, size: int = 16
    ) -> Iterator[tuple[np.ndarray, Weights]]:
        """Row numbers and weights, ``size`` at a time."""
        chosen = self._rows(rows)
        parts = [chosen[start : start + size] for start in range(0, len(chosen), size)]
        # While one batch is used, the next ones are prefetched.
        prefetched: deque[list[ShardReader]] = deque()
        for i, part in enumerate(parts):
            while len(prefetched) <= FETCH_AHEAD and i + len(prefetched) < len(parts):
                prefetched.append(self._fetch(parts[i + len(prefetched)]))
            yield part, self._read(part, prefetched.popleft())

    def network(self, row: int) -> SmallTransformer:
        """One row as a runnable module, in evaluation mode."""
        named = self.weights([row])
        network = load_network(self.sizes, {name: w[0] for name, w in named.items()})
        network.embedding.pos_embedding = self.positions()
        return network

    def positions(self) -> Tensor:
        """The fixed positions ``[tokens, d_model]``; an imported zoo stores those of its files."""
        stored = self.metadata.get("positions")
        if stored is None:
            return self.sizes.positions()
        table = np.frombuffer(base64.b64decode(stored), dtype=np.float32)
        return torch.from_numpy(table.copy()).view(self.sizes.tokens, self.sizes.d_model)

    def word_vectors(self) -> WordVectors | None:
        """The word vectors of a text zoo."""
        return self._folder.word_vectors()

    def _reader(self, shard: str) -> ShardReader:
        reader = self._readers.get(shard)
        if reader is None:
            path = self._folder.shard_path(shard)
            if not path.exists():
                raise StoreError(f"{path}: missing, but the index lists it")
            reader = ShardReader(path, self.sizes, self._headers[shard])
            self._readers[shard] = reader
            if len(self._readers) > OPEN_SHARDS:
                self._readers.popitem(last=False)
        self._readers.move_to_end(shard)
        return reader


GROUPS_KIND = "transformer-nfn mixed zoo"


class MixedZoo:
    """Zoos of one task whose networks differ in width, heads or depth.

    Attributes:
        path: the folder; each size group has a zoo in the subfolder of its name.
        metadata: the content of ``kinds.json``.
        groups: all size groups.
        zoos: zoos by the name of their size group, such as ``w16-h2-d1``; during a build, those
            that exist already.

    >>> from tempfile import mkdtemp
    >>> write_groups(Path(folder := mkdtemp()), [SizeGroup(16)], {"task": "digits", "seeds": "one"})
    >>> mixed = MixedZoo.open(folder)
    >>> len(mixed), mixed.task, mixed.finished
    (0, 'digits', False)
    """

    def __init__(
        self, path: Path, metadata: dict[str, Any], groups: Sequence[SizeGroup]
    ) -> None:
        self.path, self.metadata, self.groups = path, metadata, tuple(groups)
        self.zoos = {
            group.name: _open_group(path / group.name, group, self.task)
            for group in self.groups
            if (path / group.name / "zoo.json").is_file()
        }

    @staticmethod
    def open(path: Path | str) -> MixedZoo:
        """Open a mixed zoo, finished or not; reads no weights."""
        path = Path(path)
        return MixedZoo(path, *read_groups(path))

    def __len__(self) -> int:
        return sum(len(zoo) for zoo in self)

    def __iter__(self) -> Iterator[Zoo]:
        return iter(self.zoos.values())

    def __getitem__(self, name: str) -> Zoo:
        if name not in self.zoos:
            raise ZooError(
                f"'{self.path}' has no networks of the kind '{name}': it has "
                f"{', '.join(self.zoos) or 'none yet'}"
            )
        return self.zoos[name]

    def __repr__(self) -> str:
        return f"MixedZoo('{self.path}': {len(self):,} networks of {len(self.zoos)} kinds)"

    def _repr_html_(self) -> str:
        """What notebooks show."""
        return to_html(
            f"MixedZoo {self.path}: {self.task}", {k: f"{n:,}" for k, n in self.rows.items()}
        )

    def to_pandas(self) -> pd.DataFrame:
        """The indices of all zoos as a data frame, with their ``kind``; needs ``pandas``."""
        kinds = np.repeat(np.array(list(self.zoos), dtype=object), list(self.rows.values()))
        columns = {
            name: np.concatenate([np.array([]), *(zoo.table[name] for zoo in self)])
            for name in COLUMNS
        }
        return to_frame({"kind": kinds, **columns})

    @property
    def task(self) -> str:
        """The name of the task."""
        return str(self.metadata["task"])

    @property
    def rows(self) -> dict[str, int]:
        """Number of networks of each size group."""
        return {name: len(zoo) for name, zoo in self.zoos.items()}

    @property
    def seeds(self) -> str:
        """``one`` if all runs of a size group share a seed, ``each`` if every run has its own."""
        return str(self.metadata["seeds"])

    @property
    def finished(self) -> bool:
        """Whether all shards of all size groups are on disk."""
        return len(self.zoos) == len(self.groups) and all(zoo.finished for zoo in self)


def open_zoo(path: Path | str) -> Zoo | MixedZoo | ModelZoo:
    """Open a zoo of any kind, by its path or name.

    >>> len(open_zoo("mnist-sample"))
    160
    """
    path = Location.of(path).folder("zoo")
    return ModelZoo.open(path) if zoo_kind(path) == MODELS_KIND else open_task_zoo(path)


def open_task_zoo(path: Path | str) -> Zoo | MixedZoo:
    """Open a zoo, or a mixed zoo, of small transformers that were trained for one task.

    >>> open_task_zoo("mnist-sample").seeds
    'each'
    """
    return MixedZoo.open(path) if is_mixed(path) else Zoo.open(path)


def is_mixed(path: Path | str) -> bool:
    """Whether a folder is marked as a mixed zoo."""
    return (Path(path) / GROUPS_FILE).is_file()


def write_groups(path: Path, groups: Sequence[SizeGroup], fields: dict[str, Any]) -> None:
    """Write ``kinds.json``, which marks a folder as a mixed zoo."""
    names = [group.name for group in groups]
    Checksums(path).write_metadata(GROUPS_FILE, GROUPS_KIND, {**fields, "kinds": names})


def read_groups(path: Path) -> tuple[dict[str, Any], tuple[SizeGroup, ...]]:
    """Read and validate ``kinds.json``: its content and the size groups it lists."""
    if not is_mixed(path):
        raise StoreError(f"'{path}' is not a mixed zoo: it has no {GROUPS_FILE}")
    fields = Checksums(path).read_metadata(GROUPS_FILE, GROUPS_KIND)
    fields.choice("task", TASKS)
    fields.choice("seeds", (*SEED_KINDS, UNKNOWN_SEEDS))
    names = fields.each("kinds", Fields.text)
    if not names or len(set(names)) < len(names):
        fields.refuse("kinds", "names of zoos, each once")
    try:
        return dict(fields.data), tuple(map(SizeGroup.from_name, names))
    except ZooError as error:
        raise StoreError(f"'{path / GROUPS_FILE}': 'kinds': {error}") from error


def _open_group(path: Path, group: SizeGroup, task: str) -> Zoo:
    zoo = Zoo.open(path)
    if zoo.sizes.group != group:
        raise StoreError(f"'{path}' holds networks of {zoo.sizes.group}, expected {group}")
    if zoo.task != task:
        raise StoreError(
            f"'{path.parent / GROUPS_FILE}': 'task' expected {zoo.metadata['task']['name']}, that "
            f"of '{path.name}', found {task}"
        )
    return zoo
