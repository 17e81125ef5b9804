"""What is read of all servers at once says what is read of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from backupd.catalog.overview import Stock
from backupd.catalog.session import Catalog
from backupd.model.backup_record import BackupState, Copy
from backupd.model.binlog import Branch, BranchReason, Ending, Gap, Segment
from backupd.model.event import Message, MessageKind, MessageState
from backupd.model.job import JobState
from backupd.model.server_facts import Position
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


def test_a_marker_changes_with_everything_that_a_timeline_is_made_of_and_with_nothing_else(catalog: Catalog) -> None:
    assert catalog.glances.markers() == {}
    record = samples.backup(server="a", copies=(Copy("local", "complete", NOW), Copy("offsite", "complete", NOW)))
    other = samples.backup(2, server="b")
    steps: list[Callable[[], object]] = [
        lambda: catalog.backups.add(record),
        lambda: catalog.backups.mark_copy_verified(record.id, "local", NOW),
        lambda: catalog.backups.set_copy_state(record.id, "offsite", "damaged"),
        lambda: catalog.backups.set_state(record.id, BackupState.DELETED),
        lambda: _branch(catalog, "a", FIRST, NOW - HOUR),
        lambda: catalog.binlogs.confirm("a", "local", FIRST, (1, 50), NOW),
        lambda: catalog.binlogs.add_gap(
            Gap("a", FIRST, "local", Position("binlog.000001", 5), None, None, None, "x", NOW)
        ),
    ]
    seen = [catalog.glances.markers().get("a")]
    for step in steps:
        step()
        seen.append(catalog.glances.markers()["a"])
    assert len(set(seen)) == len(steps) + 1
    catalog.binlogs.confirm("a", "local", FIRST, (1, 60), NOW + HOUR)
    catalog.backups.add(other)
    catalog.jobs.add(samples.job(server="a"))
    assert catalog.glances.markers()["a"] == seen[-1], "what is confirmed is followed by itself"


def test_what_is_confirmed_is_told_of_the_present_branch(catalog: Catalog) -> None:
    _branch(catalog, "a", FIRST, NOW - HOUR)
    catalog.binlogs.confirm("a", "local", FIRST, (1, 50), NOW)
    catalog.binlogs.confirm("a", "offsite", FIRST, (1, 50), NOW - HOUR)
    assert catalog.glances.confirmed() == {"a": {"local": NOW, "offsite": NOW - HOUR}}
    _branch(catalog, "a", SECOND, NOW)
    catalog.binlogs.confirm("a", "local", SECOND, (1, 50), NOW + HOUR)
    assert catalog.glances.confirmed() == {"a": {"local": NOW + HOUR}}


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
