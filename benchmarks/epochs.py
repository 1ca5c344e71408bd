"""How does τ of each model change with the epochs of the zoo it reads? One point per zoo.

Each folder holds what ``tnfn reproduce table1 ZOO --out FOLDER`` wrote for one zoo, and is named
with the zoo's epochs. Compared are the cells without a threshold; ``FOLDER:N`` takes those of the
learning curve at N networks instead, so that a larger zoo is read at the size of the others. It
prints a table in Markdown.

    python benchmarks/epochs.py 12=results/one-12 25=results/one-25 100=results/one-100:717
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformer_nfn.models.predictor import model_name
from transformer_nfn.prediction.runs import RUN_FILE, RunRecord


def cells(folder: Path, networks: str | None) -> dict[str, RunRecord]:
    """The finished record of each model, without a threshold."""
    table, column = ("learning-curve", networks) if networks else ("thresholds", "all")
    found = {}
    for path in sorted(folder.rglob(RUN_FILE)):
        record = RunRecord.read(path.parent)
        place = record.table or {}
        if (place.get("table"), place.get("column")) == (table, column) and record.summary:
            found[record.model] = record
    if not found:
        raise SystemExit(f"'{folder}' holds no cell '{column}' of {table}")
    return found


def main() -> None:
    """Read the folders and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+", metavar="EPOCHS=FOLDER[:N]")
    arguments = parser.parse_args()
    points: dict[int, dict[str, RunRecord]] = {}
    for text in arguments.folders:
        epochs, _, where = text.partition("=")
        folder, _, networks = where.partition(":")
        points[int(epochs)] = cells(Path(folder), networks or None)
    last = points[max(points)]
    models = sorted(last, key=lambda model: -last[model].summary["tau"])
    print("| Model | " + " | ".join(f"{epochs} epochs" for epochs in points) + " |")
    print("|---|" + "--:|" * len(points))
    for model in models:
        said = [of[model].summary if model in of else None for of in points.values()]
        words = [f"{s['tau']:.3f} ± {s.get('tau_se') or 0:.3f}" if s else "–" for s in said]
        print(f"| {model_name(model)} | " + " | ".join(words) + " |")


if __name__ == "__main__":
    main()
