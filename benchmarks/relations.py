"""Do scores tell relatives from strangers? Small language models, really trained and disguised.

    python benchmarks/relations.py [--quick] [--models DIR] [--json] [--figure docs/relations.svg]

Eight families (five GPT-2s and three Llamas: D = 64, three blocks, untied) are trained on the
source of Python's standard library; relatives of each base are trained on it or on English
documentation, averaged, pruned, rounded, or patched together with strangers. Every second model
of a pair goes through every symmetry its architecture has (condition 10) before the two are
compared. Models are kept in a folder: a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trained.families import PATCHED, REPLACED, all_families, train_families
from trained.measures import BASELINES, auroc
from trained.pairs import RELATED, RELATIONS, STRANGER, Result, compare, tasks
from transformer_nfn.io.downloads import cache_folder

STEPS = 1000
EMBEDDINGS = "embeddings only"
BANDS = ((*RELATED,), (REPLACED, PATCHED), (EMBEDDINGS,), (STRANGER,))
COLOURS = ("#1b7837", "#d08a1d", "#9970ab", "#762a83")


def say(text: str) -> None:
    """Progress, beside the results."""
    print(text, file=sys.stderr, flush=True)


def run(root: Path, count: int, steps: int) -> tuple[list[Result], float]:
    """Trains what is missing, compares all pairs; results, and the seconds of training."""
    families = all_families(count)
    start = time.perf_counter()

    def told(what: str, step: int, of: int, loss: float) -> None:
        if step % 250 == 0 or step == of:
            say(f"{time.perf_counter() - start:6.0f} s  {what}: step {step} of {of}, {loss:.2f}")

    train_families(families, root, steps, told)
    training = time.perf_counter() - start
    todo = list(tasks(root, families))
    results = []
    for i, task in enumerate(todo, 1):
        results.append(compare(root, task))
        if i % 25 == 0 or i == len(todo):
            say(f"{time.perf_counter() - start:6.0f} s  compared {i} of {len(todo)} pairs")
    return results, training


def scores(results: Sequence[Result], relations: Sequence[str], measure: str) -> list[float]:
    """One measure of all pairs in some relations."""
    own = [r for r in results if r.relation in relations]
    return [r.score if measure == "relate" else r.baselines[measure] for r in own]


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Everything the table says, as numbers."""
    rows = {}
    for relation in RELATIONS:
        own = [r for r in results if r.relation == relation]
        if not own:
            continue
        values = [r.score for r in own]
        rows[relation] = {
            "pairs": len(own),
            "score": [min(values), statistics.median(values), max(values)],
            "block": [min(min(r.blocks) for r in own), max(max(r.blocks) for r in own)],
            "best of the matrix": max(r.best for r in own),
            "embeddings": [min(r.token for r in own), max(r.token for r in own)],
            "verdicts": dict(Counter(r.verdict for r in own)),
            "baselines": {b: statistics.median(r.baselines[b] for r in own) for b in BASELINES},
        }
    curves = {}
    for measure in ("relate", *BASELINES):
        above = scores(results, RELATED, measure)
        curves[measure] = {
            "strangers": auroc(above, scores(results, [STRANGER], measure)),
            EMBEDDINGS: auroc(above, scores(results, [EMBEDDINGS], measure)),
        }
    patched = [r for r in results if r.replaced is not None]
    low = [r.blocks[r.replaced] for r in patched if r.replaced is not None]
    kept = [s for r in patched for i, s in enumerate(r.blocks) if i != r.replaced]
    return {
        "relations": rows,
        "auroc": curves,
        "replaced": {
            "cases": len(patched),
            "found": sum(r.found_replaced for r in patched) / max(len(patched), 1),
            "highest replaced block": max(low, default=None),
            "lowest kept block": min(kept, default=None),
        },
    }


def table(found: dict[str, Any]) -> str:
    """The summary as text."""
    names = list(BASELINES)
    head = f"{'against A, disguised':26} {'pairs':>5}   {'min':>5} {'median':>6} {'max':>5}  "
    lines = [head + "  ".join(f"{n:>{len(n)}}" for n in names) + "  verdicts"]
    for relation, row in found["relations"].items():
        low, middle, high = row["score"]
        cells = "  ".join(f"{row['baselines'][n]:{len(n)}.3f}" for n in names)
        verdicts = ", ".join(f"{n} {v}" for v, n in row["verdicts"].items())
        lines.append(
            f"{relation:26} {row['pairs']:5}   {low:5.3f} {middle:6.3f} {high:5.3f}  "
            f"{cells}  {verdicts}"
        )
    for against in ("strangers", EMBEDDINGS):
        cells = "  ".join(f"{found['auroc'][n][against]:{len(n)}.4f}" for n in names)
        own = f"{found['auroc']['relate'][against]:.4f}"
        lines.append(f"{'AUROC against ' + against:33} {own:>13}        {cells}")
    patched = found["replaced"]
    if patched["cases"]:
        lines.append(
            f"the replaced block found, and no other: {patched['found']:.1%} of "
            f"{patched['cases']} (replaced blocks score at most "
            f"{patched['highest replaced block']:.3f}, kept ones at least "
            f"{patched['lowest kept block']:.3f})"
        )
    return "\n".join(lines)


def draw(results: Sequence[Result], out: Path) -> None:
    """Every block of every pair as a point, by relation, and the thresholds of the verdicts."""
    from matplotlib.figure import Figure

    from transformer_nfn.checkpoints.relations.verdicts import RELATED, UNRELATED

    shown = [r for r in RELATIONS if any(x.relation == r for x in results)]
    figure = Figure(figsize=(8, 0.36 * len(shown) + 1.2), layout="constrained")
    axes = figure.subplots()
    generator = torch.Generator().manual_seed(0)
    for row, relation in enumerate(shown):
        values = [s for r in results if r.relation == relation for s in r.blocks]
        jitter = (torch.rand(len(values), generator=generator) - 0.5) * 0.6
        colour = next((c for b, c in zip(BANDS, COLOURS, strict=True) if relation in b), "black")
        axes.scatter(values, row + jitter, s=9, color=colour, alpha=0.6, linewidths=0)
    for value, word, side in (
        (UNRELATED, "unrelated ", "right"),
        (RELATED, " related", "left"),
    ):
        axes.axvline(value, color="grey", linewidth=0.8, linestyle="--")
        axes.text(value, -0.8, word, color="grey", fontsize=8, va="center", ha=side)
    axes.set_yticks(range(len(shown)), shown)
    axes.set(xlim=(-0.02, 1.02), ylim=(len(shown) - 0.5, -1.1))
    axes.set_xlabel("score of each block (strangers 0, disguise 1)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=Path, default=cache_folder("relations"))
    parser.add_argument("--families", type=int, default=8)
    parser.add_argument("--steps", type=int, default=STEPS, help="of a base's training")
    parser.add_argument("--quick", action="store_true", help="two families of each kind, briefly")
    parser.add_argument("--json", action="store_true", help="all numbers, of every pair too")
    parser.add_argument("--figure", type=Path, help="draw the scores into this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    count, steps = (4, 60) if options.quick else (options.families, options.steps)
    results, training = run(options.models / f"{steps}-steps", count, steps)
    found = summary(results)
    if options.json:
        pairs = [asdict(r) for r in results]
        print(json.dumps({**found, "training seconds": training, "pairs": pairs}, indent=1))
    else:
        print(table(found))
    if options.figure:
        draw(results, options.figure)
        say(f"drawn: {options.figure}")


if __name__ == "__main__":
    main()
