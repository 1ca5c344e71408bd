"""What does a broken network look like? The kinds of damage, each on the weights of one network."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from transformer_nfn.spaces import Weights
from transformer_nfn.zoo.damage_record import STRENGTHS
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.training.grid import Config
from transformer_nfn.zoo.training.trainer import initial_weights


@dataclass(frozen=True)
class Patient:
    """A network to be damaged, and what that takes.

    Attributes:
        arch: its sizes.
        weights: the tensors of its space, ``[*axes]`` each.
        init_std: of its run's initial weights; NaN where nobody knows.
        name: how errors call it.
        donor: another network, for what is exchanged.
    """

    arch: NetworkSizes
    weights: Mapping[str, Tensor]
    init_std: float
    name: str
    donor: Mapping[str, Tensor] | None = None


Change = Callable[[Patient, float, torch.Generator], tuple[Weights, str]]
"""The damaged weights, and the tensor or block that was touched (nothing for all)."""


def damage(
    patient: Patient, kind: str, strength: float, generator: torch.Generator
) -> tuple[Weights, str]:
    """The network with one kind of damage; what it was is left alone.

    - ``shuffled``: of every tensor a share of the entries, drawn at random, change places.
    - ``tensor``: one matrix is initialised anew, with the std of the run.
    - ``block``: one block is, its biases to zero.
    - ``exchanged``: one block comes from the donor.
    - ``untrained``: everything is initialised anew.
    - ``noise``: normal noise, of so many times the std of each matrix's entries.
    - ``pruned``: of each matrix the share with the smallest entries becomes zero.
    - ``quantised``: each matrix is rounded to so many bits, evenly up to its largest entry.
    """
    return KINDS[kind](patient, strength, generator)


def damage_generator(*identity: object) -> torch.Generator:
    """Randomness that its identity alone decides: the same network whoever else is damaged."""
    text = " ".join(map(str, identity)).encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
    return torch.Generator().manual_seed(seed)


def _shuffled(patient: Patient, strength: float, generator: torch.Generator) -> tuple[Weights, str]:
    out = {}
    for name, w in patient.weights.items():
        flat = w.flatten().clone()
        chosen = torch.randperm(len(flat), generator=generator)[: round(strength * len(flat))]
        flat[chosen] = flat[chosen[torch.randperm(len(chosen), generator=generator)]]
        out[name] = flat.view_as(w)
    return out, ""


def _tensor(patient: Patient, _: float, generator: torch.Generator) -> tuple[Weights, str]:
    matrices = [name for name in patient.weights if is_matrix(name)]
    name = matrices[int(torch.randint(len(matrices), (), generator=generator))]
    return {**patient.weights, name: _fresh(patient, generator)[name]}, name


def _block(patient: Patient, _: float, generator: torch.Generator) -> tuple[Weights, str]:
    part = _any_block(patient, generator)
    return _with_part(patient, _fresh(patient, generator), part), part


def _exchanged(patient: Patient, _: float, generator: torch.Generator) -> tuple[Weights, str]:
    assert patient.donor is not None
    part = _any_block(patient, generator)
    return _with_part(patient, patient.donor, part), part


def _untrained(patient: Patient, _: float, generator: torch.Generator) -> tuple[Weights, str]:
    return _fresh(patient, generator), ""


def _noise(patient: Patient, strength: float, generator: torch.Generator) -> tuple[Weights, str]:
    def noisy(w: Tensor) -> Tensor:
        draw = torch.randn(w.shape, generator=generator)
        return w + strength * w.std(correction=0) * draw

    return _matrices(patient, noisy), ""


def _pruned(patient: Patient, strength: float, _: torch.Generator) -> tuple[Weights, str]:
    def pruned(w: Tensor) -> Tensor:
        gone = w.flatten().abs().argsort()[: round(strength * w.numel())]
        return w.flatten().index_fill(0, gone, 0.0).view_as(w)

    return _matrices(patient, pruned), ""


def _quantised(patient: Patient, strength: float, _: torch.Generator) -> tuple[Weights, str]:
    steps = 2 ** (int(strength) - 1) - 1

    def quantised(w: Tensor) -> Tensor:
        unit = w.abs().max().clamp(min=1e-30) / steps
        rounded: Tensor = (w / unit).round() * unit
        return rounded

    return _matrices(patient, quantised), ""


KINDS: Mapping[str, Change] = {
    "shuffled": _shuffled,
    "tensor": _tensor,
    "block": _block,
    "exchanged": _exchanged,
    "untrained": _untrained,
    "noise": _noise,
    "pruned": _pruned,
    "quantised": _quantised,
}
assert list(KINDS) == list(STRENGTHS)


def is_matrix(name: str) -> bool:
    """Whether a tensor of a network is no bias."""
    return name.rpartition(".")[2].startswith("W")


def _matrices(patient: Patient, change: Callable[[Tensor], Tensor]) -> Weights:
    return {n: change(w) if is_matrix(n) else w for n, w in patient.weights.items()}


def _any_block(patient: Patient, generator: torch.Generator) -> str:
    return f"blocks.{int(torch.randint(patient.arch.blocks, (), generator=generator))}"


def _with_part(patient: Patient, other: Mapping[str, Tensor], part: str) -> Weights:
    return {n: other[n] if n.startswith(f"{part}.") else w for n, w in patient.weights.items()}


def _fresh(patient: Patient, generator: torch.Generator) -> Weights:
    """Initial weights as the run's were drawn, from another seed."""
    if not patient.init_std > 0:
        raise ZooError(
            f"{patient.name}: its run's init_std is not known, so it has no initial weights to "
            "draw again; leave out tensor, block and untrained"
        )
    seed = int(torch.randint(2**62, (), generator=generator))
    flat = initial_weights(patient.arch, replace(_ANY_RUN, init_std=patient.init_std, seed=seed))
    return {name: w[0] for name, w in patient.arch.to_named(flat[None]).items()}


_ANY_RUN = Config("", "sgd", 0.0, 0.0, 0.0, 0.0, 1.0, 0)
