"""Downloads: fetched with patience, checked, kept in the one cache folder."""

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from transformer_nfn.errors import DownloadError
from transformer_nfn.io.downloads import RemoteFile, fetch, get_text
from transformer_nfn.zoo import DataError, load_task


class _Flaky(BaseHTTPRequestHandler):
    """Sends half of what is asked, then hangs up, until asked often enough."""

    body = np.random.default_rng(1).bytes(200_000)
    asked: list[str | None] = []  # noqa: RUF012

    def do_GET(self) -> None:
        header = self.headers.get("Range")
        type(self).asked.append(header)
        start = int(header[6:-1]) if header else 0
        rest = self.body[start:]
        self.send_response(206 if header else 200)
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest if len(self.asked) > 2 else rest[: len(rest) // 2])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    """A server on this machine that breaks off."""
    _Flaky.asked = []
    httpd = HTTPServer(("127.0.0.1", 0), _Flaky)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}/file.gz"
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def test_nothing_is_asked_where_the_network_is_forbidden(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TNFN_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = RemoteFile(server, hashlib.md5(_Flaky.body).hexdigest())
    for ask in (lambda: fetch("mnist", file, None), lambda: get_text(server)):
        with pytest.raises(DownloadError, match="the network is forbidden"):
            ask()
    assert _Flaky.asked == []
    (tmp_path / "mnist").mkdir(exist_ok=True)
    (tmp_path / "mnist" / file.name).write_bytes(_Flaky.body)
    assert fetch("mnist", file, None).read_bytes() == _Flaky.body


def test_downloads_go_on_where_they_stopped(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TNFN_CACHE", str(tmp_path))
    md5 = hashlib.md5(_Flaky.body).hexdigest()
    path = fetch("mnist", RemoteFile(server, md5), None)
    assert path.read_bytes() == _Flaky.body
    first, *later = _Flaky.asked
    assert first is None
    starts = [int(header[6:-1]) for header in later if header]
    assert len(starts) == 2
    assert 0 < starts[0] < starts[1]
    fetch("mnist", RemoteFile(server, md5), None)
    assert len(_Flaky.asked) == 3  # the second time it lies in the cache


def test_a_download_with_the_wrong_sum_is_refused(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TNFN_CACHE", str(tmp_path))
    with pytest.raises(DownloadError, match=r"file\.gz: corrupt, its md5 is not 000000000000…"):
        fetch("mnist", RemoteFile(server, "0" * 32), None)
    assert not (tmp_path / "mnist" / "file.gz").exists()


def test_an_address_that_does_not_answer_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TNFN_CACHE", str(tmp_path))
    nobody = "http://127.0.0.1:9/file.gz"
    with pytest.raises(DownloadError, match=r"could not be fetched .*; name a folder with --data"):
        fetch("mnist", RemoteFile(nobody, "0" * 32), None)
    with pytest.raises(DownloadError, match=r"file\.gz: could not be fetched"):
        get_text(nobody)
    with pytest.raises(DataError, match=r"data folder '.*none' does not exist"):
        load_task("mnist", tmp_path / "none")
