"""How large are the networks of the paper's zoos? What the presets of the models read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from transformer_nfn.errors import SpaceError
from transformer_nfn.known_tasks import HEADS, HIDDEN, KNOWN_TASKS, PAPER_TASKS, WIDTH
from transformer_nfn.spaces import WeightSpace, attention_block


@dataclass(frozen=True)
class PaperSizes:
    """Numbers for each network of one task.

    Attributes:
        embedding: all of it; None for text, which has none.
        classifier: of ``W_1``, ``W_2``, ``b_1``, ``b_2``.
    """

    embedding: int | None
    classifier: tuple[int, ...]


def paper_sizes(task: str) -> PaperSizes:
    """Sizes of embedding and classifier of one of the paper's zoos."""
    if task not in PAPER_TASKS:
        raise SpaceError(f"task must be one of {', '.join(PAPER_TASKS)}, found {task!r}")
    known = KNOWN_TASKS[task]
    embedding = sum(math.prod(shape) for shape in known.embedding_shapes.values())
    classifier = tuple(math.prod(shape) for shape in known.classifier_shapes.values())
    return PaperSizes(embedding or None, classifier)


def paper_block() -> WeightSpace:
    """The block of the paper's zoos: D = 32, two heads of 16, 64 neurons."""
    return attention_block(WIDTH, HEADS, WIDTH // HEADS, WIDTH // HEADS, HIDDEN)
