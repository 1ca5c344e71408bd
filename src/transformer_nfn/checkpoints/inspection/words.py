"""How is an inspection told? As JSON, and in short words for a table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from transformer_nfn.checkpoints.inspection.repeats import DEAD, DUPLICATE, Repeats
from transformer_nfn.checkpoints.inspection.spectra import stable_rank

if TYPE_CHECKING:
    from transformer_nfn.checkpoints.families import Model
    from transformer_nfn.checkpoints.inspection.whole import BlockReport, Inspection


def dtype_word(x: Tensor) -> str:
    """``float32``."""
    return str(x.dtype).removeprefix("torch.")


def sizes(model: Model) -> dict[str, Any]:
    """The sizes of a checkpoint in words and numbers."""
    about = model.about
    first = about.stacks[-1].blocks[0]
    attention = first.attention
    out: dict[str, Any] = {
        "weights": sum(math.prod(shape) for shape in model.names.values()),
        "tensors": len(model.names),
        "dtype": str(model.dtype).removeprefix("torch."),
        "blocks": {s.prefix.rstrip(".") or "blocks": len(s.blocks) for s in about.stacks},
        "width": about.width,
        "heads": attention.heads,
        "key/value heads": attention.groups,
        "d_k": attention.d_k,
        "d_v": attention.d_v,
        "neurons": first.mlp.neurons,
        "activation": first.mlp.activation + (", gated" if first.mlp.gated else ""),
        "norm": {"layer": "LayerNorm", "rms": "RMS norm"}[about.norm] + f", {first.order}",
    }
    if attention.rotary:
        out["rotary"] = attention.rotary
    if about.vocab is not None:
        out["vocabulary"] = about.vocab
    return out


def repeats_in_words(found: Repeats | None) -> str:
    """``2 dead (3, 7), 1 pair (0 = 5)``; a dash where there is nothing."""
    if found is None or not (found.dead or found.pairs):
        return "–"
    parts = []
    if found.dead:
        parts.append(f"{len(found.dead)} dead ({_some([str(i) for i in found.dead])})")
    if found.pairs:
        shown = _some([f"{i} = {j}" for i, j, _ in found.pairs])
        parts.append(f"{len(found.pairs)} alike ({shown})")
    return ", ".join(parts)


def _some(items: list[str]) -> str:
    return ", ".join(items[:4]) + (", …" if len(items) > 4 else "")


def spectrum_in_words(values: Tensor) -> str:
    """Largest singular value and stable rank, over heads from the least to the largest."""
    top, rank = values.amax(-1).flatten(), stable_rank(values).flatten()
    return f"{_span(top, '.2g')} · {_span(rank, '.1f')}"


def _span(x: Tensor, form: str) -> str:
    low, high = format(float(x.min()), form), format(float(x.max()), form)
    return low if low == high else f"{low}–{high}"


def as_json(found: Inspection) -> dict[str, Any]:
    """Everything an inspection says."""
    return {
        "where": found.where,
        "family": found.family,
        "sizes": dict(found.sizes),
        "ties": list(found.ties),
        "tensors": [
            {
                "name": line.name,
                "times": line.times,
                "shape": list(line.shape),
                "axes": [
                    {"name": name, "acts": acts or None}
                    for name, acts in zip(line.axes, line.acts, strict=True)
                ],
            }
            for line in found.tensors
        ],
        "group": {
            "continuous_parameters": found.continuous,
            "log10_permutations_and_signs": found.finite,
            "rows": [vars(row) for row in found.symmetries],
        },
        "thresholds": {"dead": DEAD, "duplicate": DUPLICATE},
        "blocks": [_block(block) for block in found.blocks],
    }


def _block(block: BlockReport) -> dict[str, Any]:
    return {
        "name": block.name,
        "spectra": {
            name: {"values": values.tolist(), "stable_rank": stable_rank(values).tolist()}
            for name, values in block.spectra.items()
        },
        "heads": {part or "own": _repeats(r) for part, r in block.heads.items()},
        "neurons": None if block.neurons is None else _repeats(block.neurons),
    }


def _repeats(found: Repeats) -> dict[str, Any]:
    return {"dead": list(found.dead), "duplicates": [list(pair) for pair in found.pairs]}
