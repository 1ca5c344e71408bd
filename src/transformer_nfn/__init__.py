"""Software that reads the weights of transformers."""

from transformer_nfn import errors, spaces

__all__ = ["errors", "spaces"]
__version__ = "0.1.0"
