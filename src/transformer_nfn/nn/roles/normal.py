"""What is left of a whole network once LayerNorm and ReLU have discarded what they discard?

- A LayerNorm reads nothing of the mean of what is written to it, and what it writes has mean
  zero: every matrix is centred along the stream axes it reads or writes.
- A LayerNorm reads nothing of the scale: all heads' W_O together, and W_B with b_B together, are
  divided by the root mean square of what they write, and only the logarithm of that is kept aside.
- A ReLU passes positive scales on: each neuron's incoming weights and bias are divided by their
  norm, its outgoing weights multiplied by it. The same for the classifier's hidden units.
- Logits count up to a common number: W_2 and b_2 are centred over the classes.

What is dead is left out, or what rounding left of it would be scaled up to the size of the rest: a
neuron whose path in and out is a thousandth of its layer's, and what is written too small for a
LayerNorm to see beside its ε.

Two networks that differ by any of these have one normal form, exactly. (A LayerNorm's ε keeps the
two functions themselves a little apart.) What is left are permutations of streams, neurons, hidden
units and heads, and an invertible matrix for each head's QK and VO, which the products do not see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError

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
"""What is written at this size a LayerNorm does not scale up: ε is far larger."""
DEAD = 1e-3
"""A neuron whose path in and out is this share of its layer's says nothing."""
CLASSIFIER_AXES = {"W_1": "D H", "b_1": "H", "W_2": "H C", "b_2": "C"}
EMBEDDING_AXES = {"W": "P D", "b": "D"}


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
        log_scales: ``[n, L, 2]``, the logarithms of what V O and B, b_B were divided by. Not
            invariant: LayerNorm discards these scales.
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
    log_scales: Tensor

    @property
    def QK(self) -> Tensor:
        """Scores between units of a stream, ``[n, L, h, D, D]``."""
        # Batched products with a transposed right side are slow on some processors.
        return self.Q @ self.K.mT.contiguous()

    @property
    def VO(self) -> Tensor:
        """What a head moves from one stream to the next, ``[n, L, h, D, D]``."""
        return self.V @ self.O


def normal_form(network: Mapping[str, Any], positions: Tensor | None = None) -> NormalForm:
    """The network without what LayerNorm and ReLU discard.

    Args:
        network: a dict with ``blocks`` (a list of dicts of ``W_Q`` … ``b_B``, each ``[n, 1,
            *axes]``), ``classifier`` (``W_1``, ``b_1``, ``W_2``, ``b_2``, each ``[n, *axes]``)
            and, unless it reads word vectors, ``embedding`` (``W``, ``b``). Blocks have one shape.
        positions: the constant ``[tokens, D]`` added to the first stream, or ``[n, tokens, D]``.
    """
    blocks, classifier, embedding = _checked(network)
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
        embedding=None if embedding is None else _centred(_with_bias(embedding), -1),
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
        log_scales=torch.cat([VO_scale.flatten(2), B_scale.flatten(2)], -1).log(),
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


def _checked(
    network: Mapping[str, Any],
) -> tuple[Sequence[Mapping[str, Tensor]], Mapping[str, Tensor], Mapping[str, Tensor] | None]:
    """The three parts of a network; refuses one whose shapes do not fit together."""
    blocks = network.get("blocks")
    if not isinstance(blocks, Sequence) or len(blocks) == 0:
        raise SpaceError("a whole network needs 'blocks', a list of at least one weight dict")
    sizes: dict[str, int] = {}
    for i, block in enumerate(blocks):
        _check_part(f"blocks.{i}", block, BLOCK_AXES, sizes, ("n", "channel"))
    if sizes["channel"] != 1:
        raise SpaceError(f"weights of blocks must have one channel, found {sizes['channel']}")
    classifier, embedding = network.get("classifier"), network.get("embedding")
    _check_part("classifier", classifier, CLASSIFIER_AXES, sizes, ("n",))
    if embedding is not None:
        _check_part("embedding", embedding, EMBEDDING_AXES, sizes, ("n",))
    assert isinstance(classifier, Mapping)
    return blocks, classifier, embedding


def _check_part(
    part: str, tensors: Any, axes: Mapping[str, str], sizes: dict[str, int], lead: tuple[str, ...]
) -> None:
    """Notes the sizes of axes seen first, and refuses a tensor that contradicts them."""
    if not isinstance(tensors, Mapping):
        raise SpaceError(
            f"a whole network needs '{part}' as a dict of tensors, found {type(tensors).__name__}"
        )
    for name, words in axes.items():
        if name not in tensors:
            raise SpaceError(f"tensor '{part}.{name}' is missing")
        names, shape = (*lead, *words.split()), tensors[name].shape
        if len(shape) != len(names):
            raise SpaceError(
                f"tensor '{part}.{name}' must have the axes [{', '.join(names)}], "
                f"found {list(shape)}"
            )
        for axis, size in zip(names, shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise SpaceError(
                    f"axis {axis} of tensor '{part}.{name}' must have {sizes[axis]} entries as "
                    f"elsewhere in the network, found {size}"
                )
