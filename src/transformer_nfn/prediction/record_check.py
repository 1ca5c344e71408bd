"""Can this be what ``run.json`` holds? Asked before anything in it is believed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.io.json_fields import Fields
from transformer_nfn.zoo.sizes import check_sizes

SEED_NUMBERS = ("tau", "tau_low", "tau_high", "r2", "mae", "seconds")
OPTIONAL_NUMBERS = ("val_tau", "best_epoch")
FRACTIONS = ("level", "radius")
"""Of an accuracy, which lies between 0 and 1."""
BY_KIND = ("kinds", "left_out")
"""Where a summary has figures for each kind of a mixed zoo."""
WIDEST = 1e6
"""Times that an interval may be widened; it never reaches beyond 0 and 1."""


def check_record(data: Mapping[str, Any], where: str, kind: type[TransformerNFNError]) -> None:
    """Refuses a record whose fields are of other types than those that `RunRecord` documents.

    Args:
        data: what the file holds.
        where: its path.
        kind: the error that refuses it.
    """
    fields = Fields(data, where, kind)
    fields.text("model")
    if "status" in data:
        fields.text("status")
    for name in ("selection", "protocol"):
        fields.inner(name)
    zoo = fields.inner("zoo")
    for name in ("name", "task"):
        if name in zoo.data:
            zoo.text(name)
    if "architecture" in zoo.data:
        check_sizes(zoo.inner("architecture").data)
    if "architectures" in zoo.data:
        kinds = zoo.inner("architectures")
        for name in kinds.data:
            check_sizes(kinds.inner(name).data)
        left_out = fields.inner("selection")
        if "left_out" in left_out.data:
            left_out.items("left_out")
    if fields.has("num_parameters"):
        fields.whole("num_parameters")
    if fields.has("table"):
        fields.inner("table")
    for row in fields.inner_items("seeds") if "seeds" in data else []:
        row.whole("seed")
        _check_numbers(row, (*SEED_NUMBERS, *OPTIONAL_NUMBERS))
    if "summary" in data:
        _check_summary(fields.inner("summary"))


def _check_summary(summary: Fields) -> None:
    _check_numbers(summary, ("tau", "tau_se", "tau_together", "r2", "mae", "coverage"))
    for name in FRACTIONS:
        if name in summary.data:
            summary.number(name, 0.0, 1.0)
    for name in BY_KIND:
        if name in summary.data:
            kinds = summary.inner(name)
            for found in (kinds.inner(kind) for kind in kinds.data):
                found.whole("networks")
                _check_numbers(found, ("tau", "tau_se", "r2", "mae", "coverage"))
    if "widening" in summary.data:
        widening = summary.inner("widening")
        for name in widening.data:
            widening.number(name, 1.0, WIDEST)


def _check_numbers(fields: Fields, names: tuple[str, ...]) -> None:
    """Numbers where there are any; NaN is what a single seed has for an error of the mean."""
    for name in names:
        if not fields.has(name):
            continue
        value = fields.data[name]
        if not (isinstance(value, float) and math.isnan(value)):
            fields.number(name)
