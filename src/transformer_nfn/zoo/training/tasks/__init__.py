"""The tasks a zoo can be built on."""

from transformer_nfn.known_tasks import TASKS
from transformer_nfn.zoo.store.folder import WordVectors
from transformer_nfn.zoo.training.tasks.images import ImageOptions, ImageTask, image_task
from transformer_nfn.zoo.training.tasks.load import load_task
from transformer_nfn.zoo.training.tasks.task import Batch, Split, Task
from transformer_nfn.zoo.training.tasks.text import TextTask

__all__ = [
    "TASKS",
    "Batch",
    "ImageOptions",
    "ImageTask",
    "Split",
    "Task",
    "TextTask",
    "WordVectors",
    "image_task",
    "load_task",
]
