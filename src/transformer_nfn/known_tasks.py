"""Tasks that small transformers are trained on: names, titles, sizes and kinds of seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# The paper's small transformer; word vectors of a text task are as wide as the network.
WIDTH, HEADS, HIDDEN, BLOCKS = 32, 2, 64, 2


@dataclass(frozen=True)
class KnownTask:
    """A task without its data.

    Attributes:
        name: as in commands and files.
        title: as in tables and figures.
        tokens: positions there are at most; images always fill them.
        classes: of the labels.
        patch_side: pixels along one side of a patch; 0 for text.
    """

    name: str
    title: str
    tokens: int
    classes: int
    patch_side: int

    @property
    def patch(self) -> int:
        """Pixels in a patch; 0 for text."""
        return self.patch_side**2


KNOWN_TASKS: Mapping[str, KnownTask] = {
    task.name: task
    for task in (
        KnownTask("digits", "Digits", tokens=16, classes=10, patch_side=2),
        KnownTask("mnist", "MNIST", tokens=49, classes=10, patch_side=4),
        KnownTask("fashion_mnist", "Fashion-MNIST", tokens=49, classes=10, patch_side=4),
        KnownTask("ag_news", "AG News", tokens=512, classes=4, patch_side=0),
    )
}
TASKS = tuple(KNOWN_TASKS)
"""Names of the tasks a zoo can be built on."""
PAPER_TASKS = ("mnist", "ag_news")
"""Those the paper made its two zoos on."""


def task_title(name: str) -> str:
    """Title of a task; the name itself for an unknown task."""
    return KNOWN_TASKS[name].title if name in KNOWN_TASKS else name


SEED_KINDS = {"one": "one seed for all", "each": "a seed each"}
"""How the networks of a zoo may get their random numbers."""
UNKNOWN_SEEDS = "unknown"


def seeds_text(kind: object) -> str:
    """Description of a kind of seeds; imported files do not state theirs."""
    return SEED_KINDS.get(str(kind), "seeds unknown")
