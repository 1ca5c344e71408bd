"""Which relatives does each model get? Trained, averaged, pruned, rounded, patched together.

A family is a base with its own seed. All bases of a kind read the same text; two neighbours (0
and 1, 2 and 3, …) read it in the same order too, so that they differ in nothing but their seed.
Folders are written once: a run that was stopped goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trained.networks import BLOCK, EMBEDDINGS, Kind, Size, Weights, fresh, read, write
from trained.text import english, python_source, read_tokens
from trained.training import Course, train

FAST, SLOW = 2e-3, 5e-4
TRAINED = ("base", "fine-tuned, same data", "fine-tuned, other data", "retrained, other data",
           "embeddings only")  # fmt: skip
MADE = ("mean of two fine-tunes", "half pruned", "int8", "int4")
DERIVED = (*TRAINED[1:4], *MADE)
"""Relations in which every block has the base's weights behind it."""
REPLACED = "one block replaced"
PATCHED = "block replaced, fine-tuned"
"""One block from a stranger, and then the whole model fine-tuned on the same data."""


@dataclass(frozen=True)
class Member:
    """One family: its kind, its number among those of the kind."""

    kind: Kind
    number: int

    @property
    def size(self) -> Size:
        return Size(self.kind)

    def __str__(self) -> str:
        return f"{self.kind}-{self.number}"


def all_families(count: int) -> list[Member]:
    """Five GPT-2s to three Llamas."""
    llamas = max(count * 3 // 8, 2)
    kinds: list[tuple[Kind, int]] = [("gpt2", max(count - llamas, 2)), ("llama", llamas)]
    return [Member(kind, i) for kind, n in kinds for i in range(n)]


def folder_of(root: Path, family: Member, relation: str) -> Path:
    """Where a model of a family lies."""
    return root / str(family) / relation.replace(",", "").replace(" ", "-")


def complete(folder: Path) -> bool:
    """Whether a model was written to its end."""
    return (folder / "config.json").exists()


def train_families(
    families: list[Member],
    root: Path,
    steps: int,
    told: Callable[[str, int, int, float], None],
) -> None:
    """Trains whatever is not there yet, models of one kind and length together."""
    texts: dict[str, Tensor] = {}
    kinds: tuple[Kind, ...] = ("gpt2", "llama")
    for kind in kinds:
        own = [f for f in families if f.kind == kind]
        for relations in (TRAINED[:1], (*TRAINED[1:3], PATCHED), TRAINED[3:]):
            missing = [
                (f, r) for r in relations for f in own if not complete(folder_of(root, f, r))
            ]
            if not missing:
                continue
            texts = texts or read_tokens({"python": python_source(), "english": english()})
            relatives = dict.fromkeys(relation for _, relation in missing)
            what = f"{len(missing)} × {kind}: {'; '.join(relatives)}"
            done, losses = train(
                Size(kind),
                [_start(root, f, r, len(own)) for f, r in missing],
                [_course(f, r, steps) for f, r in missing],
                texts,
                lambda step, of, loss, what=what: told(what, step, of, loss),
            )
            for (f, r), weights, loss in zip(missing, done, losses, strict=True):
                folder = folder_of(root, f, r)
                write(weights, f.size, folder)
                (folder / "loss.json").write_text(json.dumps(loss))


def _seed(family: Member) -> int:
    return 1000 * (family.kind == "llama") + family.number


def patched_block(family: Member) -> int:
    """Which block of a family's model was replaced before it was fine-tuned."""
    return family.number % family.size.depth


def _start(root: Path, family: Member, relation: str, count: int) -> Weights:
    if relation == "base":
        return fresh(family.size, _seed(family))
    base = read(folder_of(root, family, "base"))
    if relation == PATCHED:
        donor = read(folder_of(root, Member(family.kind, (family.number + 1) % count), "base"))
        return _mixed(family.kind, base, donor, patched_block(family))
    if relation != "embeddings only":
        return base
    own = fresh(family.size, 500 + _seed(family))
    return own | {name: base[name] for name in EMBEDDINGS[family.kind]}


def _course(family: Member, relation: str, steps: int) -> Course:
    order = family.number // 2
    return {
        "base": Course("python", order, steps, FAST),
        "fine-tuned, same data": Course("python", 100 + order, steps // 4, SLOW),
        PATCHED: Course("python", 100 + order, steps // 4, SLOW),
        "fine-tuned, other data": Course("english", 200 + order, steps // 4, SLOW),
        "retrained, other data": Course("english", 300 + order, steps, FAST),
        "embeddings only": Course("python", 400 + order, steps, FAST),
    }[relation]


def make_relatives(root: Path, family: Member) -> None:
    """What needs no training: averaged, pruned and rounded models."""
    if all(complete(folder_of(root, family, relation)) for relation in MADE):
        return
    kind = family.kind
    base, same, other = (read(folder_of(root, family, r)) for r in TRAINED[:3])
    made = {
        "mean of two fine-tunes": {n: (w + other[n]) / 2 for n, w in same.items()},
        "half pruned": {n: pruned(w) if in_block(kind, n) else w for n, w in base.items()},
        "int8": {n: rounded(w, 8, inputs_of(kind, n)) for n, w in base.items()},
        "int4": {n: rounded(w, 4, inputs_of(kind, n)) for n, w in base.items()},
    }
    for relation, weights in made.items():
        write(weights, family.size, folder_of(root, family, relation))


def in_block(kind: Kind, name: str) -> bool:
    """Whether a tensor of a file belongs to a block."""
    return name.startswith(BLOCK[kind].split("{")[0])


def pruned(w: Tensor) -> Tensor:
    """A matrix without the smaller half of its entries."""
    return w if w.ndim < 2 else w * (w.abs() > w.abs().median())


def inputs_of(kind: Kind, name: str) -> int:
    """The axis of a matrix's inputs: GPT-2's blocks store ``[in, out]``, all else ``[out, in]``."""
    return 0 if kind == "gpt2" and in_block(kind, name) else 1


def rounded(w: Tensor, bits: int, inputs: int) -> Tensor:
    """A matrix on a grid of its own for every output, as weight-only quantisation stores it."""
    if w.ndim < 2:
        return w
    step = w.abs().amax(inputs, keepdim=True) / (2 ** (bits - 1) - 1)
    return torch.round(w / step) * step


EXPERTS = 4
MIXTURE = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
}
"""What the config of a mixture says that was made of a Llama."""


def upcycled(weights: Weights, size: Size, noise: float = 0.1) -> Weights:
    """A Llama as a Mixtral: every expert a copy of its MLP with noise, the router fresh."""
    generator = torch.Generator().manual_seed(0)
    keys = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    out = {}
    for name, w in weights.items():
        start, inside, part = name.partition("mlp.")
        if not inside:
            out[name] = w
            continue
        key = keys[part.removesuffix(".weight")]
        for e in range(EXPERTS):
            drawn = torch.randn(w.shape, generator=generator)
            place = f"{start}block_sparse_moe.experts.{e}.{key}.weight"
            out[place] = w + noise * w.std() * drawn
    for i in range(size.depth):
        router = 0.02 * torch.randn(EXPERTS, size.width, generator=generator)
        out[f"{BLOCK['llama'].format(i)}block_sparse_moe.gate.weight"] = router
    return out


def replacements(root: Path, family: Member, others: list[Member]) -> Iterator[tuple[str, int]]:
    """One block at a time from each stranger, and a fresh one: the relation's name and the block.

    Each is written when it is asked for.
    """
    base = read(folder_of(root, family, "base"))
    donors = {str(f): read(folder_of(root, f, "base")) for f in others}
    donors["fresh"] = fresh(family.size, 700 + _seed(family))
    for donor, weights in donors.items():
        for i in range(family.size.depth):
            name = f"{REPLACED}/{donor}-{i}"
            folder = folder_of(root, family, name)
            if not complete(folder):
                write(_mixed(family.kind, base, weights, i), family.size, folder)
            yield name, i


def _mixed(kind: Kind, base: Weights, donor: Weights, block: int) -> Weights:
    """A model with one block of another, as it lies in the file."""
    prefix = BLOCK[kind].format(block)
    return {n: donor[n] if n.startswith(prefix) else w for n, w in base.items()}
