"""What is confirmed of a server's binary logs is followed between two looks, and nothing else is."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from backupd.app.context.destination_identity import findings, identities
from backupd.app.context.wiring import Wiring
from backupd.app.views import standings
from backupd.app.views.examination import examined
from backupd.app.views.overview import overview
from backupd.app.views.standings import Bases, StandingsWatch, look
from backupd.app.views.timeline import timeline
from backupd.catalog.standings import Standings
from backupd.model.backup_record import BackupRecord
from backupd.model.binlog import Branch, BranchReason, Ending, Segment
from backupd.model.errors import CatalogError, RefusedError
from backupd.model.server_facts import Identity, Verdict
from backupd.recovery.timeline import Timeline
from tests.support.service.desk import BRANCH, HOUR, MINUTE, NOW, STREAMED, Desk, desk_of
from tests.support.service.house import GOLD

SECOND = timedelta(seconds=1)
PLACE = (1, 1000)


@pytest.fixture
def streamed(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """db1 has a backup and logs until NOW, and was looked at."""
    monkeypatch.setattr(standings, "BUDGET", 240.0)
    with desk_of(short_tmp, STREAMED) as found:
        found.backup()
        found.logs(NOW)
        found.stream()
        found.look()
        yield found


def segment(start: int, end: int, ending: Ending = Ending.OPEN, *, branch: str = BRANCH) -> Segment:
    gtids = f"0-1-{start}", f"0-1-{end}"
    at = NOW - HOUR
    return Segment(
        "db1",
        branch,
        "binlog.000001",
        1,
        start,
        end,
        ending,
        *gtids,
        9,
        at,
        at,
        False,
        (1,),
        "mariadb",
        "10.11.19",
        "0" * 64,
    )


def confirm(
    desk: Desk, *, ahead: timedelta = timedelta(0), place: tuple[int, int] = PLACE, branch: str = BRANCH
) -> None:
    desk.catalog.binlogs.confirm("db1", "local", branch, place, desk.clock.now + ahead)


def assert_told(desk: Desk, *, looks: bool = False) -> None:
    """The overview says what the timeline says. ``looks``: after a look, which is kept first."""
    if looks:
        desk.look()
    before = desk.catalog.standings.rows()[0]["db1"]
    found, told = desk.look(), timeline(desk.wiring, "db1")
    assert desk.catalog.standings.rows()[0]["db1"] == before, "without another look"
    assert found.latest == told.latest
    assert [(one.name, one.latest, one.rpo, one.behind) for one in found.reach] == [
        (one.name, one.latest, one.rpo, one.behind) for one in told.destinations
    ]


def test_it_goes_on_from_a_backup_that_ended_later_than_what_was_confirmed(streamed: Desk) -> None:
    streamed.clock.now += 5 * SECOND
    streamed.backup(2, ago=timedelta(0), pos=900)
    assert_told(streamed, looks=True)
    streamed.clock.now += 3 * MINUTE
    confirm(streamed)
    assert_told(streamed)
    assert streamed.look().rpo == timedelta(0)


def test_a_stream_on_a_host_whose_clock_is_a_little_ahead_is_followed(streamed: Desk) -> None:
    confirm(streamed, ahead=5 * SECOND)
    look(streamed.wiring, "db1", NOW)
    assert_told(streamed)
    streamed.clock.now += 3 * MINUTE
    confirm(streamed, ahead=5 * SECOND)
    assert_told(streamed)
    assert streamed.look().latest == streamed.clock.now


def test_a_moment_that_a_wrong_clock_told_moves_nothing_on(streamed: Desk) -> None:
    streamed.clock.now += MINUTE
    confirm(streamed, ahead=5 * HOUR)
    streamed.clock.now += MINUTE
    found = streamed.look()
    assert (found.latest, [one.latest for one in found.reach]) == (NOW, [NOW])


def test_a_strangers_logs_neither_move_it_on_nor_hide_what_does(streamed: Desk) -> None:
    other, at = "20261121T110000Z-00000009", NOW - HOUR
    catalog = streamed.catalog
    catalog.identities.put(Identity("db1", "uuid", Verdict.OWN, NOW - 40 * 24 * HOUR, NOW))
    catalog.identities.put(Identity("db1", "stranger", Verdict.STRANGER, at, at))
    catalog.binlogs.add_branch(Branch("db1", other, at, BranchReason.UNKNOWN, "stranger", "mariadb", "binlog", 1))
    catalog.binlogs.add_segment(segment(0, 50, branch=other), "local", 5, NOW)
    confirm(streamed, place=(1, 50), branch=other)
    assert_told(streamed, looks=True)
    streamed.clock.now += MINUTE
    confirm(streamed, place=(1, 50), branch=other)
    assert_told(streamed)
    assert streamed.look().latest == NOW
    streamed.clock.now += MINUTE
    confirm(streamed)
    assert_told(streamed)


def test_what_was_damaged_is_not_recoverable_whatever_is_confirmed_and_is_once_it_was_repaired(streamed: Desk) -> None:
    logs, piece, end = streamed.catalog.binlogs, segment(1000, 2000), (1, 2000)
    logs.add_segment(piece, "local", 10, NOW)
    confirm(streamed, place=end)
    look(streamed.wiring, "db1", NOW)
    logs.mark_damaged("db1", piece.key, "local")
    assert_told(streamed, looks=True)
    found = streamed.look().latest
    assert found is not None
    assert found < NOW
    streamed.clock.now += MINUTE
    confirm(streamed, place=end)
    assert_told(streamed)
    assert streamed.look().latest == found
    logs.add_segment(piece, "local", 10, streamed.clock.now)
    assert_told(streamed, looks=True)
    streamed.clock.now += MINUTE
    confirm(streamed, place=end)
    assert_told(streamed)
    assert streamed.look().latest == streamed.clock.now


def test_where_something_is_confirmed_that_cannot_be_followed_all_are_looked_at_sooner(streamed: Desk) -> None:
    standing = standings.read(streamed.catalog.standings.documents()["db1"])
    assert standing is not None
    later = {BRANCH: {"local": NOW + HOUR}}
    assert not standing.misses(later, NOW)
    assert not standing.misses({}, NOW)
    assert standing.misses({BRANCH: {"other": NOW + HOUR}}, NOW)
    unmoved = replace(standing, branch="")
    assert unmoved.misses(later, NOW)
    assert not unmoved.misses(later, NOW + HOUR)
    assert unmoved.moved(later, NOW + 2 * HOUR).latest == NOW


def test_a_look_that_takes_longer_than_what_is_confirmed_is_kept_all_the_same(
    streamed: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(wiring: Wiring, name: str, records: Sequence[BackupRecord] | None = None) -> Timeline:
        found = timeline(wiring, name, records)
        streamed.clock.now += SECOND
        confirm(streamed)
        return found

    monkeypatch.setattr(standings, "timeline", slow)
    streamed.clock.now += 2 * HOUR
    watch = StandingsWatch()
    assert watch._names(streamed.wiring) == ["db1"]
    watch.step(streamed.wiring, streamed.clock.now)
    assert watch._names(streamed.wiring) == []
    assert streamed.look().latest == streamed.clock.now


# -- what a catalog in trouble, and another host, make of it


@contextmanager
def _refusing(monkeypatch: pytest.MonkeyPatch, what: str) -> Iterator[list[str]]:
    asked: list[str] = []

    def fails(_self: object, server: str = "", *_rest: object) -> None:
        asked.append(server)
        raise CatalogError("the catalog cannot grow: its disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(Standings, what, fails)
        yield asked


def test_a_catalog_that_takes_nothing_is_still_shown(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = {f"db{one}": "gold" for one in range(1, 4)}
    with desk_of(short_tmp, GOLD, servers) as desk:
        for number, name in enumerate(servers):
            desk.backup(number, server=name)
        overview(desk.wiring, NOW)
        desk.backup(7, server="db2", ago=timedelta(0))
        with _refusing(monkeypatch, "keep") as asked:
            found = {one.name: one for one in overview(desk.wiring, NOW + MINUTE)}
            assert asked[:1] == ["db2"]
        assert {name: one.backups for name, one in found.items()} == {"db1": 1, "db2": 2, "db3": 1}


def test_a_catalog_that_does_not_answer_is_told_once_and_ends_no_thread(
    streamed: Desk, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    died: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    watch = StandingsWatch()
    with _refusing(monkeypatch, "rows") as asked:
        for second in range(3):
            watch.look(streamed.wiring, NOW + 2 * second * standings.EVERY)
            assert watch._thread is not None
            watch._thread.join()
    assert (len(asked), died) == (3, [])


def test_what_was_lost_is_looked_at_first_by_whoever_asks(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = {f"db{one}": "gold" for one in range(1, 6)}
    with desk_of(short_tmp, GOLD, servers) as desk:
        records = [desk.backup(number, server=name) for number, name in enumerate(servers)]
        overview(desk.wiring, NOW)
        for number, name in enumerate(servers):
            desk.backup(10 + number, server=name, ago=timedelta(0))
        desk.catalog.backups.mark_copy_damaged(records[4].id, "local")
        with _refusing(monkeypatch, "keep") as asked:
            overview(desk.wiring, NOW + MINUTE)
            assert asked[:1] == ["db5"]


def test_a_host_that_has_not_seen_the_destinations_yet_goes_by_the_same_rows(desk_with_places: Desk) -> None:
    desk = desk_with_places
    before = Bases(desk.wiring).of("db1")
    desk.wiring.destination("local").initialise(NOW)
    findings(desk.wiring)  # what `backupd check` asks, and keeps on its host
    assert identities(desk.wiring)["local"] != "local"
    assert Bases(desk.wiring).of("db1") == before


@pytest.fixture
def desk_with_places(short_tmp: Path) -> Iterator[Desk]:
    with desk_of(short_tmp, GOLD) as found:
        yield found


def test_a_look_that_failed_counts_for_a_while_and_only_for_the_configuration_that_it_failed_by(
    desk_with_places: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, watch = desk_with_places, StandingsWatch()

    def fails(_wiring: Wiring, _name: str, _records: Sequence[BackupRecord] | None = None) -> Timeline:
        raise RefusedError("its history contradicts itself")

    with monkeypatch.context() as patched:
        patched.setattr(standings, "timeline", fails)
        desk.look()
    assert watch._names(desk.wiring) == []
    desk.clock.now += standings.KEPT
    assert watch._names(desk.wiring) == ["db1"]
    desk.clock.now -= standings.KEPT
    mended = replace(desk.wiring, settings=desk.office.write(gold=GOLD + "objectives: {rto: 1h}\n"))
    assert watch._names(mended) == ["db1"]


def test_fsck_names_a_destination_that_is_said_to_reach_further_than_it_does(streamed: Desk) -> None:
    look(streamed.wiring, "db1", NOW)
    assert examined(streamed.wiring, mend=False) == []
    kept, catalog = standings.read(streamed.catalog.standings.documents()["db1"]), streamed.catalog
    assert kept is not None
    false = replace(kept, reach=tuple(replace(one, latest=NOW + HOUR) for one in kept.reach))
    row = catalog.standings.rows()[0]["db1"]
    catalog.standings.keep("db1", row.made, row.basis, NOW, json.dumps(false.as_json()))
    (found,) = examined(streamed.wiring, mend=True)
    assert "local alone recoverable until 2026-11-21 13:00:00+00:00 instead of" in found.message
    assert examined(streamed.wiring, mend=False) == []


def test_a_row_that_was_made_while_the_clock_was_ahead_is_not_believed(streamed: Desk) -> None:
    year = timedelta(days=365)
    streamed.clock.now += year
    streamed.backup(2, ago=timedelta(0), pos=900)
    look(streamed.wiring, "db1", streamed.clock.now)
    streamed.clock.now -= year
    row, document = streamed.catalog.standings.rows()[0]["db1"], streamed.catalog.standings.documents()["db1"]
    kept = standings.read(document)
    assert kept is not None
    assert kept.latest == NOW + year
    assert Bases(streamed.wiring).status(row, kept, {}, NOW).behind
    assert standings.glances(streamed.wiring, NOW) == {}
    assert StandingsWatch()._names(streamed.wiring) == ["db1"]
    assert (streamed.look().latest, streamed.look().looked_at) == (NOW, NOW)
