"""How does τ of each model change with the epochs of the zoo it reads? One point per zoo.

Each folder holds what ``tnfn reproduce table1 ZOO --out FOLDER`` wrote for one zoo, and is named
with the zoo's epochs. Compared are the cells without a threshold; ``FOLDER:N`` takes those of the
learning curve at N networks instead, so that a larger zoo is read at the size of the others. It
prints a table in Markdown and, with ``--figure``, draws it.

    python benchmarks/epochs.py 12=results/one-12 25=results/one-25 100=results/one-100:717
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformer_nfn.paper.numbers import model_name
from transformer_nfn.prediction.runs import RUN_FILE, RunRecord

MARKS = "os^Dvp*X"


def cells(folder: Path, networks: str | None) -> dict[str, RunRecord]:
    """The finished record of each model, without a threshold."""
    table, column = ("learning-curve", networks) if networks else ("table1", "all")
    found = {}
    for path in sorted(folder.rglob(RUN_FILE)):
        record = RunRecord.read(path.parent)
        place = record.table or {}
        if (place.get("table"), place.get("column")) == (table, column) and record.summary:
            found[record.model] = record
    if not found:
        raise SystemExit(f"'{folder}' holds no cell '{column}' of {table}")
    return found


def draw(points: dict[int, dict[str, RunRecord]], models: list[str], file: Path) -> None:
    """τ against the zoo's epochs, a line per model."""
    from matplotlib.figure import Figure

    figure = Figure((6.2, 3.8), layout="constrained")
    axes = figure.add_subplot()
    for model, mark in zip(models, MARKS, strict=False):
        line = {e: of[model].summary for e, of in points.items() if model in of}
        axes.errorbar(
            list(line),
            [s["tau"] for s in line.values()],
            [s.get("tau_se") or 0.0 for s in line.values()],
            marker=mark,
            capsize=2,
            label=model_name(model),
        )
    axes.set_xscale("log")
    axes.set_xticks(list(points), [str(e) for e in points], minor=False)
    axes.minorticks_off()
    axes.set(xlabel="epochs of the zoo (read at 75 % of them)", ylabel="Kendall's τ")
    axes.grid(alpha=0.4)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(file)


def main() -> None:
    """Reads the folders, prints the table, draws."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+", metavar="EPOCHS=FOLDER[:N]")
    parser.add_argument("--figure", type=Path, help="a PNG or SVG to draw")
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
    if arguments.figure is not None:
        draw(points, models, arguments.figure)


if __name__ == "__main__":
    main()
