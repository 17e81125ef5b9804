"""Binary log streams: `backupd run-stream` against the bare `mysqlbinlog --raw --stop-never`.

Part of ``make bench``. Catching up: a log that was written before is copied, by either one after the other, from the
start of the program (backupd's is forked, as the service does it) to the last byte; backupd's has then been checked,
indexed, compressed, sealed for the key, stored at a destination and read back there. A third line does the same to the
bare copies by `zstd | gpg`, file by file. Lag:
while eight clients write, a ninth notes for each of its commits the moment of the server's OK and the log's position
right after it; another one notes when the destination shows the last file of a segment (``segment.json``, renamed
after it and all the segment's parts were synced). A commit's lag is the time between its OK and the first segment that
reaches to its position.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from backupd.app.context.settings import load_settings
from backupd.app.runtime.fork_server import ForkServer
from backupd.catalog.session import open_catalog
from backupd.model.binlog import FilePosition
from backupd.model.text import format_size
from backupd.process.command import family
from tests.support.keys import Keys, operator_keys
from tests.support.servers import mysql
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.server import Server, query
from tests.support.stores.folders import short_directory

POLICY = """\
physical: {{full: "0 0 1 1 *"}}
destinations: {{required: [local]}}
retention: {{local: {{keep_fulls: 2}}}}
binlog: {{stream: true, checkpoint: {checkpoint}, acknowledge: {acknowledge}}}
"""
CLIENTS, TABLES, ROWS = 8, 4, 20_000
SMALL, LARGE = 40_000, 1 << 29
"""Transactions of sysbench; bytes of log by transactions of some hundred rows."""
RATE = 500
LASTS = {"1s": 20.0, "10s": 45.0}
"""Seconds of load, by checkpoint."""
TICK = 0.01


@dataclass(frozen=True, slots=True)
class Cost:
    """``seconds`` from the program's start to its last byte; ``cpu`` of it and all below it; ``peak``: most memory of
    all of them together."""

    seconds: float
    cpu: float
    peak: int

    def and_then(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.cpu + other.cpu, max(self.peak, other.peak))


@dataclass(frozen=True, slots=True)
class Program:
    """One that runs. ``ended``: its exit code, None as long as it does."""

    words: str
    pid: int
    ended: Callable[[], int | None]


class Source:
    """A server that writes, and a backupd that streams it, both in ``base``."""

    def __init__(self, base: Path, server: Server, keys: Keys, forks: ForkServer) -> None:
        self.base, self.server, self.keys, self.forks = base, server, keys, forks
        self.mariadb = isinstance(server, PrivateServer)
        self.tool = "mariadb-binlog" if self.mariadb else mysql.beside(mysql.mysqld(), "mysqlbinlog")
        self.repository = base / "repository"
        self.config = base / "backupd.yaml"
        programs = "{}" if self.mariadb else json.dumps({"mysqlbinlog": self.tool})
        (base / "policies").mkdir()
        self.config.write_text(
            f"catalog: sqlite:///{base}/catalog.db\nspool: {base}/spool\npolicies: {base}/policies\n"
            f"programs: {programs}\n"
            f"servers:\n  bench: {{socket: {server.socket}, defaults_file: {server.client_file()}, policy: bench}}\n"
            f"destinations:\n  local: {{type: filesystem, path: {self.repository}}}\n"
            f"encryption: {{gnupg_home: {keys.public_home}, recipients: [{keys.user_id}]}}\n"
            f"restore: {{gnupg_home: {keys.secret_home}, scratch: {{path: {base}/scratch}}}}\n"
        )

    def position(self) -> tuple[str, int]:
        name, pos, *_ = self.server.query("SHOW MASTER STATUS" if self.mariadb else "SHOW BINARY LOG STATUS")[0]
        return str(name), int(pos)

    def end(self) -> FilePosition:
        name, pos = self.position()
        return int(name.rpartition(".")[2]), pos

    def logs(self, first: int) -> list[Path]:
        return sorted(path for path in self.server.datadir.glob("binlog.[0-9]*") if int(path.suffix[1:]) >= first)

    def sysbench(self, *words: str) -> None:
        subprocess.run(self.sysbench_words(*words), check=True, stdout=subprocess.DEVNULL)

    def sysbench_words(self, *words: str) -> list[str]:
        return [
            "sysbench",
            "oltp_write_only",
            "--db-driver=mysql",
            f"--mysql-socket={self.server.socket}",
            "--mysql-user=root",
            "--mysql-db=sbtest",
            f"--tables={TABLES}",
            f"--table-size={ROWS}",
            f"--threads={CLIENTS}",
            "--time=0",
            "--db-ps-mode=disable",
            *words,
        ]

    def write_large(self, size: int) -> None:
        """Copies of some hundred rows by one transaction each, from eight clients."""
        self.server.execute("CREATE TABLE IF NOT EXISTS sbtest.copies (k INT, c CHAR(120), pad CHAR(60))")
        first = self.end()[0]
        stop = threading.Event()

        def write(number: int) -> None:
            with self.server.connect() as connection:
                while not stop.is_set():
                    query(
                        connection,
                        "INSERT INTO sbtest.copies SELECT k, c, pad FROM sbtest.sbtest1"
                        " WHERE id BETWEEN %s AND %s + 399",
                        (number * 1000 + 1, number * 1000 + 1),
                    )

        threads = [threading.Thread(target=write, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        while sum(path.stat().st_size for path in self.logs(first)) < size:
            time.sleep(0.05)
        stop.set()
        for thread in threads:
            thread.join()
        self.server.execute("DROP TABLE sbtest.copies")

    # -- the programs

    @contextmanager
    def streaming(self, checkpoint: str, *, acknowledge: str = "off") -> Iterator[Program]:
        (self.base / "policies" / "bench.yaml").write_text(
            POLICY.format(checkpoint=checkpoint, acknowledge=acknowledge)
        )
        settings = load_settings(self.config)
        process = self.forks.start(
            settings, settings.hold(self.base), "run-stream", "bench", log=self.base / "stream.log"
        )
        try:
            yield Program("backupd", process.child.pid, process.ended)
        finally:
            process.end(0.0, 30.0)
            while process.ended() is None:
                time.sleep(0.05)

    def stored_to(self) -> FilePosition:
        """How far the destination has the log, by the catalog, which hears of it afterwards."""
        with open_catalog(f"sqlite:///{self.base}/catalog.db") as catalog:
            return max(((run.last_number, run.last_pos) for run in catalog.binlogs.runs("bench")), default=(0, 0))

    def begin(self) -> None:
        """From here on the stream has to copy what is written."""
        for path in (self.repository, self.base / "spool", *self.base.glob("catalog.db*")):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        open_catalog(f"sqlite:///{self.base}/catalog.db").close()
        self.server.execute("FLUSH BINARY LOGS")
        with self.streaming("1s") as process:
            wait(process, lambda: self.stored_to() >= self.end())

    def ours(self) -> Cost:
        with self.streaming("1s") as process:
            return cost(process, lambda: self.stored_to() >= self.end(), every=0.1)

    def bare(self, first: str, folder: Path) -> Cost:
        name, pos = self.position()
        folder.mkdir()
        newest = folder / name
        with subprocess.Popen(
            [
                self.tool,
                f"--defaults-file={self.server.client_file()}",
                "--read-from-remote-server",
                "--raw",
                "--stop-never",
                f"--result-file={folder}/",
                first,
            ],
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                return cost(program(process), lambda: newest.exists() and newest.stat().st_size >= pos)
            finally:
                process.terminate()

    def sealed(self, folder: Path) -> Cost:
        """What a careful administrator does to the bare copies."""
        script = (
            f"for f in {folder}/*; do zstd -q -1 -c $f | gpg --homedir {self.keys.public_home} --batch --no-tty "
            f"--quiet --trust-model always --compress-algo none -e -r {self.keys.fingerprint} > $f.gpg && "
            "sync $f.gpg; done; touch $0/done; sleep 60"
        )
        with subprocess.Popen(["bash", "-o", "pipefail", "-c", script, str(folder)]) as process:
            found = cost(program(process), (folder / "done").exists)
            for pid in reversed(family(process.pid)):
                os.kill(pid, 9)
            return found


def cost(process: Program, done: Callable[[], bool], every: float = TICK) -> Cost:
    """Until ``done``, of a process that was just started."""
    began = time.perf_counter()
    peak = 0
    while not done():
        peak = max(peak, resident(process.pid))
        if (code := process.ended()) is not None:
            raise SystemExit(f"{process.words} ended with {code}")
        time.sleep(every)
    return Cost(time.perf_counter() - began, processor(process.pid), peak)


def wait(process: Program, done: Callable[[], bool]) -> None:
    while not done():
        if (code := process.ended()) is not None:
            raise SystemExit(f"{process.words} ended with {code}")
        time.sleep(0.1)


def program(process: subprocess.Popen[bytes]) -> Program:
    return Program(repr(process.args), process.pid, process.poll)


def processor(pid: int) -> float:
    """Seconds of a process and all below it, those that have ended included."""
    ticks = 0
    for one in family(pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            ticks += sum(map(int, Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    """Bytes of a process and all below it; what several share counts once (a child that was only just forked is no
    second process of that size)."""
    found = 0
    for one in family(pid):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            shares = re.search(r"^Pss:\s+(\d+) kB$", Path(f"/proc/{one}/smaps_rollup").read_text(), re.MULTILINE)
            found += int(shares[1]) * 1024 if shares else 0
    return found


# -- catching up


def catch_up(source: Source, what: str, write: Callable[[], None]) -> list[str]:
    source.begin()
    first, before = source.position()
    write()
    size = sum(path.stat().st_size for path in source.logs(int(first.rpartition(".")[2]))) - before
    folder = source.base / "bare"
    try:
        bare = source.bare(first, folder)
        sealed = bare.and_then(source.sealed(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ours = source.ours()
    rows = ((f"`{Path(source.tool).name} --raw`", bare), ("the same, then `zstd -1`, `gpg`", sealed), ("backupd", ours))
    lines = [
        f"| {what}, {format_size(size)} | {name} | {size / one.seconds / 1e6:.0f} MB/s | "
        f"{one.seconds / bare.seconds:.2f} | {one.cpu * 2**30 / size:.1f} s | {one.cpu / bare.cpu:.1f} | "
        f"{format_size(one.peak)} |"
        for name, one in rows
    ]
    print(*lines, sep="\n", file=sys.stderr, flush=True)
    return lines


# -- lag


class Observer:
    """Notes when each segment is at the destination."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.seen: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *_args: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(TICK):
            for path in self._folder.glob("*/*/"):
                if path.name not in self.seen and (path / "segment.json").exists():
                    self.seen[path.name] = time.monotonic()

    def since(self, position: FilePosition) -> float | None:
        """Since when a segment reaches to ``position``."""
        found = [
            at
            for name, at in self.seen.items()
            for number, _start, end in [map(int, name.split("-"))]
            if number == position[0] and end >= position[1]
        ]
        return min(found, default=None)


def lag(source: Source, checkpoint: str, seconds: float) -> str:
    commits: list[tuple[float, FilePosition]] = []
    source.begin()
    with source.streaming(checkpoint) as process, Observer(source.repository / "binlogs" / "bench") as observer:
        words = source.sysbench_words(f"--rate={RATE}", "--events=0", "run")
        with subprocess.Popen(words, stdout=subprocess.DEVNULL) as load, source.server.connect() as connection:
            try:
                began = time.monotonic()
                while (now := time.monotonic()) < began + seconds:
                    query(connection, "INSERT INTO sbtest.marks VALUES (%s)", (now,))
                    commits.append((time.monotonic(), source.end()))
                    time.sleep(0.02)
            finally:
                load.terminate()
        wait(process, lambda: observer.since(commits[-1][1]) is not None)
    # The first seconds are the program's start.
    lags = [at - commit for commit, end in commits if commit > began + 5 if (at := observer.since(end)) is not None]
    centiles = statistics.quantiles(lags, n=100)
    line = (
        f"| {checkpoint} | {len(lags):,} | {statistics.median(lags):.2f} s | {centiles[98]:.2f} s | {max(lags):.2f} s |"
    )
    print(line, file=sys.stderr, flush=True)
    return line


def measure(
    server: Server,
    keys: Keys,
    what: str,
    *,
    small: int,
    large: int,
    lags: bool,
) -> tuple[list[str], list[str]]:
    with short_directory() as base, ForkServer() as forks:
        os.environ["BACKUPD_RUNTIME"] = str(base / "run")
        source = Source(base, server, keys, forks)
        server.execute("CREATE DATABASE sbtest", "CREATE TABLE sbtest.marks (at DOUBLE)")
        source.sysbench("prepare")
        lines = catch_up(source, f"{what}, {small:,} transactions", lambda: source.sysbench(f"--events={small}", "run"))
        lines += catch_up(source, f"{what}, large transactions", lambda: source.write_large(large))
        return lines, [lag(source, checkpoint, seconds) for checkpoint, seconds in LASTS.items()] if lags else []


def main(small: int = SMALL, large: int = LARGE) -> str:
    options: dict[str, str | int | None] = {
        "innodb_buffer_pool_size": "512M",
        "sync_binlog": 0,
        "innodb_flush_log_at_trx_commit": 0,
        "max_binlog_size": "256M",
    }
    lines = [
        "| catching up | by | throughput | time, ratio | CPU for each GiB | ratio | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    with operator_keys() as keys:
        with PrivateServer(options=options) as server:
            rows, lags = measure(server, keys, "MariaDB", small=small, large=large, lags=True)
            lines += rows
        if why := mysql.why_not():
            lines.append(f"| MySQL | {why} | | | | | |")
        else:
            with MySQLServer(options=options) as server:
                lines += measure(server, keys, "MySQL", small=small, large=large, lags=False)[0]
    lines += [
        "",
        f"| checkpoint, {CLIENTS} clients, {RATE} transactions/s | commits | lag, median | 99 % | most |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *lags])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", type=int, default=SMALL)
    parser.add_argument("--large", type=int, default=LARGE)
    given = parser.parse_args()
    print(main(given.small, given.large))
