"""The service's watch over streams, whose processes are stand-ins here."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backupd.app.binlogs import stream_supervisor as streamwatch
from backupd.app.binlogs.stream_supervisor import StreamWatch
from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.app.runtime import child_process as offspring
from backupd.catalog.session import open_catalog
from backupd.model.backup_record import EVERY_SERVER, HoldKind
from backupd.model.errors import Problem
from backupd.process.command import Command
from tests.support.service.house import GOLD, Office
from tests.support.stores.gate import until

STREAMED = GOLD + "binlog: {checkpoint: 5s}\n"


@pytest.fixture
def office(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Office:
    monkeypatch.setenv("BACKUPD_RUNTIME", str(short_tmp / "run"))
    monkeypatch.setattr(streamwatch, "TICK", 0.02)
    return Office(
        short_tmp,
        servers={"db1": "streamed", "db2": "other", "db3": "gold"},
        policies={"gold": GOLD, "streamed": STREAMED, "other": STREAMED},
    )


@pytest.fixture
def wiring(office: Office) -> Iterator[Wiring]:
    settings = office.write()
    with open_catalog(settings.catalog) as catalog:
        yield Wiring(settings, catalog)


def instead(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Streams are this shell script, which gets the server's name as $1."""
    monkeypatch.setattr(offspring, "Command", lambda argv, env: Command(("sh", "-c", script, "sh", argv[5]), env=env))


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def program(pid: int | None) -> str:
    """What this process is by now; empty for none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_each_server_whose_policy_asks_for_it_has_a_process_and_none_is_left_at_the_end(
    wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(monkeypatch, "exec sleep 600")
    with StreamWatch(wiring) as watch:
        until(lambda: len(watch.running()) == 2)
        assert set(watch.running()) == {"db1", "db2"}
        first = watch.running()
        os.kill(first["db1"], signal.SIGKILL)
        until(lambda: watch.running().get("db1", first["db1"]) != first["db1"])
        assert watch.running()["db2"] == first["db2"]
        last = watch.running()
    assert all(gone(pid) for pid in last.values())
    assert watch.running() == {}
    assert wiring.catalog.events.list() == (), "one failure is no incident"


def test_a_process_that_does_not_hear_is_killed(wiring: Wiring, monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, "trap '' TERM; while :; do sleep 0.1; done")
    with StreamWatch(wiring, grace=0.3) as watch:
        until(lambda: len(watch.running()) == 2)
        pids = watch.running()
    assert all(gone(pid) for pid in pids.values())


def test_a_pause_ends_the_stream_of_its_server_and_a_resume_begins_it_again(
    wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(monkeypatch, "exec sleep 600")
    holds, now = wiring.catalog.holds, wiring.clock()
    with StreamWatch(wiring) as watch:
        until(lambda: len(watch.running()) == 2)
        holds.set("db1", HoldKind.PAUSE, "moving", "anna", now)
        until(lambda: set(watch.running()) == {"db2"})
        holds.release("db1", HoldKind.PAUSE)
        until(lambda: set(watch.running()) == {"db1", "db2"})
        holds.set(EVERY_SERVER, HoldKind.PAUSE, "moving", "anna", now)
        until(lambda: watch.running() == {})


def test_a_reload_restarts_those_whose_settings_changed_and_no_others(
    office: Office, wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(monkeypatch, "exec sleep 600")
    with StreamWatch(wiring) as watch:
        until(lambda: len(watch.running()) == 2)
        before = watch.running()
        office.write(streamed=STREAMED.replace("5s", "7s"), other=STREAMED + "retry: {attempts: 5}\n")
        watch.reload(Wiring(load_settings(office.file), wiring.catalog))
        until(lambda: watch.running().get("db1", before["db1"]) != before["db1"])
        assert watch.running()["db2"] == before["db2"]
        office.write(streamed=GOLD, gold=STREAMED)
        watch.reload(Wiring(load_settings(office.file), wiring.catalog))
        until(lambda: set(watch.running()) == {"db2", "db3"})
        assert watch.running()["db2"] == before["db2"]
    assert wiring.catalog.events.list() == ()


def test_streams_of_servers_that_may_be_in_a_file_that_cannot_be_read_go_on(
    office: Office, wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(monkeypatch, "exec sleep 600")
    without = replace(wiring.settings, configuration=wiring.of(["db1", "db3"]).settings.configuration)
    unread = (Problem(str(office.base / "servers.d" / "a.yaml"), 1, "", "is no mapping"),)
    with StreamWatch(wiring) as watch:
        until(lambda: len(watch.running()) == 2)
        before = watch.running()
        watch.reload(replace(wiring, settings=replace(without, unread=unread)))
        os.kill(before["db1"], signal.SIGKILL)
        until(lambda: watch.running().get("db1", before["db1"]) != before["db1"])
        assert watch.running()["db2"] == before["db2"]
        assert not gone(before["db2"])
        wiring.catalog.holds.set("db2", HoldKind.PAUSE, "moving", "anna", wiring.clock())
        until(lambda: set(watch.running()) == {"db1"})
        wiring.catalog.holds.release("db2", HoldKind.PAUSE)
    with StreamWatch(wiring) as watch:
        until(lambda: len(watch.running()) == 2)
        watch.reload(replace(wiring, settings=without))
        until(lambda: set(watch.running()) == {"db1"})


def test_repeated_failures_are_one_incident_with_growing_pauses_and_its_end_is_told_once(
    office: Office, wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamwatch, "LONGEST_PAUSE", 0.05)
    mended = office.base / "mended"
    instead(
        monkeypatch,
        f'[ -e {mended} ] && exec sleep 600; [ "$1" = db2 ] && exec sleep 600; '
        f'echo tried >> {office.base}/tries; echo "no such account" >&2; exit 3',
    )
    tries = office.base / "tries"
    with StreamWatch(wiring) as watch:
        until(lambda: tries.exists() and len(tries.read_text().split()) >= 6 and wiring.catalog.events.list())
        (event,) = wiring.catalog.events.list()
        assert (event.kind, event.server) == ("stream-failed", "db1")
        assert "has ended 3 times in a row" in event.message
        assert "no such account" in event.detail
        log = next(word for word in event.hint.split() if word.endswith(".log;")).rstrip(";")
        assert "no such account" in Path(log).read_text()
        mended.touch()
        until(lambda: program(watch.running().get("db1")) == "sleep")  # none of those that fail lives any more
        monkeypatch.setattr(streamwatch, "HEALTHY", 0.0)
        until(lambda: len(wiring.catalog.events.list()) > 1)
        again, _first = wiring.catalog.events.list()
        assert (again.kind, again.server) == ("stream-recovered", "db1")
        killed = watch.running()["db1"]
        os.kill(killed, signal.SIGKILL)
        until(lambda: watch.running().get("db1", killed) != killed)
    assert len(wiring.catalog.events.list()) == 2, "a single failure after it is not the next incident"
