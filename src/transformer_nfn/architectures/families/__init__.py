"""Families of transformer checkpoints, one data file each."""

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
from transformer_nfn.architectures.families.options import OpenOptions
from transformer_nfn.architectures.families.recognise import (
    UnknownFamilyError,
    families,
    read_family,
)
from transformer_nfn.architectures.families.unstated import UnstatedFactError
from transformer_nfn.architectures.families.writer import write_model

__all__ = [
    "Attention",
    "Block",
    "Family",
    "Mlp",
    "Model",
    "OpenOptions",
    "RotaryScaling",
    "Stack",
    "Transformer",
    "UnknownFamilyError",
    "UnstatedFactError",
    "families",
    "open_model",
    "read_family",
    "write_model",
]
