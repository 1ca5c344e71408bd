"""Named assets: sample zoos and trained predictors.

A name is resolved in this order:

1. a file or folder of that name;
2. ``assets/`` of the repository, when the package runs from a checkout;
3. the user's cache (``TNFN_CACHE``, or the system's), filled from the address in
   ``TRANSFORMER_NFN_ASSETS_URL``.

``index.json`` beside the assets lists them with the checksum of every file; each is checked
whenever a name is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from transformer_nfn.errors import AssetError, DownloadError
from transformer_nfn.io.downloads import cache_folder, download, get_text
from transformer_nfn.io.files import file_sha256, write_text
from transformer_nfn.io.json_fields import read_object

FORMAT = 1
INDEX_FILE = "index.json"
KINDS = ("zoo", "predictor")
URL_VARIABLE = "TRANSFORMER_NFN_ASSETS_URL"
# src/transformer_nfn/io/assets.py of a checkout; an installed package has no such folder.
CHECKOUT = Path(__file__).resolve().parents[3] / "assets"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class AssetFile:
    """Size and checksum of a file of an asset."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Asset:
    """One line of the index.

    Attributes:
        name: on the command line.
        kind: ``zoo`` or ``predictor``.
        path: its folder, below that of the index.
        files: by their path in that folder.
        description: one line.
    """

    name: str
    kind: str
    path: str
    files: Mapping[str, AssetFile]
    description: str

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    def to_json(self) -> dict[str, Any]:
        """The entry in ``index.json``."""
        files = {name: vars(file) for name, file in sorted(self.files.items())}
        facts = {"kind": self.kind, "description": self.description, "size": self.size}
        return {**facts, "path": self.path, "files": files}


def asset_folder(name: str, kind: str) -> Path:
    """The folder of a ``zoo`` or ``predictor`` by its name; checks the files."""
    asset = _find(name, kind)
    return _in_checkout(asset) or _in_cache(asset)


def known_assets() -> dict[str, Asset]:
    """Every asset by name: of the checkout, and of the address if one is set."""
    assets = {**_remote_index(), **_checkout_index()}
    if not assets:
        raise AssetError(f"no named assets are known: {_HOW}")
    return dict(sorted(assets.items()))


def whereabouts(asset: Asset) -> str:
    """Location of an asset: ``checkout``, ``cache`` or ``fetched when used``."""
    if (CHECKOUT / asset.path).is_dir():
        return "checkout"
    folder = cache_folder("assets") / asset.path
    complete = all((folder / name).is_file() for name in asset.files)
    return "cache" if complete else "fetched when used"


def read_index(path: Path) -> dict[str, Asset]:
    """Read ``index.json``; rejects malformed entries and paths out of its folder."""
    data = read_object(path, AssetError)
    if data.get("format") != FORMAT:
        raise AssetError(f"'{path}' has format {data.get('format')!r}, expected {FORMAT}")
    try:
        return {name: _entry(path, name, entry) for name, entry in data["assets"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, AssetError):
            raise
        raise AssetError(
            f"'{path}' is not an index of assets ({type(error).__name__}: {error})"
        ) from error


_HOW = (
    "they are in assets/ of a checkout of the repository, or at the address in the environment "
    f"variable {URL_VARIABLE}"
)


def _entry(index: Path, name: str, entry: Mapping[str, Any]) -> Asset:
    files = {key: AssetFile(int(f["size"]), str(f["sha256"])) for key, f in entry["files"].items()}
    asset = Asset(name, entry["kind"], entry.get("path", name), files, entry["description"])
    if not NAME.fullmatch(name) or asset.kind not in KINDS:
        raise AssetError(f"'{index}': '{name}' of kind {asset.kind!r} is not a valid asset")
    for part in (asset.path, *files):
        pure = PurePosixPath(part)
        if pure.is_absolute() or ".." in pure.parts or "\\" in part or not pure.parts:
            raise AssetError(f"'{index}': '{part}' of '{name}' leads out of its folder")
    return asset


def _find(name: str, kind: str) -> Asset:
    local = _checkout_index()
    known = local if name in local else {**_remote_index(), **local}
    asset = known.get(name)
    if asset is not None and asset.kind == kind:
        return asset
    names = sorted(a.name for a in known.values() if a.kind == kind)
    listed = f"named {kind}s are {', '.join(names)}" if names else f"there are no named {kind}s"
    if asset is not None:
        raise AssetError(f"'{name}' is a {asset.kind}, expected a {kind}; {listed}")
    if not known:
        listed = f"no names are known: {_HOW}"
    raise AssetError(f"there is no folder '{name}' and no {kind} of that name; {listed}")


def _checkout_index() -> dict[str, Asset]:
    path = CHECKOUT / INDEX_FILE
    return read_index(path) if path.is_file() else {}


def _in_checkout(asset: Asset) -> Path | None:
    folder = CHECKOUT / asset.path
    if not folder.is_dir():
        return None
    for name, file in asset.files.items():
        problem = _problem(folder / name, file)
        if problem:
            raise AssetError(f"{problem}; restore it with git checkout")
    return folder


def _in_cache(asset: Asset) -> Path:
    folder = cache_folder("assets") / asset.path
    base = _base_url()
    for name, file in asset.files.items():
        problem = _problem(folder / name, file)
        if problem and not base:
            raise AssetError(
                f"'{asset.name}' is not available: {problem}, and {URL_VARIABLE}, the address to "
                "fetch it from, is not set"
            )
        if problem:
            url = f"{base}/{quote(f'{asset.path}/{name}')}"
            download(url, folder / name, f"sha256:{file.sha256}", AssetError)
    return folder


def _problem(path: Path, file: AssetFile) -> str | None:
    if not path.is_file():
        return f"'{path}' is missing"
    digest = file_sha256(path)
    if digest != file.sha256:
        return f"'{path}' is corrupt, expected sha256 {file.sha256[:12]}…, found {digest[:12]}…"
    return None


def _base_url() -> str:
    return os.environ.get(URL_VARIABLE, "").strip().rstrip("/")


def _remote_index() -> dict[str, Asset]:
    """The index at the address; the cached one without an address or a response."""
    base, path = _base_url(), cache_folder("assets") / INDEX_FILE
    if base:
        try:
            text = get_text(f"{base}/{INDEX_FILE}")
        except DownloadError as error:
            if not path.is_file():
                raise AssetError(str(error)) from error
        else:
            write_text(path, text)
    return read_index(path) if path.is_file() else {}
