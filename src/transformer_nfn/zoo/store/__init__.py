"""Zoos on disk: folder, index, shards, and zoos as datasets."""

from transformer_nfn.zoo.store.folder import FORMAT, Folder, check_fresh, check_outside_zoos
from transformer_nfn.zoo.store.model_zoo import ModelZoo
from transformer_nfn.zoo.store.shards import read_header, write_shard
from transformer_nfn.zoo.store.zoo import MixedZoo, Zoo, open_task_zoo, open_zoo

__all__ = [
    "FORMAT",
    "Folder",
    "MixedZoo",
    "ModelZoo",
    "Zoo",
    "check_fresh",
    "check_outside_zoos",
    "open_task_zoo",
    "open_zoo",
    "read_header",
    "write_shard",
]
