"""What a predictor is: a class that says what it reads, and the registry of those with a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from torch import Tensor

from transformer_nfn.errors import RunError
from transformer_nfn.models.batch import Batch
from transformer_nfn.models.own_code import Code
from transformer_nfn.spaces import WeightSpace

BUILT, CHECKPOINTS, ARRAYS = ZOOS = "built", "checkpoints", "arrays"
"""Networks that `tnfn zoo build` trains, checkpoints of any family, and arrays of one layout."""
TENSORS, PACKED, STATISTICS, INVARIANTS, OUTPUTS = READS = (
    "tensors", "packed", "statistics", "invariants", "outputs",
)  # fmt: skip
"""What a predictor can read of a network."""
ZOO_TEXTS = {
    BUILT: "networks that `tnfn zoo build` trains",
    CHECKPOINTS: "checkpoints of any family",
    ARRAYS: "arrays of one layout",
}
SIZE_TEXTS: Mapping[str, str] = {
    "blocks": "{} blocks",
    "patch": "{} pixels in a patch",
    "classes": "{} classes",
    "d_model": "width {}",
    "heads": "{} heads",
    "d_ff": "{} neurons",
    "tokens": "{} tokens",
}
"""Text of each size of a network, the most telling first."""
OTHERS = 9
Class = TypeVar("Class", bound="type[Predictor]")


class Variant(NamedTuple):
    """A form of a predictor that has a name of its own, such as ``statnn:authors``.

    Attributes:
        title: in tables and figures.
        options: what makes it.
        every_checkpoint: False to keep a predictor that would from the other checkpoints.
    """

    title: str
    options: Mapping[str, Any]
    every_checkpoint: bool = True


class LearningSet(Protocol):
    """Networks of one size to learn from; `transformer_nfn.prediction.data.Dataset` is one."""

    @property
    def block_space(self) -> WeightSpace | None:
        """Weight space of a block; None for checkpoints."""

    @property
    def network(self) -> Batch:
        """The networks as models read them."""

    @property
    def accuracy(self) -> Tensor:
        """The target, ``[n]``."""

    @property
    def tokens(self) -> int | None:
        """Maximal input length."""

    def __len__(self) -> int: ...

    @property
    def runs(self) -> list[str]:
        """The run of each network."""

    @property
    def skills(self) -> tuple[Tensor, Tensor]:
        """Two weights by which good networks are chosen, ``[n]``."""

    def take(self, index: Tensor | np.ndarray) -> Self:
        """Select networks."""


class Predictor:
    """Base of this package's predictors: what a class need not say of itself.

    Attributes:
        code: where the class of a user comes from; None for those of this package.
        reads: what it is given of a network, one of `READS`.
        zoos: whose networks it reads, some of `ZOOS`; arrays only by their tensors.
        any_size: whether it trains on networks of several sizes, and reads others.
        every_checkpoint: whether it also trains on the other checkpoints of the training runs.
        protocol: where its training deviates from the paper's: fields of a `Protocol`.
        image_protocol: where it deviates from that on networks that read images.
        invariant: whether symmetries of a block change no prediction.
        title: in tables and figures.
        place: in lists, and the number of its colour.
        variants: its other forms by their names.
    """

    code: ClassVar[Code | None] = None
    reads: str = TENSORS
    zoos: ClassVar[tuple[str, ...]] = (BUILT,)
    any_size: ClassVar[bool] = False
    every_checkpoint: ClassVar[bool] = False
    protocol: ClassVar[Mapping[str, Any]] = {}
    image_protocol: ClassVar[Mapping[str, Any]] = {}
    invariant: ClassVar[bool] = False
    title: ClassVar[str] = ""
    place: ClassVar[int] = OTHERS
    variants: ClassVar[Mapping[str, Variant]] = {}

    @classmethod
    def reads_zoo(cls, zoo: str) -> bool:
        """Whether it reads networks of a kind of zoo; of arrays there are tensors alone."""
        return zoo in cls.zoos and (zoo != ARRAYS or cls.reads in (TENSORS, PACKED, STATISTICS))

    @property
    def any_task(self) -> bool:
        """Whether networks of other patches, tokens and classes are read, too."""
        return False

    @property
    def text(self) -> str:
        """`ProbeFormat.text` of its probes, empty without probes."""
        return ""

    @classmethod
    def of(cls, data: LearningSet, **options: Any) -> Self:
        """A predictor of networks like these."""
        raise NotImplementedError

    @classmethod
    def of_all(cls, data: Sequence[LearningSet], **options: Any) -> Self:
        """A predictor of networks of several sizes."""
        return cls.of(data[0], **options)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read what `save` wrote."""
        raise NotImplementedError

    def save(self, folder: str | Path) -> Path:
        """Write into a folder, made if need be."""
        raise NotImplementedError

    def to(self, device: str) -> Self:
        """Move to a device; what computes in main memory alone stays there."""
        return self

    def predict(self, batch: Batch) -> Tensor:
        """Predicted accuracy of each network, ``[n]`` in float32; NaN where numbers overflow."""
        raise NotImplementedError

    @property
    def num_parameters(self) -> int | None:
        """Number of trainable parameters; None for trees."""
        return None

    def misfit(self, sizes: Any, trained: Any) -> str | None:
        """Why networks of some sizes cannot be read; None if they can.

        Of a predictor of any size width, number of heads, depth and number of neurons may differ,
        the task may not; nor may the width of networks that read word vectors.

        Args:
            sizes: a `NetworkSizes`, of the networks in question.
            trained: of the training networks.
        """
        texts = {**SIZE_TEXTS}
        if self.any_size:
            if bool(sizes.patch) != bool(trained.patch):
                kinds = {True: "images", False: "word vectors"}
                expected, actual = kinds[bool(trained.patch)], kinds[bool(sizes.patch)]
                return f"expected networks that read {expected}, found some that read {actual}"
            texts = {size: SIZE_TEXTS[size] for size in ("patch", "classes", "tokens")}
            texts |= {} if trained.patch else {"d_model": "word vectors of width {}"}
        for size, text in texts.items():
            expected, actual = getattr(trained, size), getattr(sizes, size)
            if expected != actual:
                return f"expected {text.format(expected)}, found {actual}"
        return None

    def prepared(self, batch: Batch, positions: Tensor | None = None) -> Batch:
        """A batch with what every seed would have to compute of its networks.

        Args:
            batch: the batch.
            positions: of their tokens; None for those of the training networks.
        """
        return batch


_REGISTRY: dict[str, list[type[Predictor]]] = {}
"""Classes by name; one that ends with a colon stands for all names that begin so."""


def register(name: str, made: type[Predictor]) -> None:
    """Let a name mean this class alone, for all zoos."""
    _REGISTRY[name] = [made]


def predictor(name: str) -> Callable[[Class], Class]:
    """Register a class under a name; one for each kind of zoo may share it."""

    def add(cls: Class) -> Class:
        _REGISTRY.setdefault(name, []).append(cls)
        return cls

    return add


def names(zoo: str | None = None, **facts: Any) -> list[str]:
    """Names of this package's predictors in the order of lists, of a kind of zoo and with facts.

    >>> names("built", every_checkpoint=True)
    ['whole_network']
    """
    found = {}
    for name, classes in _REGISTRY.items():
        for each in classes if ":" not in name else ():
            fits = all(getattr(each, key) == value for key, value in facts.items())
            if fits and (zoo is None or each.reads_zoo(zoo)):
                found[name] = each.place
    return sorted(found, key=lambda name: (found[name], name))


def find(name: str, zoo: str | None = None) -> type[Predictor]:
    """Class of a name that reads networks of a kind of zoo; an error lists those there are."""
    made = _REGISTRY.get(f"{name.partition(':')[0]}:", [])
    classes = _REGISTRY.get(name, made)
    if not classes:
        raise RunError(f"there is no model '{name}'; there are {', '.join(names())}")
    for each in classes:
        if zoo is None or each.reads_zoo(zoo):
            return each
    raise RunError(
        f"'{name}' does not read {ZOO_TEXTS[zoo or BUILT]}: train {', '.join(names(zoo))}"
    )


def known_variants() -> dict[str, Variant]:
    """The variants of all predictors, by names such as ``statnn:authors``.

    >>> known_variants()["statnn:authors"].options
    {'authors': True}
    """
    classes = [(name, each) for name, classes in _REGISTRY.items() for each in classes]
    return {f"{name}:{key}": v for name, each in classes for key, v in each.variants.items()}


def variant_of(model: str, name: str) -> str:
    """Name of a predictor's variant; an error tells which predictors have it."""
    find(model)
    known = known_variants()
    if f"{model}:{name}" not in known:
        having = [known_name for known_name in known if known_name.endswith(f":{name}")]
        there = f"there are {', '.join(having or known)}"
        raise RunError(f"'{model}' has no variant '{name}'; {there}")
    return f"{model}:{name}"


def known_code(name: str) -> Code | None:
    """Where the user's class of a name comes from, if this process has it."""
    return _REGISTRY[name][0].code if name in _REGISTRY else None


def model_name(name: str, otherwise: str | None = None) -> str:
    """Display name of a predictor or variant; of another text ``otherwise``, or itself."""
    if (variant := known_variants().get(name)) is not None:
        return variant.title
    return (_REGISTRY[name][0].title if name in _REGISTRY else otherwise) or name


def model_place(name: str) -> tuple[int, str]:
    """Position of a predictor in lists, behind all others if it is unknown."""
    return (_REGISTRY[name][0].place, name) if name in _REGISTRY else (OTHERS + 1, "")
