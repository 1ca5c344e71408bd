"""Weights on disk: files in, files out, nothing unpickled."""

from transformer_nfn.checkpoints.network_file import load_network, save_network

__all__ = ["load_network", "save_network"]
