"""What do units see along the matrices between them? Fixed functions of entries, no parameters.

Each sublayer is one matrix around its own units: the rows are the units inside it, the columns the
units on both of its sides. So few large products carry all messages.

- attention: rows the stream it reads, columns that stream (QK) and the one it writes (VO), by head;
- mlp: rows its neurons, columns the stream it reads (W_Aᵀ) and the one it writes (W_B);
- classifier: rows its hidden units, columns the last stream (W_1ᵀ) and the classes (W_2);
- inputs: rows pixels, their bias and places, columns the first stream (embedding and positions).

Messages run along two functions of the entries, and each unit starts from statistics of its row or
column in each matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.nn.roles.normal import NormalForm, evenly_sized

KNEE = 0.04
"""The second function is 5 w for weights far smaller than this, and a signed root for larger."""

FUNCTIONS = 2
STATISTICS = 4
HEAD_STATISTICS = 2 * STATISTICS


@dataclass(frozen=True)
class Edges:
    """The matrices of one sublayer in all blocks side by side; b is networks times blocks.

    Attributes:
        values: ``[b, h, 2, I, J]``, for each head (one where there are none) both functions; the
            columns of all sides one after the other.
        sizes: how many columns each side has.
        rows: statistics of each row in each side, ``[b, h, I, 4 · sides]``.
        columns: for each side statistics of each column, ``[b, h, J, 4]``.
    """

    values: Tensor
    sizes: tuple[int, ...]
    rows: Tensor
    columns: tuple[Tensor, ...]


def edges_of(form: NormalForm) -> dict[str, Edges]:
    """The edges of a network, by sublayer; its positions must be known."""
    form = evenly_sized(form)
    assert form.positions is not None
    inputs = [x for x in (form.embedding, form.positions) if x is not None]
    return {
        "inputs": _inputs([x.unsqueeze(1) for x in inputs]),
        "attention": _edges([form.QK.flatten(0, 1), form.VO.flatten(0, 1)]),
        "mlp": _edges([x.flatten(0, 1).unsqueeze(1) for x in (form.A.mT, form.B)]),
        "classifier": _edges([x.unsqueeze(1) for x in (form.W_1.mT, form.W_2)]),
    }


def head_statistics(edges: Edges) -> Tensor:
    """What a head starts from, ``[b, h, 8]``: QK and VO as a whole, and the trace of QK."""
    QK = edges.values[..., : edges.sizes[0]]
    trace = QK.diagonal(dim1=-2, dim2=-1).mean(-1)
    # QK is centred, so that its trace says more than its mean.
    means = edges.rows.mean(-2)
    return torch.cat([trace, means[..., 2:STATISTICS], means[..., STATISTICS:]], -1)


def both_functions(x: Tensor) -> Tensor:
    """Of biases, ``[…]`` to ``[…, 2]``."""
    return torch.stack([x, steep(x)], -1)


def steep(x: Tensor) -> Tensor:
    """``w / √(|w| + 0.04)``: tells small weights apart and tames large ones."""
    return x / (x.abs() + KNEE).sqrt()


def _edges(sides: Sequence[Tensor]) -> Edges:
    """Of matrices ``[b, h, I, J]`` with the same rows."""
    sizes = tuple(x.shape[-1] for x in sides)
    powers = _powers(torch.cat(list(sides), -1))
    each_side = zip(*(x.split(sizes, -1) for x in powers), strict=True)
    return Edges(
        values=torch.stack(powers[:FUNCTIONS], 2),
        sizes=sizes,
        rows=torch.cat([_statistics(x, -1) for x in each_side], -1),
        columns=_statistics(powers, -2).split(sizes, -2),
    )


def _inputs(parts: Sequence[Tensor]) -> Edges:
    """Of matrices ``[n, 1, I, D]`` with the same columns; only these ask for statistics."""
    sizes = tuple(x.shape[-2] for x in parts)
    powers = _powers(torch.cat(list(parts), -2))
    each_part = zip(*(x.split(sizes, -2) for x in powers), strict=True)
    columns = torch.cat([_statistics(x, -2) for x in each_part], -1)
    values = torch.stack(powers[:FUNCTIONS], 2)
    return Edges(values, (values.shape[-1],), values.new_zeros(0), (columns,))


def _powers(x: Tensor) -> list[Tensor]:
    """Entry by entry the two functions, the square and the fourth power."""
    squares = x.square()
    return [x, steep(x), squares, squares.square()]


def _statistics(powers: Sequence[Tensor], axis: int) -> Tensor:
    """Means of both functions along an axis, and the logarithms of two norms, ``[…, 4]``."""
    plain, rooted, squares, fourth = (x.mean(axis) for x in powers)
    spread, peak = 0.5 * torch.log(squares + 1e-6), 0.25 * torch.log(fourth + 1e-9)
    return torch.stack([plain, rooted, spread, peak], -1)
