"""Zoos of any networks: checkpoints of several families and sizes, with the user's targets."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from transformer_nfn.checkpoints.families import Model, OpenOptions, open_model, read_model
from transformer_nfn.checkpoints.families.binding import with_settings
from transformer_nfn.io.checkpoint import CONFIG, WEIGHT_FILES, WEIGHTS, Checkpoint
from transformer_nfn.io.files import open_regular, read_parquet, sweep
from transformer_nfn.io.location import Location
from transformer_nfn.io.rewrite import write_folder
from transformer_nfn.io.tensor_files import InMemory
from transformer_nfn.known_tasks import UNKNOWN_SEEDS
from transformer_nfn.notebook import to_html
from transformer_nfn.zoo.errors import StoreError, ZooError
from transformer_nfn.zoo.module import HEADS_KEY, heads_in
from transformer_nfn.zoo.store.folder import (
    INDEX,
    MODELS_KIND,
    Checksums,
    check_fresh,
    check_outside_zoos,
    claim,
    zoo_kind,
)
from transformer_nfn.zoo.store.index import IndexedRows, Rows, arrow, split_rows
from transformer_nfn.zoo.targets import (
    RESERVED,
    Value,
    as_column,
    plain_targets,
    read_frame,
)

if TYPE_CHECKING:
    import pandas as pd

LONGEST_NAME = 240
SAVE_EVERY = 5.0
"""Seconds between writes of the index."""
RUN = "run"
"""Target whose equal values are checkpoints of one training."""
Source = str | Path | Model | nn.Module | Mapping[str, Tensor]
"""What `ModelZoo.add` takes."""


class ModelZoo(IndexedRows):
    """A zoo of checkpoints of any family that the library reads, each with the user's targets.

    Every network is a folder as model hubs lay it out, whose bytes are compared with their
    checksum when it is first opened.

    Attributes:
        path: the folder.
        metadata: the content of ``zoo.json``.
        table: the index as columns (NumPy arrays), one row per network: ``network`` (its name),
            ``family``, ``checksum``, ``bytes``, then the targets.

    >>> from transformer_nfn.testing import write_example_checkpoint
    >>> zoo = ModelZoo.create("zoos/mine")
    >>> for seed, loss in enumerate([3.1, 2.9]):
    ...     row = zoo.add(write_example_checkpoint(f"llama-{seed}", seed), loss=loss, run="a")
    >>> len(zoo), zoo.targets["loss"].tolist()
    (2, [3.1, 2.9])
    >>> with zoo[1] as model:
    ...     model.description.family, model.path.name
    ('llama', '00001')
    """

    task, seeds = "own networks", UNKNOWN_SEEDS
    sizes = None
    """Its networks have no sizes in common."""

    def __init__(self, path: Path, metadata: dict[str, Any]) -> None:
        self.path, self.metadata = path, metadata
        self.table = self._read_index()
        self._verified: set[int] = set()

    @staticmethod
    def open(path: Path | str) -> ModelZoo:
        """Open a zoo by its folder; reads no weights."""
        path = Location.of(path).folder("zoo")
        if zoo_kind(path) != MODELS_KIND:
            raise StoreError(f"'{path}' is not a zoo of checkpoints: `tnfn zoo import` makes one")
        fields = Checksums(path).read_metadata("zoo.json", MODELS_KIND)
        fields.choice("origin", ("import",))
        return ModelZoo(path, dict(fields.data))

    @staticmethod
    def create(path: Path | str) -> ModelZoo:
        """A new zoo in a new or empty folder, or the one of this kind that is there."""
        path = Path(path)
        try:
            check_outside_zoos(path)
            check_fresh(path)
        except StoreError:
            if zoo_kind(path) != MODELS_KIND:  # else it is there already
                raise
        with claim(path, "index", wait=True):
            if zoo_kind(path) != MODELS_KIND:
                Checksums(path).replace(INDEX, _to_parquet(dict.fromkeys(RESERVED, np.array([]))))
                Checksums(path).write_metadata("zoo.json", MODELS_KIND, {"origin": "import"})
        return ModelZoo.open(path)

    def __repr__(self) -> str:
        families = ", ".join(dict.fromkeys(self.table["family"].tolist())) or "none yet"
        targets = ", ".join(self.targets) or "none"
        return f"ModelZoo('{self.path}', {len(self):,} networks: {families}; targets: {targets})"

    def _repr_html_(self) -> str:
        """What notebooks show."""
        families = Counter(self.table["family"].tolist())
        facts = {"networks": f"{len(self):,}", **families, "targets": ", ".join(self.targets)}
        return to_html(f"ModelZoo {self.path}", facts)

    def set_targets(self, frame: pd.DataFrame) -> None:
        """Replace the targets by the columns of a data frame, such as an edited `to_pandas`.

        Args:
            frame: a line for each network of the zoo, in any order, with its name in the column
                ``network``. Other columns of the index stay as they are or are left out; the rest
                are the targets, under the rules of an import.
        """
        given = read_frame(frame)
        with claim(self.path, "index", wait=True):
            kept = {name: column for name, column in self._read_index().items() if name in RESERVED}
            places = {name: row for row, name in enumerate(given.files)}
            names = kept["network"].tolist()
            if odd := set(names) ^ {*places}:
                found = "has no line" if min(odd) in names else "is not in the zoo"
                raise ZooError(
                    f"the data frame expected a line for each network of '{self.path}': "
                    f"'{min(odd)[:80]}' {found}"
                )
            order = [places[name] for name in names]
            for column in RESERVED[1:]:
                if column in frame and frame[column].iloc[order].tolist() != kept[column].tolist():
                    raise ZooError(
                        f"the data frame has another column '{column}' than '{self.path}': only "
                        "targets can be set"
                    )
            targets = {k: as_column([v[row] for row in order]) for k, v in given.columns.items()}
            self.table = {**kept, **targets}
            Checksums(self.path).replace(INDEX, _to_parquet(self.table))

    def __getitem__(self, row: int) -> Model:
        """One network, open: its weights are read on access."""
        at = self._at(row)
        return open_model(self.folder(at), OpenOptions(family=self.table["family"][at]))

    def __iter__(self) -> Iterator[Model]:
        """All networks in row order, each closed when the next is taken."""
        for row in range(len(self)):
            with self[row] as model:
                yield model

    @property
    def targets(self) -> dict[str, np.ndarray]:
        """The user's columns: numbers (``float64`` or ``int64``, all finite) or text (objects)."""
        return {name: self.table[name] for name in self.table if name not in RESERVED}

    @property
    def runs(self) -> np.ndarray:
        """The run of each network; each its own where no column says so."""
        return self.table[RUN if RUN in self.targets else "network"].astype(str)

    def folder(self, row: int) -> Path:
        """The folder of a network, whose bytes were compared with their checksum."""
        path = self.place(row)
        if row not in self._verified:
            checksum, size = _checksum(path)
            expected = str(self.table["checksum"][row]), int(self.table["bytes"][row])
            if (checksum, size) != expected:
                raise StoreError(
                    f"'{path}' ('{self.table['network'][row]}'): damaged, expected sha256 "
                    f"{expected[0][:12]}… of {expected[1]:,} bytes, found {checksum[:12]}… of "
                    f"{size:,}"
                )
            self._verified.add(row)
        return path

    def select(self, **values: Value | Sequence[Value]) -> np.ndarray:
        """Numbers of the rows whose columns have these values, ``int64``.

        Args:
            values: by column, a value or a list of them.

        >>> ModelZoo.create("zoos/empty").select(family=["gpt2", "bert"])
        array([], dtype=int64)
        """
        match = np.ones(len(self), dtype=bool)
        for name, value in values.items():
            accepted = [value] if isinstance(value, str | int | float) else list(value)
            match &= np.isin(self._column(name), np.array(accepted, dtype=object))
        return np.flatnonzero(match)

    def split(
        self,
        rows: Rows | None = None,
        fractions: Sequence[float] = (0.7, 0.15, 0.15),
        seed: int = 0,
        *,
        by: str = "network",
    ) -> list[np.ndarray]:
        """Split rows at random.

        Args:
            rows: the rows to split; None for all.
            fractions: the share of each part; they add up to 1.
            seed: of the random split.
            by: a column, such as that of the run: rows with the same value stay in one part.
        """
        chosen = self._rows(rows)
        return split_rows(chosen, self._column(by)[chosen].astype(str), fractions, seed)

    def add(
        self,
        model: Source,
        name: str | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        **targets: Any,
    ) -> int:
        """Store a network and its targets; several processes may add to one zoo.

        Args:
            model: a file or folder, an open checkpoint, a model of `transformers`, or a module or
                mapping of tensors by name.
            name: in the zoo; by default that of the file, or the row in five digits.
            config: fields of ``config.json`` that the source does not state.
            targets: numbers or texts, the same for every network of the zoo.

        Returns:
            The row.
        """
        if name is None and isinstance(model, str | Path):
            name = plain_name(Path(model).name)
        with opened(model, config) as network:
            self.extend([(network, name, plain_targets(targets))])
        return len(self) - 1

    def extend(self, networks: Iterable[tuple[Model, str | None, Mapping[str, Value]]]) -> None:
        """Store open networks with their names and targets, as they come.

        The index is written every few seconds and at the end, also that of an error: a writer
        that is killed loses the last few rows at most.
        """
        with claim(self.path, "index", wait=True):
            self.table = self._read_index()  # others may have added rows
            self._sweep()
            new: list[dict[str, Value]] = []
            names, saved = set(self.table["network"].tolist()), time.monotonic()
            try:
                for model, name, targets in networks:
                    row = len(self) + len(new)
                    name = f"{row:05d}" if name is None else name
                    self._check(model, name, targets, names)
                    if new:
                        check_targets(targets, new[0], name, self.path)
                    new.append({**self._store(model, row, name), **targets})
                    names.add(name)
                    if time.monotonic() > saved + SAVE_EVERY:
                        self._append(new)
                        new, saved = [], time.monotonic()
            finally:
                self._append(new)

    def _check(
        self, model: Model, name: str, targets: Mapping[str, Value], names: set[str]
    ) -> None:
        check_name(name)
        if name in names:
            raise ZooError(f"'{self.path}' already holds a network '{name}'")
        if model.options.architecture is not None:
            raise ZooError(
                f"'{model.where}' is of the family of '{model.options.architecture}': a zoo holds "
                "families of the library (tnfn architectures)"
            )
        if len(self):
            check_targets(targets, self.config(0), name, self.path)
        model.check_numbers()

    def _store(self, model: Model, row: int, name: str) -> dict[str, Value]:
        """Write the folder of a network; its part of the index."""
        place = self.place(row)
        write_folder(model.checkpoint, place, with_settings(model.config, model.options.settings))
        checksum, size = _checksum(place)
        entry = name, model.binding.family.name, checksum, size
        return dict(zip(RESERVED, entry, strict=True))

    def _sweep(self) -> None:
        """Remove what writers left that were killed, such as folders that are in no index."""
        sweep(self.path)
        for place in (self.path / "networks").glob("*"):
            if place.name.isdecimal() and int(place.name) >= len(self):
                shutil.rmtree(place, ignore_errors=True)

    def _append(self, rows: list[dict[str, Value]]) -> None:
        if rows:
            self.table = {
                name: as_column(
                    [*(self.table[name].tolist() if name in self.table else ()),
                     *(row[name] for row in rows)]
                )
                for name in rows[0]
            }  # fmt: skip
            Checksums(self.path).replace(INDEX, _to_parquet(self.table))

    def verify(self) -> list[str]:
        """What is wrong with the files of the networks; empty for a valid zoo."""
        problems = []
        for row in range(len(self)):
            try:
                self.folder(row)
            except StoreError as error:
                problems.append(str(error))
        return problems

    def place(self, row: int) -> Path:
        """The folder of a network, whose bytes may be damaged; see `folder`."""
        return self.path / "networks" / f"{row:05d}"

    def _column(self, name: str) -> np.ndarray:
        if name not in self.table:
            raise ZooError(f"'{self.path}' has no column '{name}': it has {', '.join(self.table)}")
        return self.table[name]

    def _read_index(self) -> dict[str, np.ndarray]:
        return _from_parquet(Checksums(self.path).read(INDEX), str(self.path / INDEX))


@contextmanager
def opened(model: Source, config: Mapping[str, Any] | None = None) -> Iterator[Model]:
    """Open a network of any source; see `ModelZoo.add`."""
    options = OpenOptions(settings={} if config is None else config)
    if isinstance(model, Model):
        yield model
    elif isinstance(model, str | Path):
        with open_network(model, options) as network:
            yield network
    elif hasattr(model, "save_pretrained"):
        # The names of a model's files are not always those of its modules.
        with tempfile.TemporaryDirectory() as scratch:
            with _without_progress_bars():
                model.save_pretrained(scratch)  # type: ignore[operator]
            with open_network(scratch, options) as network:
                yield network
    elif not isinstance(model, nn.Module | Mapping):
        raise ZooError(
            "a network expected a path, an open checkpoint, a module or tensors by name, found "
            f"{type(model).__name__}"
        )
    else:
        tensors = model.state_dict() if isinstance(model, nn.Module) else model
        for key, value in tensors.items():
            if not isinstance(value, Tensor):
                raise ZooError(
                    f"a network expected tensors by name, found {type(value).__name__} '{key}'"
                )
        held = {name: w.detach().cpu() for name, w in tensors.items()}
        yield read_model(Checkpoint("the network", InMemory(held), config), Path("the network"))


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Silence `transformers`, which shows a bar for every model that it saves."""
    logging = getattr(sys.modules.get("transformers"), "logging", None)
    if logging is None or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def open_network(path: str | Path, options: OpenOptions) -> Model:
    """Open a checkpoint; one of the zoo's own module states its number of heads in a tensor."""
    model = open_model(path, options)
    if HEADS_KEY in model.checkpoint and not options:
        with model:
            settings = {"heads": heads_in(model.checkpoint)}
        return open_model(path, OpenOptions(settings=settings))
    return model


def check_targets(
    targets: Mapping[str, Value], other: Mapping[str, Value], name: str, zoo: Path
) -> None:
    """Refuse targets of other names or types than those of another network of a zoo."""
    expected = [column for column in other if column not in RESERVED]
    if set(targets) != set(expected):
        raise ZooError(
            f"'{name}': expected the targets {', '.join(expected) or 'none'} of '{zoo}', found "
            f"{', '.join(targets) or 'none'}"
        )
    for column in expected:
        text = isinstance(other[column], str)
        if text != isinstance(targets[column], str):
            raise ZooError(
                f"'{name}': target '{column}' expected {'a text' if text else 'a number'} as in "
                f"'{zoo}', found {targets[column]!r}"
            )


def plain_name(file: str) -> str:
    """The name of a network by its file: without the suffix of files of weights."""
    path = PurePosixPath(file)
    return str(path.with_suffix("")) if path.suffix in WEIGHT_FILES else str(path)


def check_name(name: str) -> None:
    """Refuse the name of a network that is no path below a folder."""
    path = PurePosixPath(name)
    parts = path.parts
    if (
        str(path) != name or path.is_absolute() or not parts or not name.isprintable()
        or len(name.encode()) > LONGEST_NAME or any(part.startswith(".") for part in parts)
    ):  # fmt: skip
        raise ZooError(
            f"a network expected a name such as 'adam/run-3' of at most {LONGEST_NAME} bytes, "
            f"found {name[:80]!r}"
        )


def _checksum(folder: Path) -> tuple[str, int]:
    """SHA-256 of the config and the weights of a network, and their bytes."""
    digest, size = hashlib.sha256(), 0
    for name in (CONFIG, WEIGHTS[0]):
        try:
            with os.fdopen(open_regular(folder / name), "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
                    size += len(block)
        except OSError as error:
            raise StoreError(f"{folder / name}: cannot be read ({error.strerror})") from error
    return digest.hexdigest(), size


def _to_parquet(table: Mapping[str, np.ndarray]) -> bytes:
    pa, pq = arrow()
    text, number = pa.string(), pa.int64()
    types = {name: number if name == "bytes" else text for name in RESERVED}
    columns = {
        name: pa.array(column.tolist(), types.get(name, text if column.dtype == object else None))
        for name, column in table.items()
    }
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out, compression="zstd")
    return out.getvalue()


def _from_parquet(data: bytes, where: str) -> dict[str, np.ndarray]:
    pa, _ = arrow()
    try:
        read = read_parquet(data)
        table = {}
        for field in read.schema:
            values = read.column(field.name).to_pylist()
            text = pa.types.is_string(field.type)
            if not (text or pa.types.is_integer(field.type) or pa.types.is_floating(field.type)):
                raise ValueError(f"column '{field.name}' of {field.type}")
            table[field.name] = np.array(values, dtype=object) if text else as_column(values)
    except (pa.ArrowException, OSError, TypeError, ValueError, OverflowError) as error:
        raise StoreError(f"{where}: damaged, not an index of a zoo ({error})") from error
    if tuple(table)[: len(RESERVED)] != RESERVED:
        raise StoreError(f"{where}: expected the columns {', '.join(RESERVED)} first")
    for name, column in table.items():
        text = column.dtype == object and all(isinstance(v, str) for v in column.tolist())
        number = column.dtype != object and bool(np.isfinite(column).all())
        if not (number if name == "bytes" else text if name in RESERVED else text or number):
            raise StoreError(f"{where}: column '{name}' expected one type and no missing values")
    names = table["network"].tolist()
    if len(set(names)) < len(names):
        raise StoreError(f"{where}: column 'network' holds '{max(names, key=names.count)}' twice")
    for name in names:  # an export makes folders of these names
        try:
            check_name(name)
        except ZooError as error:
            raise StoreError(f"{where}: column 'network': {error}") from error
    return table
