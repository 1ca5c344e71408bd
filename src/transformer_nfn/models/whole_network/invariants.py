"""Invariants of a whole network, the same number of them for networks of any size.

First the network is brought to a normal form, without what LayerNorm and ReLU discard:

- A LayerNorm discards the mean of its input, and its output has mean zero: every matrix is centred
  along the stream axes it reads or writes.
- A LayerNorm discards the scale of its input: all heads' W_O together, and W_B with b_B together,
  are divided by the root mean square of what they write.
- A ReLU passes positive scales on: each neuron's incoming weights and bias are divided by their
  norm, its outgoing weights multiplied by it. The same for the classifier's hidden units.
- Logits count up to a common number: W_2 and b_2 are centred over the classes.

Dead parts are set to zero, or rounding errors would be scaled up to the size of the rest: neurons
whose path in and out is a thousandth of their layer's, and outputs too small for a LayerNorm to see
beside its ε. Networks that differ by any of these have one normal form, exactly (their functions
differ slightly by LayerNorm's ε). Permutations of streams, neurons, hidden units and heads remain,
and an invertible matrix for each head's QK and VO, which the products do not contain.

Then statistics of entries and of norms, and quantiles of the logarithms of singular values, are
taken of the matrices and of products along the axes between them. Heads are summarised by their
mean, the weakest and the strongest; blocks by their mean, the first and the last. Not complete:
networks with equal invariants need not be equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError
from transformer_nfn.models.batch import Batch
from transformer_nfn.models.statistics import COUNT, sorted_statistics
from transformer_nfn.processes import map_rows

CHUNK = 64
"""Networks at a time: products of all heads lie in memory together."""
SPECTRUM = 6
"""Quantiles of the logarithms of singular values, the largest and the smallest among them."""
FLOOR = 1e-3
"""Share of the largest singular value below which they flatten out, or rounding would show."""
IDLE = 1e-3
"""Size of the entries of a product below which logarithms flatten out."""
BLOCK_AXES = {
    "W_Q": "h D d",
    "W_K": "h D d",
    "W_V": "h D v",
    "W_O": "h v D",
    "W_A": "D F",
    "b_A": "F",
    "W_B": "F D",
    "b_B": "D",
}
UNSEEN = 1e-6
"""Size of an output that a LayerNorm does not scale up: its ε is far larger."""
DEAD = 1e-3
"""Share of its layer's path in and out below which a neuron is dead."""
CLASSIFIER_AXES = {"W_1": "D H", "b_1": "H", "W_2": "H C", "b_2": "C"}
EMBEDDING_AXES = {"W": "P D", "b": "D"}


@torch.no_grad()
def whole_invariants(batch: Batch, positions: Tensor | None = None) -> Tensor:
    """Features that networks of the same function share, up to LayerNorm's ε.

    >>> from transformer_nfn.functional import small_transformer
    >>> space = small_transformer(tokens=4, classes=3, patch=2, d_model=8).space
    >>> named = {name: w[:, 0] for name, w in space.randn(5).items()}
    >>> whole_invariants(Batch.of(named)).shape[0]
    5

    Args:
        batch: networks with blocks, classifier and, unless they read word vectors, embedding.
        positions: the constant ``[tokens, D]`` added to the first stream, or one for each network
            ``[n, tokens, D]``; None leaves them out.

    Returns:
        ``[n, F]`` in float64. F depends only on whether there are an embedding and positions.
    """
    form = evenly_sized(normal_form(batch.to(torch.float64), positions))
    return map_rows(lambda rows: torch.cat(_features(_cut(form, rows)), -1), form.A, CHUNK)


def _features(form: NormalForm) -> list[Tensor]:
    """Each ``[n, f]``."""
    found = [_over_blocks(_heads(x, y)) for x, y in _head_products(form)]
    found += [_over_blocks(x) for x in _mlp_features(form)]
    found += [_over_blocks(_heads(x, y)) for x, y in _products_between_blocks(form)]
    found += [_over_heads(_heads(x, y)[:, 0]) for x, y in _products_with_inputs(form)]
    return [*found, *_classifier_features(form)]


def _head_products(form: NormalForm) -> list[tuple[Tensor, Tensor]]:
    """QK, VO and VO·A of each head as factors ``[n, L, h, I, d]`` and ``[n, L, h, J, d]``."""
    after = _times(form.O, form.A.unsqueeze(2))
    return [(form.Q, form.K), (form.V, form.O.mT), (form.V, after.mT)]


def _products_between_blocks(form: NormalForm) -> list[tuple[Tensor, Tensor]]:
    """Products of neurons with the heads of the next block: B·QK, B·KQ, B·QK·Bᵀ and B·VO."""
    B = form.B[:, :-1].unsqueeze(2)
    BQ, BK, BV = (_times(B, x[:, 1:]) for x in (form.Q, form.K, form.V))
    return [(BQ, form.K[:, 1:]), (BK, form.Q[:, 1:]), (BQ, BK), (BV, form.O[:, 1:].mT)]


def _products_with_inputs(form: NormalForm) -> list[tuple[Tensor, Tensor]]:
    """The same products of embedding and positions with the heads of the first block."""
    Q, K, V, O = (x[:, :1] for x in (form.Q, form.K, form.V, form.O))  # noqa: E741
    inputs = [x[:, None, None] for x in (form.embedding, form.positions) if x is not None]
    found = []
    for x in inputs:
        xQ, xK, xV = (_times(x, y) for y in (Q, K, V))
        found += [(xQ, xK), (xQ, K), (xK, Q), (xV, O.mT)]
    if len(inputs) == 2:  # scores of patches with positions, and of positions with patches
        patch, place = inputs
        found += [(_times(patch, Q), _times(place, K)), (_times(place, Q), _times(patch, K))]
    return found


def _mlp_features(form: NormalForm) -> list[Tensor]:
    """Features of the matrices of each MLP, their product, its neurons and biases."""
    out_norm = form.B.square().mean(-1).sqrt()
    in_norm = form.A.square().mean(-1).sqrt()
    return [
        _matrix(form.A),
        _matrix(form.B),
        _matrix(_times(form.A, form.B)),
        *(sorted_statistics(x) for x in (form.b_A, form.b_B, out_norm, in_norm)),
        sorted_statistics(form.b_A * out_norm),
    ]


def _classifier_features(form: NormalForm) -> list[Tensor]:
    last = form.B[:, -1]
    hidden = _times(last, form.W_1)
    out_norm = form.W_2.square().mean(-1).sqrt()
    matrices = (form.W_1, form.W_2, _times(form.W_1, form.W_2), hidden, _times(hidden, form.W_2))
    bias = (form.b_B[:, -1:] @ form.W_1).squeeze(1)
    # Norm of each class: the smallest indicates a class that is never predicted.
    class_norm = form.W_2.square().mean(-2).sqrt()
    vectors = (form.b_1, form.b_2, out_norm, class_norm, bias, form.b_1 * out_norm)
    found = [_matrix(x) for x in matrices] + [sorted_statistics(x) for x in vectors]
    if form.embedding is not None:
        found.append(_matrix(form.embedding))
        found.append(sorted_statistics(form.embedding[:, -1]))
    return found


def _heads(left: Tensor, right: Tensor) -> Tensor:
    """Features of X Yᵀ of each head ``[…, h, f]``, the logarithm of its norm first."""
    if left.numel() == 0:  # a single block has nothing between blocks
        return left.new_zeros(*left.shape[:-2], 1 + COUNT + SPECTRUM)
    product = left @ right.mT
    norm = (product.square().mean((-2, -1)) + IDLE**2).log() / 2
    # Orthonormal columns on either side do not change the singular values.
    left, right = (torch.linalg.qr(x, mode="r").R for x in (left, right))
    spectrum = _spectrum(left @ right.mT, product.shape[-2] * product.shape[-1])
    return torch.cat([norm.unsqueeze(-1), _statistics(product), spectrum], -1)


def _matrix(x: Tensor) -> Tensor:
    """Statistics of the entries ``[…, I, J]``, and the spectrum."""
    return torch.cat([_statistics(x), _spectrum(x, x.shape[-2] * x.shape[-1])], -1)


def _statistics(x: Tensor) -> Tensor:
    return sorted_statistics(x.flatten(-2))


def _spectrum(x: Tensor, entries: int) -> Tensor:
    """Quantiles of the logarithms of singular values in descending order, ``[…, SPECTRUM]``.

    ``entries`` is the number of entries of the matrix that has these singular values.
    """
    gram = x.mT @ x if x.shape[-1] <= x.shape[-2] else x @ x.mT
    squares = eigenvalues(gram).flip(-1).clamp(min=0)
    least = FLOOR**2 * squares[..., :1] + IDLE**2 * entries
    logs = (squares + least).log() / 2
    last, found = logs.shape[-1] - 1, []
    for i in range(SPECTRUM):
        place = i / (SPECTRUM - 1) * last
        low = int(place)
        high, share = min(low + 1, last), place - low
        found.append(logs[..., low] * (1 - share) + logs[..., high] * share)
    return torch.stack(found, -1)


def eigenvalues(gram: Tensor) -> Tensor:
    """Eigenvalues of symmetric matrices, NaN of those that are not finite.

    A GPU solver fails on some that a CPU's solves.
    """
    finite = gram.isfinite().all((-2, -1))
    gram = torch.where(finite[..., None, None], gram, 0)
    try:
        values = torch.linalg.eigvalsh(gram)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        values = torch.linalg.eigvalsh(gram.cpu()).to(gram.device)
    return torch.where(finite[..., None], values, torch.nan)


def _over_heads(x: Tensor) -> Tensor:
    """``[…, h, f]`` to ``[…, 3 f]``: the mean, and the heads of smallest and largest norm."""
    order = x[..., 0].argsort(-1)
    ends = order[..., [0, -1]].unsqueeze(-1)
    weakest, strongest = torch.take_along_dim(x, ends, -2).unbind(-2)
    return torch.cat([x.mean(-2), weakest, strongest], -1)


def _over_blocks(x: Tensor) -> Tensor:
    """``[n, L, f]``, heads or not, to ``[n, 3 f]``: the mean, the first and the last.

    Zeros where there is a single block and nothing between blocks.
    """
    x = _over_heads(x) if x.ndim == 4 else x
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0], 3 * x.shape[2])
    return torch.cat([x.mean(1), x[:, 0], x[:, -1]], -1)


def _times(x: Tensor, y: Tensor) -> Tensor:
    """The product, of the same order of magnitude for any width."""
    out: Tensor = x @ y / x.shape[-1] ** 0.5
    return out


def _cut(form: NormalForm, rows: slice) -> NormalForm:
    parts = {name: None if x is None else x[rows] for name, x in vars(form).items()}
    return NormalForm(**parts)  # type: ignore[arg-type]


@dataclass(frozen=True)
class NormalForm:
    """A batch of networks in normal form; n networks, L blocks, h heads, D wide.

    Attributes:
        embedding: ``[n, patch + 1, D]``, the bias as last row; None for word vectors.
        positions: ``[n, tokens, D]``, or None where they are not known.
        Q: ``[n, L, h, D, d]``, divided by √d, so that ``Q Kᵀ`` gives the scores.
        K: ``[n, L, h, D, d]``.
        V: ``[n, L, h, D, v]``.
        O: ``[n, L, h, v, D]``.
        A: ``[n, L, D, F]``.
        b_A: ``[n, L, F]``; each column of A and its b_A have norm 1 together, 0 if dead.
        B: ``[n, L, F, D]``.
        b_B: ``[n, L, D]``.
        W_1: ``[n, D, H]``.
        b_1: ``[n, H]``; with the column of W_1 of norm 1, 0 if dead.
        W_2: ``[n, H, classes]``.
        b_2: ``[n, classes]``.
    """

    embedding: Tensor | None
    positions: Tensor | None
    Q: Tensor
    K: Tensor
    V: Tensor
    O: Tensor  # noqa: E741, the paper's name
    A: Tensor
    b_A: Tensor
    B: Tensor
    b_B: Tensor
    W_1: Tensor
    b_1: Tensor
    W_2: Tensor
    b_2: Tensor


def normal_form(batch: Batch, positions: Tensor | None) -> NormalForm:
    """The network without what LayerNorm and ReLU discard.

    Args:
        batch: networks with blocks of one shape, classifier and, unless they read word vectors,
            embedding.
        positions: the constant ``[tokens, D]`` added to the first stream, or ``[n, tokens, D]``.
    """
    _check(batch)
    blocks, classifier, embedding = (
        batch.blocks(),
        batch.part("classifier"),
        batch.part("embedding"),
    )
    w = {name: torch.stack([block[name][:, 0] for block in blocks], 1) for name in BLOCK_AXES}
    n, D = w["W_B"].shape[0], w["W_B"].shape[-1]

    output = _centred(w["W_O"], -1)
    V = _centred(w["W_V"], -2)
    VO_scale = _safe(_root_mean_square(V @ output, (-3, -2, -1)))
    A, b_A, B = _unit_neurons(w["W_A"], w["b_A"], w["W_B"])
    b_B = _centred(w["b_B"], -1)
    written = torch.cat([B, b_B.unsqueeze(-2)], -2)
    B_scale = _safe(_root_mean_square(written, (-2, -1)))
    W_1, b_1, W_2 = _unit_neurons(*(classifier[name] for name in ("W_1", "b_1", "W_2")))
    return NormalForm(
        embedding=_centred(_with_bias(embedding), -1) if embedding else None,
        positions=None if positions is None else _centred(_positions(positions, n, D, V), -1),
        Q=_centred(w["W_Q"], -2) / w["W_Q"].shape[-1] ** 0.5,
        K=_centred(w["W_K"], -2),
        V=V,
        O=output / VO_scale,
        A=A,
        b_A=b_A,
        B=B / B_scale,
        b_B=b_B / B_scale.squeeze(-1),
        W_1=W_1,
        b_1=b_1,
        W_2=W_2,
        b_2=_centred(classifier["b_2"], -1),
    )


def evenly_sized(form: NormalForm) -> NormalForm:
    """The same with entries of one order of magnitude in networks of any width."""
    D, H = form.W_1.shape[-2:]
    return replace(
        form,
        Q=form.Q * D,
        A=form.A * D**0.5,
        W_1=form.W_1 * D**0.5,
        W_2=form.W_2 * H**0.5,
    )


def _unit_neurons(weights: Tensor, bias: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Centred incoming weights ``[…, D, F]`` and biases of norm 1, outgoing ones that took it up.

    Incoming weights of dead neurons become zero, smoothly, by what no scale can change.
    """
    weights = _centred(weights, -2)
    norm = (weights.square().sum(-2) + bias.square()).sqrt()
    out = _centred(out * norm.unsqueeze(-1), -1)
    path = out.square().mean(-1)
    alive = path / _safe(path + DEAD**2 * path.mean(-1, keepdim=True), 0.0)
    unit = alive / _safe(norm, 0.0)
    return weights * unit.unsqueeze(-2), bias * unit, out


def _centred(x: Tensor, axis: int) -> Tensor:
    return x - x.mean(axis, keepdim=True)


def _root_mean_square(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return x.square().mean(axes, keepdim=True).sqrt()


def _safe(scale: Tensor, least: float = UNSEEN) -> Tensor:
    """The scale, and 1 where there is nothing to scale."""
    return torch.where(scale > least, scale, torch.ones_like(scale))


def _with_bias(embedding: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([embedding["W"], embedding["b"].unsqueeze(-2)], -2)


def _positions(positions: Tensor, n: int, D: int, like: Tensor) -> Tensor:
    if positions.ndim not in (2, 3) or positions.shape[-1] != D:
        raise SpaceError(
            f"positions must be [tokens, {D}] or [networks, tokens, {D}], "
            f"found {list(positions.shape)}"
        )
    if positions.ndim == 3 and positions.shape[0] not in (1, n):
        raise SpaceError(f"positions must be of 1 or {n} networks, found {positions.shape[0]}")
    return positions.to(like).expand(n, -1, -1)


def _check(batch: Batch) -> None:
    """Refuse networks that lack a tensor, or whose shapes do not fit together."""
    shapes, sizes = batch.layout.shapes, dict[str, int]()
    parts = {f"blocks.{i}": BLOCK_AXES for i in range(batch.layout.depth)}
    if not parts:
        raise SpaceError("a whole network needs at least one block, 'blocks.0.…', found none")
    parts["classifier"] = CLASSIFIER_AXES
    if batch.layout.part("embedding") is not None:
        parts["embedding"] = EMBEDDING_AXES
    for name, words in (
        (f"{p}.{n}", words) for p, axes in parts.items() for n, words in axes.items()
    ):
        if name not in shapes:
            raise SpaceError(f"tensor '{name}' is missing")
        if len(shapes[name]) != len(words.split()):
            raise SpaceError(
                f"tensor '{name}' must have the axes [{', '.join(words.split())}], found "
                f"{list(shapes[name])}"
            )
        for axis, size in zip(words.split(), shapes[name], strict=True):
            if sizes.setdefault(axis, size) != size:
                raise SpaceError(
                    f"axis {axis} of tensor '{name}' must have {sizes[axis]} entries as elsewhere "
                    f"in the network, found {size}"
                )
