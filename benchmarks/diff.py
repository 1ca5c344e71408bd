"""Does `tnfn diff` recover what was done to a model? Trained models, edited and disguised.

    python benchmarks/diff.py [--models DIR]

Two GPT-2s and two Llamas (D = 64, six blocks, untied) are trained on the source of Python's
standard library, and fine-tuned on English text. Adapters are trained or drawn and merged, bases
are mixed with their fine-tunes, blocks of fine-tunes are dropped and duplicated. Every edited model
goes through every symmetry its architecture has (condition 10) before `diff` sees it. Trained
models are kept in a folder.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from trained.networks import BLOCK, Kind, Size, Weights, fresh, read, write
from trained.text import english, python_source, read_tokens
from trained.training import ADAPTED, Course, Options, train
from transformer_nfn.checkpoints import Difference, diff, disguise, open_model
from transformer_nfn.io.downloads import cache_folder
from transformer_nfn.paper.table_text import markdown_rows

DEPTH, STEPS, TUNED, RATE = 6, 400, 200, 5e-4
KINDS: tuple[Kind, ...] = ("gpt2", "llama")
SEEDS, RANKS = (0, 1), (2, 4, 8, 16)
ROLES: dict[Kind, dict[str, tuple[str, ...]]] = {
    "gpt2": {
        "attn.c_attn": ("W_Q", "W_K", "W_V"), "attn.c_proj": ("W_O",), "mlp.c_fc": ("W_A",),
        "mlp.c_proj": ("W_B",),
    },
    "llama": {
        "self_attn.q_proj": ("W_Q",), "self_attn.k_proj": ("W_K",), "self_attn.v_proj": ("W_V",),
        "self_attn.o_proj": ("W_O",), "mlp.gate_proj": ("W_G",), "mlp.up_proj": ("W_A",),
        "mlp.down_proj": ("W_B",),
    },
}  # fmt: skip
"""Matrices of a file, and the canonical tensors that each holds."""


def say(text: str) -> None:
    """Progress, beside the results."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Case:
    """An edit of a base: how it is made, and whether a difference recovers it."""

    name: str
    kind: Kind
    seed: int
    weights: Callable[[], Weights]
    right: Callable[[Difference], bool]
    depth: int = DEPTH
    merged: bool = False
    dtype: torch.dtype = torch.float32


class Models:
    """Trained models in a folder; those that are missing are trained."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._texts: dict[str, Tensor] = {}

    def folder(self, kind: Kind, seed: int, name: str) -> Path:
        return self.root / f"{kind}-{seed}" / name

    def get(self, kind: Kind, seed: int, name: str) -> Weights:
        """``base``, ``tuned`` or ``lora-8``."""
        folder = self.folder(kind, seed, name)
        if not (folder / "config.json").exists():
            size = Size(kind, depth=DEPTH)
            start = fresh(size, seed) if name == "base" else self.get(kind, seed, "base")
            course = Course("english", seed + 50, TUNED, RATE)
            if name == "base":
                course = Course("python", seed, STEPS, 2e-3)
            self._texts = self._texts or read_tokens(
                {"python": python_source(), "english": english()}
            )
            rank = int(name.removeprefix("lora-")) if name.startswith("lora-") else 0
            (done,), (loss,) = train(
                size, [start], [course], self._texts, options=Options(rank=rank)
            )
            say(f"{kind}-{seed} {name}: loss {loss:.2f}")
            write(done, size, folder)
        return read(folder)


def adapters(models: Models, draws: int) -> list[Case]:
    """Eight trained adapters and twelve drawn ones, of various ranks, targets and blocks."""
    cases = []
    for kind in KINDS:
        for rank in RANKS:
            targets = {n.removesuffix(".weight"): rank for n in ADAPTED[kind]}
            make = partial(models.get, kind, draws % 2, f"lora-{rank}")
            right = _recovers(kind, targets, range(DEPTH))
            cases.append(Case(f"trained, rank {rank}", kind, draws % 2, make, right))
    draw = random.Random(3 * draws)
    for i in range(12):
        kind, seed, rank = KINDS[i % 2], i // 2 % 2, draw.choice((1, 2, 4, 8, 12))
        targets = draw.sample(list(ROLES[kind]), draw.randint(1, 3))
        first = draw.randint(0, DEPTH - 2)
        blocks = range(first, draw.randint(first + 1, DEPTH))
        share = draw.choice((0.02, 0.05, 0.1))
        dtype = torch.bfloat16 if i >= 8 else torch.float32
        share = 0.1 if dtype == torch.bfloat16 else share
        adapter = Adapter(tuple(targets), blocks, rank, share)
        make = partial(_merged, models, kind, seed, adapter)
        right = _recovers(kind, dict.fromkeys(targets, rank), blocks)
        name = f"drawn {i}, rank {rank}, {', '.join(targets)}, share {share}, {dtype}"
        cases.append(Case(name, kind, seed, make, right, dtype=dtype))
    return cases


@dataclass(frozen=True)
class Adapter:
    """A random adapter: matrices, blocks, rank, and its size relative to each matrix."""

    targets: tuple[str, ...]
    blocks: range
    rank: int
    share: float


def _merged(models: Models, kind: Kind, seed: int, adapter: Adapter) -> Weights:
    out = models.get(kind, seed, "base")
    generator = torch.Generator().manual_seed(zlib.crc32(repr(adapter).encode()))
    starts = [BLOCK[kind].format(i) for i in adapter.blocks]
    for name in [f"{start}{target}.weight" for start in starts for target in adapter.targets]:
        w = out[name]
        left = torch.randn(w.shape[0], adapter.rank, generator=generator)
        update = left @ torch.randn(adapter.rank, w.shape[1], generator=generator)
        out[name] = w + adapter.share * w.norm() / update.norm() * update
    return out


def _recovers(kind: Kind, targets: dict[str, int], blocks: range) -> Callable[[Difference], bool]:
    """Whether exactly these tensors changed, by exactly these ranks."""
    expected = {
        f"{i}.{role}": rank
        for i in blocks
        for t, rank in targets.items()
        for role in ROLES[kind][t]
    }

    def right(found: Difference) -> bool:
        changed = {c.name: c.rank for c in found.changes if c.kind != "unchanged"}
        for name in sorted(changed.keys() | expected.keys()):
            if changed.get(name) != expected.get(name):
                say(f"  {name}: found {changed.get(name)}, expected {expected.get(name)}")
        return changed == expected

    return right


def merges(models: Models, draws: int) -> list[Case]:
    """Bases mixed with their fine-tunes."""
    draw = random.Random(3 * draws + 1)
    cases = []
    for i in range(10):
        kind, seed, share = KINDS[i % 2], i // 2 % 2, round(draw.uniform(0.1, 0.9), 2)

        def make(kind: Kind = kind, seed: int = seed, share: float = share) -> Weights:
            base, tuned = (models.get(kind, seed, name) for name in ("base", "tuned"))
            return {n: torch.lerp(w, tuned[n], share) for n, w in base.items()}

        def right(found: Difference, share: float = share) -> bool:
            assert found.merge is not None
            say(f"  share {share}: found {found.merge.share:.3f}, left {found.merge.left:.2f}")
            return abs(found.merge.share - share) <= 0.02

        cases.append(Case(f"share {share}", kind, seed, make, right, merged=True))
    return cases


def cuts(models: Models, draws: int) -> list[Case]:
    """Fine-tunes with blocks dropped and duplicated."""
    draw = random.Random(3 * draws + 2)
    cases = []
    for i in range(10):
        kind, seed = KINDS[i % 2], i // 2 % 2
        count = draw.randint(1, 2)
        chosen = draw.sample(range(DEPTH), count)
        dropped = i < 5
        order = [b for b in range(DEPTH) if not dropped or b not in chosen]
        if not dropped:
            order = sorted([*order, *chosen])

        def make(kind: Kind = kind, seed: int = seed, order: list[int] = order) -> Weights:
            return _reordered(kind, models.get(kind, seed, "tuned"), order)

        def right(found: Difference, order: list[int] = order) -> bool:
            say(f"  blocks {order}: found {list(found.sources.values())}")
            return list(found.sources.values()) == [str(b) for b in order]

        word = "dropped" if dropped else "duplicated"
        cases.append(Case(f"{word} {chosen}", kind, seed, make, right, depth=len(order)))
    return cases


def _reordered(kind: Kind, weights: Weights, order: list[int]) -> Weights:
    start = BLOCK[kind].split("{")[0]
    out = {n: w for n, w in weights.items() if not n.startswith(start)}
    for new, old in enumerate(order):
        prefix = BLOCK[kind].format(old)
        for name, w in weights.items():
            if name.startswith(prefix):
                out[BLOCK[kind].format(new) + name.removeprefix(prefix)] = w.clone()
    return out


def check(models: Models, case: Case, draws: int) -> tuple[bool, float]:
    """Whether the edit is recovered from its disguise, and the seconds it takes."""
    base = models.folder(case.kind, case.seed, "base")
    with tempfile.TemporaryDirectory() as folder:
        place, hidden = Path(folder) / "edited", Path(folder) / "disguised"
        size = replace(Size(case.kind), depth=case.depth)
        write({n: w.to(case.dtype) for n, w in case.weights().items()}, size, place)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{draws} {case.name}".encode()))
        with open_model(place) as model:
            disguise(model, hidden, generator, condition=10.0)
        start = time.perf_counter()
        with ExitStack() as stack:
            A, B = (stack.enter_context(open_model(x)) for x in (base, hidden))
            tuned = models.folder(case.kind, case.seed, "tuned")
            C = stack.enter_context(open_model(tuned)) if case.merged else None
            found = diff(A, B, C)
        seconds = time.perf_counter() - start
    right = case.right(found)
    say(f"{'right' if right else 'WRONG'}: {case.kind}-{case.seed} {case.name} ({seconds:.0f} s)")
    return right, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=Path, default=cache_folder("diff"))
    parser.add_argument("--draws", type=int, default=0, help="seed of edits and disguises")
    options = parser.parse_args()
    models = Models(options.models)
    for kind in KINDS:
        for seed in SEEDS:
            models.get(kind, seed, "tuned")
    rows: list[list[str]] = []
    for what, recovered, cases in (
        ("LoRA merged", "rank, targets and blocks", adapters(models, options.draws)),
        ("mixed with a fine-tune", "share to 0.02", merges(models, options.draws)),
        (
            "blocks dropped or duplicated, fine-tuned",
            "source of every block",
            cuts(models, options.draws),
        ),
    ):
        done = [check(models, case, options.draws) for case in cases]
        count = sum(right for right, _ in done)
        slowest = max(seconds for _, seconds in done)
        rows.append([what, recovered, str(len(done)), str(count), f"{slowest:.0f} s"])
    columns = ["to recover", "models", "recovered", "slowest"]
    print("\n".join(markdown_rows(["edit"], columns, rows)))


if __name__ == "__main__":
    main()
