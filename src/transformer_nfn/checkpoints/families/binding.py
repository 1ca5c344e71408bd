"""Match the tensors of a file to the lines of a family: prefix, blocks, shapes, no leftovers."""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import torch

from transformer_nfn.checkpoints.families.expressions import (
    MissingFieldError,
    evaluate,
    names_in,
    truth,
)
from transformer_nfn.checkpoints.families.family import DATA_FILE, Family, Line, families
from transformer_nfn.checkpoints.families.recognise import (
    OpenOptions,
    count_blocks,
    count_experts,
    find_prefix,
    head_lines,
    is_ignored,
    standard_names,
)
from transformer_nfn.checkpoints.families.sizes import SizeSolver
from transformer_nfn.errors import CheckpointError, SpaceError
from transformer_nfn.functional.description import KEPT
from transformer_nfn.io.checkpoint import Checkpoint
from transformer_nfn.io.layout import Sizes, Slot, file_shape
from transformer_nfn.io.tensor_files import WEIGHT_DTYPES, TensorInfo

NEEDED = ("W_Q", "W_K", "W_V", "W_O", "W_A", "W_B")
"""What every block has, whichever line holds it."""
HEADS = 8
"""Example of a size in the message."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
        slots: what it holds of the network.
        plain: its shape as the layouts say.
        shape: its shape in the file.
    """

    slots: tuple[Slot, ...]
    plain: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(line: Line, sizes: Sizes) -> Entry:
        """The tensor that a line describes; words of its shape are numbers or names of axes."""
        plain = file_shape(sizes, line.slots)
        words = line.shape
        shape = plain if words is None else (int(w) if w.isdigit() else sizes[w] for w in words)
        return Entry(line.slots, plain, tuple(shape))


@dataclass(frozen=True)
class Binding:
    """A family found in a file.

    Attributes:
        family: which.
        config: fields, with what the family's presets add.
        sizes: of every axis.
        tied: output matrix and token embedding are one tensor.
        has_head: the file holds an output matrix, tied or not.
        entries: by name in the file, in the order of the network.
        holders: for each canonical name the tensors of the file that hold it.
        kept: canonical names of tensors on which nothing acts, and their names in the file.
    """

    family: Family
    config: Mapping[str, Any]
    sizes: Sizes
    tied: bool
    has_head: bool
    entries: Mapping[str, Entry]
    holders: Mapping[str, tuple[str, ...]]
    kept: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)


def bind(family: Family, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> Binding:
    """Match every tensor of a file to a family; raises `CheckpointError` for what does not fit.

    Args:
        family: what the file should hold.
        checkpoint: the file, open; its config may be empty.
        settings: config fields that a user states, see `OpenOptions`.
    """
    where = checkpoint.where
    infos = checkpoint.infos
    config = complete_config(family, checkpoint.config, settings, where)
    keys = standard_names(family, infos)
    prefix = find_prefix(family, keys, where)
    blocks = count_blocks(family, keys, prefix)
    solver = SizeSolver(family, config, where)
    sizes = solver.sizes
    _check_refused(family, {**config, **sizes}, where)
    for counter, n in blocks.items():
        expected = sizes.get(counter, n)
        if expected != n and (n or counter not in family.optional):
            says = f"config.json says {counter} = {expected} ({family.sizes.get(counter, counter)})"
            _refuse(where, f"{says}, the file holds {n} blocks")
        sizes[counter] = n
    experts = count_experts(family, keys, prefix)
    if experts:
        experts = sizes.setdefault("expert", experts)
    has_head = any(line.tied and line.key in keys for line in family.lines)
    tied = _tied(family, config, has_head, checkpoint, keys, prefix)
    held = {key: infos[name].shape for key, name in keys.items()}
    stated, unnamed = _stated(family, config, held, where)
    lines = [
        replace(line, key=line.after(prefix))
        for line in (*stated, *head_lines(family, config))
    ]
    chosen = dict(_present(family, lines, keys, _Counts(blocks, experts), tied, where))
    known = {keys[line.key]: line for line in chosen.values()}
    _check_dtypes(known, infos, where)
    unstated = solver.add_shapes([(line, infos[k].shape) for k, line in known.items()]) + unnamed
    names = {slot.tensor for line in known.values() for slot in line.slots}
    unstated += unstated_facts(family, {**config, **sizes, "has_head": has_head}, names)
    if _needs_class(family, config, keys, names, has_head):
        unstated.append("architectures")
    if unstated:
        raise UnstatedFactError(where, family, unstated)
    entries = {
        key: _entry(at, key, infos[key], sizes, where) for key, at in known.items() if at.slots
    }
    extra = [k for key, k in keys.items() if not (k in known or is_ignored(family, key, prefix))]
    if extra and not family.open:
        names_of = dict.fromkeys(line.stated_by for line in family.lines if line.stated_by)
        way = f"one of {', '.join(names_of)}" if names_of else DATA_FILE
        lacks = f"which {family.title} does not have; {way} can say what it is"
        _refuse(where, f"holds '{extra[0]}' {list(infos[extra[0]].shape)}, {lacks}")
    kept_keys = [*(key for key, line in known.items() if not line.slots), *extra]
    holders: dict[str, tuple[str, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for key, entry in entries.items():
        for slot in entry.slots:
            holders[slot.tensor] = (*holders.get(slot.tensor, ()), key)
            shapes[slot.tensor] = tuple(sizes[axis] for axis in slot.axes)
    kept = {f"{KEPT}{key}": key for key in kept_keys if infos[key].weight_dtype is not None}
    shapes |= {name: infos[key].shape for name, key in kept.items()}
    return Binding(family, config, sizes, tied, has_head, entries, holders, kept, shapes)


def _stated(
    family: Family, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str
) -> tuple[list[Line], list[str]]:
    """The lines of a family with the names that a config states, and the fields it should state.

    A parameter, such as learned positions, stands for the weight of a module; its axes of size 1
    do not count.
    """
    lines, missing = [], []
    roles: dict[str, str] = {}
    for line in family.lines:
        role = line.stated_by
        if role is None:
            lines.append(line)
        elif config.get(role) is None:
            missing += [] if line.optional else [role]
        else:
            name, weight = str(config[role]), line.key.endswith(".weight")
            key = name if weight and name in shapes else line.key.replace(f"<{role}>", name, 1)
            if not weight and key not in shapes:
                continue  # without bias
            if roles.setdefault(key, role) != role:
                _refuse(where, f"{roles[key]} and {role} both name '{key}'")
            words, shape = list(line.slots[0].layout.atoms), shapes.get(key, ())
            spare = len(shape) - len(words) if line.shape is None else 0
            for i in [i for i, n in enumerate(shape) if n == 1][: max(spare, 0)]:
                words.insert(i, "1")
            stated = replace(line, shape=tuple(words)) if spare > 0 else line
            lines.append(replace(stated, key=key, optional=False))
    return lines, list(dict.fromkeys(missing))


def with_settings(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A config with fields of a user, which also take precedence over those in its tables."""
    out = {**config, **settings}
    for table in ("rope_parameters", "rope_scaling"):
        if isinstance(out.get(table), Mapping):
            out[table] = {k: v for k, v in out[table].items() if k not in settings}
    return out


def complete_config(
    family: Family, config: Mapping[str, Any], settings: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """A config with what its names imply and a user states.

    Fields of the user take precedence over ``config.json``, and that over the data file, whose
    defaults hold only where the config names the family.
    """
    for name in settings:
        if name not in family.fields():
            raise CheckpointError(
                f"'{where}': --set {name}: {family.title} has no such config field, expected one "
                f"of {', '.join(family.fields())}"
            )
    stated = {**family.config, **config, **settings}
    presets: dict[str, Any] = {}
    for pattern, fields in family.presets.items():
        if fnmatchcase(str(stated.get("architecture")), pattern):
            presets |= fields
    defaults = family.defaults if family.named_by(stated) else {}
    out = with_settings({**defaults, **family.config, **presets, **config}, settings)
    if isinstance(out.get("architectures"), str):
        out["architectures"] = [out["architectures"]]
    # A size is never a field of the same name.
    return {field: value for field, value in out.items() if field not in family.sizes}


def _check_refused(family: Family, fields: Mapping[str, Any], where: str) -> None:
    for text, words in family.refused.items():
        try:
            holds = evaluate(text, fields)
        except (MissingFieldError, SpaceError):
            continue
        if holds:
            _refuse(where, f"config: {text}: {family.title} with {words} is not supported")


def _tied(
    family: Family,
    config: Mapping[str, Any],
    has_head: bool,
    checkpoint: Checkpoint,
    keys: Mapping[str, str],
    prefix: str,
) -> bool:
    """Whether output matrix and token embedding are one.

    Where the config does not state it, they are one if the file holds the same numbers twice, and
    if it holds no output matrix, which then only a tied model can have.
    """
    if "tied" not in family.facts:
        return False
    text = family.facts["tied"]
    try:
        return truth(evaluate(text, {**config, "has_head": has_head}), text)
    except SpaceError as error:
        raise CheckpointError(f"'{checkpoint.where}': config: tied: {error}") from None
    except MissingFieldError:
        if not has_head:
            return True
    head = next(keys[line.key] for line in family.lines if line.tied and line.key in keys)
    tokens = [
        keys[key]
        for line in family.lines
        if [slot.tensor for slot in line.slots] == ["token"]
        if (key := line.after(prefix)) in keys
    ]
    return any(
        checkpoint.info(head) == checkpoint.info(token)
        and checkpoint.info(head).weight_dtype is not None
        and torch.equal(checkpoint[head], checkpoint[token])
        for token in tokens
    )


def _needs_class(
    family: Family,
    config: Mapping[str, Any],
    keys: Mapping[str, str],
    names: Container[str],
    has_head: bool,
) -> bool:
    """Whether only the class of the model, which the config lacks, says what its output is."""
    if config.get("architectures"):
        return False
    if any(line.key in keys for lines in family.heads.values() for line in lines):
        return True
    between = ("extra.mlm.W", "extra.decoder.W")
    transforms = any(s.tensor in between for line in family.lines for s in line.slots)
    has_matrix = any(line.tied for line in family.lines)
    return has_matrix and not (transforms or has_head or "head" in names)


@dataclass(frozen=True)
class _Counts:
    """Blocks by the counter of their stack, and experts of each of them."""

    blocks: Mapping[str, int]
    experts: int

    def at(self, line: Line, i: int) -> Iterator[Line]:
        """A line of a block, or those of all its experts."""
        block = line.at(i)
        if line.mixed:
            yield from (block.at(expert) for expert in range(self.experts))
        else:
            yield block


def _present(
    family: Family,
    lines: list[Line],
    keys: Mapping[str, str],
    counts: _Counts,
    tied: bool,
    where: str,
) -> Iterator[tuple[str, Line]]:
    """The lines whose tensors are there, blocks in order; refuses where one must be and is not."""
    blocks = counts.blocks
    _check_complete(family, lines, keys, counts, where)
    expanded: list[Line] = [line.spread(blocks) for line in lines if line.counter is None]
    for counter, n in blocks.items():
        stack_lines = [
            line
            for line in lines
            if line.counter == counter
            # Where one block has it, all must.
            and (not line.optional or any(line.at(i).key in keys for i in range(n)))
        ]
        expanded += [
            replace(at, optional=False)
            for i in range(max(n, 0 if counter in family.optional else 1))
            for at in (at for line in stack_lines for at in counts.at(line, i))
        ]
    held = {slot.tensor for line in expanded if line.key in keys for slot in line.slots}
    parts = {part for line in expanded if line.key in keys for part in _parts(line)}
    for line in expanded:
        if line.key in keys:
            yield line.key, replace(line, slots=line.tied if tied and line.tied else line.slots)
            continue
        elsewhere = bool(line.slots) and all(slot.tensor in held for slot in line.slots)
        gone = line.stack in family.optional and not blocks[str(line.stack)]
        if not ((line.optional and not _parts(line) & parts) or elsewhere or gone):
            _refuse(where, f"lacks '{line.key}', which holds {_holds(line)} of {family.title}")
    for at, counter in family.counters.items():
        for i in range(blocks[counter]):
            for tensor in NEEDED:
                name = f"{at}{i}.{tensor}"
                if name not in held and f"{at}{i}.expert.0.{tensor}" not in held:
                    _refuse(where, f"lacks the tensor that holds '{name}' of {family.title}")


def _parts(line: Line) -> set[str]:
    """The parts beside the stacks, such as ``mlm`` or ``patch``, that are there as a whole."""
    names = [slot.tensor for slot in line.slots if slot.tensor.startswith(("extra.", "patch"))]
    return {name.removeprefix("extra.").replace("_", ".").split(".")[0] for name in names}


def _check_complete(
    family: Family,
    lines: list[Line],
    keys: Mapping[str, str],
    counts: _Counts,
    where: str,
) -> None:
    """Refuses the first block that lacks a tensor, before a line is made for each of them."""
    for line in lines:
        if line.counter is not None and not line.optional:
            for i in range(counts.blocks[line.counter]):
                for at in counts.at(line, i):
                    if at.key not in keys:
                        holds = f"which holds {_holds(at)} of {family.title}"
                        _refuse(where, f"lacks '{at.key}', {holds}")


def _holds(line: Line) -> str:
    return ", ".join(f"'{slot.tensor}'" for slot in line.slots) or "weights"


def _check_dtypes(known: Mapping[str, Line], infos: Mapping[str, TensorInfo], where: str) -> None:
    for key in known:
        if infos[key].weight_dtype is None:
            _refuse(
                where,
                f"'{key}' holds {infos[key].dtype}, expected weights in {', '.join(WEIGHT_DTYPES)}",
            )


def _entry(line: Line, key: str, info: TensorInfo, sizes: Sizes, where: str) -> Entry:
    try:
        entry = Entry.of(line, sizes)
    except SpaceError as error:
        raise CheckpointError(f"'{where}': '{key}': {error}") from error
    if info.shape != entry.shape:
        layout = " ".join(line.shape) if line.shape else line.slots[0].layout.text
        axis_sizes = ", ".join(
            f"{axis} = {sizes[axis]}"
            for axis in dict.fromkeys(a for slot in line.slots for a in slot.axes)
        )
        _refuse(
            where,
            f"'{key}' expected shape {list(entry.shape)} ({layout}; {axis_sizes}), found "
            f"{list(info.shape)}",
        )
    return entry


def _refuse(where: str, why: str) -> NoReturn:
    raise CheckpointError(f"'{where}': {why}")


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
            f"under [config] of {DATA_FILE}"
        )
        user_file = family.name not in families()
        self.lines = (
            *(() if user_file else (f'extends = "{family.name}"',)),
            "[config]",
            *(f"{name} = {json.dumps(value)}" for name, value in examples.items()),
        )


def _class_example(family: Family) -> str:
    heads = [pattern.removeprefix("*") for pattern in family.heads]
    output = "ForConditionalGeneration" if "decoder." in family.counters else "ForCausalLM"
    return heads[0] if heads else output


def computed(tensors: Collection[str]) -> dict[str, bool]:
    """What expressions may read of the tensors in a file, by canonical name."""
    gated = any(name.endswith(".W_G") for name in tensors)
    return {"has_gate": gated, "has_pooler": "extra.pooler.W" in tensors}


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
        **computed(tensors),
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
