"""Files in, entries out: parts, bundles, dedup, holes, failures. With real gpg on the memory destination."""

from __future__ import annotations

import hashlib
import io
import random
import tarfile
from collections.abc import Mapping
from typing import BinaryIO

import pytest

from backupd.model.errors import DestinationFullError, StreamError
from backupd.model.manifest import BUNDLE_LIMIT, PART_SIZE, Entry, StoredObject
from backupd.transfer import parts as pack
from backupd.transfer.dedup import Fanout, known_everywhere
from backupd.transfer.parts import Packed, Packer
from backupd.transfer.records.encryption import Sealer, Unsealer
from storage import layout
from storage.destination import ObjectInfo
from tests.support.keys import Keys
from tests.support.stores.memory import MemoryDestination

KEY = b"k" * 32
Files = Mapping[str, bytes]


def packed(
    keys: Keys,
    destination: MemoryDestination,
    files: Files,
    *,
    known: Mapping[str, StoredObject] | None = None,
    step: int = 1_000_003,
) -> tuple[Packed, Fanout]:
    """Feed ``files`` in steps, taking turns between them, as two copying threads of a tool would."""
    fanout = Fanout(
        [destination],
        sealer=Sealer([keys.fingerprint], keys.public_home),
        identity_key=KEY,
        known=known or {},
        tree=layout.tree_name("shop", "20261121T000000Z-00000001"),
    )
    with Packer(fanout, workers=2) as packer:
        waiting = dict.fromkeys(files, 0)
        while waiting:
            for path in list(waiting):
                offset = waiting[path]
                piece = files[path][offset : offset + step]
                if piece:
                    packer.data(path, offset, memoryview(piece))
                    waiting[path] += len(piece)
                else:
                    packer.end(path)
                    del waiting[path]
        return packer.finish(), fanout


def opened(keys: Keys, destination: MemoryDestination, entry: Entry) -> bytes:
    unsealer = Unsealer(keys.secret_home)

    def plain(name: str) -> bytes:
        with destination.get(layout.object_key(name)) as stream:
            return unsealer.unseal(stream.read(), limit=PART_SIZE)

    if entry.bundle:
        with tarfile.open(fileobj=io.BytesIO(plain(entry.bundle))) as tar:
            member = tar.extractfile(entry.path)
            assert member is not None
            return member.read()
    pieces = [plain(part.object) for part in entry.parts]
    assert [hashlib.sha256(piece).hexdigest() for piece in pieces] == [part.sha256 for part in entry.parts]
    return b"".join(pieces)


def known_of(fanout: Fanout) -> dict[str, StoredObject]:
    return {layout.identity_of(stored.name): stored for stored in (*fanout.new_objects, *fanout.reused_objects)}


def test_every_size_around_the_limits_comes_back_byte_for_byte(keys: Keys) -> None:
    dice = random.Random(7)
    sizes = [
        0,
        1,
        BUNDLE_LIMIT - 1,
        BUNDLE_LIMIT,
        BUNDLE_LIMIT + 1,
        PART_SIZE - 1,
        PART_SIZE,
        PART_SIZE + 1,
        2 * PART_SIZE,
    ]
    files = {f"shop/t{size}.ibd": dice.randbytes(size) for size in sizes}
    destination = MemoryDestination("memory")
    result, _ = packed(keys, destination, files)
    assert [entry.path for entry in result.entries] == sorted(files)
    for entry in result.entries:
        content = files[entry.path]
        assert entry.size == len(content)
        assert entry.sha256 == hashlib.sha256(content).hexdigest()
        assert opened(keys, destination, entry) == content
        if len(content) < BUNDLE_LIMIT:
            assert entry.bundle
        else:
            assert [part.size for part in entry.parts] == [
                min(PART_SIZE, len(content) - start) for start in range(0, len(content), PART_SIZE)
            ]
    assert result.size == sum(sizes)


def test_a_second_pack_of_the_same_files_stores_nothing(keys: Keys) -> None:
    files = {"a/x.ibd": random.Random(1).randbytes(3 * BUNDLE_LIMIT), "a/x.frm": b"frm", "b/y.frm": b"y"}
    destination = MemoryDestination("memory")
    first, fanout = packed(keys, destination, files)
    assert first.linked == 0
    second, again = packed(keys, destination, files, known=known_of(fanout))
    assert second.linked == len(files)
    assert again.new_objects == ()
    assert second.entries == first.entries


def test_one_new_table_among_many_changes_one_bundle(keys: Keys) -> None:
    files = {f"many/t{number:04}.frm": f"definition {number}".encode() * 50 for number in range(1000)}
    destination = MemoryDestination("memory")
    _, fanout = packed(keys, destination, files)
    bundles = len(fanout.new_objects)
    assert bundles > 5
    files["many/t0500a.frm"] = b"new"
    _, again = packed(keys, destination, files, known=known_of(fanout))
    assert len(again.new_objects) == 1


def test_equal_parts_of_one_backup_are_stored_once(keys: Keys) -> None:
    destination = MemoryDestination("memory")
    result, fanout = packed(keys, destination, {"a/zeros.ibd": bytes(5 * PART_SIZE)}, step=PART_SIZE)
    assert len({part.object for part in result.entries[0].parts}) <= 2
    assert sum(1 for _ in destination.list(layout.OBJECTS)) == len(fanout.new_objects)


def test_holes_are_zeros_and_the_entry_remembers_them(keys: Keys) -> None:
    destination = MemoryDestination("memory")
    fanout = Fanout(
        [destination],
        sealer=Sealer([keys.fingerprint], keys.public_home),
        identity_key=KEY,
        known={},
        tree="servers/shop/20261121T000000Z-00000001",
    )
    with Packer(fanout, workers=1) as packer:
        packer.data("t.ibd", 0, memoryview(b"a" * 100))
        packer.data("t.ibd", 40_000, memoryview(b"b" * 100))
        packer.hole("t.ibd", 40_100, 900)
        packer.end("t.ibd")
        entry = packer.finish().entries[0]
    assert entry.sparse
    assert opened(keys, destination, entry) == b"a" * 100 + bytes(39_900) + b"b" * 100 + bytes(900)


def test_files_renamed_and_removed_after_their_end_are_in_the_backup_under_their_last_name(keys: Keys) -> None:
    destination = MemoryDestination("memory")
    fanout = Fanout(
        [destination],
        sealer=Sealer([keys.fingerprint], keys.public_home),
        identity_key=KEY,
        known={},
        tree="servers/shop/20261121T000000Z-00000001",
    )
    files = {"a/big.ibd": bytes(50_000), "a/small.frm": b"frm", "a/gone.ibd": bytes(60_000), "a/again.frm": b"old"}
    with Packer(fanout, workers=1) as packer:
        for path, content in files.items():
            packer.data(path, 0, memoryview(content))
            packer.end(path)
        assert not packer.moved
        packer.rename("a/big.ibd", "a/bigger.ibd")
        packer.rename("a/small.frm", "a/smaller.frm")
        packer.remove("a/gone.ibd")
        packer.remove("a/again.frm")
        packer.data("a/again.frm", 0, memoryview(b"new"))
        packer.end("a/again.frm")
        assert packer.moved
        with pytest.raises(StreamError, match="already"):
            packer.rename("a/bigger.ibd", "a/smaller.frm")
        result = packer.finish()
    expected = {"a/bigger.ibd": bytes(50_000), "a/smaller.frm": b"frm", "a/again.frm": b"new"}
    assert {entry.path: opened(keys, destination, entry) for entry in result.entries} == expected


@pytest.mark.parametrize("mistake", ["back", "twice", "never ended"])
def test_a_stream_that_breaks_its_promises_is_refused(keys: Keys, mistake: str) -> None:
    fanout = Fanout(
        [MemoryDestination("memory")],
        sealer=Sealer([keys.fingerprint], keys.public_home),
        identity_key=KEY,
        known={},
        tree="servers/shop/20261121T000000Z-00000001",
    )
    with Packer(fanout, workers=1) as packer:
        packer.data("t.ibd", 0, memoryview(b"abc"))
        if mistake == "back":
            with pytest.raises(StreamError, match="went back"):
                packer.data("t.ibd", 1, memoryview(b"x"))
        elif mistake == "twice":
            packer.end("t.ibd")
            with pytest.raises(StreamError, match="twice"):
                packer.data("t.ibd", 0, memoryview(b"x"))
        else:
            with pytest.raises(StreamError, match=r"inside t\.ibd"):
                packer.finish()


class Overflowing(MemoryDestination):
    """Full after ``room`` objects: a disk that fills in the middle."""

    room = 2

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        if key.startswith(layout.OBJECTS):
            self.room -= 1
            if self.room < 0:
                raise DestinationFullError("destination memory is full")
        return super().put(key, stream)


def test_a_full_destination_stops_the_capture_and_everything_can_be_taken_back(keys: Keys) -> None:
    destination = Overflowing("memory")
    dice = random.Random(3)
    fanout = Fanout(
        [destination],
        sealer=Sealer([keys.fingerprint], keys.public_home),
        identity_key=KEY,
        known={},
        tree="servers/shop/20261121T000000Z-00000001",
    )
    with pytest.raises(DestinationFullError), Packer(fanout, workers=2) as packer:
        for number in range(100):
            packer.data(f"t{number}.ibd", 0, memoryview(dice.randbytes(2 * BUNDLE_LIMIT)))
            packer.end(f"t{number}.ibd")
        packer.finish()
    assert fanout.discard(committed=False) == []
    assert list(destination.list(layout.OBJECTS)) == []


def test_a_vanished_or_truncated_object_is_not_reused(keys: Keys) -> None:
    files = {f"a/t{number}.ibd": random.Random(number).randbytes(2 * BUNDLE_LIMIT) for number in range(3)}
    destination = MemoryDestination("memory")
    _, fanout = packed(keys, destination, files)
    gone, short, _ = (layout.object_key(stored.name) for stored in fanout.new_objects)
    destination.delete(gone)
    with destination.get(short) as stream:
        half = stream.read()[:100]
    destination.put(short, io.BytesIO(half))
    result, again = packed(keys, destination, files, known=known_of(fanout))
    assert len(again.new_objects) == 2
    assert all(opened(keys, destination, entry) == files[entry.path] for entry in result.entries)


def test_only_what_all_destinations_hold_alike_counts_as_known() -> None:
    one, other = StoredObject("x", 1, "1"), StoredObject("y", 1, "2")
    assert known_everywhere([{"a": one, "b": one}, {"a": one, "b": other}]) == {"a": one}
    assert known_everywhere([{"a": one}]) == {"a": one}


def test_what_waits_for_a_slow_destination_is_bounded() -> None:
    assert pack.IN_FLIGHT <= 2 * PART_SIZE
