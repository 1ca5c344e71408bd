"""Options and arguments that several commands share, and what they resolve to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transformer_nfn.errors import SpaceError, TransformerNFNError

if TYPE_CHECKING:
    from transformer_nfn.checkpoints.families import OpenOptions
    from transformer_nfn.networks import Network
    from transformer_nfn.spaces import Weights, WeightSpace

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
        from transformer_nfn.io.assets import resolve

        return None if path is None else resolve(path, kind)

    return find


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
NETWORK = "A network: a .safetensors or .pt file, a folder, or a row of a zoo (ZOO#12)."
NetworkArgument = Annotated[str, typer.Argument(help=NETWORK)]
SeedOption = Annotated[
    int, typer.Option(help="Seed of all random numbers.", callback=seed_from(-(2**63)))
]
PartOption = Annotated[
    str | None,
    typer.Option("--part", help="Only the tensors below this name, such as blocks.0."),
]
SpaceOption = Annotated[
    str | None,
    typer.Option(
        "--space",
        help="The weight space: a JSON file, or NAME:SIZES such as attention_block:32,2,16,16,64. "
        "Default: what the file itself says.",
    ),
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

SPACE_HELP = """NAME is one of the ready spaces, SIZES its whole numbers in order:

  multi_head:D,heads,Dk,Dv
  attention_block:D,heads,Dk,Dv,Dff   (also biased_block, rope_block, swiglu_block)
  grouped_query_block:D,groups,queries,Dk,Dv,Dff
  residual_stack:blocks,D,heads,Dk,Dv,Dff,Din,Dout
  decoder_stack:blocks,D,groups,queries,Dk,Dv,Dff,Din,Dout
"""
WITH_ENDS = {"residual_stack": 8, "decoder_stack": 9}
"""Spaces with an input and an output width, and their number of sizes."""
LARGEST = 2**31 - 1
"""The largest size of an axis."""
DEEPEST = 10_000
"""The largest number of blocks of a stack; writing out the axes of more takes minutes."""
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
    architecture: Path | None, family: str | None, settings: Sequence[str] | None
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
    return OpenOptions(architecture, family, parsed)


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


def refuse_options(file: str, options: OpenOptions, **others: object) -> None:
    """Reject options for checkpoints where a network of a weight space is read.

    Args:
        file: the network.
        options: how checkpoints are opened.
        others: values of other options for checkpoints, by name; None or False was not given.
    """
    given = [str(options)] if options else []
    given += [f"--{name.replace('_', '-')}" for name, value in others.items() if value]
    if given:
        raise TransformerNFNError(
            f"{given[0]} is for checkpoints of transformers, and '{file}' is read as a network of "
            "a weight space"
        )


def _sizes(text: str) -> list[int] | None:
    """Whole numbers separated by commas; None for other texts and sizes beyond any network."""
    words = text.split(",") if text else []
    if not all(re.fullmatch(r"\s*-?[0-9]{1,10}\s*", word) for word in words):
        return None
    numbers = [int(word) for word in words]
    return numbers if all(number <= LARGEST for number in numbers) else None


def parse_space(text: str) -> WeightSpace:
    """Parse ``attention_block:32,2,16,16,64``, or read a JSON file."""
    from transformer_nfn import spaces
    from transformer_nfn.io.json_fields import read_object
    from transformer_nfn.spaces import WeightSpace

    name, _, sizes = text.partition(":")
    if name not in spaces.READY:
        path = Path(text)
        if not path.is_file():
            raise SpaceError(
                f"'{text}' is neither a file nor a ready space ({', '.join(spaces.READY)})"
            )
        return WeightSpace.from_object(read_object(path, SpaceError))
    numbers = _sizes(sizes)
    if numbers is None:
        raise SpaceError(
            f"the sizes of '{text}' must be whole numbers up to {LARGEST:,}, as in {name}:32,2,16"
        )
    if name in WITH_ENDS and numbers[:1] > [DEEPEST]:
        raise SpaceError(f"'{text}' has {numbers[0]:,} blocks, at most {DEEPEST:,} are taken")
    build = getattr(spaces, name)
    try:
        if len(numbers) == WITH_ENDS.get(name):
            built = build(*numbers[:-2], d_in=numbers[-2], d_out=numbers[-1])
        else:
            built = build(*numbers)
    except TypeError:
        usage = next(line for line in SPACE_HELP.splitlines() if name in line).split()[0]
        expected = usage.partition(":")[2]
        raise SpaceError(
            f"'{text}' has {len(numbers)} sizes; expected {name}:{expected}"
        ) from None
    assert isinstance(built, WeightSpace)
    return built


def named_network(
    network: str | Network, space: str | None, part: str | None, *, in_network: bool = False
) -> tuple[WeightSpace, Weights]:
    """The weights of a network in its space; see `Network.in_space`."""
    from transformer_nfn.networks import resolve_network

    parsed = None if space is None else parse_space(space)
    opened = resolve_network(network) if isinstance(network, str) else network
    return opened.in_space(parsed, part, in_network=in_network)
