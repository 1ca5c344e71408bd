"""Symmetries of checkpoints: one class each, with its sites, size, random elements and action."""

from transformer_nfn.checkpoints.symmetries.attention import (
    HeadPermutation,
    KeyBias,
    PositionBias,
    QueryKeyBasis,
    ValueBias,
    ValueOutputBasis,
)
from transformer_nfn.checkpoints.symmetries.base import Part, Site, Symmetry
from transformer_nfn.checkpoints.symmetries.ends import EmbeddingShift
from transformer_nfn.checkpoints.symmetries.neurons import NeuronPermutation, NeuronScale
from transformer_nfn.checkpoints.symmetries.norms import (
    BranchConstant,
    CentredReaders,
    CentredWriters,
    NormBias,
    NormGain,
    SublayerSigns,
)
from transformer_nfn.checkpoints.symmetries.query_key_norm import (
    QuarterTurns,
    QueryKeyGains,
    QueryKeyNormSigns,
    QueryKeySigns,
)
from transformer_nfn.checkpoints.symmetries.registry import SYMMETRIES, SymmetrySize, symmetry_sizes
from transformer_nfn.checkpoints.symmetries.stream import StreamBasis, Turn

__all__ = [
    "SYMMETRIES",
    "BranchConstant",
    "CentredReaders",
    "CentredWriters",
    "EmbeddingShift",
    "HeadPermutation",
    "KeyBias",
    "NeuronPermutation",
    "NeuronScale",
    "NormBias",
    "NormGain",
    "Part",
    "PositionBias",
    "QuarterTurns",
    "QueryKeyBasis",
    "QueryKeyGains",
    "QueryKeyNormSigns",
    "QueryKeySigns",
    "Site",
    "StreamBasis",
    "SublayerSigns",
    "Symmetry",
    "SymmetrySize",
    "Turn",
    "ValueBias",
    "ValueOutputBasis",
    "symmetry_sizes",
]
