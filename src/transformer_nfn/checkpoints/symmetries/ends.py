"""Symmetries of embeddings that are added up: vectors moved from one to another."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from transformer_nfn.checkpoints.symmetries.base import (
    Additive,
    Noise,
    Site,
    Tensors,
    Weights,
    chosen,
    end_names,
    noise,
)
from transformer_nfn.functional.description import POSITIONS, Transformer
from transformer_nfn.spaces.actions import Drawing, Size


class EmbeddingShift(Additive[Weights]):
    """A vector from all rows of an embedding to the rows of the positions it is added to.

    An element has a vector ``[D]`` for each of ``token`` and ``type``; for images one for
    ``cls`` (and the distillation token, ``dist``) and one for ``patch_bias``.

    Example:
        >>> site = Site(Transformer("mine", 2, "rms", 1e-6, ()), {}, False)
        >>> weights = {"position": torch.zeros(1, 2), "type": torch.ones(2, 2)}
        >>> EmbeddingShift().act(site, weights, {"type": torch.tensor([1.0, 3.0])})["position"]
        tensor([[1., 3.]])
    """

    name = "vectors between embeddings"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Networks with learned positions beside something that is always added to them."""
        names = end_names(model)
        images = model.inputs == "patches"
        others = ("cls", "dist", "patch_bias") if images else ("token", "type")
        added = chosen(names, [n for n in others if not (n == "token" and model.tied)])
        positions = chosen(names, model.positions)
        if positions and added:
            yield Site(model, positions | added, images)

    def _sources(self, site: Site) -> tuple[str, ...]:
        return tuple(n for n in ("token", "type", "cls", "patch_bias") if n in site.names)

    def _scale(self, site: Site, name: str) -> float:
        """What the network multiplies an embedding by before it is added."""
        return site.model.embedding_scale if name == "token" else 1.0

    def size(self, site: Site) -> Size:
        """One vector for each source."""
        return Size(site.model.width * len(self._sources(site)))

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Weights:
        """Vectors of the size of the positions."""
        position = next(weights[n] for n in POSITIONS if n in weights)
        vectors = noise((2, site.model.width), position, how)
        sources = self._sources(site)
        if site.detail:  # the first tokens, then patches, whichever there are
            return {n: vectors[int(n == "patch_bias")] for n in sources}
        return dict(zip(sources, vectors, strict=False))

    def act(self, site: Site, weights: Tensors, g: Weights) -> Weights:
        """Takes each vector from its source and adds it to all positions."""
        positions = {n: weights[n].clone() for n in POSITIONS if n in weights}
        out: Weights = {}
        first = [n for n in ("cls", "dist") if n in weights]
        for name, vector in g.items():
            cut = slice(len(first)) if name == "cls" else slice(len(first), None)
            for position in positions.values():
                position[cut] += vector.to(position)
            for n in first if name == "cls" else [name]:
                out[n] = weights[n] - vector.to(weights[n]) / self._scale(site, n)
        return out | positions

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Weights:
        """Least squares on all embeddings; of long ones, means over their rows."""
        pairs = {name: [w[name].double() for w in (a, b)] for name in site.names}
        if site.detail:
            return self._fit_images({name: x - y for name, (x, y) in pairs.items()})
        scales = {name: self._scale(site, name) for name in pairs}
        apart = {name: (x.mean(0) - y.mean(0)) * scales[name] for name, (x, y) in pairs.items()}
        rows = {name: site.shape(name)[0] / scales[name] ** 2 for name in apart}
        sources = self._sources(site)
        count = sum(n for name, n in rows.items() if name not in sources)
        moved = sum(rows[name] * x for name, x in apart.items() if name not in sources) / count
        left = sum((apart[name] for name in sources), moved)
        left = left / (1 / count + sum(1 / rows[name] for name in sources))
        return {name: apart[name] - left / rows[name] for name in sources}

    def _fit_images(self, apart: Weights) -> Weights:
        first = [apart[n].flatten() for n in ("cls", "dist") if n in apart]
        start, rest = apart["position"][: len(first)], apart["position"][len(first) :]
        out = {}
        if first:
            out["cls"] = (torch.stack(first) - start).sum(0) / (2 * len(first))
        if "patch_bias" in apart:
            out["patch_bias"] = (apart["patch_bias"] - rest.sum(0)) / (1 + len(rest))
        return out
