"""The Small Transformer Zoo: tasks, networks, the trainer of many networks, the store."""

from transformer_nfn.zoo.errors import DataError, ImportFileError, StoreError, ZooError
from transformer_nfn.zoo.export import export_zoo
from transformer_nfn.zoo.importing import import_networks
from transformer_nfn.zoo.module import SmallTransformer
from transformer_nfn.zoo.sizes import NetworkSizes, SizeGroup, size_groups
from transformer_nfn.zoo.store import Zoo
from transformer_nfn.zoo.training.build import build, build_mixed
from transformer_nfn.zoo.training.grid import Config, grid, sample
from transformer_nfn.zoo.training.plan import BuildOptions
from transformer_nfn.zoo.training.tasks import TASKS, load_task
from transformer_nfn.zoo.training.trainer import Recipe, train

__all__ = [
    "TASKS",
    "BuildOptions",
    "Config",
    "DataError",
    "ImportFileError",
    "NetworkSizes",
    "Recipe",
    "SizeGroup",
    "SmallTransformer",
    "StoreError",
    "Zoo",
    "ZooError",
    "build",
    "build_mixed",
    "export_zoo",
    "grid",
    "import_networks",
    "load_task",
    "sample",
    "size_groups",
    "train",
]
