"""Write the tables of results into README.md and docs/ from the files in benchmarks/results/.

    python tools/result_tables.py            # writes every page with a table
    python tools/result_tables.py --check    # exit code 1 if a page is out of date

A page marks the place of a table by ``<!-- table: NAME -->`` and ``<!-- end of table -->``.
NAME.json holds title, setting, commands, columns, rows and notes. A cell ``{{table|row|column}}``
is taken from another table, where a row is named by its first cell. ``"paper": "table1"`` adds the
paper's row under the rows of each model.

A number of the paper is a reference, in pages and files alike: ``<!-- paper:table1/mlp/all -->``
and ``<!-- /paper -->`` stand around it, and what is between them comes from `paper.numbers`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

from transformer_nfn.paper.numbers import CHANGE, PAPER_TABLES, quoted

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CELL = re.compile(r"\{\{([^|}]+)\|([^|}]+)\|([^|}]+)\}\}")
TABLE = re.compile(r"<!-- table: (?P<name>[\w-]+) -->\n.*?<!-- end of table -->", re.DOTALL)
PAPER = re.compile(r"<!-- paper:(?P<key>\S+) -->.*?<!-- /paper -->")


def read(name: str) -> Any:
    """One file of benchmarks/results/."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def filled(text: str) -> str:
    """The text with every ``{{table|row|column}}`` replaced by that cell."""

    def cell(match: re.Match[str]) -> str:
        table = read(match[1])
        row = next(r for r in table["rows"] if r[0] == match[2])
        return str(row[table["columns"].index(match[3])])

    return CELL.sub(cell, text)


def render(name: str) -> str:
    """Title, setting, table, notes and commands of one file, in Markdown."""
    table = read(name)
    marks = ["---"] * (2 if "source" in table["columns"] else 1)
    marks += ["--:"] * (len(table["columns"]) - len(marks))
    rows = with_paper(table) if "paper" in table else table["rows"]
    if "source" in table["columns"]:  # the first cell once for all its sources
        above = ["", *(row[0] for row in rows)]
        rows = [["", *r[1:]] if r[0] == last else r for r, last in zip(rows, above, strict=False)]
    lines = [f"| {' | '.join(map(filled, row))} |" for row in (table["columns"], *rows)]
    lines.insert(1, f"|{'|'.join(marks)}|")
    if table["title"]:
        lines = [f"**{table['title']}.** {table['setting']}", "", *lines]
    for note in table.get("notes", ()):
        lines += ["", note]
    if table["commands"]:
        lines += ["", "```console", *(f"$ {line}" for line in table["commands"]), "```"]
    return "\n".join(lines)


def with_paper(table: Any) -> list[list[str]]:
    """The rows of a table, and after those of each model the paper's, as printed."""
    paper = PAPER_TABLES[table["paper"]]
    names = {label: row for row, label in paper.rows.items()}
    columns = {label: column for column, label in paper.columns.items()}
    columns["Largest change"] = CHANGE
    rows: list[list[str]] = []
    for label, group in itertools.groupby(table["rows"], key=lambda row: str(row[0])):
        rows += group
        found = [
            paper.cell(names.get(label, ""), columns.get(column, ""))
            for column in table["columns"][2:]
        ]
        if any(found):
            rows.append([label, "paper", *(number.text if number else "–" for number in found)])
    return rows


def with_numbers(text: str) -> str:
    """A page with every table, and every number of the paper, written anew."""
    text = TABLE.sub(
        lambda m: f"<!-- table: {m['name']} -->\n\n{render(m['name'])}\n\n<!-- end of table -->",
        text,
    )
    return PAPER.sub(lambda m: f"<!-- paper:{m['key']} -->{quoted(m['key'])}<!-- /paper -->", text)


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare, write nothing")
    check = parser.parse_args().check
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
