"""Can this be what ``run.json`` holds? Asked before anything in it is believed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.files.fields import Fields
from transformer_nfn.zoo.size_check import check_sizes

SEED_NUMBERS = ("tau", "tau_low", "tau_high", "r2", "mae", "seconds")
OPTIONAL_NUMBERS = ("val_tau", "best_epoch")
FRACTIONS = ("level", "radius")
"""Of an accuracy, which lies between 0 and 1."""


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


def _check_numbers(fields: Fields, names: tuple[str, ...]) -> None:
    """Numbers where there are any; NaN is what a single seed has for an error of the mean."""
    for name in names:
        if not fields.has(name):
            continue
        value = fields.data[name]
        if not (isinstance(value, float) and math.isnan(value)):
            fields.number(name)
