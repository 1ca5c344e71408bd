"""Fields of JSON files are what they should be, or refused by file, field, expected and found."""

import os
from pathlib import Path

import pytest

from transformer_nfn.errors import CheckpointError
from transformer_nfn.io.json_fields import Fields, read_object
from transformer_nfn.io.tensor_files import read_tensors

DATA = {
    "n": 3, "x": 0.5, "t": "words", "l": [{"a": 1}, {"a": "b"}], "o": {"in": {"deep": -1}},
    "m": [[1, 2], [3, -4]], "yes": True, "nan": float("nan"), "none": None, "long": "x" * 1000,
}  # fmt: skip


def fields() -> Fields:
    return Fields(DATA, "file.json", CheckpointError)


def test_what_is_right_is_given() -> None:
    f = fields()
    assert (f.whole("n"), f.number("n"), f.number("x", 0, 1), f.text("t")) == (3, 3.0, 0.5, "words")
    assert f.inner("o").inner("in").whole("deep", -1) == -1
    assert [item.data for item in f.each("l", Fields.inner)] == DATA["l"]
    assert f.choice("t", ("words", "numbers")) == "words"
    assert f.each("m", lambda m, name: m.each(name, lambda n, key: n.whole(key, -4))) == DATA["m"]
    assert (f.has("none"), f.has("n"), f.has("other")) == (False, True, False)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda f: f.whole("x"), "'x' expected a whole number at least 0, found 0.5"),
        (lambda f: f.whole("yes"), "'yes' expected a whole number at least 0, found True"),
        (lambda f: f.whole("n", 1, 2), "'n' expected a whole number from 1 to 2, found 3"),
        (lambda f: f.number("nan"), "'nan' expected a finite number, found nan"),
        (lambda f: f.number("n", 0, 1), "'n' expected a finite number from 0 to 1, found 3"),
        (lambda f: f.text("none"), "'none' expected a text, found None"),
        (lambda f: f.inner("t"), "'t' expected an object, found 'words'"),
        (lambda f: f.items("o"), "'o' expected a list, found {'in': {'deep': -1}}"),
        (lambda f: f.inner("o").inner("in").whole("deep"), "'o.in.deep' expected a whole number"),
        (lambda f: f.each("l", Fields.inner)[1].whole("a"), "'l[1].a' expected a whole number"),
        (lambda f: f.each("m", lambda m, name: m.each(name, Fields.whole)), "'m[1][1]' expected a"),
        (lambda f: f.each("l", Fields.whole), "'l[0]' expected a whole number"),
        (lambda f: f.choice("t", ("a", "b")), "'t' expected one of a, b, found 'words'"),
        (lambda f: f.choice("l", ("a",)), "'l' expected one of a, found [{"),
        (lambda f: f.refuse("n", "4, the length of 'l'"), "'n' expected 4, the length of 'l', fou"),
        (lambda f: f.inner("o").refuse("x", "a number"), "'file.json' lacks 'o.x'"),
        (lambda f: f.text("other"), "'file.json' lacks 'other'"),
        (lambda f: f.number("long"), "…"),
    ],
)
def test_what_is_wrong_is_named(ask, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        ask(fields())
    assert words in str(caught.value)
    assert len(str(caught.value)) < 150


def test_a_pipe_under_a_files_name_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (read_object, read_tensors):
        for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
            with pytest.raises(CheckpointError, match="cannot be read: it is not a regular file"):
                read(path)
