"""Software that reads the weights of transformers."""

from transformer_nfn import architectures, errors, functional, nn, spaces, symmetry

__all__ = ["architectures", "errors", "functional", "nn", "spaces", "symmetry"]
__version__ = "0.1.0"
