"""Which pairs are compared, and what comes out? Every second model is fully disguised."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from trained.families import (
    DERIVED,
    PATCHED,
    REPLACED,
    TRAINED,
    Member,
    complete,
    folder_of,
    make_relatives,
    patched_block,
    replacements,
)
from trained.measures import BASELINES
from transformer_nfn.checkpoints.disguises import disguise
from transformer_nfn.checkpoints.families import open_model
from transformer_nfn.checkpoints.reduced import Reduced
from transformer_nfn.checkpoints.relations import relate
from transformer_nfn.checkpoints.sketches import block_score
from transformer_nfn.checkpoints.stream import fit_stream

CONDITION = 10.0
DISGUISE, SIBLINGS, STRANGER = "disguise alone", "two fine-tunes", "stranger"
RELATIONS = (DISGUISE, *DERIVED, SIBLINGS, REPLACED, PATCHED, "embeddings only", STRANGER)
RELATED = (*DERIVED, SIBLINGS)
"""What counts as derived; a disguise alone would only flatter the numbers."""


@dataclass(frozen=True)
class Task:
    """One pair to compare: folders, what is known of it, and which block was replaced."""

    relation: str
    kind: str
    first: Path
    second: Path
    replaced: int | None = None


@dataclass(frozen=True)
class Result:
    """What was found for a pair.

    Attributes:
        relation: the truth.
        kind: of both models.
        score: of `relate`. verdict: likewise. related: the blocks its verdict rests on.
        blocks: the score of each block.
        best: the highest entry of the matrix of all blocks against all.
        token: how the token embeddings agree in the basis that is best for them.
        replaced: the block that was replaced, if one was.
        baselines: simpler measures by name.
    """

    relation: str
    kind: str
    first: str
    second: str
    score: float
    verdict: str
    related: tuple[str, ...]
    blocks: tuple[float, ...]
    best: float
    token: float
    replaced: int | None
    baselines: dict[str, float]

    @property
    def found_replaced(self) -> bool:
        """Whether the verdict names exactly the blocks that were kept."""
        kept = [str(i) for i in range(len(self.blocks)) if i != self.replaced]
        return self.verdict == "partly" and sorted(self.related) == kept


def tasks(root: Path, families: list[Member]) -> Iterator[Task]:
    """All pairs of the benchmark, families of one kind among each other."""
    for family in families:
        make_relatives(root, family)
    for family in families:
        others = [f for f in families if f.kind == family.kind and f != family]
        base = folder_of(root, family, "base")
        own = {DISGUISE: "base", **{r: r for r in (*DERIVED, "embeddings only")}}
        for relation, name in own.items():
            yield Task(relation, family.kind, base, folder_of(root, family, name))
        tuned, sibling = (folder_of(root, family, r) for r in TRAINED[1:3])
        yield Task(SIBLINGS, family.kind, tuned, sibling)
        patched = folder_of(root, family, PATCHED)
        yield Task(PATCHED, family.kind, base, patched, patched_block(family))
        for name, i in replacements(root, family, others):
            yield Task(REPLACED, family.kind, base, folder_of(root, family, name), i)
        for other in others:
            for name in TRAINED:
                yield Task(STRANGER, family.kind, base, folder_of(root, other, name))


def disguised(root: Path, folder: Path) -> Path:
    """The folder's model after every symmetry it has, drawn once and kept."""
    place = folder.relative_to(root)
    out = root / "disguised" / place
    if not complete(out):
        generator = torch.Generator().manual_seed(zlib.crc32(place.as_posix().encode()))
        out.mkdir(parents=True, exist_ok=True)
        with open_model(folder) as model:
            disguise(model, out, generator, condition=CONDITION)
    return out


def compare(root: Path, task: Task) -> Result:
    """A pair's scores."""
    with open_model(task.first) as A, open_model(disguised(root, task.second)) as B:
        found = relate(A, B)
        stream = fit_stream(Reduced(A), Reduced(B), only=("token",))
        baselines = {name: measure(A, B) for name, measure in BASELINES.items()}
    assert found.score is not None
    assert found.matrix is not None
    return Result(
        task.relation,
        task.kind,
        task.first.relative_to(root).as_posix(),
        task.second.relative_to(root).as_posix(),
        found.score,
        found.verdict,
        found.related,
        tuple(block_score(parts) for parts in found.blocks.values()),
        float(found.matrix.max()),
        stream.agreement["token"].score,
        task.replaced,
        baselines,
    )
