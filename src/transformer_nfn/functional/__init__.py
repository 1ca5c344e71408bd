"""Reference forwards, and architectures: a weight space with the function of its weights."""

from transformer_nfn.functional.architecture import (
    Architecture,
    Forward,
    Ids,
    Inputs,
    Rescaling,
    Stage,
    Vectors,
    with_freedoms,
)
from transformer_nfn.functional.blocks import (
    block,
    gated_mlp,
    layer_norm,
    mlp,
    multi_head,
    residual_stack,
    rms_norm,
    sinusoids,
)
from transformer_nfn.functional.registry import (
    ARCHITECTURES,
    architecture_of,
    find_architecture,
    runnable,
)
from transformer_nfn.functional.zoo_network import small_transformer, zoo_logits
from transformer_nfn.io.layout import Naming

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Forward",
    "Ids",
    "Inputs",
    "Naming",
    "Rescaling",
    "Stage",
    "Vectors",
    "architecture_of",
    "block",
    "find_architecture",
    "gated_mlp",
    "layer_norm",
    "mlp",
    "multi_head",
    "residual_stack",
    "rms_norm",
    "runnable",
    "sinusoids",
    "small_transformer",
    "with_freedoms",
    "zoo_logits",
]
