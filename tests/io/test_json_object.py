"""Every JSON object a user hands in is read by one function, and refused in one sentence."""

import re

import pytest

from transformer_nfn.errors import SpaceError
from transformer_nfn.io import AssetError, CheckpointError
from transformer_nfn.io.json_fields import read_object

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
