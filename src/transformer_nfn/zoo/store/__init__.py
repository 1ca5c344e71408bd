"""Zoos on disk: folder, index, shards, and zoos as datasets."""

from transformer_nfn.zoo.store.folder import FORMAT, Folder, check_fresh, check_outside_zoos
from transformer_nfn.zoo.store.shards import read_header, write_shard
from transformer_nfn.zoo.store.zoo import MixedZoo, Zoo, open_zoo

__all__ = [
    "FORMAT",
    "Folder",
    "MixedZoo",
    "Zoo",
    "check_fresh",
    "check_outside_zoos",
    "open_zoo",
    "read_header",
    "write_shard",
]
