"""Families of checkpoints as data files: tensor names, layouts, sizes and facts.

A data file is TOML. Its tables:

- ``[names]``: one line for each tensor of the file, ``"wte.weight" = "token: vocab D"``, in the
  language of `transformer_nfn.io.layout`; several tensors in one are separated by
  commas. A question mark after the name of a file's tensor says that it may be missing; ``kept``
  instead of a layout that no symmetry acts on it. ``head: class D = token: vocab D`` is the output
  matrix, or the token embedding where the two are tied.
- ``[[stacks]]``: ``at``, what stands before the names of one block in a file, with the name of
  the size that counts the blocks in braces; ``prefix``, what stands before the block's number in
  canonical names; ``[stacks.names]``, the lines of a block; ``[stacks.ends]``, lines of the stack
  as a whole; ``optional``, the stack may be missing. A line with ``{expert}`` in its name stands
  for each expert of a mixture, ``expert.{expert}.W_A: neuron D``. A tensor of ``[names]`` that
  holds a part of every block says so with the counter, ``{layer}.contact: +head``. A line of a
  family that another ``extends`` is taken away by ``none``.
- ``[outside]``: lines to which the ``prefixes`` do not apply; ``[heads."*ForQuestionAnswering"]``:
  lines for models of such a class only. A line of either whose name begins with a config field in
  angle brackets, ``"<classifier>.weight"``, is about the module or parameter that the field names.
- ``[shapes]``: of tensors of a file whose shape is not what the layout says, but as many numbers.
- ``[sizes]``, ``[facts]``: see `expressions`.
- ``[config]``: fields of the config where ``config.json`` does not have them;
  ``[presets."vit_huge*"]``: fields that the name of an architecture implies.
- ``[defaults]``: values that the library of the family gives to fields which a config omits. They
  hold where the config names the family by its ``model_type`` or ``architecture``; elsewhere they
  would be guesses, and the fields have to be stated.
- ``[refused]``: error text for a model of which an expression is true, as
  ``"qk_layernorm" = "a norm of queries and keys"``.
- ``gain_offset``, ``neighbours``: see `Family`.
- ``[aliases]``: endings of names that stand for others.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from transformer_nfn.checkpoints.families.expressions import names_in, parse, shown
from transformer_nfn.errors import SpaceError
from transformer_nfn.functional.description import axes_of
from transformer_nfn.io.files import read_regular
from transformer_nfn.io.layout import Layout, Slot

KNOWN = Path(__file__).parent / "data"
"""The data files of known families."""
DATA_FILE = "a data file (--architecture of `tnfn inspect`)"
"""What errors advise; not every command takes one."""
# What expressions may read beside sizes and fields of a config.
COMPUTED = ("layer", "stack", "has_gate", "has_head", "has_pooler")
ROTARY = ("rope_theta", "rotary_emb_base", "partial_rotary_factor", "rotary_pct")
COUNTER = re.compile(r"\{(\w+)\}")
STATED = re.compile(r"<(\w+)>")
TABLES = (
    "title", "extends", "model_types", "architectures", "prefixes", "ignored", "open",
    "gain_offset", "neighbours", "reads", "aliases", "sizes", "facts", "names", "outside", "heads",
    "shapes", "presets", "stacks", "config", "defaults", "refused",
)  # fmt: skip
MERGED = (
    "aliases", "sizes", "facts", "names", "outside", "heads", "shapes", "presets", "config",
    "defaults", "refused",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One tensor of a file, or one for each block.

    Attributes:
        key: its name, with the counter of the blocks in braces.
        slots: what it holds; nothing where nothing acts on it.
        tied: what it holds where output matrix and token embedding are tied.
        optional: it may be missing.
        outside: no prefix stands before it.
        stack: the counter of the stack that it ends; it may be missing with the whole stack.
        shape: in the file, where that is not what the layout says: numbers and names of sizes.
    """

    key: str
    slots: tuple[Slot, ...]
    tied: tuple[Slot, ...] = ()
    optional: bool = False
    outside: bool = False
    stack: str | None = None
    shape: tuple[str, ...] | None = None

    @property
    def counter(self) -> str | None:
        """The size that counts the blocks, if the line stands for many tensors."""
        found = COUNTER.search(self.key)
        return found[1] if found else None

    @property
    def mixed(self) -> bool:
        """Whether the line stands for one tensor of each expert of a block."""
        return len(COUNTER.findall(self.key)) > 1

    @property
    def stated_by(self) -> str | None:
        """The config field that names the module or parameter of the line, if one does."""
        found = STATED.match(self.key)
        return found[1] if found else None

    def after(self, prefix: str) -> str:
        """Its name in a file with a prefix."""
        return self.key if self.outside else prefix + self.key

    def at(self, i: int) -> Line:
        """The line of one block, or of one expert where its block is known."""

        def filled(name: str) -> str:
            return name.replace(f"{{{self.counter}}}", str(i))

        slots = tuple(replace(slot, tensor=filled(slot.tensor)) for slot in self.slots)
        return replace(self, key=filled(self.key), slots=slots)

    def spread(self, counts: Mapping[str, int]) -> Line:
        """A line of one tensor that holds something of every block, with a slot for each."""
        slots: list[Slot] = []
        for slot in self.slots:
            found = COUNTER.search(slot.tensor)
            for i in range(counts[found[1]] if found else 1):
                slots.append(replace(slot, tensor=COUNTER.sub(str(i), slot.tensor)))
        return replace(self, slots=tuple(slots))


@dataclass(frozen=True)
class Family:
    """A family of checkpoints as its data file describes it; see the module.

    Attributes:
        name: of the data file.
        title: as people write it.
        model_types: of ``config.json``.
        architectures: patterns of the field ``architecture`` of a config, where that stands for
            a model type.
        reads: description of what is read.
        prefixes: what may stand before names; a star is anything.
        ignored: patterns of tensors that are no weights.
        open: tensors that no line knows are kept as they are.
        gain_offset: what a file leaves out of the gain of a norm.
        neighbours: rotary pairs are coordinates 2i and 2i + 1 in a file, not i and i + rotary / 2.
        counters: the size that counts the blocks of each stack, by the stack's prefix.
        optional: the counters of stacks that may be missing.
        config: fields that hold where ``config.json`` does not have them.
        defaults: fields that hold where the config also names the family.
        refused: error text for a model of which an expression is true.
    """

    name: str
    title: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    reads: str
    prefixes: tuple[str, ...]
    ignored: tuple[str, ...]
    open: bool
    gain_offset: float
    neighbours: bool
    aliases: Mapping[str, str]
    sizes: Mapping[str, str]
    facts: Mapping[str, str]
    lines: tuple[Line, ...]
    heads: Mapping[str, tuple[Line, ...]]
    presets: Mapping[str, Mapping[str, Any]]
    counters: Mapping[str, str]
    optional: frozenset[str]
    config: Mapping[str, Any]
    defaults: Mapping[str, Any]
    refused: Mapping[str, str]

    def named_by(self, config: Mapping[str, Any]) -> bool:
        """Whether a config names this family."""
        architecture = config.get("architecture")
        return config.get("model_type") in self.model_types or (
            isinstance(architecture, str)
            and any(fnmatchcase(architecture, pattern) for pattern in self.architectures)
        )

    def fields(self) -> list[str]:
        """The config fields that are read, in the order of the data file."""
        texts = [*self.sizes.values(), *self.facts.values(), *self.refused]
        read = [name for text in texts for name in sorted(names_in(text))]
        read += [line.stated_by for line in self.lines if line.stated_by]
        if "rotary" in self.facts:
            read += ROTARY
        if self.presets:
            read.append("architecture")
        if self.heads or any(line.tied for line in self.lines):
            read.append("architectures")
        axes = {axis for line in self.lines for slot in line.slots for axis in slot.axes}
        axes |= {word for line in self.lines for word in line.shape or ()}
        return [f for f in dict.fromkeys(read) if f not in {*self.sizes, *axes, *COMPUTED}]


def read_tables(path: Path) -> dict[str, Any]:
    """The tables of a data file, unchecked in detail."""
    try:
        tables = tomllib.loads(read_regular(path).decode("utf-8"))
    except OSError as error:
        raise SpaceError(f"'{path}' cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpaceError(f"'{path}' is no data file of an architecture: {error}") from error
    for name, value in tables.items():
        if not _is_kind(name, value):
            raise SpaceError(f"'{path}' is no data file of an architecture: '{name}' is malformed")
    return tables


def _is_kind(name: str, value: Any) -> bool:
    """Whether a table has the types that its name asks for."""
    if name in ("config", "defaults", "presets", "heads"):
        inner = value.values() if isinstance(value, dict) else [None]
        return (name in ("config", "defaults") and isinstance(value, dict)) or all(
            isinstance(v, dict) and (name == "presets" or _is_kind("names", v)) for v in inner
        )
    if name in MERGED:
        return isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
    if name in ("model_types", "architectures", "prefixes", "ignored"):
        return isinstance(value, list) and all(isinstance(v, str) for v in value)
    if name == "stacks":
        return isinstance(value, list) and all(
            isinstance(stack, dict)
            and all(_is_kind("names", stack.get(part, {})) for part in ("names", "ends"))
            for stack in value
        )
    return True


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """One data file on top of another: tables line by line, all else as a whole."""
    out = {**base, **over}
    for table in MERGED:
        if table in base and table in over:
            out[table] = _lines_merged(base[table], over[table])
    if "stacks" in base and "stacks" in over:
        nothing: dict[str, Any] = {}
        out["stacks"] = [
            {**low, **top, "names": _lines_merged(low.get("names", {}), top.get("names", {}))}
            for low, top in zip_longest(base["stacks"], over["stacks"], fillvalue=nothing)
        ]
    return out


def _lines_merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lines of one table on top of another's; a question mark is no part of a name."""
    changed = {key.removesuffix("?") for key in over}
    kept = {key: v for key, v in base.items() if key.removesuffix("?") not in changed}
    return kept | {key: v for key, v in over.items() if v != "none"}


def build_family(name: str, tables: Mapping[str, Any], where: str) -> Family:
    """Build a family from the tables of a data file."""
    try:
        return _build(name, tables)
    except SpaceError as error:
        raise SpaceError(f"'{where}': {error}") from error
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise SpaceError(f"'{where}' is no data file of an architecture: {error!r}") from error


def _build(name: str, tables: Mapping[str, Any]) -> Family:
    unknown = [table for table in tables if table not in TABLES]
    if unknown:
        raise SpaceError(f"'{unknown[0]}' is not a table of a data file ({', '.join(TABLES)})")
    stacks = tables.get("stacks", [])
    lines = [
        *(_line(key, text) for key, text in tables.get("names", {}).items()),
        *(line for stack in stacks for line in _block_lines(stack)),
        *(_line(key, text, outside=True) for key, text in tables.get("outside", {}).items()),
    ]
    shapes = {key: tuple(text.split()) for key, text in tables.get("shapes", {}).items()}
    lines = [replace(line, shape=shapes.get(line.key)) for line in lines]
    for text in (
        *tables.get("sizes", {}).values(),
        *tables.get("facts", {}).values(),
        *tables.get("refused", {}),
    ):
        parse(text)
    return Family(
        name=name,
        title=str(tables.get("title", name)),
        model_types=tuple(tables.get("model_types", ())),
        architectures=tuple(tables.get("architectures", ())),
        reads=str(tables.get("reads", "")),
        prefixes=tuple(tables.get("prefixes", ("",))),
        ignored=tuple(tables.get("ignored", ())),
        open=bool(tables.get("open", False)),
        gain_offset=float(tables.get("gain_offset", 0.0)),
        neighbours=bool(tables.get("neighbours", False)),
        aliases=dict(tables.get("aliases", {})),
        sizes=dict(tables.get("sizes", {})),
        facts=dict(tables.get("facts", {})),
        lines=tuple(lines),
        heads={
            kind: tuple(_line(key, text, outside=True) for key, text in names.items())
            for kind, names in tables.get("heads", {}).items()
        },
        presets=dict(tables.get("presets", {})),
        counters={stack.get("prefix", ""): COUNTER.findall(stack["at"])[0] for stack in stacks},
        optional=frozenset(COUNTER.findall(s["at"])[0] for s in stacks if s.get("optional", False)),
        config=dict(tables.get("config", {})),
        defaults=dict(tables.get("defaults", {})),
        refused=dict(tables.get("refused", {})),
    )


def _block_lines(stack: Mapping[str, Any]) -> Iterator[Line]:
    at, prefix = stack["at"], stack.get("prefix", "")
    counters = COUNTER.findall(at)
    if len(counters) != 1:
        raise SpaceError(f"'at = \"{at}\"' must name one size that counts the blocks in braces")
    for key, text in stack["names"].items():
        yield _line(f"{at}{key}", text, before=f"{prefix}{{{counters[0]}}}.")
    for key, text in stack.get("ends", {}).items():
        yield replace(_line(key, text), stack=counters[0])


def _line(key: str, text: str, *, before: str = "", outside: bool = False) -> Line:
    optional, key = key.endswith("?"), key.removesuffix("?")
    if text.strip() == "kept":
        return Line(key, (), optional=optional, outside=outside)
    readings = [
        tuple(_slot(key, words, before) for words in reading.split(","))
        for reading in text.split("=")
    ]
    tied = readings[1] if len(readings) > 1 else ()
    return Line(key, readings[0], tied, optional, outside)


def _slot(key: str, words: str, before: str) -> Slot:
    name, colon, text = words.partition(":")
    name = before + name.strip()
    layout = Layout.parse(text.strip())
    named = sorted(axis for axis in layout.atoms if axis != "+")
    try:
        axes = axes_of(name, len(named))
    except KeyError:
        axes = ()
    if not colon or not axes:
        raise SpaceError(
            f"the line '{key}' must say 'TENSOR: LAYOUT' with a tensor of a transformer, found "
            f"'{words.strip()}'"
        )
    if named != sorted(axes):
        raise SpaceError(
            f"the layout of '{name}' in '{key}' must name {' '.join(axes)} once each, found "
            f"'{layout.text}'"
        )
    return Slot(name, layout, axes)


@cache
def families() -> Mapping[str, Family]:
    """Every known family by name.

    >>> families()["gpt2"].title
    'GPT-2'
    """
    return {path.stem: read_family(path) for path in sorted(KNOWN.glob("*.toml"))}


def known_family(name: str) -> Family:
    """The family of that name; raises `SpaceError` where there is none."""
    if name not in families():
        raise SpaceError(
            f"--family expected one of {', '.join(families())}, found {shown(name)}"
        )
    return families()[name]


def read_family(path: str | Path) -> Family:
    """Read a family from a user's data file; it may extend a known one by name."""
    path = Path(path)
    return build_family(path.stem, _tables(path), str(path))


def _tables(path: Path, depth: int = 0) -> dict[str, Any]:
    """The tables of a data file on top of those that it extends."""
    tables = read_tables(path)
    base = tables.get("extends")
    if base is None:
        return tables
    known = sorted(p.stem for p in KNOWN.glob("*.toml"))
    if base not in known or depth > 3:
        raise SpaceError(f"'{path}' extends '{base}', expected one of {', '.join(known)}")
    return merged(_tables(KNOWN / f"{base}.toml", depth + 1), tables)
