"""Does a description describe a zoo? Its checksum says that it is whole, not that it is right."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from transformer_nfn import __version__
from transformer_nfn.io.json_fields import Fields, parse_object
from transformer_nfn.zoo.errors import StoreError
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.store.files import Checksums

MOST_SHARDS = 99_999
"""As many as their names of five digits can tell apart."""
DTYPES = ("float32", "float16")


def read_about(path: Path, kind: str, newest: int, what: str) -> dict[str, Any]:
    """What a signed description says; refuses another kind, and what a newer version wrote.

    Args:
        path: of the file.
        kind: that it must be of.
        newest: the newest format that is known.
        what: the kind in words, ``a zoo``.
    """
    data = Checksums(path.parent).read(path.name)
    about = parse_object(data, str(path), StoreError)
    if about.get("kind") != kind:
        raise StoreError(f"{path}: kind {about.get('kind')!r} is not {what}")
    if type(about.get("format")) is not int:
        raise StoreError(f"{path}: has no format, a whole number")
    if about["format"] > newest:
        raise StoreError(
            f"{path}: format {about['format']} is newer than this version of transformer-nfn "
            f"({__version__}) knows ({newest}); update it"
        )
    return about


def check_about(about: dict[str, Any], where: str) -> None:
    """Refuses a description whose fields cannot be those of a zoo.

    Args:
        about: what ``zoo.json`` says.
        where: its path.
    """
    fields = Fields(about, where, StoreError)
    fields.whole("shards", 0, MOST_SHARDS)
    arch = NetworkSizes.from_json(fields.inner("architecture").data)
    fields.inner("task").text("name")
    for name in ("origin", "made_by"):
        fields.text(name)
    if "seeds" in about:
        fields.text("seeds")
    if about.get("dtype", "float32") not in DTYPES:
        raise StoreError(
            f"'{where}': 'dtype' expected {' or '.join(DTYPES)}, found {about['dtype']!r}"
        )
    if "recipe" in about and "batch" in fields.inner("recipe").data:
        fields.inner("recipe").whole("batch", 1)
    if fields.has("positions"):
        _check_positions(fields.text("positions"), arch, where)


def _check_positions(text: str, arch: NetworkSizes, where: str) -> None:
    try:
        size = len(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        raise StoreError(f"'{where}': 'positions' is not base64 ({error})") from error
    if size != (expected := 4 * arch.tokens * arch.d_model):
        raise StoreError(f"'{where}': 'positions' expected {expected} bytes, found {size}")
