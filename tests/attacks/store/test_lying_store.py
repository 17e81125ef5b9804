"""A server of objects, or of files, that lies to a service that has time and memory for all others, too."""

from __future__ import annotations

import os
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from backupd.model.errors import DestinationError
from storage import layout
from storage.config import S3Config
from storage.filesystem import FilesystemDestination
from storage.s3 import client as s3client
from storage.s3 import destination as s3
from storage.s3.destination import S3Destination
from storage.sftp import wire as sftpwire
from storage.sftp.wire import LostError, Wire
from tests.support.stores.stock import START, backup_id, named, put

Query = dict[str, list[str]]
MARKER = layout.REPOSITORY


@dataclass
class Liar:
    """``answer``: body, by the query; ``asked``: every path."""

    answer: Callable[[Query], str] = lambda _query: ""
    redirect: str = ""
    asked: list[str] = field(default_factory=list)
    endpoint: str = ""


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> Iterator[Liar]:
    monkeypatch.setattr(s3client, "FIRST_PAUSE", 0.02)
    found = Liar()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.asked.append(self.path)
            query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
            if found.redirect and MARKER not in self.path:
                self.send_response(307)
                self.send_header("Location", found.redirect + self.path)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            body = b"{}" if MARKER in self.path else found.answer(query).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"x"')
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        found.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        yield found
        server.shutdown()
        thread.join()


@pytest.fixture
def bucket(liar: Liar, tmp_path: Path) -> Iterator[S3Destination]:
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    made = S3Destination(
        "offsite",
        S3Config.model_validate(
            {"type": "s3", "bucket": "vault", "endpoint_url": liar.endpoint, "credentials_file": str(credentials)}
        ),
    )
    yield made
    made.close()


def ended(what: Callable[[], object], seconds: float = 300.0) -> str:
    """What it fails with; it has to end by itself."""
    said: list[str] = []

    def run() -> None:
        try:
            what()
        except DestinationError as error:
            said.append(f"{error} {error.detail}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it goes on for ever"
    assert said, "it was believed"
    return said[0]


def listing(keys: list[str], more: str) -> str:
    items = "".join(
        f"<Contents><Key>{key}</Key><LastModified>2026-11-21T00:00:00Z</LastModified><Size>1</Size></Contents>"
        for key in keys
    )
    return (
        f"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>{more}</NextContinuationToken>"
        f"{items}</ListBucketResult>"
    )


def test_a_listing_of_nothing_that_never_ends_is_left(
    liar: Liar, bucket: S3Destination, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_BARREN", 20)
    liar.answer = lambda _query: listing([], f"t{len(liar.asked)}")
    assert "pages without a key of ours" in ended(lambda: list(bucket.list("")))


def test_a_listing_of_what_is_not_ours_that_goes_in_circles_is_left(liar: Liar, bucket: S3Destination) -> None:
    liar.answer = lambda _query: listing(["folder/", "folder/ x"], "again")
    assert "it says that there are more" in ended(lambda: list(bucket.list("")))


def test_a_listing_of_uploads_that_goes_in_circles_is_left(liar: Liar, bucket: S3Destination) -> None:
    for marks in ("", "<NextKeyMarker>k</NextKeyMarker><NextUploadIdMarker>u</NextUploadIdMarker>"):
        liar.answer = lambda _query, marks=marks: (  # type: ignore[misc]  # one value of the loop
            f"<ListMultipartUploadsResult><IsTruncated>true</IsTruncated>{marks}</ListMultipartUploadsResult>"
        )
        assert "looking for leftovers" in ended(lambda: list(bucket.leftovers()))


def test_nobody_is_followed_elsewhere(liar: Liar, bucket: S3Destination) -> None:
    elsewhere: list[str] = []

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            elsewhere.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        liar.redirect = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            ended(lambda: bucket.get(layout.RECOVER).read())
            ended(lambda: list(bucket.list("")))
        finally:
            server.shutdown()
            thread.join()
    assert elsewhere == []


class Endless:
    """An SFTP server of which each folder holds ``names`` more in each answer."""

    def __init__(self, names: int) -> None:
        self._names = names
        self._ready = b""

    def settimeout(self, _timeout: float | None) -> None:
        pass

    def sendall(self, s: bytes) -> None:
        kind, number = struct.unpack_from(">BI", s, 4)
        opening, closing = 11, 4
        if kind == opening:
            answer = struct.pack(">BI", 102, number) + struct.pack(">I", 1) + b"h"
        elif kind == closing:
            answer = struct.pack(">BIII", 101, number, 0, 0)
        else:
            one = struct.pack(">I", 1) + b"a" + struct.pack(">I", 0) + struct.pack(">I", 0)
            answer = struct.pack(">BII", 104, number, self._names) + one * self._names
        self._ready += struct.pack(">I", len(answer)) + answer

    def recv(self, nbytes: int) -> bytes:
        found, self._ready = self._ready[:nbytes], self._ready[nbytes:]
        return found


@pytest.mark.parametrize("names", [0, 1000])
def test_a_folder_that_never_ends_is_left(names: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sftpwire, "_MOST_NAMES", 20_000)
    with pytest.raises(LostError, match="its listing of /store does not end"):
        Wire(Endless(names), 1.0).folders(["/store"])


def test_folders_in_folders_without_an_end_are_not_gone_through(tmp_path: Path) -> None:
    place = FilesystemDestination("local", tmp_path / "store")
    place.initialise(START)
    key = layout.object_key(named(b"content").name)
    put(place, key, b"x")
    tree = layout.tree_name("shop", backup_id(1))
    place.link(key, tree, "a")
    try:
        for top in ("objects", tree + layout.PARTIAL):
            deepen(place.root / top)
        assert [info.key for info in place.list("")] == [key, layout.REPOSITORY]
        with pytest.raises(DestinationError) as failed:
            place.remove_tree(tree)
        assert "nested deeper than backupd creates them" in failed.value.detail
    finally:
        subprocess.run(["rm", "-rf", str(place.root)], check=True)


def deepen(folder: Path) -> None:
    before = os.open(folder, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=before)
        below = os.open("d", os.O_RDONLY, dir_fd=before)
        os.close(before)
        before = below
    os.close(before)
