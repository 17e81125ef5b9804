"""A job's life in one process: what its row, its log and the events say afterwards."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from backupd.alerts.rules import Act, rule_of
from backupd.app.context import logging_setup as logs
from backupd.app.context.wiring import JobRun, Result, Wiring, owner, owner_state, user
from backupd.app.jobs import jobs
from backupd.app.jobs import jobs as pulse
from backupd.app.service import dispatch
from backupd.app.service.dispatch import live, run_here
from backupd.catalog.session import open_catalog
from backupd.model.errors import BackupdError, CancelledError, NotFoundError, RefusedError, ToolError
from backupd.model.event import Severity
from backupd.model.job import JobKind, JobRecord, JobState, Progress, silent
from backupd.model.proof import Phase
from backupd.model.text import new_id
from backupd.process.command import Command
from backupd.process.pipeline import run as run_program
from tests.support.service.house import GOLD, Clock, Office
from tests.support.stores.gate import until

NOW = datetime(2026, 11, 21, 4, 0, tzinfo=UTC)
HASH = "*2470C0C06DEE42FD1618BBB99005ADCA2EC9D1E1"
ROW = "INSERT INTO shop.customers VALUES (1,'Ada Lovelace','ada@example.com')"


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "BEAT", 0.02)


@pytest.fixture
def wiring(tmp_path: Path) -> Iterator[Wiring]:
    settings = Office(tmp_path).write(gold=GOLD + "retry: {attempts: 3, pause: 5m}\n")
    with open_catalog(settings.catalog) as catalog:
        yield Wiring(settings, catalog, Clock(NOW))


def rewrite(wiring: Wiring, extra: str) -> Wiring:
    return replace(wiring, settings=Office(wiring.settings.file.parent).write(gold=GOLD + extra))


def then(work: Callable[[JobRun], object], result: Result | None = None) -> Callable[[JobRun], Result]:
    """``work``, and ``result`` of it."""

    def done(run: JobRun) -> Result:
        return replace(result or Result(), outcome=work(run))

    return done


def no_sweep(job: JobRecord, _running: object) -> bool:
    return job.kind != JobKind.SWEEP


def do(wiring: Wiring, work: Callable[[JobRun], Any], **changes: Any) -> JobRecord:
    """Let a job of a schedule, claimed by this process, do ``work``; gives its row afterwards, whatever was raised."""
    record = JobRecord(
        id=new_id(wiring.clock()),
        kind=JobKind.FULL,
        server="db1",
        state=JobState.QUEUED,
        queued_at=wiring.clock(),
        leg="physical.full",
        due_at=NOW,
    )
    wiring.catalog.jobs.enqueue(replace(record, **changes))
    job = wiring.catalog.jobs.claim(owner(), wiring.clock(), runs_on=wiring.here, allowed=no_sweep)
    assert job is not None
    try:
        live(wiring, job, then(work), silent)
    except (BackupdError, KeyboardInterrupt, ZeroDivisionError):
        assert wiring.catalog.jobs.get(job.id).state is not JobState.SUCCEEDED
    return wiring.catalog.jobs.get(job.id)


def successor(wiring: Wiring, job: JobRecord) -> JobRecord | None:
    found = wiring.catalog.jobs.list(previous=job.id)
    assert len(found) <= 1
    return found[0] if found else None


def kinds(wiring: Wiring) -> list[str]:
    return [event.kind for event in reversed(wiring.catalog.events.list())]


def fails(error: BaseException) -> Callable[[JobRun], None]:
    def work(_run: JobRun) -> None:
        raise error

    return work


def waits(run: JobRun) -> None:
    """Work that reports once and then goes on until it is told to stop."""
    run.report(Progress("copy", 10, 100, 1, note="shop/orders.ibd"))
    assert run.cancel.wait(240)
    run.check()


# -- good ends


def test_a_good_run_is_recorded_with_its_bytes_phases_result_and_log(wiring: Wiring) -> None:
    def work(run: JobRun) -> int:
        run.report(Progress("copy", 5, 10))
        run.fence()
        run_program(Command(("sh", "-c", "echo copied everything >&2")), log=run.log)
        return 7

    done = run_here(
        wiring,
        JobKind.FULL,
        "db1",
        then(work, Result("b1", 7, (Phase("backup", 2.0, 7),))),
        report=silent,
        arguments={"x": 1},
    )
    assert done.outcome == 7
    (job,) = wiring.catalog.jobs.list("db1")
    assert (job.state, job.result, job.bytes, job.phases) == (JobState.SUCCEEDED, "b1", 7, (Phase("backup", 2.0, 7),))
    assert (job.arguments, job.requested_by, job.token) == ({"x": 1}, user(), 1)
    assert kinds(wiring) == []
    path = logs.log_path(wiring.settings, job.id)
    assert path == Path(wiring.settings.file.parent) / "jobs" / f"{job.id}.log"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    text = logs.read_log(wiring.settings, job.id)
    for words in ("job-started", "job-phase", "sh: copied everything", "job-succeeded"):
        assert words in text


def test_a_command_that_somebody_watches_and_that_is_refused_is_no_trouble_of_the_server(wiring: Wiring) -> None:
    def work(_run: JobRun) -> None:
        raise RefusedError("tables would be replaced, and nobody confirmed that", hint="repeat with --confirm db1")

    with pytest.raises(RefusedError, match="nobody confirmed"):
        run_here(wiring, JobKind.RESTORE, "db1", then(work), report=silent)
    (job,) = wiring.catalog.jobs.list("db1")
    assert (job.state, job.message) == (JobState.CANCELLED, "tables would be replaced, and nobody confirmed that")
    (event,) = wiring.catalog.events.list(server="db1")
    assert rule_of(event).act is Act.SILENT
    with pytest.raises(RefusedError):  # a backup that is refused is one: nobody may read what cron runs
        run_here(wiring, JobKind.FULL, "db1", then(work), report=silent)
    assert rule_of(wiring.catalog.events.list(server="db1")[0]).act is Act.OPENS


def test_progress_reaches_the_row_with_an_estimate_of_what_is_left(wiring: Wiring) -> None:
    earlier = do(wiring, lambda _run: None)
    assert earlier.state is JobState.SUCCEEDED
    wiring.catalog.jobs.add(replace(earlier, id="fast", state=JobState.RUNNING, finished_at=None, token=1))
    wiring.catalog.jobs.finish("fast", JobState.SUCCEEDED, NOW, token=1, phases=[Phase("backup", 1.0, 30)])
    seen: list[Any] = []

    def work(run: JobRun) -> None:
        run.report(Progress("copy", 10, 100, 3, 7, note=f"shop/x.ibd {HASH}"))
        until(lambda: wiring.catalog.jobs.get(run.job.id).progress is not None)
        seen.append(wiring.catalog.jobs.get(run.job.id).progress)

    do(wiring, work)
    assert seen[0] == {
        "phase": "copy",
        "bytes": 10,
        "bytes_total": 100,
        "files": 3,
        "files_total": 7,
        "note": "shop/x.ibd [hidden]",
        "seconds_left": 3.0,
    }


def test_retention_follows_a_good_backup_once_and_never_a_failed_one(wiring: Wiring) -> None:
    wiring = rewrite(wiring, "retention: {local: {keep_fulls: 2}}\n")
    do(wiring, fails(RefusedError("no")))
    assert wiring.catalog.jobs.list(kind=JobKind.RETENTION) == ()
    for _ in range(2):
        job = JobRecord(
            id=new_id(NOW), kind=JobKind.FULL, server="db1", state=JobState.RUNNING, queued_at=NOW, owner=owner()
        )
        wiring.catalog.jobs.add(job)
        live(wiring, job, lambda _run: Result(), silent)
    (follows,) = wiring.catalog.jobs.list(kind=JobKind.RETENTION)
    assert (follows.server, follows.state, follows.leg) == ("db1", JobState.QUEUED, "retention")


# -- bad ends


def test_a_failure_is_told_without_secrets_and_rows_of_tables(wiring: Wiring) -> None:
    def work(run: JobRun) -> None:
        script = f'echo "GRANT USAGE ON *.* TO a@b IDENTIFIED BY PASSWORD \'{HASH}\'" >&2; echo "$0" >&2; exit 3'
        run_program(Command(("sh", "-c", script, ROW)), log=run.log)

    job = do(wiring, work)
    assert job.state is JobState.FAILED
    assert "sh exited with 3" in job.message
    (event,) = wiring.catalog.events.list()
    assert (event.kind, event.server, event.subject, event.job_id) == ("job-failed", "db1", "physical.full", job.id)
    assert event.message == job.message
    everything = json.dumps([job.as_json(), event.as_json()]) + logs.read_log(wiring.settings, job.id)
    assert "GRANT USAGE" in everything
    for secret in (HASH[1:], "Lovelace", "ada@example.com"):
        assert secret not in everything


def test_an_error_of_ours_that_quotes_a_secret_is_redacted_too(wiring: Wiring) -> None:
    job = do(wiring, fails(ToolError(f"it said {ROW}", detail=f"a\n{ROW}\n{HASH}", hint="password=hunter2")))
    everything = json.dumps(job.as_json()) + logs.read_log(wiring.settings, job.id)
    for secret in (HASH[1:], "Lovelace", "hunter2"):
        assert secret not in everything


def test_an_unforeseen_error_is_one_sentence_and_its_traceback_is_in_the_log(wiring: Wiring) -> None:
    job = do(wiring, lambda _run: 1 // 0)
    assert (job.state, job.message) == (
        JobState.FAILED,
        "internal error: ZeroDivisionError: integer division or modulo by zero",
    )
    assert job.id in job.hint
    assert "Traceback" in logs.read_log(wiring.settings, job.id)
    assert "Traceback" not in json.dumps(job.as_json())


def test_work_that_found_something_bad_failed_with_its_result(wiring: Wiring) -> None:
    problem = BackupdError("it does not restore", detail="table x differs")
    done = run_here(
        wiring,
        JobKind.TEST_RESTORE,
        "db1",
        lambda _run: Result("proof-1", problem=problem),
        report=silent,
    )
    assert done.id == "proof-1"
    (job,) = wiring.catalog.jobs.list()
    assert (job.state, job.result, job.message) == (JobState.FAILED, "proof-1", "it does not restore")
    assert kinds(wiring) == ["job-failed"]


KEPT = "retry: {attempts: 3, pause: 5m}\nretention: {local: {daily: 7}}\n"


def _partial(wiring: Wiring, *, accepted: bool) -> JobRecord:
    problem = BackupdError("1 of 10 tables could not be dumped", detail="shop.notes: it is marked as crashed")
    job = JobRecord(
        id=new_id(wiring.clock()),
        kind=JobKind.LOGICAL,
        server="db1",
        state=JobState.QUEUED,
        queued_at=wiring.clock(),
        leg="logical/money",
        due_at=NOW,
        arguments={"set": "money"},
    )
    wiring.catalog.jobs.enqueue(job)
    claimed = wiring.catalog.jobs.claim(owner(), wiring.clock(), runs_on=wiring.here)
    assert claimed is not None
    live(
        wiring,
        claimed,
        lambda _run: Result("backup-1", problem=problem, partial=True, accepted=accepted),
        silent,
    )
    return wiring.catalog.jobs.get(job.id)


def test_a_backup_with_tables_missing_is_partial_tried_again_and_followed_by_retention(wiring: Wiring) -> None:
    wiring = rewrite(wiring, KEPT)
    job = _partial(wiring, accepted=False)
    assert (job.state, job.result, job.message) == (JobState.PARTIAL, "backup-1", "1 of 10 tables could not be dumped")
    again = successor(wiring, job)
    assert again is not None
    assert (again.leg, again.arguments, again.attempt) == ("logical/money", {"set": "money"}, 2)
    assert [one.kind for one in wiring.catalog.jobs.list(kind=JobKind.RETENTION)] == [JobKind.RETENTION]
    event = wiring.catalog.events.list()[0]
    assert (event.kind, event.severity, event.subject) == ("job-partial", Severity.ERROR, "logical/money")


def test_a_partial_backup_that_the_policy_accepts_is_a_warning_and_not_tried_again(wiring: Wiring) -> None:
    wiring = rewrite(wiring, KEPT)
    job = _partial(wiring, accepted=True)
    assert job.state is JobState.PARTIAL
    assert successor(wiring, job) is None
    assert [one.kind for one in wiring.catalog.jobs.list(kind=JobKind.RETENTION)] == [JobKind.RETENTION]
    assert wiring.catalog.events.list()[0].severity is Severity.WARNING


def test_a_failure_that_may_pass_is_tried_again_with_growing_pauses(wiring: Wiring) -> None:
    job = do(wiring, fails(ToolError("the network went away")), arguments={"n": 1})
    for attempt, pause in ((2, 5), (3, 10)):
        again = successor(wiring, job)
        assert again is not None
        assert (again.state, again.attempt, again.previous) == (JobState.QUEUED, attempt, job.id)
        assert (again.kind, again.leg, again.due_at, again.arguments) == (job.kind, job.leg, job.due_at, {"n": 1})
        assert again.not_before == wiring.clock() + timedelta(minutes=pause)
        assert wiring.catalog.jobs.claim("me", wiring.clock(), runs_on=wiring.here, allowed=no_sweep) is None
        later = replace(wiring, clock=Clock(again.not_before))
        wiring = later
        claimed = wiring.catalog.jobs.claim(owner(), wiring.clock(), runs_on=wiring.here, allowed=no_sweep)
        assert claimed is not None
        with pytest.raises(ToolError):
            live(wiring, claimed, then(fails(ToolError("again"))), silent)
        job = claimed
    assert successor(wiring, job) is None


@pytest.mark.parametrize(
    ("error", "changes"),
    [(RefusedError("a rule"), {}), (ToolError("x"), {"leg": "", "requested_by": "ops"}), (KeyboardInterrupt(), {})],
    ids=["not retryable", "asked for by a person", "stopped"],
)
def test_what_a_second_try_would_not_mend_or_nobody_asked_for_is_not_tried_again(
    wiring: Wiring, error: BaseException, changes: dict[str, Any]
) -> None:
    assert successor(wiring, do(wiring, fails(error), **changes)) is None


def test_a_person_may_ask_for_tries(wiring: Wiring) -> None:
    again = successor(wiring, do(wiring, fails(ToolError("x")), leg="", arguments={"retry": True}))
    assert again is not None


# -- being stopped


def test_a_cancelled_job_is_cancelled_and_says_by_whom(wiring: Wiring) -> None:
    def work(run: JobRun) -> None:
        jobs.cancel(wiring, run.job.id, "ops")
        waits(run)

    job = do(wiring, work)
    assert (job.state, job.message) == (JobState.CANCELLED, f"job {job.id} was cancelled by ops")
    assert kinds(wiring) == ["job-cancelled"]


def test_ctrl_c_is_cancelled_never_failed(wiring: Wiring) -> None:
    job = do(wiring, fails(KeyboardInterrupt()))
    assert (job.state, job.message) == (JobState.CANCELLED, "stopped by SIGINT")


def test_a_cancellation_that_nobody_asked_for_is_a_failure_and_tried_again(wiring: Wiring) -> None:
    job = do(wiring, fails(CancelledError("the lease was removed by another process")))
    assert job.state is JobState.FAILED
    assert successor(wiring, job) is not None


def test_a_run_without_progress_is_stopped_and_failed(wiring: Wiring) -> None:
    wiring = rewrite(wiring, "limits: {hang: 1s}\n")
    job = do(wiring, waits)
    assert job.state is JobState.FAILED
    assert "no progress" in job.message
    assert "copy" in job.message
    assert "shop/orders.ibd" in job.detail
    assert kinds(wiring) == ["job-hanging", "job-failed"]
    assert successor(wiring, job) is not None


def test_a_slow_run_that_makes_progress_is_not_hanging(wiring: Wiring) -> None:
    wiring = rewrite(wiring, "limits: {hang: 1s}\n")

    def work(run: JobRun) -> None:
        for number in range(30):
            run.report(Progress("copy", number))
            assert not run.cancel.wait(0.05)

    assert do(wiring, work).state is JobState.SUCCEEDED


def test_a_run_that_waits_and_no_longer_looks_is_hanging(wiring: Wiring) -> None:
    wiring = rewrite(wiring, "limits: {hang: 50ms}\n")

    def work(run: JobRun) -> None:
        run.report(Progress("thaw", note="binary logs", waits=True))
        assert run.cancel.wait(240)
        run.check()

    assert "no progress" in do(wiring, work).message


def test_a_run_that_cannot_report_is_not_taken_for_hanging(wiring: Wiring) -> None:
    wiring = rewrite(wiring, "limits: {hang: 50ms}\n")
    assert do(wiring, lambda run: run.cancel.wait(0.3), kind=JobKind.RETENTION).state is JobState.SUCCEEDED


def test_a_signal_after_the_last_step_does_not_cancel_what_was_committed(
    wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = pulse.Pulse.__exit__

    def interrupted(self: pulse.Pulse, *error: Any) -> None:
        leave(self, *error)
        raise KeyboardInterrupt

    monkeypatch.setattr(pulse.Pulse, "__exit__", interrupted)
    assert do(wiring, lambda _run: None).state is JobState.SUCCEEDED


def test_a_policy_s_priority_holds_for_the_job_s_process(wiring: Wiring) -> None:
    wanted = min(os.getpriority(os.PRIO_PROCESS, 0) + 3, 19)  # it can only be lowered, and may be low already
    wiring = rewrite(wiring, f"limits: {{nice: {wanted}}}\n")
    child = os.fork()
    if child == 0:
        try:
            dispatch._yield_to_others(wiring.settings.server("db1").policy.limits.nice)
            os._exit(os.getpriority(os.PRIO_PROCESS, 0))
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == wanted


def test_who_lost_the_job_is_stopped_at_the_fence_and_says_nothing_of_it_any_more(wiring: Wiring) -> None:
    fenced = []

    def work(run: JobRun) -> None:
        wiring.catalog.jobs.finish(run.job.id, JobState.ABANDONED, NOW, token=run.job.token)
        try:
            run.fence()
        except RefusedError as error:
            fenced.append(error.message)
            raise

    job = do(wiring, work)
    assert "no longer" in fenced[0]
    assert job.state is JobState.ABANDONED
    assert successor(wiring, job) is None


def test_who_lost_the_job_hears_it_at_the_next_heartbeat(wiring: Wiring) -> None:
    def work(run: JobRun) -> None:
        wiring.catalog.jobs.adopt(run.job.id, run.job.token, "somebody else", NOW)
        waits(run)

    job = do(wiring, work)
    assert (job.state, job.owner) == (JobState.RUNNING, "somebody else")


# -- troubles around


def test_a_catalog_that_is_locked_for_seconds_costs_no_job(wiring: Wiring) -> None:
    locked, over = threading.Event(), threading.Event()

    def lock() -> None:
        other = sqlite3.connect(wiring.catalog.name, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        locked.set()
        over.wait(6)  # longer than sqlite3 waits when it is not told to
        other.execute("ROLLBACK")
        other.close()

    thread = threading.Thread(target=lock)

    def work(run: JobRun) -> None:
        thread.start()
        assert locked.wait(240)
        run.report(Progress("copy", 1))
        run.fence()

    try:
        assert do(wiring, work).state is JobState.SUCCEEDED
    finally:
        over.set()
        thread.join()


def test_a_full_disk_under_the_logs_costs_no_job(wiring: Wiring) -> None:
    folder = logs.log_folder(wiring.settings)
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)], check=True)
    try:

        def work(run: JobRun) -> None:
            assert run.log is not None
            run_program(Command(("sh", "-c", "yes 'a line of the tool' | head -5000 >&2")), log=run.log)
            for number in range(500):
                run.report(Progress(f"phase {number}"))

        job = do(wiring, work)
        assert job.state is JobState.SUCCEEDED, job
        assert "a line of the tool" in logs.read_log(wiring.settings, job.id)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_log_that_cannot_be_made_costs_no_job(wiring: Wiring) -> None:
    logs.log_folder(wiring.settings).write_text("a file where the folder should be")
    seen: list[Path | None] = []
    assert do(wiring, lambda run: seen.append(run.log)).state is JobState.SUCCEEDED
    assert seen == [None]
    with pytest.raises(BackupdError, match="cannot be read"):
        logs.read_log(wiring.settings, wiring.catalog.jobs.list()[0].id)


def test_a_clock_that_jumps_neither_abandons_nor_breaks_a_job(wiring: Wiring) -> None:
    clock = wiring.clock
    assert isinstance(clock, Clock)

    def work(run: JobRun) -> None:
        for jump in (timedelta(hours=5), timedelta(hours=-9)):
            clock.now += jump
            assert jobs.abandon_dead(wiring) == ()
            run.fence()

    job = do(wiring, work)
    assert job.state is JobState.SUCCEEDED
    assert job.finished_at is not None
    assert job.started_at is not None
    assert job.finished_at < job.started_at


# -- the dead


def test_a_dead_process_is_told_and_its_scheduled_job_is_tried_again(wiring: Wiring) -> None:
    dead = subprocess.Popen(["sleep", "100"])
    ticks = Path(f"/proc/{dead.pid}/stat").read_text().rpartition(")")[2].split()[19]
    whose = " ".join([*owner().split(" ")[:3], str(dead.pid), ticks])
    assert owner_state(whose) is True
    job = JobRecord(
        id=new_id(NOW),
        kind=JobKind.FULL,
        server="db1",
        state=JobState.RUNNING,
        queued_at=NOW,
        started_at=NOW,
        owner=whose,
        token=1,
        leg="physical.full",
    )
    wiring.catalog.jobs.add(job)
    assert jobs.abandon_dead(wiring) == ()
    dead.kill()
    until(lambda: not owner_state(whose))  # the kernel has ended it; nobody has reaped it yet
    assert [one.id for one in jobs.abandon_dead(wiring)] == [job.id]
    dead.wait()
    assert kinds(wiring) == ["job-abandoned"]
    again = successor(wiring, job)
    assert again is not None
    assert again.attempt == 2


def test_an_owner_that_cannot_be_seen_from_here_is_neither_dead_nor_alive() -> None:
    host, boot, namespace, pid, ticks = owner().split(" ")
    assert owner_state(owner()) is True
    assert owner_state(f"{host} {boot} {pid} {ticks}") is True, "as the first version wrote it"
    assert owner_state(f"elsewhere {boot} {namespace} {pid} {ticks}") is None
    assert owner_state(f"{host} {boot} pid:[1] {pid} {ticks}") is None
    assert owner_state(f"{host} another-boot {namespace} {pid} {ticks}") is False
    assert owner_state(f"{host} {boot} {namespace} {pid} 1") is False
    assert owner_state("") is False


def test_jobs_that_were_over_long_ago_go_with_their_logs(wiring: Wiring) -> None:
    old = do(wiring, lambda _run: None)
    new = do(wiring, lambda _run: None)
    wiring = replace(wiring, clock=Clock(NOW + jobs.KEPT + timedelta(days=1)))
    assert jobs.prune(wiring) == (min(old.id, new.id),)
    (left,) = wiring.catalog.jobs.list("db1")
    assert logs.read_log(wiring.settings, left.id)
    assert [path.stem for path in logs.log_folder(wiring.settings).iterdir()] == [left.id]


@pytest.mark.parametrize("name", ["../../etc/passwd", "20261121T040000Z-7f3a9c01/../x", ""])
def test_only_ids_of_jobs_name_logs(wiring: Wiring, name: str) -> None:
    with pytest.raises(NotFoundError):
        logs.read_log(wiring.settings, name)
