"""The Small Transformer Zoo: tasks, networks, the many-at-once trainer, the store."""

from transformer_nfn.zoo.errors import DataError, ImportFileError, StoreError, ZooError
from transformer_nfn.zoo.module import SmallTransformer
from transformer_nfn.zoo.network import forward
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.store import Zoo
from transformer_nfn.zoo.training.build import build
from transformer_nfn.zoo.training.grid import Config, grid, sample
from transformer_nfn.zoo.training.plan import Settings
from transformer_nfn.zoo.training.tasks import TASKS, load_task
from transformer_nfn.zoo.training.trainer import Recipe, train

__all__ = [
    "TASKS",
    "Config",
    "DataError",
    "ImportFileError",
    "NetworkSizes",
    "Recipe",
    "Settings",
    "SmallTransformer",
    "StoreError",
    "Zoo",
    "ZooError",
    "build",
    "forward",
    "grid",
    "load_task",
    "sample",
    "train",
]
