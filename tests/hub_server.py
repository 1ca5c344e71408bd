"""A model hub on this machine: the part of its interface that the client `huggingface_hub` uses."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from safetensors.torch import load_file, save_file

LARGE = (".safetensors", ".bin", ".gguf", ".onnx")
"""Files that the hub keeps in LFS, with a sha256 sum."""
Files = Mapping[str, bytes]


def read_folder(folder: Path) -> dict[str, bytes]:
    """Files of a folder by their relative path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def into_shards(folder: Path) -> Path:
    """The weights of a folder in two files and an index."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    names = sorted(tensors)
    half = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for part in set(half.values()):
        save_file({n: w for n, w in tensors.items() if half[n] == part}, folder / part)
    (folder / f"{file.name}.index.json").write_text(json.dumps({"weight_map": half}))
    file.unlink()
    return folder


def commit_hash(files: Files) -> str:
    """The name of a commit, by its content."""
    text = "\n".join(f"{name} {git_hash(data)}" for name, data in sorted(files.items()))
    return hashlib.sha1(text.encode()).hexdigest()


def git_hash(data: bytes) -> str:
    """The sha1 sum of a blob in git."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Hub:
    """Repositories of a hub, and what it does to requests.

    Attributes:
        commits: of each repository, the last one is that of the branch ``main``.
        gated: repositories whose files need a licence.
        renamed: new ids by old ones.
        spoil: called with the method and path of each request; what it returns is done to the
            response, see `FAULTS`; None for nothing.
        requests: methods and paths so far; ``PART`` for a range of bytes.
        stall: seconds of the fault ``stall``.
    """

    commits: dict[str, list[Files]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    renamed: dict[str, str] = field(default_factory=dict)
    spoil: Callable[[str, str], str | None] = lambda method, path: None
    requests: list[str] = field(default_factory=list)
    address: str = ""
    stall: float = 1.0

    def put(self, repository: str, files: Files | Path) -> str:
        """Add a commit; returns its name."""
        files = read_folder(files) if isinstance(files, Path) else files
        self.commits.setdefault(repository, []).append(files)
        return commit_hash(files)

    def fetched(self, how: str = "GET") -> list[str]:
        """Names of the files that were sent, or of those of which a ``PART`` was."""
        sent = [path for method, path in (r.split(" ", 1) for r in self.requests) if method == how]
        return [path.split("/resolve/")[1].split("/", 1)[1] for path in sent if "/resolve/" in path]

    def commit(self, repository: str, revision: str) -> Files | None:
        """The files of a revision."""
        commits = self.commits[repository]
        if revision == "main":
            return commits[-1]
        return next((files for files in commits if commit_hash(files) == revision), None)

    def info(self, repository: str, files: Files) -> dict[str, Any]:
        """What the hub states about a commit."""
        siblings = []
        for name, data in files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git_hash(data)}
            if name.endswith(LARGE):
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        return {
            "_id": "1", "id": repository, "modelId": repository, "private": False, "tags": [],
            "downloads": 0, "likes": 0, "sha": commit_hash(files), "siblings": siblings,
        }  # fmt: skip


FAULTS = (
    "cut", "close", "short", "long", "flipped", "stall", "trickle", "429", "429 for an hour",
    "500", "503", "404", "401", "another commit", "no commit", "no json", "half",
)  # fmt: skip
"""What `Hub.spoil` may ask for."""
STATUS = {"429": 429, "429 for an hour": 429, "500": 500, "503": 503, "404": 404, "401": 401}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{'PART' if 'Range' in self.headers else self.command} {path}")
        fault = self.hub.spoil(self.command, path)
        if fault == "close":
            self.close_connection = True
            return
        if fault == "stall":
            self.server.stalled.wait(self.hub.stall)  # type: ignore[attr-defined]
            self.close_connection = True
            return
        if fault in STATUS:
            wait = {"Retry-After": "3600"} if fault == "429 for an hour" else {}
            self._send(STATUS[fault], b"{}", wait, body)
            return
        status, headers, data = self._response(path.strip("/").split("/"), body)
        if fault == "another commit" and "X-Repo-Commit" in headers:
            headers["X-Repo-Commit"] = "f" * 40
        if fault == "no commit":
            headers.pop("X-Repo-Commit", None)
            data = data.replace(b'"sha"', b'"sah"')
        if fault == "no json" and headers["Content-Type"] == "application/json":
            data = b"<html>not the hub</html>"
        if fault == "flipped" and len(data) > 8:
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        if fault == "half":
            data = data[: len(data) // 2]
        self._send(status, data, headers, body, fault)

    def _send(
        self,
        status: int,
        data: bytes,
        headers: Mapping[str, str],
        body: bool,
        fault: str | None = None,
    ) -> None:
        start = self.headers.get("Range")
        if start and status == 200 and body:
            first, _, last = start.removeprefix("bytes=").partition("-")
            total = len(data)
            data = data[int(first) : int(last) + 1 if last else None]
            status = 206
            headers = {
                **headers,
                "Content-Range": f"bytes {first}-{int(first) + len(data) - 1}/{total}",
            }
        length = len(data) + {"short": -3, "long": 3}.get(fault or "", 0)
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(max(length, 0)))
            self.end_headers()
            if not body:
                return
            if fault == "cut":
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
            elif fault == "trickle":
                for byte in data[:200]:
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.001)
                self.wfile.write(data[200:])
            else:
                self.wfile.write(data[: max(length, 0)])
                self.close_connection = fault in ("short", "long")
        except OSError:
            self.close_connection = True  # the client has gone

    def _response(self, parts: list[str], body: bool) -> tuple[int, dict[str, str], bytes]:
        json_type = {"Content-Type": "application/json"}
        repository, rest = "/".join(parts[:2]), parts[2:]
        if parts[:2] == ["api", "models"]:
            cut = parts.index("revision") if "revision" in parts else len(parts)
            repository, rest = "/".join(parts[2:cut]), parts[cut:]
        if repository in self.hub.renamed:
            new = self.path.replace(repository, self.hub.renamed[repository])
            return 307, {**json_type, "Location": f"{self.hub.address}{new}"}, b""
        if repository not in self.hub.commits:
            error = "RepoNotFound"
            return 404, {**json_type, "X-Error-Code": error}, b'{"error":"Repository not found"}'
        revision = rest[1] if len(rest) > 1 else "main"
        if parts[0] == "api" and len(rest) > 1:
            revision = "/".join(rest[1:])
        files = self.hub.commit(repository, revision)
        if files is None:
            return 404, {**json_type, "X-Error-Code": "RevisionNotFound"}, b"{}"
        if parts[0] == "api":
            return 200, json_type, json.dumps(self.hub.info(repository, files)).encode()
        commit = {"X-Repo-Commit": commit_hash(files), "Content-Type": "application/octet-stream"}
        if repository in self.hub.gated:
            return 403, {**commit, "X-Error-Code": "GatedRepo"}, b"{}"
        name = "/".join(rest[2:])
        if name not in files:
            return 404, {**commit, "X-Error-Code": "EntryNotFound"}, b"{}"
        data = files[name]
        digest = hashlib.sha256(data).hexdigest() if name.endswith(LARGE) else git_hash(data)
        return 200, {**commit, "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}, data

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that serves at `Hub.address`."""
    hub = Hub()
    handler = type("_HubHandler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.stalled = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.stalled.set()  # type: ignore[attr-defined]
        server.shutdown()
        server.server_close()
        thread.join()
