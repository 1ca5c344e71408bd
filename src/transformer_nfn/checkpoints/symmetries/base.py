"""Interface of a symmetry of a checkpoint, and the sites at which one acts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError
from transformer_nfn.functional.description import KEPT, Block, Stack, Transformer
from transformer_nfn.spaces.actions import Drawing, Size
from transformer_nfn.spaces.actions.matrix import geometric

Weights = dict[str, Tensor]
Tensors = Mapping[str, Tensor]
Noise = Tensors | None
Element = TypeVar("Element")

SHARE = 0.25
"""Root mean square of what is added to a tensor, relative to that of the tensor."""
LONG = ("token", "head", "head_bias")
"""Tensors with an axis for the vocabulary."""
TINY = 1e-3
"""Gains smaller than this, in units of the largest, are not divided by."""


@dataclass(frozen=True)
class Part:
    """Tensors of one block, which are read together.

    In post-norm networks the norm that a block reads stands in the block before it (or after the
    embedding); here it belongs to its readers, as ``norm_0``. Where blocks are run several times
    the first one reads the embedding too, and norms stay in their blocks.

    Attributes:
        name: ``0``, ``encoder.3``.
        names: canonical names by the short names used in the part.
        stack: of the block.
        block: its description.
        context: canonical names of tensors of other parts that the block reads.
    """

    name: str
    names: Mapping[str, str]
    stack: Stack
    block: Block
    context: tuple[str, ...]


def block_parts(model: Transformer) -> Iterator[Part]:
    """Every block of a network, in order.

    Example:
        >>> from transformer_nfn.checkpoints import open_model
        >>> from transformer_nfn.testing import write_example_checkpoint
        >>> with open_model(write_example_checkpoint("llama")) as model:
        ...     [(part.name, part.names["W_Q"]) for part in block_parts(model.description)]
        [('0', '0.W_Q'), ('1', '1.W_Q')]
    """
    grouped = _by_block(model)
    for stack in model.stacks:
        for i, block in enumerate(stack.blocks):
            names = dict(grouped.get(f"{stack.prefix}{i}", {}))
            if block.order == "post" and stack.repeats == 1:
                names = {k: n for k, n in names.items() if not k.startswith("norm_2.")}
                before = f"{stack.prefix}{i - 1}.norm_2" if i else f"{stack.prefix}embed_norm"
                names |= {
                    f"norm_0.{p}": f"{before}.{p}" for p in "gb" if f"{before}.{p}" in model.tensors
                }
            context = () if block.cross is None else model.memory_norm
            yield Part(f"{stack.prefix}{i}", names, stack, block, context)


def _by_block(model: Transformer) -> dict[str, dict[str, str]]:
    """Canonical names by block and short name."""
    blocks: dict[str, dict[str, str]] = {}
    for name in model.tensors:
        for stack in model.stacks:
            index, _, short = name.removeprefix(stack.prefix).partition(".")
            if name.startswith(stack.prefix) and index.isdigit():
                blocks.setdefault(f"{stack.prefix}{index}", {})[short] = name
    return blocks


def end_names(model: Transformer) -> dict[str, str]:
    """Canonical names of all tensors of no block: embeddings, last norm (as ``norm``), heads.

    Example:
        >>> from transformer_nfn.checkpoints import open_model
        >>> from transformer_nfn.testing import write_example_checkpoint
        >>> with open_model(write_example_checkpoint("llama")) as model:
        ...     list(end_names(model.description))
        ['token', 'norm.g', 'head']
    """
    taken = {name for part in block_parts(model) for name in part.names.values()}
    names = {}
    final = f"{model.stacks[-1].last_norm}."
    for name in model.tensors:
        if name not in taken and not name.startswith(KEPT):
            short = f"norm.{name.removeprefix(final)}" if name.startswith(final) else name
            names[short] = name
    if model.tied and "token" in names:
        names["head"] = "head"  # the token embedding, transposed
    return names


@dataclass(frozen=True)
class Site:
    """A place in a network where a symmetry acts.

    Attributes:
        model: the network.
        names: canonical names of the tensors that the symmetry reads or changes, by the names
            that it uses for them.
        detail: what else the symmetry needs to know of the place: the description of an
            attention, the readers of a norm.

    Example:
        >>> from transformer_nfn.functional.description import Transformer
        >>> site = Site(Transformer("mine", 4, "rms", 1e-6, ()), {"W_A": "0.W_A"})
        >>> site.pick({"0.W_A": "a matrix", "0.b_A": "a bias"})
        {'W_A': 'a matrix'}
        >>> site.put({"W_A": "another"})
        {'0.W_A': 'another'}
    """

    model: Transformer
    names: Mapping[str, str]
    detail: Any = None

    def pick(self, weights: Tensors) -> Weights:
        """The tensors of the site, of those by canonical name."""
        return {short: weights[name] for short, name in self.names.items() if name in weights}

    def put(self, changed: Tensors) -> Weights:
        """Tensors of the site by canonical name."""
        return {self.names[short]: w for short, w in changed.items()}

    def shape(self, short: str) -> tuple[int, ...]:
        """Of one tensor."""
        return self.model.tensors[self.names[short]]


def chosen(names: Mapping[str, str], wanted: Iterable[str]) -> dict[str, str]:
    """The tensors among those wanted that a part has."""
    return {name: names[name] for name in wanted if name in names}


class Symmetry(ABC, Generic[Element]):
    """A group that acts on some tensors of a checkpoint and leaves its function unchanged.

    Tensors come and go under the names of the site. A site may span several parts of a network
    (the stream does): then `act` is called for each part with the tensors of that part, and
    `draw` with those at the ends.
    """

    name: ClassVar[str]
    """Name in tables."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Tensors of a site that it never changes; they may belong to another part."""

    @abstractmethod
    def sites(self, model: Transformer) -> Iterable[Site]:
        """Every place of a network where it acts, blocks before the ends."""

    @abstractmethod
    def size(self, site: Site) -> Size:
        """Size of the group at one site."""

    @abstractmethod
    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Element:
        """A random element; one that moves nothing where the weights allow no other.

        What is added to a tensor follows its size, so that an element costs no more precision
        than rounding does.
        """

    @abstractmethod
    def act(self, site: Site, weights: Tensors, g: Element) -> Weights:
        """The tensors that an element changes, as they are after it acted."""

    @abstractmethod
    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Element:
        """The element that takes the tensors ``a`` closest to ``b``.

        Args:
            a: tensors of one network. b: of another.
            noise: where ``a`` and ``b`` agree up to rounding, the expected squared error of
                tensors: then the element is fitted to them by weighted least squares. None
                minimises the distance between two different networks.
        """

    def reduce(self, site: Site, weights: Tensors) -> Weights:
        """The tensors that change when the network is brought to a representative of its orbit.

        Symmetries that are fitted between two networks, such as orders and bases, have none.
        """
        raise SpaceError(f"the symmetry '{self.name}' has no method `reduce`: expected one")

    def label(self, site: Site) -> str:
        """Name in tables, at one site."""
        return self.name

    def for_entries(self, g: Element, entries: slice) -> Element:
        """An element cut to a range of the vocabulary, whose tensors may be moved in pieces."""
        return g


Sites = list[tuple[Symmetry[Any], Site]]


class Additive(Symmetry[Element]):
    """A symmetry whose elements are added to tensors, not multiplied with them."""

    def reduce(self, site: Site, weights: Tensors) -> Weights:
        """The tensors nearest to zero."""
        zeros = {name: w.new_zeros(()).expand(w.shape) for name, w in weights.items()}
        return self.act(site, weights, self.fit(site, weights, zeros))


def vocabulary_cuts(weights: Tensors, most: int) -> Iterator[slice]:
    """Ranges of up to ``most`` entries that cover the vocabulary; one range without any."""
    sizes = [w.shape[1 if name == "head" else 0] for name, w in weights.items() if name in LONG]
    for start in range(0, max([1, *sizes]), most):
        yield slice(start, start + most)


def entries(name: str, w: Tensor, cut: slice) -> Tensor:
    """Some entries of the vocabulary of a tensor; all of a tensor without that axis."""
    if name not in LONG:
        return w
    return w[:, cut] if name == "head" else w[cut]


def noise(shape: tuple[int, ...], like: Tensor, how: Drawing, share: float = SHARE) -> Tensor:
    """Random numbers of ``share`` times the size of ``like``."""
    size = float(torch.linalg.vector_norm(like, dtype=torch.float64)) / max(like.numel(), 1) ** 0.5
    drawn: Tensor = torch.randn(shape, generator=how.generator, dtype=torch.float64)
    return drawn * float(size * share)


def random_signs(shape: tuple[int, ...], how: Drawing) -> Tensor:
    """±1 with equal chances, float64."""
    return torch.randint(0, 2, shape, generator=how.generator).double() * 2 - 1


def random_scales(size: int, how: Drawing, *, positive: bool = False) -> Tensor:
    """Nonzero numbers spread over a factor of ``how.condition``, ``[size]``."""
    scales = geometric(1, size, how, how.condition or 1.0)[0]
    return scales if positive else scales * random_signs((size,), how)
