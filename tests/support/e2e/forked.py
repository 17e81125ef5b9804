"""A server whose history forks: what it held at each moment, as it told itself, and what a restore to there holds."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from backupd.model.text import format_time
from tests.support.e2e.house import SERVER, House
from tests.support.ending import end
from tests.support.keys import Keys
from tests.support.sample import checksum_everything
from tests.support.servers.datadir import Options
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.server import Server, connect, query
from tests.support.servers.stacks import Stack

POLICY_EXTRA = "binlog: {stream: true, checkpoint: 1s}\n"
TABLES = (
    "CREATE DATABASE shop",
    "CREATE TABLE shop.diary (id INT PRIMARY KEY AUTO_INCREMENT, what VARCHAR(40) UNIQUE, at TIMESTAMP(6) NOT NULL)",
    "CREATE TABLE shop.stock (id INT PRIMARY KEY, amount INT NOT NULL)",
    "INSERT INTO shop.stock VALUES (1, 0), (2, 0), (3, 0)",
)


@dataclass(frozen=True)
class Moment:
    """The source as it was while nobody wrote. ``at``: after all of its commits and before the next one. ``gtid``: of
    the last transaction, ``executed``: of all; "" on a MySQL without. ``rows``: the diary. ``sums``: of every table."""

    at: datetime
    gtid: str
    executed: str
    place: str
    rows: tuple[str, ...]
    sums: dict[str, int]

    @property
    def time(self) -> str:
        return format_time(self.at)


@dataclass
class Source:
    """The server that is configured, in a house that streams its binary log."""

    house: House
    moments: dict[str, Moment] = field(default_factory=dict)

    @property
    def server(self) -> Server:
        return self.house.server

    def begin(self) -> None:
        self.server.create_backup_users()
        self.server.execute(*TABLES)

    def write(self, name: str, *, first: str = "") -> Moment:
        """Some transactions, the last one with ``name`` in the diary, and what the server holds then."""
        before = [f"INSERT INTO shop.diary (what, at) VALUES ('{name} {number}', NOW(6))" for number in range(3)]
        self.server.execute(
            *([first] if first else []),
            *before,
            "UPDATE shop.stock SET amount = amount * 3 + 1",
            f"INSERT INTO shop.diary (what, at) VALUES ('{name}', NOW(6))",
        )
        self.moments[name] = noted(self.server)
        return self.moments[name]

    def stream(self) -> None:
        """Everything that the server has by now."""
        done = self.house.run("run-stream", SERVER, "--once")
        assert done.code == 0, done.all

    def crash_behind_the_tail(self) -> tuple[Moment, Moment, Moment]:
        """A crash takes back what was written and streamed last, and the server goes on without: the moments ``kept``,
        ``lost`` and ``new``."""
        house, server, crashed = self.house, self.server, self.house.base / "crashed"
        kept = self.write("kept")
        copied(server, crashed)
        lost = self.write("lost")
        self.stream()
        server.kill()
        house.remove_datadir(server.datadir)
        shutil.move(crashed, server.datadir)
        server.start()
        return kept, lost, self.write("new")

    def branches(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.house.ok("timeline", SERVER)["branches"]
        return found

    def plan(self, to: str) -> dict[str, Any]:
        planned: dict[str, Any] = self.house.ok("plan", SERVER, "--to", to)
        return planned

    def is_restored(self, to: str, name: str) -> dict[str, Any]:
        """Restore to ``to``: every table is what the source held at the moment ``name``, and nothing else is there."""
        wanted, datadir = self.moments[name], self.house.base / "restored"
        outcome: dict[str, Any] = self.house.ok("restore", SERVER, "--to", to, "--datadir", str(datadir), "--start")
        try:
            with connect(outcome["started"]["socket"]) as connection:
                assert diary(connection) == wanted.rows
                assert checksum_everything(connection) == wanted.sums
        finally:
            end(outcome["started"]["pid"])
            self.house.remove_datadir(datadir)
        return outcome

    def is_refused(self, to: str) -> str:
        """Gives what it says. Nothing is restored."""
        done = self.house.fails("restore", SERVER, "--to", to, "--datadir", str(self.house.base / "restored"))
        assert not (self.house.base / "restored").exists()
        return done.all


@contextmanager
def begun(stack: Stack, base: Path, keys: Keys, options: Options | None = None) -> Iterator[Source]:
    """A server of its own in a house of its own."""
    with stack.make(tcp=True, options=options) as server:
        found = Source(House(base, server, keys, policy_extra=POLICY_EXTRA, programs=stack.all_programs()))
        found.begin()
        yield found


def copied(server: Server, to: Path) -> None:
    """Its data directory, as a crash in this moment would leave it."""
    with frozen(server.pid):
        subprocess.run(["cp", "-a", "--sparse=always", str(server.datadir), str(to)], check=True)


def refused(stack: Stack, house: House) -> bool:
    """Its binary log cannot be streamed, and the check says so by the release's name."""
    if release := stack.refused():
        house.refuses(release, "check", SERVER)
    return bool(release)


def noted(server: Server) -> Moment:
    """What a server holds while nobody writes, as soon as its clock shows another second."""
    begun: datetime = server.scalar("SELECT UTC_TIMESTAMP()")
    with server.connect() as connection:
        rows, sums = diary(connection), checksum_everything(connection)
    ((file, pos, *_rest),) = server.query(server.words.log_status)
    executed = str(server.scalar(f"SELECT {server.words.executed}")).replace("\n", "")
    gtid = executed
    if isinstance(server, MySQLServer) and executed:
        own = str(server.scalar("SELECT @@server_uuid"))
        # Of who took over from another one, too.
        done = next(one for one in executed.split(",") if one.startswith(own))
        gtid = f"{own}:{done.rpartition(':')[2].rpartition('-')[2]}"
    while server.scalar("SELECT UTC_TIMESTAMP()") == begun:
        time.sleep(0.02)
    return Moment(
        (begun + timedelta(seconds=1)).replace(tzinfo=UTC) - timedelta(milliseconds=1),
        gtid,
        executed,
        f"{file}:{pos}",
        rows,
        sums,
    )


def diary(connection: Any) -> tuple[str, ...]:
    return tuple(str(row[0]) for row in query(connection, "SELECT what FROM shop.diary ORDER BY id"))


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Its files are what a crash would leave now."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
