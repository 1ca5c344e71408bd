"""Names in a file: wrappers, aliases, prefixes and the numbers of blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from transformer_nfn.checkpoints.families.family import COUNTER, Family, Line
from transformer_nfn.errors import CheckpointError
from transformer_nfn.io.tensor_files import TensorInfo, common_wrappers


def find_wrapper(family: Family, infos: Mapping[str, TensorInfo]) -> str:
    """What a training program put before all names of a file, such as ``module.``.

    A ``model.`` may also be the family's own: of several readings the one with most of its names
    is taken, and of those the shortest.
    """
    found = common_wrappers(infos)
    if len(found) == 1 or family.prefixes == ("*",):
        return ""
    names = [COUNTER.sub("0", line.key) for line in family.lines if not line.outside]

    def hits(wrapper: str) -> int:
        return max(sum(f"{wrapper}{p}{name}" in infos for name in names) for p in family.prefixes)

    return max(found, key=hits)


def standard_names(family: Family, infos: Mapping[str, TensorInfo]) -> dict[str, str]:
    """The file's names by what they are called without wrappers and aliases."""
    wrapper = find_wrapper(family, infos)
    out = {}
    for key in infos:
        standard = key.removeprefix(wrapper)
        for alias, name in family.aliases.items():
            if standard == alias or standard.endswith(f".{alias}"):
                standard = standard.removesuffix(alias) + name
        out[standard if standard not in out else key] = key
    return out


def find_prefix(family: Family, keys: Mapping[str, str], where: str) -> str:
    """What stands before the family's names in this file."""
    inner = [line for line in family.lines if not line.outside and not line.optional]
    if family.prefixes != ("*",):
        first = [COUNTER.sub("0", line.key) for line in inner]
        hits = {p: sum(p + name in keys for name in first) for p in family.prefixes}
        return max(family.prefixes, key=lambda p: hits[p])
    ends = [COUNTER.sub("0", line.key) for line in inner if line.counter]
    found = sorted(
        {key.removesuffix(ends[0]) for key in keys if key == ends[0] or key.endswith(f".{ends[0]}")}
    )
    if len(found) > 1:
        raise CheckpointError(
            f"'{where}': holds several networks of {family.title}, under '{found[0]}' and "
            f"'{found[1]}': an "
            f'--architecture file with prefixes = ["{found[0]}"] picks one',
        )
    return found[0] if found else ""


def pattern_of(templates: list[str]) -> re.Pattern[str]:
    """What matches any of some names, with a number where they count blocks."""
    escaped = (re.escape(COUNTER.sub("\0", template)) for template in templates)
    return re.compile("|".join(name.replace("\0", r"(\d{1,9})") for name in escaped))


def count_blocks(family: Family, keys: Mapping[str, str], prefix: str) -> dict[str, int]:
    """How many blocks of each stack the file holds, by the highest number."""
    counts = {counter: 0 for counter in family.counters.values()}
    patterns = {
        counter: pattern_of([prefix + line.key for line in family.lines if line.counter == counter])
        for counter in counts
    }
    for key in keys:
        for counter, pattern in patterns.items():
            found = pattern.fullmatch(key)
            if found:
                number = int(next(n for n in found.groups() if n is not None))
                counts[counter] = max(counts[counter], number + 1)
    # A gap is told as the tensor that is missing; a wild number must not make a million names.
    return {counter: min(n, len(keys)) for counter, n in counts.items()}


def head_lines(family: Family, config: Mapping[str, Any]) -> tuple[Line, ...]:
    """The lines for the class of the model that the config names."""
    classes = config.get("architectures")
    names = [c for c in classes if isinstance(c, str)] if isinstance(classes, list) else []
    return tuple(
        line
        for pattern, lines in family.heads.items()
        if any(fnmatchcase(name, pattern) for name in names)
        for line in lines
    )


def is_ignored(family: Family, key: str, prefix: str) -> bool:
    """Whether a tensor is a buffer that is no weight."""
    inner = key.removeprefix(prefix)
    return any(fnmatchcase(inner, p) or fnmatchcase(key, p) for p in family.ignored)
