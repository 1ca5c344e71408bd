"""Train unrelated small language models, and descendants of some, many at once on one GPU.

    python benchmarks/strangers.py --out DIR [--data AG_NEWS] [--minutes M] [--only NAME …]
        [--quick]

GPT-2s, Llamas and BERTs of several widths, depths and training lengths, each from a seed of its
own, most on AG News, some on the source of Python's standard library. Seeds 2i and 2i + 1 read the
same batches in the same order. Some bases get descendants: fine-tuned, continued, retrained,
changed by merged low-rank adapters, distilled into a fresh model.

BERTs read short rows and more of them: with the rows of the others they learn hardly more than the
frequencies of tokens in 4,000 steps.

``DIR/models/SIZE/STEPS/TEXT-SEED/RELATION/`` is a folder as `from_pretrained` reads it, in float16;
``DIR/tokens.safetensors`` holds the beginning of each text. A run that was stopped goes on where it
was.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trained.networks import Kind, Size, Weights, fresh, read, write
from trained.text import news, python_source, read_tokens
from trained.training import Course, Options, train

KINDS: tuple[Kind, ...] = ("gpt2", "llama", "bert")
LENGTH, BERT_LENGTH, MASKED = 64, 16, 0.2
BERT_ROWS = 6
"""How many times as many rows a BERT reads in a step."""
VOCABULARY, RANK = 256, 4
FAST, SLOW = 2e-3, 5e-4
NEWS, PYTHON = "news", "python"
OTHER_DATA = 4
"""Seeds of each size and length that are trained on Python source."""
KEPT_TOKENS = 200_000


@dataclass(frozen=True)
class Plan:
    """Which models are trained.

    Attributes:
        seeds: bases on news, by width and depth.
        parents: how many of those get descendants.
        steps: of the bases; descendants are made of the longest.
        longest: width, depth, seeds and steps of a few bases that are trained far longer.
        rows: of a batch.
    """

    seeds: dict[tuple[int, int], int]
    parents: dict[tuple[int, int], int]
    steps: tuple[int, int] = (1000, 4000)
    longest: tuple[int, int, int, int] = (64, 2, 8, 16000)
    rows: int = 16


FULL = Plan(
    {(32, 2): 32, (64, 2): 20, (128, 3): 8, (64, 4): 20, (32, 4): 32, (96, 2): 10, (96, 4): 10},
    {(32, 2): 8, (64, 2): 8, (128, 3): 2, (64, 4): 8, (32, 4): 8},
)
QUICK = Plan({(32, 2): 8}, {(32, 2): 3}, (100, 300), (32, 2, 2, 400), rows=4)


@dataclass(frozen=True)
class Model:
    """One model: its base's size, steps, text and seed, and its relation to that base."""

    size: Size
    steps: int
    text: str
    seed: int
    relation: str = "base"

    def folder(self, root: Path) -> Path:
        return root / str(self.size) / str(self.steps) / f"{self.text}-{self.seed}" / self.relation

    def course(self) -> Course:
        order, short = self.seed // 2, self.steps // 4
        return {
            "base": Course(self.text, order, self.steps, FAST),
            "fine-tuned": Course(NEWS, 1000 + order, short, SLOW),
            "fine-tuned-other": Course(PYTHON, 2000 + order, short, SLOW),
            "lora": Course(PYTHON, 3000 + order, short, FAST),
            "continued": Course(NEWS, 4000 + order, self.steps, FAST),
            "retrained-other": Course(PYTHON, 5000 + order, self.steps, FAST),
            "distilled": Course(NEWS, 6000 + order, self.steps, FAST),
        }[self.relation]

    def start(self, root: Path) -> Weights:
        """Fresh weights of bases and students, the base's of all others."""
        if self.relation in ("base", "distilled"):
            # No two models share a seed, whatever their sizes, lengths and texts.
            number = [KINDS.index(self.size.kind), self.size.width, self.size.depth, self.steps]
            number += [self.text == PYTHON, self.relation == "distilled", self.seed]
            return fresh(self.size, _mixed(number))
        return self.base(root)

    def base(self, root: Path) -> Weights:
        folder = Model(self.size, self.steps, self.text, self.seed).folder(root)
        return {n: w.float() for n, w in read(folder).items()}


def size_of(kind: Kind, width: int, depth: int) -> Size:
    """The size of a family, with the length of its rows."""
    return Size(kind, width, depth, BERT_LENGTH if kind == "bert" else LENGTH, VOCABULARY)


def _mixed(numbers: list[int]) -> int:
    seed = 0
    for number in numbers:
        seed = seed * 20011 + number
    return seed % (2**63)


TOGETHER = (("fine-tuned", "fine-tuned-other"), ("lora",), ("continued", "retrained-other"),
            ("distilled",))  # fmt: skip
"""Descendants that are trained side by side: as many steps, at the same rate."""


def groups(plan: Plan) -> Iterator[list[Model]]:
    """Lists of models to train together; bases come before their descendants."""
    for (width, depth), seeds in plan.seeds.items():
        for kind in KINDS:
            size = size_of(kind, width, depth)
            for steps in plan.steps:
                yield _bases(size, steps, seeds)
            parents = range(plan.parents.get((width, depth), 0))
            for relations in TOGETHER if parents else ():
                steps = plan.steps[-1]
                yield [Model(size, steps, NEWS, s, r) for r in relations for s in parents]
    width, depth, seeds, steps = plan.longest
    for kind in KINDS:
        yield _bases(size_of(kind, width, depth), steps, seeds)


def _bases(size: Size, steps: int, seeds: int) -> list[Model]:
    other = [Model(size, steps, PYTHON, s) for s in range(min(OTHER_DATA, seeds))]
    return [Model(size, steps, NEWS, s) for s in range(seeds)] + other


def train_group(group: list[Model], root: Path, texts: dict[str, Tensor], rows: int) -> str:
    """Trains the models of a group and writes their folders; a line about it."""
    size, relation = group[0].size, group[0].relation
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = Options(
        rows=rows * BERT_ROWS if size.kind == "bert" else rows,
        device=device,
        dtype=torch.bfloat16 if device == "cuda" else torch.float32,
        masked=MASKED,
        rank=RANK if relation == "lora" else 0,
        teachers=[m.base(root) for m in group] if relation == "distilled" else [],
    )
    courses = [m.course() for m in group]
    first: list[float] = []
    clock = time.perf_counter()
    weights, losses = train(
        size,
        [m.start(root) for m in group],
        courses,
        texts,
        lambda done, steps, loss: first.append(loss),
        options,
    )
    seconds = time.perf_counter() - clock
    for model, tensors, loss in zip(group, weights, losses, strict=True):
        folder, course = model.folder(root), model.course()
        half = {n: w.half() for n, w in tensors.items()}
        if not all(w.isfinite().all() for w in half.values()):
            print(f"diverged, not written: {folder}", flush=True)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"loss": loss, "text": course.text, "order": course.order, "steps": course.steps}
        (folder / "training.json").write_text(json.dumps(facts))
        write(half, size, folder)
    relations = "+".join(dict.fromkeys(m.relation for m in group))
    each = 1000 * seconds / courses[0].steps
    return (
        f"{size} {courses[0].steps} steps, {relations}: {len(group)} models, {seconds:.1f} s, "
        f"{each:.2f} ms a step, loss {first[0]:.2f} → {sum(losses) / len(losses):.2f} "
        f"(worst {max(losses):.2f})"
    )


def texts_of(out: Path, data: Path) -> dict[str, Tensor]:
    """Token ids of both texts; computed once, their beginnings kept beside the models."""
    cached = out / "all-tokens.safetensors"
    if not cached.exists():
        # The last id hides a token from a BERT.
        texts = read_tokens({NEWS: news(data), PYTHON: python_source()}, VOCABULARY - 1)
        out.mkdir(parents=True, exist_ok=True)
        small = {n: t.to(torch.uint8) for n, t in texts.items()}
        save_file(
            {n: t[:KEPT_TOKENS].clone() for n, t in small.items()}, out / "tokens.safetensors"
        )
        save_file(small, cached)
    return {n: t.long() for n, t in load_file(cached).items()}


def find_data() -> Path:
    """AG News inside the checkout or beside it."""
    root = Path(__file__).resolve().parents[1]
    places = [folder / "shared" / "data" / "ag_news" for folder in (root, root.parent)]
    return next((p for p in places if p.exists()), places[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=find_data(), help="folder of AG News")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no group after")
    parser.add_argument("--only", nargs="+", default=[""], help="e.g. bert gpt2-64x2/4000/base")
    parser.add_argument("--quick", action="store_true", help="a set for one CPU, minutes")
    options = parser.parse_args()
    start = time.perf_counter()
    plan = QUICK if options.quick else FULL
    texts = texts_of(options.out, options.data)
    sizes = ", ".join(f"{name} {len(t)} tokens" for name, t in texts.items())
    print(f"{sizes}; {time.perf_counter() - start:.0f} s", flush=True)
    root, left = options.out / "models", 0
    for group in groups(plan):
        first = group[0]
        if not f"{first.size}/{first.steps}/{first.relation}".startswith(tuple(options.only)):
            continue
        missing = [m for m in group if not (m.folder(root) / "config.json").exists()]
        if missing and time.perf_counter() - start > 60 * options.minutes:
            left += 1
        elif missing:
            line = train_group(missing, root, texts, plan.rows)
            print(f"{time.perf_counter() - start:5.0f} s  {line}", flush=True)
    print(f"{left} groups left for another run" if left else "all groups trained", flush=True)


if __name__ == "__main__":
    main()
