"""Zoos as datasets: select rows, read their weights, run them; mixed zoos of several sizes."""

from __future__ import annotations

import base64
import json
import math
import operator
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn import __version__
from transformer_nfn.io.assets import resolve
from transformer_nfn.models import Network, network_of
from transformer_nfn.spaces import Weights, WeightSpace
from transformer_nfn.zoo.errors import StoreError, ZooError
from transformer_nfn.zoo.module import SmallTransformer, load_network
from transformer_nfn.zoo.sizes import Kind
from transformer_nfn.zoo.store.folder import KINDS_FILE, Checksums, Folder, WordVectors, read_about
from transformer_nfn.zoo.store.shards import ShardReader

Item = tuple[Weights, Tensor]
"""The weights of one network, ``[*axes]`` each, and its test accuracy, a scalar."""
Rows = Sequence[int] | np.ndarray | Tensor
# An open shard costs a file handle, and systems allow about a thousand.
OPEN_SHARDS = 256
# Networks read at once by a loop over a zoo.
ITERATED = 64
# Batches the disk is asked for before they are needed.
FETCH_AHEAD = 4


class Zoo:
    """A zoo on disk. Rows are numbered as in `table`; crashed runs have none.

    Attributes:
        path: the folder.
        about: what ``zoo.json`` says.
        table: the index as columns (NumPy arrays), a row a checkpoint.
        crashed: the run ids that gave no checkpoint.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.path = folder.path
        self.about = folder.about
        self.arch = folder.arch
        index = folder.index()
        alive = ~index.columns["crashed"].astype(bool)
        self.table: dict[str, np.ndarray] = {k: v[alive] for k, v in index.columns.items()}
        self.crashed: list[str] = sorted(index.columns["run"][~alive].tolist())
        self._headers = index.shards
        self._readers: OrderedDict[str, ShardReader] = OrderedDict()

    @staticmethod
    def open(path: Path | str) -> Zoo:
        """Opens a zoo, finished or still being built; reads the index, no weights.

        Args:
            path: its folder, or its name (`tnfn assets` lists them).
        """
        return Zoo(Folder.open(resolve(path, "zoo")))

    def __len__(self) -> int:
        return len(self.table["run"])

    def __repr__(self) -> str:
        runs = len(set(self.table["run"].tolist()))
        state = "" if self.finished else ", not finished"
        return (
            f"Zoo('{self.path}', {self.about['task']['name']}, {len(self):,} networks of "
            f"{runs:,} runs, {self.space.num_weights:,} weights each{state})"
        )

    def __getitem__(self, row: int) -> Item:
        """One network ``[*axes]`` and its test accuracy, as a `DataLoader` takes them.

        Rows count from the end where they are negative; `network` makes a module of one.
        """
        at = operator.index(row)
        if not -len(self) <= at < len(self):
            raise IndexError(f"row {at} asked of a zoo with {len(self)} rows")
        return self.__getitems__([at % len(self)])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Item]:
        """Several at once, which is how a `DataLoader` asks."""
        named = self.weights(rows)
        accuracies = self.table["test_accuracy"][np.asarray(rows, dtype=np.int64)]
        return [
            ({name: w[i] for name, w in named.items()}, torch.tensor(accuracy))
            for i, accuracy in enumerate(accuracies.astype(np.float32).tolist())
        ]

    def __iter__(self) -> Iterator[Item]:
        """All networks with their accuracies, in the order of the rows."""
        for start in range(0, len(self), ITERATED):
            yield from self.__getitems__(range(start, min(start + ITERATED, len(self))))

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs, such as a worker of a `DataLoader`: not the open files."""
        return {**vars(self), "_readers": OrderedDict()}

    @property
    def space(self) -> WeightSpace:
        """The weight space of the whole network; `weights` lie in it."""
        return self.arch.space

    @property
    def block_space(self) -> WeightSpace:
        """The weight space of one block, the paper's U."""
        return self.arch.block_space

    @property
    def seeds(self) -> str:
        """``one`` if all runs share a seed, ``each`` if every run has its own, ``unknown``."""
        return self._folder.seeds

    @property
    def finished(self) -> bool:
        """Whether every shard of the plan is there."""
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
        """The numbers of the rows that fit, ``int64``.

        Args:
            epoch: checkpoints of this epoch. With ``epoch`` or ``percent`` and no ``best``,
                rows kept only for being best are left out.
            percent: checkpoints at 50, 75 or 100 percent of the training. Of few epochs one
                checkpoint may stand for several: the third of three is that at 75 and at 100.
            best: only rows that are (are not) the run's best.
            min_accuracy: test accuracy at least this.
            max_accuracy: test accuracy at most this.
            optimizer: only runs of this optimiser.
            runs: only these runs.
        """
        t = self.table
        fits = np.ones(len(self), dtype=bool)
        if best is None and (epoch is not None or percent is not None):
            best = False
        if percent is not None:
            fits &= self._at_percent(percent)
        for column, value in (
            ("epoch", epoch),
            ("best", best),
            ("optimizer", optimizer),
        ):
            if value is not None:
                fits &= t[column] == value
        if min_accuracy is not None:
            fits &= t["test_accuracy"] >= min_accuracy
        if max_accuracy is not None:
            fits &= t["test_accuracy"] <= max_accuracy
        if runs is not None:
            fits &= np.isin(t["run"].astype(str), np.array(list(runs), dtype=str))
        return np.flatnonzero(fits)

    def _at_percent(self, percent: int) -> np.ndarray:
        """Which rows are the checkpoint at so many percent of their run."""
        labels = self.table["percent"]
        recipe = self.about.get("recipe", {})
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
        """Parts ``rows`` by run, so that no run has checkpoints on two sides.

        Args:
            rows: what to part; None for every row.
            fractions: the share of the runs in each part; they add up to 1.
            seed: another seed parts otherwise.
        """
        if any(f < 0 for f in fractions) or abs(sum(fractions) - 1) > 1e-6:
            raise ZooError(f"split fractions must add up to 1, found {list(fractions)}")
        chosen = self._rows(np.arange(len(self)) if rows is None else rows)
        runs, which = np.unique(self.table["run"][chosen].astype(str), return_inverse=True)
        place = np.random.default_rng(seed).permutation(len(runs))
        edges = np.rint(np.cumsum([0.0, *fractions]) * len(runs)).astype(int)
        side = np.searchsorted(edges, place[which], side="right") - 1
        return [chosen[side == i] for i in range(len(fractions))]

    def weights(self, rows: Rows) -> Weights:
        """The weights of some rows, ``[n, *axes]`` a tensor of `space`, each row checked."""
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
        """The readers of some rows, whose pages the system now begins to fetch."""
        readers = [self._reader(shard) for shard in self.table["shard"][rows]]
        for reader, row in zip(readers, self.table["row"][rows].tolist(), strict=True):
            reader.will_need(row)
        return readers

    def batch(self, rows: Rows) -> Network:
        """The same in parts and in float32, as models read them; blocks are ``[n, 1, *axes]``."""
        return network_of({name: w.float() for name, w in self.weights(rows).items()})

    def batches(
        self, rows: Rows | None = None, size: int = 16, *, seed: int | None = None
    ) -> Iterator[tuple[np.ndarray, Weights]]:
        """Row numbers and weights, ``size`` at a time; shuffled if a seed is given."""
        chosen = self._rows(np.arange(len(self)) if rows is None else rows)
        if seed is not None:
            chosen = np.random.default_rng(seed).permutation(chosen)
        parts = [chosen[start : start + size] for start in range(0, len(chosen), size)]
        # While one batch is used, the disk fetches the next ones.
        coming: deque[list[ShardReader]] = deque()
        for i, part in enumerate(parts):
            while len(coming) <= FETCH_AHEAD and i + len(coming) < len(parts):
                coming.append(self._fetch(parts[i + len(coming)]))
            yield part, self._read(part, coming.popleft())

    def network(self, row: int) -> SmallTransformer:
        """One row as a runnable module, in evaluation mode."""
        named = self.weights([row])
        network = load_network(self.arch, {name: w[0] for name, w in named.items()})
        network.embedding.pos_embedding = self.positions()
        return network

    def positions(self) -> Tensor:
        """The fixed positions ``[tokens, d_model]``; an imported zoo keeps its files' own."""
        kept = self.about.get("positions")
        if kept is None:
            return self.arch.positions()
        table = np.frombuffer(base64.b64decode(kept), dtype=np.float32)
        return torch.from_numpy(table.copy()).view(self.arch.tokens, self.arch.d_model)

    def config(self, row: int) -> dict[str, Any]:
        """Everything the index says of one row, as plain values."""
        (row,) = self._rows([row])
        values = {name: column[row] for name, column in self.table.items()}
        return {k: v.item() if isinstance(v, np.generic) else v for k, v in values.items()}

    def word_vectors(self) -> WordVectors | None:
        """The word vectors stored with a text zoo."""
        return self._folder.word_vectors()

    def _rows(self, rows: Rows) -> np.ndarray:
        chosen = np.asarray(rows)
        if chosen.dtype == bool:
            chosen = np.flatnonzero(chosen)
        chosen = chosen.astype(np.int64).reshape(-1)
        bad = chosen[(chosen < 0) | (chosen >= len(self))]
        if len(bad):
            raise ZooError(f"row {bad[0]} asked of a zoo with {len(self)} rows")
        return chosen

    def _reader(self, shard: str) -> ShardReader:
        reader = self._readers.get(shard)
        if reader is None:
            path = self._folder.shard_path(shard)
            if not path.exists():
                raise StoreError(f"{path}: missing, though the index names it")
            reader = ShardReader(path, self.arch, self._headers[shard])
            self._readers[shard] = reader
            if len(self._readers) > OPEN_SHARDS:
                self._readers.popitem(last=False)
        self._readers.move_to_end(shard)
        return reader


FORMAT = 1
KIND = "transformer-nfn mixed zoo"


class MixedZoo:
    """Zoos of one task whose networks differ in width, heads or depth.

    Attributes:
        path: the folder; every kind's zoo lies in it under the kind's name.
        about: what ``kinds.json`` says.
        zoos: the zoos by the name of their kind, such as ``w16-h2-d1``; while a mixed zoo is
            being built, those that have been begun.
    """

    def __init__(self, path: Path, about: dict[str, Any], kinds: Sequence[Kind]) -> None:
        self.path, self.about, self.kinds = path, about, tuple(kinds)
        self.zoos = {
            kind.name: _open_kind(path / kind.name, kind)
            for kind in self.kinds
            if (path / kind.name / "zoo.json").is_file()
        }

    @staticmethod
    def open(path: Path | str) -> MixedZoo:
        """Opens a mixed zoo, finished or still being built; reads indices, no weights."""
        path = Path(path)
        about = read_kinds(path)
        return MixedZoo(path, about, kinds_in(path, about))

    def __len__(self) -> int:
        """Networks of all kinds together."""
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

    @property
    def task(self) -> str:
        """The name of the task that all networks are trained on."""
        return str(self.about["task"])

    @property
    def rows(self) -> dict[str, int]:
        """How many networks there are of each kind."""
        return {name: len(zoo) for name, zoo in self.zoos.items()}

    @property
    def seeds(self) -> str:
        """``one`` if all runs of a kind share a seed, ``each`` if every run has its own."""
        return str(self.about["seeds"])

    @property
    def finished(self) -> bool:
        """Whether every kind is there and every shard of it."""
        return len(self.zoos) == len(self.kinds) and all(zoo.finished for zoo in self)


def open_zoo(path: Path | str) -> Zoo | MixedZoo:
    """Opens a zoo of one kind or a mixed one, whichever lies there."""
    return MixedZoo.open(path) if is_mixed(path) else Zoo.open(path)


def is_mixed(path: Path | str) -> bool:
    """Whether a folder says that it is a mixed zoo."""
    return (Path(path) / KINDS_FILE).is_file()


def write_kinds(path: Path, kinds: Sequence[Kind], about: dict[str, Any]) -> None:
    """Writes ``kinds.json``."""
    whole = {
        "format": FORMAT,
        "kind": KIND,
        "made_by": f"transformer-nfn {__version__}",
        **about,
        "kinds": [kind.name for kind in kinds],
    }
    Checksums(path).replace(KINDS_FILE, json.dumps(whole, indent=1).encode())


def read_kinds(path: Path) -> dict[str, Any]:
    """What ``kinds.json`` says, checked; refuses what is no mixed zoo, or a newer one."""
    if not is_mixed(path):
        raise StoreError(f"'{path}' is not a mixed zoo: it has no {KINDS_FILE}")
    return read_about(path / KINDS_FILE, KIND, FORMAT, "a mixed zoo")


def kinds_in(path: Path, about: dict[str, Any]) -> tuple[Kind, ...]:
    """The kinds that ``kinds.json`` names, in its order."""
    names = about.get("kinds")
    if not isinstance(names, list) or not names:
        raise StoreError(f"{path / KINDS_FILE}: expected a list of kinds, found {names!r}")
    try:
        return tuple(Kind.named(str(name)) for name in names)
    except ZooError as error:
        raise StoreError(f"{path / KINDS_FILE}: {error}") from error


def _open_kind(path: Path, kind: Kind) -> Zoo:
    zoo = Zoo.open(path)
    if zoo.arch.kind != kind:
        raise StoreError(f"'{path}' holds networks of {zoo.arch.kind}, expected {kind}")
    return zoo
