"""Every server at a glance: what is wrong with it, and that looking does not cost more with every server."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import event

from backupd.app.context.destination_identity import findings
from backupd.app.context.incidents import Incidents
from backupd.app.context.wiring import Wiring
from backupd.app.copies import protection
from backupd.app.restores.plan import plan
from backupd.app.views import standings as standing
from backupd.app.views.destinations import DestinationLook
from backupd.app.views.metrics import measure
from backupd.app.views.objectives import ObjectivesWatch
from backupd.app.views.overview import overview
from backupd.app.views.server_status import Status
from backupd.app.views.timeline import timeline
from backupd.catalog.backups import Absence
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState, Copy, HoldKind
from backupd.model.binlog import Gap
from backupd.model.errors import NotFoundError, RefusedError
from backupd.model.event import Incident, Severity
from backupd.model.job import JobState
from backupd.model.server_facts import Position
from backupd.recovery.timeline import Timeline
from tests.support.catalog import samples
from tests.support.service.desk import BRANCH, HOUR, MINUTE, NOW, STREAMED, Desk, desk_of
from tests.support.service.house import GOLD


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine has every server looked at as well, while whoever asks waits."""
    monkeypatch.setattr(standing, "BUDGET", 240.0)


# -- what is told


def test_a_server_that_was_added_just_now_waits_for_its_first_backup(desk: Desk) -> None:
    found = desk.look()
    assert [(one.status, one.text, one.hint) for one in found.reasons] == [
        (
            Status.WARNING,
            "no backup has been taken yet: the first one starts at 2026-11-22T01:00:00Z",
            "to take one now: backupd backup db1",
        )
    ]


def test_a_server_that_nothing_can_be_recovered_of_is_bad_and_the_next_step_is_named(desk: Desk) -> None:
    desk.job(1, JobState.FAILED)
    found = desk.look()
    assert (found.status, found.latest, found.rpo, found.last_success) == (Status.BAD, None, None, None)
    assert next((one.text, one.hint) for one in found.reasons) == (
        "nothing can be recovered: there is no usable backup",
        "backupd backup db1",
    )
    desk.catalog.backups.add(samples.backup(2, server="db1", state=BackupState.DAMAGED))
    assert desk.look().status is Status.BAD, "a damaged backup recovers nothing"


def test_a_server_of_which_dumps_are_taken_is_good_for_its_tables_and_nothing_impossible_is_planned(
    short_tmp: Path,
) -> None:
    policy = (
        'logical: {schedule: "0 1 * * *"}\nbinlog: {}\ndestinations: {required: [local]}\n'
        "objectives: {rpo: 1m, rto: 1h}\nprotection: {copies: 1, off_site: 0}\n"
        'test_restore: {schedule: "0 6 * * *", target: random}\n'
    )
    with desk_of(short_tmp, policy) as desk:
        desk.stream()
        failed = desk.look()
        assert failed.reasons[0].hint == "to take one now: backupd backup db1 --kind logical"
        desk.backup(kind=BackupKind.LOGICAL)
        desk.logs(NOW)
        found = desk.look()
        assert (found.status, found.tables_only, found.latest, found.rpo_kept, found.rto_kept) == (
            Status.GOOD,
            True,
            NOW,
            True,
            None,
        )
        assert [run.leg for run in found.next_runs] == ["logical"], "no test restore, which could only fail"
        watch = ObjectivesWatch(timeline)
        watch.step(desk.wiring, NOW)
        watch.step(desk.wiring, NOW + 10 * MINUTE)
        assert [event.kind for event in desk.catalog.events.list()] == []
        with pytest.raises(NotFoundError, match="cannot be restored as a whole: it has dumps only") as caught:
            plan(desk.wiring, "db1", "latest", None)
        assert "--kind full" not in caught.value.hint
        assert "backupd restore db1 --to latest --tables '*.*' --sql DIR" in caught.value.hint
        metrics = {
            metric.name: told["db1",] for metric, told in measure(desk.wiring, NOW) if "_recoverable" in metric.name
        }
        assert metrics["backupd_server_recoverable"] == 0
        assert metrics["backupd_server_tables_recoverable"] == 1


def test_a_server_with_a_backup_is_good_and_its_figures_are_told(desk: Desk) -> None:
    record = desk.backup()
    desk.backup(2, kind=BackupKind.LOGICAL, ago=2 * HOUR)
    found = desk.look()
    assert (found.status, found.reasons) == (Status.GOOD, ())
    assert (found.latest, found.rpo, found.windows, found.backups, found.protected) == (
        record.finished_at,
        HOUR,
        1,
        2,
        2,
    )
    assert found.first == record.finished_at, "nothing but a table comes out of a dump"
    assert [(one.kind, one.table_set, one.seconds, NOW - one.finished_at) for one in found.last_backups] == [
        ("physical-full", "", 300.0, HOUR),
        ("logical", "money", 300.0, 2 * HOUR),
    ]
    assert found.last_success == record.finished_at
    assert [(run.leg, run.at) for run in found.next_runs] == [
        ("physical.full", datetime(2026, 11, 22, 1, 0, tzinfo=UTC)),
        ("physical.incremental", datetime(2026, 11, 23, 1, 0, tzinfo=UTC)),
    ], "in the policy's zone"
    document = found.as_json()
    assert document["status"] == "good"
    assert document["rpo_seconds"] == 3600.0
    assert document["last_backups"][0]["id"] == record.id


def test_a_promise_that_is_not_kept_is_bad(streamed: Desk) -> None:
    ((status, text),) = streamed.why()
    assert status == "bad"
    assert text.startswith("estimated restore time: 1d 12h"), "terabytes, at a speed that nobody has measured"
    assert text.endswith("objectives.rto is 1h")
    assert (streamed.look().rpo_kept, streamed.look().rto_kept) == (True, False)
    streamed.stream()
    found = streamed.look(5 * MINUTE)
    assert found.rpo_kept is False
    assert ("bad", "data loss if the server failed now: 5m; objectives.rpo is 2m") in streamed.why()
    assert found.status is Status.BAD
    assert found.reasons[0].status is Status.BAD, "the worst comes first"


def test_a_stream_that_does_not_go_on_is_told(streamed: Desk) -> None:
    streamed.stream("waiting")
    assert ("warning", "the binary log is not streamed (waiting: no route to host)") in streamed.why()
    streamed.stream("failed")
    assert ("bad", "the binary log is not streamed (failed: no route to host)") in streamed.why()
    streamed.stream(ago=2 * MINUTE)
    assert any("no report since 2026-11-21T11:58:00" in text for _status, text in streamed.why())
    found = streamed.look()
    assert found.stream is not None
    assert (found.stream.spool_bytes, found.stream.spool_limit) == (7, 9)


def test_test_restores_are_told_with_when_the_data_was_last_good(desk: Desk) -> None:
    desk.backup()
    good = desk.proof(1, "proved", ago=2 * HOUR)
    bad = desk.proof(2, "failed", ago=HOUR)
    found = desk.look()
    assert found.last_proof is not None
    assert (found.last_proof.id, found.last_proof.proved_at) == (bad.id, good.finished_at)
    assert desk.why() == [("bad", "the last test restore found bad data: rows differ")]
    desk.proof(3, "undecided", ago=30 * MINUTE)
    assert desk.look().status is Status.WARNING
    again = desk.proof(4, "restored", ago=MINUTE)
    found = desk.look()
    assert (found.status, found.last_proof and found.last_proof.proved_at) == (Status.GOOD, again.finished_at)


def test_the_last_job_of_each_schedule_counts_and_one_that_somebody_cancelled_does_not(desk: Desk) -> None:
    desk.backup()
    failed = desk.job(1, JobState.FAILED, message="the disk is full\nreally")
    assert desk.why() == [("warning", "the last physical-full (physical.full) is failed: the disk is full")]
    desk.job(2, JobState.CANCELLED)
    assert len(desk.why()) == 1
    desk.job(3, JobState.MISSED, leg="physical.incremental")
    assert [text for _status, text in desk.why()][1:] == ["the last physical-full (physical.incremental) is missed"]
    desk.catalog.incidents.record([_incident("job-failed", job=failed.id)], [], {})
    assert desk.why().count(("warning", "db1 is in trouble")) == 1, "what there is can be recovered all the same"
    assert not any("disk is full" in text for _status, text in desk.why()), "an incident tells of it, once"
    desk.job(4, JobState.SUCCEEDED)
    desk.job(5, JobState.SUCCEEDED, leg="physical.incremental")
    assert [text for _status, text in desk.why()] == ["db1 is in trouble"]


def test_open_incidents_are_reasons_unless_they_say_what_is_looked_at_here(desk: Desk) -> None:
    desk.backup()
    desk.catalog.incidents.record(
        [_incident("rpo-broken"), _incident("job-hanging", number=2, severity=Severity.WARNING)], [], {}
    )
    found = desk.look()
    assert [(one.status, one.text, one.hint) for one in found.reasons] == [
        (Status.WARNING, "db1 is in trouble", "help it")
    ]
    assert [incident.kind for incident in found.incidents] == ["job-hanging", "rpo-broken"]


def test_pauses_absences_work_and_holds_are_shown(desk: Desk) -> None:
    desk.backup()
    running, queued = desk.job(1, JobState.RUNNING), desk.job(2, JobState.QUEUED)
    desk.catalog.holds.set("*", HoldKind.PAUSE, "moving house", "anna", NOW)
    desk.catalog.holds.set("db1", HoldKind.HOLD, "audit", "anna", NOW)
    desk.catalog.absences.begin(Absence("db1", running.id, NOW, "/bin/true"))
    found = desk.look()
    assert ([job.id for job in found.running], found.waiting) == ([running.id], 1)
    assert (found.held and found.held.reason, found.paused and found.paused.server) == ("audit", "*")
    assert found.absent_since == NOW
    assert [text for _status, text in desk.why()] == [
        "scheduled jobs are suspended: moving house (every server is paused by anna since 2026-11-21T12:00:00Z)"
    ]
    desk.catalog.jobs.finish(running.id, JobState.FAILED, NOW, token=running.token)
    assert desk.why()[0] == ("bad", "out of rotation since 2026-11-21T12:00:00Z, and the job that took it out is over")
    assert queued.state is JobState.QUEUED


def test_backups_that_nobody_verified_in_time_are_told(desk: Desk) -> None:
    at = NOW - 30 * HOUR
    desk.catalog.backups.add(
        replace(samples.backup(server="db1", copies=(Copy("local", "complete", at),)), started_at=at, finished_at=at)
    )
    assert desk.look().protected == 0
    assert "no protected backup for 1d 6h" in desk.why()[0][1]
    desk.catalog.backups.mark_copy_verified(samples.backup().id, "local", NOW)
    assert (desk.look().protected, desk.look().status) == (1, Status.GOOD)


def test_what_is_at_a_place_that_was_seen_empty_protects_nothing_until_it_is_there_again(desk: Desk) -> None:
    at = NOW - 30 * HOUR
    record = desk.backup(ago=30 * HOUR)
    place, marker = DestinationLook("local"), desk.office.base / "repository" / "repository.json"
    desk.wiring.destination("local").initialise(at)

    def seen() -> tuple[int, bool, bool]:
        """By the page and the metrics; by the command line; did the watch tell?"""
        protection.look(desk.wiring, Incidents(desk.catalog), "db1", NOW)
        (told,) = protection.with_protection(desk.wiring, [record])
        return desk.look().protected, told.protected, bool(desk.catalog.events.list(kind="not-protected"))

    place.step(desk.wiring, NOW)
    assert seen() == (1, True, False)
    emptied = marker.rename(marker.with_name("away"))
    place.step(desk.wiring, NOW)
    assert seen() == (0, False, True)
    emptied.rename(marker)
    findings(desk.wiring)  # what `backupd check` asks
    assert seen()[:2] == (1, True)


def test_a_policy_that_cannot_be_used_is_bad_and_what_there_is_is_still_told(short_tmp: Path) -> None:
    with desk_of(short_tmp, GOLD) as desk:
        desk.backup()
        (short_tmp / "policies" / "gold.yaml").write_text("physical: {fool: 1}\n")
        from backupd.app.context.settings import load_settings

        broken = replace(desk.wiring, settings=load_settings(desk.office.file, strict=False))
        (found,) = overview(broken, NOW)
        assert (found.status, found.latest, found.next_runs) == (Status.BAD, NOW - HOUR, ())
        assert "policy gold cannot be used" in found.reasons[0].text
        assert "fool" in found.reasons[0].hint


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RefusedError("its history contradicts itself", hint="mend it"), "its history contradicts itself"),
        (ValueError("'fool' is no state"), "internal error: ValueError: 'fool' is no state"),
    ],
)
def test_a_server_that_cannot_be_looked_at_hides_no_other(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def fails(wiring: Wiring, name: str, listed: Sequence[BackupRecord]) -> Timeline:
        if name == "db1":
            raise error
        return timeline(wiring, name, listed)

    monkeypatch.setattr(standing, "timeline", fails)
    with desk_of(short_tmp, GOLD + "protection: {copies: 1, off_site: 0}\n", {"db1": "gold", "db2": "gold"}) as desk:
        desk.backup(server="db2")
        bad, good = overview(desk.wiring, NOW)
        assert [(one.text, one.hint) for one in bad.reasons] == [
            (
                f"cannot determine the recoverable points in time: {told}",
                "hint: mend it" if isinstance(error, RefusedError) else "",
            )
        ]
        assert (bad.status, bad.looked_at, good.status) == (Status.BAD, None, Status.GOOD)


# -- how it is looked at


def test_what_becomes_recoverable_is_followed_without_looking_anew_and_is_what_the_timeline_says(
    streamed: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = streamed.look()
    assert first.latest == NOW
    looked: list[str] = []

    def noted(wiring: Wiring, name: str, listed: Sequence[BackupRecord]) -> Timeline:
        looked.append(name)
        return timeline(wiring, name, listed)

    monkeypatch.setattr(standing, "timeline", noted)
    streamed.clock.now += 90 * timedelta(seconds=1)
    streamed.catalog.binlogs.confirm("db1", "local", BRANCH, (1, 1000), streamed.clock.now)
    found, told = streamed.look(), timeline(streamed.wiring, "db1")
    assert looked == []
    assert (found.latest, found.rpo, found.rto) == (told.latest, told.rpo, told.predicted_rto)
    assert found.latest == NOW + 90 * timedelta(seconds=1)
    assert [(one.name, one.latest, one.rpo, one.behind) for one in found.reach] == [
        (one.name, one.latest, one.rpo, one.behind) for one in told.destinations
    ]
    streamed.catalog.binlogs.add_gap(
        Gap(
            "db1",
            BRANCH,
            "local",
            Position("binlog.000001", 500),
            None,
            NOW,
            None,
            "the server removed them",
            streamed.clock.now,
        )
    )
    found, told = streamed.look(), timeline(streamed.wiring, "db1")
    assert looked == ["db1"], "something came that it was made of"
    assert (found.latest, found.gaps) == (told.latest, len(told.gaps))
    assert any(text.startswith("binary logs are missing (1 new gaps)") for _status, text in streamed.why())


def test_objectives_are_looked_at_where_what_is_kept_is_not_far_from_every_limit(streamed: Desk) -> None:
    policy = STREAMED.replace("rto: 1h", "rto: 2000h")
    streamed.wiring = replace(streamed.wiring, settings=streamed.office.write(gold=policy))
    read: list[str] = []

    def noted(wiring: Wiring, name: str) -> Timeline:
        read.append(name)
        return timeline(wiring, name)

    watch = ObjectivesWatch(noted, standing.glances)

    def looks() -> int:
        read.clear()
        watch.step(streamed.wiring, streamed.clock.now)
        return len(read)

    assert looks() == 1, "nothing is kept yet"
    streamed.look()
    assert looks() == 0
    streamed.clock.now += 3 * MINUTE
    assert looks() == 1
    assert looks() == 1, "the incident is open"
    streamed.catalog.binlogs.confirm("db1", "local", BRANCH, (1, 1000), streamed.clock.now)
    assert looks() == 1, "somebody has to close the incident"
    assert looks() == 0
    streamed.catalog.backups.set_state(streamed.catalog.backups.list("db1")[0].id, BackupState.DAMAGED)
    assert looks() == 1, "what is kept was overtaken"


def test_a_server_is_looked_at_again_after_a_while_though_nothing_changed(streamed: Desk) -> None:
    before = streamed.look().looked_at
    assert streamed.look(standing.KEPT / 2).looked_at == before
    streamed.look(standing.KEPT)
    deadline = time.monotonic() + 240
    while streamed.look(timedelta(seconds=2)).looked_at == before:
        assert time.monotonic() < deadline, "the background has not looked"
        time.sleep(0.01)


def test_the_number_of_statements_does_not_grow_with_the_servers(short_tmp: Path) -> None:
    counts = []
    for number in (2, 12):
        base = short_tmp / str(number)
        base.mkdir()
        with desk_of(base, STREAMED, {f"db{one}": "gold" for one in range(number)}) as desk:
            for one in range(number):
                desk.backup(one, server=f"db{one}")
            overview(desk.wiring, NOW)
            seen: list[str] = []
            event.listen(
                desk.catalog.database.engine,
                "before_cursor_execute",
                lambda _c, _k, statement, *_rest, seen=seen: seen.append(statement),
            )
            found = overview(desk.wiring, NOW + 2 * MINUTE)
            assert len(found) == number
            counts.append(len(seen))
    assert counts[0] == counts[1] > 5


def test_with_very_many_servers_nobody_waits_for_the_last_one(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "BUDGET", 0.0)
    with desk_of(short_tmp, GOLD, {f"db{one}": "gold" for one in range(5)}) as desk:
        for one in range(5):
            desk.backup(one, server=f"db{one}")
        found = overview(desk.wiring, NOW)
        assert all((one.looked_at, one.status) == (None, Status.WARNING) for one in found)
        assert found[0].reasons[0].text == "its state is not determined yet"
        deadline = time.monotonic() + 240
        while any(one.looked_at is None for one in overview(desk.wiring, desk.clock.now)):
            assert time.monotonic() < deadline
            desk.clock.now += timedelta(seconds=2)
            time.sleep(0.01)


def test_those_who_ask_at_once_share_one_look_until_something_is_written(
    streamed: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing, "SHARED", 240.0)
    made: list[datetime] = []
    real = standing.StatusCache.of

    def counted(
        self: standing.StatusCache,
        wiring: Wiring,
        names: Iterable[str],
        now: datetime,
        only: Collection[str] | None = None,
    ) -> dict[str, standing.ServerStatus]:
        made.append(now)
        return real(self, wiring, names, now, only)

    monkeypatch.setattr(standing.StatusCache, "of", counted)
    streamed.look()  # what it finds is written, too
    made.clear()
    threads = [threading.Thread(target=streamed.look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    streamed.catalog.holds.set("db1", HoldKind.HOLD, "now", "anna", NOW)
    found = streamed.look()
    assert found.held is not None, "what was written before the question is in the answer"
    assert len(made) == 2


def test_who_sees_some_servers_only_is_shown_no_others_and_costs_the_rest_nothing(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing, "SHARED", 240.0)
    with desk_of(short_tmp, GOLD, {"db1": "gold", "db2": "gold"}) as desk:
        overview(desk.wiring, NOW)  # what it finds is written, too
        everything = overview(desk.wiring, NOW)
        narrow = desk.wiring.of({"db2"})
        assert [one.name for one in overview(narrow, NOW)] == ["db2"]
        with pytest.raises(NotFoundError):
            overview(narrow, NOW, ["db1"])
        assert overview(desk.wiring, NOW) is everything, "one does not make the other forget"


def _incident(kind: str, *, number: int = 1, severity: Severity = Severity.ERROR, job: str = "") -> Incident:
    return Incident(
        f"20261121T12000{number}Z-00000001",
        kind,
        "db1",
        "",
        severity,
        "db1 is in trouble",
        "",
        "help it",
        NOW,
        NOW,
        job_id=job,
    )
