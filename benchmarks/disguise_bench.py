"""Compare measures of shared ancestry on trained models, plain and disguised.

    python benchmarks/disguise_bench.py MODELS [--size 64x2/4000] [--parents 4] [--strangers 100]
        [--workers N] [--figure docs/disguise_bench.svg]

MODELS is the folder ``models`` that ``benchmarks/strangers.py`` wrote. The second model of every
pair is taken as it is, with stream, heads and neurons in another order (signed where the norm
allows it), and after every symmetry of its architecture at condition 10. Pairs that were scored
are kept beside MODELS: a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from costs import in_a_process, peak_mib
from strangers import KINDS, size_of
from trained.families import MIXTURE, in_block, inputs_of, pruned, rounded, upcycled
from trained.measures import auroc
from trained.networks import Size, Weights, read, write
from trained.peers import PEERS, Measure
from transformer_nfn.checkpoints.disguises import disguise
from transformer_nfn.checkpoints.families import Model, open_model, write_model
from transformer_nfn.checkpoints.relations import relate
from transformer_nfn.checkpoints.symmetries import (
    ExpertPermutation,
    HeadPermutation,
    NeuronPermutation,
    StreamBasis,
    Symmetry,
)
from transformer_nfn.paper.table_text import markdown_rows
from transformer_nfn.spaces.actions import Drawing

ROWS, LENGTH, CONDITION = 256, 16, 10.0
TRAINED = ("fine-tuned", "fine-tuned-other", "lora", "continued", "retrained-other")
MADE = ("pruned", "int4", "merged")
UPCYCLED = "upcycled"
"""A mixture whose experts start as noisy copies of one MLP; of Llamas."""
DERIVED = (*TRAINED, *MADE, UPCYCLED)
DISTILLED, STRANGER = "distilled", "stranger"
"""A distilled model learned the outputs of the other from fresh weights: listed, not counted."""
VARIANTS = ("as is", "permuted", "every symmetry")
Rows = list[dict[str, Any]]


def ours(A: Model, B: Model, ids: Tensor) -> float | None:
    """The score of `relate`, which the calibrated test uses as well."""
    return relate(A, B, prove=False).score


def exact(A: Model, B: Model, ids: Tensor) -> float | None:
    """−log10 p of the exact test, whose null hypothesis is about the order of units."""
    test = relate(A, B, prove=False).exact
    return None if test is None else -test.total.log10_p


METHODS: dict[str, Measure] = {"tnfn compare": ours, "tnfn exact test": exact, **PEERS}


@dataclass(frozen=True)
class Pair:
    """Two models and their relation; paths below the folder of all models."""

    relation: str
    kind: str
    first: str
    second: str


def pairs(models: Path, size: str, parents: int, strangers: int) -> Iterator[Pair]:
    """Descendants of the first bases of each family, and as many strangers as asked for.

    Strangers are bases of the same data, bases of other data, and descendants of another base.
    """
    for kind in KINDS:
        root = f"{kind}-{size}"
        bases = sorted((models / root).glob("*/base"))
        names = [f"{root}/{p.parent.name}" for p in bases]
        if not names:
            raise SystemExit(f"{models / root}: expected folders of trained models, found none")
        for seed in range(parents):
            base = f"{root}/news-{seed}"
            for relation in made_of(kind):
                yield Pair(relation, kind, f"{base}/base", f"{base}/{relation}")
        unrelated = [(a, b, "base") for i, a in enumerate(names) for b in names[i + 1 :]]
        families = [f"{root}/news-{seed}" for seed in range(parents)]
        descendants = [r for r in made_of(kind) if r != DISTILLED]
        unrelated += [(a, b, r) for a in names for b in families if a != b for r in descendants]
        chosen = random.Random(0).sample(unrelated, min(strangers, len(unrelated)))
        for a, b, relation in chosen:
            yield Pair(STRANGER, kind, f"{a}/base", f"{b}/{relation}")


def made_of(kind: str) -> tuple[str, ...]:
    """Relations to a base that every base of a family has."""
    return tuple(r for r in (*DERIVED, DISTILLED) if r != UPCYCLED or kind == "llama")


def make_relatives(base: Path, size: Size) -> None:
    """Models that need no training: half pruned, rounded to four bits, merged, upcycled."""
    if all((base / name / "config.json").exists() for name in made_of(size.kind)):
        return
    kind = size.kind
    own, same, other = (_float(base / n) for n in ("base", *TRAINED[:2]))
    made = {
        "pruned": {n: pruned(w) if in_block(kind, n) else w for n, w in own.items()},
        "int4": {n: rounded(w, 4, inputs_of(kind, n)) for n, w in own.items()},
        "merged": {n: (w + other[n]) / 2 for n, w in same.items()},
    }
    for name, weights in made.items():
        write({n: w.half() for n, w in weights.items()}, size, base / name)
    if size.kind == "llama":
        mixture = {n: w.half() for n, w in upcycled(own, size).items()}
        write(mixture, size, base / UPCYCLED, MIXTURE)


def _float(folder: Path) -> Weights:
    return {n: w.float() for n, w in read(folder).items()}


def permute(model: Model, out: Path, generator: torch.Generator) -> None:
    """Write a model with its stream, heads and neurons in another order.

    Coordinates of the stream change signs where RMS norms allow it; LayerNorm allows one sign.
    """
    weights = model.read(model.names, torch.float64)
    description, how = model.description, Drawing(generator)
    group = "signed permutation" if description.norm == "rms" else "permutation and sign"
    units = (HeadPermutation(), NeuronPermutation(), ExpertPermutation())
    symmetries: list[Symmetry[Any]] = [StreamBasis(), *units]
    for symmetry in symmetries:
        for site in symmetry.sites(description):
            if isinstance(symmetry, StreamBasis):
                site = replace(site, detail=replace(site.detail, group=group))
            g = symmetry.draw(site, site.pick(weights), how)
            weights |= site.put(symmetry.act(site, site.pick(weights), g))
    write_model(model, weights, out)


def varied(models: Path, hidden: Path, place: str, variant: str) -> Path:
    """The folder of a model in one variant, written once."""
    source = models / place
    if variant == VARIANTS[0]:
        return source
    out = hidden / variant.replace(" ", "-") / place
    if not (out / "config.json").exists():
        out.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{variant} {place}".encode()))
        with open_model(source) as model:
            if variant == VARIANTS[1]:
                permute(model, out, generator)
            else:
                disguise(model, out, generator, condition=CONDITION)
    return out


def scored(models: Path, hidden: Path, ids: Tensor, task: tuple[Pair, str]) -> dict[str, Any]:
    """Every method on a pair in one variant, and the processor time of each in seconds."""
    pair, variant = task
    second = varied(models, hidden, pair.second, variant)
    scores: dict[str, float | None] = {}
    seconds: dict[str, float] = {}
    for name, method in METHODS.items():
        start = time.process_time()
        with open_model(models / pair.first) as A, open_model(second) as B:
            scores[name] = method(A, B, ids)
        seconds[name] = time.process_time() - start
    return {**asdict(pair), "variant": variant, "scores": scores, "seconds": seconds}


def run(models: Path, todo: list[Pair], ids: Tensor, kept: Path, workers: int) -> Rows:
    """Scores of all pairs in all variants; those in ``kept`` are not computed again."""
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {(r["first"], r["second"], r["variant"]): r for r in rows}
    tasks = [(pair, variant) for pair in todo for variant in VARIANTS]
    missing = [(p, v) for p, v in tasks if (p.first, p.second, v) not in done]
    hidden = kept.parent / "disguised"
    seconds = sorted({(pair.second, variant) for pair, variant in missing})
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, torch.set_num_threads, (1,)) as pool, kept.open("a") as file:
        pool.starmap(partial(varied, models, hidden), seconds)
        results = pool.imap_unordered(partial(scored, models, hidden, ids), missing)
        for i, row in enumerate(results, 1):
            done[row["first"], row["second"], row["variant"]] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
            if i % 100 == 0 or i == len(missing):
                print(f"{i} of {len(missing)} scored", flush=True)
    return [done[p.first, p.second, v] for p, v in tasks]


def peak_memory(first: Path, second: Path, ids: Tensor) -> dict[str, float]:
    """MiB that each method adds to the peak of a process that has opened both models."""
    peaks = {name: in_a_process(peak_of, name, first, second, ids) for name in ("", *METHODS)}
    return {name: peaks[name] - peaks[""] for name in METHODS}


def peak_of(name: str, first: Path, second: Path, ids: Tensor) -> float:
    """MiB at the peak of this process by a method, or by opening the models alone."""
    with open_model(first) as A, open_model(second) as B:
        if name:
            METHODS[name](A, B, ids)
    return peak_mib()


def caught(related: list[float], strangers: list[float]) -> float:
    """Share of related pairs above all but 1 % of the strangers; NaN without any pair."""
    if not related or not strangers:
        return float("nan")
    threshold = sorted(strangers, reverse=True)[len(strangers) // 100]
    return sum(s > threshold for s in related) / len(related)


def values(rows: Rows, method: str, variant: str, relations: tuple[str, ...]) -> list[float]:
    """Scores of one method on the pairs it applies to."""
    chosen = [r for r in rows if r["variant"] == variant and r["relation"] in relations]
    return [r["scores"][method] for r in chosen if r["scores"][method] is not None]


def table(rows: Rows, memory: dict[str, float]) -> list[str]:
    """AUROC and the share caught, by method and disguise, with the costs of a pair."""
    lines = []
    for method in METHODS:
        cells = [method]
        for variant in VARIANTS:
            related = values(rows, method, variant, DERIVED)
            strangers = values(rows, method, variant, (STRANGER,))
            cells += [f"{auroc(related, strangers):.3f}", f"{caught(related, strangers):.0%}"]
        seconds = [r["seconds"][method] for r in rows if r["scores"][method] is not None]
        lines.append([*cells, f"{statistics.median(seconds):.2f}", f"{max(memory[method], 0):.0f}"])
    columns = [f"{what}, {variant}" for variant in VARIANTS for what in ("AUROC", "caught")]
    return markdown_rows(["method"], [*columns, "seconds", "MiB"], lines)


def family_table(rows: Rows) -> list[str]:
    """AUROC by method and family, as the files are and fully disguised."""
    shown = [(variant, kind) for variant in (VARIANTS[0], VARIANTS[-1]) for kind in KINDS]
    lines = []
    for method in METHODS:
        cells = [method]
        for variant, kind in shown:
            own = [r for r in rows if r["kind"] == kind and r["scores"][method] is not None]
            sides = (values(own, method, variant, r) for r in (DERIVED, (STRANGER,)))
            cells.append(f"{auroc(*sides):.3f}" if own else "–")
        lines.append(cells)
    return markdown_rows(["method"], [f"{kind}, {variant}" for variant, kind in shown], lines)


def draw(rows: Rows, out: Path) -> None:
    """Share of related pairs caught at 1 % false positives, by method, variant and relation."""
    from matplotlib.figure import Figure

    relations = (*DERIVED, DISTILLED)
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = figure.subplots(1, len(VARIANTS), sharey=True)
    for axes, variant in zip(panels, VARIANTS, strict=True):
        shares = []
        for method in METHODS:
            strangers = values(rows, method, variant, (STRANGER,))
            each = [values(rows, method, variant, (r,)) for r in relations]
            shares.append([caught(v, strangers) for v in each])
        image = axes.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(relations)), relations, rotation=60, ha="right", fontsize=8)
        axes.set_yticks(range(len(METHODS)), list(METHODS), fontsize=8)
        axes.set_title(variant, loc="left", fontsize=9)
        for i, row in enumerate(shares):
            for j, share in enumerate(row):
                colour = "black" if share > 0.6 else "white"
                text = "–" if share != share else f"{share:.0%}"
                axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=6)
    figure.colorbar(image, ax=panels, label="caught at 1 % false positives")
    figure.savefig(out, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", type=Path)
    parser.add_argument("--size", default="64x2/4000", help="width, depth and steps of the bases")
    parser.add_argument("--parents", type=int, default=4, help="bases with descendants, a family")
    parser.add_argument("--strangers", type=int, default=100, help="unrelated pairs, a family")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    models: Path = options.models
    tokens = load_file(models.parent / "tokens.safetensors")["news"].long()
    ids = tokens[: ROWS * LENGTH].reshape(ROWS, LENGTH)
    width, depth = map(int, options.size.split("/")[0].split("x"))
    for kind in KINDS:
        for seed in range(options.parents):
            base = models / f"{kind}-{options.size}/news-{seed}"
            make_relatives(base, size_of(kind, width, depth))
    todo = list(pairs(models, options.size, options.parents, options.strangers))
    kept = models.parent / f"disguise-bench-{width}x{depth}.jsonl"
    rows = run(models, todo, ids, kept, options.workers)
    gated = next(pair for pair in todo if pair.kind == "llama")  # every method applies to it
    memory = peak_memory(models / gated.first, models / gated.second, ids)
    print("\n".join([*table(rows, memory), "", *family_table(rows)]))
    if options.figure:
        draw(rows, options.figure)


if __name__ == "__main__":
    main()
