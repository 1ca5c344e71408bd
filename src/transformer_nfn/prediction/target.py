"""Targets: the property of a network that predictors learn from its weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from transformer_nfn.errors import RunError
from transformer_nfn.io.json_fields import Fields
from transformer_nfn.zoo import Zoo
from transformer_nfn.zoo.targets import TEST_ACCURACY, is_accuracy, names_accuracy

ACCURACY_COLUMN = TEST_ACCURACY
GAP = "generalisation_gap"
"""Training accuracy less test accuracy, which no zoo stores."""
PLACES = ("run", "crashed", "shard", "row", "checksum", "source")
"""Columns that say where a network is stored, not what it is."""
CHECKPOINT_COLUMNS = ("epoch", "percent", "best")
"""Targets for which all checkpoints of a run count, not one."""
DECADES = 100.0
"""Positive numbers whose largest is so many times the smallest are learned as logarithms."""
SPAN = 0.1
"""Numbers from 0 to 1 that span less are not learned as they are: differences would be lost."""
SATURATED = 1e-6
MAX_CLASSES = 64


@dataclass(frozen=True)
class Target:
    """A property of networks: a share of one such as an accuracy, a number, or a class.

    Predictors learn a number between 0 and 1. A share is that number itself. Another number, and
    an accuracy that spans little, is taken there by the logistic function of its standard score, so
    that differences between usual values count and extreme ones stay finite. For classes, a
    predictor learns of each class whether a network belongs to it.

    Attributes:
        column: of the zoo's table.
        kind: what it is.
        centre: median of a number (of its logarithm).
        scale: standard deviation of a number (of its logarithm); 1 of a share that is learned as
            it is.
        logarithmic: whether a number is learned, and its error measured, as its decimal logarithm.
        classes: names of the classes, sorted.
    """

    column: str = ACCURACY_COLUMN
    kind: Literal["share", "number", "class"] = "share"
    centre: float = 0.0
    scale: float = 1.0
    logarithmic: bool = False
    classes: tuple[str, ...] = ()

    @staticmethod
    def of(column: str, values: np.ndarray) -> Target:
        """Decide from the values of a column what kind of target it is."""
        if not len(values):
            raise RunError(f"'{column}' is unknown for all networks")
        accuracy = is_accuracy(column, values)
        if accuracy and column == ACCURACY_COLUMN:
            return Target()
        if _is_class(values):
            counts = Counter(str(value) for value in values.tolist())
            classes = tuple(sorted(counts))
            if len(classes) > MAX_CLASSES:
                raise RunError(
                    f"'{column}' has {len(classes)} different values, expected at most "
                    f"{MAX_CLASSES} classes"
                )
            if len(classes) < 2:
                raise RunError(f"'{column}' has one class only, '{classes[0][:40]}'")
            rarest = min(classes, key=lambda name: counts[name])
            if counts[rarest] < 2:
                raise RunError(
                    f"'{column}' is '{rarest[:40]}' for one network only: a class needs two"
                )
            return Target(column, "class", classes=classes)
        numbers = values.astype(np.float64)
        low, high = float(numbers.min()), float(numbers.max())
        if low == high:
            raise RunError(f"'{column}' is {low:g} for all networks: there is nothing to predict")
        logarithmic = not accuracy and low > 0 and high / low >= DECADES
        if not logarithmic and low >= 0 and high <= 1 and high - low >= SPAN:
            return Target(column, "share")
        scaled = np.log10(numbers) if logarithmic else numbers
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            centre, scale = float(np.median(scaled)), float(scaled.std())
        if not (math.isfinite(centre) and math.isfinite(scale) and scale > 0):
            raise RunError(
                f"'{column}' is from {low:g} to {high:g}: expected numbers with a standard "
                "deviation above 0 and below infinity"
            )
        return Target(column, "share" if accuracy else "number", centre, scale, logarithmic)

    @property
    def is_accuracy(self) -> bool:
        """Whether it is an accuracy: a share in a column named so."""
        return self.kind == "share" and names_accuracy(self.column)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Classes that have a predictor: all, but of two classes only the second."""
        return self.classes[1:] if len(self.classes) == 2 else self.classes

    @property
    def what(self) -> str:
        """The target in words."""
        return self.column.replace("_", " ")

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Values as numbers between 0 and 1; classes as their position in `classes`.

        Args:
            values: of the column, ``[n]``.
        """
        if self.kind == "class":
            places = {name: i for i, name in enumerate(self.classes)}
            if unknown := {str(value) for value in values.tolist()} - {*places}:
                raise RunError(
                    f"'{self.column}' is '{min(unknown)[:40]}' of some networks, a class that the "
                    f"predictor does not know: {', '.join(self.classes)}"
                )
            return np.array([places[str(value)] for value in values.tolist()], dtype=np.float64)
        scaled = self.measured(values)
        if self._as_it_is:
            return scaled
        return np.asarray(1 / (1 + np.exp((self.centre - scaled) / self.scale)))

    def measured(self, values: np.ndarray) -> np.ndarray:
        """Shares and numbers on the scale on which errors are measured: of some the logarithm."""
        numbers = values.astype(np.float64)
        return np.log10(numbers) if self.logarithmic else numbers

    def in_unit(self, measured: Any) -> Any:
        """The inverse of `measured`."""
        return 10**measured if self.logarithmic else measured

    def decode(self, encoded: np.ndarray) -> np.ndarray:
        """Shares and numbers from the outputs of predictors, of any shape, as `measured`."""
        if self._as_it_is:
            return encoded
        inside = np.clip(encoded, SATURATED, 1 - SATURATED)
        return np.asarray(self.centre + self.scale * np.log(inside / (1 - inside)))

    @property
    def _as_it_is(self) -> bool:
        """Whether predictors learn the value itself."""
        return self.kind == "share" and self.scale == 1.0

    def clip(self, values: Any) -> Any:
        """Values within the range of the target."""
        return values.clip(0, 1) if self.kind == "share" else values

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "classes": [*self.classes]}

    @staticmethod
    def from_json(data: Mapping[str, Any] | None, where: str) -> Target:
        """Read what `to_json` wrote; runs without a target are about accuracy."""
        if data is None:
            return Target()
        fields = Fields(data, where, RunError, "target")
        kind = fields.choice("kind", ("share", "number", "class"))
        column, centre, scale = (
            fields.text("column"), fields.number("centre"), fields.number("scale"),
        )  # fmt: skip
        if not scale > 0:
            fields.refuse("scale", "a number above 0")
        if type(data.get("logarithmic")) is not bool:
            fields.refuse("logarithmic", "true or false")
        classes = tuple(fields.each("classes", Fields.text))
        if len({*classes}) < max(len(classes), 2 * (kind == "class")):
            fields.refuse("classes", "different names, two or more where classes are predicted")
        return Target(column, kind, centre, scale, data["logarithmic"], classes)  # type: ignore[arg-type]


ACCURACY = Target()
"""The test accuracy."""


def _is_class(values: np.ndarray) -> bool:
    """Whether values are names, truth values, or zeros and ones."""
    if values.dtype == object or values.dtype.kind in "bUS":
        return True
    return set(np.unique(values).tolist()) <= {0, 1} and values.dtype.kind in "iu"


def target_columns(zoo: Zoo) -> list[str]:
    """Columns that can be a target."""
    if zoo.named:
        return list(zoo.targets)
    first = next(iter(zoo.parts.values()), None)
    return [] if first is None else [*(name for name in first.table if name not in PLACES), GAP]


def known_targets(zoo: Zoo, column: str, rows: np.ndarray) -> np.ndarray:
    """Which of some rows have a value of a target; all, where there is no such column."""
    if column == GAP and not zoo.named:
        return np.asarray(
            zoo.known("train_accuracy", rows) & zoo.known(ACCURACY_COLUMN, rows), dtype=bool
        )
    return zoo.known(column, rows) if column in zoo.table else np.ones(len(rows), dtype=bool)


def target_values(zoo: Zoo, column: str, rows: np.ndarray) -> np.ndarray:
    """Values of a column of a zoo's table, or of the generalisation gap, for some rows."""
    table = zoo.table
    if column == GAP and not zoo.named:
        values = table["train_accuracy"][rows] - table["test_accuracy"][rows]
    elif column in target_columns(zoo):
        values = table[column][rows]
    else:
        raise RunError(
            f"'{zoo.path}' has no target '{column[:60]}': it has {', '.join(target_columns(zoo))}, "
            "to choose by --target"
        )
    unknown = ~np.isfinite(values) if values.dtype.kind == "f" else values == ""
    if len(missing := np.flatnonzero(unknown)):
        raise RunError(
            f"'{zoo.path}': '{column}' is unknown for {len(missing)} of {len(rows)} networks, "
            f"such as row {rows[missing[0]]}"
        )
    return np.asarray(values)
