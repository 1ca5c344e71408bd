"""The numbers of the paper's tables (``tables.toml``), and the layout of tables that it lacks.

Tables have the paper's numbers: 1 to 3 are in the experiment section, 5 to 7 in the appendix; 4 is
the grid of its networks and has no results. Records of runs hold the *topic* of a table, never its
number. A cell is text exactly as printed (``0.86 ± 0.001`` where the paper dropped a zero), parsed
by `PaperTable.cell`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from transformer_nfn.errors import TransformerNFNError


@dataclass(frozen=True)
class Number:
    """A printed number: value, standard error if printed, and text."""

    value: float
    error: float | None
    text: str


NOTHING = "–"
"""What stands where there is no number."""


def mean_text(value: float | None, error: float | None = None) -> str:
    """``0.905 ± 0.002``, without the error where there is one seed only."""
    if value is None or value != value:
        return NOTHING
    text = f"{value:.3f}".replace("-", "−")
    return text if error is None or error != error else f"{text} ± {error:.3f}"


def examples_text(count: int | None) -> str:
    """How many labelled examples a prediction is worth, to two digits: ``980``, ``> 131,072``."""
    return "> 131,072" if count is None else f"{float(f'{count:.2g}'):,.0f}"


NFN = "transformer_nfn"
GAP, CHANGE = "gap", "change"
"""Row of table 7, and a column of it that the paper lacks, see `largest_change`."""
CHANGES = {CHANGE: "Largest change"}


def largest_change(values: Sequence[float | None]) -> Number | None:
    """Largest difference of an augmented value from the value of as many unaugmented steps."""
    if len(values) < 2:
        return None
    original, twice, *others = values
    base = original if twice is None else twice
    changes = [value - base for value in others if value is not None and base is not None]
    if not changes:
        return None
    change = max(changes, key=abs)
    return Number(change, None, f"{change:+.3f}".replace("-", "−"))


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper, or like the paper's.

    Attributes:
        name: ``table1`` to ``table7``, ``learning-curve`` and others, as in ``tnfn reproduce``.
        topic: what records of its cells are filed under.
        title: caption of the table.
        columns: key and label of each column, in order.
        printed: for each row its cells as printed, ``-`` where the paper has none; empty where
            the paper has no such table.
        corner: heading of the rows.
        quantity: ``tau``, of which the highest of a column is the best; ``parameters``; or another,
            which is not compared within a column.
        by_task: the columns are tasks, so runs of several zoos share the table.
        together: whether a line under each of ours gives τ of the mean over seeds.
        zoo: networks of the paper's measurement.
        note: a remark for the comparison.
    """

    name: str
    topic: str
    title: str
    columns: Mapping[str, str] = field(default_factory=dict)
    printed: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    corner: str = "Model"
    quantity: str = "tau"
    by_task: bool = False
    together: bool = False
    zoo: str = ""
    note: str = ""

    @property
    def rows(self) -> dict[str, str]:
        """Key and label of each row, in order."""
        from transformer_nfn.models.predictor import model_name  # imports PyTorch

        labels = {row: row.replace("+", " + ").replace(",", ", ").title() for row in self.printed}
        return {row: model_name(row, label) for row, label in labels.items()}

    @property
    def heading(self) -> str:
        """``Table 1``, ``Learning curve``."""
        return self.name.replace("table", "table ").replace("-", " ").capitalize()

    def cell(self, row: str, column: str) -> Number | None:
        """The paper's number, or None where it printed none."""
        if column == CHANGE:
            cells = [self.cell(row, other) for other in self.columns]
            return largest_change([cell.value if cell else None for cell in cells])
        if row not in self.printed or column not in self.columns:
            return None
        text = self.printed[row][list(self.columns).index(column)]
        if text == "-":
            return None
        mean, _, error = text.partition(" ± ")
        scale = 1e6 if mean.endswith("M") else 1.0
        return Number(float(mean.rstrip("M")) * scale, float(error) if error else None, text)


def _cells(text: str) -> dict[str, tuple[str, ...]]:
    """Reads ``row | cell | cell`` lines."""
    lines = [[part.strip() for part in line.split("|")] for line in text.strip().splitlines()]
    return {row: tuple(cells) for row, *cells in lines}


_DATA = tomllib.loads(files(__package__).joinpath("tables.toml").read_text(encoding="utf-8"))
STATED: Mapping[str, str] = _DATA.pop("stated")
"""What the text of the paper states in numbers."""
ALL_TABLES: Mapping[str, PaperTable] = {
    name: PaperTable(name, **{**fields, "printed": _cells(fields.get("printed", ""))})
    for name, fields in _DATA.items()
}
PAPER_TABLES = {name: table for name, table in ALL_TABLES.items() if table.printed}
TABLE_1, TABLE_2, TABLE_3, TABLE_5, TABLE_6, TABLE_7 = PAPER_TABLES.values()
LEARNING_CURVE, MIXED = ALL_TABLES["learning-curve"], ALL_TABLES["mixed"]
TARGETS, TRANSFER = ALL_TABLES["targets"], ALL_TABLES["transfer"]
TOPICS = tuple(dict.fromkeys(table.topic for table in ALL_TABLES.values()))
ALL_KINDS, WITHIN, HOME = "all kinds", "within kinds", "home"
TESTED, WHOLE, INVARIANTS, TESTED_LEFT_OUT, LEFT_OUT, HELD = MIXED.columns


def table_named(name: str) -> PaperTable:
    """The table that ``tnfn reproduce`` calls by this name."""
    if name not in ALL_TABLES:
        raise no_table(name, ALL_TABLES)
    return ALL_TABLES[name]


def no_table(name: str, known: Iterable[str]) -> TransformerNFNError:
    """The error about a name that is not among the known ones."""
    if name == "table4":
        return TransformerNFNError(
            "table 4 of the paper is the grid of its networks and has no results to reproduce; "
            f"the channels of Transformer-NFN are {TABLE_5.name}"
        )
    return TransformerNFNError(f"there is no '{name}' to reproduce; there are {', '.join(known)}")


def table_of(topic: str, task: str | None) -> PaperTable | None:
    """The table in which a record stands; thresholds are table 2 for networks on AG News.

    >>> table_of("thresholds", "ag_news").heading, table_of("channels", "mnist").heading
    ('Table 2', 'Table 5')
    """
    if topic == TABLE_2.topic:
        return TABLE_2 if task == "ag_news" else TABLE_1
    return next((table for table in ALL_TABLES.values() if table.topic == topic), None)


def quoted(key: str) -> str:
    """The number of the paper under a key: of `STATED`, or ``table1/mlp/all`` without its error.

    >>> quoted("table1/mlp/all"), quoted("mnist/networks")
    ('0.866', '15,689')
    """
    if key in STATED:
        return STATED[key]
    name, _, place = key.partition("/")
    row, _, column = place.rpartition("/")
    number = PAPER_TABLES[name].cell(row, column) if name in PAPER_TABLES else None
    if number is None:
        raise TransformerNFNError(f"the paper has no number '{key}'")
    return number.text.partition(" ± ")[0]
