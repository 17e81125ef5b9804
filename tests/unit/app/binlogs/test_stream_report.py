"""What a stream says of itself: rows for whoever looks, one event for each incident."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.app.binlogs.status import acknowledged
from backupd.app.binlogs.stream_report import CatalogRecorder, StreamReport, behind_limit
from backupd.app.context.settings import ServerSettings
from backupd.app.context.wiring import Wiring
from backupd.app.runtime import child_process
from backupd.app.runtime.child_process import CatalogWriter
from backupd.app.service.check import stream_findings
from backupd.binlog.acknowledgement import Evidence
from backupd.binlog.archiver import Behind
from backupd.binlog.spool_files import Spool
from backupd.binlog.stream_status import NO_ROOM, StreamEvent, StreamEventKind, StreamState, StreamStatus
from backupd.model.acknowledged import Acknowledged, AcknowledgedWindow
from tests.support.service.house import GOLD, Clock, Office

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@dataclass
class Desk:
    writer: CatalogWriter
    server: ServerSettings
    spool: Spool
    clock: Clock = field(default_factory=lambda: Clock(NOW))

    def __post_init__(self) -> None:
        self.recorder = CatalogRecorder("db1", self.writer, self.clock)
        self.report = StreamReport(self.server, self.writer, self.recorder, self.spool, self.clock)
        self.behind: dict[str, Behind] = {}

    def beat(self, state: StreamState, error: str = "", *, after: timedelta = timedelta(0)) -> None:
        """The state began ``after`` before now."""
        self.report.beat(StreamStatus(state, self.clock.now - after, error=error), self.behind, {})

    def events(self) -> list[str]:
        return [event.kind for event in reversed(self.writer.catalog.events.list())]


@pytest.fixture
def desk(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setattr(child_process, "PATIENCE", 240)  # a slow machine is no catalog that does not answer
    settings = Office(short_tmp).write(gold=GOLD + "binlog: {checkpoint: 5s}\nobjectives: {rpo: 60s}\n")
    with CatalogWriter(settings.catalog) as asked:
        asked.ask(lambda catalog: catalog.holds.all())
        yield Desk(asked, settings.server("db1"), Spool(short_tmp / "spool"))


def test_a_row_tells_how_the_stream_is_and_the_last_one_that_it_ended(desk: Desk) -> None:
    desk.behind = {"local": Behind(4096, NOW - timedelta(seconds=3))}
    desk.beat(StreamState.STREAMING)
    found = desk.writer.catalog.binlogs.stream_state("db1")
    assert found is not None
    row, at = found
    assert (row["state"], row["pid"], at) == ("streaming", os.getpid(), NOW)
    assert row["destinations"]["local"]["bytes_behind"] == 4096
    assert row["rss_bytes"] > 1_000_000
    desk.report.over(StreamStatus(StreamState.WAITING, NOW), {})
    found = desk.writer.catalog.binlogs.stream_state("db1")
    assert found is not None
    assert found[0]["state"] == "stopped"


def test_a_server_out_of_reach_is_an_incident_after_a_minute_and_one_that_refuses_us_at_once(desk: Desk) -> None:
    desk.beat(StreamState.WAITING, "no answer", after=timedelta(seconds=20))
    assert desk.events() == []
    for minutes in (1, 2, 3):
        desk.beat(StreamState.WAITING, "no answer", after=timedelta(minutes=minutes))
    assert desk.events() == ["stream-failed"]
    desk.beat(StreamState.FAILED, "access denied")
    desk.beat(StreamState.STREAMING)
    desk.beat(StreamState.STREAMING)
    assert desk.events() == ["stream-failed", "stream-recovered"]
    desk.beat(StreamState.FAILED, "access denied")
    desk.beat(StreamState.FAILED, "access denied")
    assert desk.events()[2:] == ["stream-failed"]
    assert "access denied" in desk.writer.catalog.events.list(limit=1)[0].message


def test_a_full_spool_and_the_danger_of_a_purge_are_told_once_each(desk: Desk) -> None:
    alarm = StreamEvent(StreamEventKind.PURGE_ALARM, NOW, "binlog.000007 goes in an hour", hint="mend it")
    for _ in range(3):
        desk.report.heard(alarm)
        desk.beat(StreamState.PAUSED)
    assert desk.events() == ["spool-full", "purge-alarm"]
    assert any("binlog.max_spool" in event.hint for event in desk.writer.catalog.events.list(limit=2))
    desk.beat(StreamState.STREAMING)
    assert desk.events()[2:] == ["spool-has-room"]
    desk.report.heard(StreamEvent(StreamEventKind.PURGE_OVER, NOW, "it is archived now"))
    desk.beat(StreamState.STREAMING)
    assert desk.events()[3:] == ["purge-over"]


def test_a_spool_on_a_full_disk_is_not_told_to_raise_what_it_may_hold(desk: Desk) -> None:
    desk.beat(StreamState.PAUSED, NO_ROOM)
    (event,) = desk.writer.catalog.events.list(limit=1)
    assert event.detail == NO_ROOM
    assert "free space there" in event.hint
    assert "max_spool" not in event.hint


def test_a_destination_that_lacks_something_for_longer_than_promised_is_told_until_it_has_caught_up(
    desk: Desk,
) -> None:
    desk.behind = {"local": Behind(10, NOW)}
    desk.beat(StreamState.STREAMING)
    desk.clock.sleep(timedelta(seconds=59))
    desk.beat(StreamState.STREAMING)
    assert desk.events() == []
    desk.clock.sleep(timedelta(seconds=2))
    desk.behind = {"local": Behind(1 << 20, NOW, "the disk is not mounted")}
    for _ in range(2):
        desk.beat(StreamState.STREAMING)
    (event,) = desk.writer.catalog.events.list()
    assert (event.kind, event.subject, event.detail) == ("destination-behind", "local", "the disk is not mounted")
    desk.behind = {"local": Behind(0, None)}
    desk.beat(StreamState.STREAMING)
    assert desk.events() == ["destination-behind", "destination-caught-up"]


def test_a_check_says_whether_the_stream_runs(desk: Desk, short_tmp: Path) -> None:
    settings = Office(short_tmp).write()

    def said() -> list[str]:
        return [one.message for one in stream_findings(Wiring(settings, desk.writer.catalog, desk.clock), desk.server)]

    assert said() == ["the binary log of db1 has never been streamed"]
    desk.beat(StreamState.STREAMING)
    assert said() == []
    desk.behind = {"local": Behind(9, NOW, "the disk is not mounted")}
    desk.beat(StreamState.FAILED, "access denied")
    assert said() == [
        "the stream of db1 is failed: access denied",
        "the stream of db1 is failed: local: the disk is not mounted",
    ]
    desk.clock.sleep(timedelta(minutes=2))
    assert said() == ["the binary log of db1 has not been streamed since 2026-11-21T12:00:00Z"]
    desk.report.over(StreamStatus(StreamState.WAITING, NOW), {})
    assert said() == ["the binary log of db1 has not been streamed since 2026-11-21T12:02:00Z"]


def test_how_late_is_late_follows_the_promise_and_the_checkpoint(short_tmp: Path) -> None:
    def limit(text: str) -> timedelta:
        return behind_limit(Office(short_tmp).write(gold=GOLD + text).server("db1").policy)

    assert limit("binlog: {}\n") == timedelta(minutes=5)
    assert limit("binlog: {}\nobjectives: {rpo: 90s}\n") == timedelta(seconds=90)
    assert limit("binlog: {checkpoint: 10m}\nobjectives: {rpo: 90s}\n") == timedelta(hours=1)


def test_commits_that_do_not_wait_are_an_incident_after_a_moment_with_the_time_since_when(desk: Desk) -> None:
    """Whatever the server's clock says."""
    ahead = NOW + timedelta(hours=1)

    def beat(evidence: Evidence, seconds: float = 0) -> None:
        desk.clock.sleep(timedelta(seconds=seconds))
        status = StreamStatus(StreamState.STREAMING, desk.clock.now, acknowledgement=evidence)
        desk.report.beat(status, {}, {})

    held = Evidence("spool", (AcknowledgedWindow("b", NOW, ahead),), why="")
    beat(held)
    beat(held.interrupted("the connection broke", ahead))
    beat(held.interrupted("the connection broke", ahead), 14)
    assert desk.events() == []
    beat(held, 1)
    beat(held.interrupted("the server has fallen back to asynchronous replication", ahead), 10)
    beat(held.interrupted("the server has fallen back to asynchronous replication", ahead), 16)
    (event,) = desk.writer.catalog.events.list()
    assert event.kind == "unacknowledged"
    assert event.message == (
        "RPO 0 does not hold for db1 since 2026-11-21T13:00:00Z: the server has fallen back to asynchronous replication"
    )
    assert "backupd check db1" in event.hint
    beat(held, 1)
    beat(held, 1)
    assert desk.events() == ["unacknowledged", "acknowledged"]


def test_commits_that_were_answered_without_us_are_an_incident_though_rpo_0_holds_again(desk: Desk) -> None:
    behind = NOW - timedelta(hours=1)
    evidence = Evidence("spool", (AcknowledgedWindow("b", behind, behind),), why="")
    desk.report.beat(StreamStatus(StreamState.STREAMING, desk.clock.now, acknowledgement=evidence), {}, {})
    evidence = replace(evidence, answered_at=behind)
    for _ in range(3):
        desk.clock.sleep(timedelta(seconds=1))
        desk.report.beat(StreamStatus(StreamState.STREAMING, desk.clock.now, acknowledgement=evidence), {}, {})
    (event,) = desk.writer.catalog.events.list()
    assert (event.kind, event.message) == (
        "unacknowledged",
        "RPO 0 does not hold for db1 since 2026-11-21T11:00:00Z: commits were answered without an acknowledgement",
    )
    desk.clock.sleep(timedelta(minutes=1))
    desk.report.beat(StreamStatus(StreamState.STREAMING, desk.clock.now, acknowledgement=evidence), {}, {})
    assert desk.events() == ["unacknowledged", "acknowledged"]


def test_rpo_0_is_shown_only_while_the_server_is_asked_whatever_its_clock_says(desk: Desk) -> None:
    ahead = NOW + timedelta(hours=1)
    held = Evidence("spool", (AcknowledgedWindow("b", NOW, ahead),), why="", shown_at=NOW)

    def shown(evidence: Evidence) -> Acknowledged | None:
        status = StreamStatus(StreamState.STREAMING, desk.clock.now, acknowledgement=evidence)
        desk.report.beat(status, {}, {})
        return acknowledged(desk.writer.catalog.binlogs.stream_state("db1"), desk.clock.now)

    found = shown(held)
    assert found is not None
    assert (found.holds, found.since) == (True, NOW)
    desk.clock.sleep(timedelta(seconds=31))
    found = shown(held)
    assert found is not None
    assert (found.holds, found.since, found.lost_at) == (False, None, ahead)
    assert "not asked since" in found.why
