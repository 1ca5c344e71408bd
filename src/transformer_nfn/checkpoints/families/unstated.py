"""Facts that a checkpoint does not state and on which its symmetries depend."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from transformer_nfn.checkpoints.families.expressions import (
    MissingFieldError,
    evaluate,
    names_in,
)
from transformer_nfn.checkpoints.families.family import Family
from transformer_nfn.checkpoints.families.options import OpenOptions
from transformer_nfn.checkpoints.families.recognise import families
from transformer_nfn.errors import CheckpointError, SpaceError

HEADS = 8
"""Example of a size in the message."""


class UnstatedFactError(CheckpointError):
    """A checkpoint that does not state facts on which its symmetries depend.

    Attributes:
        lines: an architecture file that states them, to paste.
    """

    def __init__(self, where: str, family: Family, fields: Iterable[str]) -> None:
        examples = {name: family.defaults.get(name, HEADS) for name in fields}
        if "architectures" in examples:
            examples["architectures"] = _class_example(family)
        options = OpenOptions(settings=examples)
        super().__init__(
            f"'{where}' does not state {', '.join(examples)} of {family.title}, on which its "
            f"symmetries depend: state them with the values of this model, as in {options}, or "
            "under [config] of an --architecture file"
        )
        own = family.name not in families()
        self.lines = (
            *(() if own else (f'extends = "{family.name}"',)),
            "[config]",
            *(f"{name} = {json.dumps(value)}" for name, value in examples.items()),
        )


def _class_example(family: Family) -> str:
    heads = [pattern.removeprefix("*") for pattern in family.heads]
    output = "ForConditionalGeneration" if "decoder." in family.counters else "ForCausalLM"
    return heads[0] if heads else output


def unstated_facts(
    family: Family, fields: Mapping[str, Any], tensors: Collection[str]
) -> list[str]:
    """The config fields that the facts of a family need and a config lacks.

    Args:
        family: whose facts are evaluated.
        fields: the config, and every size.
        tensors: canonical names of the tensors in the file.
    """
    known = {
        "layer": 0,
        "stack": next(iter(family.counters), ""),
        "has_gate": any(name.endswith(".W_G") for name in tensors),
        **fields,
    }
    missing: list[str] = []
    for fact, text in family.facts.items():
        unused = fact in ("pooler", "mlm") and f"extra.{fact}.W" not in tensors
        while fact != "tied" and not unused:
            try:
                evaluate(text, known)
            except MissingFieldError as error:
                usual = sorted(names_in(text) & (family.defaults.keys() - known.keys()))
                name = usual[0] if usual else str(error)
                if name in missing or not name.isidentifier():
                    break
                missing.append(name)
                known[name] = family.defaults.get(name, HEADS)
            except SpaceError:
                break  # a field of the wrong kind, which is refused where it is read
            else:
                break
    return missing
