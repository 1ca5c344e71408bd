"""Every field of the records of a zoo is needed as it is, or harmless: a sweep over all of them."""

import copy
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.testing import write_example_checkpoint
from transformer_nfn.zoo import BuildOptions, SizeGroup, Zoo, build, build_mixed
from transformer_nfn.zoo.authors import import_authors
from transformer_nfn.zoo.training.damage import DamageOptions, damage_zoo
from transformer_nfn.zoo.verify import verify

from .test_authors import write_theirs

Place = tuple[str | int, ...]
OPTIONS = BuildOptions(
    "digits", runs=3, epochs=1, batch=32, samples=64, shard_runs=2, width=4, depth=1, workers=1,
    path="torch",
)  # fmt: skip
GROUPS = (SizeGroup(4, 2, 1), SizeGroup(6, 2, 1))
UNREAD = (
    "space", "task.sizes", "task.provenance.", "seeds", "recipe.until", "damage.", "positions",
)  # fmt: skip
"""Fields for the record, and those with a default: without them, or with others, a zoo is read."""
REMOVED = object()
SOME: tuple[Any, ...] = (REMOVED, [1])
MORE: tuple[Any, ...] = (
    None, True, -1, "", "x", "9" * 99, [], {}, {"a": 1}, [[]], 0, 3.5, 7, 10**30, 99_999, ["x"],
    float("nan"), float("inf"),
)  # fmt: skip


@pytest.fixture(scope="module")
def zoos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A zoo of every kind; tests change records and put them back."""
    root = tmp_path_factory.mktemp("records")
    build(root / "built", OPTIONS)
    build_mixed(root / "mixed", OPTIONS, GROUPS)
    damage_zoo(root / "built", root / "damaged", DamageOptions("pruned"))
    write_theirs(root / "theirs", "mnist")
    import_authors(root / "theirs", root / "imported")
    own = Zoo.create(root / "own")
    for seed in range(2):
        own.add(write_example_checkpoint(root / f"net-{seed}", seed), loss=0.5 * seed)
    return root


def places(record: Any, at: Place = ()) -> Iterator[Place]:
    """Every field of a record; of a list its first item."""
    if isinstance(record, dict):
        for key, value in record.items():
            yield (*at, key)
            if key != "space":
                yield from places(value, (*at, key))
    elif isinstance(record, list) and record:
        yield (*at, 0)
        yield from places(record[0], (*at, 0))


def changed(record: Any, place: Place, value: object) -> Any:
    new = copy.deepcopy(record)
    inner = new
    for key in place[:-1]:
        inner = inner[key]
    if value is not REMOVED:
        inner[place[-1]] = value
    elif isinstance(inner, dict):
        del inner[place[-1]]
    return new


def named(place: Place) -> str:
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
    return text.removeprefix(".")


def faults(file: Path, values: tuple[Any, ...], resumed: BuildOptions | None) -> Iterator[str]:
    """Changes of a record that are believed, or that end in anything but a sentence."""
    whole = json.loads(file.read_text())
    zoo, sums = file.parent, file.parent / "checksums.json"
    kept = {path: path.read_bytes() for path in (file, sums)}
    for place in places(whole):
        for value in values:
            record, field = changed(whole, place, value), named(place)
            if record == whole:
                continue
            file.write_text(json.dumps(record))
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            sums.write_text(json.dumps(json.loads(kept[sums]) | {file.name: [digest]}))
            old = _at(whole, place)
            same = type(value) is type(old) or {type(value), type(old)} == {int, type(None)}
            what = f"{field} {'removed' if value is REMOVED else repr(value)}"
            try:
                sentence = _refusal(zoo, resumed)
            except Exception as error:  # for which the command line ends with 70
                yield f"{what}: {error!r}"
                continue
            # A value of the right type may be that of another zoo: its shards or options differ.
            named_here = (file.name, re.split(r"[.\[]", field)[0]) if not same else (str(zoo),)
            if not sentence:
                if not same and not field.startswith(UNREAD):
                    yield f"{what}: believed"
            elif "\n" in sentence or not all(word in sentence for word in named_here):
                yield f"{what}: {sentence}"
    for path, data in kept.items():
        path.write_bytes(data)


def _refusal(zoo: Path, resumed: BuildOptions | None) -> str:
    """Why a zoo cannot be read, verified or built further; empty if it can."""
    try:
        Zoo.open(zoo)
        verdict = verify(zoo, sample=0)
        if verdict.ok and resumed is not None:
            build(zoo, resumed)
    except TransformerNFNError as error:
        return str(error)
    return "" if verdict.ok else verdict.problems[0]


def _at(record: Any, place: Place) -> Any:
    for key in place:
        record = record[key]
    return record


RECORDS = {
    "built/zoo.json": OPTIONS,
    "mixed/kinds.json": None,
    "damaged/zoo.json": None,
    "imported/zoo.json": None,
    "own/zoo.json": None,
}


@pytest.mark.parametrize("values", [SOME, pytest.param(MORE, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("record", RECORDS)
def test_a_field_that_is_damaged_is_named(zoos: Path, record: str, values: tuple[Any, ...]) -> None:
    found = list(faults(zoos / record, values, RECORDS[record]))
    assert not found, "\n".join(found)
