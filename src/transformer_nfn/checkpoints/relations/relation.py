"""Relation of two checkpoints: one model in disguise, converted, related, or unrelated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from transformer_nfn.checkpoints.conversion import Conversion, check_conversion, quantisation_error
from transformer_nfn.checkpoints.edits import (
    AsStored,
    Edit,
    ExactModel,
    compare_stored,
    describe_edits,
)
from transformer_nfn.checkpoints.families import Model
from transformer_nfn.checkpoints.proof import Proof, prove_pair
from transformer_nfn.checkpoints.proof.checks import Tolerance
from transformer_nfn.checkpoints.proof.ends import compare_outputs
from transformer_nfn.checkpoints.reduced import Reduced
from transformer_nfn.checkpoints.relations.result import Relation
from transformer_nfn.checkpoints.relations.scores import relate_by_scores
from transformer_nfn.checkpoints.relations.verdicts import CONSISTENT, RELATED
from transformer_nfn.checkpoints.sketches import block_score
from transformer_nfn.checkpoints.stream import reduced_group
from transformer_nfn.io.location import Location
from transformer_nfn.notebook import bound
from transformer_nfn.symmetry.rounding import rounding_rms

GAINED = 3.0
"""Times the rounding error of a matrix that the gains and signs folded into it may leave."""
MOVED = 0.1
"""Relative change from which on a vector may have been moved to another one."""
NO_SCORES = (
    "without residuals each sublayer writes in a basis of its own, which no embedding fixes: there "
    "are no scores, only a proof"
)


def relate(A: Model, B: Model, *, prove: bool | None = None) -> Relation:
    """Relate two checkpoints, whatever disguise either of them wears.

    Scores say how similar the blocks are in a basis that the embeddings fix; `verdicts` has
    the numbers behind every threshold. Scores are symmetric: no direction is reported.
    Where they are those of a disguise, a proof decides: an element of the symmetry group, verified
    on every tensor, scale included. Where one is quantised, both are first compared as they lie,
    see `check_conversion`; a disguise of the numbers that were quantised cannot be proved.

    Args:
        A: one model, from `open_model`.
        B: the other.
        prove: True proves, or searches for token ids on which the two differ, whatever the scores
            are; False leaves it at scores. By default only a disguise is proved.

    >>> from transformer_nfn.checkpoints import open_model
    >>> from transformer_nfn.testing import write_example_checkpoint
    >>> a, b = (write_example_checkpoint(f"model-{seed}", seed) for seed in (0, 1))
    >>> with open_model(a) as A, open_model(b) as B:
    ...     relate(A, B).verdict, relate(A, A).verdict
    ('unrelated', 'same')
    """
    conversion, stored = check_conversion(A, B), compare_stored(A, B)
    quantised = conversion is not None and not conversion.alike
    if quantised or any(Location.of(model.path).is_adapter for model in (A, B)):
        stored = AsStored(equal=stored.equal)  # numbers are rounded or computed, entry by entry
    if conversion is not None and conversion.same and not stored.edits:
        return _converted(A, B, conversion)
    relation = replace(_relate(A, B, prove, stored), edits=stored.edits)
    if conversion is None:
        return _up_to_quantisation(A, B, relation)
    reason = relation.reason if relation.verdict == "same" else str(conversion)
    return replace(relation, conversion=conversion, reason=reason)


def _up_to_quantisation(A: Model, B: Model, relation: Relation) -> Relation:
    """The relation, or that of a disguise where quantisation explains all that scores see."""
    if relation.verdict != "derived" or relation.proof is not None:
        return relation
    errors = quantisation_error(A), quantisation_error(B)
    if not any(errors) or relate_by_scores(A, B, errors).verdict != CONSISTENT:
        return relation
    percent = 100 * max(errors) ** 0.5
    return replace(
        relation,
        verdict=CONSISTENT,
        same_function=None,
        reason="every part that scores compare agrees up to what the quantisation of the files "
        f"explains, {bound(percent, up=True)} % of a weight; smaller changes are not visible",
    )


def _converted(A: Model, B: Model, conversion: Conversion) -> Relation:
    """The relation of two files that hold the same numbers up to quantisation."""
    rows, columns = (tuple(m.description.blocks) for m in (A, B))
    mismatch = compare_outputs(A, B).mismatch()
    return Relation(
        "same" if mismatch is None else "same backbone",
        mismatch is None,
        1.0,
        str(conversion) if mismatch is None else f"{conversion}; {mismatch}",
        rows,
        columns,
        related=rows,
        not_compared=tuple(f"{name}: only one of the two has it" for name in conversion.single),
        conversion=conversion,
    )


def _relate(A: Model, B: Model, prove: bool | None, stored: AsStored) -> Relation:
    """The relation up to a disguise."""
    rows, columns = (tuple(m.description.blocks) for m in (A, B))
    if stored.equal is not None:
        return Relation("same", True, 1.0, stored.equal, rows, columns, related=rows)
    if (reason := incomparable(A, B)) is not None:
        # Ancestry by cutting or widening is neither claimed nor denied.
        reason += (
            ": no disguise changes that, so they are not one model in disguise; whether one was "
            "made from the other by changing its shape is not looked at"
        )
        relation = Relation(
            "different", False, None, reason, rows, columns, not_compared=("all blocks",)
        )
    elif "chain" in A.description.orders:
        relation = Relation("unclear", None, None, NO_SCORES, rows, columns)
        prove = prove is not False
    else:
        relation = relate_by_scores(A, B)
    if prove is False or (prove is None and relation.verdict != CONSISTENT):
        return relation
    scores = [block_score(parts) for parts in relation.blocks.values()]
    related = relation.reason == NO_SCORES or (bool(scores) and min(scores) >= RELATED)
    tables = relation.fitted if related else None
    proof = prove_pair(A, B, tables)
    if proof.same is not False or proof.backbone:
        proof = _without_rounding(A, B, stored.edits, proof, tables)
    return _concluded(relation, proof)


def _without_rounding(
    A: Model, B: Model, edits: Sequence[Edit], proof: Proof, tables: Sequence[str] | None
) -> Proof:
    """The proof, or another one where rounding hides an edit of a tensor on which nothing acts.

    B's numbers of such tensors, in A, make a third model, and its numbers and A's are exact.
    """
    rounding = math.hypot(*map(rounding_rms, (A.dtype, B.dtype)))
    hidden = GAINED * Tolerance.of(A.dtype, B.dtype).same * rounding
    # What acts on a block moves matrices, or a vector from one bias to another.
    matrices = {e.block for e in edits if not e.vector and e.relative > hidden}
    vectors = Counter(e.block for e in edits if e.vector and e.relative > MOVED)
    plain = [e for e in edits if e.block not in matrices and vectors[e.block] < 2]
    if not plain:
        return proof
    names = frozenset(edit.name for edit in plain)
    exact = prove_pair(ExactModel(A, A, names), ExactModel(A, B, names), tables)
    if exact.same:
        return proof
    if exact.backbone:
        return proof if proof.backbone else replace(exact, checks=())
    differ = exact.witness is not None or (exact.same is False and names.issuperset(exact.named))
    reason = f"as the files lie, {describe_edits(plain)}"
    return Proof(False if differ else None, reason, witness=exact.witness, named=tuple(names))


def _concluded(relation: Relation, proof: Proof) -> Relation:
    """The relation after a proof was tried."""
    verdict, reason = relation.verdict, relation.reason
    if proof.same is True:
        verdict, reason = "same", proof.reason
    elif proof.backbone:
        verdict, reason = "same backbone", proof.reason
    elif reason == NO_SCORES:
        verdict, reason = ("different" if proof.same is False else "unclear"), proof.reason
    elif verdict == CONSISTENT:
        verdict, reason = ("derived" if proof.same is False else "unclear"), proof.reason
    elif verdict == "unclear" and proof.same is False:
        verdict = "different"
    return replace(
        relation,
        verdict=verdict,
        reason=reason,
        same_function=proof.same,
        proof=proof,
        not_compared=relation.not_compared if proof.element is None else proof.not_compared,
    )


def incomparable(A: Model, B: Model) -> str | None:
    """Why no basis of one stream can stand for one of the other; None where one can."""
    a, b = A.description, B.description
    if a.norm != b.norm:
        return "one has LayerNorm, the other RMS norm"
    if ("chain" in a.orders) != ("chain" in b.orders):
        return "one has residuals, the other has not"
    groups = [reduced_group(m.description) for m in (A, B)]
    if groups[0] != groups[1]:
        return f"their norms stand in different places ({a.family} and {b.family})"
    if (groups[0] == "none" or a.inputs == "audio") and a.width != b.width:
        return f"the streams have different widths, {a.width} and {b.width}, and nothing maps them"
    tables = set(Reduced(A).table_names()) & set(Reduced(B).table_names())
    if groups[0] != "none" and not tables & {"token", "position", "patch", "projection", "head"}:
        return f"they share no embeddings or outputs ({a.family} and {b.family})"
    return None
