"""Pieces of binary logs that stay where not everything may be deleted, and that no sweep takes away."""

from __future__ import annotations

import errno
import io
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from backupd.model.binlog import Branch, BranchReason, Ending, SegmentKey
from backupd.model.errors import DamagedError, LockedError, NotFoundError, RefusedError, UsageError
from backupd.model.manifest import PART_SIZE
from backupd.model.server_facts import Position
from backupd.transfer import log_segments
from backupd.transfer.collection import collect
from backupd.transfer.copies import copy_segment
from backupd.transfer.fsck import Invariant, examine
from backupd.transfer.log_segments import PartsGoneError, drop_pieces, replaced_pieces
from backupd.transfer.records import segment_documents
from backupd.transfer.records.encryption import Sealer, Unsealer
from backupd.transfer.records.manifests import put_bytes
from backupd.transfer.records.segment_documents import (
    Sealed,
    Sealing,
    SegmentHeader,
    decode_branch,
    decode_segment,
    encode_branch,
    encode_segment,
    is_log_name,
)
from backupd.transfer.relay import Relay
from backupd.transfer.scrub_and_repair import scrub_segments
from storage import layout
from storage.destination import Capability, Destination
from storage.filesystem import FilesystemDestination
from tests.support.dice import rounds, thrown
from tests.support.keys import Keys
from tests.support.logs.archived import Faulty, Killed, QuickSealer, branch_of
from tests.support.logs.archived_logs import archive_log, seal_log
from tests.support.logs.real_logs import real_logs
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.stock import FakeClock, Stock
from tests.unit.transfer.test_interleaving import Stepped, World, explore

NOW = datetime.now(UTC)
BRANCH = Branch(
    server="shop.eu-1",
    id="20261121T040000Z-0000000a",
    noticed_at=datetime(2026, 11, 21, 4, tzinfo=UTC),
    reason=BranchReason.LOST_TAIL,
    server_uuid="u",
    flavour="mariadb",
    basename="binlog",
    first_number=1,
    since=datetime(2026, 11, 20, tzinfo=UTC),
    parent="20261120T040000Z-0000000b",
    fork=Position("binlog.000001", 4, "0-1-7"),
    names_go_on=True,
    note="it crashed — ‘tail’ lost",
)


@pytest.fixture
def place() -> MemoryDestination:
    return MemoryDestination("m")


@pytest.fixture(params=["filesystem", "memory"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Destination:
    if request.param == "memory":
        return MemoryDestination("m")
    disk = FilesystemDestination("disk", tmp_path / "d")
    disk.initialise(NOW)
    return disk


@pytest.fixture
def sealer(keys: Keys) -> Sealer:
    return Sealer([keys.fingerprint], keys.public_home)


def spoil(destination: Destination, key: str, change: Callable[[bytearray], object]) -> None:
    with destination.get(key) as stream:
        data = bytearray(stream.read())
    change(data)
    put_bytes(destination, key, bytes(data))


def flip(data: bytearray) -> None:
    data[len(data) // 2] ^= 1


def test_pieces_put_together_are_the_file(either: Destination, sealer: Sealer, keys: Keys, tmp_path: Path) -> None:
    log = real_logs()[0]
    cut = log.cuts[2]
    first = archive_log(either, sealer, BRANCH, 1, log.data, end=cut)
    second = archive_log(either, sealer, BRANCH, 1, log.data, start=cut)
    assert log_segments.of_file(either, BRANCH.server, BRANCH.id, 1) == [first.segment.key, second.segment.key]
    assert list(log_segments.headers(either)) == [first, second]
    assert list(log_segments.branches(either, BRANCH.server)) == [BRANCH]
    unsealer = Unsealer(keys.secret_home)
    target = tmp_path / "binlog.000001"
    log_segments.fetch(either, first, unsealer, target)
    assert target.stat().st_mode & 0o777 == 0o600
    log_segments.fetch(either, second, unsealer, target, append=True)
    assert target.read_bytes() == log.archived
    with pytest.raises(RefusedError, match="where the next piece begins"):
        log_segments.fetch(either, second, unsealer, target, append=True)
    found = [*log_segments.read_index(either, first, unsealer), *log_segments.read_index(either, second, unsealer)]
    assert tuple(found) == log.transactions


@pytest.mark.parametrize("spoiled", [flip, lambda data: data.pop(), lambda data: data.append(0), None])
@pytest.mark.parametrize("name", ["part-00000.zst.gpg", "index-00000.zst.gpg"])
def test_every_damage_is_found_by_verify_and_by_fetch(
    place: MemoryDestination,
    sealer: Sealer,
    keys: Keys,
    tmp_path: Path,
    name: str,
    spoiled: Callable[[bytearray], object] | None,
) -> None:
    log = real_logs()[0]
    header = archive_log(place, sealer, BRANCH, 1, log.data)
    key = header.folder + name
    assert scrub_segments(place, [header], report=lambda _progress: None).damages == ()
    if spoiled is None:
        place.delete(key)
    else:
        spoil(place, key, spoiled)
    assert list(log_segments.problems(place, header)) == [key]
    (damage,) = scrub_segments(place, [header], report=lambda _progress: None).damages
    assert (damage.key, damage.segment, damage.as_json()["binlog"]["file"]) == (key, header.segment, "binlog.000001")
    target = tmp_path / "f"
    with pytest.raises(DamagedError, match="damaged") as caught:
        if name.startswith("part"):
            log_segments.fetch(place, header, Unsealer(keys.secret_home), target)
        else:
            list(log_segments.read_index(place, header, Unsealer(keys.secret_home)))
    assert key in caught.value.detail
    assert not target.exists()


def test_a_failed_append_leaves_the_file_as_it_was(
    place: MemoryDestination, sealer: Sealer, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_documents, "PART_SIZE", 1000)
    log = real_logs()[0]
    cut = log.cuts[1]
    first = archive_log(place, sealer, BRANCH, 1, log.data, end=cut)
    second = archive_log(place, sealer, BRANCH, 1, log.data, start=cut)
    assert len(second.parts) > 1
    target = tmp_path / "f"
    log_segments.fetch(place, first, Unsealer(keys.secret_home), target)
    spoil(place, second.folder + second.parts[-1].stored.name, flip)
    with pytest.raises(DamagedError):
        log_segments.fetch(place, second, Unsealer(keys.secret_home), target, append=True)
    assert target.stat().st_size == cut


def test_parts_of_another_segment_do_not_pass(
    place: MemoryDestination, keys: Keys, tmp_path: Path, sealer: Sealer
) -> None:
    one, other = (archive_log(place, sealer, BRANCH, log.number, log.data) for log in real_logs()[1:3])
    swapped = replace(one, parts=other.parts)
    put_bytes(place, one.key, encode_segment(swapped))
    with place.get(other.folder + "part-00000.zst.gpg") as stream:
        put_bytes(place, one.folder + "part-00000.zst.gpg", stream.read())
    with pytest.raises(DamagedError, match="damaged"):
        log_segments.fetch(
            place,
            log_segments.load_header(place, BRANCH.server, one.segment.key),
            Unsealer(keys.secret_home),
            tmp_path / "f",
        )
    assert not (tmp_path / "f").exists()


def test_no_byte_of_the_clear_documents_can_change_unnoticed(place: MemoryDestination) -> None:
    header = archive_log(place, QuickSealer(), BRANCH, 1, real_logs()[0].data)
    for raw, decode in ((encode_segment(header), decode_segment), (encode_branch(BRANCH), decode_branch)):
        decode(raw, where="it")
        dice = thrown("clear documents")
        for at in dice.sample(range(len(raw)), min(len(raw), rounds(200))):
            broken = bytearray(raw)
            broken[at] ^= 1 << dice.randrange(8)
            with pytest.raises(DamagedError, match="it is damaged"):
                decode(bytes(broken), where="it")
        with pytest.raises(DamagedError):
            decode(raw[:-1], where="it")
        with pytest.raises(DamagedError):
            decode(b"[]", where="it")


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../../etc/passwd.000001"},
        {"file": "binlog.000002"},
        {"file": ""},
        {"file": ".000001"},
        {"file": "b\0.000001"},
        {"file": "x" * 255 + ".000001"},
        {"server": "../x"},
        {"server": ""},
        {"branch": "x"},
        {"branch": "../20261121T040000Z-0000000a"},
        {"number": -1},
        {"number": 10**10},
        {"start": 5, "end": 5},
        {"end": 10**12},
        {"start": -1},
    ],
)
def test_absurd_names_never_become_keys_or_files(place: MemoryDestination, change: dict[str, object]) -> None:
    header = archive_log(place, QuickSealer(), BRANCH, 1, real_logs()[0].data)
    segment = replace(header.segment, **change)  # type: ignore[arg-type]  # wrong values are the point
    parts = (replace(header.parts[0], size=segment.end - segment.start),)
    with pytest.raises(DamagedError):
        decode_segment(encode_segment(replace(header, segment=segment, parts=parts)), where="it")


@pytest.mark.parametrize("name", ["binlog.000001", "mysql bin ü.000001", "a.b.c.1", "$(rm -rf).0000001", "x\n.000001"])
def test_odd_names_of_logs_are_possible(place: MemoryDestination, name: str) -> None:
    assert is_log_name(name, 1)
    branch = replace(BRANCH, basename=name.rpartition(".")[0])
    header = archive_log(place, QuickSealer(), branch, 1, real_logs()[0].data)
    assert list(log_segments.headers(place)) == [header]


def test_a_segment_in_the_wrong_folder_is_damaged(place: MemoryDestination) -> None:
    header = archive_log(place, QuickSealer(), BRANCH, 1, real_logs()[0].data)
    elsewhere = SegmentKey(BRANCH.id, 2, 0, header.segment.end)
    put_bytes(place, layout.segment_key(BRANCH.server, elsewhere), encode_segment(header))
    with pytest.raises(DamagedError, match="damaged"):
        log_segments.load_header(place, BRANCH.server, elsewhere)
    with pytest.raises(NotFoundError, match="holds no binary log 3"):
        log_segments.load_header(place, BRANCH.server, replace(elsewhere, number=3))
    assert [type(found) for found in log_segments.headers(place)] == [SegmentHeader, log_segments.DamagedSegment]
    assert [item.invariant for item in examine(place, None, clock=lambda: NOW)] == [Invariant.SEGMENT_INTACT]


def test_storing_again_is_success_even_when_sealed_anew(place: MemoryDestination, tmp_path: Path) -> None:
    log = real_logs()[0]
    first, again = (seal_log(tmp_path / name, QuickSealer(), BRANCH, 1, log.data) for name in ("a", "b"))
    assert first.header != again.header
    log_segments.put(place, first, now=NOW)
    assert log_segments.put(place, again, now=NOW) == first.header
    spoil(place, first.header.folder + "part-00000.zst.gpg", flip)
    assert log_segments.put(place, first, now=NOW) == first.header
    assert log_segments.problems(place, first.header) == {}
    spoil(place, first.header.folder + "part-00000.zst.gpg", flip)
    assert log_segments.put(place, again, now=NOW) == again.header
    assert log_segments.problems(place, again.header) == {}
    spoil(place, again.header.key, flip)
    assert log_segments.put(place, first, now=NOW) == first.header
    assert examine(place, None, clock=lambda: NOW) != []  # the branch is not described
    log_segments.put_branch(place, BRANCH)
    assert examine(place, None, clock=lambda: NOW) == []


def test_a_removed_segment_leaves_nothing_and_half_a_removal_is_swept(either: Destination) -> None:
    header = archive_log(either, QuickSealer(), BRANCH, 1, real_logs()[0].data)
    later = NOW + timedelta(days=2)
    either.delete(header.key)
    assert examine(either, None, clock=lambda: NOW) == []
    assert {item.invariant for item in examine(either, None, clock=lambda: later)} == {Invariant.NO_ORPHAN_SEGMENT_PART}
    assert collect(either, clock=lambda: NOW).log_parts == []
    assert len(collect(either, clock=lambda: later).log_parts) == 2
    assert examine(either, None, clock=lambda: later) == []
    header = archive_log(either, QuickSealer(), BRANCH, 1, real_logs()[0].data)
    collect(either, clock=lambda: later)
    assert list(log_segments.headers(either)) == [header]
    log_segments.remove(either, BRANCH.server, header.segment.key)
    log_segments.remove(either, BRANCH.server, header.segment.key)
    assert [info.key for info in either.list(layout.BINLOGS)] == [layout.branch_key(BRANCH.server, BRANCH.id)]


@pytest.mark.parametrize("deletions", [1, 2])
def test_a_removal_that_dies_never_leaves_half_a_segment(deletions: int) -> None:
    place = Faulty("m", lambda: NOW)
    header = archive_log(place, QuickSealer(), BRANCH, 1, real_logs()[0].data)
    before = place.faults.count
    place.faults.at = before + deletions + (deletions > 1)  # between the first two there is a listing
    place.faults.after = True
    with pytest.raises(Killed):
        log_segments.remove(place, BRANCH.server, header.segment.key)
    assert log_segments.of_file(place, BRANCH.server, BRANCH.id, 1) == []
    assert examine(place, None, clock=lambda: NOW) == []
    log_segments.remove(place, BRANCH.server, header.segment.key)
    assert [info.key for info in place.list(layout.BINLOGS)] == [layout.branch_key(BRANCH.server, BRANCH.id)]


def test_fsck_names_what_is_missing_or_does_not_belong(place: MemoryDestination) -> None:
    header = archive_log(place, QuickSealer(), BRANCH, 1, real_logs()[0].data)
    place.delete(header.folder + "index-00000.zst.gpg")
    spoil(place, header.folder + "part-00000.zst.gpg", lambda data: data.pop())
    put_bytes(place, "binlogs/stranger", b"x")
    put_bytes(place, header.folder + "notes.txt", b"x")
    put_bytes(place, layout.branch_key("other", BRANCH.id), encode_branch(BRANCH))
    found = [(item.invariant, item.subject) for item in examine(place, None, clock=lambda: NOW)]
    assert found == [
        (Invariant.NO_ORPHAN_SEGMENT_PART, header.folder + "notes.txt"),
        (Invariant.NO_ORPHAN_SEGMENT_PART, "binlogs/stranger"),
        (Invariant.SEGMENT_INTACT, f"m:binlogs/other/{BRANCH.id}/branch.json is damaged"),
        (Invariant.SEGMENT_PRESENT, header.folder + "part-00000.zst.gpg"),
        (Invariant.SEGMENT_PRESENT, header.folder + "index-00000.zst.gpg"),
    ]


def test_a_large_log_is_never_in_memory(place: MemoryDestination, tmp_path: Path) -> None:
    size = 6 * PART_SIZE + 5
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(size)

    class Nothing(QuickSealer):
        def seal(self, plain: bytes | bytearray | memoryview, *, compressed: object = None) -> bytes:
            return b"sealed"

    tracemalloc.start()
    try:
        sealing = Sealing(tmp_path / "sealed", Nothing())
        with path.open("rb") as stream:
            sealing.plain(stream, 0, size)
        assert tracemalloc.get_traced_memory()[1] < 3 * PART_SIZE
    finally:
        tracemalloc.stop()
    assert len(list((tmp_path / "sealed").iterdir())) == 7


def test_a_long_index_is_sealed_in_parts_that_stand_alone(
    place: MemoryDestination, sealer: Sealer, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_documents, "INDEX_PART", 400)
    log = real_logs()[0]
    header = archive_log(place, sealer, BRANCH, 1, log.data)
    assert len(header.index) > 2
    assert tuple(log_segments.read_index(place, header, Unsealer(keys.secret_home))) == log.transactions
    assert list(log_segments.read_places(place, header, Unsealer(keys.secret_home))) == [
        (one.gtid, one.start, one.end) for one in log.transactions
    ]


def test_half_a_sealed_folder_is_none(tmp_path: Path) -> None:
    sealed = seal_log(tmp_path / "a", QuickSealer(), BRANCH, 1, real_logs()[0].data)
    found = Sealed.load(tmp_path / "a")
    assert found is not None
    assert found.header == sealed.header
    with found.open(found.header.sealed[0]) as stream, io.BytesIO(stream.read()) as data:
        assert len(data.getvalue()) == found.header.sealed[0].size
    (tmp_path / "a" / "part-00000.zst.gpg").write_bytes(b"")
    assert Sealed.load(tmp_path / "a") is None
    Sealed.remove(tmp_path / "a")
    assert Sealed.load(tmp_path / "a") is None
    assert sealed.header.segment.ending is Ending.ROTATED


def test_keys_of_logs_are_read_back() -> None:
    key = SegmentKey(BRANCH.id, 42, 0, 999_999_999_999)
    text = layout.segment_key("s.1", key)
    layout.check_key(text)
    assert layout.segment_of(text) == ("s.1", key, "segment.json")
    assert layout.segment_of(layout.segment_folder("s.1", key) + layout.part_name(100_000)) == (
        "s.1",
        key,
        "part-100000.zst.gpg",
    )
    assert layout.branch_of(layout.branch_key("s.1", BRANCH.id)) == ("s.1", BRANCH.id)
    for strange in (
        "binlogs/s/x/branch.json",
        f"binlogs/s/{BRANCH.id}/x/segment.json",
        "servers/s/x/branch.json",
        f"binlogs/s/{BRANCH.id}/0000000001-000000000009-000000000009/segment.json",
    ):
        assert layout.segment_of(strange) is None
        assert layout.branch_of(strange) is None
    for bad in (SegmentKey("x", 1, 0, 4), SegmentKey(BRANCH.id, -1, 0, 4), SegmentKey(BRANCH.id, 1, 4, 4)):
        with pytest.raises(UsageError):
            layout.segment_key("s", bad)
    with pytest.raises(UsageError):
        layout.branch_key("../x", GROWING.id)


GROWING = Branch(
    server="shop",
    id="20261121T040000Z-0000000a",
    noticed_at=datetime(2026, 11, 21, 4, tzinfo=UTC),
    reason=BranchReason.FIRST,
    server_uuid="u",
    flavour="mariadb",
    basename="binlog",
    first_number=1,
)
LOG = real_logs()[0]
CUTS = LOG.cuts[1:4]


class Locked(MemoryDestination):
    """Everything is locked that object lock is asked for."""

    def delete(self, key: str) -> None:
        if key in self._blobs and not layout.comes_and_goes(key):
            raise LockedError(f"{key} is locked")
        super().delete(key)


def filled(place: MemoryDestination) -> tuple[SegmentKey, tuple[SegmentKey, ...]]:
    """A whole log, and beside it pieces of it: [0, a), [a, b), [0, b), [b, c)."""
    first, second, third = CUTS
    for start, end in ((0, first), (first, second), (0, second), (second, third)):
        archive_log(place, QuickSealer(), GROWING, 1, LOG.data, start=start, end=end)
    whole = archive_log(place, QuickSealer(), GROWING, 1, LOG.data).segment.key
    return whole, replaced_pieces(place, "shop", whole)


def present(place: MemoryDestination) -> set[SegmentKey]:
    return {key for _server, key in log_segments.keys(place)}


def test_what_a_lock_keeps_does_not_keep_the_pieces_that_it_never_takes() -> None:
    place = Locked("locked", tree=False)
    whole, pieces = filled(place)
    assert len(pieces) == 4
    gone = drop_pieces(place, "shop", pieces, now=datetime.now(UTC))
    assert set(gone) == {key for key in pieces if key.start}
    assert present(place) == {whole, *pieces} - set(gone)
    assert {key for key in place._blobs if layout.comes_and_goes(key)} == set()
    assert drop_pieces(place, "shop", [key for key in pieces if not key.start], now=datetime.now(UTC)) == ()


def test_no_sweep_removes_pieces_since_it_cannot_know_whether_their_file_is_what_they_are() -> None:
    """Neither one of other bytes, nor one of a whole that is rotten, nor one that nobody has come to remove."""
    place = MemoryDestination("away", tree=False)
    whole, pieces = filled(place)
    other = next(log for log in real_logs() if log.data[: CUTS[0]] != LOG.data[: CUTS[0]])
    end = next(cut for cut in other.cuts if 0 < cut < len(LOG.data) and cut not in CUTS)
    stranger = archive_log(place, QuickSealer(), GROWING, 1, other.data, start=0, end=end).segment.key
    rotten = layout.segment_folder("shop", whole) + layout.part_name(0)
    with place.get(rotten) as stream:
        raw = bytearray(stream.read())
    raw[len(raw) // 2] ^= 1
    place.put(rotten, io.BytesIO(bytes(raw)))
    Stock(place).add(1, {"t": b"a backup"})
    collect(place, clock=FakeClock(datetime.now(UTC) + timedelta(days=400)))
    assert present(place) == {whole, stranger, *pieces}


GROWN = branch_of("20261121T040000Z-0000000a")


class Copying(Stepped):
    capabilities = Capability.COPIES

    def duplicate(self, source: str, target: str) -> bool:
        done: bool = self._call(("duplicate", source, target), lambda: self._world.place.duplicate(source, target))
        return done


@pytest.fixture
def world() -> World:
    """Its destination holds two pieces of a log for days."""
    return World()


@pytest.fixture
def sealed(tmp_path: Path, world: World) -> Callable[[bool], Sealed]:
    """The whole file, put together from the pieces that ``world`` has; with the sealed bytes of these, or without."""
    log, sealer = real_logs()[0], QuickSealer()
    ends = (0, log.cuts[1], log.size)
    pieces = [
        seal_log(tmp_path / f"{end}", sealer, GROWN, 1, log.data, start=start, end=end, ending=Ending.OPEN)
        for start, end in pairwise(ends)
    ]
    for piece in pieces:
        log_segments.put(world.place, piece, now=world.now())
    world.hours = 24 * 7

    def made(bytes_here: bool) -> Sealed:
        sealing = Sealing(tmp_path / "new", sealer)
        for transaction in log.transactions:
            sealing.transaction(transaction)
        for piece in pieces:
            if not bytes_here:
                Sealed.lighten(piece.folder)
            for part in piece.header.parts:
                sealing.borrow(part, piece.folder)
        whole = seal_log(tmp_path / "whole", sealer, GROWN, 1, log.data).header.segment
        return sealing.finish(whole, tmp_path / "together")

    return made


def storing(sealed: Sealed, world: World) -> Callable[[Stepped], str]:
    def run(place: Stepped) -> str:
        try:
            log_segments.put(copying(place), sealed, now=world.now())
        except PartsGoneError:
            return "to be sealed anew"
        return "stored"

    return run


def copying(place: Stepped) -> Stepped:
    place.__class__ = Copying
    return place


def sweeping(place: Stepped) -> str:
    log_segments.clear_strays(place, now=place.clock())
    return "swept"


def dropping(place: Stepped) -> str:
    """The pieces go at any moment, as by the retention of another process."""
    for key in log_segments.of_file(place, GROWN.server, GROWN.id, 1):
        if key.end < real_logs()[0].size or key.start:
            log_segments.remove(place, GROWN.server, key)
    return "dropped"


def whole(world: World, outcomes: tuple[str, str]) -> None:
    found = [item for item in log_segments.headers(world.place) if isinstance(item, SegmentHeader)]
    stored = [header for header in found if (header.segment.start, header.segment.end) == (0, real_logs()[0].size)]
    assert len(stored) == (outcomes[0] == "stored")
    for header in stored:
        assert log_segments.problems(world.place, header) == {}


@pytest.mark.parametrize("other", [sweeping, dropping])
@pytest.mark.parametrize("bytes_here", [True, False])
def test_nothing_takes_parts_that_a_larger_segment_takes_over(
    world: World, sealed: Callable[[bool], Sealed], other: Callable[[Stepped], str], bytes_here: bool
) -> None:
    outcomes: set[str] = set()

    def check(world: World, ended: tuple[str, str]) -> None:
        outcomes.add(ended[0])
        whole(world, ended)

    assert explore(world, (storing(sealed(bytes_here), world), other), check) > 50
    assert outcomes == ({"stored", "to be sealed anew"} if other is dropping and not bytes_here else {"stored"})


def test_a_copy_at_another_destination_takes_over_the_parts_of_its_pieces(
    world: World, sealed: Callable[[bool], Sealed]
) -> None:
    target = MemoryDestination("target", clock=world.now)
    pieces = log_segments.of_file(world.place, GROWN.server, GROWN.id, 1)
    for key in pieces:
        copy_segment(Relay([world.place], target, pauses=()), GROWN.server, key, clock=world.now)
    whole = log_segments.put(world.place, sealed(True), now=world.now())
    relay = Relay([world.place], target, pauses=())
    assert copy_segment(relay, GROWN.server, whole.segment.key, clock=world.now) == whole
    assert (relay.tally.present, relay.tally.things) == (len(whole.parts), len(whole.index))
    assert log_segments.problems(target, whole) == {}


def test_parts_that_are_committed_stay_in_place_while_their_end_becomes_known(
    world: World, sealed: Callable[[bool], Sealed], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = MemoryDestination("target", clock=world.now)
    relay = Relay([world.place], target, pauses=())
    for key in log_segments.of_file(world.place, GROWN.server, GROWN.id, 1):
        copy_segment(relay, GROWN.server, key, clock=world.now)
    whole = sealed(True)
    growing = Sealed(whole.folder, replace(whole.header, segment=replace(whole.header.segment, ending=Ending.OPEN)))
    log_segments.put(world.place, growing, now=world.now())
    copy_segment(relay, GROWN.server, whole.header.segment.key, clock=world.now)
    log_segments.put(world.place, whole, now=world.now())
    made: list[str] = []
    monkeypatch.setattr(target, "duplicate", lambda _source, key: made.append(key))
    assert copy_segment(relay, GROWN.server, whole.header.segment.key, clock=world.now) == whole.header
    assert made == []


def test_parts_are_taken_over_where_the_spool_knows_no_links(
    tmp_path: Path, world: World, sealed: Callable[[bool], Sealed], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: Path, _target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    made = sealed(True)
    assert Sealed.load(made.folder) is not None
