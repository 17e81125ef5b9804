from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

import pytest

from backupd.model.binlog import Ending, ReplayLeg, ReplayMethod, ReplaySpec, Segment, Stop
from backupd.model.errors import CancelledError, DamagedError, KeyUnusableError, RefusedError
from backupd.model.job import silent
from backupd.model.server_facts import Position
from backupd.process.run_context import RunContext
from backupd.transfer.log_segments import drop_pieces
from backupd.transfer.records import segment_documents as segmentseal
from backupd.transfer.records.encryption import Unsealer
from restore.fetch.sources import Sources
from restore.replay import logs as replay_logs
from restore.replay.logs import COPIES, Logs, refuse_no_room_for
from storage import layout
from storage.destination import Destination
from storage.filesystem import FilesystemDestination
from storage.throttle_and_breaker import ForwardingDestination
from tests.support.dice import with_another_end
from tests.support.keys import Keys
from tests.support.restores.stored_segments import BASE, BRANCH, SERVER, content, segment, store_segment

SIZE = 5000


@pytest.fixture
def places(tmp_path: Path) -> tuple[FilesystemDestination, FilesystemDestination]:
    found = FilesystemDestination("local", tmp_path / "local"), FilesystemDestination("away", tmp_path / "away")
    for one in found:
        one.initialise(BASE)
    return found


@pytest.fixture
def stored(places: tuple[FilesystemDestination, FilesystemDestination], keys: Keys, tmp_path: Path) -> list[Segment]:
    """A whole file, and one that still grew when its pieces were stored."""
    drafts = [
        segment(1, 0, SIZE, Ending.ROTATED, (), before="", after="0-1-5"),
        segment(2, 0, 1000, Ending.OPEN, (), before="0-1-5", after="0-1-6"),
        segment(2, 1000, 3000, Ending.OPEN, (), before="0-1-6", after="0-1-7"),
    ]
    return [store_segment(draft, (), places, keys, tmp_path) for draft in drafts]


def fetch_logs(
    server: str, wanted: ReplaySpec, archives: Sequence[Destination], unsealer: Unsealer, folder: Path, **given: Any
) -> Logs:
    return replay_logs.fetch_logs(server, wanted, Sources((), unsealer, archives), folder, RunContext(**given))


def spec(stored: list[Segment], *, pos: int = 2500) -> ReplaySpec:
    stop = Stop(BRANCH, "bin.000002", pos, "0-1-7")
    leg = ReplayLeg(tuple(one.key for one in stored), Position("bin.000001", 500, "0-1-2"), stop, 7000)
    return ReplaySpec((leg,), ReplayMethod.APPLIER, "", 7000, 5, (1,))


def test_pieces_become_files_with_their_names_and_the_last_one_ends_at_the_stop(
    places: tuple[FilesystemDestination, FilesystemDestination],
    stored: list[Segment],
    keys: Keys,
    tmp_path: Path,
) -> None:
    logs = fetch_logs(SERVER, spec(stored), places, Unsealer(keys.secret_home), tmp_path / "logs", report=silent)
    ((first, second),) = logs.legs
    assert (first.name, second.name) == ("bin.000001", "bin.000002")
    assert first.read_bytes() == content(1, SIZE)
    assert second.read_bytes() == content(2, 2500)
    assert logs.warnings == ()
    assert first.stat().st_mode & 0o077 == 0


def test_what_an_earlier_attempt_left_is_taken_only_where_it_is_right(
    places: tuple[FilesystemDestination, FilesystemDestination],
    stored: list[Segment],
    keys: Keys,
    tmp_path: Path,
) -> None:
    work = spec(stored), places, Unsealer(keys.secret_home), tmp_path / "logs"
    ((first, second),) = fetch_logs(SERVER, *work, report=silent).legs
    stamp = first.stat().st_mtime_ns
    second.write_bytes(b"?" + second.read_bytes()[1:] + b"more")
    again = fetch_logs(SERVER, *work, report=silent)
    assert again.legs == ((first, second),)
    assert second.read_bytes() == content(2, 2500)
    assert first.stat().st_mtime_ns == stamp
    os.truncate(first, 17)
    fetch_logs(SERVER, *work, report=silent)
    assert first.read_bytes() == content(1, SIZE)


def test_a_bad_copy_is_passed_over_and_without_a_good_one_both_ends_of_the_hole_are_named(
    places: tuple[FilesystemDestination, FilesystemDestination],
    stored: list[Segment],
    keys: Keys,
    tmp_path: Path,
) -> None:
    local, away = places
    part = tmp_path / "local" / layout.segment_folder(SERVER, stored[1].key) / layout.part_name(0)
    part.write_bytes(with_another_end(part.read_bytes()))
    unsealer = Unsealer(keys.secret_home)
    logs = fetch_logs(SERVER, spec(stored), places, unsealer, tmp_path / "logs", report=silent)
    assert logs.legs[0][1].read_bytes() == content(2, 2500)
    assert any("local" in text for text in logs.warnings)
    (tmp_path / "away" / layout.segment_folder(SERVER, stored[1].key) / layout.part_name(0)).unlink()
    with pytest.raises(DamagedError) as bad:
        fetch_logs(SERVER, spec(stored), (local, away), unsealer, tmp_path / "fresh", report=silent)
    assert "bytes 0 to 1000 of binary log bin.000002" in bad.value.message
    assert "nothing after bin.000002:0 can be replayed; the archive continues at bin.000002:1000" in bad.value.damages
    assert {"local", "away"} <= {word for line in bad.value.damages for word in line.replace(":", " ").split()}


@pytest.mark.parametrize("sealed_apart", [False, True])
def test_each_part_is_taken_from_the_first_place_that_has_it(
    places: tuple[FilesystemDestination, FilesystemDestination],
    keys: Keys,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sealed_apart: bool,
) -> None:
    monkeypatch.setattr(segmentseal, "PART_SIZE", 2000)
    draft = segment(2, 0, SIZE, Ending.ROTATED, (), before="0-1-5", after="0-1-7")
    for together in [places[:1], places[1:]] if sealed_apart else [places]:
        stored = store_segment(draft, (), together, keys, tmp_path)
    folder = layout.segment_folder(SERVER, stored.key)
    rotten, gone = (tmp_path / name / folder / layout.part_name(index) for index, name in enumerate(("local", "away")))
    rotten.write_bytes(with_another_end(rotten.read_bytes()))
    gone.unlink()
    unsealer = Unsealer(keys.secret_home)
    logs = fetch_logs(SERVER, spec([stored]), places, unsealer, tmp_path / "logs", report=silent)
    assert logs.legs[0][0].read_bytes() == content(2, 2500)
    (warning,) = logs.warnings
    assert "local" in warning
    assert rotten.name in warning
    (tmp_path / "away" / folder / layout.part_name(0)).unlink()
    with pytest.raises(DamagedError) as bad:
        fetch_logs(SERVER, spec([stored]), places, unsealer, tmp_path / "fresh", report=silent)
    assert rotten.name in "".join(bad.value.damages)
    assert not list((tmp_path / "fresh").rglob("bin.*"))


def test_pieces_that_were_replaced_since_the_plan_was_made_are_read_out_of_what_holds_them_now(
    places: tuple[FilesystemDestination, FilesystemDestination],
    stored: list[Segment],
    keys: Keys,
    tmp_path: Path,
) -> None:
    planned = spec(stored)
    for pieces, end, ending in ((stored[1:2], 2000, Ending.OPEN), (stored[2:], SIZE, Ending.ROTATED)):
        larger = segment(2, 0, end, ending, (), before="0-1-5", after="0-1-9")
        store_segment(larger, (), places, keys, tmp_path)
        for place in places:
            assert drop_pieces(place, SERVER, [one.key for one in pieces], now=BASE) == tuple(one.key for one in pieces)
        folder = tmp_path / f"logs{end}"
        logs = fetch_logs(SERVER, planned, places, Unsealer(keys.secret_home), folder, report=silent)
        ((_first, second),) = logs.legs
        assert second.read_bytes() == content(2, 2500)
        again = fetch_logs(SERVER, planned, places, Unsealer(keys.secret_home), folder, report=silent)
        assert again.legs == logs.legs
        assert second.read_bytes() == content(2, 2500)


class Waiting(ForwardingDestination):
    """Gives the first piece of the first file only when another file cannot be read."""

    def __init__(self, inner: Destination, failed: Event) -> None:
        super().__init__(inner)
        self._failed = failed

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        if "/0000000001-000000000000" in key and "/part-" in key:
            assert self._failed.wait(60)
        return super().get(key, offset=offset, length=length)


def test_what_cannot_be_read_is_reported_and_not_that_other_files_were_given_up(
    places: tuple[FilesystemDestination, FilesystemDestination],
    keys: Keys,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafts = [
        segment(1, 0, 1000, Ending.OPEN, (), before="", after="0-1-4"),
        segment(1, 1000, SIZE, Ending.ROTATED, (), before="0-1-4", after="0-1-5"),
        segment(2, 0, 3000, Ending.ROTATED, (), before="0-1-5", after="0-1-7"),
    ]
    stored = [store_segment(draft, (), places[:1], keys, tmp_path) for draft in drafts]
    (tmp_path / "local" / layout.segment_folder(SERVER, stored[2].key) / layout.part_name(0)).unlink()
    failed = Event()
    monkeypatch.setattr(replay_logs, "Event", lambda: failed)
    with pytest.raises(DamagedError, match=r"of binary log bin\.000002 cannot be read"):
        fetch_logs(
            SERVER,
            spec(stored),
            [Waiting(places[0], failed)],
            Unsealer(keys.secret_home),
            tmp_path / "logs",
            report=silent,
        )


def test_what_is_nowhere_is_named_and_no_older_place_is_advised(
    places: tuple[FilesystemDestination, FilesystemDestination],
    stored: list[Segment],
    keys: Keys,
    tmp_path: Path,
) -> None:
    for place in places:
        drop_pieces(place, SERVER, [stored[2].key], now=BASE)
    with pytest.raises(DamagedError, match="bytes 1000 to 3000 of binary log") as lost:
        fetch_logs(SERVER, spec(stored), places, Unsealer(keys.secret_home), tmp_path / "logs", report=silent)
    assert "repeat the command" in lost.value.hint
    assert "choose a target before" not in lost.value.hint


def test_logs_that_do_not_follow_each_other_are_refused_before_anything_is_read(
    places: tuple[FilesystemDestination, FilesystemDestination],
    stored: list[Segment],
    keys: Keys,
    tmp_path: Path,
) -> None:
    unsealer = Unsealer(keys.secret_home)
    for missing, after, before in ((1, "byte 0 of file 2", "byte 1000 of file 2"), (2, "byte 1000", "bin.000002:2500")):
        rest = [one for number, one in enumerate(stored) if number != missing]
        with pytest.raises(RefusedError) as refused:
            fetch_logs(SERVER, spec(rest), places, unsealer, tmp_path / "logs", report=silent)
        assert after in refused.value.detail
        assert before in refused.value.detail


def test_the_wrong_key_and_a_cancelled_restore_end_it(
    places: tuple[FilesystemDestination, FilesystemDestination],
    stored: list[Segment],
    keys: Keys,
    tmp_path: Path,
) -> None:
    with pytest.raises(KeyUnusableError):
        fetch_logs(SERVER, spec(stored), places, Unsealer(keys.public_home), tmp_path / "logs", report=silent)
    stop = Event()
    stop.set()
    with pytest.raises(CancelledError):
        fetch_logs(
            SERVER, spec(stored), places, Unsealer(keys.secret_home), tmp_path / "logs", report=silent, cancel=stop
        )


def test_logs_that_do_not_fit_are_refused_with_the_room_they_need(stored: list[Segment], tmp_path: Path) -> None:
    one = spec(stored)
    refuse_no_room_for(one, tmp_path / "not" / "there")
    huge = ReplaySpec(one.legs, one.method, "", 2**60, 5, (1,))
    with pytest.raises(RefusedError) as refused:
        refuse_no_room_for(huge, tmp_path)
    assert f"{COPIES} times" in refused.value.detail
