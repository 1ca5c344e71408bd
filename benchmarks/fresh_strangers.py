"""Check the calibrated test of `compare` on strangers of seeds that no choice has seen.

    python benchmarks/fresh_strangers.py --out DIR [--data AG_NEWS] [--only NAME …]
        [--workers N] [--write]

Trains 14 models of each family, size and length with the seeds 1000 to 1013 (a GPU: six minutes),
scores every pair of one group, and counts p at most 1 % by the data file of the package. Models
and pairs that exist in DIR are not made again. ``--write`` updates the table of the documentation.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from scipy.stats import kstest

import strangers
from calibration import LEVEL, ROOT, Pair, bounds, read_pairs, rejected, scored
from transformer_nfn.checkpoints.calibration import calibrated_families
from transformer_nfn.io.files import write_text

TABLE = ROOT / "benchmarks/results/fresh_strangers.json"
SIZES = ((32, 2), (32, 4), (64, 2), (64, 4), (128, 3))
SEEDS, STEPS, ROWS = range(1000, 1014), (1000, 4000), 16


def train(out: Path, data: Path, only: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Train what is missing; yields the names of all pairs of one family, size and length.

    Names of size and length begin with one of ``only``.
    """
    texts, root = strangers.texts_of(out, data), out / "models"
    for kind, (width, depth), steps in product(strangers.KINDS, SIZES, STEPS):
        size = strangers.size_of(kind, width, depth)
        if not f"{size}/{steps}".startswith(tuple(only)):
            continue
        group = [strangers.Model(size, steps, strangers.NEWS, seed) for seed in SEEDS]
        missing = [m for m in group if not (m.folder(root) / "config.json").exists()]
        if missing:
            print(strangers.train_group(missing, root, texts, ROWS), flush=True)
        trained = [m.folder(root) for m in group if (m.folder(root) / "config.json").exists()]
        yield from combinations((f.relative_to(root).as_posix() for f in trained), 2)


def table_of(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Rejections at a nominal 1 % of all pairs, by family and by size."""
    known = calibrated_families()
    groups = [("all", list(pairs))]
    groups += [(f"– {k}", [p for p in pairs if p.family == k]) for k in strangers.KINDS]
    groups += [
        (f"– width {w}, depth {d}", [p for p in pairs if p.size == (w, d)]) for w, d in SIZES
    ]
    rows = []
    for name, chosen in [(name, chosen) for name, chosen in groups if chosen]:
        count = rejected(known, chosen)
        low, high = bounds(count, len(chosen))
        share = f"{count / len(chosen):.2%}"
        rows.append([name, f"{len(chosen):,}", share, f"{low:.2%} to {high:.2%}"])
    ps = [10**pair.log10_p for pair in pairs]
    small = sum(p <= LEVEL for p in ps) / len(ps)
    uniform = kstest(ps, "uniform").pvalue
    return {
        "title": "Rejections of fresh strangers at a nominal 1 %",
        "setting": "Seeds that neither calibrated nor chose anything, trained on the same data. "
        "Intervals: Clopper–Pearson, 95 %, as if pairs were independent; they share models.",
        "columns": ["strangers", "pairs", "p ≤ 0.01", "interval"],
        "rows": rows,
        "notes": [
            f"Exact test on the same pairs: p at most 1 % in {small:.2%}; Kolmogorov–Smirnov "
            f"against uniform: p = {uniform:.2f}."
        ],
        "commands": ["python benchmarks/fresh_strangers.py --out fresh --only gpt2 llama --write"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=strangers.find_data(), help="AG News")
    parser.add_argument("--only", nargs="+", default=[""], help="e.g. bert gpt2-64x2/4000")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--write", action="store_true", help="the table of the documentation")
    options = parser.parse_args()
    kept = options.out / "pairs.jsonl"
    pairs = read_pairs(kept)
    if not pairs:
        names = list(train(options.out, options.data, options.only))
        context = multiprocessing.get_context("spawn")
        with context.Pool(options.workers, torch.set_num_threads, (1,)) as pool:
            pairs = pool.map(partial(scored, options.out / "models"), names, 8)
        write_text(kept, "".join(json.dumps(asdict(pair)) + "\n" for pair in pairs))
    table = table_of(pairs)
    for row in table["rows"]:
        print("  ".join(row))
    print(*table["notes"])
    if options.write:
        write_text(TABLE, json.dumps(table, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
