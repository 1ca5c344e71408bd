"""Outputs of two models: which both have, which only one has, which differ in size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformer_nfn.functional.description import EXTRA, KEPT

if TYPE_CHECKING:
    from transformer_nfn.checkpoints.families import Model
    from transformer_nfn.functional.description import Transformer


@dataclass(frozen=True)
class Outputs:
    """What the output heads of two models have in common.

    Attributes:
        common: heads of one shape in both: ``head``, ``extra.pooler``, ``kept.classifier.weight``.
        single: heads that only one of the two has.
        resized: heads that both have in different sizes, with these sizes.
        comparable: both give some output of one meaning and size: logits of a common head, or
            the final stream of two models without a head.
    """

    common: frozenset[str]
    single: tuple[str, ...]
    resized: Mapping[str, tuple[object, object]]
    comparable: bool

    def apart(self) -> str | None:
        """Why the outputs as a whole cannot agree; None where those in common may."""
        if self.resized:
            shown = (f"{name} ({x} and {y})" for name, (x, y) in self.resized.items())
            return f"outputs have different sizes: {', '.join(shown)}"
        if self.comparable:
            return None
        return f"they give no output in common: only one of the two has {', '.join(self.single)}"


def compare_outputs(A: Model, B: Model) -> Outputs:
    """The output heads of two models, by name and size."""
    a, b = _heads(A), _heads(B)
    resized = {name: (a[name], b[name]) for name in a if name in b and a[name] != b[name]}
    single = sorted(a.keys() ^ b.keys())
    if A.about.mlm != B.about.mlm and "head" in a and "head" in b:
        single.append("head")  # read from the stream by one, from a transform of it by the other
    common = frozenset(a.keys() & b.keys()) - resized.keys() - set(single)
    logits = any(name == "head" or name.startswith(KEPT) for name in common)
    streams = A.about.headless and B.about.headless
    vectors = not a and not b
    return Outputs(common, tuple(single), resized, logits or streams or vectors)


def _heads(model: Model) -> dict[str, object]:
    """The sizes of a model's output heads by name."""
    about, names = model.about, model.names
    found: dict[str, object] = {}
    if "head" in names:
        found["head"] = names["head"][1]
    elif about.tied:
        found["head"] = about.vocab
    for name, shape in names.items():
        if name.startswith(EXTRA) and name.endswith(".W"):
            found[name.removesuffix(".W")] = shape[1]
        elif name.startswith(KEPT) and not keeps_inputs(about):
            found[name] = list(shape)
    return found


def keeps_inputs(about: Transformer) -> bool:
    """Whether tensors that nothing acts on may stand before the blocks, not only after them."""
    return about.inputs == "vectors"


def is_output(name: str, about: Transformer) -> bool:
    """Whether a check of that name is of an output head, and not of blocks or embeddings.

    The output matrix of a tied model is its token embedding behind the last norm, if it does not
    read the stream through a transform of its own.
    """
    if name in ("head", "head_bias"):
        return not about.tied or "head" in about.tensors or about.mlm is not None
    return name.startswith(EXTRA) or (name.startswith(KEPT) and not keeps_inputs(about))
