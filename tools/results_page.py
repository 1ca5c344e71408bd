"""Write docs/results.md, docs/speed.md and the table in README.md from benchmarks/results/.

    python tools/results_page.py            # writes them
    python tools/results_page.py --check    # exit code 1 if one of them is out of date

Every file in benchmarks/results/ but page.json and speed.json is one table: title, setting,
commands, columns, rows, notes. Those two order the tables in sections. In their texts
``{{table|row|column}}`` stands for a cell, where a row is named by its first cell.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CELL = re.compile(r"\{\{([^|}]+)\|([^|}]+)\|([^|}]+)\}\}")
README_TABLE = re.compile(r"(?<=<!-- results -->\n).*?(?=<!-- end of results -->)", re.DOTALL)


def read(name: str) -> Any:
    """One file of benchmarks/results/."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def filled(text: str) -> str:
    """The text with every ``{{table|row|column}}`` replaced by that cell."""

    def cell(match: re.Match[str]) -> str:
        table = read(match[1])
        (row,) = [r for r in table["rows"] if r[0] == match[2] and "paper" not in r]
        return str(row[table["columns"].index(match[3])])

    return CELL.sub(cell, text)


def markdown(columns: list[str], rows: list[list[str]]) -> list[str]:
    """A table in Markdown; a model is named once."""
    marks = ["---"] * (2 if "source" in columns else 1)
    rule = f"|{'|'.join([*marks, *['--:'] * (len(columns) - len(marks))])}|"
    lines = [f"| {' | '.join(line)} |" for line in (columns, *map(_row, rows))]
    return [lines[0], rule, *lines[1:]]


def _row(row: list[str]) -> list[str]:
    return ["", *row[1:]] if row[1] in ("paper", "mean of seeds") else row


def table_section(name: str) -> list[str]:
    """Title, setting, table, notes and commands of one file."""
    table = read(name)
    lines = [f"**{table['title']}.** {table['setting']}", ""]
    lines += [*markdown(table["columns"], table["rows"]), ""]
    for note in table.get("notes", ()):
        lines += [note, ""]
    if table["commands"]:
        lines += ["```console", *(f"$ {line}" for line in table["commands"]), "```", ""]
    return lines


def page(title: str, name: str) -> str:
    """A page of docs/: the sections that a file in benchmarks/results/ lists."""
    page = read(name)
    lines = [f"# {title}", "", filled(page["text"]), ""]
    for section in page["sections"]:
        lines += [f"## {section['heading']}", "", filled(section["text"]), ""]
        for name in section["tables"]:
            lines += table_section(name)
    return "\n".join(lines).rstrip() + "\n"


def readme(text: str) -> str:
    """README.md with its table of results."""
    summary = read("page")["readme"]
    rows = [[filled(cell) for cell in row] for row in summary["rows"]]
    lines = ["| " + " | ".join(row) + " |" for row in (summary["columns"], ["---"] * 3, *rows)]
    return README_TABLE.sub(lambda _: "\n".join(lines) + "\n", text)


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare, write nothing")
    check = parser.parse_args().check
    old = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = {
        ROOT / "docs" / "results.md": page("Results", "page"),
        ROOT / "docs" / "speed.md": page("Speed", "speed"),
        ROOT / "README.md": readme(old),
    }
    stale = [path for path, text in pages.items() if not _same(path, text)]
    if check:
        for path in stale:
            print(f"{path.name} is out of date: run python tools/results_page.py")
        return int(bool(stale))
    for path in stale:
        path.write_text(pages[path], encoding="utf-8")
        print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
