"""Can it be shown that two checkpoints are one function, or that they are not?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transformer_nfn.symmetry.likeness.probes import Probes, draw_probes, sketch_block
from transformer_nfn.symmetry.likeness.scores import block_score
from transformer_nfn.symmetry.likeness.stream import StreamMap, fit_stream
from transformer_nfn.symmetry.likeness.verdict import RELATED
from transformer_nfn.symmetry.prove.blocks import BlockElement, match_block
from transformer_nfn.symmetry.prove.checks import Check, Tolerance
from transformer_nfn.symmetry.prove.ends import check_ends, table_shifts
from transformer_nfn.symmetry.prove.witness import TokenWitness, find_witness
from transformer_nfn.symmetry.reduced import Reduced

if TYPE_CHECKING:
    from transformer_nfn.architectures.families import Model
    from transformer_nfn.symmetry.relations.relation import Relation

PROBES = 64
"""Probes that heads and neurons are matched by; they are then checked in full."""
SMALL = 0.2
"""Where tensors are away by more than this, something may not have been matched; then only inputs
that differ, or a single place that is off while all else fits, are a proof."""


@dataclass(frozen=True)
class ModelElement:
    """An element of the symmetry group of a transformer's reduced form.

    Attributes:
        stream: acts on the stream.
        shifts: vectors moved between embeddings.
        blocks: what acts in each block, by its name.
    """

    stream: StreamMap
    shifts: Mapping[str, Tensor]
    blocks: Mapping[str, BlockElement]


@dataclass(frozen=True)
class Proof:
    """What could be shown.

    Attributes:
        same: True (an element, verified on every tensor), False (inputs on which they differ, a
            tensor that no rounding explains, or shapes that do not fit), None (neither).
        reason: one sentence.
        element: takes the reduced form of A to that of B.
        checks: every tensor of the reduced form under the element.
        tolerance: how many expected rounding errors count as none.
        witness: inputs on which they differ.
        named: tensors beyond what rounding explains.
    """

    same: bool | None
    reason: str
    element: ModelElement | None = None
    checks: tuple[Check, ...] = ()
    tolerance: Tolerance | None = None
    witness: TokenWitness | None = None
    named: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The proof in words."""
        words = {True: "yes", False: "no", None: "undecidable"}
        out = [f"proof: same function: {words[self.same]}, {self.reason}"]
        if self.checks and self.tolerance is not None:
            far = sorted(self.checks, key=lambda c: -c.excess)[:3]
            told = ", ".join(f"{c.name} {c.excess:.2g}" for c in far)
            out.append(
                f"{len(self.checks)} tensors checked; expected rounding errors that the farthest "
                f"are away ({self.tolerance.same:g} allowed): {told}"
            )
        if self.witness is not None:
            shown = self.witness.inputs
            text = f"token ids {shown[0].tolist()}" if shown.ndim == 2 else "random inputs"
            out.append(
                f"on {text} outputs differ by {self.witness.difference:.3g}, rounding explains "
                f"{self.witness.noise:.1g}"
            )
        return out

    def as_json(self) -> dict[str, Any]:
        """All of it but the element's matrices."""
        witness = self.witness
        return {
            "same_function": self.same,
            "reason": self.reason,
            "named_tensors": list(self.named),
            "allowance": None if self.tolerance is None else self.tolerance.same,
            "tensors": {
                c.name: {
                    "residual": c.residual,
                    "expected": c.expected,
                    "ratio": c.ratio,
                    "worst_part": c.worst,
                }
                for c in self.checks
            },
            "witness": witness
            and {
                "inputs": witness.inputs.tolist(),
                "decoder": None if witness.decoder is None else witness.decoder.tolist(),
                "difference": witness.difference,
                "noise": witness.noise,
            },
        }


def prove_pair(A: Model, B: Model, relation: Relation) -> Proof:
    """Decides whether two models are the same function, or says that it cannot.

    Args:
        A: one model.
        B: the other.
        relation: what their scores say; where blocks are strangers no element is looked for.
    """
    apart = outputs_apart(A, B)
    if apart is not None:
        return Proof(False, apart)
    misfit = shapes_apart(A, B)
    related = bool(relation.blocks) and all(
        block_score(parts) >= RELATED for parts in relation.blocks.values()
    )
    attempt = None
    if misfit is None and related:
        attempt = find_element(A, B)
        if attempt.same:
            return attempt
    witness = find_witness(A, B)
    if witness is not None:
        named = () if attempt is None else attempt.named
        return Proof(
            False,
            "the outputs differ on the inputs given" + _naming(named),
            checks=() if attempt is None else attempt.checks,
            tolerance=None if attempt is None else attempt.tolerance,
            witness=witness,
            named=named,
        )
    if attempt is None:
        why = misfit or "blocks score as strangers do"
        return Proof(None, f"{why}, but no input was found on which the outputs differ")
    if attempt.named and (_all_near(attempt.checks) or len(_places(attempt.named)) == 1):
        return replace(
            attempt,
            same=False,
            reason="no disguise takes one to the other within rounding" + _naming(attempt.named),
        )
    return replace(
        attempt, reason="neither an element that fits nor an input that differs was found"
    )


def _all_near(checks: tuple[Check, ...]) -> bool:
    """Whether everything is matched: what differs differs little."""
    return all(c.residual <= SMALL for c in checks if c.expected <= SMALL)


def _places(named: tuple[str, ...]) -> set[str]:
    """Where named tensors stand; those that share a basis, which was solved for, are one place."""
    pairs = {"W_Q": "W_K", "W_V": "W_O", "W_A": "W_B", "b_Q": "W_K", "b_K": "W_K", "b_A": "W_B"}
    out = set()
    for name in named:
        start, _, last = name.split("·")[0].rpartition(".")
        out.add(f"{start}.{pairs.get(last, last)}")
    return out


def _naming(named: tuple[str, ...]) -> str:
    shown = ", ".join(named[:4]) + (" …" if len(named) > 4 else "")
    return f"; beyond what rounding explains: {shown}" if named else ""


def outputs_apart(A: Model, B: Model) -> str | None:
    """Why two models cannot be one function: they read or answer different things."""
    a, b = A.about, B.about
    if a.inputs != b.inputs or a.vocab != b.vocab:
        words = [f"{m.inputs} ({m.vocab})" if m.vocab else m.inputs for m in (a, b)]
        return f"they read different inputs, {words[0]} and {words[1]}"
    sizes = [_answers(m) for m in (A, B)]
    if sizes[0] != sizes[1]:
        return f"they give answers of different size, {sizes[0]} and {sizes[1]}"
    if len(a.stacks) != len(b.stacks):
        return "one has an encoder and a decoder, the other has not"
    return None


def _answers(model: Model) -> int:
    about = model.about
    if about.tied and about.vocab is not None:
        return about.vocab
    return model.names["head"][1] if "head" in model.names else about.width


def shapes_apart(A: Model, B: Model) -> str | None:
    """Why no element can take one model to the other; None where one may."""
    a, b = A.about, B.about
    for what in ("width", "norm", "eps", "final_softcap", "position_offset", "pooler", "mlm"):
        if getattr(a, what) != getattr(b, what):
            return f"{what}: one has {getattr(a, what)}, the other {getattr(b, what)}"
    for s, t in zip(a.stacks, b.stacks, strict=True):
        if len(s.blocks) != len(t.blocks):
            return f"one has {len(s.blocks)} blocks, the other {len(t.blocks)}"
        for i, (x, y) in enumerate(zip(s.blocks, t.blocks, strict=True)):
            if replace(x, attention=replace(x.attention, scale=1.0)) != replace(
                y, attention=replace(y.attention, scale=1.0)
            ):
                return f"blocks {s.prefix}{i} are built differently"
    first, second = Reduced(A), Reduced(B)
    tables = [{t.name: len(t) for t in m.tables()} for m in (first, second)]
    if tables[0] != tables[1]:
        return f"embeddings and outputs have other rows, {tables[0]} and {tables[1]}"
    kept = [{n: s for n, s in m.names.items() if n.startswith("kept.")} for m in (A, B)]
    if kept[0] != kept[1]:
        return "tensors outside the network differ in name or shape"
    return None


def find_element(A: Model, B: Model) -> Proof:
    """The element that takes A's reduced form to B's, verified on every tensor."""
    a, b = Reduced(A), Reduced(B)
    tolerance = Tolerance.of(A.dtype, B.dtype)
    stream = fit_stream(a, b, hold_out=False).map
    if not stream.determined:
        return Proof(None, "the embeddings leave directions of the stream open")
    shifts = table_shifts(a, b, stream)
    blocks: dict[str, BlockElement] = {}
    checks: list[Check] = list(check_ends(a, b, stream, shifts))
    for name, part, found in _blocks(a, b, stream):
        blocks[name] = part
        checks += found
    named = tuple(c.name for c in checks if c.beyond(tolerance))
    element = ModelElement(stream, {name: shift.value for name, shift in shifts.items()}, blocks)
    if all(c.within(tolerance) for c in checks):
        reason = f"one element of the symmetry group takes A to B on all {len(checks)} tensors"
        return Proof(True, reason, element, tuple(checks), tolerance)
    return Proof(None, "", None, tuple(checks), tolerance, named=named)


def _blocks(
    a: Reduced, b: Reduced, stream: StreamMap
) -> Iterator[tuple[str, BlockElement, list[Check]]]:
    drawn = draw_probes(a.about.width, centred=a.centred, dtype=torch.float64)
    own = Probes(drawn.into[:PROBES], drawn.out[:PROBES])
    other = Probes(stream(own.into), stream(own.out))
    orders: dict[str, Tensor] = {}
    for name in a.blocks:
        x, y = a.block(name), b.block(name)
        stack = name.rpartition(".")[0]
        sketches = sketch_block(x, own), sketch_block(y, other)
        element, checks = match_block(x, y, stream, sketches, orders.get(stack))
        if x.about.attention.position_bias:
            orders.setdefault(stack, element.attentions[""].queries)
        yield name, element, checks
