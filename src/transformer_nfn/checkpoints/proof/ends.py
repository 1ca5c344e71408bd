"""Ends of two models: their output heads, and checks of embeddings, positions and outputs.

Tokens, positions and types are added to each other, so a vector may move between them: all but
one take the shift that fits them best, and the last one has to make up for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from transformer_nfn.checkpoints.families import Model
from transformer_nfn.checkpoints.pieces import Piece, Table, filled
from transformer_nfn.checkpoints.proof.checks import Check, Squares, check
from transformer_nfn.checkpoints.reduced import INPUTS, Reduced
from transformer_nfn.checkpoints.stream import acting, common_pieces
from transformer_nfn.checkpoints.symmetries import StreamMap, added_sites
from transformer_nfn.checkpoints.symmetries.base import block_parts
from transformer_nfn.functional.description import EXTRA, KEPT, Transformer
from transformer_nfn.spaces.actions.permutation import match_rows

ALWAYS, BOTH_STATED = "always", "both stated"
OUTPUT_SETTINGS = {
    "mlm": "head", "pooler": "extra.pooler", "pooling": "head", "classifier": "classifier",
    "padding": "head", "end_token": BOTH_STATED, "start_token": BOTH_STATED,
    "sentence_pooling": ALWAYS,
}  # fmt: skip
"""Settings of a description that outputs depend on, and the head for which they are compared.

Those of any output are compared always, or where both models state them.
"""


@dataclass(frozen=True)
class Outputs:
    """Output heads of two models, compared by name and size.

    Attributes:
        common: heads of one shape in both: ``head``, ``extra.pooler``, ``kept.classifier.weight``.
        single: heads that only one of the two has.
        resized: heads that both have in different sizes, with these sizes.
        comparable: both have an output of the same meaning and size: logits of a common head,
            or the final stream of two models without a head.
        unlike: heads that both have and compute differently, a sentence each.
    """

    common: frozenset[str]
    single: tuple[str, ...]
    resized: Mapping[str, tuple[object, object]]
    comparable: bool
    unlike: tuple[str, ...] = ()

    def mismatch(self) -> str | None:
        """Reason why the outputs cannot agree; None where those in common may."""
        if self.unlike:
            return "; ".join(self.unlike)
        if self.resized:
            shown = (f"{name} ({x} and {y})" for name, (x, y) in self.resized.items())
            return f"outputs have different sizes: {', '.join(shown)}"
        if self.comparable:
            return None
        return f"they give no output in common: only one of the two has {', '.join(self.single)}"


def compare_outputs(A: Model, B: Model) -> Outputs:
    """Compare the output heads of two models."""
    a, b = _heads(A), _heads(B)
    resized = {name: (a[name], b[name]) for name in a if name in b and a[name] != b[name]}
    single = sorted(a.keys() ^ b.keys())
    unlike = []
    for setting, head in OUTPUT_SETTINGS.items():
        x, y = (getattr(model.description, setting) for model in (A, B))
        compared = {ALWAYS: True, BOTH_STATED: None not in (x, y)}
        if x == y or not compared.get(head, head in a and head in b):
            continue
        if setting == "mlm" and None in (x, y):
            single.append("head")  # one reads the stream, the other a transform of it
        else:
            of = "output" if head in compared else head
            unlike.append(f"{of}: {setting} is {x} in one, {y} in the other")
    common = frozenset(a.keys() & b.keys()) - resized.keys() - set(single)
    outputs = ("head", "classifier", "extra.decoder")
    logits = any(name in outputs or name.startswith(KEPT) for name in common)
    streams = A.description.headless and B.description.headless
    vectors = not a and not b
    return Outputs(common, tuple(single), resized, logits or streams or vectors, tuple(unlike))


def _heads(model: Model) -> dict[str, object]:
    """Sizes of the output heads by name."""
    names, heads = model.names, dict[str, object]()
    if "head" in names:
        heads["head"] = names["head"][1]
    elif model.description.tied:
        heads["head"] = model.description.vocab
    if "classifier.W_B" in names:
        heads["classifier"] = names["classifier.W_B"][1]
    for name, shape in names.items():
        if name.startswith(EXTRA) and name.endswith(".W"):
            heads[name.removesuffix(".W")] = shape[1]
        elif name.startswith(KEPT) and not keeps_inputs(model.description):
            heads[name] = list(shape)
    return heads


def keeps_inputs(config: Transformer) -> bool:
    """Whether tensors that nothing acts on may stand before the blocks, not only after them."""
    return config.inputs in ("vectors", "audio") or config.has("kept.token")


def is_output(name: str, config: Transformer) -> bool:
    """Whether a check belongs to an output head, and not to blocks or embeddings.

    The output matrix of a tied model is its token embedding behind the last norm, unless it
    reads a transform of the stream (BERT).
    """
    if name in ("head", "head_bias"):
        return not config.tied or "head" in config.tensors or config.mlm is not None
    if name.startswith(KEPT):
        return not keeps_inputs(config)
    return name.startswith((EXTRA, "classifier."))


def table_shifts(A: Reduced, B: Reduced, stream: StreamMap) -> dict[str, Piece]:
    """Vectors added to each table on the way from A to B; those of a stack add up to zero.

    A shift has the rounding error of the means that it comes from: a row of zeros has none.
    """
    first, last = ([n for n in names if n in B.names] for names in A.description.added)
    shifts: dict[str, Piece] = {}
    for name in first if last else ():
        a, b = (_mean(side.table(name)) for side in (A, B))
        shifts[name] = Piece(b.value - stream(a.value), a.error + b.error)
    if not shifts:
        return {}
    total, error = (
        torch.stack([getattr(shift, part) for shift in shifts.values()]).sum(0)
        for part in ("value", "error")
    )
    return shifts | dict.fromkeys(last, Piece(-total, error))


def _mean(table: Table) -> Piece:
    sums = []
    for start, stop in common_pieces(table, table):
        rows = table.rows(start, stop)
        sums.append((rows.value.sum(0), rows.error.sum()))
    value, error = (torch.stack(parts).sum(0) for parts in zip(*sums, strict=True))
    return Piece(value / len(table), error / len(table) ** 2)


def check_ends(
    A: Reduced, B: Reduced, stream: StreamMap, shifts: Mapping[str, Piece], outputs: Outputs
) -> Iterator[Check]:
    """Check every table and vector outside the blocks that both models have."""
    for name in A.table_names():
        if name not in INPUTS and name not in outputs.common:
            continue
        a, b = A.table(name), B.table(name)
        yield from _check_table(a, b, acting(A, name, stream), shifts.get(name))
    final, other_final = A.output(), B.output()
    if final is not None and other_final is not None:
        yield from _check_table(final, other_final, stream)
    others = B.vectors()
    for name, piece in A.vectors().items():
        if (other := others.get(name)) is not None:
            moved = Piece(stream(piece.value, gain=name.endswith(".g")), piece.error)
            yield check(name, Squares.between(moved, other, 0), 1, sites=False)
    if {"head", "extra.mlm"} <= outputs.common:
        yield from _check_masked_head(A, B, stream)
    yield from _check_kept(A, B)


def _check_table(
    a: Table,
    b: Table,
    stream: StreamMap,
    shift: Piece | None = None,
    order: Tensor | None = None,
) -> Iterator[Check]:
    """Check a table row by row; ``order`` replaces the stream where other axes are permuted."""
    rows: list[Squares] = []
    biases: list[Squares] = []
    entries = 0
    for start, stop in common_pieces(a, b):
        x, y = a.rows(start, stop), b.rows(start, stop)
        moved = stream(x.value) if order is None else x.value[:, order]
        entries = moved.shape[1]
        if shift is None:
            rows.append(Squares.between(Piece(moved, x.error), y, 1))
        else:
            squares = Squares.between(Piece(moved + shift.value, x.error), y, 1)
            rows.append(replace(squares, error=squares.error + shift.error))
        pair = filled(a.biases(start, stop), b.biases(start, stop))
        if pair is not None:
            biases.append(Squares.between(*pair, larger=True))
    yield check(a.name, Squares.join(rows), entries)
    if biases:
        name = "head_bias" if a.name == "head" else f"{a.name}.b"
        yield check(name, Squares.join(biases), 1)


def _check_masked_head(A: Reduced, B: Reduced, stream: StreamMap) -> Iterator[Check]:
    """Check BERT's head: hidden units in any order, read by the output matrix."""
    a, b = A.masked_head(), B.masked_head()
    if a is None or b is None:
        return
    (W, c, table), (V, d, other) = a, b
    moved = stream.columns(W.value)
    order = match_rows(
        torch.cat([V.value, d.value.unsqueeze(0)]).mT, torch.cat([moved, c.value.unsqueeze(0)]).mT
    ).index
    squares = Squares.between(Piece(moved[:, order], W.error[order]), V, 0)
    yield check("extra.mlm.W", squares, len(moved))
    yield check("extra.mlm.b", Squares.between(c[order], d), 1)
    yield from _check_table(table, other, stream, order=order)


def _check_kept(A: Reduced, B: Reduced) -> Iterator[Check]:
    """Check tensors that nothing acts on."""
    moved = {name for _, site in added_sites(A.description) for name in site.names.values()}
    for name in A.names:
        if not name.startswith(KEPT) or name in moved or A.names[name] != B.names.get(name):
            continue
        x, y = (m.model[name].to(m.dtype) for m in (A, B))
        pieces = Piece(x, A.unit * x.square()), Piece(y, B.unit * y.square())
        yield check(name, Squares.between(*pieces), 1)


def check_added(A: Reduced, B: Reduced, stream: StreamMap) -> Iterator[Check]:
    """Fit symmetries that were added to the list, and check their tensors outside the blocks.

    Those of a block are reduced where it is read, see `ReducedBlock`.
    The rounding error of a tensor that was moved is estimated: the element acts on weights that
    are perturbed by it.
    """
    generator = torch.Generator().manual_seed(0)
    inside = {name for part in block_parts(A.description) for name in part.names.values()}
    for symmetry, site in added_sites(A.description):
        names = site.names
        if inside.issuperset(names.values()):
            continue
        a = {}
        for k, name in names.items():
            if (w := A.read(name)) is not None:
                a[k] = w if name.startswith(KEPT) else stream.tensor(name, w)
        b = {k: torch.zeros_like(w) if (y := B.read(names[k])) is None else y for k, w in a.items()}
        noise = {k: B.unit * w.square() for k, w in b.items()}
        g = symmetry.fit(site, a, b, noise)
        moved = a | symmetry.act(site, a, g)
        perturbed = {}
        for k, w in a.items():
            relative = torch.randn(w.shape, generator=generator, dtype=w.dtype)
            perturbed[k] = w * (1 + A.unit**0.5 * relative)
        perturbed |= symmetry.act(site, perturbed, g)
        for k, name in names.items():
            error = (perturbed[k] - moved[k]).square()
            axes = range(b[k].ndim)
            squares = Squares.between(Piece(moved[k], error), Piece(b[k], noise[k]), *axes)
            yield check(name, squares, b[k].numel())
