"""Streams of a real server's binary log, under the real service."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.catalog.session import Catalog
from backupd.model.binlog import Branch
from backupd.model.job import JobState
from backupd.transfer import log_segments
from tests.support.catalog import samples
from tests.support.dice import SOAK
from tests.support.e2e.house import LONGEST, SERVER, House
from tests.support.e2e.service import ONCE_A_YEAR, alive, catalog_of, descendants, serving, until

STREAMED = ONCE_A_YEAR + "binlog: {stream: true, checkpoint: 1s}\n"


@pytest.fixture
def house(own_house: House) -> House:
    """A house whose policy asks for the binary log."""
    (own_house.base / "policies" / "gold.yaml").write_text(STREAMED)
    return own_house


def state(catalog: Catalog) -> dict[str, Any]:
    found = catalog.binlogs.stream_state(SERVER)
    return dict(found[0]) if found is not None else {}


def write(house: House, *values: str) -> datetime:
    """Rows into the sample; gives a moment after their commit."""
    house.server.execute(
        "CREATE DATABASE IF NOT EXISTS logs",
        "CREATE TABLE IF NOT EXISTS logs.stream (v TEXT)",
        *(f"INSERT INTO logs.stream VALUES ('{value}')" for value in values),
    )
    return datetime.now(UTC)


def confirmed(catalog: Catalog, moment: datetime) -> bool:
    """Does the archive have everything that was committed by then?"""
    return any(run.confirmed_at is not None and run.confirmed_at >= moment for run in catalog.binlogs.runs(SERVER))


def wait_for(catalog: Catalog, moment: datetime) -> None:
    until(lambda: confirmed(catalog, moment), lambda: f"the archive of {moment}: {state(catalog)}")


def archived(house: House, branch: Branch, out: Path) -> dict[str, bytes]:
    """By name, what the destination has of each file of a branch."""
    settings = load_settings(house.config)
    with catalog_of(house) as catalog:
        wiring = Wiring(settings, catalog)
        destination, unsealer = wiring.destination("local"), wiring.unsealer()
        found: dict[str, bytes] = {}
        for record in catalog.binlogs.segments(SERVER, branch.id):
            key = record.key
            if not record.destinations["local"].is_complete or key.start < len(found.get(record.segment.file, b"")):
                continue  # a piece that lies within what is there
            header = log_segments.load_header(destination, SERVER, key)
            target = out / f"{key.number}-{key.start}"
            log_segments.fetch(destination, header, unsealer, target)
            assert key.start == len(found.get(record.segment.file, b""))
            found[record.segment.file] = found.get(record.segment.file, b"") + target.read_bytes()
    return found


def is_the_servers(house: House, content: dict[str, bytes]) -> None:
    """Byte by byte the server's own files, but for the in-use flag and what came since."""
    for name, ours in content.items():
        theirs = bytearray((house.server.datadir / name).read_bytes())
        theirs[21] &= 0xFE
        assert bytes(theirs[: len(ours)]) == ours, f"{name} differs"


def stream_pid(catalog: Catalog, *, besides: int = 0) -> int:
    """The process that says it is streaming now."""

    def found() -> int:
        row = state(catalog)
        pid = int(row.get("pid", 0)) if row.get("state") == "streaming" else 0
        return pid if pid != besides and pid and Path(f"/proc/{pid}").exists() else 0

    until(lambda: bool(found()), lambda: f"a stream: {state(catalog)}")
    return found()


def test_a_stream_survives_its_own_death_a_restart_of_the_server_and_the_death_of_the_service(
    house: House, catalog: Catalog
) -> None:
    with serving(house) as service:
        wait_for(catalog, write(house, "first"))
        wait_for(catalog, datetime.now(UTC))  # nothing was written since: an idle server is confirmed, too
        first = stream_pid(catalog)
        os.kill(first, signal.SIGKILL)
        wait_for(catalog, write(house, "after a kill"))
        second = stream_pid(catalog, besides=first)
        house.server.restart()
        wait_for(catalog, write(house, "after a restart of the server"))
        assert stream_pid(catalog) == second
        os.kill(second, signal.SIGKILL)
        third = stream_pid(catalog, besides=second)
        family = {one for one in descendants(service.process.pid) if one[0] != third}
        service.kill()
        until(lambda: not alive(family), lambda: f"the end of {family}")
        os.kill(third, signal.SIGKILL)
    moment = write(house, "while nobody watched")
    with serving(house) as service:
        wait_for(catalog, moment)
        family = descendants(service.process.pid)
        assert service.stop() == 0
        assert not alive(family)
    assert state(catalog)["state"] == "stopped"
    (branch,) = catalog.binlogs.branches(SERVER)
    content = archived(house, branch, house.base)
    assert len(content) >= 2
    is_the_servers(house, content)
    assert b"while nobody watched" in b"".join(content.values())
    assert catalog.binlogs.gaps(SERVER) == ()
    assert [event.kind for event in catalog.events.list(server=SERVER)] == ["branch-begun"]
    assert house.fsck() == []


@SOAK
def test_a_pause_ends_the_stream_and_a_reload_only_those_whose_settings_changed(house: House, catalog: Catalog) -> None:
    policy = house.base / "policies" / "gold.yaml"
    policy.write_text(STREAMED + "objectives: {rpo: 1h}\n")
    failed = samples.job(server=SERVER)  # so that the server is not one whose first backup is still to come
    catalog.jobs.add(failed)
    catalog.jobs.finish(failed.id, JobState.FAILED, datetime.now(UTC), token=failed.token)
    with serving(house) as service:
        wait_for(catalog, write(house, "first"))
        first = stream_pid(catalog)
        until(lambda: bool(catalog.events.list(kind="rpo-broken")), lambda: "there is no backup at all, and rpo is 1h")
        policy.write_text(STREAMED.replace("keep_fulls: 2", "keep_fulls: 3") + "objectives: {rpo: 1h}\n")
        service.reload()
        until(lambda: b"config-reloaded" in service.log.read_bytes(), service.log.read_text)
        wait_for(catalog, write(house, "second"))
        assert stream_pid(catalog) == first
        policy.write_text(STREAMED.replace("checkpoint: 1s", "checkpoint: 2s"))
        service.reload()
        second = stream_pid(catalog, besides=first)
        assert house.run("pause", SERVER, "--reason", "moving house").code == 0
        until(lambda: not Path(f"/proc/{second}").exists(), lambda: "the end of the stream")
        moment = write(house, "meanwhile")
        assert house.run("resume", SERVER).code == 0
        wait_for(catalog, moment)
        assert service.stop() == 0


def test_a_locked_catalog_delays_the_rows_and_not_the_archive(house: House, catalog: Catalog) -> None:
    with serving(house) as service:
        wait_for(catalog, write(house, "first"))
        stored = house.repository / "binlogs"
        with closing(sqlite3.connect(house.base / "catalog.db", timeout=60, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            before = {path.name for path in stored.rglob("segment.json")}
            moment = write(house, "nobody writes this down yet")
            until(lambda: len(list(stored.rglob("segment.json"))) > len(before), lambda: "a segment")
            assert not confirmed(catalog, moment)
            other.execute("ROLLBACK")
        wait_for(catalog, moment)
        assert service.stop() == 0
    assert house.fsck() == []


def test_in_the_foreground_one_run_stores_all_that_there_is_and_a_second_stream_is_refused(
    house: House, catalog: Catalog
) -> None:
    moment = write(house, "first")
    assert house.run("run-stream", SERVER, "--once").code == 0
    assert confirmed(catalog, moment)
    with house.popen("run-stream", SERVER) as process:
        pid = stream_pid(catalog)
        refused = house.run("run-stream", SERVER)
        assert refused.code == 1
        assert "another" in refused.err
        os.kill(pid, signal.SIGTERM)
        _out, err = process.communicate(timeout=LONGEST)
        assert process.returncode == 0, err
    (house.base / "policies" / "gold.yaml").write_text(ONCE_A_YEAR)
    assert "does not stream the binary log" in house.run("run-stream", SERVER).err
