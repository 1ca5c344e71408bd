"""Relation of two checkpoints: one model in disguise, converted, related, or unrelated."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from transformer_nfn.checkpoints.conversion import Conversion, check_conversion, quantisation_error
from transformer_nfn.checkpoints.families import Model
from transformer_nfn.checkpoints.proof import Proof, prove_pair
from transformer_nfn.checkpoints.proof.ends import compare_outputs
from transformer_nfn.checkpoints.reduced import Reduced
from transformer_nfn.checkpoints.relations.result import Relation
from transformer_nfn.checkpoints.relations.scores import relate_by_scores
from transformer_nfn.checkpoints.relations.verdicts import CONSISTENT, RELATED
from transformer_nfn.checkpoints.sketches import block_score
from transformer_nfn.checkpoints.stream import reduced_group

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
    conversion = check_conversion(A, B)
    if conversion is not None and conversion.same:
        return _converted(A, B, conversion)
    relation = _relate(A, B, prove)
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
        f"explains, {percent:.2g} % of a weight; smaller changes are not visible",
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


def _relate(A: Model, B: Model, prove: bool | None) -> Relation:
    """The relation up to a disguise."""
    rows, columns = (tuple(m.description.blocks) for m in (A, B))
    if (reason := equal_weights(A, B)) is not None:
        return Relation("same", True, 1.0, reason, rows, columns, related=rows)
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
    return _concluded(relation, prove_pair(A, B, relation.fitted if related else None))


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


def equal_weights(A: Model, B: Model) -> str | None:
    """How the tensors of two models of one architecture agree without any disguise.

    Returns:
        One sentence if every tensor is equal bit by bit, or all of one model are those of the other
        rounded to their dtypes; else None.
    """
    if A.description != B.description:
        return None
    copy = original = True
    rounded: set[torch.dtype] = set()
    for name in A.names:
        a, b = A[name], B[name]
        if a.dtype == b.dtype and torch.equal(a, b):
            continue
        if a.dtype == b.dtype:
            return None
        rounded |= {min((a.dtype, b.dtype), key=lambda dtype: dtype.itemsize)}
        copy, original = copy and _is_rounded(a, b), original and _is_rounded(b, a)
        if not copy and not original:
            return None
    if not rounded:
        return "both hold the same bytes"
    dtypes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in rounded))
    return f"{'B' if copy else 'A'} holds the numbers of the other rounded to {dtypes}"


def _is_rounded(a: Tensor, b: Tensor) -> bool:
    """Whether ``b`` is ``a`` in another dtype, with nothing of size lost to underflow."""
    if not torch.equal(a.to(b.dtype), b):
        return False
    distance = (a.double() - b.double()).norm()
    return bool(distance <= torch.finfo(b.dtype).eps * a.double().norm())


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
