"""Assertions for tests of maps, spaces and predictors: equivariant, invariant, same function."""

from __future__ import annotations

import contextlib
import json
import pickle
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.functional import (
    Architecture,
    Forward,
    Inputs,
    architecture_of,
    runnable,
)
from transformer_nfn.io.tensor_files import write_tensors
from transformer_nfn.spaces import Element, Weights, WeightSpace

TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.bfloat16: 1e-1,
    torch.float16: 1e-1,
}
"""Relative tolerance by dtype; float32 holds for condition numbers up to about 100."""

MAX_CONDITION = {torch.float64: 1e4, torch.float32: 100.0, torch.bfloat16: 2.0, torch.float16: 2.0}


def relative_error(value: Tensor, expected: Tensor) -> float:
    """``‖value − expected‖ / ‖expected‖``, in float64; NaN counts as infinite.

    >>> relative_error(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0]))
    0.2
    """
    if value.numel() == 0:
        return 0.0
    value, expected = value.detach().double(), expected.detach().double()
    error = float((value - expected).norm() / expected.norm().clamp_min(1e-300))
    return error if error == error else float("inf")


def _element(space: WeightSpace, element: Element | None, dtype: torch.dtype, seed: int) -> Element:
    if element is not None:
        return element
    generator = torch.Generator().manual_seed(seed)
    return space.group.random(generator, max_condition=MAX_CONDITION[dtype])


def assert_equivariant(
    fn: Callable[[Weights], Weights],
    space: WeightSpace,
    weights: Mapping[str, Tensor],
    *,
    element: Element | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> None:
    """Assert that ``fn(gU) = g fn(U)`` (without the shifts of g, if the space has any).

    Args:
        fn: from weights of ``space`` to weights of ``space``.
        space: the space the weights lie in.
        weights: ``[batch, channels, *axes]``.
        element: the group element g; random by default.
        tolerance: relative error allowed in each tensor; by dtype by default.
        seed: of the random element.

    >>> from transformer_nfn import spaces
    >>> space = spaces.multi_head(4, 2, 2, 2)
    >>> U = space.randn(1, dtype=torch.float64)
    >>> assert_equivariant(lambda w: {name: 2 * x for name, x in w.items()}, space, U)
    >>> assert_equivariant(lambda w: {name: x.relu() for name, x in w.items()}, space, U)
    Traceback (most recent call last):
    ...
    AssertionError: not equivariant: 'W_Q' of fn(gU) and g fn(U) differ by ...
    """
    space.check(weights)
    dtype = next(iter(weights.values())).dtype
    g = _element(space, element, dtype, seed)
    limit = TOLERANCE[dtype] if tolerance is None else tolerance
    moved_first = fn(g.act(weights))
    moved_last = g.linear_part().act(fn(dict(weights)))
    for name, expected in moved_last.items():
        error = relative_error(moved_first[name], expected)
        if not error <= limit:
            raise AssertionError(
                f"not equivariant: '{name}' of fn(gU) and g fn(U) differ by {error:.3g} "
                f"relative (allowed {limit:g})"
            )


def assert_invariant(
    fn: Callable[[Weights], Tensor],
    space: WeightSpace,
    weights: Mapping[str, Tensor],
    *,
    element: Element | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> None:
    """Assert that ``fn(gU) = fn(U)``; arguments as in `assert_equivariant`.

    >>> from transformer_nfn import spaces
    >>> space = spaces.multi_head(4, 2, 2, 2)
    >>> U = space.randn(1, dtype=torch.float64)
    >>> assert_invariant(lambda w: (w["W_Q"] @ w["W_K"].mT).sum(2), space, U)
    """
    space.check(weights)
    dtype = next(iter(weights.values())).dtype
    g = _element(space, element, dtype, seed)
    limit = TOLERANCE[dtype] if tolerance is None else tolerance
    error = relative_error(fn(g.act(weights)), fn(dict(weights)))
    if not error <= limit:
        raise AssertionError(
            f"not invariant: fn(gU) and fn(U) differ by {error:.3g} relative (allowed {limit:g})"
        )


def assert_same_function(
    target: Architecture | WeightSpace,
    U: Mapping[str, Tensor],
    V: Mapping[str, Tensor],
    *,
    forward: Forward | None = None,
    inputs: Inputs | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> None:
    """Assert that the forward gives equal outputs for ``U`` and ``V``.

    Args:
        target: an architecture, or a space (one that names an architecture, or with a forward).
        U: ``[batch, channels, *axes]``.
        V: likewise.
        forward: computes the networks, ``forward(weights, X)``; the reference by default.
        inputs: of the forward, `Vectors` or `Ids`; those of the architecture by default.
        tolerance: relative error allowed; by dtype by default.
        seed: of the random inputs.

    >>> from transformer_nfn import spaces
    >>> space = spaces.attention_block(4, 2, 2, 2, 3)
    >>> U = space.randn(1, dtype=torch.float64)
    >>> assert_same_function(space, U, space.group.random(max_condition=10).act(U))
    """
    architecture = runnable(target, forward, inputs)
    if architecture is None:
        assert isinstance(target, WeightSpace)
        architecture = architecture_of(target)  # raises with the reason
    for weights in (U, V):
        architecture.space.check(weights)
    first = next(iter(U.values()))
    limit = TOLERANCE[first.dtype] if tolerance is None else tolerance
    for trial in _trials(architecture, first, seed):
        error = relative_error(architecture.forward(V, trial), architecture.forward(U, trial))
        if not error <= limit:
            length = trial.shape[-2 if architecture.inputs.continuous else -1]
            raise AssertionError(
                f"not the same function: on {length} tokens the outputs differ by "
                f"{error:.3g} relative (allowed {limit:g})"
            )


def _trials(architecture: Architecture, like: Tensor, seed: int) -> list[Tensor]:
    """One input for each of the five shortest lengths, in the dtype of the weights."""
    generator = torch.Generator().manual_seed(seed)
    inputs = architecture.inputs
    drawn = [inputs.draw(1, n, generator=generator)[0] for n in sorted(inputs.lengths)[:5]]
    return [x.to(like) if inputs.continuous else x.to(like.device) for x in drawn]


def write_example_checkpoint(folder: str | Path, seed: int = 0) -> Path:
    """Write a random Llama of two blocks as model hubs store it, to try a command or a function on.

    >>> from transformer_nfn.checkpoints import open_model
    >>> with open_model(write_example_checkpoint("llama")) as model:
    ...     model.names["0.W_Q"]
    (2, 8, 4)
    """

    shapes = {"embed_tokens": (24, 8), "lm_head": (24, 8), "norm": (8,)}
    for block in ("layers.0", "layers.1"):
        shapes |= {f"{block}.self_attn.{part}_proj": (8, 8) for part in "qkvo"}
        shapes |= {f"{block}.mlp.{part}_proj": (16, 8) for part in ("gate", "up")}
        shapes |= {f"{block}.mlp.down_proj": (8, 16)}
        shapes |= {f"{block}.{norm}_layernorm": (8,) for norm in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(seed)
    weights = {
        f"{'' if name == 'lm_head' else 'model.'}{name}.weight": torch.randn(
            shape, generator=generator
        )
        for name, shape in shapes.items()
    }
    config = {
        "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 16, "vocab_size": 24,
    }  # fmt: skip
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "model.safetensors", weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def check_predictor(
    predictor: Any, *, options: Mapping[str, Any] | None = None, networks: Any = None, seed: int = 0
) -> None:
    """Assert what every predictor of built networks keeps, by training it for an epoch.

    Its predictions are finite numbers between 0 and 1 that depend neither on the batch nor on the
    order of the networks, nor change these; a predictor that was saved, or whose training was
    interrupted, gives the same; networks of another size are refused unless it reads any; and where
    its class says that it is ``invariant``, moved networks are predicted alike.

    >>> check_predictor("transformer_nfn", options={"channels": [2]})

    Args:
        predictor: a name, a reference, a class or a `Tabular`, as `prediction.train` takes it.
        options: of the predictor.
        networks: the `Parts` to train on; by default some that are made here.
        seed: of these networks, and of the elements that move them.
    """
    from transformer_nfn.models.own_module import declared
    from transformer_nfn.models.predictor import BUILT, find
    from transformer_nfn.prediction.predictors import predictor_builder, prepared
    from transformer_nfn.zoo import NetworkSizes

    name = declared(predictor)
    cls = find(name, BUILT)
    parts = example_networks(seed) if networks is None else networks
    build = predictor_builder(name, parts.train, dict(options or {}))
    fitted = _fitted(build, name, parts)
    test = prepared(fitted, parts.test)
    kept = test.network.map(torch.clone)
    found = fitted.predict(test.network)
    count = len(test)
    _assert(found.shape == (count,) and found.dtype == torch.float32, name, "one number each")
    _assert(bool(((found >= 0) & (found <= 1)).all()), name, "numbers between 0 and 1")
    changed = test.network.changed(kept)
    _assert(changed is None, name, f"'{changed}' left as it was")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    for what, rows in (("in another order", order), ("alone", order[:1]), ("by two", order[:2])):
        again = fitted.predict(prepared(fitted, parts.test.take(rows)).network)
        _assert(torch.allclose(again, found[rows], atol=1e-5), name, f"the same networks {what}")
    with tempfile.TemporaryDirectory() as folder:
        fitted.save(folder)
        stored = type(fitted).load(folder).predict(test.network)
    _assert(torch.equal(stored, found), name, "the same predictions after it was saved")
    if not hasattr(cls, "fit"):
        _assert_resumed(build, name, parts)
    if not cls.any_size:
        sizes = NetworkSizes(**_EXAMPLE)
        misfit = fitted.misfit(replace(sizes, blocks=3), sizes)
        _assert(misfit is not None, name, "networks of another size refused")
    if cls.invariant:
        moved = fitted.predict(prepared(fitted, _moved(parts.test, seed)).network)
        _assert(torch.allclose(moved, found, atol=1e-3), name, "moved networks predicted alike")


def check_zoo(zoo: Any, *, rows: int = 8, seed: int = 0) -> None:
    """Assert what every zoo keeps: intact weights, columns of its length, splits that divide runs.

    Weights are the same alone, together and in another order, and in a dataset that went to another
    process; rows that lack a target are in no dataset of it; parts of a split share no run.

    >>> check_zoo("mnist-sample")

    Args:
        zoo: a `Zoo`, its folder or its name.
        rows: how many rows are read, drawn at random.
        seed: of the draw and the split.
    """
    from transformer_nfn.zoo import Zoo

    opened = Zoo.open(zoo) if isinstance(zoo, str | Path) else zoo
    name, count = str(opened.path), len(opened)
    lengths = {column: len(values) for column, values in opened.table.items()}
    _assert({*lengths.values()} <= {count}, name, f"{count} values in each column, not {lengths}")
    _assert(not (found := opened.verify()), name, f"intact weights: {found[:1]}")
    parts = opened.split(seed=seed)
    _assert(sum(map(len, parts)) == count, name, "each row in one part of a split")
    runs = [{*opened.runs[part].tolist()} for part in parts]
    shared = [a & b for i, a in enumerate(runs) for b in runs[:i] if a & b]
    _assert(not shared, name, f"no run in two parts of a split: {shared[:1]}")
    chosen = np.random.default_rng(seed).permutation(count)[:rows]
    if opened.kind != "checkpoints":
        together = opened.batch(chosen).named
        backwards = opened.batch(chosen[::-1]).named
        for key, w in together.items():
            _assert(torch.equal(w.flip(0), backwards[key]), name, f"'{key}' in any order of rows")
    for target, values in opened.table.items():
        if values.dtype.kind != "f":
            continue
        dataset = opened.dataset(chosen, target)
        known = int((~np.isnan(values[chosen])).sum())
        _assert(len(dataset) == known, name, f"rows with a value of '{target}' in its dataset")
        if known and not opened.mixed:
            again = pickle.loads(pickle.dumps(dataset))
            (weights, value), (same, _) = dataset[0], again[0]
            _assert(float(value) == float(dataset.values[0].float()), name, f"'{target}' of a row")
            for key, w in weights.items():
                _assert(torch.equal(w, same[key]), name, f"'{key}' the same in another process")


_EXAMPLE = {
    "tokens": 4, "classes": 3, "patch": 4, "d_model": 8, "heads": 2, "d_ff": 6, "blocks": 2,
}  # fmt: skip
_COUNTS = (24, 8, 8)


def example_networks(seed: int = 0) -> Any:
    """Small random networks as `Parts`; the larger their classifier, the better they are."""
    from transformer_nfn.models import Batch
    from transformer_nfn.prediction.data import Dataset, Parts
    from transformer_nfn.zoo import NetworkSizes

    sizes = NetworkSizes(**_EXAMPLE)
    generator = torch.Generator().manual_seed(seed)
    made = []
    for part, count in enumerate(_COUNTS):
        skill = torch.rand(count, generator=generator)
        named = {}
        for name, shape in sizes.space.shapes.items():
            scale = 0.2 + skill if name.startswith("classifier") else torch.ones(count)
            noise = torch.randn(count, *shape, generator=generator)
            named[name] = 0.3 * scale.reshape(-1, *[1] * len(shape)) * noise
        columns = {"run": np.array([f"{part}-{i}" for i in range(count)]), "row": np.arange(count)}
        data = Dataset(sizes.block_space, Batch.of(named), skill, columns, sizes.tokens)
        made.append(data)
    return Parts(made[0], made[1], made[2])


def _fitted(build: Callable[[], Any], name: str, parts: Any) -> Any:
    """A predictor after one epoch, or after its own fit."""
    from transformer_nfn.prediction.protocol import Protocol
    from transformer_nfn.prediction.training import train_seeds

    made = build()
    if not hasattr(made, "fit"):
        return train_seeds(build, parts, Protocol.of(name, 1, 8), [0]).modules[0]
    held = parts.val.network, parts.val.accuracy
    made.fit(parts.train.network, parts.train.accuracy, validation=held, seed=0)
    return made


def _assert_resumed(build: Callable[[], Any], name: str, parts: Any) -> None:
    """A training of two epochs that was stopped behind the first ends with the same weights."""
    from transformer_nfn.prediction.protocol import Protocol
    from transformer_nfn.prediction.training import Execution, train_seeds

    def stop(line: Mapping[str, Any]) -> None:
        if line.get("epoch") == 2:
            raise InterruptedError

    protocol = Protocol.of(name, 2, 8)
    whole = train_seeds(build, parts, protocol, [0]).modules[0].state_dict()
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(InterruptedError):
            train_seeds(build, parts, protocol, [0], Execution(Path(folder), "", stop, 0.0))
        again = train_seeds(build, parts, protocol, [0], Execution(Path(folder))).modules[0]
    for key, w in again.state_dict().items():
        _assert(torch.equal(w, whole[key]), name, f"'{key}' as in a training without interruption")
        _assert(bool(w.isfinite().all()), name, f"'{key}' finite after the training")


def _moved(data: Any, seed: int) -> Any:
    """The networks with every block moved by a random element of its group."""
    moved: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    for i, block in enumerate(data.network.blocks()):
        g = data.block_space.group.random(generator, batch=len(data), max_condition=10.0)
        moved |= {f"blocks.{i}.{name}": w[:, 0] for name, w in g.act(block).items()}
    return replace(data, network=data.network.with_weights(moved))


def _assert(holds: bool, name: str, what: str) -> None:
    if not holds:
        raise AssertionError(f"'{name}': expected {what}")
