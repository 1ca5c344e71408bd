"""Recognition of the family of a checkpoint, by options, config or the names of its tensors."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from transformer_nfn.checkpoints.families.expressions import unexpected
from transformer_nfn.checkpoints.families.family import COUNTER, DATA_FILE, Family, Line, families
from transformer_nfn.errors import CheckpointError, TransformerNFNError
from transformer_nfn.io.checkpoint import refuse
from transformer_nfn.io.tensor_files import TensorInfo, common_wrappers

EXPERT = re.compile(r"\.(experts|block_sparse_moe|shared_expert|shared_experts|router)\.")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


class UnknownFamilyError(CheckpointError):
    """A checkpoint that names no family and whose tensors are those of none."""


@dataclass(frozen=True)
class OpenOptions:
    """How to open a checkpoint whose family or config its files do not state.

    Attributes:
        architecture: a user's data file of a family, see ``docs/families.md``.
        family: the name of a known family, such as ``bert``; skips recognition.
        settings: config fields, which take precedence over those of ``config.json``.
        base: the model that an adapter (LoRA) changes, a path or a repository of a hub; else the
            repository that the adapter names.

    >>> str(OpenOptions(family="bert", settings={"num_attention_heads": 8}))
    '--family bert --set num_attention_heads=8'
    """

    architecture: Path | None = None
    family: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    base: str | Path | None = None

    def __post_init__(self) -> None:
        if self.architecture is not None and self.family is not None:
            raise TransformerNFNError(
                f"--architecture '{self.architecture}' and --family '{self.family}' both choose a "
                "family: give one of them"
            )

    def __bool__(self) -> bool:
        """Whether anything is stated."""
        return self != OpenOptions()

    def __str__(self) -> str:
        """The options as a command line has them."""
        words = []
        if self.architecture is not None:
            words += ["--architecture", str(self.architecture)]
        if self.family is not None:
            words += ["--family", self.family]
        for name, value in self.settings.items():
            text = value if isinstance(value, str) else json.dumps(value)
            words += ["--set", f"{name}={text}"]
        if self.base is not None:
            words += ["--base", str(self.base)]
        return shlex.join(words)

    def absolute(self) -> OpenOptions:
        """The same for a process with another working directory."""
        architecture, base = self.architecture, self.base
        if base is not None and Path(base).exists():
            base = Path(base).resolve()
        return replace(self, architecture=architecture and architecture.resolve(), base=base)


def check_no_mixture(keys: Iterable[str], config: Mapping[str, Any], where: str) -> None:
    """Refuse a mixture of experts, as the config or the names of the tensors show it."""
    for key in keys:
        if EXPERT.search(key):
            refuse(f"{where}': '{key}", "a mixture of experts")
    for name in EXPERTS:
        experts = config.get(name)
        if type(experts) is int and 1 < experts < 1 << 30:
            refuse(f"{where}': '{name} = {experts}", "a mixture of experts")


def recognise(infos: Mapping[str, TensorInfo], config: Mapping[str, Any], where: str) -> Family:
    """The family of a checkpoint; raises `CheckpointError` where there is none, or several."""
    model_type, architecture = config.get("model_type"), config.get("architecture")
    if model_type is not None and not isinstance(model_type, str):
        raise unexpected(where, "config.json: model_type", "a name such as 'bert'", model_type)
    if model_type is not None:
        named = [f for f in families().values() if model_type in f.model_types]
        if not named:
            known = ", ".join(sorted({t for f in families().values() for t in f.model_types}))
            raise unexpected(where, "config.json: model_type", f"one of {known}", model_type)
        return named[0] if len(named) == 1 else _by_names(named, infos, config, where)
    if isinstance(architecture, str):
        named = [
            f
            for f in families().values()
            if any(fnmatchcase(architecture, pattern) for pattern in f.architectures)
        ]
        if named:
            return _by_names(named, infos, config, where)
    return _by_names(list(families().values()), infos, config, where)


def _by_names(
    among: list[Family], infos: Mapping[str, TensorInfo], config: Mapping[str, Any], where: str
) -> Family:
    wrappers = common_wrappers(infos)
    among = [family for family in among if _may_fit(family, infos, wrappers)]
    readings = [_Reading.of(family, infos, where) for family in among]
    readings = [r for r in readings if r.fits(config)]
    # Of two that find what they need, the one that knows all the rest is meant.
    readings = [r for r in readings if r.knows_all()] or readings
    # Names may agree where shapes do not.
    readings = [r for r in readings if r.agrees()] or readings
    # What keeps unknown tensors fits too easily.
    readings = [r for r in readings if not r.family.open] or readings
    fitting = [r.family for r in readings]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise UnknownFamilyError(
            f"'{where}' has no config.json with a model_type, and its tensors are those of no "
            f"known family (tnfn architectures): {DATA_FILE} can say what they are"
        )
    raise CheckpointError(
        f"'{where}': its tensors could be those of "
        f"{' or '.join(family.title for family in fitting)}: choose with "
        f"{' or '.join(f'--family {family.name}' for family in fitting)}"
    )


def _needed(family: Family) -> Iterator[Line]:
    """The lines of which a file of the family holds a tensor, or whose name it states."""
    for line in family.lines:
        if not line.optional and not {line.counter, line.stack} & family.optional:
            yield line


def _may_fit(
    family: Family, infos: Mapping[str, TensorInfo], wrappers: Iterable[str]
) -> bool:
    """Whether `_Reading.fits` could hold; looks few names up where that one renames all."""
    needed = [line for line in _needed(family) if line.stated_by is None]
    if family.prefixes == ("*",):
        end = next(COUNTER.sub("0", line.key) for line in needed if line.counter)
        return any(key.endswith(end) for key in infos)

    def there(key: str) -> bool:
        others = (
            key.removesuffix(name) + alias
            for alias, name in family.aliases.items()
            if key.endswith(name)
        )
        return key in infos or any(other in infos for other in others)

    return any(
        all(there(wrapper + COUNTER.sub("0", line.after(prefix))) for line in needed)
        for wrapper in wrappers
        for prefix in family.prefixes
    )


@dataclass(frozen=True)
class _Reading:
    """A file read as one of a family, by the names of its tensors.

    Attributes:
        family: of which it may be.
        infos: tensors of the file.
        keys: the file's names by those of the family.
        prefix: of the family's names; None where the file holds several networks of the family.
    """

    family: Family
    infos: Mapping[str, TensorInfo]
    keys: Mapping[str, str]
    prefix: str | None

    @staticmethod
    def of(family: Family, infos: Mapping[str, TensorInfo], where: str) -> _Reading:
        keys = standard_names(family, infos)
        try:
            return _Reading(family, infos, keys, find_prefix(family, keys, where))
        except CheckpointError:
            return _Reading(family, infos, keys, None)

    def fits(self, config: Mapping[str, Any]) -> bool:
        """Whether every tensor that the first block must have, and every end, is there or stated.

        Several networks fit, which opening the file reports.
        """
        family, prefix = self.family, self.prefix
        if prefix is None:
            return True
        return all(
            COUNTER.sub("0", line.after(prefix)) in self.keys
            if line.stated_by is None
            else config.get(line.stated_by) is not None
            for line in _needed(family)
        )

    def agrees(self) -> bool:
        """Whether axes of the first block that the family gives one name have one size."""
        if self.prefix is None:
            return False
        sizes: dict[tuple[str, ...], int] = {}
        for line in self.family.lines:
            key = COUNTER.sub("0", self.prefix + line.key)
            if line.counter and key in self.keys and len(line.slots) == 1:
                dims, shape = line.slots[0].layout.dims, self.infos[self.keys[key]].shape
                if any(sizes.setdefault(d, n) != n for d, n in zip(dims, shape, strict=False)):
                    return False
        return True

    def knows_all(self) -> bool:
        """Whether every tensor of the file is one that the family may have."""
        family, prefix = self.family, self.prefix
        if prefix is None:
            return False
        lines = [*family.lines, *(line for head in family.heads.values() for line in head)]
        known = pattern_of([line.after(prefix) for line in lines])
        return all(known.fullmatch(key) or is_ignored(family, key, prefix) for key in self.keys)


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
            f"'{found[1]}': {DATA_FILE} with prefixes = [\"{found[0]}\"] picks one",
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
    # A gap is reported as the missing tensor; a large index must not create a million names.
    return {counter: min(n, len(keys)) for counter, n in counts.items()}


def count_experts(family: Family, keys: Mapping[str, str], prefix: str) -> int:
    """How many experts a mixture has in each block, by the highest number; 0 for no mixture."""
    mixed = [line.key for line in family.lines if line.mixed]
    pattern = pattern_of([prefix + key for key in mixed])
    numbers = [int([n for n in m.groups() if n][1]) for k in keys if (m := pattern.fullmatch(k))]
    return min(max(numbers, default=-1) + 1, len(keys)) if mixed else 0


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
