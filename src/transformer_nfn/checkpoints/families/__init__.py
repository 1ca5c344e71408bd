"""Families of transformer checkpoints, one data file each."""

from transformer_nfn.checkpoints.families.binding import UnstatedFactError
from transformer_nfn.checkpoints.families.family import Family, families, read_family
from transformer_nfn.checkpoints.families.model import Model, open_files, open_model, read_model
from transformer_nfn.checkpoints.families.recognise import OpenOptions, UnknownFamilyError
from transformer_nfn.checkpoints.families.writer import write_model

__all__ = [
    "Family",
    "Model",
    "OpenOptions",
    "UnknownFamilyError",
    "UnstatedFactError",
    "families",
    "open_files",
    "open_model",
    "read_family",
    "read_model",
    "write_model",
]
