"""The rules on the command line, with real backups of a real server: what goes, what stays, and what comes back."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from storage.filesystem import FilesystemDestination
from tests.e2e.stores.test_deletion import age, present
from tests.support.e2e.forked import POLICY_EXTRA, begun
from tests.support.e2e.house import LONGEST, SERVER, House
from tests.support.e2e.service import stop
from tests.support.keys import Keys
from tests.support.servers.stacks import STACKS, Stack, stacks, whole
from tests.support.stores.stock import Stock


def take(house: House, rules: str, *days: float) -> list[str]:
    """Full backups that, by the catalog, ended so many days ago each, oldest first; the policy gets ``rules``."""
    found = [house.backup()["id"] for _day in days]
    with sqlite3.connect(house.base / "catalog.db") as connection:
        for name, ago in zip(found, days, strict=True):
            ended = (datetime.now(UTC) - timedelta(days=ago)).strftime("%Y-%m-%d %H:%M:%S.%f")
            connection.execute("UPDATE backups SET finished_at = ?, started_at = ? WHERE id = ?", (ended, ended, name))
    connection.close()
    house.policy_extra = f"retention: {{local: {rules}}}\n"
    house.write()
    return found


def decisions(house: House, *args: str) -> dict[str, Any]:
    (found,) = house.ok("retention", SERVER, *args)["destinations"]
    document: dict[str, Any] = found
    return document


def expired(house: House, *args: str) -> set[str]:
    return {entry["id"] for entry in decisions(house, *args)["backups"] if not entry["keep"] and not entry["marked"]}


def test_what_expired_is_shown_marked_brought_back_and_gone_after_its_grace(house: House) -> None:
    oldest, older, base = take(house, "{recovery_window: 7d}", 20, 12, 9)
    shown = house.run("retention", SERVER).out
    assert "nothing was changed" in shown
    assert "the newest from before the window" in shown
    assert expired(house, "--apply") == {oldest, older}
    assert {record["id"]: record["state"] for record in house.backups()} == {
        oldest: "deleted",
        older: "deleted",
        base: "complete",
    }
    assert house.ok("backups", "undelete", older)["brought_back"] == [older]
    house.ok("backups", "keep", older)
    age(house, oldest)
    assert expired(house, "--apply") == set()
    assert present(house) == {older, base}
    assert house.fsck() == []
    house.restore(house.base / "restored")


def test_holds_and_pauses_are_respected_and_listed(house: House) -> None:
    older, newer = take(house, "{keep_fulls: 1}", 5, 4)
    house.ok("hold", SERVER, "--reason", "audit until March")
    house.ok("pause", "--all", "--reason", "upgrade", "--stop-running")
    assert [(entry["server"], entry["kind"]) for entry in house.ok("hold")] == [("*", "pause"), (SERVER, "hold")]
    held = decisions(house, "--apply")
    assert held["stopped"] == [older]
    assert "audit until March" in house.fails("backups", "delete", older, "--now").err
    house.ok("hold", SERVER, "--release")
    house.ok("resume", "--all")
    assert house.fails("resume", SERVER).code == 1
    assert expired(house, "--apply") == {older}
    assert house.ok("plan", SERVER, "--to", "latest")["backup"] == newer


def is_free(house: House) -> bool:
    """Does nobody write to the catalog just now?"""
    with closing(sqlite3.connect(house.base / "catalog.db", timeout=0, isolation_level=None)) as catalog:
        try:
            catalog.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        catalog.execute("ROLLBACK")
        return True


def test_what_a_running_restore_reads_is_not_expired(house: House) -> None:
    older, _newer = take(house, "{keep_fulls: 1}", 2, 1)
    datadir = str(house.base / "restored")
    with house.popen("restore", SERVER, "--to", f"backup:{older}", "--datadir", datadir) as restore:
        deadline = time.monotonic() + 300
        while not list((house.repository / "pins").glob("*.json")):
            assert restore.poll() is None, restore.communicate()
            assert time.monotonic() < deadline, "the restore never pinned what it reads"
            time.sleep(0.002)
        stop(restore)
        while not is_free(house):  # whoever stands still in a transaction keeps everybody else from writing
            os.killpg(restore.pid, signal.SIGCONT)
            time.sleep(0.01)
            stop(restore)
        try:
            found = decisions(house, "--apply")
            assert house.fails("backups", "delete", older, "--now").code == 1
        finally:
            os.killpg(restore.pid, signal.SIGCONT)
        restore.communicate(timeout=LONGEST)
    reasons = {entry["id"]: entry["reasons"] for entry in found["backups"] if entry["keep"]}
    assert "a restore is reading it" in reasons[older]


def test_an_increment_keeps_its_full_backup_and_both_go_and_come_back_together(house: House) -> None:
    full = house.backup()["id"]
    increment = house.ok("backup", SERVER, "--kind", "incremental")["id"]
    other = house.backup()["id"]
    house.ok("backups", "delete", full, "--with-increments")
    assert house.ok("backups", "undelete", increment)["brought_back"] == [full, increment]
    house.ok("backups", "keep", increment)
    house.policy_extra = "retention: {local: {keep_fulls: 1}}\n"
    house.write()
    found = {entry["id"]: entry for entry in decisions(house, "--apply")["backups"]}
    assert found[full]["rules"] == ["parent"]
    assert found[full]["reasons"] == [f"{increment} is kept and builds on it"]
    house.ok("backups", "keep", increment, "--release")
    assert expired(house, "--apply") == {full, increment}
    for name in (full, increment):
        age(house, name)
    house.ok("retention", SERVER, "--apply")
    assert present(house) == {other}
    assert house.fsck() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")
@pytest.mark.parametrize("stack", stacks(*whole(*STACKS)))
def test_a_chain_goes_with_the_logs_that_only_it_needs_and_the_newest_backup_reaches_the_latest_moment(
    stack: Stack, short_tmp: Path, keys: Keys
) -> None:
    with begun(stack, short_tmp, keys) as source:
        house = source.house
        old = [house.backup()["id"]]
        source.write("one", first="FLUSH BINARY LOGS")
        old.append(house.ok("backup", SERVER, "--kind", "incremental")["id"])
        source.write("two", first="FLUSH BINARY LOGS")
        source.stream()
        newest = house.backup()
        source.write("three", first="FLUSH BINARY LOGS")
        source.stream()
        house.policy_extra = POLICY_EXTRA + "retention: {local: {keep_fulls: 1}}\n"
        house.write()
        assert expired(house, "--apply") == set(old)
        for name in old:
            age(house, name)
        house.ok("retention", SERVER, "--apply")
        assert present(house) == {newest["id"]}
        house.ok("retention", SERVER, "--apply")  # the sweep came after the rules, so the logs go with the next ones
        first = min(path.name for path in (house.repository / "binlogs" / SERVER).glob("*/*-*"))
        assert first.startswith(f"{int(newest['position']['file'][-6:]):010d}-")
        source.is_restored("latest", "three")
        assert house.fsck() == []


@pytest.fixture
def disk(house: House) -> Iterator[Path]:
    """A file system of 200 MiB of its own, with the repository on it."""
    point = house.base / "disk"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(point)], check=True)
    house.write(repository=point / "repository")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


def fill(disk: Path, free: int) -> None:
    """Leave no more than ``free`` bytes."""
    room = shutil.disk_usage(disk).free - free
    with (disk / f"filler-{room}").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, room)


def events(house: House, kind: str) -> list[str]:
    with sqlite3.connect(house.base / "catalog.db") as connection:
        rows = connection.execute("SELECT message FROM events WHERE kind = ?", (kind,)).fetchall()
    connection.close()
    return [message for (message,) in rows]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
def test_a_backup_onto_a_full_disk_gets_room_from_what_expired_and_from_nothing_else(house: House, disk: Path) -> None:
    newest = house.backup()["id"]
    fat = Stock(FilesystemDestination("local", house.repository), SERVER).add(1, {"t": os.urandom(30 * 2**20)})
    house.run("fsck", "--repair")  # shows it; its bytes are none that `catalog adopt` could read
    with sqlite3.connect(house.base / "catalog.db") as connection:
        ended = (datetime.now(UTC) - timedelta(days=9)).strftime("%Y-%m-%d %H:%M:%S.%f")
        connection.execute('UPDATE backups SET finished_at = ?, "foreign" = 0 WHERE id = ?', (ended, fat.backup_id))
    connection.close()
    house.policy_extra = "retention: {local: {keep_fulls: 1}}\n"
    house.write()
    fill(disk, 8 * 2**10)
    taken = house.backup()["id"]
    assert present(house) == {newest, taken}
    assert events(house, "grace-waived") == [
        "destination local was full: backupd removed 1 expired backups before the end of their grace period"
    ]

    house.policy_extra = "retention: {local: {keep_fulls: 9}}\n"
    house.write()
    house.ok("backups", "undelete", newest)  # the rules of before, applied after the backup, had marked it
    fill(disk, 8 * 2**10)
    told = house.fails("backup", SERVER).err
    assert "destination local is full, and nothing there may be deleted" in told
    assert "give local more room" in told
    assert f"{newest} stays: keep_fulls: full backup 2 of the newest 9" in told
    assert present(house) == {newest, taken}
    for filler in disk.glob("filler-*"):
        filler.unlink()
    assert house.fsck() == []
