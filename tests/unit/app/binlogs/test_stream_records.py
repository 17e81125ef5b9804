"""The archive's facts in the catalog: told again they change nothing, and each event comes once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.app.binlogs.stream_report import CatalogRecorder, Confirmed
from backupd.app.runtime.child_process import CatalogWriter
from backupd.model.binlog import Branch, BranchReason, Ending, Gap, Segment
from backupd.model.errors import CatalogError
from backupd.model.server_facts import Position
from tests.support.service.house import Clock

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
FIRST = Branch("db1", "20261121T120000Z-00000001", NOW, BranchReason.FIRST, "uuid", "mariadb", "binlog", 1)
LOST = Branch(
    "db1",
    "20261121T130000Z-00000002",
    NOW,
    BranchReason.UNKNOWN,
    "uuid",
    "mariadb",
    "binlog",
    4,
    since=NOW,
    parent=FIRST.id,
)
SEGMENT = Segment(
    "db1",
    FIRST.id,
    "binlog.000001",
    1,
    0,
    900,
    Ending.ROTATED,
    "",
    "0-1-9",
    9,
    NOW,
    NOW,
    False,
    (1,),
    "mariadb",
    "10.11.19",
    "0" * 64,
)
GAP = Gap(
    "db1",
    FIRST.id,
    "",
    Position("binlog.000001", 900),
    Position("binlog.000003", 4),
    NOW,
    None,
    "the server has removed them",
    NOW,
)


@pytest.fixture
def scribe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CatalogWriter]:
    monkeypatch.setattr(
        "backupd.app.runtime.child_process.PATIENCE", 240
    )  # a slow machine is no catalog that does not answer
    with CatalogWriter(f"sqlite:///{tmp_path}/catalog.db") as opened:
        opened.ask(lambda catalog: catalog.holds.all())
        yield opened


def test_facts_that_are_told_twice_are_there_once_and_so_are_their_events(scribe: CatalogWriter) -> None:
    for recorder in (CatalogRecorder("db1", scribe, Clock(NOW)), CatalogRecorder("db1", scribe, Clock(NOW))):
        recorder.branch_stored(FIRST)
        recorder.segment_stored(SEGMENT, "local", 400, NOW)
        recorder.gap(GAP)
        recorder.branch_stored(LOST)
    catalog = scribe.catalog
    assert [branch.id for branch in catalog.binlogs.branches("db1")] == [FIRST.id, LOST.id]
    assert [record.segment for record in catalog.binlogs.segments("db1", FIRST.id)] == [SEGMENT]
    assert catalog.binlogs.gaps("db1") == (GAP,)
    second, gap, first = catalog.events.list()
    assert [(one.kind, str(one.severity)) for one in (first, gap, second)] == [
        ("branch-begun", "info"),
        ("binlog-gap", "error"),
        ("branch-begun", "warning"),
    ]
    assert "between binlog.000001:900 and binlog.000003:4: the server has removed them" in gap.message
    assert "no restore can cross it" in second.hint
    CatalogRecorder("db1", scribe, Clock(NOW)).segments_dropped("db1", [SEGMENT.key], "local")
    assert catalog.binlogs.segments("db1", FIRST.id) == ()


def test_a_file_that_is_archived_whole_after_all_closes_the_gap_behind_it(scribe: CatalogWriter) -> None:
    recorder = CatalogRecorder("db1", scribe, Clock(NOW))
    recorder.branch_stored(FIRST)
    damaged = replace(GAP, after=Position("binlog.000001", 500), before=Position("binlog.000002", 4))
    purged = replace(GAP, after=Position("binlog.000002", 700), before=Position("binlog.000004", 4))
    for gap in (damaged, purged):
        recorder.gap(gap)
    recorder.segment_stored(replace(SEGMENT, end=500, ending=Ending.CUT), "local", 400, NOW)
    assert scribe.catalog.binlogs.gaps("db1") == (damaged, purged)
    recorder.segment_stored(SEGMENT, "local", 400, NOW)
    assert scribe.catalog.binlogs.gaps("db1") == (purged,)
    assert scribe.catalog.events.list()[0].kind == "binlog-gap"  # one is still open
    second = replace(SEGMENT, number=2, file="binlog.000002", end=900)
    recorder.segment_stored(second, "local", 400, NOW)
    (rest,) = scribe.catalog.binlogs.gaps("db1")
    assert rest.after == Position("binlog.000002", 900, "0-1-9")
    recorder.segment_stored(replace(second, number=3, file="binlog.000003"), "local", 400, NOW)
    assert scribe.catalog.binlogs.gaps("db1") == (rest,)  # nothing says that the second one ended there
    scribe.catalog.binlogs.remove_gap(rest)
    recorder.gap(replace(purged, before=Position("binlog.000003", 4)))
    recorder.segment_stored(second, "local", 400, NOW)
    assert scribe.catalog.binlogs.gaps("db1") == ()
    assert scribe.catalog.events.list()[0].kind == "binlog-gap-closed"


def test_a_stream_that_begins_anew_although_there_are_branches_asks_for_a_full_backup(scribe: CatalogWriter) -> None:
    recorder = CatalogRecorder("db1", scribe, Clock(NOW))
    recorder.branch_stored(FIRST)
    anew = replace(LOST, noticed_at=NOW + timedelta(hours=1), reason=BranchReason.FIRST, since=None, parent=None)
    for _ in range(2):
        recorder.branch_stored(anew)
    event, first = scribe.catalog.events.list()
    assert (str(first.severity), first.hint) == ("info", "")
    assert (event.kind, str(event.severity), event.subject) == ("branch-begun", "warning", anew.id)
    assert event.hint == "take a full backup now: earlier backups cannot be rolled forward past this point"
    older = replace(FIRST, id="20261121T110000Z-00000000", noticed_at=NOW - timedelta(hours=1))
    recorder.branch_stored(older)  # a catalog that learns of the past is no warning
    assert str(scribe.catalog.events.list()[0].severity) == "info"


def test_how_far_behind_a_destination_was_is_measured_from_one_confirmation_to_the_next(scribe: CatalogWriter) -> None:
    clock = Clock(NOW)
    recorder = CatalogRecorder("db1", scribe, clock)
    recorder.branch_stored(FIRST)
    recorder.segment_stored(SEGMENT, "local", 400, NOW)
    recorder.confirmed("local", FIRST.id, (1, 900), NOW)
    clock.sleep(timedelta(seconds=40))
    recorder.confirmed("local", FIRST.id, (1, 900), NOW + timedelta(seconds=39))
    clock.sleep(timedelta(seconds=5))
    recorder.confirmed("local", FIRST.id, (1, 900), NOW + timedelta(seconds=44))
    recorder.confirmed("local", FIRST.id, (1, 900), NOW + timedelta(seconds=10))  # older than what is known
    assert recorder.standing() == {"local": Confirmed(FIRST.id, (1, 900), NOW + timedelta(seconds=44))}
    recorder.flush()
    (run,) = scribe.catalog.binlogs.runs("db1")
    assert run.confirmed_at == NOW + timedelta(seconds=44)
    assert scribe.catalog.lags.worst("db1", NOW) == {"local": 40.0}
    recorder.confirmed("local", LOST.id, (4, 4), NOW + timedelta(days=1))  # another branch is another beginning
    assert scribe.catalog.lags.worst("db1", NOW) == {"local": 40.0}


def test_a_confirmation_that_has_not_come_yet_gives_way_to_an_honest_one(scribe: CatalogWriter) -> None:
    """Our own clock was half an hour ahead, and was set right."""
    clock = Clock(NOW + timedelta(minutes=30))
    recorder = CatalogRecorder("db1", scribe, clock)
    recorder.branch_stored(FIRST)
    recorder.segment_stored(SEGMENT, "local", 400, NOW)
    recorder.confirmed("local", FIRST.id, (1, 500), clock.now)
    recorder.flush()
    clock.now = NOW + timedelta(seconds=1)
    recorder.confirmed("local", FIRST.id, (1, 900), NOW)
    recorder.flush()
    (run,) = scribe.catalog.binlogs.runs("db1")
    assert run.confirmed_at == NOW


def test_the_time_without_any_stream_counts_too(scribe: CatalogWriter) -> None:
    clock = Clock(NOW)
    first = CatalogRecorder("db1", scribe, clock)
    first.branch_stored(FIRST)
    first.segment_stored(SEGMENT, "local", 400, NOW)
    first.confirmed("local", FIRST.id, (1, 900), NOW)
    first.flush()
    clock.sleep(timedelta(minutes=50))
    second = CatalogRecorder("db1", scribe, clock)
    second.confirmed("local", FIRST.id, (1, 900), clock.now)
    second.flush()
    assert scribe.catalog.lags.worst("db1", NOW) == {"local": 3000.0}


def test_a_catalog_that_fails_loses_no_lag(scribe: CatalogWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(NOW)
    recorder = CatalogRecorder("db1", scribe, clock)
    recorder.branch_stored(FIRST)
    recorder.segment_stored(replace(SEGMENT), "local", 400, NOW)
    recorder.confirmed("local", FIRST.id, (1, 900), NOW)
    clock.sleep(timedelta(minutes=2))
    recorder.confirmed("local", FIRST.id, (1, 900), clock.now)

    def fail(_work: object, **_more: object) -> None:
        raise CatalogError("locked")

    with monkeypatch.context() as broken:
        broken.setattr(scribe, "ask", fail)
        with pytest.raises(CatalogError):
            recorder.flush()
    recorder.flush()
    assert scribe.catalog.lags.worst("db1", NOW) == {"local": 120.0}
