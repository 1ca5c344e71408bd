"""Result of a comparison tensor by tensor: sentences, a table, JSON and a figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from transformer_nfn.checkpoints.differences.change import Change
from transformer_nfn.checkpoints.edits import describe_edits
from transformer_nfn.checkpoints.relations import Relation
from transformer_nfn.errors import SpaceError
from transformer_nfn.io.files import blank_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROLES = {
    "W_Q": "q", "W_K": "k", "W_V": "v", "W_O": "o",
    "cross.W_Q": "cross q", "cross.W_K": "cross k", "cross.W_V": "cross v", "cross.W_O": "cross o",
    "W_G": "gate", "W_A": "up", "W_B": "down",
    "token": "token embedding", "position": "position embedding", "type": "token types",
    "encoder.position": "encoder position embedding",
    "decoder.position": "decoder position embedding",
    "patch": "patch embedding", "head": "output matrix",
}  # fmt: skip
"""What tensors are called in sentences; others go by their canonical names."""
SHOWN_UNITS = 12


@dataclass(frozen=True)
class Merge:
    """B as a mixture of A and C.

    Attributes:
        share: of C, by least squares over all tensors; A has the rest.
        blocks: the same of each block alone.
        left: ``‖B − A − share (C − A)‖ / ‖B − A‖``: what the mixture does not explain; 0 where
            rounding does.

    Example:
        >>> print(Merge(0.4, {"0": 0.4}, 0.01))
        B is 0.60 A + 0.40 C, which leaves 1 % of B - A.
    """

    share: float
    blocks: Mapping[str, float]
    left: float

    def __str__(self) -> str:
        mixture = f"{1 - self.share:.2f} A + {self.share:.2f} C"
        left = f"{100 * self.left:.2g} % of B - A" if self.left else "nothing beyond rounding"
        return f"B is {mixture}, which leaves {left}."

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {"share_of_C": self.share, "by_block": dict(self.blocks), "left": self.left}


@dataclass(frozen=True)
class Difference:
    """What was changed from A to B, from `diff`.

    Attributes:
        relation: of the two models, by scores.
        aligned: whether B had to be aligned to A; False where tensors are compared as stored.
        changes: of every tensor, in the order of A; none where the models are the same or
            unrelated.
        rows: number of rows of A's and B's tables (tokens, positions, outputs) that differ in it.
        only_one: tables that only one of the two has, with that one: ``B``.
        merge: B as a mixture of A and a third model, if one was named.

    Example:
        >>> same = Relation("same", True, 1.0, "both hold the same bytes", ("0",), ("0",))
        >>> print(Difference(same))
        A and B are the same: both hold the same bytes.
    """

    relation: Relation
    aligned: bool = False
    changes: tuple[Change, ...] = ()
    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    only_one: Mapping[str, str] = field(default_factory=dict)
    merge: Merge | None = None

    @property
    def sources(self) -> dict[str, str | None]:
        """Block of A that each block of B comes from; None for a block of no relative in A.

        Empty where the models are the same or unrelated.
        """
        found = self.relation.sources
        return found if any(a is not None for a in found.values()) else {}

    def summary(self) -> list[str]:
        """What was changed, a sentence each."""
        if not self.changes and not self.sources:
            verdict = self.relation.verdict
            word = "the same" if verdict == "same" else verdict
            return [f"A and B are {word}: {self.relation.reason}."]
        lines = [*(self._about_bases() if self.changes else ()), *self._about_blocks()]
        lines += self._about_units()
        lines += self._about_ends()
        lines += _grid_sentences(self.changes)
        lines += _pruned_sentences(self.changes)
        if self.merge is not None:
            lines.append(str(self.merge))
        lines += _low_rank_sentences(self.changes)
        lines += _dense_sentences(self.changes)
        for kind, title in (("replaced", "Replaced"), ("filled", "Zero in A alone")):
            named = [c for c in self.changes if c.kind == kind]
            lines += [f"{title}: {_named(named)}."] if named else []
        if not self.changes:
            lines.append("Tensors are not compared: the streams have different widths.")
        elif all(c.kind == "unchanged" for c in self.changes):
            lines.append("No tensor that both have differs by more than rounding explains.")
        return lines

    def _about_bases(self) -> Iterator[str]:
        if self.aligned:
            why = "its stream, heads or neurons are in other bases"
            if self.relation.units:
                why = "it has other numbers of heads or neurons"
            yield f"B was aligned to A: {why}."
            return
        yield "B has the bases of A."
        if self.relation.edits:
            yield f"As the files lie, {describe_edits(self.relation.edits)}."

    @property
    def dropped(self) -> tuple[str, ...]:
        """Blocks of A that no block of B comes from."""
        return tuple(a for a in self.relation.rows if a not in self.sources.values())

    @property
    def duplicated(self) -> dict[str, tuple[str, ...]]:
        """Blocks of B that come from one block of A, by that block, where they are several."""
        used = dict.fromkeys(a for a in self.sources.values() if a is not None)
        copies = {a: tuple(b for b, s in self.sources.items() if s == a) for a in used}
        return {a: of for a, of in copies.items() if len(of) > 1}

    def _about_blocks(self) -> Iterator[str]:
        if self.dropped:
            yield f"{_blocks(self.dropped)} of A {_are(self.dropped)} not in B."
        for a, copies in self.duplicated.items():
            yield f"Block {a} of A is in B {len(copies)} times, as {', '.join(copies)}."
        new = [b for b, a in self.sources.items() if a is None]
        if new:
            yield f"{_blocks(new)} of B {_are(new)} related to no block of A."
        used = [a for a in self.sources.values() if a is not None]
        places = [self.relation.rows.index(a) for a in used]
        if places != sorted(places):
            yield f"Blocks are in another order: B has {', '.join(used)} of A."

    def _about_units(self) -> Iterator[str]:
        """Heads and neurons that were cut, in one sentence where all blocks agree."""
        texts = {u.block: str(u).partition(": ")[2] for u in self.relation.units}
        if len(set(texts.values())) == 1 and len(texts) > 1:
            yield f"Every block of B has {next(iter(texts.values()))} of A."
        else:
            yield from (f"Block {block} of B has {text} of A." for block, text in texts.items())

    def _about_ends(self) -> Iterator[str]:
        for name, (a, b) in self.rows.items():
            count = f"{abs(b - a)} {'more' if b > a else 'fewer'}"
            yield f"B has {count} rows of the {ROLES.get(name, name)} than A ({b} against {a})."
        for name, model in self.only_one.items():
            yield f"Only {model} has {ROLES.get(name, name)}."

    def __str__(self) -> str:
        """The summary, and a table of relative changes by block and tensor."""
        return "\n".join([*self.summary(), *self._table()])

    def grid(self) -> tuple[list[str], list[str], dict[tuple[str, str], Change]]:
        """Rows (blocks), columns (tensors that are matrices) and cells of a table of changes."""
        cells = {(_row(c), c.tensor): c for c in self.changes}
        blocks = list(dict.fromkeys(_row(c) for c in self.changes if c.block))
        tensors = [t for t in ROLES if any(c.block and c.tensor == t for c in self.changes)]
        return blocks, tensors, cells

    def _table(self) -> Iterator[str]:
        if not self.changes:
            return
        yield ""
        yield "relative change (r: its rank, where low; - up to rounding)"
        blocks, tensors, cells = self.grid()
        width = max([5, *(len(b) for b in blocks)])
        yield "  ".join([f"{'block':{width}}", *(f"{ROLES[t]:>10}" for t in tensors)])
        for block in blocks:
            row = [f"{change_text(cells.get((block, t))):>10}" for t in tensors]
            yield "  ".join([f"{block:{width}}", *row])
        vectors: dict[str, list[Change]] = {}
        for c in self.others():
            vectors.setdefault(c.tensor if c.block else c.name, []).append(c)
        for tensor, changes in vectors.items():
            if len(changes) == 1:
                yield f"{changes[0].name}: {change_text(changes[0])}"
                continue
            least, *_, most = sorted(changes, key=lambda c: c.relative)
            texts = dict.fromkeys((change_text(least), change_text(most)))
            span = " to ".join(texts)
            yield f"{tensor}: {span} in {_blocks([_row(c) for c in changes]).lower()}"

    def others(self) -> list[Change]:
        """Changes of vectors, and of tensors outside the blocks."""
        return [
            c
            for c in self.changes
            if c.kind != "unchanged" and (not c.block or c.tensor not in ROLES)
        ]

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "verdict": self.relation.verdict,
            "summary": self.summary(),
            "aligned": self.aligned,
            "sources": dict(self.sources),
            "dropped": list(self.dropped) if self.sources else [],
            "duplicated": {a: list(copies) for a, copies in self.duplicated.items()},
            "rows": {name: list(pair) for name, pair in self.rows.items()},
            "only_one": dict(self.only_one),
            "units": {unit.block: unit.as_json() for unit in self.relation.units},
            "merge": None if self.merge is None else self.merge.as_json(),
            "tensors": [c.as_json() for c in self.changes],
        }


def _row(change: Change) -> str:
    """A block of A, and where it is in B if that is another place."""
    if change.block == change.partner:
        return change.block
    return f"{change.block} as {change.partner}"


def change_text(change: Change | None) -> str:
    """A change in few characters."""
    if change is None:
        return ""
    if change.kind == "unchanged":
        return "-"
    if change.kind == "filled":
        return "from 0"
    rank = f" r{change.rank}" if change.kind == "low rank" else ""
    return f"{change.relative:.2g}{rank}"


def _blocks(names: Sequence[str]) -> str:
    return f"Block{'s' * (len(names) > 1)} {_ranges(names)}"


def _are(names: Sequence[str]) -> str:
    return "are" if len(names) > 1 else "is"


def _named(changes: Sequence[Change]) -> str:
    """``q, v of blocks 0 to 3; output matrix``."""
    by_block: dict[str, dict[str, None]] = {}
    for c in changes:
        by_block.setdefault(c.block, {})[ROLES.get(c.tensor, c.tensor)] = None
    parts: dict[tuple[str, ...], list[str]] = {}
    for block, roles in by_block.items():
        parts.setdefault(tuple(roles), []).append(block)
    texts = []
    for words, blocks in parts.items():
        where = "" if blocks == [""] else f" of block{'s' * (len(blocks) > 1)} {_ranges(blocks)}"
        texts.append(f"{', '.join(words)}{where}")
    return "; ".join(texts)


def _grid_sentences(changes: Sequence[Change]) -> Iterator[str]:
    on_grid = sorted((c for c in changes if c.grid is not None), key=lambda c: str(c.grid))
    for grid, group in groupby(on_grid, key=lambda c: c.grid):
        yield f"B's numbers lie on a grid ({grid}): {_named(list(group))}."


def _pruned_sentences(changes: Sequence[Change]) -> Iterator[str]:
    for c in changes:
        if c.zero_units and c.tensor in ("W_O", "cross.W_O", "W_B"):
            units = [str(u) for u in c.zero_units]
            word = ("neuron" if c.tensor == "W_B" else "head") + "s" * (len(units) > 1)
            shown = units if len(units) <= SHOWN_UNITS else [*units[:SHOWN_UNITS], "…"]
            are = _are(units)
            yield f"{len(units)} {word} of block {c.block} {are} zero in B: {', '.join(shown)}."
    scattered = [c for c in changes if c.zeros and not c.zero_units]
    if scattered:
        shares = list(
            dict.fromkeys(f"{100 * f(c.zeros for c in scattered):.3g}" for f in (min, max))
        )
        yield f"{' to '.join(shares)} % of the entries were set to zero: {_named(scattered)}."


def _low_rank_sentences(changes: Sequence[Change]) -> Iterator[str]:
    low = sorted((c for c in changes if c.kind == "low rank"), key=lambda c: c.rank or 0)
    for rank, group in groupby(low, key=lambda c: c.rank):
        yield f"Change of rank {rank} on {_named(list(group))}."


def _dense_sentences(changes: Sequence[Change]) -> Iterator[str]:
    dense = [c for c in changes if c.kind == "dense"]
    if dense:
        sizes = sorted(c.relative for c in dense)
        spread = f"{sizes[0]:.2g} to {sizes[-1]:.2g}, median {sizes[len(sizes) // 2]:.2g}"
        yield f"Dense changes ({spread}) on {_named(dense)}."


def _ranges(names: Sequence[str]) -> str:
    """``0 to 3, 7``, of names that end in numbers."""
    runs: list[list[str]] = []
    for name in names:
        if runs and _successor(runs[-1][-1]) == name:
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _successor(name: str) -> str:
    prefix, dot, number = name.rpartition(".")
    return f"{prefix}{dot}{int(number) + 1}" if number.isdigit() else ""


def draw_difference(difference: Difference, out: str | Path) -> Path:
    """Draw the relative change by block and tensor as a heat map into ``out`` (png, pdf or svg).

    Args:
        difference: with changes; models that are the same or unrelated have none.
        out: the figure to write.
    """
    return save_figure(difference_figure(difference), Path(out), SpaceError)


def difference_figure(difference: Difference) -> Figure:
    """The heat map of `draw_difference`; ranks of low-rank changes are written into the cells."""
    blocks, tensors, cells = difference.grid()
    if not blocks:
        raise SpaceError(f"there are no changes to draw: {' '.join(difference.summary())}")
    figure = blank_figure(2.4 + 0.62 * len(tensors), 1.6 + 0.3 * len(blocks), SpaceError)
    axes = figure.subplots()
    values = torch.full((len(blocks), len(tensors)), float("nan"))
    for i, block in enumerate(blocks):
        for j, tensor in enumerate(tensors):
            change = cells.get((block, tensor))
            if change is not None:
                values[i, j] = 0.0 if change.kind == "unchanged" else min(change.relative, 2.0)
                if change.kind == "low rank":
                    axes.text(j, i, f"{change.rank}", ha="center", va="center", color="white")
    image = axes.imshow(values.numpy(), vmin=0, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(tensors)), [ROLES[t] for t in tensors])
    axes.set_yticks(range(len(blocks)), blocks)
    axes.set(ylabel="block of A")
    axes.set_title("changes from A to B; numbers are ranks", loc="left", fontsize=9)
    figure.colorbar(image, ax=axes, label="relative change")
    return figure
