"""Modules of users as predictors: what they are built from, and what they are given.

A class of PyTorch needs no base class of this package. It states what it ``reads``, is built from a
`NetworkLayout` and its options, and takes a batch to one number for each network, before the
logistic function:

=============  ================================================  ==================================
``reads``      layout                                            batch of ``n`` networks
=============  ================================================  ==================================
`tensors`      shape of each tensor by its name                  dict of tensors ``[n, *shape]``
`packed`       the same, in the order of the numbers             ``[n, all numbers]``
`statistics`   ``{"statistics": (F,)}``                          ``[n, F]``, seven of each tensor
`invariants`   ``{"invariants": (F,)}``                          ``[n, F]``, on a logarithmic scale
`outputs`      shapes of one input and of its answer             a function from inputs to answers
=============  ================================================  ==================================

A class with ``any_size = True`` is trained on networks of several sizes. Then an axis whose size
differs is None in the layout, and tensors that only some sizes have are left out of it; each batch
has networks of one size. The answers of `outputs` are ``[n, inputs, *answer]`` for inputs
``[inputs, *input]``, and can be differentiated.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from transformer_nfn.errors import RunError, SpaceError
from transformer_nfn.functional import sinusoids
from transformer_nfn.io.tensor_files import TensorInfo
from transformer_nfn.models.batch import BATCH, Batch, Rows
from transformer_nfn.models.invariants import FEATURES, invariant_features
from transformer_nfn.models.own_code import SHOWN, Code, import_own, own_code, package_folder
from transformer_nfn.models.predictor import (
    INVARIANTS,
    PACKED,
    READS,
    STATISTICS,
    TENSORS,
    ZOOS,
    LearningSet,
    Predictor,
    find,
    known_code,
    register,
)
from transformer_nfn.models.pretrained import Inputs, Pretrained, seeded
from transformer_nfn.models.statistics import signed_log
from transformer_nfn.models.tabular import Tabular, tensor_statistics
from transformer_nfn.models.task_reader import MAX_TOKENS
from transformer_nfn.models.whole_network.checkpoint_probes import ProbeFormat, checkpoint_outputs
from transformer_nfn.models.whole_network.invariants import whole_invariants
from transformer_nfn.models.whole_network.probes import probe_outputs
from transformer_nfn.spaces import WeightSpace

INPUT = "input"
"""Key of a batch that holds what a module reads of it, where it was computed before."""
TRIAL = 3
"""Networks that a new module is tried on."""
Shape = tuple[int | None, ...]


class NetworkLayout(dict[str, Shape]):
    """Names and shapes of what a predictor is given, without the axis of the networks."""

    @staticmethod
    def of(batch: Any, name: str) -> NetworkLayout:
        """Names and shapes of a batch; ``name`` for a batch that is one tensor."""
        if isinstance(batch, Answers):
            return batch.layout
        named = batch if isinstance(batch, Mapping) else {name: batch}
        return NetworkLayout({key: tuple(w.shape[1:]) for key, w in named.items()})

    def with_size(self, other: NetworkLayout) -> NetworkLayout:
        """What two sizes have in common: None for axes that differ."""
        return NetworkLayout({
            name: tuple(n if n == m else None for n, m in zip(shape, other[name], strict=True))
            for name, shape in self.items()
            if name in other and len(other[name]) == len(shape)
        })  # fmt: skip


class OwnModule(Pretrained):
    """A module of a user, with the methods of this package's predictors around it.

    Args:
        layout: what the module is given.
        options: of its constructor.
        space: weight space of one block; None for checkpoints.
        tokens: of an input of the networks.
    """

    own: ClassVar[type]
    """The user's class."""
    code: ClassVar[Code]
    stacked = False
    captured = False

    def __init__(
        self,
        layout: NetworkLayout,
        options: Mapping[str, Any],
        space: WeightSpace | None = None,
        tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.layout, self.options, self.tokens = layout, dict(options), tokens
        self.block_space = space
        with self._running("__init__"):
            self.module = self.own(layout, **options)
        if not isinstance(self.module, nn.Module):
            raise RunError(f"'{self.code.reference}' expected a class of torch.nn.Module")

    @classmethod
    def of_all(cls, data: Sequence[LearningSet], **options: Any) -> Self:
        """A model for networks like these, tried on some of them."""
        layouts = []
        space, tokens = data[0].block_space, data[0].tokens
        packed = cls.reads == PACKED and not hasattr(cls.own, "prepare")
        for each in data:
            few = each.take(torch.arange(min(TRIAL, len(each)))).network
            for _, view in cls._views(few, space, tokens, TENSORS if packed else cls.reads):
                layouts.append(NetworkLayout.of(cls._own_batch(view), cls.reads))
        model = cls(functools.reduce(NetworkLayout.with_size, layouts), options, space, tokens)
        few = data[0].take(torch.arange(min(TRIAL, len(data[0])))).network
        model.to(data[0].accuracy.device)._try(few)
        return model

    @classmethod
    def of(cls, data: LearningSet, **options: Any) -> Self:
        """A model for networks like these."""
        return cls.of_all([data], **options)

    @property
    def config(self) -> dict[str, Any]:
        """The arguments that build this model, as JSON values."""
        space = self.block_space
        return {
            "layout": [[name, list(shape)] for name, shape in self.layout.items()],
            "options": self.options,
            "tokens": self.tokens,
            "space": None if space is None else space.to_json(),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Build a new model from a `config`."""
        try:
            layout = NetworkLayout({name: tuple(shape) for name, shape in config["layout"]})
            space = None if config["space"] is None else WeightSpace.from_json(config["space"])
            model = cls(layout, config["options"], space, config["tokens"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(f"the config of a '{cls.code.reference}' is malformed") from error
        return model

    def prepared(self, batch: Batch, positions: Tensor | None = None) -> Batch:
        """A batch with what the module reads of it, if that can be kept."""
        kept = self.reads in (STATISTICS, INVARIANTS) or hasattr(self.own, "prepare")
        if INPUT in batch.computed or not kept or len(batch.layouts) > 1:
            return batch
        with torch.no_grad():
            parts = [self._batches(part)[0][1] for part in batch.chunks(BATCH)]
        first = parts[0]
        joined: Any = (
            {name: torch.cat([part[name] for part in parts]) for name in first}
            if isinstance(first, Mapping)
            else torch.cat(parts)
        )
        return batch.plus(INPUT, joined)

    def start(
        self, train: Sequence[LearningSet], val: Sequence[LearningSet], seed: int, epochs: int, *,
        fresh: bool,
    ) -> Inputs:  # fmt: skip
        """Drop the weights where what is read of them was computed."""
        first, second = (
            [each.only(INPUT) if INPUT in each.computed else each for each in part]
            for part in ([data.network for data in train], [data.network for data in val])
        )
        return first, second

    def logits(self, batch: Batch) -> Tensor:
        """The number before the Sigmoid, ``[batch]``."""
        count = len(batch)
        out: Tensor | None = None
        batches = self._batches(batch)
        for rows, inputs in batches:
            with self._running("forward"):
                found = self.module(inputs)
            self._check(found, len(range(count)[rows]) if isinstance(rows, slice) else len(rows))
            if len(batches) == 1:
                return found.reshape(-1)  # type: ignore[no-any-return]
            out = found.new_zeros(count) if out is None else out
            out = out.index_copy(0, rows, found.reshape(-1))
        assert out is not None
        return out

    def features(self, batch: Batch) -> Tensor:
        """Numbers of a built network that are as many for every size."""
        return signed_log(whole_invariants(batch, _positions(batch, self.tokens)))

    def loss(self, logits: Tensor, accuracy: Tensor) -> Tensor:
        """The class's own loss, or cross-entropy."""
        if hasattr(self.module, "loss"):
            with self._running("loss"):
                value = self.module.loss(logits, accuracy)
        else:
            value = super().loss(logits, accuracy)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise RunError(
                f"'{self.code.reference}' expected a number as its loss that depends on its "
                f"parameters, found {_what(value)}"
            )
        return value.reshape(())

    def own_optimiser(self, rate: float) -> torch.optim.Optimizer | None:
        """The class's own optimiser, if it has one."""
        if not hasattr(self.module, "optimiser"):
            return None
        with self._running("optimiser"):
            made = self.module.optimiser(rate)
        if not isinstance(made, torch.optim.Optimizer):
            raise RunError(
                f"'{self.code.reference}' expected a torch.optim.Optimizer of its method "
                f"optimiser, found {type(made).__name__}"
            )
        return made

    def kept_state(self) -> dict[str, Tensor]:
        """Buffers, and states of generators, that a training resumes with."""
        state = {name: value for name, value in self.named_buffers() if value is not None}
        return state | {
            f"{name}.{key}": value.get_state()
            for name, module in self.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, torch.Generator)
        }

    def restore_state(self, state: Mapping[str, Tensor]) -> None:
        """Set what `kept_state` gave."""
        for name, module in self.named_modules():
            for key, value in vars(module).items():
                if isinstance(value, torch.Generator):
                    value.set_state(state[f"{name}.{key}"].cpu())
        buffers = dict(self.named_buffers())
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(state[name])

    @contextlib.contextmanager
    def stepping(self, *seed: int) -> Iterator[None]:
        """Random numbers of a step, from the seed alone; the global generators stay as they are."""
        own, numpy = random.getstate(), np.random.get_state()
        with seeded(*seed) as number:
            np.random.seed(number)
            random.seed(number)
            try:
                yield
            finally:
                random.setstate(own)
                np.random.set_state(numpy)

    def _batches(self, batch: Batch) -> list[tuple[Any, Any]]:
        """Rows and batches of each size, as the module reads them."""
        if INPUT in batch.computed:
            return [(slice(None), batch.computed[INPUT])]
        views = self._views(batch, self.block_space, self.tokens, self.reads)
        return [(rows, self._own_batch(view)) for rows, view in views]

    @classmethod
    def _views(
        cls, batch: Batch, space: WeightSpace | None, tokens: int | None, reads: str
    ) -> list[tuple[Any, Any]]:
        """Rows of each size, and what can be read of them."""
        if reads in (STATISTICS, INVARIANTS):
            table = cls._table(batch, space, tokens)
            return [(slice(None), table.to(batch.weights.device).float())]
        views: list[tuple[Rows, Any]] = []
        for rows, alone in batch.by_size():
            if reads == TENSORS:
                views.append((rows, alone.views))
            elif reads == PACKED:
                views.append((rows, alone.weights))
            elif alone.layout.description is None:
                views.append((rows, Answers.of_built(alone, tokens)))
            else:
                views.append((rows, Answers.of_checkpoints(alone)))
        return views

    @classmethod
    def _table(cls, batch: Batch, space: WeightSpace | None, tokens: int | None) -> Tensor:
        if cls.reads == STATISTICS:
            return torch.from_numpy(tensor_statistics(batch))
        if FEATURES in batch.computed:
            return signed_log(batch.computed[FEATURES])
        if cls.any_size or space is None:
            return signed_log(whole_invariants(batch, _positions(batch, tokens)))
        return signed_log(invariant_features(batch, space))

    @classmethod
    def _own_batch(cls, batch: Any) -> Any:
        if not hasattr(cls.own, "prepare"):
            return batch
        with own_code(cls.code.reference, "in prepare", cls.code.file), torch.no_grad():
            found = cls.own.prepare(batch)
        wrong = [w for w in (found.values() if isinstance(found, Mapping) else [found])
                 if not isinstance(w, Tensor) or not w.ndim]  # fmt: skip
        if wrong or not len(found):
            raise RunError(
                f"'{cls.code.reference}' expected a tensor, or tensors by name, with a row for "
                f"each network from prepare, found {_what(wrong[0] if wrong else found)}"
            )
        return found

    def _try(self, batch: Batch) -> None:
        """Refuse a module that answers a first batch wrongly, or changes it."""
        self.eval()
        batch = self.prepared(batch)
        before = batch.map(torch.clone)
        with torch.no_grad():
            found = self.logits(batch)
        if not bool(found.isfinite().all()):
            raise RunError(
                f"'{self.code.reference}' expected finite numbers for the first networks, found "
                f"{float(found[~found.isfinite()][0])}"
            )
        if (name := batch.changed(before)) is not None:
            raise RunError(f"'{self.code.reference}' changes its input '{name}'")
        if not any(p.requires_grad for p in self.parameters()) and not hasattr(self, "fit"):
            raise RunError(f"'{self.code.reference}' has no parameter to train, and no fit")
        self.train()

    def _check(self, found: Any, count: int) -> None:
        fits = isinstance(found, Tensor) and found.is_floating_point()
        if not fits or found.shape not in ((count,), (count, 1)):
            raise RunError(
                f"'{self.code.reference}' expected one number for each of {count} networks from "
                f"forward, found {_what(found)}"
            )

    def _running(self, method: str) -> contextlib.AbstractContextManager[None]:
        return own_code(self.code.reference, f"in {method}", self.code.file)


def _positions(batch: Batch, tokens: int | None) -> Tensor:
    width = batch.layout.shapes["classifier.W_1"][0]
    return sinusoids(min(tokens or MAX_TOKENS, MAX_TOKENS), width).to(batch.weights)


class Answers:
    """Networks as functions: takes inputs ``[inputs, *input]`` to answers ``[n, inputs, *answer]``.

    Attributes:
        layout: shapes of one input and of one answer.
    """

    def __init__(self, run: Any, layout: NetworkLayout) -> None:
        self._run, self.layout = run, layout

    def __call__(self, inputs: Tensor) -> Tensor:
        shape = self.layout["input"]
        if tuple(inputs.shape[1:]) != shape:
            raise SpaceError(f"inputs expected shape {[None, *shape]}, found {list(inputs.shape)}")
        out: Tensor = self._run(inputs)
        return out

    @staticmethod
    def of_built(batch: Batch, tokens: int | None) -> Answers:
        """Networks of a built zoo."""
        where, shapes = _positions(batch, tokens), batch.layout.shapes
        width = shapes["embedding.W"][0] if "embedding.W" in shapes else where.shape[1]
        layout = {"input": (len(where), width), "answer": shapes["classifier.b_2"]}
        return Answers(
            lambda inputs: probe_outputs(batch, inputs, where).logits, NetworkLayout(layout)
        )

    @staticmethod
    def of_checkpoints(batch: Batch) -> Answers:
        """Checkpoints of one size; inputs of tokens are weights of each token of the vocabulary."""
        form = ProbeFormat.of(batch.layout)
        answer = (form.shape[0], form.outputs) if form.language else (form.outputs,)
        layout = NetworkLayout({"input": form.shape, "answer": answer})
        return Answers(lambda inputs: checkpoint_outputs(batch, inputs), layout)


class OwnFitted(OwnModule):
    """A module of a user that trains itself: ``fit(train, val)``, a batch and its targets each."""

    def fit(
        self,
        batch: Batch,
        accuracy: Tensor,
        validation: tuple[Batch, Tensor],
        seed: int,
    ) -> Self:
        """Let the module train itself; then it has to answer."""
        pairs = ((batch, accuracy), validation)
        train, val = (
            (self._batches(self.prepared(each))[0][1], target.clone()) for each, target in pairs
        )
        with self.stepping(seed), self._running("fit"):
            self.module.fit(train, val)
        super()._try(batch[:TRIAL])
        return self

    def _try(self, batch: Batch) -> None:
        """Nothing is known of its answers before it is fitted."""


def own_predictor(own: type, code: Code) -> type[OwnModule]:
    """The predictor around a user's class."""
    where = f"'{code.reference}'"
    if not (isinstance(own, type) and issubclass(own, nn.Module)):
        raise RunError(f"{where} expected a class of torch.nn.Module, found {_what(own)}")
    reads = getattr(own, "reads", None)
    if reads not in READS:
        raise RunError(f"{where}: 'reads' expected one of {', '.join(READS)}, found {reads!r}")
    facts: dict[str, Any] = {"zoos": ZOOS, "title": code.name}
    kinds = {"zoos": tuple, "any_size": bool, "every_checkpoint": bool, "invariant": bool,
             "protocol": Mapping, "title": str, "place": int}  # fmt: skip
    for name, kind in kinds.items():
        if name in vars(own):
            if not isinstance(value := getattr(own, name), kind):
                raise RunError(f"{where}: '{name}' expected {kind.__name__}, found {value!r}")
            facts[name] = value
    if not {*facts["zoos"]} <= {*ZOOS}:
        found = facts["zoos"]
        raise RunError(f"{where}: 'zoos' expected some of {', '.join(ZOOS)}, found {found!r}")
    if facts.get("any_size") and hasattr(own, "fit"):
        raise RunError(f"{where}: a class with a fit of its own trains on networks of one size")
    made = {**facts, "reads": reads, "own": own, "code": code, "__doc__": own.__doc__}
    base = OwnFitted if hasattr(own, "fit") else OwnModule
    return type(own.__name__, (base,), made)


def _what(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {TensorInfo.of(value)}"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


ENTRY_POINTS = "transformer_nfn.predictors"
"""Group of entry points by which a package names its predictors."""


def entry_points() -> dict[str, str]:
    """References of predictors that installed packages name."""
    return {each.name: each.value for each in metadata.entry_points(group=ENTRY_POINTS)}


def declared(predictor: str | type | Tabular, reference: str = "") -> str:
    """Name of a predictor; a class of a user is imported where need be, and registered.

    Args:
        predictor: a name, ``FILE.py:CLASS``, ``MODULE:CLASS``, a class, or a `Tabular`.
        reference: by which a class is known; empty to make one from its module.
    """
    if isinstance(predictor, Tabular):
        of = classmethod(lambda cls, data, **options: predictor.fresh())
        same = {"of": of, "load": Tabular.load, "reads": predictor.reads}
        register(predictor.own_name, type("Own", (Tabular,), same))
        return predictor.own_name
    if isinstance(predictor, str):
        text = entry_points().get(predictor, predictor)
        return declared(import_own(text), predictor) if ":" in text else predictor
    code = Code.of(predictor, reference)
    own = isinstance(predictor, type) and issubclass(predictor, Predictor)
    made = type(predictor.__name__, (predictor,), {"code": code}) if own else None
    register(code.reference, made or own_predictor(predictor, code))
    return code.reference


def reopened(recorded: Code, *, trust: bool, model: str | None = None) -> str:
    """Name of the user's predictor that a run recorded; its code runs only where it is trusted.

    Args:
        recorded: where the class came from.
        trust: whether the same code may be imported.
        model: a reference whose code is taken instead, whatever it is.
    """
    if model is not None:
        name = declared(model)
        found = find(name).code
        if found is not None and found.sha256 != recorded.sha256:
            print(
                f"warning: '{found.file}' (sha256 {found.sha256[:SHOWN]}) is not what the run was "
                f"trained with (sha256 {recorded.sha256[:SHOWN]})",
                file=sys.stderr,
            )
        return name
    known = known_code(recorded.reference)
    if known is not None and known.sha256 == recorded.sha256:
        return recorded.reference
    if recorded.file and not trust:
        raise RunError(
            f"the predictor is the class {recorded.name} of '{recorded.file}' (sha256 "
            f"{recorded.sha256[:SHOWN]}): its code runs only with --trust (trust=True in Python)"
        )
    recorded.check_unchanged()
    reference = recorded.reference
    where = reference.rpartition(":")[0]
    if where.endswith(".py"):
        return declared(import_own(f"{recorded.file}:{recorded.name}"), reference)
    named = entry_points().get(reference, reference)
    folder = package_folder(named.partition(":")[0])
    moved = RunError(
        f"'{reference}' is now in '{folder}', the run was trained with '{recorded.file}' "
        f"(sha256 {recorded.sha256[:SHOWN]}): name the class again with --model {reference}"
    )
    if folder is None or not Path(recorded.file).is_relative_to(folder):
        raise moved
    own = import_own(named)
    if Code.of(own, reference).sha256 != recorded.sha256:
        raise moved
    return declared(own, reference)
