"""Write the tables of results into README.md and docs/ from the files in benchmarks/results/.

    python tools/result_tables.py            # writes every page with a table
    python tools/result_tables.py --check    # exit code 1 if a page is out of date
    python tools/result_tables.py --rows results/cells NAME    # rows of finished cells, as NAME

A page marks the place of a table by ``<!-- table: NAME -->`` and ``<!-- end of table -->``.
tables.json has a spec for each NAME. It names a ``table`` of `tnfn reproduce`, the file of its
``rows``, the command that builds the ``zoo``, ``pairs`` of rows whose difference is shown, and
``unfinished`` cells: all else comes from the rows. Tables from before there were such rows have
title, setting, columns, notes and commands in the spec, and a row for each number in
earlier.parquet; ``"paper": "table1"`` adds the paper's row under the rows of each model.

Numbers that stand elsewhere are references: ``<!-- paper:table1/mlp/all -->`` from `paper.numbers`,
``<!-- cell:TABLE; row; column -->`` from a table by name, or from the first one on a page that has
the row. Both end with ``<!-- /paper -->`` or ``<!-- /cell -->``, and what is between is written.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from transformer_nfn.cli.reproduce import BY_MODEL
from transformer_nfn.io.files import read_parquet, write_parquet
from transformer_nfn.paper.numbers import (
    CHANGE,
    CHANGES,
    LEARNING_CURVE,
    NOTHING,
    PAPER_TABLES,
    PaperTable,
    quoted,
    table_named,
    table_of,
)
from transformer_nfn.paper.paired import paired_rows
from transformer_nfn.paper.rows import Row, as_columns, result_rows, zoo_label
from transformer_nfn.paper.table_text import TableView, lay_out, markdown_rows
from transformer_nfn.prediction.runs import RUN_FILE, RunError, RunRecord
from transformer_nfn.report.number_text import counted

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TABLE = re.compile(r"<!-- table: (?P<name>[\w-]+) -->\n.*?<!-- end of table -->", re.DOTALL)
REFERENCE = re.compile(r"<!-- (paper|cell):(.+?) -->.*?<!-- /\1 -->")


@cache
def specs() -> dict[str, Any]:
    """The specs of all tables."""
    found: dict[str, Any] = json.loads((RESULTS / "tables.json").read_text(encoding="utf-8"))
    return found


def cell(key: str) -> str:
    """A cell of a table: ``TABLE; row; column``, or ``docs/PAGE.md; row; column``."""
    name, row, column = key.split("; ")
    text = render(name) if name in specs() else (ROOT / name).read_text(encoding="utf-8")
    head: list[str] = []
    for line in text.splitlines():
        cells = line.strip("| ").split(" | ") if line.startswith("|") else []
        head = (head or cells) if cells else []
        if cells and cells[0] == row and column in head:
            return cells[head.index(column)]
    raise RunError(f"'{name}' has no cell in row '{row}' and column '{column}'")


def from_rows(spec: Any) -> str:
    """The table of a spec, from its rows: those of the splits that all of its cells have."""
    paper = table_named(spec["table"])
    found = read_parquet(RESULTS / f"{spec['rows']}.parquet").to_pylist()
    found = [row for row in found if table_of(row["table"], row["zoo_task"]) is paper]
    splits: dict[tuple[str, str], set[int]] = {}
    for row in found:
        splits.setdefault((row["row"], row["column"]), set()).add(row["split_seed"] or 0)
    common = set.intersection(*splits.values())
    found = [row for row in found if (row["split_seed"] or 0) in common]
    (view,) = lay_out(paper.name, found)
    rows, columns = ({at[i] for at in view.ours} for i in (0, 1))
    view.rows = {row: label for row, label in view.rows.items() if row in rows}
    view.columns = {key: label for key, label in view.columns.items() if key in columns}
    lines = [f"**{paper.heading}. {paper.title}.** {setting(view, found, len(common))}", ""]
    lines += [*view.lines(), *(f"\n{note}" for note in view.notes)]
    if unfinished := spec.get("unfinished"):
        cells = (f"{view.rows[row]}, {view.columns[column]}" for row, column in unfinished)
        lines += ["", f"Not finished: {'; '.join(cells)}."]
    if pairs := spec.get("pairs"):
        lines += ["", *differences(spec["rows"], view, pairs)]
    lines += ["", "```console", f"$ {spec['zoo']}", f"$ {command(view, found)}", "```"]
    return "\n".join(lines)


def setting(view: TableView, rows: list[Row], splits: int) -> str:
    """How the cells of a table were made."""
    first = rows[0]
    parts = {
        (row["train"], row["test"]): view.columns.get(row["column"], "")
        for row in sorted(rows, key=lambda row: -float(row["min_accuracy"] or 0))
    }
    (train, test), *fewer = sorted(parts, reverse=True)
    counts = "; ".join(f"{a:,} and {b:,} from {parts[a, b]}" for a, b in fewer if parts[a, b])
    return (
        f"{zoo_label(first)}, read at {first['percent']} % of their training; {train:,} "
        f"training and {test:,} test networks{f' ({counts})' if counts else ''}; "
        f"{counted(len({row['seed'] for row in rows}), 'seed')} on {counted(splits, 'split')}; "
        f"{first['device']}, commit {first['commit'][:8]}, zoo {first['zoo_sha256'][:8]}."
    )


def command(view: TableView, rows: list[Row]) -> str:
    """The command that fills the cells of a table."""
    splits = {row["split_seed"] or 0 for row in rows}
    words = ["tnfn", "reproduce", view.paper.name, f"zoos/{rows[0]['zoo_name']}"]
    if view.paper.name in BY_MODEL:
        words += ["--models", ",".join(dict.fromkeys(row["row"] for row in rows))]
    if view.paper is LEARNING_CURVE:
        words += ["--sizes", ",".join(view.columns)]
    words += ["--seeds", str(len({row["seed"] for row in rows}))]
    words += ["--splits", str(len(splits))] if len(splits) > 1 else []
    return " ".join([*words, "--out results"])


def differences(rows: str, view: TableView, pairs: list[list[str]]) -> list[str]:
    """A table of differences of τ, with and without networks that have a twin in training."""
    table = read_parquet(RESULTS / f"{rows}-paired.parquet").to_pylist()
    table = [row for row in table if row["table"] == view.paper.topic]
    found = {(row["row"], row["against"], row["column"]): row for row in table}
    columns = {key: label for key, label in view.columns.items() if key != CHANGE}

    def text(pair: list[str], column: str, part: str) -> str:
        sign, row = 1, found.get((*pair, column))
        if row is None:
            sign, row = -1, found.get((*pair[::-1], column))
        if row is None:
            return NOTHING
        low, high = sorted(sign * row[f"{end}{part}"] for end in ("low", "high"))
        values = f"{sign * row[f'difference{part}']:+.3f} ({low:+.3f} to {high:+.3f})"
        return values.replace("-", "−")

    lines = []
    for pair in pairs:
        label = " less ".join(view.rows[row] for row in pair)
        for part, words in (("", ""), ("_alone", "without twins")):
            cells = [text(pair, column, part) for column in columns]
            lines.append(["" if part else label, words, *cells])
    return markdown_rows(["Difference of τ (95 % interval)", ""], columns.values(), lines)


def render(name: str) -> str:
    """A table with its caption, notes and commands, in Markdown."""
    spec = specs()[name]
    return from_rows(spec) if "table" in spec else from_numbers(name, spec)


def from_numbers(name: str, spec: Any) -> str:
    """A table of a spec, from its numbers in earlier.parquet."""
    numbers = [row for row in read_parquet(RESULTS / "earlier.parquet").to_pylist()
               if row["table"] == name]  # fmt: skip
    paper, labels = PAPER_TABLES.get(spec.get("paper", "")), spec["columns"]
    labels = labels if isinstance(labels, dict) else {label: label for label in labels}
    ours: dict[str, dict[str, dict[str, str]]] = {}
    for each in numbers:
        cells = ours.setdefault(each["row"], {}).setdefault(each["source"] or "", {})
        cells[each["column"]] = number_text(each)
    rows = []
    for row, sources in ours.items():
        if paper is not None and (printed := printed_cells(paper, row, labels)):
            sources["paper"] = printed
        first = row
        for source, cells in sources.items():
            start = [first, source][: len(spec["corner"])]
            rows.append([*start, *(cells.get(column, NOTHING) for column in labels)])
            first = ""
    lines = [f"**{spec['title']}.** {spec['setting']}", ""]
    lines += markdown_rows(spec["corner"], labels.values(), rows)
    lines += [line for note in spec.get("notes", ()) for line in ("", note)]
    commands = [f"$ {line}" for line in spec.get("commands", ())]
    return "\n".join([*lines, "", "```console", *commands, "```"] if commands else lines)


def number_text(number: Mapping[str, Any]) -> str:
    """A number as its row has it formatted, with its error and unit; a text as it is."""
    if number["text"] is not None:
        return str(number["text"])
    error = "" if number["error"] is None else f" ± {number['error']:.3f}"
    text = f"{number['value']:{number['format']}}"
    text = f"−{text[1:]}" if text.startswith("-") else text
    return f"{text}{error}{number['unit'] or ''}"


def printed_cells(paper: PaperTable, label: str, labels: Iterable[str]) -> dict[str, str]:
    """The paper's cells in the row of this label, as printed."""
    row = next((row for row, name in paper.rows.items() if name == label), "")
    columns = {label: column for column, label in {**paper.columns, **CHANGES}.items()}
    cells = {label: paper.cell(row, columns.get(label, "")) for label in labels}
    return {label: number.text for label, number in cells.items() if number}


def with_numbers(text: str) -> str:
    """A page with every table, and every number of the paper, written anew."""
    text = TABLE.sub(
        lambda m: f"<!-- table: {m['name']} -->\n\n{render(m['name'])}\n\n<!-- end of table -->",
        text,
    )
    return REFERENCE.sub(
        lambda m: f"<!-- {m[1]}:{m[2]} -->{REFERRED[m[1]](m[2])}<!-- /{m[1]} -->", text
    )


REFERRED = {"paper": quoted, "cell": cell}


def write_rows(cells: Path, name: str) -> None:
    """Write NAME.parquet and NAME-paired.parquet from the finished cells of one zoo."""
    records = {path.parent: RunRecord.read(path.parent) for path in cells.glob(f"*/{RUN_FILE}")}
    by_topic: dict[str, list[Path]] = {}
    for folder in sorted(records):
        by_topic.setdefault((records[folder].table or {}).get("table", ""), []).append(folder)
    pairs = [
        {"table": topic, **row}
        for topic, folders in by_topic.items()
        for row in paired_rows(folders)
    ]
    rows = result_rows(records[folder] for folder in sorted(records))
    for each, end in ((rows, ""), (pairs, "-paired")):
        write_parquet(RESULTS / f"{name}{end}.parquet", as_columns(each), RunError)


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare, write nothing")
    parser.add_argument("--rows", nargs=2, metavar=("CELLS", "NAME"), help="see above")
    args = parser.parse_args()
    if args.rows:
        write_rows(Path(args.rows[0]), args.rows[1])
        return 0
    check = args.check
    stale = 0
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        new = with_numbers(text)
        if new != text:
            stale += 1
            print(f"{path.name} is out of date" if check else f"wrote {path.name}")
            if not check:
                path.write_text(new, encoding="utf-8")
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
