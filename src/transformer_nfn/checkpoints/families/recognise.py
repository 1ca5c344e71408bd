"""Recognise the family of a checkpoint by its config, or by the names of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from transformer_nfn.checkpoints.families.expressions import shown
from transformer_nfn.checkpoints.families.family import (
    COUNTER,
    Family,
    build_family,
    merged,
    read_tables,
)
from transformer_nfn.checkpoints.families.keys import (
    find_prefix,
    is_ignored,
    pattern_of,
    standard_names,
)
from transformer_nfn.errors import CheckpointError, SpaceError
from transformer_nfn.io.tensor_files import TensorInfo


class UnknownFamilyError(CheckpointError):
    """A checkpoint that names no family and whose tensors are those of none."""


@cache
def families() -> Mapping[str, Family]:
    """Every family that the library knows, by name."""
    folder = Path(str(files("transformer_nfn.checkpoints.families") / "data"))
    return {path.stem: _read(path, folder) for path in sorted(folder.glob("*.toml"))}


def known_family(name: str) -> Family:
    """The family of that name; raises `SpaceError` where there is none."""
    if name not in families():
        raise SpaceError(
            f"--family expected one of {', '.join(families())}, found {shown(name)}"
        )
    return families()[name]


def read_family(path: str | Path) -> Family:
    """A family from a data file of one's own; it may extend a known one by name."""
    known = Path(str(files("transformer_nfn.checkpoints.families") / "data"))
    return _read(Path(path), known)


def _read(path: Path, folder: Path, depth: int = 0) -> Family:
    return build_family(path.stem, _tables(path, folder, depth), str(path))


def _tables(path: Path, folder: Path, depth: int = 0) -> dict[str, Any]:
    tables = read_tables(path)
    base = tables.get("extends")
    if base is None:
        return tables
    known = sorted(p.stem for p in folder.glob("*.toml"))
    if base not in known or depth > 3:
        raise SpaceError(f"'{path}' extends '{base}', expected one of {', '.join(known)}")
    return merged(_tables(folder / f"{base}.toml", folder, depth + 1), tables)


def recognise(infos: Mapping[str, TensorInfo], config: Mapping[str, Any], where: str) -> Family:
    """The family of a checkpoint; raises `CheckpointError` where there is none, or several."""
    model_type, architecture = config.get("model_type"), config.get("architecture")
    if model_type is not None and not isinstance(model_type, str):
        raise CheckpointError(
            f"'{where}': config.json: model_type expected a name such as 'bert', found "
            f"{shown(model_type)}"
        )
    if model_type is not None:
        named = [f for f in families().values() if model_type in f.model_types]
        if not named:
            known = sorted({t for f in families().values() for t in f.model_types})
            raise CheckpointError(
                f"'{where}': config.json: model_type expected one of {', '.join(known)}, found "
                f"{shown(model_type)}"
            )
        return named[0] if len(named) == 1 else _by_names(named, infos, where)
    if isinstance(architecture, str):
        named = [
            f
            for f in families().values()
            if any(fnmatchcase(architecture, pattern) for pattern in f.architectures)
        ]
        if named:
            return _by_names(named, infos, where)
    return _by_names(list(families().values()), infos, where)


def _by_names(among: list[Family], infos: Mapping[str, TensorInfo], where: str) -> Family:
    fitting = [family for family in among if _fits(family, infos, where)]
    # Of two that find what they need, the one that knows all the rest is meant.
    fitting = [family for family in fitting if _knows_all(family, infos, where)] or fitting
    # What keeps unknown tensors fits too easily.
    fitting = [family for family in fitting if not family.open] or fitting
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise UnknownFamilyError(
            f"'{where}' has no config.json with a model_type, and its tensors are those of no "
            "known family (tnfn architectures): an --architecture file can say what they are"
        )
    raise CheckpointError(
        f"'{where}' has no config.json with a model_type, and its tensors could be those of "
        f"{' or '.join(family.title for family in fitting)}: choose with "
        f"{' or '.join(f'--family {family.name}' for family in fitting)}"
    )


def _fits(family: Family, infos: Mapping[str, TensorInfo], where: str) -> bool:
    """Whether every tensor that the first block must have, and every end, is there."""
    keys = standard_names(family, infos)
    try:
        prefix = find_prefix(family, keys, where)
    except CheckpointError:
        return True  # several networks, which is told when it is opened
    needed = [
        COUNTER.sub("0", line.key if line.outside else prefix + line.key)
        for line in family.lines
        if not line.optional and not {line.counter, line.stack} & family.optional
    ]
    return all(key in keys for key in needed)


def _knows_all(family: Family, infos: Mapping[str, TensorInfo], where: str) -> bool:
    """Whether every tensor of a file is one that the family may have."""
    keys = standard_names(family, infos)
    try:
        prefix = find_prefix(family, keys, where)
    except CheckpointError:
        return False
    lines = [*family.lines, *(line for head in family.heads.values() for line in head)]
    known = pattern_of([line.key if line.outside else prefix + line.key for line in lines])
    return all(known.fullmatch(key) or is_ignored(family, key, prefix) for key in keys)
