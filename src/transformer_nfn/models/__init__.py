"""Transformer-NFN, and what it reads."""

from transformer_nfn.models._network import Network
from transformer_nfn.models._transformer_nfn import BlockEncoder, TransformerNFN

__all__ = ["BlockEncoder", "Network", "TransformerNFN"]
