"""Replay of binary logs: by the restored copy's own applier, against one mysqlbinlog piped into one client.

Part of ``make bench``. For each flavour: sysbench tables, a cold copy as the backup, then writes by eight clients; the
logs of these are replayed onto fresh copies of the backup, each way once for each round, alternating. Both copies must
end with the source's checksums. Times are of the whole replay.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from backupd.engine.binlog.events import clear_flag
from backupd.model.binlog import ReplayLeg, ReplayMethod, ReplaySpec
from backupd.model.manifest import PART_SIZE
from backupd.model.server_facts import Position
from backupd.model.text import format_size
from backupd.process.run_context import RunContext
from backupd.transfer.records.encryption import Sealer, Unsealer
from restore.fetch.sources import Sources
from restore.replay.logs import fetch_logs
from storage.filesystem import FilesystemDestination
from tests.support.keys import operator_keys
from tests.support.logs.archived_logs import CountedDestination, archive_log
from tests.support.restores.rolling import (
    MARIADB,
    MYSQL,
    Kind,
    Logs,
    asking,
    cold_copy,
    content,
    here,
    logs,
    place,
    roll,
    running_copy,
)
from tests.support.restores.stored_segments import branch as an_archived_branch
from tests.support.servers.server import Server
from tests.support.stores.folders import short_directory

TABLES, ROWS, CLIENTS = 4, 20_000, 8
EVENTS = {MARIADB: 60_000, MYSQL: 30_000}
GOALS = {MARIADB: 5.0, MYSQL: 6.0}
POOL = "512M"


def sysbench(server: Server, *words: str) -> None:
    subprocess.run(
        [
            "sysbench",
            "oltp_write_only",
            "--db-driver=mysql",
            f"--mysql-socket={server.socket}",
            "--mysql-user=root",
            "--mysql-db=sbtest",
            f"--tables={TABLES}",
            f"--table-size={ROWS}",
            f"--threads={CLIENTS}",
            "--time=0",
            "--db-ps-mode=disable",
            *words,
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def measure(kind: Kind, events: int, rounds: int, workers: tuple[int, ...]) -> list[str]:
    """Lines of the table for one flavour."""
    options = {"innodb_buffer_pool_size": POOL, "sync_binlog": 0, "innodb_flush_log_at_trx_commit": 0}
    with short_directory() as folder, kind.make(options=options) as source:
        source.execute("CREATE DATABASE sbtest")
        sysbench(source, "prepare")
        start = place(kind, source)
        base = cold_copy(source, folder / "base")
        sysbench(source, f"--events={events}", "run")
        what = logs(source, folder / "logs", start, here(kind, source))
        wanted = content(kind, source.query)
        size = sum(path.stat().st_size for path in what.files) - start.pos
        ways = [
            ("pipe", ReplayMethod.PIPE, 1),
            *((f"applier, {n or 'default'} workers", ReplayMethod.APPLIER, n) for n in workers),
        ]
        seconds: dict[str, list[float]] = {name: [] for name, _method, _workers in ways}
        transactions = 0
        for number in range(rounds + 1):
            for name, method, threads in ways:
                if number == 0 and method is ReplayMethod.PIPE:
                    continue  # the first round fills caches and makes the empty system; nobody pipes twice for that
                if number == 0 and threads != workers[0]:
                    continue
                taken, transactions = _once(kind, source, base, folder / "copy", what, method, threads, wanted)
                if number:
                    seconds[name].append(taken)
        pipe = statistics.median(seconds["pipe"])
        lines = []
        for name, _method, _workers in ways:
            taken = statistics.median(seconds[name])
            met = "" if name == "pipe" else ("yes" if pipe / taken >= GOALS[kind] else "no")
            lines.append(
                f"| {kind}, {transactions:,} transactions, {format_size(size)} | {name} | {taken:.1f} s | "
                f"{pipe / taken:.1f} | {met} |"
            )
        return lines


def _once(
    kind: Kind,
    source: Server,
    base: Path,
    place_: Path,
    what: Logs,
    method: ReplayMethod,
    workers: int,
    wanted: dict[str, object],
) -> tuple[float, int]:
    place_.mkdir()
    try:
        subprocess.run(["cp", "-a", str(base), str(place_ / "copy")], check=True)
        with running_copy(kind, source, place_ / "copy", workers=workers, memory=512 << 20) as (server, info):
            began = time.perf_counter()
            got = roll(server, info, what, method=method)
            taken = time.perf_counter() - began
            with asking(server) as ask:
                if content(kind, ask) != wanted:
                    raise SystemExit(f"{kind} by {method}: the copy is not what the source is")
        return taken, got.transactions
    finally:
        shutil.rmtree(place_)


FILE_SIZE = 512 * 1024 * 1024
_ONE_FILE = {
    "max_binlog_size": "1G",
    "sync_binlog": 0,
    "innodb_flush_log_at_trx_commit": 0,
    "binlog_annotate_row_events": "OFF",
}


def ranges() -> list[str]:
    """What is read of a stored file of 512 MiB or more, of large and small transactions, to replay 40 small ones."""
    lines = [
        "| replay of 40 transactions out of a file | read | parts | index | seconds | goal: +32 MiB |",
        "|---|---|---|---|---|---|",
    ]
    with (
        short_directory() as folder,
        operator_keys() as keys,
        MARIADB.make(
            options={"max_binlog_size": "1G", "sync_binlog": 0, "innodb_flush_log_at_trx_commit": 0}
        ) as source,
    ):
        source.execute("CREATE DATABASE sbtest", "CREATE TABLE sbtest.large (b LONGBLOB)")
        sysbench(source, "prepare")
        source.execute("FLUSH BINARY LOGS")
        with source.connect() as session, session.cursor() as cursor:
            while place(MARIADB, source).pos < FILE_SIZE // 2:
                cursor.execute("INSERT INTO sbtest.large VALUES (%s)", (os.urandom(65536),))
                session.commit()
            sysbench(source, "--events=20000", "run")
            begin = here(MARIADB, source)
            sysbench(source, "--events=40", "run")
            end = here(MARIADB, source)
            while place(MARIADB, source).pos < FILE_SIZE:
                cursor.execute("INSERT INTO sbtest.large VALUES (%s)", (os.urandom(65536),))
                session.commit()
        source.execute("FLUSH BINARY LOGS")
        disk = FilesystemDestination("disk", folder / "disk")
        disk.initialise(datetime.now(UTC))
        counted = CountedDestination(disk)
        data = clear_flag((source.datadir / end.file).read_bytes())
        number = int(end.file.rpartition(".")[2])
        branch = replace(an_archived_branch(), basename="binlog")
        header = archive_log(disk, Sealer((keys.fingerprint,), keys.public_home), branch, number, data)
        sources = Sources((), Unsealer(keys.secret_home), [counted])
        for name, start in (("only what is needed", begin.position), ("the whole file", Position(end.file, 4, ""))):
            stop = end if start.pos > 4 else replace(end, pos=len(data))
            leg = ReplayLeg((header.segment.key,), start, stop)
            spec = ReplaySpec((leg,), ReplayMethod.APPLIER, "", 0, 0, (1,))
            counted.read.clear()
            began = time.perf_counter()
            fetch_logs(branch.server, spec, sources, folder / name, RunContext())
            taken = time.perf_counter() - began
            parts, index = (sum(n for key, n in counted.read.items() if word in key) for word in ("/part-", "/index-"))
            met = "yes" if parts - (stop.pos - start.pos) <= 2 * PART_SIZE else "no"
            lines.append(
                f"| {format_size(len(data))}, {name}: {format_size(stop.pos - start.pos)} | "
                f"{format_size(counted.read.total())} | {format_size(parts)} | {format_size(index)} | {taken:.1f} s | "
                f"{met if start.pos > 4 else ''} |"
            )
    return lines


def main(events: int = 0, rounds: int = 1) -> str:
    """``events``: transactions of each flavour, 0 for as many as show the rate and still end soon."""
    lines = [
        f"| replay of what {CLIENTS} clients wrote | way | seconds | times faster | goal: 5 (MariaDB), 6 (MySQL) |",
        "|---|---|---|---|---|",
    ]
    for kind in (MARIADB, MYSQL):
        if why := kind.why_not():
            lines.append(f"| {kind} | {why} | | | |")
        else:
            lines += measure(kind, events or EVENTS[kind], rounds, (0,))
    return "\n".join([*lines, "", *ranges()])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    print(main(given.events, given.rounds))
