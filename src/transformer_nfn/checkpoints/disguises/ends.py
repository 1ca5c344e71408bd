"""Which symmetries have the two ends of a network? Embeddings on one side, last norm and heads.

Vocabularies are long, so each row draws once and then acts on any range of their entries: a move
takes the tensors with ``token``, ``head`` and ``head_bias`` cut to a range, and that range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.checkpoints.disguises import norms
from transformer_nfn.checkpoints.disguises.rows import new_gains, noise, reader_shifts
from transformer_nfn.functional.description import EXTRA, Transformer
from transformer_nfn.spaces.actions import Drawing

Weights = dict[str, Tensor]
EndMove = Callable[[Mapping[str, Tensor], slice], Weights]
MLM = norms.Reading("extra.mlm_norm", ("head",))
EMBEDDINGS = ("token", "position", "type", "patch", "patch_bias", "cls", "dist")


@dataclass(frozen=True)
class EndRow:
    """A row with its element drawn: what it is called, and what it does."""

    name: str
    act: EndMove


def last_reading(about: Transformer) -> norms.Reading | None:
    """The last norm and what reads it; None where its output is the network's."""
    if about.headless:
        return None
    extras = tuple(name for name in about.tensors if name.startswith(EXTRA) and name.endswith(".W"))
    return norms.Reading("norm", extras if about.mlm is not None else ("head", *extras))


def end_rows(about: Transformer, weights: Mapping[str, Tensor], how: Drawing) -> Iterator[EndRow]:
    """Every row that holds at the ends, drawn.

    Args:
        about: the network, untied if it shall be written so.
        weights: its ends, named as `sites.end_names` does; an output matrix that is tied stands
            under ``head`` too.
        how: to draw.
    """
    last = last_reading(about)
    if last is not None and "norm.g" in weights:
        yield from _reading_rows(about, weights, last, how, tied=about.tied and about.mlm is None)
    if about.mlm is not None and "head" in weights:
        if not about.tied:
            yield _permuted_transform(weights, how)
        yield from _reading_rows(about, weights, MLM, how, tied=about.tied)
    if about.hides_mean_of_embeddings:
        yield _centred_embeddings(about, weights, how)
    yield from _moved_vectors(about, weights, how)


def _reading_rows(
    about: Transformer,
    weights: Mapping[str, Tensor],
    reading: norms.Reading,
    how: Drawing,
    *,
    tied: bool,
) -> Iterator[EndRow]:
    own = dict(weights)
    if not tied:
        gain = new_gains(own[f"{reading.norm}.g"], how)
        own[f"{reading.norm}.g"] = gain.to(own[f"{reading.norm}.g"])
        yield EndRow("norm gains into readers", lambda w, _: norms.replace_gain(w, reading, gain))
    if reading.biased(own):
        shift = noise((len(own[f"{reading.norm}.g"]),), own[f"{reading.norm}.g"], how, 0.1)
        yield EndRow(
            "norm biases into readers' biases", lambda w, _: norms.shift_bias(w, reading, shift)
        )
    if tied:
        return
    shifts = reader_shifts(about, own, reading, how)
    if shifts:

        def shift_range(w: Mapping[str, Tensor], rows: slice) -> Weights:
            cut = {k: v[rows] if k == "head" else v for k, v in shifts.items()}
            return norms.shift_readers(w, reading, cut)

        yield EndRow("readers + γ⁻¹vᵀ", shift_range)


def _permuted_transform(weights: Mapping[str, Tensor], how: Drawing) -> EndRow:
    order = torch.randperm(len(weights["extra.mlm.b"]), generator=how.generator)

    def act(w: Mapping[str, Tensor], _: slice) -> Weights:
        vectors = ("extra.mlm.b", "extra.mlm_norm.g", "extra.mlm_norm.b")
        out = {name: w[name][order] for name in vectors}
        return out | {"extra.mlm.W": w["extra.mlm.W"][:, order], "head": w["head"][order]}

    return EndRow("neurons permuted", act)


def _centred_embeddings(about: Transformer, weights: Mapping[str, Tensor], how: Drawing) -> EndRow:
    names = [n for n in EMBEDDINGS if n in weights and not (n == "token" and about.tied)]
    shifts = {n: noise(tuple(weights[n].shape[:-1]), weights[n], how) for n in names}

    def act(w: Mapping[str, Tensor], rows: slice) -> Weights:
        cut = {n: u[rows] if n == "token" else u for n, u in shifts.items()}
        return norms.shift_writers(w, cut)

    return EndRow("writers + u1ᵀ", act)


def _moved_vectors(
    about: Transformer, weights: Mapping[str, Tensor], how: Drawing
) -> Iterator[EndRow]:
    if "position" not in weights:
        return
    vectors = noise((2, about.width), weights["position"], how)
    if about.inputs == "patches":
        yield EndRow("vectors between embeddings", lambda w, _: move_patches(w, vectors))
        return
    sources = [n for n in ("token", "type") if n in weights and not (n == "token" and about.tied)]
    if sources:
        chosen = dict(zip(sources, vectors, strict=False))
        yield EndRow("vectors between embeddings", lambda w, _: move_to_positions(w, chosen))


def move_to_positions(weights: Mapping[str, Tensor], vectors: Mapping[str, Tensor]) -> Weights:
    """A vector ``[D]`` from all rows of other embeddings to all rows of ``position``."""
    out = {name: weights[name] - v.to(weights[name]) for name, v in vectors.items()}
    total = torch.stack(list(vectors.values())).sum(0)
    return out | {"position": weights["position"] + total.to(weights["position"])}


def move_patches(weights: Mapping[str, Tensor], vectors: Tensor) -> Weights:
    """[CLS] (and the distillation token) and the patches' bias against their positions.

    Args:
        weights: of the ends.
        vectors: ``[2, D]``, for the first tokens and for patches.
    """
    vectors = vectors.to(weights["position"])
    first = [name for name in ("cls", "dist") if name in weights]
    position = weights["position"].clone()
    position[: len(first)] += vectors[0]
    position[len(first) :] += vectors[1]
    out = {name: weights[name] - vectors[0] for name in first}
    if "patch_bias" not in weights:
        position[len(first) :] -= vectors[1]
        return out | {"position": position}
    return out | {"position": position, "patch_bias": weights["patch_bias"] - vectors[1]}
