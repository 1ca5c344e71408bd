"""Load a task by its name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformer_nfn.errors import DownloadError
from transformer_nfn.known_tasks import KNOWN_TASKS, TASKS
from transformer_nfn.zoo.errors import DataError
from transformer_nfn.zoo.sizes import PAPER, SizeGroup
from transformer_nfn.zoo.store.folder import WordVectors
from transformer_nfn.zoo.training.tasks.images import digits, idx_images
from transformer_nfn.zoo.training.tasks.task import Task
from transformer_nfn.zoo.training.tasks.text import ag_news


def check_sources(name: str, data: object, vectors: object) -> None:
    """Reject a folder of data, or word vectors, that a task does not read."""
    if data is not None and name == "digits":
        raise DataError("data is for other tasks: the digits come with scikit-learn")
    if vectors is not None and name in TASKS and KNOWN_TASKS[name].patch:
        raise DataError(f"vectors are for tasks of text: {name} are images")


def load_task(
    name: str,
    data: Path | str | None = None,
    *,
    held: float | None = None,
    samples: int | None = None,
    vectors: Path | WordVectors | None = None,
    group: SizeGroup = PAPER,
) -> Task:
    """Load a task with its data into memory.

    Args:
        name: one of `TASKS`.
        data: the folder of its files; None fetches them into the user's cache.
        held: the share of the training data to hold out; None for the task's default.
        samples: maximum number of samples to train on.
        vectors: for text, a word2vec file or word vectors; None trains them.
        group: width, heads and depth of the networks trained on it.

    >>> task = load_task("digits", samples=100)
    >>> task.num_samples
    {'train': 100, 'held': 70, 'test': 400}
    """
    check_sources(name, data, vectors)
    folder = Path(data) if data is not None else None
    try:
        if name == "ag_news":
            return ag_news(folder, held, samples, vectors, group)
        if name == "digits":
            images = digits(held, samples)
        elif name in ("mnist", "fashion_mnist"):
            images = idx_images(name, folder, held, samples)
        else:
            raise DataError(f"unknown task '{name}': expected one of {', '.join(TASKS)}")
    except DownloadError as error:
        raise DataError(str(error)) from error
    return replace(images, sizes=images.sizes.resized(group))
