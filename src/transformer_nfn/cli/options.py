"""Options and arguments that several commands share, and what they resolve to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transformer_nfn.errors import TransformerNFNError

if TYPE_CHECKING:
    from transformer_nfn.checkpoints.families import OpenOptions

VALUES_SHOWN = 8
"""Values of a column that an error lists."""
LARGEST_SEED = 2**63 - 1
"""The largest seed of PyTorch's generators."""


def seed_from(lowest: int) -> Callable[[int], int]:
    """Callback of an option that takes seeds from ``lowest`` up.

    Bounds of the option itself would be printed in its help, 40 characters wide.
    """

    def check(seed: int) -> int:
        if not lowest <= seed <= LARGEST_SEED:
            raise typer.BadParameter(f"{seed} is not in the range {lowest}<=x<={LARGEST_SEED}.")
        return seed

    return check


def named(kind: str) -> Callable[[Path | None], Path | None]:
    """Callback of an argument that takes a folder or the name of an asset of a kind."""

    def find(path: Path | None) -> Path | None:
        from transformer_nfn.io.location import Location

        return None if path is None else Location.of(path).folder(kind)

    return find


def whole_numbers(text: str, expected: str) -> list[int]:
    """Whole numbers separated by commas; ``expected`` begins the error."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise TransformerNFNError(f"{expected}, found '{text}'") from None


def percent_of(text: str) -> int | None:
    """The value of a `PercentOption`; None for all checkpoints."""
    if text != "all" and not text.isdecimal():
        raise TransformerNFNError(f"--percent expected a whole number or all, found '{text}'")
    return None if text == "all" else int(text)


def check_values(zoo: str, column: str, held: Set[Any], wanted: Sequence[Any]) -> None:
    """Reject values that a column of a zoo does not hold."""
    for value in wanted:
        if value not in held:
            values = sorted(held)
            shown = ", ".join(map(str, values[:VALUES_SHOWN]))
            more = len(values) - VALUES_SHOWN
            raise TransformerNFNError(
                f"'{zoo}' has no rows of {column} '{value}': it has {shown or 'none'}"
                + (f" and {more:,} more" if more > 0 else "")
            )


JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
PercentOption = Annotated[
    str, typer.Option(help="Which checkpoint of each run: 50, 75, 100, or all of them.")
]
SplitOption = Annotated[str, typer.Option(help="What stays in one part: a run, or a checkpoint.")]
SplitSeedOption = Annotated[
    int, typer.Option(min=0, help="Seed of the split into training, validation and test part.")
]
VariantOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="A variant of the predictor, such as authors: their layers."),
]
NETWORK = (
    "A network: a .safetensors or .pt file, a folder, a row of a zoo (ZOO#12), or a model of a hub "
    "(org/name)."
)
NetworkArgument = Annotated[str, typer.Argument(help=NETWORK)]
SeedOption = Annotated[
    int, typer.Option(help="Seed of all random numbers.", callback=seed_from(-(2**63)))
]
ArchitectureOption = Annotated[
    Path | None,
    typer.Option(
        "--architecture",
        help="A data file (TOML) that says what the tensors of a checkpoint are; it may extend a "
        "known family, see `tnfn architectures`.",
    ),
]
FamilyOption = Annotated[
    str | None,
    typer.Option("--family", help="Read checkpoints as this family, see `tnfn architectures`."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="A config field that the files do not state, such as nhead=8; may be repeated, and "
        "holds for every checkpoint of the command.",
    ),
]
BaseOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="What an adapter (LoRA) changes: a file, a folder, or a model of a hub (default: the "
        "one that the adapter names).",
    ),
]

SETTING = re.compile(r"([A-Za-z_]\w*)=(.+)", re.DOTALL)
WORDS = {"True": True, "False": False, "None": None}


def pick_device(name: str) -> str:
    """Resolve ``auto`` to CUDA if available."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise TransformerNFNError(f"--device must be auto, cpu or cuda, found '{name}'")
    if name == "cuda" and not torch.cuda.is_available():
        raise TransformerNFNError("--device cuda: there is no CUDA device here")
    return name


def open_options(
    architecture: Path | None,
    family: str | None,
    settings: Sequence[str] | None,
    base: str | None = None,
) -> OpenOptions:
    """Options of a command that define how its checkpoints are opened."""
    from transformer_nfn.checkpoints.families import OpenOptions
    from transformer_nfn.checkpoints.families.family import known_family

    if family is not None:
        known_family(family)
    parsed: dict[str, Any] = {}
    for text in settings or ():
        match = SETTING.fullmatch(text)
        if match is None:
            raise TransformerNFNError(f"--set expected FIELD=VALUE, as in nhead=8, found '{text}'")
        if match[1] in parsed:
            raise TransformerNFNError(f"--set states '{match[1]}' twice")
        parsed[match[1]] = _setting(match[1], match[2])
    return OpenOptions(architecture, family, parsed, base)


def _setting(name: str, text: str) -> Any:
    """A value in JSON or as Python writes it; anything else is text."""
    if text in WORDS:
        return WORDS[text]
    try:
        value = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, dict | list):
        raise TransformerNFNError(
            f"--set {name} expected a number, true, false or text, found '{text}'"
        )
    return value
