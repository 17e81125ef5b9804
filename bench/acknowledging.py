"""What a commit costs while it waits for a stream: `acknowledge` against a real semi-synchronous replica.

``python -m bench.acknowledging``: one server (durable: each commit is synced to disk) whose commits wait, in turns, for
nobody, for a replica of the same version on the same machine, and for backupd with ``acknowledge: spool`` and
``destination``. One and eight writers insert rows, each by a transaction of its own; a line gives the time between the
statement and its OK. A round in which a commit was answered without an acknowledgement ends the program.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from backupd.app.runtime.fork_server import ForkServer
from bench.streaming import Source
from tests.support.keys import Keys, operator_keys
from tests.support.logs.semi_sync import facts, switch_on
from tests.support.servers import mysql
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.replica import part, replica_of
from tests.support.servers.server import Server, query
from tests.support.stores.folders import short_directory

ROUNDS, COMMITS = 3, 2_000
LONGEST = 120.0
"""Commits of one writer in a round; seconds until whoever acknowledges has come."""


def commits(server: Server, writers: int) -> list[float]:
    """Seconds of each of ``COMMITS`` commits."""
    found: list[float] = []

    def write() -> None:
        with server.connect() as connection:
            for _ in range(COMMITS // writers):
                began = time.perf_counter()
                query(connection, "INSERT INTO shop.t (t) VALUES ('a row')")
                found.append(time.perf_counter() - began)

    threads = [threading.Thread(target=write) for _ in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LONGEST
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {LONGEST:.0f} s")
        time.sleep(0.1)


def clients(server: Server, count: int) -> None:
    """Wait until so many acknowledge."""
    until(lambda: (now := facts(server)).clients == count and now.status == bool(count), f"{count} that acknowledge")


@contextmanager
def by_replica(replica: Server, source: Server) -> Iterator[None]:
    word = facts(source).replica
    replica.execute(
        f"STOP {replica.words.replica}",
        f"SET GLOBAL rpl_semi_sync_{word}_enabled = ON",
        f"START {replica.words.replica}",
    )
    try:
        clients(source, 1)
        yield
    finally:
        replica.execute(f"STOP {replica.words.replica}")


@contextmanager
def by_backupd(source: Source, acknowledge: str) -> Iterator[None]:
    with source.streaming("1s", acknowledge=acknowledge):
        clients(source.server, 1)
        yield


def measure(server: Server, keys: Keys, what: str) -> list[str]:
    with short_directory() as base, ForkServer() as forks, replica_of(server) as replica:
        os.environ["BACKUPD_RUNTIME"] = str(base / "run")
        source = Source(base, server, keys, forks)
        if isinstance(replica, MySQLServer):
            replica.execute("INSTALL PLUGIN rpl_semi_sync_replica SONAME 'semisync_replica.so'")
        source.begin()
        switch_on(server)
        ways: dict[str, Callable[[], AbstractContextManager[None]]] = {
            "nobody": nullcontext,
            "a replica": partial(by_replica, replica, server),
            "backupd, `spool`": partial(by_backupd, source, "spool"),
            "backupd, `destination`": partial(by_backupd, source, "destination"),
        }
        found: dict[tuple[str, int], list[float]] = {}
        for _ in range(ROUNDS):
            for way, waiting in ways.items():
                waits = way != "nobody"
                word = facts(server).source
                server.execute(f"SET GLOBAL rpl_semi_sync_{word}_enabled = {'ON' if waits else 'OFF'}")
                with waiting():
                    before = facts(server)
                    for writers in (1, 8):
                        found.setdefault((way, writers), []).extend(commits(server, writers))
                    after = facts(server)
                if waits and (after.unacknowledged, after.fell_back) != (before.unacknowledged, before.fell_back):
                    raise SystemExit(f"{what}, {way}: commits were answered without an acknowledgement")
        part(replica)
    lines = []
    for (way, writers), seconds in sorted(found.items(), key=lambda item: item[0][1]):
        base_line = statistics.median(found["a replica", writers])
        middle, last = statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
        lines.append(
            f"| {what}, {writers} writing | {way} | {middle * 1e3:.2f} ms | {last * 1e3:.2f} ms | "
            f"{(middle - base_line) * 1e3:+.2f} ms |"
        )
    print(*lines, sep="\n", file=sys.stderr, flush=True)
    return lines


def main() -> str:
    options: dict[str, str | int | None] = {"sync_binlog": 1, "innodb_flush_log_at_trx_commit": 1}
    lines = ["| server | commits wait for | median | 99 % | median, against a replica |", "|---|---|---|---|---|"]
    with operator_keys() as keys:
        with PrivateServer(options=options, tcp=True) as server:
            lines += measure(server, keys, "MariaDB")
        if why := mysql.why_not():
            lines.append(f"| MySQL | {why} | | | |")
        else:
            with MySQLServer(options=options, tcp=True) as server:
                lines += measure(server, keys, "MySQL")
    return "\n".join(lines)


if __name__ == "__main__":
    print(main())
