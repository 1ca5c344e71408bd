"""Bytes in and out: checkpoints, whole-file writes, the cache, downloads, named assets."""

from transformer_nfn.files.checkpoint import Checkpoint
from transformer_nfn.files.errors import AssetError, CheckpointError, DownloadError, WriteError
from transformer_nfn.files.network import read_network, save_network
from transformer_nfn.files.source import TensorInfo, TensorSource
from transformer_nfn.files.whole import whole_file, write_bytes, write_text

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
