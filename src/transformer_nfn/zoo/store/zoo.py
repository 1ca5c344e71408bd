"""A zoo: a table with a row for each network, and the storage of their weights."""

from __future__ import annotations

import base64
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.checkpoints.families import Model, OpenOptions, read_model
from transformer_nfn.functional.zoo_network import NAME
from transformer_nfn.io.checkpoint import Checkpoint
from transformer_nfn.io.location import Location
from transformer_nfn.io.tensor_files import InMemory
from transformer_nfn.known_tasks import UNKNOWN_SEEDS, seeds_text
from transformer_nfn.models import Batch, RowLayout
from transformer_nfn.models.predictor import ARRAYS, BUILT, CHECKPOINTS
from transformer_nfn.notebook import to_html
from transformer_nfn.spaces import Weights, WeightSpace
from transformer_nfn.zoo.errors import StoreError, ZooError
from transformer_nfn.zoo.module import SmallTransformer, load_network
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.store.arrays import array_layout, as_rows, write_arrays
from transformer_nfn.zoo.store.checkpoints import Checkpoints, Source, opened, plain_name
from transformer_nfn.zoo.store.dataset import ZooDataset
from transformer_nfn.zoo.store.folder import (
    GROUPS_FILE,
    INDEX,
    MODELS_KIND,
    Checksums,
    Folder,
    WordVectors,
    check_fresh,
    check_outside_zoos,
    claim,
    read_groups,
    zoo_kind,
)
from transformer_nfn.zoo.store.index import (
    IndexedRows,
    Rows,
    read_table,
    split_rows,
    table_bytes,
)
from transformer_nfn.zoo.store.packed import PackedRows
from transformer_nfn.zoo.store.shards import DTYPES
from transformer_nfn.zoo.targets import (
    ARRAY_COLUMNS,
    RESERVED,
    TEST_ACCURACY,
    Value,
    as_column,
    check_targets,
    plain_targets,
    read_frame,
)

if TYPE_CHECKING:
    import pandas as pd

# Batches prefetched from disk.
FETCH_AHEAD = 4
SAVE_EVERY = 5.0
"""Seconds between writes of the index."""
RUN = "run"
"""Target whose equal values are checkpoints of one training."""
SPACE_KEY = "transformer_nfn.space"
"""Metadata of a file that holds the weight space of its network."""
SHARD_BYTES = 1 << 28
"""Numbers of arrays are stored in shards of this size."""


class Zoo(IndexedRows):
    """A zoo on disk: a row for each network in a table, and their weights.

    A zoo that `tnfn zoo build` made holds networks of one size for one task, or of several; its
    table says how they were trained. In a zoo of a user, networks have a name and targets, and are
    checkpoints of any family or arrays of one layout. Crashed runs have no rows.

    Attributes:
        path: the folder.
        metadata: the content of ``zoo.json``, or of the file that lists the sizes.
        table: the index as columns (NumPy arrays), one row per network.
        storage: of the weights; None where the sizes have a zoo each.
        parts: the zoo of each size by name; this zoo itself where there is one size.
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

    def __init__(
        self,
        path: Path,
        metadata: dict[str, Any],
        table: dict[str, np.ndarray],
        storage: PackedRows | Checkpoints | None = None,
        *,
        folder: Folder | None = None,
        parts: Mapping[str, Zoo] | None = None,
    ) -> None:
        self.path, self.metadata, self.storage = path, metadata, storage
        self.table = table
        self._folder, self._parts = folder, parts
        self.crashed: list[str] = []

    @staticmethod
    def open(path: Path | str) -> Zoo:
        """Open a zoo, finished or not, by its folder or asset name; reads no weights."""
        path = Location.of(path).folder("zoo")
        if (path / GROUPS_FILE).is_file():
            return _open_sizes(path)
        if zoo_kind(path) == MODELS_KIND:
            return _open_named(path)
        return Zoo.of_folder(Folder.open(path))

    @staticmethod
    def of_folder(folder: Folder) -> Zoo:
        """A zoo of networks that were trained here, of one size."""
        index = folder.index()
        alive = ~index.columns["crashed"].astype(bool)
        table: dict[str, np.ndarray] = {k: v[alive] for k, v in index.columns.items()}
        rows = PackedRows(folder.path, folder.sizes.row_layout, index.shards, table)
        zoo = Zoo(folder.path, folder.metadata, table, rows, folder=folder)
        zoo.crashed = sorted(index.columns["run"][~alive].tolist())
        return zoo

    @staticmethod
    def create(path: Path | str) -> Zoo:
        """A zoo of checkpoints in a new or empty folder, or the one that is there.

        >>> from transformer_nfn.testing import write_example_checkpoint
        >>> zoo = Zoo.create("zoos/mine")
        >>> for seed, loss in enumerate([3.1, 2.9]):
        ...     row = zoo.add(write_example_checkpoint(f"llama-{seed}", seed), loss=loss, run="a")
        >>> len(zoo), zoo.targets["loss"].tolist()
        (2, [3.1, 2.9])
        >>> with zoo.model(1) as model:
        ...     model.description.family, model.path.name
        ('llama', '00001')
        """
        path = Path(path)
        try:
            check_outside_zoos(path)
            check_fresh(path)
        except StoreError:
            if zoo_kind(path) != MODELS_KIND:  # else it is there already
                raise
        with claim(path, "index", wait=True):
            if zoo_kind(path) != MODELS_KIND:
                empty = {name: np.array([], dtype=object) for name in RESERVED}
                Checksums(path).replace(INDEX, table_bytes(empty))
                Checksums(path).write_metadata("zoo.json", MODELS_KIND, {"origin": "import"})
        return Zoo.open(path)

    @staticmethod
    def from_arrays(
        path: Path | str,
        weights: np.ndarray | Tensor,
        layout: Mapping[str, Sequence[int]],
        table: pd.DataFrame | Mapping[str, Sequence[Any]] | str | Path | None = None,
        *,
        skip: bool = False,
    ) -> Zoo:
        """Make a zoo of networks of any kind from an array of their weights.

        Args:
            path: a new or empty folder.
            weights: a row of numbers for each network, ``[n, W]``; float16 stays, all else becomes
                float32.
            layout: names and shapes of the tensors in a row, in order.
            table: a line for each network, in order: targets, and perhaps a column ``network`` of
                names and a column ``run``; a data frame, columns by name, or a file of a table.
                Missing values are allowed.
            skip: leave out networks whose weights are not finite, instead of refusing them.

        >>> W = np.random.default_rng(0).normal(size=(20, 14))
        >>> zoo = Zoo.from_arrays("cnns", W, {"conv": (3, 4), "bias": (2,)}, {"loss": range(20)})
        >>> zoo.weights([3])["conv"].shape, zoo.targets["loss"].tolist()[3]
        (torch.Size([1, 3, 4]), 3)
        """
        write_arrays(Path(path), as_rows(weights), array_layout(layout), table, skip=skip)
        return Zoo.open(path)

    def __repr__(self) -> str:
        facts = f"{len(self):,} networks"
        if self.named:
            of = ", ".join(self.families) if self.layout is None else f"{self.layout.width} weights"
            targets = ", ".join(self.targets) or "none"
            return f"Zoo('{self.path}', {facts}: {of or 'none yet'}; targets: {targets})"
        if self.mixed:
            return f"Zoo('{self.path}', {self.task}, {facts} of {len(self.parts)} sizes)"
        runs = len(set(self.table["run"].tolist()))
        state = "" if self.finished else ", not finished"
        return (
            f"Zoo('{self.path}', {self.task}, {facts} of {runs:,} runs, "
            f"{self.space.num_weights:,} weights each{state})"
        )

    def _repr_html_(self) -> str:
        """What notebooks show."""
        facts = {"networks": f"{len(self):,}{'' if self.finished else ', not finished'}"}
        if self.named:
            families = Counter(self.table.get("family", np.array([])).tolist())
            facts |= {name: str(n) for name, n in families.items()}
            return to_html(f"Zoo {self.path}", {**facts, "targets": ", ".join(self.targets)})
        if self.mixed:
            facts |= {name: f"{len(part):,}" for name, part in self.parts.items()}
            return to_html(f"Zoo {self.path}", {"task": self.task, **facts})
        accuracy = self.table[TEST_ACCURACY]
        known = accuracy[~np.isnan(accuracy)]
        facts |= {
            "task": self.task,
            "weights of each": f"{self.space.num_weights:,}",
            "seeds": seeds_text(self.seeds),
            "test accuracy": f"{known.min():.1%} to {known.max():.1%}" if len(known) else "unknown",
        }
        return to_html(f"Zoo {self.path}", facts)

    @property
    def parts(self) -> Mapping[str, Zoo]:
        """The zoo of each size; this one, without a name, where sizes have none."""
        return {"": self} if self._parts is None else self._parts

    @property
    def mixed(self) -> bool:
        """Whether its networks have sizes with names, and a zoo for each."""
        return self._parts is not None

    @property
    def named(self) -> bool:
        """Whether its networks were brought by a user, with names and targets."""
        return "network" in self.table

    @property
    def kind(self) -> str:
        """What its networks are, one of `models.predictor.ZOOS`."""
        if not self.named:
            return BUILT
        return CHECKPOINTS if self.layout is None else ARRAYS

    @property
    def layout(self) -> RowLayout | None:
        """Names and shapes of the tensors in a row; None for checkpoints and several sizes."""
        return self.storage.layout if isinstance(self.storage, PackedRows) else None

    @property
    def families(self) -> tuple[str, ...]:
        """Families of its checkpoints, each once; none of other networks."""
        return tuple(dict.fromkeys(self.table.get("family", np.array([])).tolist()))

    @property
    def known_sizes(self) -> NetworkSizes | None:
        """Sizes of networks that were trained here; None for others."""
        return None if self._folder is None else self._folder.sizes

    @property
    def sizes(self) -> NetworkSizes:
        """Sizes of networks that were trained here; other zoos have none."""
        if self._folder is None:
            raise ZooError(
                f"'{self.path}' holds networks of several sizes"
                if self.mixed
                else f"'{self.path}' holds networks of a user: expected those of one task that "
                "`tnfn zoo build` trains"
            )
        return self._folder.sizes

    @property
    def space(self) -> WeightSpace:
        """The weight space of networks that were trained here."""
        return self.sizes.space

    @property
    def block_space(self) -> WeightSpace:
        """The weight space of one block, the paper's U."""
        return self.sizes.block_space

    @property
    def task(self) -> str:
        """The name of the task."""
        task = self.metadata.get("task", "own networks")
        return str(task["name"] if isinstance(task, Mapping) else task)

    @property
    def runs(self) -> np.ndarray:
        """The run of each network; each its own where no column says so."""
        return self.table[RUN if RUN in self.table else "network"].astype(str)

    @property
    def seeds(self) -> str:
        """``one`` if all runs share a seed, ``each`` if every run has its own, ``unknown``."""
        if self._folder is not None:
            return self._folder.seeds
        return str(self.metadata.get("seeds", UNKNOWN_SEEDS))

    @property
    def finished(self) -> bool:
        """Whether all shards of all sizes are on disk."""
        if self._parts is not None:
            every = len(self._parts) == len(self.metadata["kinds"])
            return every and all(part.finished for part in self._parts.values())
        if self._folder is None or not isinstance(self.storage, PackedRows):
            return True
        return len(self.storage.shards) == len(self._folder.shards)

    @property
    def targets(self) -> dict[str, np.ndarray]:
        """The user's columns: numbers (``int64``, or ``float64`` with NaN where one is missing) or
        text (objects, empty where one is missing)."""
        if not self.named:
            return {}
        reserved = RESERVED if self.layout is None else ARRAY_COLUMNS
        return {name: self.table[name] for name in self.table if name not in reserved}

    def select(
        self,
        *,
        percent: int | None = None,
        best: bool | None = None,
        min_accuracy: float | None = None,
        max_accuracy: float | None = None,
        runs: Sequence[str] | None = None,
        **values: Value | Sequence[Value] | None,
    ) -> np.ndarray:
        """Numbers of the matching rows, ``int64``.

        Args:
            percent: checkpoints at 50, 75 or 100 percent of the training. In short trainings
                one checkpoint counts as several: of three epochs the last is at 75 and 100.
            best: only rows that are (are not) the best of their run. With ``epoch`` or ``percent``
                and without it, rows stored only as a run's best are left out.
            min_accuracy: minimum test accuracy.
            max_accuracy: maximum test accuracy.
            runs: only these runs.
            values: by column, a value or a list of them.

        >>> len(Zoo.open("mnist-sample").select(optimizer=["adam", "sgd"]))
        82
        """
        match = np.ones(len(self), dtype=bool)
        if not self.named and best is None and (percent, values.get("epoch")) != (None, None):
            best = False
        if percent is not None:
            match &= self._at_percent(percent)
        if best is not None:
            match &= self._column("best") == best
        if min_accuracy is not None:
            match &= self._column(TEST_ACCURACY) >= min_accuracy
        if max_accuracy is not None:
            match &= self._column(TEST_ACCURACY) <= max_accuracy
        if runs is not None:
            match &= np.isin(self.runs, np.array(list(runs), dtype=str))
        for name, value in values.items():
            if value is not None:
                accepted = [value] if isinstance(value, str | int | float) else list(value)
                match &= np.isin(self._column(name), np.array(accepted, dtype=object))
        return np.flatnonzero(match)

    def _at_percent(self, percent: int) -> np.ndarray:
        """Which rows are the checkpoint at ``percent`` of their run."""
        labels = self._column("percent")
        recipe = self.metadata.get("recipe", {})
        if "epochs" not in recipe or percent not in recipe.get("percents", ()):
            return np.asarray(labels == percent)
        epoch = max(1, math.ceil(recipe["epochs"] * percent / 100))
        return np.asarray((self.table["epoch"] == epoch) & (labels > 0))

    def _column(self, name: str) -> np.ndarray:
        if name not in self.table:
            raise ZooError(f"'{self.path}' has no column '{name}': it has {', '.join(self.table)}")
        return self.table[name]

    def split(
        self,
        rows: Rows | None = None,
        fractions: Sequence[float] = (0.7, 0.15, 0.15),
        seed: int = 0,
        *,
        by: str = RUN,
    ) -> list[np.ndarray]:
        """Split rows at random, so that no run has checkpoints in two parts.

        Args:
            rows: the rows to split; None for all.
            fractions: the share of each part; they add up to 1.
            seed: of the random split.
            by: a column in place of the run: rows with the same value stay in one part.
        """
        chosen = self._rows(rows)
        labels = self.runs if by == RUN else self._column(by).astype(str)
        return split_rows(chosen, labels[chosen], fractions, seed)

    def weights(self, rows: Rows) -> Weights:
        """Weights of some rows, ``[n, *shape]`` for each tensor, each row verified."""
        packed = self._packed
        flat = packed.read(self._rows(rows))
        return {name: w.contiguous() for name, w in packed.layout.views(flat).items()}

    def batch(self, rows: Rows) -> Batch:
        """Rows in float32, the input of models, each row verified."""
        chosen = self._rows(rows)
        if self._parts is None:
            packed = self._packed
            return Batch.of_rows(packed.read(chosen).float(), packed.layout)
        places = [self._place(int(row)) for row in chosen]
        order, batches = [], []
        for name, part in self._parts.items():
            inside = [i for i, (size, _) in enumerate(places) if size == name]
            if inside:
                order += inside
                batches.append(part.batch([places[i][1] for i in inside]))
        return Batch.join(batches)[torch.tensor(order).argsort()]

    def _place(self, row: int) -> tuple[str, int]:
        """Size of a row of several sizes, and its row there."""
        for name, part in self.parts.items():
            if row < len(part):
                return name, row
            row -= len(part)
        raise ZooError(f"a row beyond the last of '{self.path}'")

    @property
    def _packed(self) -> PackedRows:
        if not isinstance(self.storage, PackedRows):
            held = "networks of several sizes" if self.mixed else "checkpoints of any family"
            raise ZooError(f"'{self.path}' holds {held}, not rows of one layout")
        return self.storage

    def batches(
        self, rows: Rows | None = None, size: int = 16
    ) -> Iterator[tuple[np.ndarray, Weights]]:
        """Row numbers and weights, ``size`` at a time."""
        packed, chosen = self._packed, self._rows(rows)
        parts = [chosen[start : start + size] for start in range(0, len(chosen), size)]
        # While one batch is used, the next ones are prefetched.
        prefetched: deque[Any] = deque()
        for i, part in enumerate(parts):
            while len(prefetched) <= FETCH_AHEAD and i + len(prefetched) < len(parts):
                prefetched.append(packed.fetch(parts[i + len(prefetched)]))
            flat = packed.read(part, prefetched.popleft())
            yield part, {name: w.contiguous() for name, w in packed.layout.views(flat).items()}

    def dataset(
        self,
        rows: Rows | None = None,
        target: str = TEST_ACCURACY,
        dtype: torch.dtype = torch.float32,
    ) -> ZooDataset:
        """Rows with a target as a map-style dataset of PyTorch, without those that lack it.

        An item is the tensors of a network by name, and the value.

        >>> dataset = Zoo.open("mnist-sample").dataset()
        >>> weights, accuracy = dataset[0]
        >>> len(dataset), weights["classifier.b_2"].shape, accuracy.ndim
        (160, torch.Size([10]), 0)
        """
        chosen = self._rows(rows)
        return ZooDataset(self, chosen[self.known(target, chosen)], target, dtype)

    def known(self, target: str, rows: np.ndarray) -> np.ndarray:
        """Which of some rows have a value of a target."""
        values = self._column(target)[rows]
        if values.dtype.kind == "f":
            return np.asarray(~np.isnan(values))
        return np.array([value != "" for value in values.tolist()], dtype=bool)

    def model(self, row: int) -> Model:
        """One network as an open checkpoint; arrays have no family to open them by."""
        at = self._at(row)
        if isinstance(self.storage, Checkpoints):
            return self.storage.open(at)
        if self._parts is not None:
            name, inside = self._place(at)
            return self._parts[name].model(inside)
        if self.named:
            raise ZooError(_no_checkpoint(self.path, at))
        weights = {name: w[0] for name, w in self.weights([at]).items()}
        source = InMemory(weights, {SPACE_KEY: self.space.to_json()})
        where = f"{self.path}#{at}"
        return read_model(Checkpoint(where, source), Path(where), OpenOptions(family=NAME))

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
        return None if self._folder is None else self._folder.word_vectors()

    @property
    def _checkpoints(self) -> Checkpoints:
        if not isinstance(self.storage, Checkpoints):
            raise ZooError(
                f"'{self.path}' is not a zoo of checkpoints: `tnfn zoo import` makes one"
            )
        return self.storage

    def folder(self, row: int) -> Path:
        """The folder of a checkpoint, whose bytes were compared with their checksum."""
        if self.kind == ARRAYS:
            raise ZooError(_no_checkpoint(self.path, row))
        return self._checkpoints.folder(row)

    def add(
        self,
        model: Source,
        name: str | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        **targets: Any,
    ) -> int:
        """Store a checkpoint and its targets; several processes may add to one zoo.

        Args:
            model: a file or folder, an open checkpoint, a model of `transformers`, or a module or
                mapping of tensors by name.
            name: in the zoo; by default that of the file, or the row in five digits.
            config: fields of ``config.json`` that the source does not state.
            targets: numbers or texts, the same for every network of the zoo; NaN and an empty text
                are missing.

        Returns:
            The row.
        """
        if name is None and isinstance(model, str | Path):
            name = plain_name(Path(model).name)
        with opened(model, config) as network:
            self.extend([(network, name, plain_targets(targets))])
        return len(self) - 1

    def extend(self, networks: Iterable[tuple[Model, str | None, Mapping[str, Value]]]) -> None:
        """Store open checkpoints with their names and targets, as they come.

        The index is written every few seconds and at the end, also that of an error: a writer
        that is killed loses the last few rows at most.
        """
        storage = self._checkpoints
        with claim(self.path, "index", wait=True):
            self._set_table(_read_index(self.path))  # others may have added rows
            storage.sweep(len(self))
            new: list[dict[str, Value]] = []
            names, saved = set(self.table["network"].tolist()), time.monotonic()
            try:
                for model, name, targets in networks:
                    row = len(self) + len(new)
                    name = f"{row:05d}" if name is None else name
                    if name in names:
                        raise ZooError(f"'{self.path}' already holds a network '{name}'")
                    if len(self) or new:
                        like = new[0] if new else self.config(0)
                        check_targets(targets, like, name, self.path)
                    new.append({**storage.store(model, row, name), **targets})
                    names.add(name)
                    if time.monotonic() > saved + SAVE_EVERY:
                        self._append(new)
                        new, saved = [], time.monotonic()
            finally:
                self._append(new)

    def _append(self, rows: list[dict[str, Value]]) -> None:
        if rows:
            held = self.table if len(self) else {}
            table = {
                name: as_column([*(held[name].tolist() if held else ()), *(r[name] for r in rows)])
                for name in rows[0]
            }
            self._set_table(table)
            Checksums(self.path).replace(INDEX, table_bytes(table))

    def _set_table(self, table: dict[str, np.ndarray]) -> None:
        self.table = table
        if isinstance(self.storage, Checkpoints):
            self.storage.table = table

    def set_targets(self, frame: pd.DataFrame) -> None:
        """Replace the targets by the columns of a data frame, such as an edited `to_pandas`.

        Args:
            frame: a line for each network of the zoo, in any order, with its name in the column
                ``network``. Other columns of the index stay as they are or are left out; the rest
                are the targets, under the rules of an import.
        """
        if not self.named:
            raise ZooError(f"'{self.path}' holds networks of a build: it has no targets to set")
        reserved = RESERVED if self.layout is None else ARRAY_COLUMNS
        given = read_frame(frame, reserved)
        with claim(self.path, "index", wait=True):
            kept = {k: column for k, column in _read_index(self.path).items() if k in reserved}
            places = {name: row for row, name in enumerate(given.files)}
            names = kept["network"].tolist()
            if odd := set(names) ^ {*places}:
                found = "has no line" if min(odd) in names else "is not in the zoo"
                raise ZooError(
                    f"the data frame expected a line for each network of '{self.path}': "
                    f"'{min(odd)[:80]}' {found}"
                )
            order = [places[name] for name in names]
            for column in reserved[1:]:
                if column in frame and frame[column].iloc[order].tolist() != kept[column].tolist():
                    raise ZooError(
                        f"the data frame has another column '{column}' than '{self.path}': only "
                        "targets can be set"
                    )
            targets = {k: as_column([v[row] for row in order]) for k, v in given.columns.items()}
            self._set_table({**kept, **targets})
            Checksums(self.path).replace(INDEX, table_bytes(self.table, reserved))

    def verify(self) -> list[str]:
        """What is wrong with the weights of its rows; empty for a valid zoo."""
        problems = []
        for row in range(len(self)):
            try:
                if isinstance(self.storage, Checkpoints):
                    self.storage.folder(row)
                else:
                    self.batch([row])
            except StoreError as error:
                problems.append(str(error))
        return problems


def _no_checkpoint(path: Path, row: int) -> str:
    return (
        f"'{path}#{row}' is a row of arrays, which state no architecture: expected a checkpoint of "
        "a transformer"
    )


def _read_index(path: Path) -> dict[str, np.ndarray]:
    return read_table(Checksums(path).read(INDEX), str(path / INDEX))


def _open_named(path: Path) -> Zoo:
    """A zoo of a user: checkpoints, or arrays of one layout."""
    fields = Checksums(path).read_metadata("zoo.json", MODELS_KIND)
    table = _read_index(path)
    if fields.choice("origin", ("import", "arrays")) == "import":
        return Zoo(path, dict(fields.data), table, Checkpoints(path, table))
    shards = fields.inner("shards")
    headers = {name: shards.whole(name, most=2**32 - 1) for name in shards.data}
    fields.choice("dtype", DTYPES)
    inner = fields.inner("layout").data
    try:
        layout = array_layout(inner)
    except ZooError as error:
        raise StoreError(f"'{path / 'zoo.json'}': {error}") from error
    if missing := {*table.get("shard", np.array([])).tolist()} - {*headers}:
        raise StoreError(f"'{path / INDEX}': zoo.json has no shard '{min(missing)}'")
    if tuple(table)[: len(ARRAY_COLUMNS)] != ARRAY_COLUMNS:
        raise StoreError(f"{path / INDEX}: expected the columns {', '.join(ARRAY_COLUMNS)} first")
    return Zoo(path, dict(fields.data), table, PackedRows(path, layout, headers, table))


def _open_sizes(path: Path) -> Zoo:
    """A zoo of several sizes, finished or not; its table has their rows one after another."""
    metadata, groups = read_groups(path)
    parts: dict[str, Zoo] = {}
    for group in groups:
        if (path / group.name / "zoo.json").is_file():
            parts[group.name] = part = Zoo.of_folder(Folder.open(path / group.name))
            if part.sizes.group != group:
                held = part.sizes.group
                raise StoreError(f"'{part.path}' holds networks of {held}, expected {group}")
            if part.task != metadata["task"]:
                raise StoreError(
                    f"'{path / GROUPS_FILE}': 'task' expected {part.task}, that of '{group.name}', "
                    f"found {metadata['task']}"
                )
    kinds = np.repeat(np.array(list(parts), dtype=object), [len(part) for part in parts.values()])
    columns = next(iter(parts.values())).table if parts else {}
    table = {
        name: np.concatenate([part.table[name] for part in parts.values()]) for name in columns
    }
    return Zoo(path, metadata, {"kind": kinds, **table}, parts=parts)
