"""Symmetries of embeddings that are added up: vectors moved from one to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from transformer_nfn.checkpoints.symmetries.base import (
    Site,
    Symmetry,
    Weights,
    chosen,
    ends_part,
    noise,
)
from transformer_nfn.functional.description import Transformer
from transformer_nfn.spaces.actions import Drawing, Size


class EmbeddingShift(Symmetry[Weights]):
    """A vector from all rows of an embedding to the rows of ``position`` it is added to.

    An element has a vector ``[D]`` for each of ``token`` and ``type``; for images one for
    ``cls`` (and the distillation token, ``dist``) and one for ``patch_bias``.
    """

    name = "vectors between embeddings"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Networks with learned positions beside something that is always added to them."""
        names = ends_part(model).names
        images = model.inputs == "patches"
        others = ("cls", "dist", "patch_bias") if images else ("token", "type")
        found = chosen(names, [n for n in others if not (n == "token" and model.tied)])
        if "position" in names and found:
            yield Site(model, {"position": names["position"], **found}, images)

    def _sources(self, site: Site) -> tuple[str, ...]:
        return tuple(n for n in ("token", "type", "cls", "patch_bias") if n in site.names)

    def size(self, site: Site) -> Size:
        """One vector for each source."""
        return Size(site.model.width * len(self._sources(site)))

    def draw(self, site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
        """Vectors of the size of ``position``."""
        vectors = noise((2, site.model.width), weights["position"], how)
        sources = self._sources(site)
        if site.detail:  # the first tokens, then patches, whichever there are
            return {n: vectors[int(n == "patch_bias")] for n in sources}
        return dict(zip(sources, vectors, strict=False))

    def act(self, site: Site, weights: Mapping[str, Tensor], g: Weights) -> Weights:
        """Takes each vector from its source and adds it to ``position``."""
        position = weights["position"].clone()
        out: Weights = {}
        first = [n for n in ("cls", "dist") if n in weights]
        for name, vector in g.items():
            vector = vector.to(position)
            if name == "cls":
                position[: len(first)] += vector
                out |= {n: weights[n] - vector for n in first}
            else:
                position[len(first) if site.detail else 0 :] += vector
                out[name] = weights[name] - vector.to(weights[name])
        return out | {"position": position}
