"""Zoos on disk: folder, index, shards, and zoos as datasets."""

from transformer_nfn.zoo.store.folder import FORMAT, Folder, check_fresh, check_outside_zoos
from transformer_nfn.zoo.store.shards import read_header, write_shard
from transformer_nfn.zoo.store.zoo import Zoo

__all__ = [
    "FORMAT",
    "Folder",
    "Zoo",
    "check_fresh",
    "check_outside_zoos",
    "read_header",
    "write_shard",
]
