"""How is damage to the small files of a zoo found? By checksums kept beside them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from transformer_nfn.io.files import read_regular, write_bytes
from transformer_nfn.io.json_fields import read_object
from transformer_nfn.zoo.errors import StoreError


def sha256(data: bytes) -> str:
    """The checksum the store uses for whole files."""
    return hashlib.sha256(data).hexdigest()


class Checksums:
    """``checksums.json``: what the small files of a zoo must hash to.

    A file that is being replaced may match its old or its new sum, so that a process killed
    between two renames leaves a folder that still checks.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "checksums.json"
        self.folder = folder

    def _read(self) -> dict[str, list[str]]:
        if not self.path.exists():
            return {}
        found = read_object(self.path, StoreError)
        for name, sums in found.items():
            if not isinstance(sums, list) or not all(isinstance(text, str) for text in sums):
                raise StoreError(f"{self.path}: what stands at '{name}' are no checksums")
        return found

    def replace(self, name: str, data: bytes) -> None:
        """Writes the file ``name`` and its sum."""
        new = sha256(data)
        sums = self._read()
        self._write(sums | {name: [*sums.get(name, [])[-1:], new]})
        write_bytes(self.folder / name, data)
        self._write(self._read() | {name: [new]})

    def _write(self, sums: dict[str, list[str]]) -> None:
        write_bytes(self.path, json.dumps(sums, indent=1).encode())

    def read(self, name: str) -> bytes:
        """The file's bytes, checked."""
        path = self.folder / name
        try:
            data = read_regular(path)
        except OSError as error:
            raise StoreError(f"{path}: cannot be read ({error.strerror})") from error
        known = self._read().get(name)
        if not known:
            raise StoreError(f"{self.path}: holds no checksum of '{name}'")
        if sha256(data) not in known:
            raise StoreError(
                f"{path}: damaged, expected sha256 {known[-1][:12]}…, found {sha256(data)[:12]}…"
            )
        return data
