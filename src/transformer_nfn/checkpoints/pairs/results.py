"""What is kept of a pair of models, and how? One JSON file, whole at any time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.io.files import read_regular, write_text

KIND, FORMAT = "transformer-nfn pairs", 1
RELATED = ("same", "same backbone", "derived", "partly")
"""Verdicts that put two models into one group."""


class PairsError(TransformerNFNError):
    """A folder whose checkpoints cannot be compared, or a file of pairs that cannot be read."""


@dataclass(frozen=True)
class Pair:
    """How two models of a folder are related.

    Attributes:
        a: name of the one.
        b: of the other.
        identities: of both files when they were compared.
        verdict: of `relate`; ``not comparable`` where their shapes or families differ too much,
            ``failed`` where a file could not be read after all.
        score: 0 for strangers, 1 for a disguise; None where nothing was compared.
        same_function: True, False, or None where that is not known.
        reason: one sentence.
    """

    a: str
    b: str
    identities: tuple[str, str]
    verdict: str
    score: float | None
    same_function: bool | None
    reason: str


def groups(names: Iterable[str], pairs: Iterable[Pair]) -> list[list[str]]:
    """Models joined by same, derived or partly, directly or through others; largest first."""
    group = {name: [name] for name in names}
    for pair in pairs:
        a, b = group[pair.a], group[pair.b]
        if pair.verdict in RELATED and a is not b:
            a += b
            for name in b:
                group[name] = a
    unique = {id(members): sorted(members) for members in group.values()}
    return sorted(unique.values(), key=lambda members: (-len(members), members))


def as_json(
    models: dict[str, str], not_read: dict[str, str], pairs: Iterable[Pair]
) -> dict[str, Any]:
    """Everything that is known, as words and numbers.

    Args:
        models: by name, what they are.
        not_read: by name, why not.
        pairs: those that are done.
    """
    done = list(pairs)
    return {
        "kind": KIND,
        "format": FORMAT,
        "models": models,
        "not_read": not_read,
        "pairs": [asdict(pair) for pair in done],
        "groups": groups(models, done),
    }


def write_pairs(path: Path, content: dict[str, Any]) -> None:
    """Writes what `as_json` gave."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_pairs(path: Path) -> list[Pair]:
    """The pairs that a file keeps; none where there is no file yet."""
    if not path.exists():
        return []
    try:
        content = json.loads(read_regular(path).decode("utf-8"))
        if content["kind"] != KIND:
            raise PairsError(f"'{path}': expected kind '{KIND}', found '{content['kind']}'")
        if content["format"] != FORMAT:
            raise PairsError(
                f"'{path}': pairs of format {content['format']}, expected {FORMAT}; name another "
                "file"
            )
        pairs = [
            Pair(**{**pair, "identities": tuple(pair["identities"])}) for pair in content["pairs"]
        ]
        for pair in pairs:
            _check_pair(pair, path)
        return pairs
    except PairsError:
        raise
    except OSError as error:
        raise PairsError(f"'{path}' cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PairsError(f"'{path}': damaged, or no file of pairs ({error})") from error


def _check_pair(pair: Pair, path: Path) -> None:
    """Refuses a pair whose fields are of other types than `Pair` documents."""
    words = (pair.a, pair.b, pair.verdict, pair.reason, *pair.identities)
    score = pair.score
    if (
        not all(isinstance(word, str) for word in words)
        or len(pair.identities) != 2
        or not (score is None or (type(score) in (int, float) and math.isfinite(score)))
        or pair.same_function not in (True, False, None)
        or type(pair.same_function) not in (bool, type(None))
    ):
        raise PairsError(f"'{path}': damaged, what it says of a pair is none of a comparison")
