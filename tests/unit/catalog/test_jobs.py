"""The queue of jobs and its leases, on both databases."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from random import Random

import psycopg
import pytest
from sqlalchemy import event

from backupd.catalog.database import Database
from backupd.catalog.jobs import FRESH
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.errors import CatalogError, NotFoundError, RefusedError, ToolError
from backupd.model.event import Event, Severity
from backupd.model.job import FIRST_STATES, JOB_MOVES, Bar, JobKind, JobRecord, JobState
from backupd.model.proof import Phase
from backupd.process.run_context import utc_now
from tests.support.catalog import samples
from tests.support.catalog.postgresql import PostgreSQL
from tests.support.catalog.samples import NOON
from tests.support.dice import rounds, thrown

LATER = NOON + timedelta(hours=1)


def queued(number: int = 1, **changes: object) -> JobRecord:
    moment = NOON + timedelta(minutes=number)
    record = JobRecord(
        id=f"job-{number:04}", kind=JobKind.FULL, server="shop-db1", state=JobState.QUEUED, queued_at=moment
    )
    return replace(record, **changes)  # type: ignore[arg-type]  # any field


def test_a_job_comes_back_exactly_as_it_was_recorded(catalog: Catalog) -> None:
    record = queued(
        due_at=NOON,
        not_before=LATER,
        attempt=2,
        previous="job-0",
        leg="physical.full",
        requested_by="ops",
        arguments={"target": "latest", "n": [1, None]},
    )
    catalog.jobs.enqueue(record)
    assert catalog.jobs.get(record.id) == record
    assert catalog.jobs.get(record.id).progress is None


def test_a_job_ends_once(catalog: Catalog) -> None:
    catalog.jobs.add(samples.job())
    with pytest.raises(RefusedError, match="already"):
        catalog.jobs.add(samples.job())
    error = ToolError("gpg exited with 2", detail="no room", hint="make room")
    ended = catalog.jobs.finish(
        "job-1",
        JobState.FAILED,
        NOON,
        token=1,
        error=error,
        bytes=7_000_000_000,
        result="b1",
        phases=[Phase("copy", 1.23456, 10)],
    )
    assert ended == catalog.jobs.get("job-1")
    assert (ended.message, ended.detail, ended.hint) == ("gpg exited with 2", "no room", "make room")
    assert (ended.bytes, ended.result, ended.phases) == (7_000_000_000, "b1", (Phase("copy", 1.23456, 10),))
    with pytest.raises(RefusedError, match="job job-1 is failed"):
        catalog.jobs.finish("job-1", JobState.SUCCEEDED, NOON, token=1)


def test_the_oldest_job_whose_time_has_come_and_that_may_start_is_claimed(catalog: Catalog) -> None:
    for record in (queued(3), queued(2, server="other"), queued(1, not_before=LATER)):
        catalog.jobs.enqueue(record)
    seen: list[tuple[str, int]] = []

    def allowed(job: JobRecord, running: object) -> bool:
        seen.append((job.id, len(list(running))))  # type: ignore[call-overload]  # a sequence
        return job.server == "shop-db1"

    claimed = catalog.jobs.claim("me", NOON, allowed=allowed)
    assert claimed is not None
    assert (claimed.id, claimed.state, claimed.owner, claimed.token) == ("job-0003", JobState.RUNNING, "me", 1)
    assert claimed.started_at == NOON
    assert_beat(catalog, claimed, NOON)
    assert catalog.jobs.claim("me", NOON, allowed=allowed) is None
    assert seen == [("job-0002", 0), ("job-0003", 0), ("job-0002", 1)]
    late = catalog.jobs.claim("me", LATER, allowed=allowed)
    assert late is not None
    assert late.id == "job-0001"


def test_a_job_for_a_host_that_the_catalog_does_not_know_is_refused(catalog: Catalog) -> None:
    with pytest.raises(RefusedError, match="host a, which this catalog does not know") as refused:
        catalog.jobs.enqueue(queued(1, runs_on="host:a"))
    assert "backupd serve" in refused.value.hint
    assert catalog.jobs.list() == ()
    catalog.hosts.join("a", "0" * 32, NOON, named=True)
    catalog.jobs.enqueue(queued(1, runs_on="host:a"))
    assert [job.id for job in catalog.jobs.list()] == ["job-0001"]


def test_only_jobs_of_its_host_are_claimed(catalog: Catalog) -> None:
    for number, host in enumerate(("host:b", "", "host:a")):
        catalog.jobs.add(queued(number, runs_on=host))
    claimed = [catalog.jobs.claim("me", LATER, runs_on="host:a") for _ in range(2)]
    # One of before hosts had names is whoever's comes first.
    assert [(one.id, one.runs_on) for one in claimed if one] == [("job-0001", "host:a"), ("job-0002", "host:a")]
    assert catalog.jobs.claim("me", LATER, runs_on="host:a") is None
    assert catalog.jobs.claim("me", LATER, runs_on="host:c") is None


@pytest.mark.parametrize(
    ("bar", "left"),
    [
        (Bar(kinds={"verify"}), ["s1", "s3", "s4", "s5"]),
        (Bar(but={"verify", "replicate"}), ["s2", "s4", "s5"]),
        (Bar(servers={"s1", "s5"}), ["s2", "s3", "s4"]),
        (Bar(servers={"s1", "s2"}, but={"verify"}), ["s2", "s3", "s4", "s5"]),
        (Bar(scheduled=True), ["s1", "s2", "s4", "s5"]),
        (Bar(scheduled=True, servers={"s1"}), ["s1", "s2", "s3", "s4", "s5"]),
        (Bar(kinds={"replicate"}, destinations={"far", "off"}), ["s1", "s2", "s3", "s5"]),
    ],
)
def test_what_is_barred_is_passed_over_unseen(catalog: Catalog, bar: Bar, left: list[str]) -> None:
    for job in (
        queued(1, server="s1"),
        queued(2, server="s2", kind=JobKind.VERIFY),
        queued(3, server="s3", leg="full"),
        queued(4, server="s4", kind=JobKind.REPLICATE, arguments={"destination": "off"}),
        queued(5, server="s5", kind=JobKind.REPLICATE, arguments={"destination": "near"}),
    ):
        catalog.jobs.enqueue(job)
    seen: list[str] = []

    def allowed(job: JobRecord, _running: object) -> bool:
        seen.append(job.server)
        return False

    assert catalog.jobs.claim("me", LATER, allowed=allowed, bars=lambda _running: [bar]) is None
    assert seen == left


def test_a_long_queue_is_read_as_far_as_the_first_job_that_may_start(catalog: Catalog) -> None:
    for number in range(120):
        catalog.jobs.enqueue(queued(number, queued_at=NOON, server=f"s{number % 3}"))
    seen: list[str] = []

    def allowed(job: JobRecord, _running: object) -> bool:
        seen.append(job.id)
        return job.id == "job-0110"

    claimed = catalog.jobs.claim("me", LATER, allowed=allowed)
    assert claimed is not None
    assert claimed.id == "job-0110"
    assert seen == [f"job-{number:04}" for number in range(111)]  # each once, none left out, over several reads


def test_a_claim_and_an_end_ask_the_same_few_statements_however_many_servers_are_barred(url: str) -> None:
    """Each database's driver keeps statements that it was given: one for each number of servers would fill memory."""
    asked: list[str] = []
    with open_catalog(url) as catalog:
        for number in range(40):
            catalog.jobs.enqueue(queued(number, server=f"s{number}"))
        event.listen(catalog.database.engine, "before_cursor_execute", lambda *given: asked.append(given[2]))
        most, ends = [], []
        for number in range(30):
            bars = [Bar(servers=[f"s{one}" for one in range(number)], but=[JobKind.RESTORE])]
            asked.clear()
            job = catalog.jobs.claim("me", LATER, bars=partial(_given, bars))
            assert job is not None
            assert job.server == f"s{number}"
            most.append(tuple(asked))
            asked.clear()
            catalog.jobs.finish(job.id, JobState.SUCCEEDED, LATER, token=job.token)
            ends.append(tuple(asked))
    turn = [] if url.startswith("sqlite") else ["SELECT pg_advisory_xact_lock"]
    begin = ["BEGIN IMMEDIATE"] if url.startswith("sqlite") else []
    assert len({*most}) == len({*ends}) == 1
    wanted = [*begin, *turn, "SELECT", "SELECT", "UPDATE"]
    assert [one[: len(first)] for one, first in zip(most[0], wanted, strict=True)] == wanted
    assert len(ends[0]) == len(begin) + 1


def _given(bars: list[Bar], _running: object) -> list[Bar]:
    return bars


def test_threads_that_claim_at_once_never_get_the_same_job_nor_pass_a_limit(url: str) -> None:
    with open_catalog(url) as catalog:
        for number in range(30):
            catalog.jobs.enqueue(queued(number, server=f"s{number % 5}"))
        start = threading.Barrier(6)
        most = []

        def work(name: int) -> list[str]:
            start.wait()
            mine: list[str] = []
            while True:
                job = catalog.jobs.claim(
                    f"owner-{name}", NOON, allowed=lambda one, running: all(one.server != r.server for r in running)
                )
                if job is None:
                    if not catalog.jobs.list(state=JobState.QUEUED):
                        return mine
                    continue
                most.append(len([r for r in catalog.jobs.list(state=JobState.RUNNING) if r.server == job.server]))
                mine.append(job.id)
                catalog.jobs.finish(job.id, JobState.SUCCEEDED, NOON, token=job.token)

        with ThreadPoolExecutor(6) as pool:
            claimed = [name for names in pool.map(work, range(6)) for name in names]
        assert sorted(claimed) == [f"job-{number:04}" for number in range(30)]
        assert set(most) == {1}


_CLAIMER = """
import sys
from datetime import datetime
from backupd.catalog.session import open_catalog
with open_catalog(sys.argv[1]) as catalog:
    print("ready", flush=True)
    sys.stdin.readline()
    while (job := catalog.jobs.claim(sys.argv[2], datetime.fromisoformat(sys.argv[3]))) is not None:
        print(job.id, job.owner, job.token, flush=True)
"""


def test_two_processes_never_claim_the_same_job(url: str) -> None:
    with open_catalog(url) as catalog:
        for number in range(60):
            catalog.jobs.enqueue(queued(number))
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _CLAIMER, url, name, LATER.isoformat()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    lines = [line.split() for process in processes for line in process.communicate(timeout=600)[0].splitlines()]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(line[0] for line in lines) == [f"job-{number:04}" for number in range(60)]
    with open_catalog(url) as catalog:
        assert {(job.id, job.owner) for job in catalog.jobs.list()} == {(line[0], line[1]) for line in lines}


_QUEUER = """
import sys
from dataclasses import replace
from datetime import datetime
from backupd.catalog.session import open_catalog
from backupd.model.job import JobKind, JobRecord, JobState
url, job_id, ending, now = sys.argv[1], sys.argv[2], sys.argv[3], datetime.fromisoformat(sys.argv[4])
sweep = JobRecord(job_id, JobKind.SWEEP, "", JobState.QUEUED, queued_at=now, arguments={"destination": "local"})
sweep = replace(sweep, leg="sweep/local", runs_on="host:a")
with open_catalog(url) as catalog:
    if ending:
        catalog.jobs.finish(ending, JobState.SUCCEEDED, now, token=1, then=[sweep])
    else:
        catalog.jobs.add(sweep)
"""
_HOLDING = """
CREATE FUNCTION held() RETURNS trigger LANGUAGE plpgsql AS
  $$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NEW; END $$;
CREATE TRIGGER held BEFORE INSERT ON jobs FOR EACH ROW EXECUTE FUNCTION held();
"""
"""From then on no row comes into the table while somebody holds the advisory lock 1."""


def test_two_processes_that_queue_the_sweep_of_one_destination_at_once_leave_one_waiting(
    postgresql: PostgreSQL,
) -> None:
    url = postgresql.create("sweeps")
    with open_catalog(url) as catalog:
        catalog.jobs.add(queued(kind=JobKind.RETENTION, state=JobState.RUNNING, owner="me", token=1))
    with psycopg.connect(url, autocommit=True) as holder, psycopg.connect(url, autocommit=True) as watcher:
        holder.execute(_HOLDING)
        with holder.transaction():
            holder.execute("SELECT pg_advisory_xact_lock(1)")
            processes = [
                subprocess.Popen([sys.executable, "-W", "error", "-c", _QUEUER, url, name, ending, NOON.isoformat()])
                for name, ending in (("sweep-1", ""), ("sweep-2", "job-0001"))
            ]
            while _blocked(watcher) < 2:  # both have seen that none waits, or one waits for what the other sees
                assert [process.poll() for process in processes] == [None, None]
                time.sleep(0.02)
    assert [process.wait(600) for process in processes] == [0, 0]
    with open_catalog(url) as catalog:
        (sweep,) = catalog.jobs.list(kind=JobKind.SWEEP)
        assert (sweep.state, sweep.leg) == (JobState.QUEUED, "sweep/local")
        assert catalog.jobs.get("job-0001").state is JobState.SUCCEEDED


def _blocked(watcher: psycopg.Connection[tuple[int]]) -> int:
    asked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    row = watcher.execute(asked).fetchone()
    assert row is not None
    return row[0]


def test_a_claim_waits_for_no_job_that_somebody_else_changes_in_that_moment(postgresql: PostgreSQL) -> None:
    url = postgresql.create("claims")
    with open_catalog(url) as catalog, psycopg.connect(url) as canceller:
        for number in (1, 2):
            catalog.jobs.enqueue(queued(number))
        oldest = "job-0002"
        canceller.execute("UPDATE jobs SET state = 'cancelled' WHERE id = %s", (oldest,))
        claimed = catalog.jobs.claim("me", LATER)
        assert claimed is not None
        assert claimed.id == "job-0001"
        canceller.rollback()
        then = catalog.jobs.claim("me", LATER)
        assert then is not None
        assert then.id == oldest


def test_only_the_newest_token_may_say_anything(catalog: Catalog) -> None:
    catalog.jobs.enqueue(queued())
    claimed = catalog.jobs.claim("worker", NOON)
    assert claimed is not None
    mine = catalog.jobs.adopt(claimed.id, claimed.token, "child", NOON)
    assert (mine.owner, mine.token) == ("child", claimed.token + 1)
    for stale in (
        lambda: catalog.jobs.adopt(mine.id, claimed.token, "second child", NOON),
        lambda: catalog.jobs.heartbeat(mine.id, claimed.token, LATER),
        lambda: catalog.jobs.assert_held(mine.id, claimed.token),
        lambda: catalog.jobs.finish(mine.id, JobState.SUCCEEDED, LATER, token=claimed.token),
    ):
        with pytest.raises(RefusedError, match="taken over"):
            stale()
    assert catalog.jobs.get(mine.id) == mine
    assert catalog.jobs.heartbeat(mine.id, mine.token, LATER, {"phase": "copy", "bytes": 7}) == ""
    beaten = catalog.jobs.get(mine.id)
    assert beaten.progress == {"phase": "copy", "bytes": 7}
    assert_beat(catalog, beaten, LATER)
    catalog.jobs.assert_held(mine.id, mine.token)
    catalog.jobs.finish(mine.id, JobState.ABANDONED, LATER, token=mine.token)
    for late in (
        lambda: catalog.jobs.heartbeat(mine.id, mine.token, LATER),
        lambda: catalog.jobs.assert_held(mine.id, mine.token),
        lambda: catalog.jobs.finish(mine.id, JobState.SUCCEEDED, LATER, token=mine.token),
    ):
        with pytest.raises(RefusedError, match="abandoned"):
            late()


def test_cancelling_ends_what_waits_and_asks_what_runs(catalog: Catalog) -> None:
    catalog.jobs.enqueue(queued(1))
    catalog.jobs.add(samples.job(2))
    waiting = catalog.jobs.request_cancel("job-0001", "ops", NOON)
    assert (waiting.state, waiting.finished_at, waiting.cancel_by) == (JobState.CANCELLED, NOON, "ops")
    assert "ops" in waiting.message
    assert catalog.jobs.claim("me", LATER) is None
    assert catalog.jobs.request_cancel("job-2", "ops", NOON).state is JobState.RUNNING
    assert catalog.jobs.request_cancel("job-2", "somebody else", NOON).cancel_by == "ops"
    assert catalog.jobs.heartbeat("job-2", 1, NOON) == "ops"
    catalog.jobs.finish("job-2", JobState.CANCELLED, NOON, token=1)
    for name in ("job-0001", "job-2"):
        with pytest.raises(RefusedError, match="it cannot be cancelled"):
            catalog.jobs.request_cancel(name, "ops", NOON)
    with pytest.raises(NotFoundError):
        catalog.jobs.request_cancel("nix", "ops", NOON)


def test_jobs_of_dead_processes_are_found(catalog: Catalog) -> None:
    catalog.jobs.add(samples.job(1, owner="dead"))
    catalog.jobs.add(samples.job(2, owner="alive"))
    catalog.jobs.enqueue(queued(3))
    assert [job.id for job in catalog.jobs.dead(lambda owner: owner == "alive", NOON)] == ["job-1"]


def assert_beat(catalog: Catalog, job: JobRecord, now: datetime) -> None:
    """Its last sign of life is of ``now``: of the caller's in a file, else of the server's, which is today."""
    assert job.heartbeat_at is not None
    expected = utc_now() if catalog.name.startswith("postgresql") else now
    assert abs(job.heartbeat_at - expected) < timedelta(minutes=5)


def test_a_host_whose_clock_is_wrong_neither_kills_nor_saves_the_jobs_of_another(catalog: Catalog) -> None:
    now = utc_now()
    catalog.jobs.add(samples.job(1, owner="elsewhere"))
    catalog.jobs.heartbeat("job-1", 1, now - timedelta(hours=3))
    late = catalog.jobs.dead(lambda _owner: None, now + timedelta(hours=3))
    # A file is one machine's, and so is its clock.
    assert [job.id for job in late] == ([] if catalog.name.startswith("postgresql") else ["job-1"])


def test_a_job_of_another_host_lives_by_its_heartbeat(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Database, "clock", lambda _self, _connection, now: now)  # a fake clock
    monkeypatch.setattr(Database, "stamp", lambda _self, now: now)
    catalog.jobs.add(samples.job(1, owner="elsewhere"))
    catalog.jobs.heartbeat("job-1", 1, LATER)

    def dead(now: datetime, alive: bool | None = None) -> list[str]:
        return [job.id for job in catalog.jobs.dead(lambda _owner: alive, now)]

    assert dead(LATER + FRESH - timedelta(seconds=1)) == []
    assert dead(LATER + FRESH) == ["job-1"]
    # However old its heartbeat is, a process that can be seen to live is not dead.
    assert dead(LATER + timedelta(days=9), alive=True) == []


def test_an_end_is_recorded_with_its_events_and_followers_or_not_at_all(catalog: Catalog) -> None:
    catalog.jobs.add(samples.job(1))
    event = Event(NOON, "job-failed", Severity.ERROR, "no", job_id="job-1")
    with pytest.raises(RefusedError):
        catalog.jobs.finish("job-1", JobState.FAILED, NOON, token=9, then=[queued(2)], events=[event])
    with pytest.raises(CatalogError):
        catalog.jobs.finish("job-1", JobState.FAILED, NOON, token=1, then=[queued(2), queued(2)], events=[event])
    assert [job.state for job in catalog.jobs.list()] == [JobState.RUNNING]
    assert catalog.events.list() == ()
    catalog.jobs.finish("job-1", JobState.FAILED, NOON, token=1, then=[queued(2)], events=[event])
    assert [job.id for job in catalog.jobs.list(state=JobState.QUEUED)] == ["job-0002"]
    assert [found.message for found in catalog.events.list()] == ["no"]


def test_jobs_are_listed_by_schedule_by_several_states_and_since_a_moment(catalog: Catalog) -> None:
    leg = "physical.full"
    catalog.jobs.add(queued(1, leg=leg, due_at=LATER, state=JobState.MISSED))
    catalog.jobs.enqueue(queued(2, leg=leg, due_at=NOON))
    catalog.jobs.enqueue(queued(3, leg=leg))
    catalog.jobs.enqueue(queued(4, leg="verify"))
    catalog.jobs.enqueue(queued(5, leg=leg, server="other"))
    assert [
        job.id
        for job in catalog.jobs.list(
            "shop-db1", leg=leg, state=(JobState.QUEUED, JobState.RUNNING), since=NOON + timedelta(minutes=3)
        )
    ] == ["job-0003"]


def test_pruning_keeps_what_is_open_the_last_of_each_kind_and_the_last_good_one(catalog: Catalog) -> None:
    def over(number: int, state: JobState, **changes: object) -> None:
        catalog.jobs.add(queued(number, state=JobState.RUNNING, **changes))
        catalog.jobs.finish(f"job-{number:04}", state, NOON + timedelta(minutes=number), token=0)

    over(1, JobState.SUCCEEDED)
    over(2, JobState.SUCCEEDED)
    over(3, JobState.FAILED)
    over(4, JobState.FAILED)
    over(5, JobState.SUCCEEDED, kind=JobKind.VERIFY)
    over(6, JobState.SUCCEEDED, server="other")
    catalog.jobs.enqueue(queued(0))
    over(9, JobState.SUCCEEDED, kind=JobKind.RETENTION)
    over(8, JobState.SUCCEEDED, kind=JobKind.RETENTION)
    gone = catalog.jobs.prune(NOON + timedelta(minutes=8))
    assert sorted(gone) == ["job-0001", "job-0003"]
    assert sorted(catalog.jobs.prune(LATER)) == ["job-0008"]
    assert [job.id for job in catalog.jobs.list()] == [f"job-{n:04}" for n in (9, 6, 5, 4, 2, 0)]


_LAST = [state for state, moves in JOB_MOVES.items() if not moves]


@pytest.mark.parametrize("state", sorted(set(JobState) - set(_LAST)))
def test_a_state_from_which_a_job_goes_on_is_no_end(catalog: Catalog, state: JobState) -> None:
    catalog.jobs.enqueue(queued())
    with pytest.raises(ValueError, match="no job ends"):
        catalog.jobs.finish("job-0001", state, NOON, token=0)


@pytest.mark.campaign
def test_no_order_of_calls_moves_a_job_where_the_table_does_not_allow_it(catalog: Catalog) -> None:
    dice = thrown("lives of jobs")
    for number in range(rounds(12)):
        _random_life(catalog, dice, f"life-{number}")


def _random_life(catalog: Catalog, dice: Random, name: str) -> None:
    first = dice.choice(sorted(FIRST_STATES))
    catalog.jobs.add(queued(1, id=name, state=first))
    states, tokens = [first], [0]
    for _step in range(20):
        before = catalog.jobs.get(name)
        try:
            _random_call(catalog, dice, name, dice.choice([*tokens, tokens[-1] + 1]))
        except RefusedError:
            assert catalog.jobs.get(name) == before
        now = catalog.jobs.get(name)
        assert now.token >= before.token
        if now.token != before.token:
            tokens.append(now.token)
        if now.state is not states[-1]:
            assert now.state in JOB_MOVES[states[-1]], states
            states.append(now.state)
        assert (now.finished_at is not None) == (not JOB_MOVES[now.state] and len(states) > 1)


def _random_call(catalog: Catalog, dice: Random, name: str, token: int) -> None:
    match dice.randrange(6):
        case 0:
            catalog.jobs.claim("me", LATER, allowed=lambda job, _running: job.id == name)
        case 1:
            catalog.jobs.adopt(name, token, "child", NOON)
        case 2:
            catalog.jobs.heartbeat(name, token, NOON)
        case 3:
            catalog.jobs.request_cancel(name, "ops", NOON)
        case 4:
            catalog.jobs.finish(name, JobState.ABANDONED, NOON, token=token)
        case _:
            catalog.jobs.finish(name, dice.choice(_LAST), NOON, token=token)
