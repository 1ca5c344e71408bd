"""Families of transformer checkpoints, one data file each."""

from transformer_nfn.checkpoints.families.family import Family
from transformer_nfn.checkpoints.families.model import Model, open_model
from transformer_nfn.checkpoints.families.options import OpenOptions
from transformer_nfn.checkpoints.families.recognise import (
    UnknownFamilyError,
    families,
    read_family,
)
from transformer_nfn.checkpoints.families.unstated import UnstatedFactError
from transformer_nfn.checkpoints.families.writer import write_model
from transformer_nfn.functional.description import (
    Attention,
    Block,
    Mlp,
    RotaryScaling,
    Stack,
    Transformer,
)

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
