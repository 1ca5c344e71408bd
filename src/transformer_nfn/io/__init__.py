"""Bytes in and out: checkpoints, whole-file writes, the cache, downloads, assets, hubs."""

from transformer_nfn.errors import AssetError, CheckpointError, DownloadError, WriteError
from transformer_nfn.io.checkpoint import Checkpoint
from transformer_nfn.io.files import atomic_file, write_bytes, write_text
from transformer_nfn.io.location import Location
from transformer_nfn.io.tensor_files import TensorInfo, TensorSource

__all__ = [
    "AssetError",
    "Checkpoint",
    "CheckpointError",
    "DownloadError",
    "Location",
    "TensorInfo",
    "TensorSource",
    "WriteError",
    "atomic_file",
    "write_bytes",
    "write_text",
]
