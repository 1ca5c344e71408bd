"""Which rotary positions does a config ask for? Those that are understood, or a refusal by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformer_nfn.checkpoints.families.expressions import shown
from transformer_nfn.errors import CheckpointError
from transformer_nfn.functional.description import RotaryScaling

KINDS = ("default", "linear", "llama3")


def read_rotary(
    config: Mapping[str, Any], d_k: int, where: str, *, part: float = 1.0, base: float = 10_000.0
) -> tuple[int, float, RotaryScaling | None]:
    """How many coordinates are turned, the base of the frequencies, and how they were stretched.

    Configs of several years name these in several ways: fields of their own, ``rope_scaling``, or
    one table ``rope_parameters``.

    Args:
        config: the fields.
        d_k: size of a key.
        where: what errors call the file.
        part: of the coordinates that are turned, where the config names none.
        base: where the config names none.
    """
    field = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    table = config.get(field)
    if table is None:
        table = {}
    if not isinstance(table, Mapping):
        raise CheckpointError(
            f"'{where}': config.json: '{field}' expected a table, found {shown(table)}"
        )
    kind = table.get("rope_type", table.get("type", "default"))
    if not isinstance(kind, str) or kind not in KINDS:
        raise CheckpointError(
            f"'{where}': config.json: '{field}' expected a rotary scheme among "
            f"{', '.join(KINDS)}, found {shown(kind)}"
        )
    fields = {**config, **table}
    base = _number(fields, ("rope_theta", "rotary_emb_base"), base, where)
    part = _number(fields, ("partial_rotary_factor", "rotary_pct"), part, where)
    rotary = int(d_k * part)
    if not 0 < rotary <= d_k or rotary % 2:
        raise CheckpointError(
            f"'{where}': config.json: rotary positions expected an even number of coordinates up "
            f"to {d_k}, found {rotary}"
        )
    if kind == "default":
        return rotary, base, None
    factor = _number(fields, ("factor",), None, where)
    if kind == "linear":
        return rotary, base, RotaryScaling("linear", factor)
    low, high, original = (
        _number(fields, (name,), None, where)
        for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    if not low < high:
        raise CheckpointError(
            f"'{where}': config.json: expected low_freq_factor below high_freq_factor, found "
            f"{low} and {high}"
        )
    return rotary, base, RotaryScaling("llama3", factor, low, high, original)


def _number(
    fields: Mapping[str, Any], names: tuple[str, ...], default: float | None, where: str
) -> float:
    for name in names:
        value = fields.get(name)
        if value is not None:
            if type(value) not in (int, float) or not 0 < value < 1e30:
                raise CheckpointError(
                    f"'{where}': config.json: '{name}' expected a number above 0, found "
                    f"{shown(value)}"
                )
            return float(value)
    if default is None:
        raise CheckpointError(f"'{where}': config.json lacks '{names[0]}' of its rotary scheme")
    return default
