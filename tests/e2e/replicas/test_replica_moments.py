"""New replicas that begin where archived binary logs end: at a moment of the past, or because the source has purged
what follows the backup; and what happens to their source meanwhile."""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from backupd.engine.consistency import PROGRAM, checksum
from backupd.engine.sql.client import Connection
from backupd.model.binlog import BranchReason
from backupd.model.text import new_id
from backupd.process.run_context import RunContext
from restore.datadir.staging import choose_site, read_marker, read_state
from tests.support.dice import SOAK
from tests.support.e2e.archived import Archive, wired
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.new_replica import equal, filled, load, replicate, with_account
from tests.support.ending import end
from tests.support.keys import Keys
from tests.support.servers.server import Server, connect, query
from tests.support.servers.stacks import MARIADB, MYSQL, Stack, stacks

GTIDS = {"gtid_mode": "ON", "enforce_gtid_consistency": "ON"}


def made(stack: Stack) -> Server:
    return stack.make(tcp=True, options={} if stack.mariadb else dict(GTIDS))


def archived(house: House, source: Server, what: str) -> str:
    """One more row, in an archived file of its own; the moment right behind it."""
    source.execute(f"INSERT INTO shop.orders (what) VALUES ('{what}')")
    time.sleep(1.1)  # commit times of a log are whole seconds where the server says no more
    moment = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    time.sleep(1.1)
    source.execute("FLUSH BINARY LOGS")
    return moment


def purge(source: Server) -> None:
    """All but the current file, as soon as nobody reads them any more."""
    deadline = time.monotonic() + 300
    while len(files := source.query("SHOW BINARY LOGS")) > 1:
        assert time.monotonic() < deadline, "a dump never let go of the older files"
        source.execute(f"PURGE BINARY LOGS TO '{files[-1][0]}'")


@pytest.mark.parametrize("stack", stacks(MARIADB, *MYSQL, soak=MYSQL))
def test_the_archive_is_replayed_to_a_moment_or_where_the_source_has_purged(
    short_tmp: Path, keys: Keys, stack: Stack
) -> None:
    with made(stack) as source:
        if stack.refused():
            pytest.skip("left to a soak")
        filled(source)
        house = with_account(House(short_tmp, source, keys, programs=stack.all_programs()))
        house.backup()
        archive = Archive(house, source)
        moment = archived(house, source, "before the moment")
        archived(house, source, "after the moment")
        archive.take()
        datadir = short_tmp / "replica"

        # From a moment of the past it catches up with what came since.
        planned = house.ok("plan", *replicate(datadir, SERVER, to=moment)[1:])
        assert planned["replay"]["transactions"] >= 1
        outcome = house.ok(*replicate(datadir, SERVER, "--start", to=moment))
        try:
            assert outcome["replica"]["caught_up"]
            assert outcome["replay"]["transactions"] == planned["replay"]["transactions"]
            equal(source, outcome["started"]["socket"])
        finally:
            end(outcome["started"]["pid"])
        shutil.rmtree(datadir)

        # The moment is too far back for a source that has purged what follows it; the end of the archive is not.
        purge(source)
        done = house.fails(*replicate(datadir, SERVER, to=moment))
        assert "purged" in done.all
        assert not datadir.exists()
        planned = house.ok("plan", *replicate(datadir, SERVER)[1:])
        assert planned["replay"] is not None
        source.execute("INSERT INTO shop.orders (what) VALUES ('not archived')")
        outcome = house.ok(*replicate(datadir, SERVER, "--start"))
        try:
            assert outcome["replay"]["transactions"] >= 2
            equal(source, outcome["started"]["socket"])
            if stack.mariadb and shutil.which(PROGRAM) is not None:
                root = Connection(socket=str(source.socket), user="root")
                copy = Connection(socket=outcome["started"]["socket"], user="root")
                found = checksum(root, copy, RunContext(), seconds=300)
                assert (dict(found.different), dict(found.unchecked)) == ({}, {})
                assert "`shop`.`orders`" in found.equal
        finally:
            end(outcome["started"]["pid"])

        shutil.rmtree(datadir)

        # Where the server's history has gone on without the copy, a replica of it is no latest, whatever is accepted.
        with wired(house) as wiring:
            first = wiring.catalog.binlogs.branches(SERVER)[0]
            now = datetime.now(UTC)
            reset = replace(first, id=new_id(now), noticed_at=now, reason=BranchReason.RESET, parent=first.id)
            wiring.catalog.binlogs.add_branch(reset)
        done = house.fails("plan", *replicate(datadir, SERVER)[1:])
        assert "later transactions are known to exist" in done.all
        if stack.mariadb:  # sets of GTIDs of MySQL show by themselves that its source has all of it
            done = house.fails("plan", *replicate(datadir, SERVER)[1:], "--accept-older")
            assert "is of another history than" in done.all


def kill_replica(datadir: Path) -> None:
    """End the server that a killed attempt left on ``datadir``, and wait until it is gone."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "cmdline").read_bytes()
            if b"mysqld" not in words and b"mariadbd" not in words:
                continue
            options = next(word[16:] for word in words.split(b"\0") if word.startswith(b"--defaults-file="))
            if str(datadir) not in Path(os.fsdecode(options)).read_text():
                continue
        except (OSError, StopIteration):
            continue
        os.kill(int(folder.name), signal.SIGKILL)
        while (folder / "cmdline").exists() and (folder / "cmdline").read_bytes():
            time.sleep(0.05)


def is_loose(datadir: Path) -> bool:
    marker = read_marker(datadir)
    return marker is not None and bool(marker.replica.get("following"))


@SOAK
@pytest.mark.parametrize("stack", stacks(MARIADB, *MYSQL))
def test_a_source_that_changes_meanwhile_is_a_clear_error_and_the_same_command_goes_on(
    short_tmp: Path, keys: Keys, stack: Stack
) -> None:
    with made(stack) as source:
        if stack.refused():
            pytest.skip("left to a soak")
        filled(source)
        house = with_account(House(short_tmp, source, keys, programs=stack.all_programs()))
        house.backup()
        source.execute("INSERT INTO shop.orders (what) VALUES ('after the backup')")
        datadir = short_tmp / "replica"
        command = replicate(datadir, SERVER, "--start")
        with load(source):
            house.kill_when(lambda: is_loose(datadir), *command)
        kill_replica(datadir)

        # The password is another one by now.
        with_account(house, "wrong")
        done = house.fails(*command)
        assert "cannot connect to its source" in done.all, done.all
        assert "correct the account of replication_defaults_file" in done.all
        with_account(house)

        # The source is gone, for longer than is waited.
        port = source.port
        source.stop()
        done = house.fails(*command)
        assert "has not answered for 90 s" in done.all, done.all
        assert "repeat the command once the source is back" in done.all
        source.options["port"] = port
        source.start()
        outcome = house.ok(*command)
        equal(source, outcome["started"]["socket"])

        # It fell behind, and the source has purged what it needs.
        end(outcome["started"]["pid"])
        source.execute("FLUSH BINARY LOGS", "INSERT INTO shop.orders (what) VALUES ('missed')", "FLUSH BINARY LOGS")
        purge(source)
        done = house.fails(*command)
        assert "does not send what follows" in done.all, done.all
        assert "take a new backup" in done.all
        kill_replica(datadir)


@SOAK
@pytest.mark.parametrize("stack", stacks(MARIADB, *MYSQL))
def test_killed_in_every_phase_the_same_command_ends_right(short_tmp: Path, keys: Keys, stack: Stack) -> None:
    with made(stack) as source:
        if stack.refused():
            pytest.skip("left to a soak")
        filled(source)
        house = with_account(House(short_tmp, source, keys, programs=stack.all_programs()))
        house.backup()
        archive = Archive(house, source)
        archived(house, source, "archived")
        archive.take()
        purge(source)
        datadir = short_tmp / "replica"
        command = replicate(datadir, SERVER, "--start")
        stages = ("fetching", "prepared", "replaying", "replayed", "placing", "placed")

        def reached(stage: str) -> bool:
            marker = read_marker(datadir)
            if marker is not None:
                return stage != "set up" or bool(marker.replica)
            staged = read_state(choose_site(datadir))
            return staged is not None and stage in stages[: stages.index(staged.stage) + 1]

        with load(source):
            for stage in (*stages, "set up"):
                house.kill_when(partial(reached, stage), *command)
            house.kill_when(lambda: is_loose(datadir), *command)
            outcome = house.ok(*command)
        try:
            equal(source, outcome["started"]["socket"])
            with connect(outcome["started"]["socket"]) as connection:
                assert query(connection, "SELECT COUNT(*) FROM mysql.user WHERE user = 'backupd_private'") == [(0,)]
        finally:
            end(outcome["started"]["pid"])


@SOAK
@pytest.mark.parametrize("stack", stacks(MARIADB, *MYSQL))
def test_a_delayed_replica_has_received_what_it_does_not_show_yet(short_tmp: Path, keys: Keys, stack: Stack) -> None:
    with made(stack) as source:
        if stack.refused():
            pytest.skip("left to a soak")
        filled(source)
        house = with_account(House(short_tmp, source, keys, programs=stack.all_programs()))
        house.backup()
        source.execute("INSERT INTO shop.orders (what) VALUES ('in an hour')")
        outcome = house.ok(*replicate(short_tmp / "replica", SERVER, "--start", "--delay", "1h"))
        try:
            assert (outcome["replica"]["delay"], outcome["replica"]["caught_up"]) == (3600, True)
            with connect(outcome["started"]["socket"]) as connection:
                late = "SELECT COUNT(*) FROM shop.orders WHERE what = 'in an hour'"
                assert query(connection, late) == [(0,)]
        finally:
            end(outcome["started"]["pid"])
