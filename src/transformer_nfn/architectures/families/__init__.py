"""Which transformers of others can be read? Families of checkpoints, one data file each."""

from transformer_nfn.architectures.families.description import (
    Attention,
    Block,
    Mlp,
    RotaryScaling,
    Stack,
    Transformer,
)
from transformer_nfn.architectures.families.family import Family
from transformer_nfn.architectures.families.model import Model, open_model
from transformer_nfn.architectures.families.recognise import (
    UnknownFamilyError,
    families,
    read_family,
)
from transformer_nfn.architectures.families.writer import write_model

__all__ = [
    "Attention",
    "Block",
    "Family",
    "Mlp",
    "Model",
    "RotaryScaling",
    "Stack",
    "Transformer",
    "UnknownFamilyError",
    "families",
    "open_model",
    "read_family",
    "write_model",
]
