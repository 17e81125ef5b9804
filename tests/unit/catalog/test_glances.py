"""What is read of all servers at once says what is read of each."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from backupd.catalog.overview import Stock
from backupd.catalog.session import Catalog
from backupd.catalog.standings import Count, StandingRow
from backupd.model.backup_record import BackupState, Copy
from backupd.model.binlog import Branch, BranchReason, Ending, Gap, Segment, SegmentKey
from backupd.model.errors import NotFoundError
from backupd.model.event import Message, MessageKind, MessageState
from backupd.model.job import JobState
from backupd.model.server_facts import Identity, Position, Verdict
from tests.support.catalog import samples

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)
FIRST, SECOND = "20261101T000000Z-00000001", "20261102T000000Z-00000002"


def _branch(catalog: Catalog, server: str, name: str, noticed: datetime) -> None:
    catalog.binlogs.add_branch(Branch(server, name, noticed, BranchReason.FIRST, "u", "mariadb", "binlog", 1))
    for place in ("local", "offsite"):
        catalog.binlogs.add_segment(
            Segment(
                server,
                name,
                "binlog.000001",
                1,
                0,
                100,
                Ending.ROTATED,
                "",
                "0-1-9",
                9,
                NOW,
                NOW,
                False,
                (1,),
                "mariadb",
                "10.11",
                "0" * 64,
            ),
            place,
            40,
            NOW,
        )


def test_everything_that_a_standing_is_made_of_is_counted_and_nothing_else(catalog: Catalog) -> None:
    record = samples.backup(server="a", copies=(Copy("local", "complete", NOW), Copy("offsite", "complete", NOW)))
    gap = Gap("a", FIRST, "local", Position("binlog.000001", 5), None, None, None, "x", NOW)
    key = SegmentKey(FIRST, 1, 0, 100)
    backups, binlogs = catalog.backups, catalog.binlogs
    met = Identity("a", "uuid", Verdict.OWN, NOW, NOW)
    steps: list[tuple[bool, Callable[[], object]]] = [
        (False, lambda: backups.add(record)),
        (False, lambda: backups.mark_copy_verified(record.id, "local", NOW)),
        (True, lambda: backups.mark_copy_damaged(record.id, "local")),
        (True, lambda: backups.set_copy_state(record.id, "offsite", "damaged")),
        (True, lambda: backups.set_state(record.id, BackupState.DELETED)),
        (True, lambda: backups.set_missing(record.id, ["shop.t"], "")),
        (False, lambda: backups.adopt(record.id)),
        (True, lambda: backups.remove_copy(record.id, "offsite")),
        (True, lambda: backups.add_copy(record.id, Copy("offsite", "complete", NOW))),
        (True, lambda: backups.remove(record.id)),
        (True, lambda: catalog.identities.put(met)),
        (True, lambda: catalog.identities.put(replace(met, verdict=Verdict.STRANGER))),
        (True, lambda: _branch(catalog, "a", FIRST, NOW - HOUR)),
        (True, lambda: binlogs.confirm("a", "local", FIRST, (1, 50), NOW)),
        (True, lambda: binlogs.add_gap(gap)),
        (True, lambda: binlogs.remove_gap(gap)),
        (True, lambda: binlogs.mark_damaged("a", key, "local")),
        (False, lambda: binlogs.mark_verified("a", [key], "local", NOW)),
        (True, lambda: binlogs.drop_segments("a", [key], "local")),
    ]
    seen = catalog.standings.count("a")
    assert seen == Count()
    for number, (loses, step) in enumerate(steps):
        step()
        now = catalog.standings.count("a")
        assert now.changes > seen.changes, number
        assert (now.losses > seen.losses) is loses, number
        seen = now
    _branch(catalog, "b", SECOND, NOW)
    binlogs.confirm("b", "local", SECOND, (1, 50), NOW)
    followed = catalog.standings.count("b")
    binlogs.confirm("b", "local", SECOND, (1, 60), NOW + HOUR)
    backups.add(samples.backup(2, server="c"))
    backups.pin(samples.backup(2).id)
    catalog.jobs.add(samples.job(server="a"))
    catalog.identities.put(replace(met, verdict=Verdict.STRANGER, seen_at=NOW + HOUR))
    assert catalog.standings.count("a") == seen, "of others nothing is counted, nor that a server was met again"
    assert catalog.standings.count("b") == followed, "what is confirmed is followed by itself"


def _segment(number: int, start: int, end: int, ending: Ending = Ending.ROTATED) -> Segment:
    gtids = f"0-1-{number}00", f"0-1-{number + 1}00"
    named = "a", FIRST, f"binlog.{number:06}"
    return Segment(*named, number, start, end, ending, *gtids, 9, NOW, NOW, False, (1,), "mariadb", "10.11", "0" * 64)


def test_runs_and_copies_that_come_in_place_of_others_are_counted(catalog: Catalog) -> None:
    binlogs, count = catalog.binlogs, catalog.standings.count
    catalog.binlogs.add_branch(Branch("a", FIRST, NOW, BranchReason.FIRST, "u", "mariadb", "binlog", 1))
    binlogs.add_segments([(_segment(number, 0, 100), 40) for number in (1, 3)], "local", NOW)
    seen = count("a")
    binlogs.add_segments([(_segment(number, 0, 100), 40) for number in (2, 9)], "local", NOW)
    assert count("a").losses > seen.losses, "one run became part of another, and one came"
    binlogs.add_segment(_segment(10, 0, 100), "local", 40, NOW)
    binlogs.mark_damaged("a", _segment(10, 0, 100).key, "local")
    seen = count("a")
    binlogs.add_segment(_segment(10, 0, 100), "local", 40, NOW)
    assert count("a").changes > seen.changes, "what was damaged is there again"
    open_file = _segment(11, 0, 100, Ending.OPEN)
    binlogs.add_segment(open_file, "local", 40, NOW)
    assert count("a").changes == seen.changes + 1, "a run that goes on is followed"
    binlogs.mark_damaged("a", open_file.key, "local")
    binlogs.add_segment(open_file, "local", 40, NOW)
    assert count("a").changes == seen.changes + 3


def test_a_piece_counts_as_a_change_where_the_log_before_it_is_missing(catalog: Catalog) -> None:
    binlogs, count = catalog.binlogs, catalog.standings.count
    binlogs.add_branch(Branch("a", FIRST, NOW, BranchReason.FIRST, "u", "mariadb", "binlog", 1))
    binlogs.add_segment(_segment(1, 0, 100), "local", 40, NOW)
    seen = count("a")
    for going_on in (_segment(2, 0, 50, Ending.OPEN), _segment(2, 50, 90, Ending.OPEN)):
        binlogs.add_segment(going_on, "local", 40, NOW)
    assert count("a") == seen
    binlogs.add_segment(_segment(2, 95, 120, Ending.OPEN), "local", 40, NOW)
    assert count("a").losses == seen.losses + 1, "five bytes are missing before it"
    binlogs.add_segment(_segment(2, 120, 130, Ending.OPEN), "offsite", 40, NOW)
    assert count("a").losses == seen.losses + 2, "what is before it lies elsewhere"
    binlogs.add_segment(_segment(4, 0, 20, Ending.OPEN), "local", 40, NOW)
    assert count("a").losses == seen.losses + 3, "a whole file is missing before it"


def test_what_is_confirmed_is_told_of_each_branch(catalog: Catalog) -> None:
    _branch(catalog, "a", FIRST, NOW - HOUR)
    catalog.binlogs.confirm("a", "local", FIRST, (1, 50), NOW)
    catalog.binlogs.confirm("a", "offsite", FIRST, (1, 50), NOW - HOUR)
    first = {"local": NOW, "offsite": NOW - HOUR}
    assert catalog.standings.rows()[1] == {"a": {FIRST: first}}
    _branch(catalog, "a", SECOND, NOW)
    catalog.binlogs.confirm("a", "local", SECOND, (1, 50), NOW + HOUR)
    assert catalog.standings.confirmed("a") == {FIRST: first, SECOND: {"local": NOW + HOUR}}
    assert catalog.standings.confirmed("b") == {}


def test_a_row_says_what_it_was_made_of_and_one_that_knew_more_stays(catalog: Catalog) -> None:
    catalog.backups.add(samples.backup(server="a"))
    catalog.standings.keep("a", Count(1, 0), "this", NOW, "{}")
    catalog.backups.add(samples.backup(2, server="a"))
    catalog.standings.keep("a", Count(2, 0), "this", NOW + HOUR, "[]")
    catalog.standings.keep("a", Count(1, 0), "this", NOW + 2 * HOUR, "{}")
    rows, _confirmed = catalog.standings.rows(["a", "b"])
    assert rows == {"a": StandingRow("a", Count(2, 0), Count(2, 0), "this", NOW + HOUR)}
    assert catalog.standings.documents() == {"a": "[]"}


def test_the_stock_follows_each_copy_whatever_becomes_of_it(catalog: Catalog) -> None:
    drawn = random.Random(15)
    states = ["complete", "damaged", "deleted"]
    for number in range(400):
        known = sorted(record.id for record in catalog.backups.every(foreign=True))
        one, place = drawn.choice(known) if known else "", drawn.choice(["local", "offsite"])
        what = drawn.randrange(8) if known else 0
        with suppress(NotFoundError):
            if what < 2:
                at = ("local", "offsite")[: drawn.randrange(3)]
                held = tuple(Copy(name, drawn.choice(states), NOW) for name in at)
                record = samples.backup(number % 90, server=drawn.choice("ab"), copies=held)
                sizes = replace(record.stats, bytes_stored=drawn.randrange(6) * 9, bytes_new=drawn.randrange(60))
                catalog.backups.add(replace(record, stats=sizes), replace=True)
            elif what == 2:
                catalog.backups.remove(one)
            elif what == 3:
                catalog.backups.remove_copy(one, place)
            elif what == 4:
                catalog.backups.add_copy(one, Copy(place, drawn.choice(states), NOW))
            elif what == 5:
                catalog.backups.mark_copy_verified(one, place, NOW)
            elif what == 6:
                catalog.backups.mark_copy_damaged(one, place)
            else:
                catalog.backups.set_copy_state(one, place, drawn.choice(states))
        for server in "ab":
            kept, counted = catalog.backups.stock(server)
            assert {name: amounts for name, amounts in kept.items() if amounts[0]} == counted, number
            assert all(amounts == (0, 0, 0) for name, amounts in kept.items() if name not in counted)
    catalog.backups.recount("a")
    kept, counted = catalog.backups.stock("a")
    assert kept == counted


def test_the_last_job_of_each_kind_and_leg_is_told_with_the_last_success(catalog: Catalog) -> None:
    def ended(number: int, state: JobState, *, leg: str = "full", kind: str = "physical-full") -> None:
        record = replace(samples.job(number, server="a"), id=f"job-{number:03}", leg=leg, kind=kind)
        catalog.jobs.add(record)
        catalog.jobs.finish(record.id, state, NOW + number * HOUR, token=1)

    ended(1, JobState.SUCCEEDED)
    ended(2, JobState.FAILED)
    ended(3, JobState.CANCELLED)
    ended(4, JobState.FAILED, leg="other")
    ended(5, JobState.SUCCEEDED, kind="verify")
    catalog.jobs.add(replace(samples.job(6, server="a"), leg="full"))
    assert [(job.id, job.kind, job.leg, job.state, job.succeeded_at) for job in catalog.glances.last_jobs()] == [
        ("job-002", "physical-full", "full", "failed", NOW + HOUR),
        ("job-004", "physical-full", "other", "failed", None),
        ("job-005", "verify", "full", "succeeded", NOW + 5 * HOUR),
    ]
    assert catalog.glances.ended_jobs(NOW + 2 * HOUR) == {
        ("a", "physical-full", "failed"): 2,
        ("a", "physical-full", "cancelled"): 1,
        ("a", "verify", "succeeded"): 1,
    }


def test_proofs_destinations_lags_streams_and_messages_are_told_of_all_servers(catalog: Catalog) -> None:
    good, bad = samples.proof(1), samples.proof(2, outcome="failed")
    for proof in (good, bad, replace(samples.proof(3, outcome="failed"), server="b")):
        catalog.proofs.add(proof)
    found = catalog.glances.tests()
    assert (found["shop-db1"].id, found["shop-db1"].outcome, found["shop-db1"].proved_at) == (
        bad.id,
        "failed",
        good.finished_at,
    )
    assert found["b"].proved_at is None

    one = samples.backup(1, server="a", copies=(Copy("local", "complete", NOW), Copy("offsite", "damaged", NOW)))
    two = samples.backup(2, server="a", copies=(Copy("local", "complete", NOW),))
    for record in (one, two):
        catalog.backups.add(record)
    _branch(catalog, "a", FIRST, NOW)
    assert catalog.glances.stock() == {"local": Stock(2, one.stats.bytes_stored + 40), "offsite": Stock(0, 40)}

    catalog.lags.note("a", "local", 5.0, NOW - 2 * HOUR)
    catalog.lags.note("a", "local", 3.0, NOW)
    assert catalog.glances.lags(NOW - HOUR) == {("a", "local"): 3.0}
    catalog.binlogs.set_stream_state("a", {"state": "streaming"}, NOW)
    assert catalog.glances.streams() == {"a": ({"state": "streaming"}, NOW)}
    assert (catalog.glances.oldest_message(), catalog.glances.messages()[MessageState.QUEUED]) == (None, 0)
    catalog.messages.add(Message("m", "email", MessageKind.ALERT, MessageState.QUEUED, "s", ("a@b",), "t", NOW))
    assert (catalog.glances.oldest_message(), catalog.glances.messages()[MessageState.QUEUED]) == (NOW, 1)


def test_it_is_seen_that_somebody_wrote_and_whether_anybody_is_on_watch(catalog: Catalog) -> None:
    before = catalog.glances.mark()
    catalog.jobs.add(samples.job())
    after = catalog.glances.mark()
    assert (before is None and after is None) or before != after, "PostgreSQL has none"
    assert after == catalog.glances.mark()

    assert catalog.watch.is_held() is False
    assert catalog.watch.take("a test")
    assert catalog.watch.is_held() is True
    catalog.watch.leave()
    assert catalog.watch.is_held() is False
    assert catalog.watch.take("again")
    catalog.watch.leave()
