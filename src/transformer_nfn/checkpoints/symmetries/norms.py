"""Symmetries of norms: gains and biases against their readers, and what centring discards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from transformer_nfn.checkpoints.symmetries.base import (
    TINY,
    Additive,
    Noise,
    Part,
    Site,
    Symmetry,
    Tensors,
    Weights,
    block_parts,
    chosen,
    end_names,
    noise,
    random_scales,
    random_signs,
)
from transformer_nfn.functional.description import EXTRA, POSITIONS, Transformer
from transformer_nfn.spaces.actions import Drawing, Size
from transformer_nfn.spaces.actions.base import LOG10_2
from transformer_nfn.spaces.actions.solvers import nearest_scales_from_products, signs

NOTHING = 1e-6
"""Gains smaller than this, relative to the largest, count as zero."""
EMBEDDINGS = ("token", *POSITIONS, "type", "patch", "patch_bias", "cls", "dist")


@dataclass(frozen=True)
class Readers:
    """Readers of a norm.

    Attributes:
        matrices: that read it, ``W_Q``.
        residual: the bias that is added to the norm's output where a residual carries that on
            (post-norm); None where only the matrices see it.
        tied: the token embedding is among the readers, which fixes the gain.
        silent: keys without a bias, to all of which softmax lets the same constant be added.
    """

    matrices: tuple[str, ...]
    residual: str | None = None
    tied: bool = False
    silent: tuple[str, ...] = ()


def bias_of(reader: str) -> str:
    """The bias that belongs to a matrix: ``b_Q`` of ``W_Q``, ``head_bias`` of ``head``."""
    if reader == "head":
        return "head_bias"
    start, _, last = reader.rpartition("W")
    return f"{start}b{last}"


def norm_sites(model: Transformer) -> Iterator[Site]:
    """Every norm with what reads it: as ``norm.g`` and ``norm.b``, matrices and their biases.

    The norms of a chain have neither gain nor bias.
    """
    for part in block_parts(model):
        for norm, readers in _norms_of_block(part).items():
            yield from _norm_site(model, part.names, norm, readers)
    ends = end_names(model)
    if model.classifier is not None:
        yield from _norm_site(model, ends, "norm", Readers(("classifier.W_A",)))
        return
    if not model.headless:
        heads = tuple(n for n in ends if n.startswith(EXTRA) and n.endswith(".W"))
        heads = heads if model.mlm is not None else ("head", *heads)
        tied = model.tied and model.mlm is None
        yield from _norm_site(model, ends, "norm", Readers(heads, tied=tied))
    if model.mlm is not None and "head" in ends:
        yield from _norm_site(model, ends, f"{EXTRA}mlm_norm", Readers(("head",), tied=model.tied))
    if len(model.stacks) > 1:  # the norm after an encoder, which every block of a decoder reads
        matrices = tuple(n for n in model.tensors if n.endswith(("cross.W_K", "cross.W_V")))
        names = {f"norm.{name[-1]}": name for name in model.memory_norm}
        names |= {n: n for n in (*matrices, *map(bias_of, matrices)) if n in model.tensors}
        keys = (n for n in matrices if n.endswith("W_K") and bias_of(n) not in names)
        yield Site(model, names, Readers(matrices, silent=tuple(keys)))


def _norms_of_block(part: Part) -> dict[str, Readers]:
    """Norms that a block may have, and what reads each."""
    attention, order = part.block.attention, part.block.order
    seen = attention.rotary or attention.qk_norm or attention.softcap or "b_K" in part.names
    silent = () if seen else ("W_K",)
    first = ("W_Q", "W_K", "W_V")
    second = (*_of_mlp(part, "W_A", "W_A.A", "W_G"), "router")
    if order == "post":
        own, mlp = Readers(first, "b_O", silent=silent), Readers(second, "b_B")
        if part.block.cross is None:
            return {"norm_0": own, "norm_1": mlp}
        return {"norm_0": own, "norm_1": Readers(("cross.W_Q",), "cross.b_O"), "norm_x": mlp}
    if order == "parallel" and "norm_2.g" not in part.names:
        return {"norm_1": Readers(first + second, silent=silent)}
    return {
        "norm_1": Readers(first, silent=silent),
        "norm_2": Readers(second),
        "norm_x": Readers(("cross.W_Q",)),
    }


def _of_mlp(part: Part, *tensors: str) -> tuple[str, ...]:
    """Names of tensors of the MLP of a block, or of all its experts."""
    return tuple(prefix + tensor for prefix in part.block.mlp.prefixes for tensor in tensors)


def _norm_site(
    model: Transformer, held: Mapping[str, str], norm: str, readers: Readers
) -> Iterator[Site]:
    """The site of a norm that is among the tensors ``held``, with those of its readers that are."""
    matrices = tuple(name for name in readers.matrices if name in held)
    if f"{norm}.g" not in held and not (matrices and "chain" in model.orders):
        return
    names = {f"norm.{p}": held[f"{norm}.{p}"] for p in "gb" if f"{norm}.{p}" in held}
    others = () if readers.residual is None else (readers.residual,)
    names |= chosen(held, (*matrices, *map(bias_of, matrices), *others))
    yield Site(model, names, replace(readers, matrices=matrices))


def is_biased(site: Site) -> bool:
    """Whether a norm, all its readers and the residual have a bias."""
    readers: Readers = site.detail
    others = () if readers.residual is None else (readers.residual,)
    heard = [bias_of(name) for name in readers.matrices if name not in readers.silent]
    return {"norm.b", *heard, *others} <= site.names.keys()


def is_centred(site: Site, reader: str) -> bool:
    """Whether LayerNorm's centring hides part of a reader: a bias takes up what β adds."""
    seen = "norm.b" in site.names and reader not in site.detail.silent
    return site.model.norm == "layer" and (not seen or bias_of(reader) in site.names)


def nonzero(gain: Tensor) -> Tensor:
    """Gains that can be divided by: those near zero are moved away from it."""
    least = NOTHING * gain.abs().max().clamp_min(1e-30)
    return torch.where(gain.abs() < least, torch.where(gain < 0, -least, least), gain)


def _visible(site: Site, weights: Tensors, reader: str) -> Tensor:
    """A reader without what a LayerNorm's centring hides of it."""
    W, gain = weights[reader].double(), weights["norm.g"].double()
    if not is_centred(site, reader):
        return W
    mean = (W * gain.unsqueeze(-1)).mean(-2, keepdim=True)
    return W - mean / nonzero(gain).unsqueeze(-1)


class NormGain(Symmetry[Tensor]):
    """``γ → γ / r`` against ``W → diag(r) W`` for all readers, ``r [D]`` without zeros.

    Example:
        >>> site = Site(Transformer("mine", 2, "rms", 1e-6, ()), {}, Readers(("W_Q",)))
        >>> weights = {"norm.g": torch.tensor([2.0, 4.0]), "W_Q": torch.ones(2, 1)}
        >>> NormGain().reduce(site, weights)["W_Q"].tolist()
        [[2.0], [4.0]]
    """

    name = "norm gains into readers"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Norms with a gain that only their readers see."""
        for site in norm_sites(model):
            if site.detail.residual is None and not site.detail.tied and "norm.g" in site.names:
                yield site

    def size(self, site: Site) -> Size:
        """One scale for each coordinate."""
        return Size(site.shape("norm.g")[0])

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Tensor:
        """Gives random gains of the size of the old ones, over a factor of ``how.condition``.

        They are short binary fractions, so that files of any dtype hold them (and them minus
        one) exactly. Gains near zero stay.
        """
        old = weights["norm.g"]
        size = old.double().abs().mean().clamp_min(1e-30).log2().round().exp2()
        steps = (random_scales(len(old), how) * 32).round()
        steps = torch.where(steps == 0, 1.0, steps)
        usable = old.abs() > TINY * old.abs().max()
        new = torch.where(usable, steps / 32 * size, old.double()).to(old)
        return torch.where(old == new, 1.0, old / new)

    def act(self, site: Site, weights: Tensors, g: Tensor) -> Weights:
        """Readers are multiplied by ``g``, gain and bias of the norm divided."""
        out = {}
        for name in site.detail.matrices:
            if name in weights:
                out[name] = weights[name] * g.to(weights[name]).unsqueeze(-1)
        for name in ("norm.g", "norm.b"):
            if name in weights:
                out[name] = weights[name] / g.to(weights[name])
        return out

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Tensor:
        """Takes the gains of ``b``, unless the readers would grow too much to make up for them."""
        return self.from_sums(a["norm.g"], b["norm.g"], self.sums(site, a, b))

    def sums(self, site: Site, a: Tensors, b: Tensors) -> Tensor:
        """Squares of the rows of a's readers and their products with b's, ``[2, D]``.

        A fit needs no more of the readers, and the sums over several parts of them add up.
        """
        total = torch.zeros(2, len(a["norm.g"]), dtype=torch.float64)
        for name in site.detail.matrices:
            if name in a:
                x, y = (_visible(site, w, name) for w in (a, b))
                products = [(x * z).movedim(-2, 0).flatten(1).sum(1) for z in (x, y)]
                total += torch.stack(products)
        return total

    def from_sums(self, a: Tensor, b: Tensor, sums: Tensor) -> Tensor:
        """The fit for gains ``a`` and ``b``; see `sums`."""
        a, b = a.double(), b.double()
        squares, products = sums[0], sums[1]
        nearest = nearest_scales_from_products(squares, a * a, products, a * b, positive=False)
        same = a / nonzero(b)

        def distance(r: Tensor) -> Tensor:
            return squares * r * r - 2 * products * r + (a / r).square() - 2 * a * b / r

        slack = 1e-9 * squares + 1e-12 * b.square()
        usable = (same != 0) & (distance(same) <= distance(nearest) + slack)
        return torch.where(usable, same, nearest)

    def reduce(self, site: Site, weights: Tensors) -> Weights:
        """Gains of one."""
        gain, bias = weights["norm.g"], weights.get("norm.b")
        out = {"norm.g": torch.ones_like(gain)}
        if bias is not None:
            out["norm.b"] = torch.where(bias == 0, bias, bias / gain)
        for name in site.detail.matrices:
            if name in weights:
                out[name] = weights[name] * gain.to(weights[name]).unsqueeze(-1)
        return out


class NormBias(Additive[Tensor]):
    """``β → β + s``, taken back in the biases of the readers and of the residual.

    Example:
        >>> site = Site(Transformer("mine", 2, "layer", 1e-5, ()), {}, Readers(("W_Q",)))
        >>> weights = {"norm.b": torch.ones(2), "W_Q": torch.ones(2, 1), "b_Q": torch.zeros(1)}
        >>> NormBias().reduce(site, weights)["b_Q"].tolist()
        [2.0]
    """

    name = "norm biases into readers' biases"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Norms whose readers all have biases."""
        return (site for site in norm_sites(model) if is_biased(site))

    def size(self, site: Site) -> Size:
        """One shift for each coordinate."""
        return Size(site.shape("norm.b")[0])

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Tensor:
        """A tenth of the size of the gain."""
        return noise((len(weights["norm.g"]),), weights["norm.g"], how, 0.1)

    def act(self, site: Site, weights: Tensors, g: Tensor) -> Weights:
        """Adds ``g [D]``."""
        out = {}
        if "norm.b" in weights:
            out["norm.b"] = weights["norm.b"] + g.to(weights["norm.b"])
        for name in site.detail.matrices:
            if name in weights and name not in site.detail.silent:
                W, bias = weights[name], bias_of(name)
                out[bias] = weights[bias] - g.to(W) @ W
        if site.detail.residual is not None:
            bias = site.detail.residual
            out[bias] = weights[bias] - g.to(weights[bias])
        return out

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Tensor:
        """The difference of the norm's biases."""
        return b["norm.b"] - a["norm.b"]


class CentredReaders(Additive[Weights]):
    """``W → W + γ⁻¹ vᵀ``: LayerNorm's output over γ sums to Σ β/γ, which the bias takes back.

    Example:
        >>> site = Site(Transformer("mine", 2, "layer", 1e-5, ()), {}, Readers(("W_Q",)))
        >>> weights = {"norm.g": torch.ones(2), "W_Q": torch.tensor([[1.0], [3.0]])}
        >>> CentredReaders().reduce(site, weights)["W_Q"].tolist()
        [[-1.0], [1.0]]
    """

    name = "readers + γ⁻¹vᵀ"
    reads = ("norm.g", "norm.b")

    def sites(self, model: Transformer) -> Iterator[Site]:
        """LayerNorms, with those of their readers in one block that can take a shift."""
        if model.norm != "layer":
            return
        for site in norm_sites(model):
            free = tuple(name for name in site.detail.matrices if is_centred(site, name))
            if site.detail.tied:
                continue
            for _, block in groupby(free, lambda name: name.rpartition("cross.")[0]):
                readers = tuple(block)
                names = chosen(site.names, (*self.reads, *readers, *map(bias_of, readers)))
                yield Site(model, names, Readers(readers, silent=site.detail.silent))

    def size(self, site: Site) -> Size:
        """One number for each column of the readers."""
        shapes = [site.shape(name) for name in site.detail.matrices]
        return Size(sum(math.prod(shape) // shape[-2] for shape in shapes))

    def _gain(self, site: Site, weights: Tensors) -> Tensor:
        if "norm.g" in weights:
            return weights["norm.g"]
        return torch.ones(site.model.width, dtype=weights[site.detail.matrices[0]].dtype)

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Weights:
        """``v`` for each reader, shaped as its bias; nothing where a gain is near zero."""
        gain = self._gain(site, weights).double()
        if gain.abs().min() <= TINY * gain.abs().max():
            return {}
        unit = (1 / gain).square().mean().sqrt()
        readers = {n: weights[n] for n in site.detail.matrices}
        shapes = {n: (*W.shape[:-2], W.shape[-1]) for n, W in readers.items()}
        return {n: noise(shapes[n], W, how) / unit for n, W in readers.items()}

    def act(self, site: Site, weights: Tensors, g: Weights) -> Weights:
        """Adds ``γ⁻¹ vᵀ`` with ``v`` by reader."""
        out = {}
        gain, bias = nonzero(self._gain(site, weights)), weights.get("norm.b")
        for name, v in g.items():
            W = weights[name]
            v = v.to(W)
            out[name] = W + (1 / gain).unsqueeze(-1) * v.unsqueeze(-2)
            if bias is not None and name not in site.detail.silent:
                out[bias_of(name)] = weights[bias_of(name)] - (bias / gain).sum() * v
        return out

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Weights:
        """Least squares on each reader."""
        inverse = 1 / nonzero(self._gain(site, a))
        size = inverse.square().sum()
        return {
            n: torch.einsum("d,...dn->...n", inverse, b[n] - a[n]) / size
            for n in site.detail.matrices
        }

    def for_entries(self, g: Weights, entries: slice) -> Weights:
        """The output matrix has a column for each entry of the vocabulary."""
        return {name: v[entries] if name == "head" else v for name, v in g.items()}


class CentredWriters(Symmetry[Weights]):
    """``W → W + u 1ᵀ``: every LayerNorm subtracts the mean of what was written.

    Example:
        >>> site = Site(Transformer("mine", 2, "layer", 1e-5, ()), {"b_O": "0.b_O"})
        >>> CentredWriters().reduce(site, {"b_O": torch.tensor([1.0, 3.0])})["b_O"].tolist()
        [-1.0, 1.0]
    """

    name = "writers + u1ᵀ"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Writers of blocks and embeddings into a stream that only LayerNorms read."""
        if model.hides_mean:
            for part in block_parts(model):
                attention = [f"{prefix}{p}_O" for prefix in ("", "cross.") for p in "Wb"]
                writers = (*attention, *_of_mlp(part, "W_B", "b_B"))
                yield Site(model, chosen(part.names, writers))
        if model.hides_mean_of_embeddings:
            free = [n for n in EMBEDDINGS if not (n == "token" and model.tied)]
            if "post" not in model.orders:  # else the bias belongs to the first block's readers
                free += [f"{stack.prefix}embed_norm.b" for stack in model.stacks]
            names = chosen(end_names(model), free)
            if names:
                yield Site(model, names)

    def size(self, site: Site) -> Size:
        """One number for each row of the writers."""
        return Size(sum(math.prod(site.shape(name)[:-1]) for name in site.names))

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Weights:
        """``u`` for each writer, shaped as the writer without the stream."""
        return {n: noise(tuple(weights[n].shape[:-1]), weights[n], how) for n in site.names}

    def act(self, site: Site, weights: Tensors, g: Weights) -> Weights:
        """Adds ``u 1ᵀ`` with ``u`` by writer."""
        return {name: weights[name] + u.to(weights[name]).unsqueeze(-1) for name, u in g.items()}

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Weights:
        """Differences of the rows' means."""
        return {name: (b[name] - a[name]).mean(-1) for name in site.names}

    def reduce(self, site: Site, weights: Tensors) -> Weights:
        """Rows of mean zero."""
        return self.act(site, weights, {n: -weights[n].mean(-1) for n in site.names})

    def for_entries(self, g: Weights, entries: slice) -> Weights:
        """The token embedding has a row for each entry of the vocabulary."""
        return {name: u[entries] if name == "token" else u for name, u in g.items()}


class SublayerSigns(Symmetry[Tensor]):
    """Signs of what a sublayer writes against those of the gain of the norm after it.

    Example:
        >>> site = Site(Transformer("mine", 2, "rms", 1e-6, ()), {})
        >>> weights = {"norm.g": torch.tensor([-2.0, 1.0]), "b_O": torch.ones(2)}
        >>> SublayerSigns().reduce(site, weights)["b_O"].tolist()
        [-1.0, 1.0]
    """

    name = "signs against gains after sublayers"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Norms after sublayers (sandwich), with what writes into them."""
        for part in block_parts(model):
            mlp = _of_mlp(part, "W_B", "b_B")
            for norm, writers in (("after_1", ("W_O", "b_O")), ("after_2", mlp)):
                if f"{norm}.g" in part.names:
                    gain = {"norm.g": part.names[f"{norm}.g"]}
                    yield Site(model, chosen(part.names, writers) | gain)

    def size(self, site: Site) -> Size:
        """A sign for each coordinate."""
        return Size(0, site.model.width * LOG10_2)

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Tensor:
        """Random signs ``[D]``."""
        return random_signs((site.model.width,), how)

    def act(self, site: Site, weights: Tensors, g: Tensor) -> Weights:
        """Multiplies gain and writers."""
        return {name: w * g.to(w) for name, w in weights.items()}

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Tensor:
        """Signs in which the gains differ."""
        return signs(a["norm.g"]) * signs(b["norm.g"])

    def reduce(self, site: Site, weights: Tensors) -> Weights:
        """Positive gains."""
        return self.act(site, weights, signs(weights["norm.g"]))


class BranchConstant(Symmetry[Tensor]):
    """A constant from the MLP's output bias to the attention's, where both are added at once.

    Example:
        >>> site = Site(Transformer("mine", 2, "layer", 1e-5, ()), {})
        >>> weights = {"b_O": torch.ones(2), "b_B": torch.tensor([3.0, 4.0])}
        >>> BranchConstant().reduce(site, weights)["b_O"].tolist()
        [4.0, 5.0]
    """

    name = "constant between parallel branches"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Parallel blocks with both biases."""
        for part in block_parts(model):
            if part.block.order == "parallel" and {"b_O", "b_B"} <= part.names.keys():
                yield Site(model, chosen(part.names, ("b_O", "b_B", "W_O")))

    def size(self, site: Site) -> Size:
        """One number for each coordinate."""
        return Size(site.model.width)

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Tensor:
        """A vector ``[D]``."""
        return noise((site.model.width,), weights["W_O"], how)

    def act(self, site: Site, weights: Tensors, g: Tensor) -> Weights:
        """Adds it to ``b_O``."""
        g = g.to(weights["b_O"])
        return {"b_O": weights["b_O"] + g, "b_B": weights["b_B"] - g}

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Tensor:
        """Least squares on both biases."""
        return ((b["b_O"] - a["b_O"]) - (b["b_B"] - a["b_B"])) / 2

    def reduce(self, site: Site, weights: Tensors) -> Weights:
        """All of it in ``b_O``."""
        return self.act(site, weights, weights["b_B"])
