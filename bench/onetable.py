"""One table out of a backup of many: bytes fetched and time, against restoring all of it.

Part of ``make bench``. A table of 100 MB beside much larger ones, which sysbench writes to while the physical backup is
taken, so that there is redo to fetch and to apply. Then the source is gone, and the table is brought into another
server, which writes a binary log: out of the physical backup, and out of a logical one. The yardstick is the restore of
the whole physical backup to a started server. Bytes fetched are those of all files of the repository that the restore
opens, as strace sees it in a run of its own; system tablespace, undo and redo are among them.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

from backupd.model.text import format_size, parse_size
from bench.house import SOURCE, House
from bench.logical import BACK, MEMORY, OPTIONS, SCHEMA, TARGET, make_tables, runs_of, sysbench
from bench.measure import Run, Series, compared, table, timed
from tests.support.keys import Keys, operator_keys
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import Server
from tests.support.stores.folders import short_directory

SIZE, ROUNDS = parse_size("5GiB"), 2
ONE, ONE_SIZE = "one", 100_000_000
TABLES = 8
ROW_BYTES = 240
"""What a row of sysbench takes in a table's file, measured."""
RATE = 100
"""Transactions per second during the backup."""
GOAL = 0.1
_OPENED = re.compile(r'open(?:at)?\(.*"([^"]*/repository/objects/[^"]+)"')


class Bench(House):
    """And another server, for the table."""

    def __init__(self, base: Path, server: Server, target: Server, keys: Keys) -> None:
        super().__init__(base, server, keys, {TARGET: target})
        self.target = target

    def take(self, rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """A physical backup of everything while somebody writes, and a logical one."""
        words = sysbench(
            self.server, SCHEMA, TABLES, rows, "--threads=2", f"--rate={RATE}", "--time=0", "--events=0", "run"
        )
        with subprocess.Popen(words, stdout=subprocess.DEVNULL) as load:
            try:
                physical = self.backupd("backup", SOURCE, "--kind", "full")
            finally:
                load.terminate()
        logical = self.backupd("backup", SOURCE, "--kind", "logical")
        return json.loads(physical.stdout), json.loads(logical.stdout)

    def one(self, backup: str, way: str) -> Run:
        run = self.backupd(*self._one(backup, way))
        self._dropped()
        return run

    def fetched(self, backup: str, way: str) -> int:
        """Bytes that this restore takes from the repository."""
        log = self.base / "strace"
        timed(
            [
                "strace",
                "--follow-forks",
                "--seccomp-bpf",
                "--trace=open,openat",
                f"--output={log}",
                *self.command(*self._one(backup, way)),
            ]
        )
        self._dropped()
        opened = {found[1] for line in log.read_text().splitlines() if (found := _OPENED.search(line))}
        log.unlink()
        return sum(path.stat().st_size for path in map(Path, opened) if path.is_file())

    def _one(self, backup: str, way: str) -> tuple[str, ...]:
        return (
            "restore",
            SOURCE,
            "--to",
            f"backup:{backup}",
            "--tables",
            f"{ONE}.sbtest1",
            "--as",
            f"{BACK}.sbtest1",
            "--into",
            TARGET,
            "--from",
            way,
        )

    def _dropped(self) -> None:
        self.target.execute(f"DROP DATABASE {BACK}")


def measure(
    bench: Bench, physical: dict[str, Any], logical: dict[str, Any], rounds: int
) -> tuple[list[dict[str, Any]], str]:
    """Rows of the table, and where the time goes."""
    whole, single, dumped = Series(), Series(), Series()
    for _ in range(rounds):
        whole.runs.append(bench.restore_whole(f"backup:{physical['id']}")[0])
        single.runs.append(bench.one(physical["id"], "physical"))
        dumped.runs.append(bench.one(logical["id"], "logical"))
    rows = []
    for name, backup, way in (("physical backup", physical, "physical"), ("logical backup", logical, "logical")):
        fetched = bench.fetched(backup["id"], way)
        rows.append(
            {
                "work": f"bytes fetched for one table out of a {name}",
                "ours": format_size(fetched),
                "yardstick": format_size(physical["bytes_stored"]),
                "ratio": round(fetched / physical["bytes_stored"], 3),
                "goal": GOAL,
            }
        )
    peak = max(single.peak, dumped.peak)
    rows += [
        compared("one table out of a physical backup, into a running server", single, whole, None),
        compared("one table out of a logical backup, into a running server", dumped, whole, None),
        {
            "work": "peak memory of backupd",
            "ours": format_size(peak),
            "yardstick": "200 MiB",
            "ratio": round(peak / MEMORY, 2),
            "goal": 1.0,
        },
    ]
    return rows, "\n".join(
        f"- phases, one table out of a {name} backup: {phases(series.runs[-1])}"
        for name, series in (("physical", single), ("logical", dumped))
    )


def phases(run: Run) -> str:
    return ", ".join(f"{phase['name']} {phase['seconds']:.1f} s" for phase in json.loads(run.stdout)["phases"])


def main(size: int = SIZE, rounds: int = ROUNDS) -> str:
    with operator_keys() as keys, PrivateServer(options=OPTIONS) as target, short_directory() as base:
        base.chmod(0o755)
        with PrivateServer(binlog=False, options=OPTIONS) as server:
            rows = size // ROW_BYTES // TABLES
            make_tables(server, SCHEMA, TABLES, rows)
            make_tables(server, ONE, 1, ONE_SIZE // ROW_BYTES)
            server.settle()
            there = sum(path.stat().st_size for path in server.datadir.glob("*/*.ibd"))
            one = (server.datadir / ONE / "sbtest1.ibd").stat().st_size
            bench = Bench(base, server, target, keys)
            physical, logical = bench.take(rows)
        found, told = measure(bench, physical, logical, rounds)
    about = f"A table of {format_size(one)} among {format_size(there)}; yardstick: the whole physical backup."
    return f"{about}\n\n{table(found)}\n\n{told}\n{runs_of(found)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=parse_size, default=SIZE, help="at least 5GiB to count")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    print(main(given.size, given.rounds))
