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
import multiprocessing
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations, product
from pathlib import Path

import numpy as np
import torch
from scipy.stats import beta, kstest

from transformer_nfn.checkpoints import open_model, relate
from transformer_nfn.checkpoints.calibration import OFFSET, Strangers
from transformer_nfn.checkpoints.disguises import disguise
from transformer_nfn.io.files import write_text
from transformer_nfn.paper.table_text import markdown_rows

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "src/transformer_nfn/checkpoints/data/strangers.json"
CALIBRATION, HELD_OUT, LONGEST, OTHER_DATA = "calibration", "held out", "longest", "other data"
DESCENDANTS = ("fine-tuned", "fine-tuned-other", "lora", "continued", "retrained-other")
DISTILLED = "distilled"
LEVEL, CONDITION = 0.01, 10.0


@dataclass(frozen=True)
class Pair:
    """Two models below the folder, their score, and log10 p of the exact test."""

    first: str
    second: str
    score: float
    log10_p: float

    @property
    def family(self) -> str:
        return self.first.partition("-")[0]

    @property
    def size(self) -> tuple[int, int]:
        """Width and depth."""
        width, depth = self.first.split("/")[0].partition("-")[2].split("x")
        return int(width), int(depth)


def facts(name: str) -> tuple[str, int, str, int, str]:
    """Size, steps, text, seed and relation of ``gpt2-32x2/1000/news-3/base``."""
    size, steps, base, relation = name.split("/")
    text, _, seed = base.partition("-")
    return size, int(steps), text, int(seed), relation


def wanted(root: Path) -> Iterator[tuple[str, str]]:
    """Strangers of one size, length and half of the seeds, some of other data, descendants."""
    for folder in sorted(p for p in root.glob("*/*") if p.is_dir()):
        names = sorted(p.relative_to(root).as_posix() for p in folder.glob("*/*") if p.is_dir())
        bases = [name for name in names if name.endswith("/base")]
        news = sorted((n for n in bases if "/news-" in n), key=lambda name: facts(name)[3])
        half = len(news) // 2
        yield from combinations(news[:half], 2)
        yield from combinations(news[half:], 2)
        yield from product(news, [name for name in bases if name not in news][:1])
        for name in names:
            base = name.rpartition("/")[0] + "/base"
            if name != base:
                yield base, name


def scored(root: Path, names: tuple[str, str]) -> Pair:
    """Score a pair; a descendant is disguised by every symmetry it has."""
    second = root / names[1]
    with tempfile.TemporaryDirectory() as place:
        if not names[1].endswith("/base"):
            generator = torch.Generator().manual_seed(zlib.crc32(names[1].encode()))
            with open_model(second) as model:
                disguise(model, Path(place) / "model", generator, condition=CONDITION)
            second = Path(place) / "model"
        with open_model(root / names[0]) as A, open_model(second) as B:
            relation = relate(A, B, prove=False)
    assert relation.score is not None
    assert relation.exact is not None
    return Pair(*names, relation.score, relation.exact.total.log10_p)


def read_pairs(kept: Path) -> list[Pair]:
    """The pairs of a file; none where there is no file yet."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    return [Pair(**json.loads(line)) for line in lines]


def score_all(root: Path, kept: Path, workers: int) -> None:
    """Add every pair that is not in the file yet, in parallel processes."""
    done = {(pair.first, pair.second) for pair in read_pairs(kept)}
    missing = [names for names in wanted(root) if names not in done]
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, torch.set_num_threads, (1,)) as pool, kept.open("a") as file:
        for i, pair in enumerate(pool.imap_unordered(partial(scored, root), missing, 8), 1):
            file.write(json.dumps(asdict(pair)) + "\n")
            file.flush()
            if i % 100 == 0 or i == len(missing):
                print(f"{i} of {len(missing)} pairs", file=sys.stderr, flush=True)


def sorted_out(pairs: Iterable[Pair]) -> dict[str, list[Pair]]:
    """Pairs by what they are for; strangers with a seed in each half are for nothing."""
    pairs = sorted(pairs, key=lambda pair: (pair.first, pair.second))
    known = {name: facts(name) for pair in pairs for name in (pair.first, pair.second)}
    longest = max(steps for _, steps, *_ in known.values())
    seeds: dict[tuple[str, int], int] = {}
    for size, steps, text, seed, _ in known.values():
        if text == "news":
            seeds[size, steps] = max(seeds.get((size, steps), 0), seed + 1)
    out: dict[str, list[Pair]] = {}
    for pair in pairs:
        (size, steps, _, i, _), (_, _, text, j, relation) = known[pair.first], known[pair.second]
        half = seeds[size, steps] // 2
        if relation != "base":
            use = relation
        elif text != "news":
            use = OTHER_DATA
        elif steps == longest:
            use = LONGEST
        elif (i < half) != (j < half):
            continue
        else:
            use = CALIBRATION if i < half else HELD_OUT
        out.setdefault(use, []).append(pair)
    return out


def fit_strangers(scores: Sequence[tuple[tuple[int, int], float]]) -> Strangers:
    """Fit the null distribution to scores of strangers, each with the width and depth of its pair.

    A slope that the sizes do not determine is zero.
    """
    sizes = np.array([size for size, _ in scores], dtype=float)
    x = np.log2(sizes)
    y = np.log(np.maximum([score for _, score in scores], 0.0) + OFFSET)
    centre = x.mean(0)
    slopes = np.linalg.lstsq(x - centre, y - y.mean(), rcond=1e-9)[0]
    location = (float(y.mean() - centre @ slopes), *slopes.tolist())
    (w, W), (d, D) = ((int(c.min()), int(c.max())) for c in sizes.T)
    fit = Strangers((w, W), (d, D), location, ())
    return replace(fit, residuals=tuple(sorted(fit.residual(*pair) for pair in scores)))


def fitted(pairs: Iterable[Pair]) -> dict[str, Strangers]:
    """Null distribution of each family."""
    by_family: dict[str, list[tuple[tuple[int, int], float]]] = {}
    for pair in pairs:
        by_family.setdefault(pair.family, []).append((pair.size, pair.score))
    return {family: fit_strangers(scores) for family, scores in by_family.items()}


def rejected(known: dict[str, Strangers], pairs: Sequence[Pair]) -> int:
    """Number of pairs with p at most 1 %."""
    return sum(known[p.family].p_value(p.size, p.score) <= LEVEL for p in pairs)


def bounds(count: int, pairs: int) -> tuple[float, float]:
    """Clopper–Pearson interval of a rate at 95 % confidence, as if pairs were independent."""
    low = beta.ppf(0.025, count, pairs - count + 1) if count else 0.0
    high = beta.ppf(0.975, count + 1, pairs - count) if count < pairs else 1.0
    return float(low), float(high)


def row(name: str, count: int, pairs: Sequence[Pair]) -> list[str]:
    """A row of the table: pairs, scores, how many are rejected at 1 %, confidence interval."""
    scores, (low, high) = [p.score for p in pairs], bounds(count, len(pairs))
    return [
        name, f"{len(pairs):,}", f"{min(scores):.3f} to {max(scores):.3f}",
        f"{count / len(pairs):.2%}", f"{low:.2%} to {high:.2%}",
    ]  # fmt: skip


def summary(of: dict[str, list[Pair]]) -> list[list[str]]:
    """Rows of the table."""
    known = fitted(of[CALIBRATION])
    held = of[HELD_OUT]
    rows = [row("strangers, held-out seeds", rejected(known, held), held)]
    for family in sorted(known):
        pairs = [p for p in held if p.family == family]
        rows.append(row(f"– {family}", rejected(known, pairs), pairs))
    left_out = {}
    for size in sorted({p.size for p in held}):
        left = fitted(p for p in of[CALIBRATION] if p.size != size)
        pairs = [p for p in held if p.size == size]
        if left:
            left_out[size] = rejected(left, pairs), pairs
    if left_out:
        total = sum(count for count, _ in left_out.values())
        rows.append(row("strangers, held-out seeds, their size left out too", total, held))
    for (width, depth), (count, pairs) in left_out.items():
        rows.append(row(f"– width {width}, depth {depth}", count, pairs))
    for use, name in (
        (LONGEST, "strangers, trained longer than any that calibrated"),
        (OTHER_DATA, "strangers, other data"),
        *((relation, f"disguised: {relation}") for relation in (*DESCENDANTS, DISTILLED)),
    ):
        if use in of:
            rows.append(row(name, rejected(known, of[use]), of[use]))
    descendants = [p for relation in DESCENDANTS for p in of.get(relation, [])]
    if descendants:
        name = "disguised: all descendants but the distilled"
        rows.append(row(name, rejected(known, descendants), descendants))
    return rows


def uniformity(of: dict[str, list[Pair]]) -> str:
    """Kolmogorov–Smirnov test of the exact test's p on strangers of the same data."""
    pairs = [p for use in (CALIBRATION, HELD_OUT, LONGEST) for p in of.get(use, [])]
    ps = [10**p.log10_p for p in pairs]
    small = sum(p <= LEVEL for p in ps) / len(ps)
    return (
        f"Exact test on the {len(ps):,} pairs of strangers of the same data: p at most 1 % in "
        f"{small:.2%}; Kolmogorov–Smirnov against uniform: p = {kstest(ps, 'uniform').pvalue:.2f}."
    )


def write(of: dict[str, list[Pair]]) -> None:
    """Write the data file, fitted to both halves of the seeds."""
    families = {}
    for family, strangers in fitted([*of[CALIBRATION], *of[HELD_OUT]]).items():
        content = asdict(strangers)
        content["residuals"] = [round(r, 6) for r in content["residuals"]]
        families[family] = content
    write_text(DATA, json.dumps({"families": families}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=Path, help="folder of strangers.py; without: score none")
    parser.add_argument("--pairs", type=Path, required=True, help="keep finished pairs here")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--write", action="store_true", help="the data file")
    options = parser.parse_args()
    if options.models is not None:
        score_all(options.models, options.pairs, options.workers)
    of = sorted_out(read_pairs(options.pairs))
    columns = ["pairs", "scores", "p ≤ 0.01", "interval"]
    print("\n".join([*markdown_rows(["second model"], columns, summary(of)), "", uniformity(of)]))
    if options.write:
        write(of)


if __name__ == "__main__":
    main()
