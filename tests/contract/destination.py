"""Every question ever asked of any destination. A driver's test class inherits one of these and gives a fixture."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import BinaryIO, cast

import pytest

from backupd.model.binlog import SegmentKey
from backupd.model.errors import DestinationError, ObjectMissingError
from storage import layout
from storage.destination import Capability, Destination, TreeDestination, as_copying, as_tree

PART = 1 << 20
"""The piece size of the drivers that copy in pieces."""
KEY = layout.object_key("ab" * 32 + "-" + "01" * 8)
OTHER = layout.object_key("cd" * 32 + "-" + "02" * 8)
LOG = layout.segment_folder("shop", SegmentKey("20261121T042512Z-7f3a9c01", 1, 0, 10))
TREE = layout.tree_name("shop", "20261121T042512Z-7f3a9c01")
SLOW_SOURCE = """
import io, sys

class Slow(io.RawIOBase):
    count = 0
    def read(self, size=-1, /):
        self.count += 1
        if self.count == 3:
            print("midway", flush=True)
            sys.stdin.read()
        return b"x" * size
"""
"""Python that defines a stream which says "midway" at its third read, and waits there for its parent."""


def put(destination: Destination, key: str, content: bytes) -> None:
    destination.put(key, io.BytesIO(content))


def get(destination: Destination, key: str, *, offset: int = 0, length: int | None = None) -> bytes:
    with destination.get(key, offset=offset, length=length) as stream:
        return stream.read()


def keys(destination: Destination, prefix: str = "objects/") -> list[str]:
    return [info.key for info in destination.list(prefix)]


class BrokenStream(io.RawIOBase):
    """Yields ``good`` bytes, then fails."""

    def __init__(self, good: int, error: Exception) -> None:
        super().__init__()
        self._good = good
        self._error = error

    def read(self, size: int = -1, /) -> bytes:
        if not self._good:
            raise self._error
        piece = min(self._good, size if size >= 0 else self._good)
        self._good -= piece
        return b"x" * piece


class DestinationContract:
    """For any destination; the ``destination`` fixture gives an initialised, empty one."""

    @pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 3 * PART])
    def test_what_was_put_is_what_is_got(self, destination: Destination, size: int) -> None:
        content = bytes(index % 251 for index in range(size))
        info = destination.put(KEY, io.BytesIO(content))
        assert (info.key, info.size) == (KEY, size)
        assert get(destination, KEY) == content
        assert destination.stat(KEY) == info
        assert keys(destination) == [KEY]

    def test_the_time_of_an_object_is_now_in_utc(self, destination: Destination) -> None:
        put(destination, KEY, b"x")
        modified = destination.stat(KEY).modified_at
        assert modified.utcoffset() == timedelta(0)
        assert abs(datetime.now(UTC) - modified) < timedelta(minutes=1)

    @pytest.mark.parametrize(
        ("offset", "length", "expected"),
        [
            (0, None, b"0123456789"),
            (3, None, b"3456789"),
            (3, 4, b"3456"),
            (8, 100, b"89"),
            (10, None, b""),
            (99, 5, b""),
            (0, 0, b""),
            (0, 10, b"0123456789"),
        ],
    )
    def test_a_range_gives_exactly_its_bytes(
        self, destination: Destination, offset: int, length: int | None, expected: bytes
    ) -> None:
        put(destination, KEY, b"0123456789")
        assert get(destination, KEY, offset=offset, length=length) == expected

    def test_a_stream_can_be_read_in_small_pieces(self, destination: Destination) -> None:
        put(destination, KEY, b"0123456789")
        with destination.get(KEY, offset=1, length=7) as stream:
            assert [stream.read(3), stream.read(3), stream.read(3), stream.read(3)] == [b"123", b"456", b"7", b""]

    def test_a_duplicate_outlives_what_it_was_made_of(self, destination: Destination) -> None:
        copying = as_copying(destination)
        if copying is None:
            assert Capability.COPIES not in destination.capabilities
            return
        source, target = f"{LOG}part-00000.piece.zst.gpg", f"{LOG}part-00001.zst.gpg"
        put(destination, source, b"some bytes")
        assert copying.duplicate(source, target)
        assert copying.duplicate(source, target)
        assert (get(destination, target), destination.stat(target).size) == (b"some bytes", 10)
        put(destination, source, b"others")
        assert get(destination, target) == b"some bytes"
        assert copying.duplicate(source, target)
        assert get(destination, target) == b"others"
        destination.delete(source)
        assert (keys(destination, LOG), get(destination, target)) == ([target], b"others")
        with pytest.raises(ObjectMissingError):
            copying.duplicate(source, target)
        assert not list(destination.leftovers())

    def test_an_unknown_key_is_named_in_the_error(self, destination: Destination) -> None:
        for ask in (lambda: get(destination, KEY), lambda: destination.stat(KEY)):
            with pytest.raises(ObjectMissingError) as caught:
                ask()
            assert KEY in caught.value.message
            assert destination.name in caught.value.message

    def test_putting_again_replaces(self, destination: Destination) -> None:
        put(destination, KEY, b"first, and longer")
        put(destination, KEY, b"second")
        assert get(destination, KEY) == b"second"
        assert destination.stat(KEY).size == 6
        assert keys(destination) == [KEY]

    def test_an_open_stream_keeps_its_object_while_it_is_replaced_or_deleted(self, destination: Destination) -> None:
        put(destination, KEY, b"first")
        with destination.get(KEY) as stream:
            put(destination, KEY, b"other")
            destination.delete(KEY)
            assert stream.read() == b"first"

    @pytest.mark.parametrize("good", [0, 1, PART, 2 * PART + 5])
    @pytest.mark.parametrize("error", [OSError(5, "the source broke"), RuntimeError("the tool died")])
    def test_a_stream_that_fails_midway_leaves_nothing(
        self, destination: Destination, good: int, error: Exception
    ) -> None:
        with pytest.raises(type(error)) as caught:
            destination.put(KEY, cast(BinaryIO, BrokenStream(good, error)))
        assert caught.value is error
        assert keys(destination, "") in ([], [layout.REPOSITORY])
        assert list(destination.leftovers()) == []

    def test_a_stream_that_fails_midway_leaves_the_older_object(self, destination: Destination) -> None:
        put(destination, KEY, b"older")
        with pytest.raises(ValueError, match="stop"):
            destination.put(KEY, cast(BinaryIO, BrokenStream(PART, ValueError("stop"))))
        assert get(destination, KEY) == b"older"

    def test_a_put_that_failed_can_be_repeated(self, destination: Destination) -> None:
        with pytest.raises(ValueError, match="stop"):
            destination.put(KEY, cast(BinaryIO, BrokenStream(10, ValueError("stop"))))
        put(destination, KEY, b"whole")
        assert get(destination, KEY) == b"whole"

    def test_deleting_twice_is_no_error(self, destination: Destination) -> None:
        put(destination, KEY, b"x")
        destination.delete(KEY)
        destination.delete(KEY)
        assert keys(destination) == []
        with pytest.raises(ObjectMissingError):
            destination.stat(KEY)

    def test_deleting_one_leaves_its_neighbours(self, destination: Destination) -> None:
        neighbour = layout.manifest_key("shop", "20261121T042512Z-7f3a9c01")
        body = layout.body_key("shop", "20261121T042512Z-7f3a9c01")
        put(destination, neighbour, b"x")
        put(destination, body, b"y")
        destination.delete(body)
        assert keys(destination, "servers/") == [neighbour]
        destination.delete(neighbour)
        assert keys(destination, "servers/") == []
        put(destination, body, b"z")
        assert keys(destination, "servers/") == [body]

    def test_a_list_is_in_key_order_and_only_of_its_prefix(self, destination: Destination) -> None:
        names = ["servers/a.b/x", "servers/a/x", "servers/a-b/x", "servers/a/y.json", "servers/ab/x", "marks/a/x"]
        for name in names:
            put(destination, name, b"x")
        assert keys(destination, "servers/") == sorted(name for name in names if name.startswith("servers/"))
        assert keys(destination, "servers/a/") == ["servers/a/x", "servers/a/y.json"]
        assert keys(destination, "servers/a") == sorted(name for name in names if name.startswith("servers/a"))
        assert keys(destination, "servers/a/x") == ["servers/a/x"]
        assert keys(destination, "servers/b") == []
        assert keys(destination, "nothing/here/") == []

    def test_a_list_may_be_consumed_while_deleting(self, destination: Destination) -> None:
        for index in range(20):
            put(destination, f"pins/p{index:02d}.json", b"x")
        for info in destination.list("pins/"):
            destination.delete(info.key)
        assert keys(destination, "pins/") == []

    @pytest.mark.parametrize(
        "key",
        [
            "",
            "/",
            "/etc/passwd",
            "../x",
            "objects/../../x",
            "objects//x",
            "objects/",
            "objects/.hidden",
            ".tmp/x",
            "objects/a\0b",
            "a/b c",
            "objects/.",
            "objects/..",
            "é/x",
            "servers/s/20261121T042512Z-7f3a9c01/files/x",
            "servers/s/20261121T042512Z-7f3a9c01.partial/x",
            "x" * 300,
        ],
    )
    def test_a_key_that_could_leave_its_place_is_refused(self, destination: Destination, key: str) -> None:
        with pytest.raises(DestinationError):
            put(destination, key, b"x")
        with pytest.raises(DestinationError):
            get(destination, key)
        with pytest.raises(DestinationError):
            destination.stat(key)
        with pytest.raises(DestinationError):
            destination.delete(key)

    def test_two_writers_of_one_key_leave_one_whole_object(self, destination: Destination) -> None:
        contents = [bytes([letter]) * (2 * PART + 7) for letter in b"abcdef"]
        threads = [threading.Thread(target=put, args=(destination, KEY, content)) for content in contents]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert get(destination, KEY) in contents
        assert list(destination.leftovers()) == []

    def test_many_writers_of_many_keys_do_not_disturb_each_other(self, destination: Destination) -> None:
        def write(lane: int) -> None:
            for index in range(25):
                key = layout.manifest_key(f"s{lane}", f"20261121T0425{index:02d}Z-7f3a9c01")
                put(destination, key, f"{lane} {index}".encode())
                if index % 2:
                    destination.delete(key)

        threads = [threading.Thread(target=write, args=(lane,)) for lane in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(keys(destination, "servers/")) == 6 * 13

    def test_space_is_told_exactly_where_the_capability_says_so(self, destination: Destination) -> None:
        space = destination.space()
        assert (space is not None) == (Capability.SPACE in destination.capabilities)
        if space is not None:
            assert 0 < space.free <= space.total

    def test_initialising_again_is_harmless(self, destination: Destination) -> None:
        put(destination, KEY, b"x")
        destination.initialise(datetime.now(UTC))
        assert destination.is_initialised()
        assert get(destination, KEY) == b"x"

    def test_nothing_is_left_over_after_good_puts(self, destination: Destination) -> None:
        put(destination, KEY, b"x")
        assert list(destination.leftovers()) == []
        assert destination.clear_leftovers() == 0
        assert get(destination, KEY) == b"x"

    def test_an_uninitialised_destination_does_nothing(self, bare: Destination) -> None:
        assert not bare.is_initialised()
        for ask in (
            lambda: put(bare, KEY, b"x"),
            lambda: get(bare, KEY),
            lambda: bare.stat(KEY),
            lambda: keys(bare),
            lambda: list(bare.leftovers()),
            lambda: bare.delete(KEY),
            bare.clear_leftovers,
        ):
            with pytest.raises(DestinationError) as caught:
                ask()
            assert not isinstance(caught.value, ObjectMissingError)
        bare.initialise(datetime.now(UTC))
        assert bare.is_initialised()
        put(bare, KEY, b"x")
        assert get(bare, KEY) == b"x"


class TreeContract(DestinationContract):
    """For destinations with the TREE capability as well."""

    @pytest.fixture
    def tree(self, destination: Destination) -> TreeDestination:
        found = as_tree(destination)
        assert found is not None
        return found

    def shown(self, tree: TreeDestination, name: str = TREE) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for path, _inode in tree.tree_files(name):
            with tree.open_tree_file(name, path) as stream:
                found[path] = stream.read()
        return found

    def test_a_published_tree_shows_its_objects_without_a_copy(self, tree: TreeDestination) -> None:
        put(tree, KEY, b"one")
        put(tree, OTHER, b"two")
        tree.link(KEY, TREE, "shop/a.ibd.zst.gpg")
        tree.link(OTHER, TREE, "shop/größe/b.ibd.parts/00000.zst.gpg")
        tree.link(KEY, TREE, "c.zst.gpg")
        assert list(tree.trees()) == [(TREE, False)]
        assert list(tree.tree_files(TREE)) == []
        tree.publish(TREE)
        assert list(tree.trees()) == [(TREE, True)]
        assert self.shown(tree) == {
            "c.zst.gpg": b"one",
            "shop/a.ibd.zst.gpg": b"one",
            "shop/größe/b.ibd.parts/00000.zst.gpg": b"two",
        }
        inodes = dict(tree.tree_files(TREE))
        assert inodes["c.zst.gpg"] == inodes["shop/a.ibd.zst.gpg"] == tree.identity(KEY)
        assert inodes["shop/größe/b.ibd.parts/00000.zst.gpg"] == tree.identity(OTHER)

    def test_tree_links_are_no_objects(self, tree: TreeDestination) -> None:
        put(tree, KEY, b"one")
        tree.link(KEY, TREE, "a")
        assert keys(tree, "servers/") == []
        tree.publish(TREE)
        assert keys(tree, "servers/") == []
        assert KEY in keys(tree, "")

    def test_linking_again_is_harmless(self, tree: TreeDestination) -> None:
        put(tree, KEY, b"one")
        tree.link(KEY, TREE, "a")
        tree.link(KEY, TREE, "a")
        tree.publish(TREE)
        assert self.shown(tree) == {"a": b"one"}

    def test_linking_shows_the_latest_object(self, tree: TreeDestination) -> None:
        put(tree, KEY, b"one")
        put(tree, OTHER, b"two")
        tree.link(KEY, TREE, "a")
        tree.link(OTHER, TREE, "a")
        tree.publish(TREE)
        assert self.shown(tree) == {"a": b"two"}

    def test_linking_an_unknown_object_says_so(self, tree: TreeDestination) -> None:
        with pytest.raises(ObjectMissingError, match=KEY):
            tree.link(KEY, TREE, "a")

    def test_publishing_twice_is_harmless_and_an_unknown_tree_is_not(self, tree: TreeDestination) -> None:
        with pytest.raises(ObjectMissingError):
            tree.publish(TREE)
        put(tree, KEY, b"one")
        tree.link(KEY, TREE, "a")
        tree.publish(TREE)
        tree.publish(TREE)
        assert self.shown(tree) == {"a": b"one"}

    def test_a_tree_made_afresh_takes_the_place_of_the_older(self, tree: TreeDestination) -> None:
        put(tree, KEY, b"one")
        tree.link(KEY, TREE, "a")
        tree.publish(TREE)
        tree.link(KEY, TREE, "b/c")
        assert list(tree.trees()) == [(TREE, False), (TREE, True)]
        tree.publish(TREE)
        assert self.shown(tree) == {"b/c": b"one"}
        assert list(tree.trees()) == [(TREE, True)]

    def test_side_files_and_tree_live_beside_each_other_in_any_order(self, tree: TreeDestination) -> None:
        body = TREE + "/" + layout.BODY
        put(tree, body, b"body")
        put(tree, KEY, b"one")
        tree.link(KEY, TREE, "a")
        tree.publish(TREE)
        put(tree, TREE + "/" + layout.MANIFEST, b"{}")
        assert keys(tree, "servers/") == [body, TREE + "/" + layout.MANIFEST]
        tree.remove_tree(TREE)
        assert keys(tree, "servers/") == [body, TREE + "/" + layout.MANIFEST]

    @pytest.mark.parametrize("publish", [False, True])
    def test_a_removed_tree_is_gone_and_its_objects_stay(self, tree: TreeDestination, publish: bool) -> None:
        put(tree, KEY, b"one")
        tree.link(KEY, TREE, "a/b/c")
        if publish:
            tree.publish(TREE)
        tree.remove_tree(TREE)
        tree.remove_tree(TREE)
        assert list(tree.trees()) == []
        assert list(tree.tree_files(TREE)) == []
        assert get(tree, KEY) == b"one"
        assert list(tree.leftovers()) == []

    def test_deleting_the_object_leaves_what_the_tree_shows(self, tree: TreeDestination) -> None:
        put(tree, KEY, b"one")
        tree.link(KEY, TREE, "a")
        tree.publish(TREE)
        tree.delete(KEY)
        assert self.shown(tree) == {"a": b"one"}

    @pytest.mark.parametrize("path", ["", "/a", "../a", "a/../b", "a//b", ".", "a\0b", "a/", "x" * 256])
    def test_a_path_that_could_leave_its_tree_is_refused(self, tree: TreeDestination, path: str) -> None:
        put(tree, KEY, b"one")
        with pytest.raises(DestinationError):
            tree.link(KEY, TREE, path)

    @pytest.mark.parametrize(
        "name",
        [
            "",
            "servers",
            "servers/shop",
            "objects/ab",
            "servers/../x",
            "servers/shop/20261121T042512Z-7f3a9c01/files",
            "servers/shop/x",
        ],
    )
    def test_a_name_that_is_no_tree_is_refused(self, tree: TreeDestination, name: str) -> None:
        put(tree, KEY, b"one")
        questions: tuple[Callable[[], object], ...] = (
            lambda: tree.link(KEY, name, "a"),
            lambda: tree.publish(name),
            lambda: tree.remove_tree(name),
        )
        for ask in questions:
            with pytest.raises(DestinationError):
                ask()

    def test_an_uninitialised_destination_shows_no_trees(self, bare: Destination) -> None:
        tree = bare
        assert isinstance(tree, TreeDestination)
        questions: tuple[Callable[[], object], ...] = (
            lambda: tree.link(KEY, TREE, "a"),
            lambda: tree.publish(TREE),
            lambda: tree.remove_tree(TREE),
            lambda: list(tree.trees()),
            lambda: list(tree.tree_files(TREE)),
            lambda: tree.identity(KEY),
        )
        for ask in questions:
            with pytest.raises(DestinationError) as caught:
                ask()
            assert not isinstance(caught.value, ObjectMissingError)
