"""Invariant numbers of what stands before the first block and after the last one.

Each table (tokens, positions, outputs, pooler) is summed over all its rows with fixed signs, and
the sums are read by the frame: every row counts, and so does the size of the table. Vectors may
move between tables that are added to each other, so their means count only as one sum. The final
norm is folded into the tables that read it; tensors that nothing acts on are projected as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.checkpoints.fingerprints.frame import Frame, signs
from transformer_nfn.checkpoints.fingerprints.rows import Row, added, products
from transformer_nfn.checkpoints.reduced import Reduced, Table
from transformer_nfn.checkpoints.stream import ROWS, shifted
from transformer_nfn.functional.description import KEPT
from transformer_nfn.functional.transformer import activation
from transformer_nfn.symmetry.sketch import sketch

ENDS = (
    "embedding", "position", "token type", "input constant", "input norm", "head", "head bias",
    "pooler", "pooler bias", "other tensors",
)  # fmt: skip
"""Rows of the ends. ``head`` has the final norm in it, or is it where the stream is the output."""
END_NUMBERS = 24
"""Numbers of each."""


def end_rows(model: Reduced, frame: Frame) -> tuple[Row, ...]:
    """The rows of `ENDS`."""
    rows: dict[str, list[Row]] = {name: [] for name in ENDS}
    z = frame.vectors[:END_NUMBERS].double()

    def add(name: str, row: Row, bias: Row | None) -> None:
        rows[name].append(row)
        if bias is not None:
            rows[f"{name} bias"].append(bias)

    for table in model.tables():
        movable = shifted(model, table.name)
        sums = _sums(table, centred=movable)
        add(_slot(table.name), sums.read(z), sums.bias)
        if movable:
            rows["input constant"].append(sums.read_mean(z))
    output = model.output()
    if output is not None:
        sums = _sums(output, centred=False)
        add("head", sums.read(z), sums.bias)
    masked = _masked_head(model, z)
    if masked is not None:
        add("head", *masked)
    for gain in model.vectors().values():
        values = (z * z.roll(1, 0)) @ gain.value.double()
        rows["input norm"].append(Row(values, float(gain.error) * len(z)))
    joined = {
        name: added((row.moved(frame.error) for row in found), END_NUMBERS)
        for name, found in rows.items()
    }
    joined["other tensors"] = added(_kept(model), END_NUMBERS)
    return tuple(joined[name] for name in ENDS)


def _slot(table: str) -> str:
    """The row a table belongs to."""
    names = {"token": "embedding", "patch": "embedding", "type": "token type"}
    return "pooler" if table.startswith("extra.") else names.get(table, table)


@dataclass(frozen=True)
class _Sums:
    """Sums of the rows of a table with signs.

    Attributes:
        sums: ``[n, D]``.
        error: expected square of the error of one sum's length.
        mean: ``[D]`` of all rows.
        count: of rows.
        bias: sums of the biases that belong to the rows, or None.
    """

    sums: Tensor
    error: float
    mean: Tensor
    count: int
    bias: Row | None

    def read(self, z: Tensor) -> Row:
        """The sums as the frame reads them."""
        error = torch.as_tensor(self.error / z.shape[1])
        return products(self.sums, z, error, torch.zeros(()))

    def read_mean(self, z: Tensor) -> Row:
        """The mean as the frame reads it."""
        return Row(z @ self.mean, self.error / self.count**2 * len(z))


def _sums(table: Table, *, centred: bool) -> _Sums:
    """Sums over all rows; ``centred``: over what they are beside their mean."""
    sums, mean, total, error = None, None, torch.zeros(END_NUMBERS).double(), 0.0
    biases: list[Row] = []
    for start in range(0, len(table), ROWS):
        stop = min(start + ROWS, len(table))
        rows, drawn = table.rows(start, stop), signs(table.name, start, stop - start, END_NUMBERS)
        part, part_mean = (drawn.to(rows.value) @ rows.value).double(), rows.value.sum(0).double()
        sums = part if sums is None else sums + part
        mean = part_mean if mean is None else mean + part_mean
        total += drawn.sum(1).double()
        error += float(rows.error.sum())
        bias = table.biases(start, stop)
        if bias is not None:
            values = (drawn.to(bias.value) @ bias.value).double()
            biases.append(Row(values, float(bias.error.sum()) * END_NUMBERS))
    assert sums is not None
    assert mean is not None
    mean /= len(table)
    if centred:
        sums -= torch.outer(total, mean)
    bias_row = added(biases, END_NUMBERS) if biases else None
    return _Sums(sums, error, mean, len(table), bias_row)


def _masked_head(model: Reduced, z: Tensor) -> tuple[Row, Row | None] | None:
    """BERT's head, ``norm(φ(z W + b))`` times the sums of the output matrix; and its bias."""
    head = model.masked_head()
    if head is None or model.about.mlm is None:
        return None
    W, b, table = head
    hidden = activation(model.about.mlm)(z @ W.value.double() + b.value.double())
    if model.about.norm == "layer":
        hidden = hidden - hidden.mean(-1, keepdim=True)
    size = hidden.square().mean(-1, keepdim=True).clamp_min(1e-300).sqrt()
    sums = _sums(table, centred=False)
    error = torch.as_tensor(sums.error / hidden.shape[1])
    row = products(hidden / size, sums.sums, (W.error + b.error) / size.square(), error)
    return row, sums.bias


def _kept(model: Reduced) -> Iterator[Row]:
    """Tensors that nothing acts on, large ones not much louder than small ones."""
    for name in model.names:
        if name.startswith(KEPT):
            value = model.model[name].double().flatten()
            numbers = sketch(value, (0,), END_NUMBERS, f"print {name}")
            size = float(torch.linalg.vector_norm(value))
            row = Row(numbers, model.unit * size**2 * END_NUMBERS)
            yield row.times(max(size, 1e-300) ** -0.5)
