"""Symmetries of checkpoints, one class each: the list of all, and their sizes for one network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
from transformer_nfn.checkpoints.symmetries.experts import ExpertPermutation, RouterShift
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
from transformer_nfn.checkpoints.symmetries.stream import StreamBasis, StreamMap
from transformer_nfn.functional.description import Transformer
from transformer_nfn.spaces.actions import Size

__all__ = [
    "SYMMETRIES",
    "BranchConstant",
    "CentredReaders",
    "CentredWriters",
    "EmbeddingShift",
    "ExpertPermutation",
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
    "RouterShift",
    "Site",
    "StreamBasis",
    "StreamMap",
    "SublayerSigns",
    "Symmetry",
    "SymmetrySize",
    "ValueBias",
    "ValueOutputBasis",
    "added_sites",
    "symmetry_sizes",
]

SYMMETRIES: list[Symmetry[Any]] = [
    StreamBasis(),
    NormGain(),
    NormBias(),
    CentredReaders(),
    CentredWriters(),
    SublayerSigns(),
    HeadPermutation(),
    QueryKeyBasis(),
    QueryKeySigns(),
    QueryKeyGains(),
    QuarterTurns(),
    QueryKeyNormSigns(),
    ValueOutputBasis(),
    KeyBias(),
    ValueBias(),
    PositionBias(),
    RouterShift(),
    ExpertPermutation(),
    NeuronPermutation(),
    NeuronScale(),
    BranchConstant(),
    EmbeddingShift(),
]
"""Every symmetry, in the order in which a disguise applies them; append yours."""
BUILT_IN = tuple(SYMMETRIES)


def added_sites(model: Transformer) -> list[tuple[Symmetry[Any], Site]]:
    """Sites of the symmetries that were added to the list."""
    added = [symmetry for symmetry in SYMMETRIES if symmetry not in BUILT_IN]
    return [(symmetry, site) for symmetry in added for site in symmetry.sites(model)]


@dataclass(frozen=True)
class SymmetrySize:
    """Size of one symmetry of a network.

    Attributes:
        name: of the symmetry.
        times: number of sites.
        continuous: parameters at all of them together.
        finite: log10 of the number of permutations and signs of all of them together.
    """

    name: str
    times: int
    continuous: int
    finite: float


def symmetry_sizes(model: Transformer) -> tuple[SymmetrySize, ...]:
    """Size of every symmetry of a network as its file stands (a tied output matrix stays tied).

    Gains near zero, through which some of these cannot act, are a matter of the weights and not
    looked at here.

    Example:
        >>> from transformer_nfn.checkpoints import open_model
        >>> from transformer_nfn.testing import write_example_checkpoint
        >>> with open_model(write_example_checkpoint("llama")) as model:
        ...     rows = symmetry_sizes(model.description)
        >>> [(row.name, row.times, row.continuous) for row in rows[:2]]
        [('stream: orthogonal', 1, 28), ('norm gains into readers', 5, 40)]
    """
    sizes: dict[str, list[Size]] = {}
    for symmetry in SYMMETRIES:
        for site in symmetry.sites(model):
            sizes.setdefault(symmetry.label(site), []).append(symmetry.size(site))
    return tuple(
        SymmetrySize(name, len(each), (total := sum(each, Size(0))).continuous, total.finite)
        for name, each in sizes.items()
    )
