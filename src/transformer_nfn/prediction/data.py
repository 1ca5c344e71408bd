"""Networks to train on: rows of a zoo in memory, split by run, grouped by size."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.io.files import file_sha256
from transformer_nfn.models import Batch
from transformer_nfn.models.invariants import FEATURES
from transformer_nfn.models.predictor import ARRAYS, BUILT, CHECKPOINTS
from transformer_nfn.prediction.checkpoint_reader import read_checkpoints
from transformer_nfn.prediction.runs import CONFIGURATION, RunError
from transformer_nfn.prediction.target import (
    ACCURACY,
    ACCURACY_COLUMN,
    CHECKPOINT_COLUMNS,
    Target,
    known_targets,
    target_values,
)
from transformer_nfn.spaces import WeightSpace
from transformer_nfn.zoo import Zoo
from transformer_nfn.zoo.damage import Damage, damages
from transformer_nfn.zoo.store.folder import INDEX
from transformer_nfn.zoo.store.index import split_rows
from transformer_nfn.zoo.store.zoo import RUN

FRACTIONS = (0.7, 0.15, 0.15)
"""Of the training, validation and test part."""
SPLITS = ("run", "checkpoint")
PERCENT = 75
"""Epoch 75 of 100, which the authors' code reads; the paper names none."""
RECIPE_COLUMN = "recipe "
"""Columns of networks of any family that begin with this are part of their recipe."""
TWIN = "twin"
"""Column: whether a held-out network has a twin in training, see `has_twin`."""
TWIN_DECAY = 1e-6
"""Up to here weight decay does next to nothing: runs that differ in it alone are twins."""
MIN_NETWORKS = 16
MIN_DAMAGED = 20


@dataclass(frozen=True)
class Dataset:
    """Networks of one size in memory, with their metadata.

    Attributes:
        block_space: the weight space of one block; None for networks of any family, of which only
            invariants are known.
        network: the networks as models read them.
        accuracy: test accuracy of each network, ``[n]``, float32 between 0 and 1; or another
            target, as `Target.encode` gives it.
        columns: run id, row of the zoo, hyperparameters; ``target``, the values of the target, if
            it is not the test accuracy; arrays of length n.
        tokens: maximal input length; None if unknown.
        target: what is predicted.
    """

    block_space: WeightSpace | None
    network: Batch
    accuracy: Tensor
    columns: Mapping[str, np.ndarray]
    tokens: int | None = None
    target: Target = ACCURACY

    def __len__(self) -> int:
        return len(self.accuracy)

    @property
    def truth(self) -> np.ndarray:
        """The values of the target, ``[n]``, as `Target.measured` unless they are classes."""
        if "target" in self.columns:
            return self.columns["target"]
        return np.asarray(self.accuracy.cpu().double().numpy())

    @property
    def kind(self) -> str:
        """Kind of zoo that the networks are of, one of `models.predictor.ZOOS`."""
        if self.block_space is not None:
            return BUILT
        return CHECKPOINTS if FEATURES in self.network.computed else ARRAYS

    @property
    def skills(self) -> tuple[Tensor, Tensor]:
        """Two weights by which good networks are chosen, ``[n]`` on the CPU.

        The test accuracy twice, ones where it is missing. Where the zoo has none, the target may
        grow or fall with what a network can do: first the target itself, then one less it.
        """
        accuracy = self.columns.get(ACCURACY_COLUMN)
        if self.target == ACCURACY:
            known = self.accuracy.cpu()
        elif accuracy is not None:
            known = torch.as_tensor(accuracy, dtype=torch.float32)
            known = torch.where(known.isnan(), 1.0, known)
        else:
            return self.accuracy.cpu(), 1 - self.accuracy.cpu()
        return known, known

    def of_class(self, name: str) -> Dataset:
        """The same networks with another target: whether a network is of this class."""
        belongs = self.columns["target"].astype(str) == name
        return replace(
            self,
            accuracy=torch.as_tensor(belongs, dtype=torch.float32, device=self.accuracy.device),
            columns={**self.columns, "target": belongs.astype(np.float64)},
            target=Target(name, "share"),
        )

    @property
    def runs(self) -> list[str]:
        """The run id of each network."""
        names: list[str] = self.columns["run"].astype(str).tolist()
        return names

    def take(self, index: Tensor | np.ndarray) -> Self:
        """Select networks, in the order of the index."""
        where = torch.as_tensor(index, device=self.accuracy.device)
        at = where.cpu().numpy()
        return replace(
            self,
            network=self.network[where],
            accuracy=self.accuracy[where],
            columns={name: column[at] for name, column in self.columns.items()},
        )

    def to(self, device: torch.device | str) -> Dataset:
        """Move to a device."""
        return replace(
            self,
            network=self.network.to(device),
            accuracy=self.accuracy.to(device),
        )


def joined(first: Dataset, second: Dataset) -> Dataset:
    """Concatenate two data sets of networks of one size."""
    return replace(
        first,
        network=Batch.join([first.network, second.network]),
        accuracy=torch.cat([first.accuracy, second.accuracy]),
        columns={
            name: np.concatenate([column, second.columns[name]])
            for name, column in first.columns.items()
            if name in second.columns
        },
    )


@dataclass(frozen=True)
class Parts:
    """Networks of one size split by run: no run has networks in two parts.

    Attributes:
        train, val, test: the parts of the experiment.
        more: additional training networks for predictors that use them: other checkpoints of the
            training runs, and runs outside the selection.
        missing: number of networks that were left out, as their target is missing.
    """

    train: Dataset
    val: Dataset
    test: Dataset
    more: Dataset | None = None
    missing: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """Number of networks in each part."""
        return {"train": len(self.train), "val": len(self.val), "test": len(self.test)}

    @property
    def all_train(self) -> Dataset:
        """Training networks followed by the additional ones."""
        return self.train if self.more is None else joined(self.train, self.more)

    def each(self, change: Callable[[Dataset], Dataset]) -> Parts:
        """Apply a function to the networks of every part."""
        more = None if self.more is None else change(self.more)
        return Parts(change(self.train), change(self.val), change(self.test), more, self.missing)

    def to(self, device: torch.device | str) -> Parts:
        """Move to a device."""
        return self.each(lambda data: data.to(device))


UNNAMED = ""
"""Name of the only group of a zoo whose networks all have one size."""


@dataclass(frozen=True)
class SizeGroups:
    """The networks of a mixed zoo, grouped by size.

    Attributes:
        parts: for each size in the training set, such as ``w16-h2-d1``, its networks.
        left_out: sizes that only serve as a test set.
    """

    parts: Mapping[str, Parts]
    left_out: Mapping[str, Dataset] = field(default_factory=dict)

    @staticmethod
    def of(networks: Parts | SizeGroups) -> SizeGroups:
        """Treat networks of one size as a single unnamed group."""
        return networks if isinstance(networks, SizeGroups) else SizeGroups({UNNAMED: networks})

    @property
    def names(self) -> tuple[str, ...]:
        """Sizes in the training set."""
        return tuple(self.parts)

    @property
    def mixed(self) -> bool:
        """Whether the networks come from a mixed zoo."""
        return self.names != (UNNAMED,)

    @property
    def train(self) -> list[Dataset]:
        """Training part of each size."""
        return [parts.train for parts in self.parts.values()]

    @property
    def val(self) -> list[Dataset]:
        """Validation part of each size."""
        return [parts.val for parts in self.parts.values()]

    @property
    def test(self) -> list[Dataset]:
        """Test part of each size."""
        return [parts.test for parts in self.parts.values()]

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Number of networks by size and part."""
        left_out = {name: {"left out": len(data)} for name, data in self.left_out.items()}
        return {name: parts.counts for name, parts in self.parts.items()} | left_out

    @property
    def selection(self) -> dict[str, Any]:
        """Counts for the record of a run; of a mixed zoo also by size."""
        sizes = {"train": self.train, "val": self.val, "test": self.test}
        totals = {part: sum(map(len, sets)) for part, sets in sizes.items()}
        missing = sum(parts.missing for parts in self.parts.values())
        totals |= {"missing": missing} if missing else {}
        if not self.mixed:
            return totals
        return {**totals, "kinds": self.counts, "left_out": list(self.left_out)}

    def map(self, change: Callable[[Parts], Parts]) -> SizeGroups:
        """Apply a function to the parts of every size."""
        return replace(self, parts={name: change(parts) for name, parts in self.parts.items()})

    def of_class(self, name: str) -> SizeGroups:
        """The same networks with another target: whether a network is of this class."""
        return self.each(lambda data: data.of_class(name))

    def to(self, device: torch.device | str) -> SizeGroups:
        """Move to a device."""
        return self.each(lambda data: data.to(device))

    def each(self, change: Callable[[Dataset], Dataset]) -> SizeGroups:
        """Apply a function to the networks of every size and part, those left out too."""
        left_out = {name: change(data) for name, data in self.left_out.items()}
        return replace(self.map(lambda parts: parts.each(change)), left_out=left_out)


@dataclass(frozen=True)
class Selection:
    """Which networks of a zoo an experiment uses.

    Attributes:
        percent: checkpoints at this part of the training; None for all of them, as of targets for
            which all of a run count.
        min_accuracy: minimal test accuracy.
        split: what stays in one part, a ``run`` with all its checkpoints, or a ``checkpoint``.
        split_seed: seed of the split into parts.
        max_train: maximal number of training networks of each size, a `nested_subset`.
        all_checkpoints: whether to load `Parts.more`.
        leave_out: sizes of a mixed zoo that are not trained on, such as ``w48-h4-d3``.
        target: column of the zoo's table that is to be predicted.
    """

    percent: int | None = PERCENT
    min_accuracy: float = 0.0
    split_seed: int = 0
    max_train: int | None = None
    all_checkpoints: bool = False
    leave_out: tuple[str, ...] = ()
    target: str = ACCURACY_COLUMN
    split: str = "run"

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise RunError(f"a split is by {' or '.join(SPLITS)}, found {self.split!r}")
        if self.target in CHECKPOINT_COLUMNS:
            object.__setattr__(self, "percent", None)

    def rows(self, zoo: Zoo) -> np.ndarray:
        """Rows of the zoo with this checkpoint and accuracy that have the target."""
        rows = self.chosen(zoo)
        return np.asarray(rows[known_targets(zoo, self.target, rows)])

    def chosen(self, zoo: Zoo) -> np.ndarray:
        """Rows of the zoo with this checkpoint and accuracy; all networks of a user."""
        if zoo.named:
            return np.arange(len(zoo))
        # A network of unknown accuracy may have another target.
        least = self.min_accuracy if self.target == ACCURACY_COLUMN else self.min_accuracy or None
        rows = zoo.select(percent=self.percent, min_accuracy=least)
        if not len(rows) and self.percent is not None and not len(zoo.select(percent=self.percent)):
            available = sorted({int(p) for p in zoo.table["percent"] if p > 0})
            raise RunError(f"the zoo has no checkpoints at {self.percent} %, only at {available}")
        return rows

    def parts(self, zoo: Zoo, rows: np.ndarray) -> list[np.ndarray]:
        """Rows of the training, validation and test part."""
        labels = zoo.runs[rows]
        if self.split == "checkpoint":
            if len({*labels.tolist()}) == len(rows):
                raise RunError(
                    f"'{zoo.path}': one checkpoint of each run is selected, a split by checkpoint "
                    "needs several: choose --percent all"
                )
            labels = rows.astype(str)
        train, *held_out = split_rows(rows, labels, FRACTIONS, self.split_seed)
        if self.max_train is not None:
            train = nested_subset(train, self.max_train, self.split_seed)
        return [train, *held_out]

    def to_json(self, augment: float | None = None) -> dict[str, Any]:
        """Description for the record of a run."""
        subset: dict[str, Any] = {} if self.max_train is None else {"max_train": self.max_train}
        subset |= {"split_seed": self.split_seed} if self.split_seed else {}
        subset |= {"split": self.split} if self.split != "run" else {}
        chosen = {"percent": self.percent, "min_accuracy": self.min_accuracy}
        return {**chosen, "augment": augment, **subset}


def load_rows(
    zoo: Zoo,
    rows: np.ndarray,
    target: Target = ACCURACY,
    model: str = "",
    text: str = "",
    report: Callable[[dict[str, Any]], None] | None = None,
) -> Dataset:
    """Load rows of a zoo into memory; reject weights that are not finite.

    Args:
        zoo: the zoo.
        rows: of it.
        target: what is predicted.
        model: predictor that reads them; of a zoo of checkpoints it decides what is read.
        text: see `read_checkpoints`.
        report: called after every checkpoint.
    """
    columns = {"run": zoo.runs[rows], "row": np.asarray(rows, dtype=np.int64)}
    sizes = zoo.known_sizes
    space, tokens = (None, None) if sizes is None else (sizes.block_space, sizes.tokens)
    if zoo.layout is not None:
        network = check_finite(zoo.batch(rows), [f"{zoo.path}#{row}" for row in rows])
    else:
        network = read_checkpoints(zoo, rows, model, text, report)
    if not zoo.named:
        recipe = {name: zoo.table[name] for name in ("seed", *CONFIGURATION)}
    else:
        # Those named as in a built zoo are written beside the predictions, for the report.
        recipe = {
            name if name in CONFIGURATION else RECIPE_COLUMN + name: column
            for name, column in zoo.targets.items()
            if name not in (target.column, ACCURACY_COLUMN, RUN)
        }
    columns |= {name: column[rows] for name, column in recipe.items()}
    values = target_values(zoo, target.column, rows)
    if target != ACCURACY:
        columns["target"] = values if target.kind == "class" else target.measured(values)
        accuracy = zoo.table.get(ACCURACY_COLUMN)
        if accuracy is not None and accuracy.dtype.kind == "f":
            columns[ACCURACY_COLUMN] = accuracy[rows]
    encoded = torch.as_tensor(target.encode(values), dtype=torch.float32)
    return Dataset(space, network, encoded, columns, tokens, target)


def check_finite(networks: Batch, names: Sequence[str]) -> Batch:
    """Named networks in float32; reject values that are not finite there."""
    networks = networks.to(torch.float32)
    bad = ~networks.weights.isfinite().all(1)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        views = networks[row : row + 1].views
        tensor = next(name for name, w in views.items() if not bool(w.isfinite().all()))
        raise RunError(f"'{names[row]}': '{tensor}' holds values that are not finite in float32")
    return networks


def count_training(zoo: Zoo, selection: Selection) -> int:
    """Number of training networks of `load_parts`, without loading any."""
    return len(selection.parts(zoo, selection.rows(zoo))[0])


def nested_subset(rows: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Random subset of at most ``size`` rows, in their order.

    For one seed a smaller subset is part of every larger one.
    """
    if size < 1:
        raise RunError(f"a subset needs at least 1 network, found {size}")
    shuffled = np.random.default_rng(seed).permutation(len(rows))
    return np.asarray(rows[np.sort(shuffled[:size])])


def load_parts(
    zoo: Zoo,
    selection: Selection | None = None,
    target: Target | None = None,
    model: str = "",
    report: Callable[[dict[str, Any]], None] | None = None,
) -> Parts:
    """Select networks of a zoo, split them by run 70/15/15, and load them.

    With ``all_checkpoints``, `Parts.more` holds all other networks whose runs are in no held-out
    part; with ``max_train``, only those of the selected training runs.

    Args:
        zoo: with networks of one size, or of any family.
        selection: which networks, and their target.
        target: None to read it from the selected networks.
        model: see `load_rows`.
        report: likewise.
    """
    selection = selection or Selection()
    chosen = selection.chosen(zoo)
    rows = chosen[known_targets(zoo, selection.target, chosen)]
    missing = len(chosen) - len(rows)
    if missing and report is not None:
        report({"note": f"{missing} networks without '{selection.target}' are left out"})
    if len(rows) < MIN_NETWORKS:
        least = selection.min_accuracy
        which = f"have accuracy at least {least:g}" if least else "are selected"
        which += f" with a '{selection.target}'" if missing else ""
        raise RunError(f"not enough networks: {len(rows)} {which}, {MIN_NETWORKS} are needed")
    target = target or Target.of(selection.target, target_values(zoo, selection.target, rows))
    train, val, test = selection.parts(zoo, rows)
    if zoo.named:
        data = load_rows(zoo, rows, target, model, report=report)
        taken = [data.take(np.searchsorted(rows, part)) for part in (train, val, test)]
        return check_parts(Parts(taken[0], taken[1], taken[2], missing=missing))
    more = None
    if selection.all_checkpoints:
        every = zoo.select(percent=None)
        held_out = zoo.runs[np.concatenate([val, test])]
        run = zoo.runs[every]
        subset = selection.max_train is not None
        free = np.isin(run, zoo.runs[train]) if subset else ~np.isin(run, held_out)
        rows = np.asarray(every[free & ~np.isin(every, train)])
        more = load_rows(zoo, rows, target) if len(rows) else None
    held = [_held_out(zoo, part, train, target) for part in (val, test)]
    return check_parts(Parts(load_rows(zoo, train, target), held[0], held[1], more, missing))


def _held_out(zoo: Zoo, rows: np.ndarray, train: np.ndarray, target: Target) -> Dataset:
    data = load_rows(zoo, rows, target)
    return replace(data, columns={**data.columns, TWIN: has_twin(zoo, rows, train)})


def has_twin(zoo: Zoo, rows: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Which rows have the recipe and the seed of a training row, but for a tiny weight decay."""

    def recipes(of: np.ndarray) -> list[tuple[Any, ...]]:
        columns = [zoo.table[name][of].tolist() for name in ("seed", *CONFIGURATION)]
        decay = columns[1 + CONFIGURATION.index("l2")]
        decay[:] = [0.0 if value <= TWIN_DECAY else value for value in decay]
        return [*zip(*columns, strict=True)]

    learned = {*recipes(train)}
    return np.array([recipe in learned for recipe in recipes(rows)])


def check_parts(parts: Parts) -> Parts:
    """Reject parts without two networks of different targets."""
    target = parts.train.target
    for name in parts.counts:
        part: Dataset = getattr(parts, name)
        if len(part) < 2:
            raise RunError(f"not enough networks: {len(part)} in the {name} part, 2 are needed")
        if float(part.accuracy.max() - part.accuracy.min()) == 0:
            value = part.truth[0]
            raise RunError(
                f"not enough networks: all {len(part)} in the {name} part have the same "
                f"{target.what}, {value if target.kind == 'class' else format(value, '.4g')}"
            )
    return parts


def load_networks(
    zoo: Zoo,
    selection: Selection | None = None,
    model: str = "",
    report: Callable[[dict[str, Any]], None] | None = None,
) -> Parts | SizeGroups:
    """`load_parts` of a zoo, or of every size of a mixed zoo that is not left out."""
    selection = selection or Selection()
    if not zoo.mixed:
        if selection.leave_out:
            raise RunError(f"'{zoo.path}' has networks of one size: there is none to leave out")
        return load_parts(zoo, selection, None, model, report)
    if unknown := [name for name in selection.leave_out if name not in zoo.parts]:
        raise RunError(
            f"'{zoo.path}' has no networks of the kind '{unknown[0]}': it has "
            f"{', '.join(zoo.parts) or 'none yet'}"
        )
    names = [*selection.leave_out, *(name for name in zoo.parts if name not in selection.leave_out)]
    rows = {name: selection.rows(zoo.parts[name]) for name in names}
    column = selection.target
    values = [target_values(zoo.parts[name], column, at) for name, at in rows.items()]
    every = np.concatenate(values)  # none are refused size by size
    target = Target.of(column, every) if len(every) else Target(column)
    none = np.array([], dtype=int)
    left_out = {n: _held_out(zoo.parts[n], rows[n], none, target) for n in selection.leave_out}
    names = [name for name in names if name not in left_out]
    if not names:
        raise RunError(f"'{zoo.path}' has no size left to train on: {len(left_out)} are left out")
    parts = {}
    for name in names:
        try:
            parts[name] = load_parts(zoo.parts[name], selection, target)
        except RunError as error:
            raise RunError(f"{name}: {error}") from error
    return SizeGroups(parts, left_out)


def describe_zoo(zoo: Zoo) -> dict[str, Any]:
    """Description of a zoo for the record of a run."""
    zoos, layout = zoo.parts, zoo.layout
    known = {name: part.known_sizes for name, part in zoos.items()}
    sizes = {name: each.to_json() for name, each in known.items() if each is not None}
    indices = [each.path / INDEX for each in zoos.values()]
    digests = [file_sha256(path) for path in indices if path.is_file()]
    return {
        "name": zoo.path.name,
        "sha256": hashlib.sha256("".join(digests).encode()).hexdigest(),
        "task": zoo.task,
        "networks": len(zoo),
        "runs": sum(len(np.unique(each.runs)) for each in zoos.values()),
        "seeds": zoo.seeds,
        **({"architectures": sizes} if zoo.mixed else
           {"architecture": sizes[UNNAMED]} if sizes else
           {"families": dict(Counter(zoo.table["family"].tolist()))} if layout is None else
           {"layout": {name: list(shape) for name, shape in layout.shapes.items()}}),
    }  # fmt: skip


@dataclass(frozen=True)
class DamagedNetworks:
    """Damaged copies of training and validation networks, with their measured accuracy.

    Attributes:
        train: copies of training networks.
        val: copies of validation networks.
        train_drop: loss of accuracy by the damage, ``[n]``.
        train_kinds: kind of damage of each of ``train``, ``[n]``.
        val_kinds: kind of damage of each of ``val``.
    """

    train: Dataset
    val: Dataset
    train_drop: Tensor
    train_kinds: np.ndarray
    val_kinds: np.ndarray

    @property
    def counts(self) -> dict[str, int]:
        """Number of networks in each part."""
        return {"train": len(self.train), "val": len(self.val)}

    def joined(self, other: DamagedNetworks) -> DamagedNetworks:
        """Concatenate with other damaged networks."""
        return DamagedNetworks(
            joined(self.train, other.train),
            joined(self.val, other.val),
            torch.cat([self.train_drop, other.train_drop]),
            np.concatenate([self.train_kinds, other.train_kinds]),
            np.concatenate([self.val_kinds, other.val_kinds]),
        )


def load_damaged(
    damaged: Zoo,
    zoo: Zoo,
    parts: Parts,
    hold_out: Mapping[str, tuple[float, ...]] | None = None,
) -> DamagedNetworks:
    """Load the damaged copies of training and validation networks.

    A network with exchanged tensors counts where both originals belong to the same part.

    Args:
        damaged: from `tnfn zoo damage`.
        zoo: what it was made from.
        parts: of that zoo.
        hold_out: kinds and strengths to ignore, see `damage.parse_damages`.
    """
    recorded = damages(damaged)
    if damaged.sizes != zoo.sizes:
        raise RunError(f"'{damaged.path}' holds networks of other sizes than '{zoo.path}'")
    _check_parents(damaged, zoo, recorded)
    part_of = {run: i for i, part in enumerate((parts.train, parts.val)) for run in part.runs}
    runs = damaged.table["run"].astype(str).tolist()
    chosen: tuple[list[int], list[int]] = ([], [])
    for row, (run, damage) in enumerate(zip(runs, recorded, strict=True)):
        if damage.strength in (hold_out or {}).get(damage.kind, ()):
            continue
        both = [part_of.get(r, 2) for r in (run, damage.other_run or run)]
        if both[0] < 2 and max(both) == both[0]:
            chosen[both[0]].append(row)
    for name, rows in zip(("training", "validation"), chosen, strict=True):
        if len(rows) < MIN_DAMAGED:
            raise RunError(
                f"'{damaged.path}' has {len(rows)} damaged copies of {name} networks, "
                f"{MIN_DAMAGED} are needed"
            )
    train, val = (load_rows(damaged, np.array(rows)) for rows in chosen)
    before = zoo.table["test_accuracy"][[recorded[row].row for row in chosen[0]]]
    drop = torch.as_tensor(before, dtype=torch.float32) - train.accuracy
    kinds = [np.array([recorded[row].kind for row in rows]) for rows in chosen]
    return DamagedNetworks(train, val, drop, *kinds)


def _check_parents(damaged: Zoo, zoo: Zoo, recorded: list[Damage]) -> None:
    rows = np.array([damage.row for damage in recorded])
    fits = rows.max() < len(zoo) and bool(
        (zoo.table["run"][rows] == damaged.table["run"]).all()
        and (zoo.table["seed"][rows] == damaged.table["seed"]).all()
    )
    if not fits:
        raise RunError(f"'{damaged.path}' was not made from the networks of '{zoo.path}'")
