"""What a transformer is: a space, the function its weights compute, and their names in files."""

from transformer_nfn.architectures.architecture import Architecture, Forward, Stage
from transformer_nfn.architectures.freedoms import Rescaling, with_freedoms
from transformer_nfn.architectures.inputs import Ids, Inputs, Vectors
from transformer_nfn.architectures.known import (
    KNOWN,
    architecture_of,
    find_architecture,
    runnable,
    stage_weights,
)
from transformer_nfn.architectures.naming import Naming
from transformer_nfn.architectures.zoo_network import small_transformer

__all__ = [
    "KNOWN",
    "Architecture",
    "Forward",
    "Ids",
    "Inputs",
    "Naming",
    "Rescaling",
    "Stage",
    "Vectors",
    "architecture_of",
    "find_architecture",
    "runnable",
    "small_transformer",
    "stage_weights",
    "with_freedoms",
]
