"""Proof that two checkpoints are one function, or that they are not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.checkpoints.families import Model
from transformer_nfn.checkpoints.proof.blocks import BlockElement, match_block, match_classifier
from transformer_nfn.checkpoints.proof.checks import Check, Tolerance
from transformer_nfn.checkpoints.proof.ends import (
    OUTPUT_SETTINGS,
    Outputs,
    check_added,
    check_ends,
    compare_outputs,
    is_output,
    keeps_inputs,
    table_shifts,
)
from transformer_nfn.checkpoints.proof.witness import TokenWitness, find_witness
from transformer_nfn.checkpoints.reduced import INPUTS, Reduced, reduce_pair
from transformer_nfn.checkpoints.settings import differing_settings
from transformer_nfn.checkpoints.sketches import Probes, draw_probes, sketch_block
from transformer_nfn.checkpoints.stream import (
    BlockStreams,
    chain_streams,
    fit_stream,
    refine_stream,
)
from transformer_nfn.checkpoints.symmetries import StreamMap
from transformer_nfn.functional.description import KEPT, POSITIONS
from transformer_nfn.notebook import bound

PROBES = 64
"""Probes by which heads and neurons are matched; their tensors are then checked in full."""
SMALL = 0.2
"""Residuals above this may come from a wrong match; then only an input on which the outputs differ,
or a single place that differs while all else fits, is a proof."""

SHOWN = 4
"""Tensors or settings that a sentence names."""
STANDS_OUT = 4.0
"""Times what makes a tensor different that one has to be off as a whole, without residuals."""


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
    """Result of `prove_pair`.

    Attributes:
        same: True (an element, verified on every tensor), False (inputs on which they differ, a
            tensor that no rounding explains, or shapes that do not fit), None (neither).
        reason: one sentence.
        element: takes the reduced form of A to that of B.
        checks: every tensor of the reduced form under the element.
        tolerance: allowed residuals, in expected rounding errors.
        witness: inputs on which they differ.
        named: tensors beyond what rounding explains.
        backbone: blocks and embeddings are verified under one element, and outputs differ.
        not_compared: what was left out, a sentence each.

    Example:
        >>> Proof(False, "they read different inputs").lines()
        ['proof: same function: no, they read different inputs']
    """

    same: bool | None
    reason: str
    element: ModelElement | None = None
    checks: tuple[Check, ...] = ()
    tolerance: Tolerance | None = None
    witness: TokenWitness | None = None
    named: tuple[str, ...] = ()
    backbone: bool = False
    not_compared: tuple[str, ...] = ()

    @property
    def resolution(self) -> tuple[float, str] | None:
        """Smallest relative change of any one tensor that would have been seen, and the tensor
        where rounding hides most; None where not every tensor was checked."""
        if not self.checks or self.tolerance is None:
            return None
        hidden, name = max((c.hidden, c.name) for c in self.checks)
        return self.tolerance.same * hidden, name

    def lines(self) -> list[str]:
        """The proof as text."""
        words = {True: "yes", False: "no", None: "undecidable"}
        out = [f"proof: same function: {words[self.same]}, {self.reason}"]
        if self.checks and self.tolerance is not None:
            far = sorted(self.checks, key=lambda c: -c.excess)[:3]
            shown = ", ".join(f"{c.name} {c.excess:.3g}" for c in far)
            out.append(
                f"{len(self.checks)} tensors checked; largest residuals, in expected rounding "
                f"errors ({self.tolerance.same:g} allowed): {shown}"
            )
        if self.same and self.resolution is not None:
            hidden, name = self.resolution
            out.append(
                f"resolution: a change of any tensor by {bound(hidden, up=True)} of its norm would "
                f"have been seen; rounding hides most in {name}"
            )
        if self.witness is not None:
            inputs = self.witness.inputs
            text = f"token ids {inputs[0].tolist()}" if inputs.ndim == 2 else "random inputs"
            out.append(
                f"on {text} outputs differ by {self.witness.difference:.3g}, rounding explains "
                f"{bound(self.witness.noise, up=True)}"
            )
        return out

    def as_json(self) -> dict[str, Any]:
        """Everything except the matrices of the element."""
        witness = self.witness
        return {
            "same_function": self.same,
            "reason": self.reason,
            "same_backbone": self.backbone or self.same is True,
            "named_tensors": list(self.named),
            "resolution": None if self.resolution is None else self.resolution[0],
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


def prove_pair(A: Model, B: Model, tables: Sequence[str] | None) -> Proof:
    """Decide whether two models are the same function; the proof may be inconclusive.

    Args:
        A: one model.
        B: the other.
        tables: embeddings and outputs to fit the stream's basis on; None where the blocks score as
            unrelated, and no element of the group is searched for.

    Example:
        >>> from transformer_nfn.checkpoints import open_model
        >>> from transformer_nfn.testing import write_example_checkpoint
        >>> with open_model(write_example_checkpoint("model")) as model:
        ...     proof = prove_pair(model, model, ("token", "head"))
        >>> proof.same, max(check.excess for check in proof.checks) < 1e-3
        (True, True)
        >>> proof.element.blocks["0"].attentions[""].queries.tolist()
        [0, 1]
    """
    mismatch = _input_mismatch(A, B)
    if mismatch is not None:
        return Proof(False, mismatch)
    outputs = compare_outputs(A, B)
    shapes = shape_mismatch(A, B)
    attempt = None
    # Without residuals maps of streams are fitted on few rows: what differs has to stand out.
    chain = "chain" in A.description.orders
    if shapes is None and tables is not None:
        attempt = find_element(A, B, outputs, tables)
        if attempt.same is True or (attempt.same is False and not chain):
            return attempt
    mismatch = outputs.mismatch()
    if mismatch is not None:
        return Proof(False, mismatch)
    witness = find_witness(A, B)
    if witness is not None:
        named = () if attempt is None else attempt.named
        return Proof(
            False,
            "the outputs differ on random inputs" + (_settings(A, B) or _naming(named)),
            checks=() if attempt is None else attempt.checks,
            tolerance=None if attempt is None else attempt.tolerance,
            witness=witness,
            named=named,
            backbone=attempt is not None and attempt.backbone,
        )
    if attempt is None:
        why = shapes or "blocks score as strangers do"
        return Proof(None, f"{why}, but no input was found on which the outputs differ")
    if _is_excluded(attempt, chain=chain):
        return replace(
            attempt,
            same=False,
            reason="no disguise takes one to the other within rounding" + _naming(attempt.named),
        )
    why = "neither an element that fits nor an input that differs was found"
    return replace(attempt, same=None, backbone=False, reason=why)


def _is_excluded(attempt: Proof, *, chain: bool) -> bool:
    """Whether the tensors beyond rounding exclude that any element fits."""
    near = _all_near(attempt.checks)
    if chain:
        limit = STANDS_OUT * (0.0 if attempt.tolerance is None else attempt.tolerance.different)
        return near and any(c.name in attempt.named and c.ratio > limit for c in attempt.checks)
    return bool(attempt.named) and (near or len(_places(attempt.named)) == 1)


def _all_near(checks: tuple[Check, ...]) -> bool:
    """Whether every tensor was matched: all residuals are small."""
    return all(c.residual <= SMALL for c in checks if c.expected <= SMALL)


def _places(named: tuple[str, ...]) -> set[str]:
    """Places of named tensors; those that share a fitted basis or shift are one place."""
    if set(named) <= {"token", "type", *POSITIONS}:
        return {"embeddings"}
    pairs = {"W_Q": "W_K", "W_V": "W_O", "b_Q": "W_K", "b_K": "W_K"}
    pairs |= dict.fromkeys(("W_A", "b_A", "W_G", "b_G"), "W_B")
    out = set()
    for name in named:
        start, _, last = name.split("·")[0].rpartition(".")
        out.add(f"{start}.{pairs.get(last, last)}")
    return out


def _settings(A: Model, B: Model) -> str:
    """Settings that differ between models of the same tensors, as the end of a sentence."""
    facts = [*differing_settings(A.description, B.description)] if A.names == B.names else []
    return "".join(f"; {fact}" for fact in facts[:SHOWN])


def _naming(named: tuple[str, ...]) -> str:
    shown = ", ".join(named[:SHOWN]) + (" …" if len(named) > SHOWN else "")
    return f"; beyond what rounding explains: {shown}" if named else ""


def _input_mismatch(A: Model, B: Model) -> str | None:
    """Reason why two models cannot be one function: they read different inputs."""
    a, b = A.description, B.description
    if (a.inputs, a.input_size) != (b.inputs, b.input_size):
        words = [f"{m.inputs} ({m.input_size})" if m.input_size else m.inputs for m in (a, b)]
        return f"they read different inputs, {words[0]} and {words[1]}"
    if len(a.stacks) != len(b.stacks):
        return "one has an encoder and a decoder, the other has not"
    return None


def shape_mismatch(A: Model, B: Model) -> str | None:
    """Reason why no element can take blocks and embeddings of one model to the other's, or None."""
    a, b = A.description, B.description
    if a.width != b.width:
        return f"width: one has {a.width}, the other {b.width}"
    for s, t in zip(a.stacks, b.stacks, strict=True):
        if len(s.blocks) != len(t.blocks):
            return f"one has {len(s.blocks)} blocks, the other {len(t.blocks)}"
    others = b.settings()
    for name, value in a.settings().items():
        if name in a.blocks and value != others[name]:
            return f"blocks {name} are built differently"
        if name not in OUTPUT_SETTINGS and value != others[name]:
            return f"{name}: one has {value}, the other {others[name]}"
    embedded = [{n: m.names[n][0] for n in INPUTS if n in m.names} for m in (A, B)]
    if embedded[0] != embedded[1]:
        return f"embeddings have other rows, {embedded[0]} and {embedded[1]}"
    for name in sorted(A.names.keys() ^ B.names.keys()):
        owner = A if name in A.names else B
        if not is_output(name, owner.description) and owner[name].any():  # zeros are no bias
            return f"only one of the two has '{name}'"
    if keeps_inputs(a):
        kept = [{n: s for n, s in m.names.items() if n.startswith(KEPT)} for m in (A, B)]
        if kept[0] != kept[1]:
            return "tensors outside the network differ in name or shape"
    return None


def find_element(A: Model, B: Model, outputs: Outputs, tables: Sequence[str]) -> Proof:
    """Fit the element that takes A's reduced form to B's, and check every tensor that both have.

    Args:
        A: one model. B: the other, without a `shape_mismatch`.
        outputs: output heads; only those in common are checked.
        tables: to fit the map of the stream on.
    """
    a, b = reduce_pair(A, B)
    tolerance = Tolerance.of(A.dtype, B.dtype)
    stream = refine_stream(a, b, fit_stream(a, b, hold_out=False, only=tables).map)
    if stream.span is not None:
        return Proof(None, "embeddings, outputs and neurons leave directions of the stream open")
    shifts = table_shifts(a, b, stream)
    blocks: dict[str, BlockElement] = {}
    checks = [*check_ends(a, b, stream, shifts, outputs), *check_added(a, b, stream)]
    for name, part, block_checks in _match_blocks(a, b, stream):
        blocks[name] = part
        checks += block_checks
    wrong = [c for c in checks if not c.within(tolerance)]
    attempt = Proof(
        None,
        "",
        ModelElement(stream, {name: shift.value for name, shift in shifts.items()}, blocks),
        tuple(checks),
        tolerance,
        named=tuple(c.name for c in checks if c.beyond(tolerance)),
        not_compared=tuple(f"{name}: only one of the two has it" for name in outputs.single),
    )
    one = "one element of the symmetry group takes A to B on"
    mismatch = outputs.mismatch()
    if not wrong and mismatch is None:
        return replace(attempt, same=True, reason=f"{one} all {len(checks)} tensors")
    changed = [c.name for c in wrong if all(is_output(c.name, m.description) for m in (A, B))]
    if len(changed) == len(wrong) and set(changed) <= set(attempt.named):
        verified = f"{one} {len(checks) - len(wrong)} tensors, all blocks and embeddings among them"
        differ = f"outputs differ (with the last norm before them): {', '.join(changed)}"
        reasons = [verified, *([differ] if changed else []), *([mismatch] if mismatch else [])]
        return replace(attempt, same=False, reason="; ".join(reasons), backbone=True)
    return replace(attempt, element=None)


def _match_blocks(
    a: Reduced, b: Reduced, stream: StreamMap
) -> Iterator[tuple[str, BlockElement, list[Check]]]:
    drawn = draw_probes(a.description.width, centred=a.centred, dtype=torch.float64)
    probes = Probes(drawn.into[:PROBES], drawn.out[:PROBES])
    orders: dict[str, Tensor] = {}
    streams = BlockStreams(stream, stream, stream)
    for name in a.blocks:
        x, y = a.block(name), b.block(name)
        stack = name.rpartition(".")[0]
        if x.description.order == "chain":
            streams = chain_streams(x, y, streams.after)
        else:
            streams = BlockStreams.of(x, stream)
        inner = Probes(streams.middle(probes.into), streams.after(probes.out))
        sketches = sketch_block(x, probes), sketch_block(y, streams.moved(probes), inner)
        element, checks = match_block(x, y, streams, sketches, orders.get(stack))
        if x.description.attention.position_bias:
            orders.setdefault(stack, element.attentions[""].queries)
        yield name, element, checks
    head, other = a.classifier, b.classifier
    if head is not None and other is not None:
        yield "classifier", *match_classifier(head, other, streams.after, probes)
