"""Bytes in and out: checkpoints, whole-file writes, the cache, downloads, named assets."""

from transformer_nfn.io.checkpoint import Checkpoint
from transformer_nfn.io.errors import AssetError, CheckpointError, DownloadError, WriteError
from transformer_nfn.io.network import read_network, save_network
from transformer_nfn.io.source import TensorInfo, TensorSource
from transformer_nfn.io.whole import whole_file, write_bytes, write_text

__all__ = [
    "AssetError",
    "Checkpoint",
    "CheckpointError",
    "DownloadError",
    "TensorInfo",
    "TensorSource",
    "WriteError",
    "read_network",
    "save_network",
    "whole_file",
    "write_bytes",
    "write_text",
]
