"""Holds and pauses: who set them, what they stop, and the kill switch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from backupd.app.retention.deletion import keep
from backupd.app.retention.holds import Held, hold, pause, release
from backupd.model.backup_record import Hold, HoldKind
from backupd.model.errors import NotFoundError, RefusedError, UsageError
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.transfer.leases import sweeping
from storage import layout
from tests.support.catalog.installation import SERVER, Installation

Make = Callable[..., Installation]


def test_a_hold_is_remembered_with_its_reason_and_released(installation: Make) -> None:
    one = installation()
    found = hold(one.wiring, SERVER, " audit until March ", "anna").hold
    assert found == Hold(SERVER, HoldKind.HOLD, "audit until March", "anna", one.clock())
    assert one.catalog.holds.of(SERVER) == (found,)
    assert one.catalog.holds.of("zoo") == ()
    release(one.wiring, SERVER, HoldKind.HOLD, "ben")
    assert one.catalog.holds.all() == ()
    assert [event.message for event in (*one.events("held"), *one.events("released"))] == [
        "server shop was held",
        "server shop was released",
    ]


def test_a_hold_of_every_server_concerns_each_and_comes_after_its_own(installation: Make) -> None:
    one = installation()
    everyone = hold(one.wiring, "*", "the array is failing", "anna").hold
    own = hold(one.wiring, SERVER, "audit", "ben").hold
    assert one.catalog.holds.of(SERVER, HoldKind.HOLD) == (own, everyone)
    assert one.catalog.holds.of("zoo") == (everyone,)
    assert one.catalog.holds.of("zoo", HoldKind.PAUSE) == ()
    with pytest.raises(RefusedError) as refused:
        release(one.wiring, "zoo", HoldKind.HOLD, "ben")
    assert "--all" in refused.value.hint


@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_is_kept_is_said_once_no_other_host_removes_without_knowing_it(
    installation: Make, one_by_one: bool
) -> None:
    """Hosts share no lock, and a sweep goes by what it read at its beginning, which may be an hour ago."""
    one = installation()
    name = one.add(1, days=1)
    with ThreadPoolExecutor(1) as pool:
        with sweeping(one.at(), clock=one.clock):
            asked = (
                pool.submit(keep, one.wiring, name, pinned=True)
                if one_by_one
                else pool.submit(hold, one.wiring, SERVER, "audit", "anna")
            )
            while not any(one.at().list(layout.HELD)):
                time.sleep(0.01)
            time.sleep(0.3)
            assert not asked.done()
        done = asked.result(300)
    assert (done.problems if isinstance(done, Held) else done) == ()


def test_a_new_reason_replaces_the_old_one(installation: Make) -> None:
    one = installation()
    hold(one.wiring, SERVER, "audit", "anna")
    hold(one.wiring, SERVER, "another audit", "ben")
    assert [found.reason for found in one.catalog.holds.all()] == ["another audit"]


def test_a_reason_and_a_known_server_are_needed(installation: Make) -> None:
    one = installation()
    with pytest.raises(UsageError, match="reason"):
        pause(one.wiring, SERVER, " ", "anna")
    with pytest.raises(NotFoundError):
        hold(one.wiring, "shpo", "audit", "anna")
    one.add(1, days=1)
    one.write("", servers=["zoo"])
    hold(one.wiring, SERVER, "it is gone, its backups are not", "anna")


def job(one: Installation, number: int, state: JobState, server: str = SERVER) -> str:
    now = one.clock()
    record = JobRecord(
        f"20261121T040000Z-{number:08x}",
        JobKind.FULL,
        server,
        state,
        now,
        started_at=now if state is JobState.RUNNING else None,
        owner="h b n 1 1",
        token=1,
    )
    one.catalog.jobs.add(dataclasses.replace(record))
    return record.id


def test_the_kill_switch_asks_what_runs_to_stop_and_empties_the_queue(installation: Make) -> None:
    one = installation()
    running, waiting = job(one, 1, JobState.RUNNING), job(one, 2, JobState.QUEUED)
    elsewhere = job(one, 3, JobState.RUNNING, "zoo")
    paused = pause(one.wiring, SERVER, "the primary is on fire", "anna", stop_running=True)
    assert set(paused.stopped) == {running, waiting}
    assert one.catalog.jobs.get(running).cancel_by == "anna"
    assert one.catalog.jobs.get(waiting).state is JobState.CANCELLED
    assert one.catalog.jobs.get(elsewhere).cancel_by == ""
    assert elsewhere in pause(one.wiring, "*", "all of it", "anna", stop_running=True).stopped
    assert [event.detail for event in one.events("paused")] == ["by anna: all of it", "by anna: the primary is on fire"]


def test_a_pause_alone_lets_what_runs_go_on(installation: Make) -> None:
    one = installation()
    running = job(one, 1, JobState.RUNNING)
    assert pause(one.wiring, SERVER, "upgrade", "anna").stopped == ()
    assert one.catalog.jobs.get(running).cancel_by == ""
    release(one.wiring, SERVER, HoldKind.PAUSE, "anna")
    assert one.events("resumed")[0].server == SERVER
