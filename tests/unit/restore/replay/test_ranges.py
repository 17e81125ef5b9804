"""Fetching a range of the binary logs: what is read of it, from where, and what the files are then."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from backupd.engine.binlog.hole import hole_of
from backupd.engine.binlog.scan import scan
from backupd.engine.binlog.walk import walk
from backupd.model.binlog import Ending, ReplayLeg, ReplayMethod, ReplaySpec, SegmentKey, Stop
from backupd.model.errors import DamagedError, RefusedError
from backupd.model.server_facts import Position
from backupd.process.run_context import RunContext
from backupd.transfer.log_segments import drop_pieces, load_header, replaced_pieces
from backupd.transfer.records import segment_documents
from backupd.transfer.records.encryption import Sealer, Unsealer
from backupd.transfer.thaw import wants_of_segment
from restore.fetch.sources import Sources
from restore.replay.logs import fetch_logs
from storage import layout
from storage.destination import Destination, ObjectInfo
from storage.filesystem import FilesystemDestination
from storage.throttle_and_breaker import ForwardingDestination
from tests.support.dice import with_another_end
from tests.support.keys import Keys
from tests.support.logs.archived_logs import CountedDestination, archive_log
from tests.support.logs.real_logs import RealLog, real_logs
from tests.support.restores.stored_segments import BASE, SERVER, branch

PART = 600


@dataclass
class StoredLog:
    """The first of the real logs at some destinations, in parts of 600 bytes."""

    destinations: Sequence[Destination]
    keys: Keys
    log: RealLog
    segments: list[SegmentKey] = field(default_factory=list)

    def store(self, *cuts: int) -> None:
        """The whole file, or its pieces, cut there."""
        self.segments = []
        for start, end in zip((0, *cuts), (*cuts, self.log.size), strict=True):
            self.segments.append(self.put(start, end))

    def put(self, start: int, end: int) -> SegmentKey:
        sealer = Sealer((self.keys.fingerprint,), self.keys.public_home)
        one = branch(basename="binlog")
        for destination in self.destinations:
            header = archive_log(
                destination,
                sealer,
                one,
                self.log.number,
                self.log.archived,
                start=start,
                end=end,
                ending=Ending.ROTATED,
            )
        return header.segment.key

    def spec(self, since: int, stop: int) -> ReplaySpec:
        state = scan(io.BytesIO(self.log.archived), stop=since).gtids_after
        wanted = tuple(key for key in self.segments if key.start < stop)
        leg = ReplayLeg(wanted, Position(self.log.name, since, state), Stop("", self.log.name, stop, ""))
        return ReplaySpec((leg,), ReplayMethod.APPLIER, "", stop - since, 0, (1,))

    def fetch(self, folder: Path, since: int, stop: int, archives: Sequence[Destination] = ()) -> tuple[Path, Any]:
        sources = Sources((), Unsealer(self.keys.secret_home), archives or self.destinations)
        logs = fetch_logs(SERVER, self.spec(since, stop), sources, folder, RunContext())
        ((path,),) = logs.legs
        return path, logs.warnings

    def compare(self, path: Path, since: int, stop: int) -> None:
        """Is ``path`` a log that goes on at ``since``, with the right content up to ``stop``?"""
        data, whole = path.read_bytes(), self.log.archived
        hole = hole_of(path)
        begin = hole.end if hole else 0
        assert begin <= since
        assert data[begin:] == whole[begin:stop]
        found, wanted = (scan(io.BytesIO(one[:stop])) for one in (data, whole))
        assert found.gtids_after == wanted.gtids_after
        assert (found.remarks, found.end) == (wanted.remarks, stop)
        state = self.spec(since, stop).legs[0].start
        assert walk([path], state).transactions == walk([self._original(path)], state).transactions - len(
            [one for one in self.log.transactions if one.start >= stop]
        )

    def _original(self, path: Path) -> Path:
        folder = path.parent / "original"
        folder.mkdir(exist_ok=True)
        (folder / self.log.name).write_bytes(self.log.archived)
        return folder / self.log.name


@pytest.fixture
def stored(tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> StoredLog:
    monkeypatch.setattr(segment_documents, "PART_SIZE", PART)
    places = [FilesystemDestination(name, tmp_path / name) for name in ("local", "away")]
    for one in places:
        one.initialise(BASE)
    return StoredLog(places, keys, real_logs()[0])


@pytest.mark.parametrize("pieces", [(), (2,), (1, 3)], ids=["whole", "two", "three"])
def test_any_range_is_the_same_as_in_the_whole_file_and_no_other_part_is_read(
    stored: StoredLog, tmp_path: Path, pieces: tuple[int, ...]
) -> None:
    cuts = stored.log.cuts
    stored.store(*(cuts[one] for one in pieces))
    local = CountedDestination(stored.destinations[0])
    lazily = 0
    for since in cuts:
        for stop in (*(cut for cut in cuts if cut > since), stored.log.size):
            local.read.clear()
            path, warnings = stored.fetch(tmp_path / f"{since}-{stop}", since, stop, [local])
            assert warnings == ()
            stored.compare(path, since, stop)
            parts = [key for key in local.read if "/part-" in key]
            hole = hole_of(path)
            lazily += hole is not None
            if hole is not None:
                assert hole.end == since
                assert len(parts) <= (stop - since) // PART + 3 + len(pieces)
            assert all(times == 1 for times in _times(local, parts))
    assert lazily >= 6


def _times(place: CountedDestination, parts: Sequence[str]) -> Iterator[int]:
    for key in parts:
        with ForwardingDestination.get(place, key) as stream:
            yield place.read[key] // len(stream.read())


def test_what_is_needed_is_taken_from_the_first_place_that_has_it_and_what_is_not_may_be_lost(
    stored: StoredLog, tmp_path: Path
) -> None:
    stored.store()
    (key,) = stored.segments
    since, stop = stored.log.cuts[3], stored.log.cuts[4]
    folder = layout.segment_folder(SERVER, key)
    needed = since // PART
    assert needed >= 2
    for place in ("local", "away"):  # between the head and the start
        (tmp_path / place / folder / layout.part_name(1)).unlink()
        (tmp_path / place / folder / layout.part_name(stored.log.size // PART)).write_bytes(b"")
    path, warnings = stored.fetch(tmp_path / "one", since, stop)
    assert warnings == ()
    stored.compare(path, since, stop)
    local, away = (tmp_path / place / folder / layout.part_name(needed) for place in ("local", "away"))
    whole = local.read_bytes()
    for bad in (with_another_end(whole), whole[:-7]):
        local.write_bytes(bad)
        path, (warning,) = stored.fetch(tmp_path / f"two{len(bad)}", since, stop)
        assert "local" in warning
        assert local.name in warning
        stored.compare(path, since, stop)
    (tmp_path / "local" / folder / layout.part_name(0)).unlink()  # the head, too
    path, warnings = stored.fetch(tmp_path / "three", since, stop)
    assert len(warnings) == 2
    stored.compare(path, since, stop)
    away.write_bytes(with_another_end(away.read_bytes()))
    with pytest.raises(DamagedError, match="cannot be read from any destination") as bad_everywhere:
        stored.fetch(tmp_path / "four", since, stop)
    assert {"local", "away"} <= {
        word for line in bad_everywhere.value.damages for word in line.replace(":", " ").split()
    }
    assert local.name in "".join(bad_everywhere.value.damages)


def test_what_an_earlier_attempt_left_of_a_range_is_used_where_it_is_right(stored: StoredLog, tmp_path: Path) -> None:
    stored.store()
    since, stop = stored.log.cuts[3], stored.log.size
    local = CountedDestination(stored.destinations[0])

    def parts(again: Callable[[Path], object] = lambda _path: None) -> int:
        if (path := tmp_path / "logs" / "1" / stored.log.name).exists():
            again(path)
        local.read.clear()
        found, _warnings = stored.fetch(tmp_path / "logs", since, stop, [local])
        stored.compare(found, since, stop)
        return sum("/part-" in key for key in local.read)

    def spoil(at: int) -> Callable[[Path], object]:
        def change(path: Path) -> None:
            data = bytearray(path.read_bytes())
            data[at] ^= 0x55
            path.write_bytes(data)

        return change

    at_first = parts()
    assert parts() == 1  # the one that begins in the hole
    assert parts(spoil(stored.log.size - 1)) == 2
    assert parts(spoil(10)) == at_first  # its head
    assert parts(lambda path: path.write_bytes(b"")) == at_first
    assert parts(lambda path: path.write_bytes(stored.log.archived)) == at_first


class Hooked(ForwardingDestination):
    """Calls what ``then`` says before the operation of that number."""

    def __init__(self, inner: Destination, then: Mapping[int, Callable[[], object]]) -> None:
        super().__init__(inner)
        self.count, self._then = 0, then

    def _step(self) -> None:
        self._then.get(self.count, lambda: None)()
        self.count += 1

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        self._step()
        return super().get(key, offset=offset, length=length)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._step()
        return super().list(prefix)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("apart", [0, 1, 2, 5])
def test_whoever_plans_while_the_log_rotates_finds_its_bytes(
    stored: StoredLog, tmp_path: Path, several: bool, apart: int
) -> None:
    """The pieces are replaced before any one operation of the fetch: by a larger piece, and some operations later by
    the whole file."""
    cuts, one = stored.log.cuts, layout.binlogs_folder(SERVER)
    since, stop = cuts[3], cuts[4]
    stored.store(*cuts[1:4])
    for number, end in enumerate((0, cuts[3], stored.log.size), start=1):
        if end:
            larger = stored.put(0, end)
            for place in stored.destinations:
                drop_pieces(place, SERVER, replaced_pieces(place, SERVER, larger), now=BASE)
        for name in ("local", "away"):
            shutil.copytree(tmp_path / name / one, tmp_path / f"{name}-{number}")

    def state(number: int) -> None:
        """What the stream leaves at each destination when it has replaced pieces: first comes what is larger."""
        for place in ("local", "away"):
            there = tmp_path / place / one
            shutil.copytree(tmp_path / f"{place}-{number}", there, dirs_exist_ok=True)
            keep = {
                path.relative_to(tmp_path / f"{place}-{number}") for path in (tmp_path / f"{place}-{number}").rglob("*")
            }
            for path in sorted(there.rglob("*"), reverse=True):
                if path.relative_to(there) not in keep:
                    path.rmdir() if path.is_dir() else path.unlink()

    at = 0
    while True:
        state(1)
        hooked = Hooked(stored.destinations[0], {at: lambda: state(2), at + apart: lambda: state(3)})
        archives = [hooked, stored.destinations[1]] if several else [hooked]
        path, _warnings = stored.fetch(tmp_path / f"logs-{at}", since, stop, archives)
        stored.compare(path, since, stop)
        if at >= hooked.count:
            break
        at += 1
    assert at > 5


def test_a_log_with_a_hole_says_what_the_hole_held(stored: StoredLog, tmp_path: Path) -> None:
    stored.store()
    since = stored.log.cuts[3]
    path, _warnings = stored.fetch(tmp_path / "logs", since, stored.log.size)
    before = scan(io.BytesIO(stored.log.archived), stop=stored.log.cuts[1]).gtids_after
    for start in (
        Position(path.name, 4, ""),
        Position(path.name, 4, before),
        Position(path.name, stored.log.cuts[1], before),
        Position(path.name, since - 1, ""),
    ):
        with pytest.raises(RefusedError, match=f"was not fetched: the file goes on at byte {since}"):
            walk([path], start)
    with pytest.raises(RefusedError, match="logs begin after"):
        walk([path], Position("", 0, before))


def test_of_a_cold_log_only_what_is_replayed_is_thawed(stored: StoredLog) -> None:
    stored.store()
    header = segments_of(stored)
    names = [part.stored.name for part in header.parts]
    assert [_name(one.key) for one in wants_of_segment(header, 0, stored.log.size)] == names
    assert [_name(one.key) for one in wants_of_segment(header, 5, PART)] == names[:1]
    assert [_name(one.key) for one in wants_of_segment(header, 5, 5)] == names[:1]


def segments_of(stored: StoredLog) -> segment_documents.SegmentHeader:
    return load_header(stored.destinations[0], SERVER, stored.segments[0])


def _name(key: str) -> str:
    return key.rpartition("/")[2]
