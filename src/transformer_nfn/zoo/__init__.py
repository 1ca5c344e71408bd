"""The Small Transformer Zoo: tasks, networks, the many-at-once trainer, the store."""

from transformer_nfn.zoo.errors import DataError, ImportFileError, StoreError, ZooError
from transformer_nfn.zoo.module import SmallTransformer
from transformer_nfn.zoo.sizes import Kind, NetworkSizes, all_kinds
from transformer_nfn.zoo.store import MixedZoo, Zoo, open_zoo
from transformer_nfn.zoo.training.build import build, build_mixed
from transformer_nfn.zoo.training.grid import Config, grid, sample
from transformer_nfn.zoo.training.plan import Settings
from transformer_nfn.zoo.training.tasks import TASKS, load_task
from transformer_nfn.zoo.training.trainer import Recipe, train

__all__ = [
    "TASKS",
    "Config",
    "DataError",
    "ImportFileError",
    "Kind",
    "MixedZoo",
    "NetworkSizes",
    "Recipe",
    "Settings",
    "SmallTransformer",
    "StoreError",
    "Zoo",
    "ZooError",
    "all_kinds",
    "build",
    "build_mixed",
    "grid",
    "load_task",
    "open_zoo",
    "sample",
    "train",
]
