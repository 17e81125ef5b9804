from __future__ import annotations

import io
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from backupd.model.errors import CancelledError
from backupd.process.throttle import TokenBucket
from storage.destination import Destination, as_tree
from storage.filesystem import FilesystemDestination
from storage.throttle_and_breaker import PIECE, throttled
from tests.contract.destination import KEY, TREE, DestinationContract, TreeContract, get, keys, put
from tests.support.stores.memory import MemoryDestination


def fast() -> TokenBucket:
    return TokenBucket(1e12)


class TestThrottledFilesystem(TreeContract):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        made = FilesystemDestination("disk", tmp_path / "repository")
        made.initialise(datetime.now(UTC))
        return throttled(made, put=fast(), get=fast())

    @pytest.fixture
    def bare(self, tmp_path: Path) -> Destination:
        return throttled(FilesystemDestination("disk", tmp_path / "bare"), put=fast(), get=fast())


class TestThrottledWithoutTrees(DestinationContract):
    @pytest.fixture
    def destination(self) -> Destination:
        return throttled(MemoryDestination("memory", tree=False), put=fast(), get=fast())

    @pytest.fixture
    def bare(self) -> Destination:
        return throttled(MemoryDestination("memory", tree=False, initialised=False), put=fast(), get=fast())


class Counting:
    """Notes every size that passes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def take(self, size: int) -> None:
        self.sizes.append(size)


def test_every_byte_passes_the_throttle_in_pieces_before_it_is_stored_or_read() -> None:
    written, read = Counting(), Counting()
    memory = MemoryDestination("memory")
    slow = throttled(memory, put=written, get=read)
    content = bytes(range(256)) * 5000
    put(slow, KEY, content)
    assert sum(written.sizes) == len(content)
    assert max(written.sizes) <= PIECE
    assert read.sizes == []
    assert get(slow, KEY) == content
    assert sum(read.sizes) == len(content)
    assert get(slow, KEY, offset=7, length=9) == content[7:16]
    assert sum(read.sizes) == len(content) + 9
    assert get(memory, KEY) == content


def test_files_shown_in_a_tree_are_read_through_the_throttle() -> None:
    read = Counting()
    slow = throttled(MemoryDestination("memory"), get=read)
    put(slow, KEY, b"0123456789")
    tree = as_tree(slow)
    assert tree is not None
    tree.link(KEY, TREE, "shop/orders.ibd")
    tree.publish(TREE)
    with tree.open_tree_file(TREE, "shop/orders.ibd") as stream:
        assert stream.read() == b"0123456789"
    assert read.sizes == [10]


def test_without_a_throttle_nothing_is_held_back() -> None:
    slow = throttled(MemoryDestination("memory"))
    put(slow, KEY, b"x" * 3 * PIECE)
    assert len(get(slow, KEY)) == 3 * PIECE


def test_a_stop_in_the_middle_of_a_put_stores_nothing() -> None:
    cancel = threading.Event()
    cancel.set()
    memory = MemoryDestination("memory")
    slow = throttled(memory, put=TokenBucket(1000, cancel=cancel))
    with pytest.raises(CancelledError):
        put(slow, KEY, b"x" * 3 * PIECE)
    assert keys(memory) == []


def test_the_stream_of_the_caller_stays_open_and_that_of_the_destination_is_closed() -> None:
    memory = MemoryDestination("memory")
    opened: list[io.BytesIO] = []

    class Watched(MemoryDestination):
        def get(self, key: str, *, offset: int = 0, length: int | None = None) -> io.BytesIO:
            opened.append(io.BytesIO(b"x"))
            return opened[-1]

    source = io.BytesIO(b"0123456789")
    throttled(memory).put(KEY, source)
    assert not source.closed
    with throttled(Watched("watched")).get(KEY) as stream:
        stream.read()
    assert [one.closed for one in opened] == [True]
