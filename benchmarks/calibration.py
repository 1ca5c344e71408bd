"""How often do trained strangers score as high as relatives? Calibrates the tests of `compare`.

    python benchmarks/strangers.py --out DIR
    python benchmarks/calibration.py --models DIR/models --pairs pairs.jsonl [--workers N] [--write]

Scores pairs of models of one size that were trained on the same data from other seeds, pairs
trained on other data, and disguised descendants with their bases. Finished pairs are kept in a
file, so a run that was stopped goes on where it was. Seeds are split: strangers among the lower
half calibrate, strangers among the upper half are held out, and each size is left out in turn.
``--write`` updates the data file of the package and the table of the documentation.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from scipy.stats import beta, kstest

from transformer_nfn.checkpoints import open_model, relate
from transformer_nfn.checkpoints.calibration import Strangers, fit_strangers
from transformer_nfn.checkpoints.disguises import disguise
from transformer_nfn.io.files import write_text

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "src/transformer_nfn/checkpoints/data/strangers.json"
TABLE = ROOT / "benchmarks/results/calibration.json"
CALIBRATION, HELD_OUT, LONGEST, OTHER_DATA = "calibration", "held out", "longest", "other data"
DESCENDANTS = ("fine-tuned", "fine-tuned-other", "lora", "continued", "retrained-other",
               "distilled")  # fmt: skip
LEVEL, CONDITION = 0.01, 10.0


@dataclass(frozen=True)
class Task:
    """A pair of models: family, width and depth, steps of training, what is known of the pair."""

    first: str
    second: str
    family: str
    size: tuple[int, int]
    steps: int
    relation: str


@dataclass(frozen=True)
class Result:
    """Score of a pair, and log10 p of the exact test."""

    task: Task
    score: float
    log10_p: float


def tasks(root: Path) -> Iterator[Task]:
    """All pairs, those that calibrate first."""
    lengths = [p for p in sorted(root.glob("*/*")) if p.is_dir()]
    longest = max(int(p.name) for p in lengths)
    found: list[Task] = []
    for folder in lengths:
        family, _, size = folder.parent.name.partition("-")
        width, depth = (int(x) for x in size.split("x"))
        steps = int(folder.name)

        def pair(
            a: Path, b: Path, relation: str,
            family: str = family, size: tuple[int, int] = (width, depth), steps: int = steps,
        ) -> Task:  # fmt: skip
            names = (p.relative_to(root).as_posix() for p in (a, b))
            return Task(*names, family, size, steps, relation)

        news, python = (
            sorted(folder.glob(f"{text}-*/base"), key=lambda p: int(p.parent.name.split("-")[1]))
            for text in ("news", "python")
        )
        half = len(news) // 2
        if steps == longest:
            found += [pair(a, b, LONGEST) for a, b in combinations(news, 2)]
        else:
            found += [pair(a, b, CALIBRATION) for a, b in combinations(news[:half], 2)]
            found += [pair(a, b, HELD_OUT) for a, b in combinations(news[half:], 2)]
            found += [pair(a, b, OTHER_DATA) for a, b in product(news[half:], python[:1])]
        for base, relation in product(news, DESCENDANTS):
            child = base.parent / relation
            if child.is_dir():
                found.append(pair(base, child, relation))
    order = [CALIBRATION, HELD_OUT, *DESCENDANTS, LONGEST, OTHER_DATA]
    yield from sorted(found, key=lambda task: order.index(task.relation))


def score(root: Path, task: Task) -> Result:
    """Score a pair; a descendant is disguised by every symmetry it has."""
    second = root / task.second
    with tempfile.TemporaryDirectory() as place:
        if task.relation in DESCENDANTS:
            generator = torch.Generator().manual_seed(zlib.crc32(task.second.encode()))
            with open_model(second) as model:
                disguise(model, Path(place) / "model", generator, condition=CONDITION)
            second = Path(place) / "model"
        with open_model(root / task.first) as A, open_model(second) as B:
            relation = relate(A, B, prove=False)
    assert relation.score is not None
    assert relation.exact is not None
    return Result(task, relation.score, relation.exact.total.log10_p)


def all_results(root: Path, kept: Path, workers: int) -> list[Result]:
    """Score every pair that is not in the file yet, in parallel processes."""
    done: dict[tuple[str, str], Result] = {}
    if kept.exists():
        for line in kept.read_text().splitlines():
            content = json.loads(line)
            task = Task(**{**content["task"], "size": tuple(content["task"]["size"])})
            result = Result(task, content["score"], content["log10_p"])
            done[result.task.first, result.task.second] = result
    todo = list(tasks(root))
    missing = [task for task in todo if (task.first, task.second) not in done]
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, torch.set_num_threads, (1,)) as pool, kept.open("a") as file:
        for i, result in enumerate(pool.imap_unordered(partial(score, root), missing, 8), 1):
            done[result.task.first, result.task.second] = result
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            if i % 100 == 0 or i == len(missing):
                print(f"{i} of {len(missing)} pairs", file=sys.stderr, flush=True)
    return [done[task.first, task.second] for task in todo]


def fitted(results: Iterable[Result]) -> dict[str, Strangers]:
    """Null distribution of each family."""
    by_family: dict[str, list[tuple[tuple[int, int], float]]] = {}
    for r in results:
        by_family.setdefault(r.task.family, []).append((r.task.size, r.score))
    return {family: fit_strangers(scores) for family, scores in by_family.items()}


def rejected(known: dict[str, Strangers], results: Sequence[Result]) -> tuple[int, int]:
    """Pairs with p at most 1 %, and all pairs."""
    ps = [known[r.task.family].p_value(r.task.size, r.score) for r in results]
    return sum(p <= LEVEL for p in ps), len(ps)


def bounds(count: int, pairs: int) -> tuple[float, float]:
    """Clopper–Pearson interval of a rate at 95 % confidence, as if pairs were independent."""
    low = beta.ppf(0.025, count, pairs - count + 1) if count else 0.0
    high = beta.ppf(0.975, count + 1, pairs - count) if count < pairs else 1.0
    return float(low), float(high)


def summary(results: Sequence[Result]) -> list[list[str]]:
    """Rows of the table: pairs, how many are rejected at 1 %, and the confidence interval."""
    of = {
        relation: [r for r in results if r.task.relation == relation]
        for relation in (CALIBRATION, HELD_OUT, LONGEST, OTHER_DATA, *DESCENDANTS)
    }
    known = fitted(of[CALIBRATION])
    rows = []

    def add(name: str, count: int, pairs: int, scores: Sequence[float]) -> None:
        low, high = bounds(count, pairs)
        rows.append([
            name, f"{pairs:,}", f"{min(scores):.3f} to {max(scores):.3f}", f"{count / pairs:.2%}",
            f"{low:.2%} to {high:.2%}",
        ])  # fmt: skip

    def add_all(name: str, chosen: Sequence[Result]) -> None:
        if chosen:
            add(name, *rejected(known, chosen), [r.score for r in chosen])

    add_all("strangers, held-out seeds", of[HELD_OUT])
    for family in known:
        chosen = [r for r in of[HELD_OUT] if r.task.family == family]
        add_all(f"strangers, held-out seeds, {family}", chosen)
    sizes = sorted({r.task.size for r in of[CALIBRATION]})
    for size in sizes if len(sizes) > 1 else ():
        left = fitted(r for r in of[CALIBRATION] if r.task.size != size)
        chosen = [r for r in of[HELD_OUT] if r.task.size == size]
        name = f"strangers, width {size[0]}, depth {size[1]}: that size left out of the calibration"
        if chosen:
            add(name, *rejected(left, chosen), [r.score for r in chosen])
    add_all("strangers, trained far longer than any that calibrated", of[LONGEST])
    add_all("strangers, other data", of[OTHER_DATA])
    for relation in DESCENDANTS:
        add_all(f"disguised: {relation}", of[relation])
    return rows


def uniformity(results: Sequence[Result]) -> str:
    """Kolmogorov–Smirnov test of the exact test's p on strangers of the same data."""
    strangers = [r for r in results if r.task.relation in (CALIBRATION, HELD_OUT, LONGEST)]
    ps = [10**r.log10_p for r in strangers]
    small = sum(p <= LEVEL for p in ps) / len(ps)
    return (
        f"Exact test on the {len(ps):,} pairs of strangers of the same data: p at most 1 % in "
        f"{small:.2%}; Kolmogorov–Smirnov against uniform: p = {kstest(ps, 'uniform').pvalue:.2f}."
    )


def write(results: Sequence[Result], rows: list[list[str]], note: str) -> None:
    """Write the data file, fitted to all strangers of the same data, and the table."""
    chosen = [r for r in results if r.task.relation in (CALIBRATION, HELD_OUT)]
    families = {}
    for family, strangers in fitted(chosen).items():
        content = asdict(strangers)
        content["residuals"] = [math.floor(1e3 * r) / 1e3 for r in content["residuals"]]
        families[family] = content
    write_text(DATA, json.dumps({"families": families}) + "\n")
    pairs = sum(r.task.relation == CALIBRATION for r in results)
    table: dict[str, Any] = {
        "title": "Rejections at a nominal 1 %",
        "setting": f"Calibrated on {pairs:,} pairs of strangers of the lower half of the seeds. "
        "Intervals: Clopper–Pearson, 95 %, as if pairs were independent; they share models.",
        "columns": ["second model", "pairs", "scores", "p ≤ 0.01", "interval"],
        "rows": rows,
        "notes": [note],
        "commands": [
            "python benchmarks/strangers.py --out strangers",
            "python benchmarks/calibration.py --models strangers/models --pairs pairs.jsonl "
            "--write",
        ],
    }
    write_text(TABLE, json.dumps(table, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=Path, required=True, help="folder of strangers.py")
    parser.add_argument("--pairs", type=Path, required=True, help="keep finished pairs here")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--write", action="store_true", help="the data file and the table")
    options = parser.parse_args()
    results = all_results(options.models, options.pairs, options.workers)
    rows, note = summary(results), uniformity(results)
    for row in rows:
        print("  ".join(f"{cell:>18}" for cell in (*row[1:], row[0])))
    print(note)
    if options.write:
        write(results, rows, note)


if __name__ == "__main__":
    main()
