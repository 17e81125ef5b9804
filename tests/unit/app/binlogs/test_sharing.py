"""Which streams share a process: the service's part, with stand-ins for the processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from backupd.app.binlogs import stream_member
from backupd.app.binlogs import stream_supervisor as streamwatch
from backupd.app.binlogs.quiet import HEAVY, STILL, USUAL
from backupd.app.binlogs.stream_holder import Holder
from backupd.app.binlogs.stream_supervisor import StreamWatch
from backupd.app.context.settings import load_settings, spool_folder
from backupd.app.context.wiring import Wiring, owner
from backupd.app.runtime import child_process
from backupd.binlog.spool_files import Spool
from backupd.catalog.session import open_catalog
from backupd.model.backup_record import HoldKind
from backupd.process.command import Command
from tests.support.service.house import GOLD, Office
from tests.support.stores.gate import until

SERVERS = ("db1", "db2", "db3")
STREAMED = GOLD + "binlog: {checkpoint: 5s}\n"


@pytest.fixture
def office(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Office:
    monkeypatch.setenv("BACKUPD_RUNTIME", str(short_tmp / "run"))
    monkeypatch.setattr(streamwatch, "TICK", 0.02)
    monkeypatch.setattr(streamwatch, "GATHERING", 0.02)
    monkeypatch.setattr(stream_member, "LOOKS", 0.0)
    monkeypatch.setattr(
        child_process, "Command", lambda argv, env: Command(("sh", "-c", "exec sleep 600", "sh", *argv[5:]), env=env)
    )
    return Office(short_tmp, servers=dict.fromkeys(SERVERS, "gold"), policies={"gold": STREAMED})


@pytest.fixture
def wiring(office: Office) -> Iterator[Wiring]:
    settings = office.write()
    with open_catalog(settings.catalog) as catalog:
        yield Wiring(settings, catalog)


def spool(wiring: Wiring, name: str) -> Spool:
    return Spool(spool_folder(wiring.settings, name))


@contextmanager
def holding(wiring: Wiring, name: str, pid: int, activity: str = STILL, *, shared: bool = False) -> Iterator[None]:
    """The lock of a spool, as process ``pid`` would hold it."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    words = " ".join([*owner().split(" ")[:-2], str(pid), ticks])
    note = replace(Holder.current(wiring, name, kept=True, shared=shared), owner=words, activity=activity).note()
    with spool(wiring, name).locked(note):
        yield


def alone(watch: StreamWatch) -> dict[str, int]:
    until(lambda: len(set(watch.running().values())) == len(SERVERS))
    return watch.running()


@contextmanager
def gathered(wiring: Wiring, watch: StreamWatch) -> Iterator[tuple[int, dict[str, ExitStack]]]:
    """The process that all of them share, and what holds their locks."""
    before = alone(watch)
    with ExitStack() as held:
        for _ in range(2):  # it may be at a look
            watch._gather_due = float("inf")
            time.sleep(0.1)
        for name, pid in before.items():
            held.enter_context(holding(wiring, name, pid))
        watch._gather_due = 0.0
        until(lambda: len(set(watch.running().values())) == 1)
    (pid,) = set(watch.running().values())
    assert pid not in before.values()
    for one in before.values():  # it has taken over from them
        os.kill(one, signal.SIGTERM)
    locks = {name: ExitStack() for name in SERVERS}
    with ExitStack() as all_of_them:
        for name, lock in locks.items():
            all_of_them.enter_context(lock)
            lock.enter_context(holding(wiring, name, pid, USUAL, shared=True))
        until(lambda: not any(one.leaving for one in watch._streams.values()))
        yield pid, locks


def test_streams_that_are_still_share_a_process(wiring: Wiring, caplog: pytest.LogCaptureFixture) -> None:
    with StreamWatch(wiring) as watch, gathered(wiring, watch) as (pid, locks):
        assert f"process {pid} streams the binary logs of {', '.join(SERVERS)}" in caplog.text
        for lock in locks.values():
            lock.close()
    assert wiring.catalog.events.list() == ()


def test_streams_on_which_something_comes_and_those_of_others_have_their_own(wiring: Wiring) -> None:
    with StreamWatch(wiring) as watch, ExitStack() as held:
        before = alone(watch)
        held.enter_context(holding(wiring, "db1", before["db1"], USUAL))
        held.enter_context(holding(wiring, "db2", before["db2"], HEAVY))
        held.enter_context(holding(wiring, "db3", os.getpid(), STILL))  # of a process that no service has started
        rounds = watch._gather_due
        until(lambda: watch._gather_due > rounds + 0.2)
        assert watch.running() == before


def test_one_on_which_much_comes_gets_its_own_and_the_others_stay(wiring: Wiring) -> None:
    with StreamWatch(wiring) as watch, gathered(wiring, watch) as (pid, locks):
        locks["db2"].close()
        with holding(wiring, "db2", pid, HEAVY, shared=True):
            until(lambda: watch.running().get("db2", pid) != pid)
        assert watch.running()["db1"] == watch.running()["db3"] == pid
        for lock in locks.values():
            lock.close()


def test_one_that_is_not_wanted_any_more_is_asked_to_leave_and_the_others_stay(wiring: Wiring) -> None:
    with StreamWatch(wiring) as watch, gathered(wiring, watch) as (pid, locks):
        wiring.catalog.holds.set("db2", HoldKind.PAUSE, "moving", "anna", wiring.clock())
        until(spool(wiring, "db2").is_asked_to_leave)
        assert watch.running()["db2"] == pid
        locks["db2"].close()
        until(lambda: "db2" not in watch.running())
        assert watch.running() == {"db1": pid, "db3": pid}
        for lock in locks.values():
            lock.close()


def test_one_that_ends_alone_is_begun_again_alone_and_its_reason_is_told(wiring: Wiring) -> None:
    with StreamWatch(wiring) as watch, gathered(wiring, watch) as (pid, locks):
        locks["db2"].close()
        spool(wiring, "db2").is_over(pid, "no key")
        until(lambda: watch.running().get("db2", pid) != pid)
        assert watch._streams["db2"].last_words == "no key"
        assert watch.running()["db1"] == watch.running()["db3"] == pid
        for lock in locks.values():
            lock.close()


def test_after_the_end_of_a_shared_process_each_begins_again(wiring: Wiring) -> None:
    with StreamWatch(wiring) as watch, gathered(wiring, watch) as (pid, locks):
        for lock in locks.values():
            lock.close()
        os.kill(pid, signal.SIGKILL)
        until(lambda: pid not in watch.running().values() and len(watch.running()) == len(SERVERS))
        assert len(set(watch.running().values())) == len(SERVERS)


def test_the_next_service_adopts_the_streams_of_a_shared_process(wiring: Wiring) -> None:
    with StreamWatch(wiring) as first, gathered(wiring, first) as (pid, locks):
        assert set(first.leave()) == set(SERVERS)
        with StreamWatch(wiring) as second:
            until(lambda: second.running() == dict.fromkeys(SERVERS, pid))
            wiring.catalog.holds.set("db1", HoldKind.PAUSE, "moving", "anna", wiring.clock())
            until(spool(wiring, "db1").is_asked_to_leave)
            assert not spool(wiring, "db2").is_asked_to_leave()
            for lock in locks.values():
                lock.close()
            os.kill(pid, signal.SIGKILL)
            until(lambda: first._shared[0].ended() is not None)


def test_beyond_a_bounded_number_streams_begin_together_but_for_those_that_commits_wait_for(
    short_tmp: Path, office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamwatch, "BEGIN_ALONE", 1)
    monkeypatch.setattr(streamwatch, "SHARED_BY", 2)
    names = [f"db{number}" for number in range(1, 7)]
    waiting = STREAMED.replace("5s", "5s, acknowledge: spool")
    many = Office(
        short_tmp,
        servers={**dict.fromkeys(names, "gold"), "db3": "waits"},
        policies={"gold": STREAMED, "waits": waiting},
    )
    settings = many.write()
    with open_catalog(settings.catalog) as catalog, StreamWatch(Wiring(settings, catalog)) as watch:
        until(lambda: len(watch.running()) == len(names))
        pids = watch.running()
        alone = [name for name in names if list(pids.values()).count(pids[name]) == 1]
        assert alone == ["db1", "db3"]
        assert pids["db2"] == pids["db4"] != pids["db5"] == pids["db6"]


def test_the_streams_of_a_shared_process_whose_settings_change_get_another_one_together(
    office: Office, wiring: Wiring
) -> None:
    with StreamWatch(wiring) as watch, gathered(wiring, watch) as (pid, locks):
        office.write(gold=STREAMED.replace("5s", "7s"))
        watch.reload(Wiring(load_settings(office.file), wiring.catalog))
        until(lambda: pid not in watch.running().values())
        assert len(set(watch.running().values())) == 1
        for lock in locks.values():
            lock.close()


def test_streams_that_repeatedly_cannot_share_a_process_are_an_incident_until_they_can(
    wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamwatch, "LONGEST_PAUSE", 0.0)
    monkeypatch.setattr(streamwatch, "LONGEST_APART", 0.0)
    with StreamWatch(wiring) as watch:
        for _ in range(streamwatch.REPEATED):
            assert wiring.catalog.events.list() == ()
            with gathered(wiring, watch) as (pid, locks):
                for lock in locks.values():
                    lock.close()
                os.kill(pid, signal.SIGKILL)
                until(lambda: len(set(watch.running().values()) - {pid}) == len(SERVERS))
        until(lambda: bool(wiring.catalog.events.list()))
        (event,) = wiring.catalog.events.list()
        assert (event.kind, event.server) == ("streams-apart", "")
        assert "db1, db2, db3 cannot be streamed by a process that several share" in event.message
        with gathered(wiring, watch) as (_pid, locks):
            monkeypatch.setattr(streamwatch, "HEALTHY", 0.0)
            until(lambda: len(wiring.catalog.events.list()) > 1)
            assert wiring.catalog.events.list()[0].kind == "streams-together"
            for lock in locks.values():
                lock.close()


def test_one_that_cannot_share_a_process_is_not_put_into_one_again_at_once(wiring: Wiring) -> None:
    with StreamWatch(wiring) as watch, gathered(wiring, watch) as (pid, locks):
        for lock in locks.values():
            lock.close()
        os.kill(pid, signal.SIGKILL)
        until(lambda: len(set(watch.running().values()) - {pid}) == len(SERVERS))
        before = watch.running()
        with ExitStack() as held:
            for name, process in before.items():
                held.enter_context(holding(wiring, name, process))
            rounds = watch._gather_due
            until(lambda: watch._gather_due > rounds + 0.2)
            assert watch.running() == before
