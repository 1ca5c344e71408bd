"""How is a checkpoint looked at? Block by block in its reduced form, and let go again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transformer_nfn.checkpoints.inspection import words
from transformer_nfn.checkpoints.inspection.repeats import Repeats, head_repeats, neuron_repeats
from transformer_nfn.checkpoints.inspection.spectra import matrix_spectrum, product_spectrum
from transformer_nfn.checkpoints.inspection.tensors import TensorLine, family_tensors, space_tensors
from transformer_nfn.checkpoints.reduced import Reduced, ReducedBlock
from transformer_nfn.checkpoints.symmetries import SymmetrySize, symmetry_sizes
from transformer_nfn.spaces import WeightSpace
from transformer_nfn.spaces.axis import under_prefix

if TYPE_CHECKING:
    from transformer_nfn.checkpoints.families import Model


@dataclass(frozen=True)
class BlockReport:
    """One block.

    Attributes:
        name: ``0``, ``encoder.3``.
        spectra: singular values: ``QK`` and ``VO`` per head ``[h, d]``, ``W_A``, ``W_B``, ``W_G``
            ``[n]``; with ``cross.`` before those of an attention to an encoder.
        heads: dead and duplicated heads, by the prefix of their attention.
        neurons: likewise; None where a block has no MLP.
    """

    name: str
    spectra: Mapping[str, Tensor]
    heads: Mapping[str, Repeats]
    neurons: Repeats | None


@dataclass(frozen=True)
class Inspection:
    """What there is to say of one network.

    Attributes:
        where: its file.
        family: ``gpt2``, or the name of a weight space of this library's.
        sizes: words and numbers: width, heads, neurons, vocabulary, dtype.
        tensors: a line per kind of tensor, and what acts on its axes.
        symmetries: size of every symmetry.
        ties: what stands for two things at once.
        blocks: one by one.
    """

    where: str
    family: str
    sizes: Mapping[str, Any]
    tensors: tuple[TensorLine, ...]
    symmetries: tuple[SymmetrySize, ...]
    ties: tuple[str, ...]
    blocks: tuple[BlockReport, ...]

    @property
    def continuous(self) -> int:
        """Continuous parameters of the group."""
        return sum(row.continuous for row in self.symmetries)

    @property
    def finite(self) -> float:
        """log10 of the number of its permutations and signs."""
        return sum(row.finite for row in self.symmetries)

    def as_json(self) -> dict[str, Any]:
        """Everything, as numbers and words."""
        return words.as_json(self)


def inspect(model: Model, progress: Callable[[str], None] | None = None) -> Inspection:
    """Inspect an open checkpoint of a known family; NaN in any of its tensors is refused.

    Args:
        model: see `transformer_nfn.checkpoints.families.open_model`.
        progress: told the name of each block that is done.
    """
    model.check_numbers()
    reduced = Reduced(model, torch.float32)
    blocks = []
    for name in reduced.blocks:
        blocks.append(_block(reduced.block(name)))
        if progress is not None:
            progress(name)
    about = model.about
    return Inspection(
        model.where,
        about.family,
        words.sizes(model),
        family_tensors(about),
        symmetry_sizes(about),
        ("the output matrix is the token embedding",) if about.tied else (),
        tuple(blocks),
    )


def _block(block: ReducedBlock) -> BlockReport:
    spectra: dict[str, Tensor] = {}
    heads: dict[str, Repeats] = {}
    for prefix, about in block.attentions():
        pieces = block.query_key(prefix, about)
        Q, K = pieces["W_Q"].value, pieces["W_K"].value
        if about.qk_norm:
            Q = Q * (pieces["q_norm.g"].value * pieces["k_norm.g"].value)
        V = block.reader(f"{prefix}W_V")[0].value
        out = block.writer(f"{prefix}W_O").value.mT
        found = attention_report(Q, K, V, out)
        spectra |= {f"{prefix}{name}": values for name, values in found[0].items()}
        heads[prefix] = found[1]
    W_A, b_A = block.reader("W_A")
    read = [W_A.value.mT]
    spectra["W_A"] = matrix_spectrum(W_A.value)
    if b_A is not None:
        read.append(b_A.value.unsqueeze(-1))
    gated = block.about.mlp.gated
    if gated:
        read = [block.reader("W_G")[0].value.mT]
        spectra["W_G"] = matrix_spectrum(read[0])
        unit = W_A.value / W_A.value.norm(dim=0).clamp_min(1e-30)
        read.append(unit.mT * read[0].norm(dim=1, keepdim=True))
    write = block.writer("W_B").value
    spectra["W_B"] = matrix_spectrum(write)
    relu = block.about.mlp.activation == "relu" and not gated
    neurons = neuron_repeats(torch.cat(read, 1), write, scale_free=relu)
    return BlockReport(block.name, spectra, heads, neurons)


def attention_report(
    Q: Tensor, K: Tensor, V: Tensor, O_rows: Tensor
) -> tuple[dict[str, Tensor], Repeats]:
    """Spectra and repeats of an attention, all ``[heads or groups, D, d]``, O transposed."""
    QK, OV = product_spectrum(Q, K), product_spectrum(O_rows, V)
    return {"QK": QK, "VO": OV}, head_repeats((Q, K), (O_rows, V), OV)


def inspect_network(where: str, space: WeightSpace, weights: Mapping[str, Tensor]) -> Inspection:
    """Looks at a network of this library's.

    Args:
        where: what it is called.
        space: its weight space.
        weights: ``[1, 1, *axes]``.
    """
    own = {name: w[0, 0].float() for name, w in weights.items()}
    blocks = tuple(_own_block(name, under_prefix(own, name)) for name in _own_blocks(own))
    return Inspection(
        where,
        space.name,
        {"weights": space.num_weights, "dtype": words.dtype_word(next(iter(weights.values())))},
        space_tensors(space),
        _space_symmetries(space),
        (),
        blocks,
    )


def _space_symmetries(space: WeightSpace) -> tuple[SymmetrySize, ...]:
    """Size of what acts on each axis of a weight space."""
    out = []
    for name, axis in space.axes.items():
        if axis.kind != "free":
            times = math.prod(space.axes[a].size for a in space.ancestors(name))
            word = "permuted" if axis.action.permutes else axis.kind
            size = times * axis.action.size(axis.size)
            out.append(SymmetrySize(f"{name}: {word}", times, size.continuous, size.finite))
    return tuple(out)


def _own_blocks(weights: Mapping[str, Tensor]) -> Iterator[str]:
    for name in weights:
        if name == "W_Q" or name.endswith(".W_Q"):
            yield name.removesuffix("W_Q")


def _own_block(name: str, own: Mapping[str, Tensor]) -> BlockReport:
    spectra: dict[str, Tensor] = {}
    heads: dict[str, Repeats] = {}
    neurons = None
    plain = all(n in own and own[n].ndim == 3 for n in ("W_Q", "W_K", "W_V", "W_O"))
    if plain:
        spectra, heads[""] = attention_report(own["W_Q"], own["W_K"], own["W_V"], own["W_O"].mT)
    if "W_A" in own and "W_B" in own:
        read = own["W_A"].mT
        if "b_A" in own:
            read = torch.cat([read, own["b_A"].unsqueeze(-1)], 1)
        spectra |= {n: matrix_spectrum(own[n]) for n in ("W_A", "W_B")}
        neurons = neuron_repeats(read, own["W_B"], scale_free=True)
    return BlockReport(name.rstrip(".") or "0", spectra, heads, neurons)
