"""Tables of rows of results, our cells beside the paper's numbers, and as Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from transformer_nfn.known_tasks import task_title
from transformer_nfn.models.predictor import model_name, model_place
from transformer_nfn.paper.numbers import (
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
    PaperTable,
    largest_change,
    mean_text,
    table_named,
    table_of,
)
from transformer_nfn.paper.rows import PRECISIONS, OurCell, Row, zoo_label, zoo_seeds
from transformer_nfn.prediction.runs import RUN_FILE, RunError, RunRecord

ALL_NETWORKS = "all"
SEEDS_TOGETHER = "seeds together"
Key = TypeVar("Key")


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
            for dtype in PRECISIONS:
                apart = [row.get(f"agreement_{dtype}") for cell in cells for row in cell.rows]
                known = [value for value in apart if value is not None]
                parts += [f"{dtype} max {max(known):.1e}"] if known else []
            if parts:
                found.append(f"{label}, predictions for gU and U: {', '.join(parts)}")
        return found


def check_topic(record: RunRecord, folder: Path) -> None:
    """Reject the cell of a table that is filed under no topic, such as under an old number."""
    topic = (record.table or {}).get("table")
    if record.table is not None and topic not in TOPICS:
        raise RunError(
            f"'{folder / RUN_FILE}': 'table.table' expected one of {', '.join(TOPICS)}, found "
            f"{topic!r}: numbers of tables have changed, so reproduce it in a new folder"
        )


def lay_out(name: str, rows: Iterable[Row]) -> list[TableView]:
    """Sort the rows of one table into its cells; one table per zoo, unless columns are tasks.

    Zoos with one seed for all and with a seed each never share a table of τ. Splits of a zoo share
    a cell. Where two runs claim one cell of one split, the later one is shown.
    """
    paper = table_named(name)
    runs: dict[tuple[str, str, str, int], list[Row]] = {}
    for each in rows:
        seed = each.get("seed")
        seen = table_of(each["table"], each["zoo_task"]) is paper
        if not seen or (paper is MIXED and seed is not None):  # rows of sizes are of all seeds
            continue
        zoo = zoo_label(each)
        if paper.by_task:
            zoo = (zoo_seeds(each) or "") if paper.quantity == "tau" else ""
        run = runs.setdefault((zoo, each["row"], each["column"], each["split_seed"] or 0), [])
        if seed is None or any(other.get("seed") in (seed, None) for other in run):
            run.clear()
        run.append(each)
    views: dict[str, TableView] = {}
    found: dict[tuple[str, str, str], list[OurCell]] = {}
    for (zoo, *_), run in runs.items():
        view = views.setdefault(zoo, TableView.of(paper, zoo))
        for (row, column), cell in _cells_of(paper, run).items():
            view.rows.setdefault(row, model_name(row))
            label = task_title(column)
            view.columns.setdefault(column, model_name(column) if label == column else label)
            found.setdefault((zoo, row, column), []).append(cell)
    for (zoo, row, column), cells in found.items():
        views[zoo].ours[row, column] = OurCell.over_splits(cells)
    for view in views.values():
        if paper.by_task:
            labels = dict.fromkeys(zoo_label(cell.rows[0]) for cell in view.ours.values())
            view.zoo = "; ".join(labels)
        if paper is TABLE_7:
            _add_changes(view)
        elif paper is LEARNING_CURVE:
            _arrange_curve(view)
    return list(views.values()) or [TableView.of(paper)]


def markdown_table(name: str, rows: Iterable[Row]) -> str:
    """A table in Markdown: our row, and under it the paper's."""
    lines = []
    for view in lay_out(name, rows):
        paper, notes = view.paper, [f"- {note}" for note in view.notes]
        zoo = f" Here: {view.zoo}." if view.zoo else ""
        source = f" Paper: {paper.zoo}." if paper.printed else ""
        lines += [f"**{paper.heading}. {paper.title}.**{zoo}{source}", "", *view.lines(), ""]
        lines += [*notes, ""] if notes else []
    return "\n".join(lines)


def _cells_of(paper: PaperTable, run: Sequence[Row]) -> dict[tuple[str, str], OurCell]:
    """The cells of a run: one, or more where the table has numbers of parameters or networks."""
    row, column, tau = run[0]["row"], run[0]["column"], OurCell.of(run)
    if paper.quantity == "parameters":
        return {(row, column): OurCell.count(run, "parameters")}
    if paper is TABLE_5:
        return {(row, "tau"): tau, (row, "parameters"): OurCell.count(run, "parameters")}
    cells = {(row, column): tau}
    if paper is MIXED and run[0]["status"] == "done":
        left_out, held = column == LEFT_OUT, run[0]["coverage"]
        if isinstance(run[0]["test"], int):
            where = TESTED_LEFT_OUT if left_out else TESTED
            cells[row, where] = OurCell.count(run, "test")
        if left_out and held is not None:
            cells[row, HELD] = OurCell(run, held, None, f"{100 * held:.0f} %")
    return cells


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
            view.ours[GAP, column] = OurCell((), gap, None, mean_text(gap))
    for row in view.rows:
        change = largest_change([values.get((row, column)) for column in view.columns])
        if change is not None:
            view.ours[row, CHANGE] = OurCell((), change.value, None, change.text)
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
        if column == ALL_NETWORKS and cell.train is not None:
            view.columns[column] = f"All {cell.train:,}"


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
        if cell and cell.value is not None and cell.train is not None:
            lines.setdefault(row, []).append(cell)
    return dict(sorted(lines.items(), key=lambda line: -(line[1][-1].value or 0.0)))
