"""Reproduced cells beside the paper's numbers, as Markdown and as columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from transformer_nfn.known_tasks import seeds_text, task_title
from transformer_nfn.models.predictor import model_name, model_place
from transformer_nfn.paper.numbers import (
    ALL_KINDS,
    CHANGE,
    CHANGES,
    GAP,
    HELD,
    LEARNING_CURVE,
    LEFT_OUT,
    MIXED,
    NFN,
    NOTHING,
    TABLE_5,
    TABLE_7,
    TESTED,
    TESTED_LEFT_OUT,
    TOPICS,
    WITHIN,
    PaperTable,
    largest_change,
    mean_text,
    table_named,
    table_of,
)
from transformer_nfn.prediction.metrics import standard_error
from transformer_nfn.prediction.runs import ENSEMBLE_TAU, RUN_FILE, RunError, RunRecord

ALL_NETWORKS = "all"
SEEDS_TOGETHER = "seeds together"
Key = TypeVar("Key")


@dataclass(frozen=True)
class OurCell:
    """One reproduced cell: a number, or the reason why there is none."""

    record: RunRecord
    value: float | None
    error: float | None
    text: str
    together: float | None = None
    """τ of the mean over the seeds; None for one seed."""

    @staticmethod
    def over_splits(cells: Sequence[OurCell]) -> OurCell:
        """Mean over splits of the zoo, and its standard error; a single one as it is."""
        values = [cell.value for cell in cells if cell.value is not None]
        if len(values) < 2 or isinstance(values[0], int):  # numbers of parameters
            return next((cell for cell in cells if cell.value is not None), cells[0])
        value, error = float(np.mean(values)), standard_error(values)
        together = [cell.together for cell in cells if cell.together is not None]
        both = float(np.mean(together)) if len(together) == len(cells) else None
        return OurCell(cells[0].record, value, error, mean_text(value, error), both)

    @property
    def reason(self) -> str | None:
        """Why the cell is empty, None where it is not."""
        if self.value is not None or self.record.status == "done":
            return None
        return self.record.status


@dataclass
class TableView:
    """A table of one zoo (or of several tasks) with our cells and the paper's."""

    paper: PaperTable
    zoo: str
    rows: dict[str, str]
    columns: dict[str, str]
    ours: dict[tuple[str, str], OurCell] = field(default_factory=dict)

    @staticmethod
    def of(paper: PaperTable, zoo: str = "") -> TableView:
        """The table without a cell of ours."""
        return TableView(paper, zoo, dict(paper.rows), dict(paper.columns))

    def best(self, column: str) -> set[str]:
        """Rows with the highest τ of the column, as printed."""
        if column in (CHANGE, "parameters") or self.paper.quantity != "tau":
            return set()
        return best_keys({row: cell.value for (row, at), cell in self.ours.items() if at == column})

    def together(self, row: str) -> list[str]:
        """τ of the mean over seeds in each cell of a row; empty where there is none."""
        if not self.paper.together:
            return []
        texts = []
        for column in self.columns:
            every = {r: cell.together for (r, at), cell in self.ours.items() if at == column}
            text = mean_text(every.get(row))
            texts.append(f"**{text}**" if row in best_keys(every) else text)
        return texts if any(text != NOTHING for text in texts) else []

    def lines(self) -> list[str]:
        """The table in Markdown: our row, and under it the paper's."""
        # Whose number it is, where there is more than ours.
        whose = [""] if self.paper.printed else []
        rows = []
        for row, label in self.rows.items():
            ours, theirs = [_escape(label), *(["here"] if whose else [])], ["", "paper"]
            for column in self.columns:
                text = _short(self.ours.get((row, column)))
                ours.append(f"**{text}**" if row in self.best(column) else text)
                printed = self.paper.cell(row, column)
                theirs.append(f"*{printed.text}*" if printed else NOTHING)
            rows.append(ours)
            if together := self.together(row):
                rows.append([*whose, SEEDS_TOGETHER, *together])
            if any(text != NOTHING for text in theirs[2:]):
                rows.append(theirs)
        return markdown_rows([self.paper.corner, *whose], self.columns.values(), rows)

    @property
    def notes(self) -> list[str]:
        """Sentences under the table."""
        remark = [self.paper.note] if self.paper.note else []
        return [*remark, *self.agreements(), *self.reasons()]

    def reasons(self) -> list[str]:
        """A sentence for each cell without a number."""
        return [
            f"{self.rows[row]}, {self.columns[column]}: {cell.reason}"
            for (row, column), cell in self.ours.items()
            if cell.reason
        ]

    def agreements(self) -> list[str]:
        """A sentence for each row whose predictions for gU and U were compared."""
        found = []
        for row, label in self.rows.items():
            cells = [cell for (at, _), cell in self.ours.items() if at == row]
            parts = []
            for dtype in ("float32", "float64"):
                apart = [(cell.record.summary.get("agreement") or {}).get(dtype) for cell in cells]
                known = [value for value in apart if value is not None]
                parts += [f"{dtype} max {max(known):.1e}"] if known else []
            if parts:
                found.append(f"{label}, predictions for gU and U: {', '.join(parts)}")
        return found


def check_topic(record: RunRecord, folder: Path) -> None:
    """Reject the cell of a table that is filed under no topic, such as under an old number."""
    topic, _, _ = place(record)
    if record.table is not None and topic not in TOPICS:
        raise RunError(
            f"'{folder / RUN_FILE}': 'table.table' expected one of {', '.join(TOPICS)}, found "
            f"{topic!r}: numbers of tables have changed, so reproduce it in a new folder"
        )


def lay_out(name: str, records: Iterable[RunRecord]) -> list[TableView]:
    """Sort the records of one table into its cells; one table per zoo, unless columns are tasks.

    Zoos with one seed for all and with a seed each never share a table of τ. Splits of a zoo share
    a cell. Where two records claim one cell of one split, the later one is shown.
    """
    paper = table_named(name)
    views: dict[str, TableView] = {}
    found: dict[tuple[str, str, str], dict[int, OurCell]] = {}
    for record in records:
        if table_of(place(record)[0], record.zoo.get("task")) is not paper:
            continue
        zoo = zoo_label(record)
        if paper.by_task:
            zoo = (zoo_seeds(record) or "") if paper.quantity == "tau" else ""
        view = views.setdefault(zoo, TableView.of(paper, zoo))
        for row, column, cell in _cells_of(paper, record):
            view.rows.setdefault(row, model_name(row))
            label = task_title(column)
            view.columns.setdefault(column, model_name(column) if label == column else label)
            split = record.selection.get("split_seed", 0)
            found.setdefault((zoo, row, column), {})[split] = cell
    for (zoo, row, column), cells in found.items():
        views[zoo].ours[row, column] = OurCell.over_splits([*cells.values()])
    for view in views.values():
        if paper.by_task:
            labels = dict.fromkeys(zoo_label(cell.record) for cell in view.ours.values())
            view.zoo = "; ".join(labels)
        if paper is TABLE_7:
            _add_changes(view)
        elif name == LEARNING_CURVE.name:
            _arrange_curve(view)
    return list(views.values()) or [TableView.of(paper)]


def finite(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return None
    return float(value) if np.isfinite(value) else None


def mean_tau(record: RunRecord) -> tuple[float | None, float | None]:
    """Mean τ over the seeds and its standard error; None without a result, or for one seed."""
    if record.status != "done":
        return None, None
    tau, error = record.summary.get("tau"), record.summary.get("tau_se")
    return finite(tau), finite(error) if len(record.seeds) != 1 else None


def seeds_together(record: RunRecord) -> float | None:
    """τ of the mean over the seeds, which ``tnfn predict`` reports; None for one seed."""
    if record.status != "done" or len(record.seeds) < 2:
        return None
    return finite(record.summary.get(ENSEMBLE_TAU))


def zoo_label(record: RunRecord) -> str:
    """Label of a zoo: task, name if it differs, size and seeds."""
    task = str(record.zoo.get("task", "unknown task"))
    name = str(record.zoo.get("name") or task)
    title = task_title(task)
    if name not in (task, title, "zoo"):
        title = f"{title} ({name})"
    size = zoo_size(record.zoo)
    seeds = zoo_seeds(record)
    words = [title]
    words += [] if size is None else [f"{size:,} networks"]
    words += [] if seeds is None else [seeds_text(seeds)]
    return ", ".join(words)


def zoo_seeds(record: RunRecord) -> str | None:
    """The kind of seeds in a record; None where it has none, and for a user's checkpoints."""
    kind = record.zoo.get("seeds")
    return None if kind is None or "families" in record.zoo else str(kind)


def zoo_size(zoo: Mapping[str, Any]) -> int | None:
    """Number of trained networks of the zoo; in built zoos checkpoints of a run count once."""
    for key in ("networks",) if "families" in zoo else ("runs", "networks"):
        if isinstance(zoo.get(key), int):
            return int(zoo[key])
    return None


def markdown_table(name: str, records: list[RunRecord]) -> str:
    """A table in Markdown: our row, and under it the paper's."""
    lines = []
    for view in lay_out(name, records):
        paper, notes = view.paper, [f"- {note}" for note in view.notes]
        zoo = f" Here: {view.zoo}." if view.zoo else ""
        source = f" Paper: {paper.zoo}." if paper.printed else ""
        lines += [f"**{paper.heading}. {paper.title}.**{zoo}{source}", "", *view.lines(), ""]
        lines += [*notes, ""] if notes else []
    return "\n".join(lines)


def _cells_of(paper: PaperTable, record: RunRecord) -> list[tuple[str, str, OurCell]]:
    """The cells of a record: one, or two where the table has parameters too."""
    if paper.name == MIXED.name:
        return _cells_of_kinds(record)
    _, row, column = place(record)
    size = _count_cell(record, record.num_parameters)
    if paper is TABLE_5:
        return [(row, "tau", _tau_cell(record)), (row, "parameters", size)]
    return [(row, column, size if paper.quantity == "parameters" else _tau_cell(record))]


def _cells_of_kinds(record: RunRecord) -> list[tuple[str, str, OurCell]]:
    """A cell of τ for each size, as if only its networks had been tested, and their number."""
    _, row, column = place(record)
    if record.status != "done":
        return [(row, column, _tau_cell(record))]
    summary, left_out = record.summary, column == LEFT_OUT
    if left_out:
        figures = {row: summary.get(LEFT_OUT, {}).get(row, {})}
    else:
        every = {**summary, "networks": record.selection.get("test")}
        figures = {**summary.get("kinds", {}), ALL_KINDS: every}
        figures[WITHIN] = {"tau": summary.get("tau_within")}
    found = []
    for kind, values in figures.items():
        count, held = values.get("networks"), values.get("coverage")
        part = replace(record, summary=values, selection={**record.selection, "test": count})
        found.append((kind, column, _tau_cell(part)))
        if isinstance(count, int):
            where = TESTED_LEFT_OUT if left_out else TESTED
            found.append((kind, where, _count_cell(part, count)))
        if left_out and held is not None:
            found.append((kind, HELD, OurCell(part, held, None, f"{100 * held:.0f} %")))
    return found


def place(record: RunRecord) -> tuple[str, str, str]:
    """Topic, row and column of the cell that a run fills; empty texts for other runs."""
    table = record.table or {}
    topic, row, column = (str(table.get(key, "")) for key in ("table", "row", "column"))
    return topic, row, column


def _tau_cell(record: RunRecord) -> OurCell:
    if "auroc" in record.summary:
        auroc = finite(record.summary["auroc"])
        return OurCell(record, auroc, None, f"AUROC {mean_text(auroc)}")
    tau = mean_tau(record)
    return OurCell(record, *tau, mean_text(*tau), seeds_together(record))


def _count_cell(record: RunRecord, count: int | None) -> OurCell:
    return OurCell(record, count, None, NOTHING if count is None else f"{count:,}")


def best_keys(values: Mapping[Key, float | None], *, lowest: bool = False) -> set[Key]:
    """Keys of the highest value as printed; none where there is nothing to compare."""
    known = {key: round(value, 3) for key, value in values.items() if value is not None}
    if len(known) < 2:
        return set()
    best = (min if lowest else max)(known.values())
    return {key for key, value in known.items() if value == best}


def _add_changes(view: TableView) -> None:
    """The lead of Transformer-NFN in each column, and the largest change of each row."""
    values = {at: cell.value for at, cell in view.ours.items() if cell.value is not None}
    for column in view.columns:
        others = (values.get((row, column)) for row in view.paper.printed if row != NFN)
        known = [value for value in others if value is not None]
        if known and (NFN, column) in values:
            gap = values[GAP, column] = values[NFN, column] - max(known)
            record = replace(view.ours[NFN, column].record, summary={})
            view.ours[GAP, column] = OurCell(record, gap, None, mean_text(gap))
    for row in view.rows:
        change = largest_change([values.get((row, column)) for column in view.columns])
        if change is not None:
            record = next(cell.record for (at, _), cell in view.ours.items() if at == row)
            view.ours[row, CHANGE] = OurCell(record, change.value, None, change.text)
    view.columns |= CHANGES


def _arrange_curve(view: TableView) -> None:
    """Models in a fixed order, ascending numbers of networks, and the number behind "all"."""
    rows = sorted(view.rows, key=lambda row: model_place(row.partition(":")[0]))
    view.rows = {row: view.rows[row] for row in rows}
    sizes = {n: int(n) if n.isdecimal() else float("inf") for n in view.columns}
    view.columns = {
        n: f"{size:,}" if n.isdecimal() else n.capitalize()
        for n, size in sorted(sizes.items(), key=lambda entry: entry[1])
    }
    for (_, column), cell in view.ours.items():
        train = cell.record.selection.get("train")
        if column == ALL_NETWORKS and isinstance(train, int):
            view.columns[column] = f"All {train:,}"


def markdown_rows(
    corner: Sequence[str], columns: Iterable[str], rows: Iterable[Sequence[str]]
) -> list[str]:
    """A table in Markdown: headings of its first columns and of those with numbers, then rows."""
    head = [*corner, *columns]
    rule = f"|{'---|' * len(corner)}{'--:|' * (len(head) - len(corner))}"
    first, *others = (f"| {' | '.join(row)} |" for row in (head, *rows))
    return [first, rule, *others]


def _short(cell: OurCell | None) -> str:
    if cell is None:
        return NOTHING
    return _escape(cell.reason.partition(":")[0]) if cell.reason else cell.text


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def curve_lines(view: TableView) -> dict[str, list[OurCell]]:
    """Cells of each model by number of networks, the model with the highest τ at its end first."""
    lines: dict[str, list[OurCell]] = {}
    for row, column in itertools.product(view.rows, view.columns):
        cell = view.ours.get((row, column))
        if cell and cell.value is not None and isinstance(cell.record.selection.get("train"), int):
            lines.setdefault(row, []).append(cell)
    return dict(sorted(lines.items(), key=lambda line: -(line[1][-1].value or 0.0)))
