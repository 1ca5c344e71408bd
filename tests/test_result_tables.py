"""Tables are those of benchmarks/results/, numbers of the paper those of paper/numbers.py."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import result_tables as tables
from run_folders import write_run

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.io.files import read_parquet
from transformer_nfn.paper.tables import table_cells

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SPECS = tables.specs()
REPRODUCED = [name for name, spec in SPECS.items() if "table" in spec]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# What the paper defines and this project counts or times itself: no source of numbers.
THINGS = "blocks?|grid|group|invariants|pseudocode|formulas|letters|form|models?"
SOURCE = re.compile(rf"\bpaper\b(?!['’]s (?:whole )?(?:{THINGS})\b)", re.IGNORECASE)
NAMES = re.compile(
    r"(?:tables?|figures?|eqs?\.|theorems?|ICLR) \(?[\d.]+(?:(?:, | and | to |–)[\d.]+)*",
    re.IGNORECASE,
)
REFERENCE = re.compile(r"<!-- (paper|cell):.+? -->.*?<!-- /\1 -->")


def typed_numbers(text: str) -> Iterator[str]:
    """Sentences and cells of a page that give a number as the paper's without a reference."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"`[^`\n]*`|\]\([^)\n]*\)", "", REFERENCE.sub("", text))
    generated, columns = False, []
    prose: list[str] = []
    for line in text.splitlines():
        generated = not line.startswith("<!-- end") if line.startswith("<!-- ") else generated
        if not line.startswith("|"):
            prose.append(f"\n\n{line}" if re.match(r"\s*(?:[-*#]|\d+\.) ", line) else line)
            columns = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        columns = columns or [SOURCE.search(cell) is not None for cell in cells]
        whole_row = [not generated] * len(cells) if "paper" in cells[:2] else columns
        for cell, theirs in zip(cells, whole_row, strict=False):
            if theirs and re.search(r"\d", NAMES.sub("", cell)):
                yield cell
        prose += ["", *(f"{cell}\n" for cell in cells)]
    for paragraph in re.split(r"\n\s*\n", "\n".join(prose)):
        for sentence in re.split(r"(?<=[.;!?])\**\s+", " ".join(paragraph.split())):
            if SOURCE.search(sentence) and re.search(r"\d", NAMES.sub("", sentence)):
                yield sentence


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_number_of_the_paper_is_a_reference(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert list(typed_numbers(text)) == []
    assert not re.search(r"^\s*<!-- paper:", text, re.M), "a comment there would end the paragraph"


def test_the_rule_about_numbers_of_the_paper() -> None:
    ours, theirs = "0.886", "<!-- paper:table1/transformer_nfn/all -->0.905<!-- /paper -->"
    for allowed in (
        f"Transformer-NFN has {ours}; in the paper {theirs}.",
        f"The paper has {theirs} in table 1. Here it is {ours}.",
        "4,096 runs of the paper's whole grid took 905 s.",
        "The papers report 1.0.",
        f"| | stated by the paper | here |\n|---|---|---|\n| τ | {theirs} | {ours} |",
        "<!-- table: x -->\n\n| Model | source | τ |\n|---|---|--:|\n|  | paper | 0.9 |\n",
    ):
        assert list(typed_numbers(allowed)) == [], allowed
    for refused in (
        f"Transformer-NFN has {ours}, in the paper 0.905.",
        f"It has {ours} instead of the {theirs} of the paper.",
        "From as many networks\nas in the paper, 11,000.",
        "- **Protocol.** The paper's: 75 % of each run.",
        "# Epoch 75, as in the paper",
        "| | stated by the paper | here |\n|---|---|---|\n| split | 70/15/15 | 70/15/15 |",
        "| Model | τ |\n|---|--:|\n| paper | 0.905 |",
        "| What | Measured |\n|---|---|\n| τ | 0.9; in the paper 0.905 |",
    ):
        assert list(typed_numbers(refused)), refused


def test_references_are_filled_and_unknown_ones_refused() -> None:
    for key, number in (
        ("table1/statnn/0.6", "0.86"),
        ("table3/encoder+classifier/ag_news", "0.910"),
        ("table5/[10,10]/parameters", "17.457M"),
        ("table7/transformer_nfn/change", "+0.003"),
        ("mnist/networks", "15,689"),
    ):
        page = f"<!-- paper:{key} -->0.1<!-- /paper --> and 0.2"
        assert tables.with_numbers(page) == f"<!-- paper:{key} -->{number}<!-- /paper --> and 0.2"
    for key in ("table1/statnn/0.9", "table4/statnn/all", "mnist/speed", "table1", ""):
        with pytest.raises(TransformerNFNError, match="the paper has no number"):
            tables.quoted(key)


def test_cells_of_other_tables_are_filled_and_unknown_ones_refused() -> None:
    key = "models-seed-each; Whole network; τ"
    (row,) = [
        row
        for row in read_parquet(RESULTS / "earlier.parquet").to_pylist()
        if "; ".join((row["table"], row["row"], row["column"])) == key
    ]
    page = tables.with_numbers(f"<!-- cell:{key} -->0.1<!-- /cell --> and 0.2")
    number = f"{row['value']:.3f} ± {row['error']:.3f}"
    assert page == f"<!-- cell:{key} -->{number}<!-- /cell --> and 0.2"
    for key in ("models-seed-each; Whole net; τ", "docs/speed.md; forward at batch 256; Seconds"):
        with pytest.raises(TransformerNFNError, match="has no cell in row"):
            tables.cell(key)


def test_rows_of_results_hold_no_number_of_the_paper_and_no_table_twice() -> None:
    rows = read_parquet(RESULTS / "earlier.parquet").to_pylist()
    assert {row["table"] for row in rows} == {*SPECS} - {*REPRODUCED}
    assert all("paper" not in (row["row"], row["source"]) for row in rows), "name it in the spec"
    places = [(row["table"], row["row"], row["source"], row["column"]) for row in rows]
    assert len({*places}) == len(places)
    for row in rows:
        assert (row["value"] is None) is (row["text"] is not None)


def test_pages_are_generated_from_the_result_files() -> None:
    command = [sys.executable, str(ROOT / "tools" / "result_tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", REPRODUCED)
def test_a_printed_command_gives_the_cells_of_its_table(name: str) -> None:
    spec = SPECS[name]
    *_, built, printed, _ = tables.render(name).split("\n")
    assert built == f"$ {spec['zoo']}"
    options = dict(re.findall(r"--(\S+) (\S+)", printed))
    build = dict(re.findall(r"--(\S+) (\S+)", built))
    assert f"tnfn reproduce {spec['table']} {build['out']} " in printed
    rows = read_parquet(RESULTS / f"{spec['rows']}.parquet").to_pylist()
    kind = tables.table_named(spec["table"]).topic
    rows = [row for row in rows if row["table"] == kind]
    models = options["models"].split(",") if "models" in options else None
    named = options["sizes"].split(",") if "sizes" in options else None
    sizes = named and [None if each == "all" else int(each) for each in named]
    train = max(row["train"] for row in rows)
    found = table_cells(spec["table"], build["task"], models, train, sizes)
    cells = {(cell.row, cell.column): cell for cell in found}
    splits = [str(n) for n in range(int(options.get("splits", 1)))]
    shown = [row for row in rows if str(row["split_seed"] or 0) in splits]
    unfinished = {tuple(cell) for cell in spec.get("unfinished", ())}
    filled = {(row["row"], row["column"]) for row in shown}
    assert not filled & unfinished
    assert filled | unfinished == {*cells}
    for row in shown:
        cell = cells[row["row"], row["column"]]
        assert json.loads(row["options"]) == dict(cell.options)
        assert row["model"] == cell.model
        assert row["seed"] < int(options["seeds"])
        assert (row["zoo_runs"], row["zoo_seeds"]) == (int(build["runs"]), build["seeds"])
        assert all(row[name] for name in ("commit", "device", "zoo_sha256", "updates", "version"))


def test_rows_are_written_from_finished_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for row in ("mlp", "statnn"):
        table = {"table": "thresholds", "row": row, "column": "all"}
        write_run(tmp_path / "cells" / row, row, networks=80, seeds=2, table=table, same_parts=True)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    tables.write_rows(tmp_path / "cells", "zoo")
    rows = read_parquet(tmp_path / "zoo.parquet").to_pylist()
    assert [(row["row"], row["seed"]) for row in rows] == [
        (row, seed) for row in ("mlp", "statnn") for seed in (0, 1)
    ]
    (pair,) = read_parquet(tmp_path / "zoo-paired.parquet").to_pylist()
    assert (pair["row"], pair["against"]) == ("mlp", "statnn")
    mlp, statnn = (sum(row["tau"] for row in part) / 2 for part in (rows[:2], rows[2:]))
    assert pair["difference"] == pytest.approx(mlp - statnn)


CAPTIONED = re.compile(
    r"^(\*\*(?:(?!^```|^#).)*^\|(?:(?!^```|^#).)*)^```console\n(.*?)^```", re.M | re.S
)


def test_epochs_of_a_caption_are_those_of_a_printed_command() -> None:
    """Epochs of the zoos that its commands name, and where they are read, or of its trainings."""
    found = [match for page in PAGES for match in CAPTIONED.findall(page.read_text("utf-8"))]
    built: dict[str, set[float]] = {}
    for line in itertools.chain(*(commands.splitlines() for _, commands in found)):
        options = dict(re.findall(r"--(out|epochs|until) (\S+)", line))
        if " zoo build " in line and "epochs" in options:
            epochs = int(options["epochs"])
            read = epochs * int(options.get("until", 100)) / 100
            built.setdefault(options["out"], set()).update((epochs, read, 0.75 * epochs))
    checked = 0
    for words, commands in found:
        zoos = {zoo for zoo in re.findall(r"[\w/-]+", commands) if zoo in built}
        if zoos:
            allowed = {50.0}.union(*(built[zoo] for zoo in zoos))
            allowed |= {float(number) for number in re.findall(r"--epochs (\d+)", commands)}
            named = re.findall(r"(\d+) epochs|epochs? (\d+)", words)
            assert {float(a or b) for a, b in named} <= allowed, words[:200]
            checked += bool(named)
    assert checked > 10


def test_pages_stay_short() -> None:
    assert (ROOT / "docs" / "results.md").stat().st_size <= 25 * 1024
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100
