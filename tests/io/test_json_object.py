"""Every JSON object a user hands in is read by one function, and refused in one sentence."""

import re

import pytest

from transformer_nfn.errors import SpaceError, TransformerNFNError
from transformer_nfn.io import AssetError, CheckpointError
from transformer_nfn.io.assets import read_index
from transformer_nfn.io.json_fields import parse_object, read_object
from transformer_nfn.prediction.runs import RunRecord
from transformer_nfn.zoo import Zoo

BAD = {
    "torn": (b'{"a": ', "is not JSON: "),
    "no text": (b"\xff\xfe{", "is not JSON: "),
    "deep": (b"[" * 100_000, "is not JSON: "),
    "a list": (b"[1]", "is not an object in JSON: it holds a list"),
    "null": (b"null", "is not an object in JSON: it holds null"),
    "a number": (b"3", "is not an object in JSON: it holds a number"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_object_is_refused_in_a_sentence(tmp_path, case):
    data, words = BAD[case]
    path = tmp_path / "config.json"
    path.write_bytes(data)
    for kind in (CheckpointError, SpaceError):
        with pytest.raises(kind, match=re.escape(f"'{path}' {words}")):
            read_object(path, kind)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(AssetError, match="' cannot be read: it is not a regular file"):
        read_object(tmp_path, AssetError)
    with pytest.raises(CheckpointError, match="none' cannot be read: No such file"):
        read_object(tmp_path / "none")


def test_an_object_comes_back_as_it_is(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"layers": 2, "ä": [null]}', encoding="utf-8")
    assert read_object(path) == {"layers": 2, "ä": [None]} == parse_object(path.read_text(), "x")


READERS = {
    "index.json": lambda folder: read_index(folder / "index.json"),
    "run.json": RunRecord.read,
    "checksums.json": Zoo.open,
}


@pytest.mark.parametrize("name", READERS)
def test_every_reader_says_the_same(tmp_path, name):
    (tmp_path / "zoo.json").write_text("{}")
    (tmp_path / name).write_text("{")
    with pytest.raises(TransformerNFNError, match=rf"{name}' is not JSON: Expecting property name"):
        READERS[name](tmp_path)
