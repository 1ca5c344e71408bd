"""The command ``tnfn``: thin commands over the library."""

from transformer_nfn.cli.app import main

__all__ = ["main"]
