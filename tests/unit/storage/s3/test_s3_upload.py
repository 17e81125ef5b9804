"""Objects that are too large for one request: cut, sent beside each other in bounded memory, committed by the last."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from backupd.model.errors import DestinationError
from storage import layout
from storage.s3 import client as s3client
from storage.s3 import stream as s3upload
from storage.s3.destination import S3Destination
from storage.s3.stream import LARGEST, LARGEST_PART, MIB, PARTS, part_size
from tests.contract.destination import BrokenStream, get, keys
from tests.support.dice import rounds, thrown
from tests.support.stores.buckets import OBJECT, config, opened
from tests.support.stores.fault_proxy import Fault, FaultProxy, Kind, schedule
from tests.support.stores.s3_server import S3Server

MARK = layout.mark_key("shop", "20261121T042512Z-7f3a9c01")
SMALLEST = 5 * MIB
"""Servers take no smaller part but for the last one."""


class Endless(io.RawIOBase):
    """``size`` bytes that nobody can tell the number of beforehand."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._left = size

    def read(self, size: int = -1, /) -> bytes:
        piece = min(self._left, MIB if size < 0 else size)
        self._left -= piece
        return bytes(piece)


def stream(content: bytes) -> BinaryIO:
    """``content`` without its length."""
    raw = io.BytesIO(content)
    raw.seekable = lambda: False  # type: ignore[method-assign]  # all that it hides
    return raw


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3upload, "WHOLE", SMALLEST)
    monkeypatch.setattr(s3upload, "PART", SMALLEST)
    monkeypatch.setattr(s3upload, "_IN_MEMORY", 3 * SMALLEST)
    monkeypatch.setattr(s3client, "FIRST_PAUSE", 0.02)


@pytest.fixture(scope="module")
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.endpoint, thrown("faults of parts")) as between:
        yield between


@pytest.fixture
def destination(s3_server: S3Server, proxy: FaultProxy) -> Iterator[S3Destination]:
    proxy.clear()
    with opened(config(s3_server, endpoint_url=proxy.endpoint), begin_seconds=60.0) as made:
        proxy.clear()
        yield made
        proxy.clear()


@pytest.fixture(scope="module")
def content() -> bytes:
    return thrown("content of parts").randbytes(3 * SMALLEST + 12345)


def unfinished(server: S3Server, destination: S3Destination) -> int:
    """Uploads that were begun under the destination's prefix and neither completed nor given up."""
    bucket = destination._bucket
    with contextlib.closing(server.client()) as client:
        found = client.list_multipart_uploads(Bucket=bucket.config.bucket, Prefix=bucket.prefix)
    return len(found.get("Uploads", []))


def test_parts_are_enough_for_the_largest_object_whether_its_length_is_known_or_not() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3upload, "PART", 16 * MIB)
        for length in (33 * MIB, 10 << 30, 157 << 30, LARGEST):
            size = part_size(1, length)
            assert 16 * MIB <= size <= LARGEST_PART
            assert -(-length // size) <= PARTS
        assert part_size(1, 10 << 30) == 16 * MIB
        sizes = [part_size(number, None) for number in range(1, PARTS + 1)]
        assert sum(sizes) >= LARGEST
        assert max(sizes) <= LARGEST_PART
        assert sum(sizes[:1000]) == 1000 * 16 * MIB  # 15 GiB before they grow


@pytest.mark.parametrize("known", [True, False])
def test_a_large_object_is_put_together_from_its_parts(
    destination: S3Destination, proxy: FaultProxy, s3_server: S3Server, content: bytes, *, known: bool
) -> None:
    proxy.clear()
    info = destination.put(OBJECT, io.BytesIO(content) if known else stream(content))
    assert (proxy.requests["PUT"], proxy.requests["POST"]) == (4, 2)
    assert info.size == len(content)
    assert get(destination, OBJECT) == content
    assert get(destination, OBJECT, offset=SMALLEST - 3, length=7) == content[SMALLEST - 3 : SMALLEST + 4]
    assert destination.checksum(OBJECT) == (hashlib.sha256(content).hexdigest() if known else None)
    assert unfinished(s3_server, destination) == 0


def test_parts_grow_where_nobody_knows_how_long_it_becomes(
    destination: S3Destination, proxy: FaultProxy, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3upload, "_STEP", 1)
    destination.put(OBJECT, stream(content))
    assert proxy.requests["PUT"] == 3  # 5, 10 and the rest of 20 MiB
    assert get(destination, OBJECT) == content


def test_a_source_that_fails_after_some_parts_leaves_nothing_and_its_own_error(
    destination: S3Destination, s3_server: S3Server
) -> None:
    error = ValueError("the tool died")
    with pytest.raises(ValueError, match="the tool died") as caught:
        destination.put(OBJECT, cast(BinaryIO, BrokenStream(2 * SMALLEST + 7, error)))
    assert caught.value is error
    assert keys(destination) == []
    assert unfinished(s3_server, destination) == 0


def test_a_part_that_cannot_be_sent_gives_the_upload_up(
    destination: S3Destination, proxy: FaultProxy, s3_server: S3Server, content: bytes
) -> None:
    proxy.plan(Fault(Kind.ANSWER, method="PUT", path="partNumber=2"))
    with pytest.raises(DestinationError, match="part 2"):
        destination.put(OBJECT, stream(content))
    proxy.plan()
    assert keys(destination) == []
    assert unfinished(s3_server, destination) == 0
    destination.put(OBJECT, stream(content))
    assert get(destination, OBJECT) == content


def test_an_upload_whose_place_vanished_is_a_leftover_only(
    s3_server: S3Server, proxy: FaultProxy, content: bytes
) -> None:
    where = config(s3_server, endpoint_url=proxy.endpoint)
    proxy.clear()
    with (
        opened(where) as destination,
        opened(where, initialise=False, read_seconds=2.0, begin_seconds=2.0) as impatient,
    ):
        proxy.plan(Fault(Kind.HANG, method="PUT", path="partNumber=3"), Fault(Kind.HANG, method="DELETE"))
        with pytest.raises(DestinationError):
            impatient.put(OBJECT, stream(content))
        proxy.plan()
        assert keys(destination) == []
        assert unfinished(s3_server, destination) == 1
        assert list(destination.leftovers()) == []


def test_the_answer_to_the_last_request_may_be_lost(
    destination: S3Destination, proxy: FaultProxy, content: bytes
) -> None:
    for key in (OBJECT, MARK):
        proxy.plan(Fault(Kind.RESET_RESPONSE, method="POST", path="uploadId", times=1))
        destination.put(key, stream(content))
        assert proxy.done[Kind.RESET_RESPONSE] == 1
        assert get(destination, key) == content
        proxy.clear()


@pytest.mark.campaign
def test_parts_that_break_anywhere_are_sent_again(
    destination: S3Destination, proxy: FaultProxy, s3_server: S3Server, content: bytes
) -> None:
    dice = thrown("broken parts")
    for number in range(rounds(2)):
        key = f"{layout.OBJECTS}ab/{number:064d}-{'01' * 8}"
        proxy.plan(*schedule(dice, chance=0.3, size=SMALLEST, method="PUT"))
        try:
            destination.put(key, stream(content))
        except DestinationError:
            proxy.plan()
            assert keys(destination) == []
            destination.put(key, stream(content))
        proxy.plan()
        assert get(destination, key) == content
        destination.delete(key)
        assert unfinished(s3_server, destination) == 0


def test_an_answer_that_names_another_checksum_is_not_believed(s3_server: S3Server, content: bytes) -> None:
    other = base64.b64encode(hashlib.sha256(b"other").digest()).decode()
    with opened(config(s3_server)) as destination:
        client = destination._bucket._made(patient=False)
        client.meta.events.register(
            "after-call.s3.UploadPart", lambda parsed, **_others: parsed.update(ChecksumSHA256=other)
        )
        with pytest.raises(DestinationError, match="failed") as caught:
            destination.put(OBJECT, stream(content))
        assert "SHA-256" in caught.value.detail
        assert keys(destination) == []


def test_an_upload_that_runs_is_no_leftover_of_its_own_process(s3_server: S3Server, destination: S3Destination) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Endless):
        def read(self, size: int = -1, /) -> bytes:
            if self._left < SMALLEST:
                begun.set()
                go_on.wait(300)
            return super().read(min(size, MIB))

    writer = threading.Thread(target=destination.put, args=(OBJECT, Slow(2 * SMALLEST + 1)))
    writer.start()
    try:
        assert begun.wait(300)
        assert unfinished(s3_server, destination) == 1
        destination._clock = lambda: datetime(2100, 1, 1, tzinfo=UTC)
        assert list(destination.leftovers()) == []
        assert destination.clear_leftovers() == 0
    finally:
        go_on.set()
        writer.join()
    assert destination.stat(OBJECT).size == 2 * SMALLEST + 1


_MEASURE = """
import json, resource, sys
from storage.config import S3Config
from storage.s3.destination import S3Destination
from tests.unit.storage.s3.test_s3_upload import Endless
config = S3Config.model_validate(json.loads(sys.argv[1]))
place = S3Destination("offsite", config)
place.is_initialised()
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
before = peak()
place.put(sys.argv[2], Endless(int(sys.argv[3])))
print(peak() - before)
"""


def test_a_large_stream_takes_no_more_memory_than_four_parts(s3_server: S3Server) -> None:
    where = config(s3_server)
    with opened(where) as destination:
        size = 160 * MIB
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE, where.model_dump_json(), OBJECT, str(size)],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[4],
        )
        assert destination.stat(OBJECT).size == size
        # The first request's buffer becomes two of the parts; what the library keeps besides is small.
        assert int(done.stdout) < (4 * 16 + 32 + 16) * MIB, json.dumps(done.stdout)
