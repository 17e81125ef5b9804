"""Logical backups and loads of tables, against the bare tools.

Part of ``make bench``. Tables of sysbench; all alternating in one run, medians. The backup is compared with a bare
mydumper, and with one whose files go through ``zstd | gpg`` afterwards: one after the other with the defaults of zstd,
or on all cores at backupd's own level. Loading, into another server that holds nothing, is compared with a bare
myloader of the plain files, and with ``gpg -d | zstd -d`` of the sealed ones followed by that. The loaded tables must
have the checksums of the source. Neither server writes a binary log: myloader turns it off, backupd never does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backupd.model.text import format_size, parse_size
from bench.house import SOURCE, House
from bench.measure import Run, Series, compared, table, timed
from tests.support.keys import Keys, operator_keys
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import Server
from tests.support.stores.folders import short_directory

SIZE, ROUNDS = parse_size("2GiB"), 2
TARGET, SCHEMA, BACK = "target", "sbtest", "back"
TABLES, LOADERS = 4, 4
LEVEL = 1
"""backupd's own default."""
ROW_BYTES = 197
"""What a row of sysbench takes in a dump, measured."""
MEMORY = parse_size("200MiB")
OPTIONS: Mapping[str, str | int | None] = {
    "innodb_buffer_pool_size": "512M",
    "innodb_log_file_size": "512M",
    "innodb_flush_log_at_trx_commit": 1,
}


def sysbench(server: Server, schema: str, tables: int, rows: int, *words: str) -> list[str]:
    return [
        "sysbench",
        "oltp_write_only",
        "--db-driver=mysql",
        f"--mysql-socket={server.socket}",
        "--mysql-user=root",
        f"--mysql-db={schema}",
        f"--tables={tables}",
        f"--table-size={rows}",
        "--db-ps-mode=disable",
        *words,
    ]


def make_tables(server: Server, schema: str, tables: int, rows: int) -> None:
    server.execute(f"CREATE DATABASE {schema}")
    subprocess.run(
        sysbench(server, schema, tables, rows, f"--threads={min(tables, 4)}", "prepare"),
        check=True,
        stdout=subprocess.DEVNULL,
    )


class Bench(House):
    """And what the bare tools do."""

    def __init__(self, base: Path, server: Server, target: Server, keys: Keys) -> None:
        super().__init__(base, server, keys, {TARGET: target})
        self.target = target
        self.dump, self.sealed, self.opened = base / "dump", base / "sealed", base / "opened"

    def mydumper(self) -> Run:
        shutil.rmtree(self.dump, ignore_errors=True)
        return timed(
            [
                "mydumper",
                f"--defaults-file={self.server.client_file()}",
                f"--database={SCHEMA}",
                f"--outputdir={self.dump}",
                f"--threads={LOADERS}",
                "--chunk-filesize=64",
                "--verbose=1",
            ]
        )

    def seal_dump(self, level: int, processes: int) -> Run:
        """What ``mydumper`` wrote, file by file."""
        shutil.rmtree(self.sealed, ignore_errors=True)
        self.sealed.mkdir()
        one = f"< {self.dump}/{{}} {self.seal(level, 1)} > {self.sealed}/{{}} && sync {self.sealed}/{{}}"
        return self._each(self.dump, one, processes)

    def unseal_dump(self, processes: int) -> Run:
        shutil.rmtree(self.opened, ignore_errors=True)
        self.opened.mkdir()
        return self._each(self.sealed, f"{self.unseal(f'{self.sealed}/{{}}')} > {self.opened}/{{}}", processes)

    def _each(self, folder: Path, script: str, processes: int) -> Run:
        each = f"ls {folder} | xargs -P {processes} -I{{}} bash -o pipefail -c '{script}'"
        return timed(["bash", "-o", "pipefail", "-c", each])

    def myloader(self) -> Run:
        run = timed(
            [
                "myloader",
                f"--defaults-file={self.target.client_file()}",
                f"--database={BACK}",
                f"--directory={self.dump}",
                f"--threads={LOADERS}",
                "--verbose=1",
            ]
        )
        self._dropped()
        return run

    def take(self) -> Run:
        run = self.backupd("backup", SOURCE, "--kind", "logical", "--tables", f"{SCHEMA}.*")
        for warning in json.loads(run.stdout)["warnings"]:  # another tool than mydumper would be one
            print(warning, file=sys.stderr)
        return run

    def load(self, *, check: bool) -> tuple[Run, Run]:
        """The whole restore, and its phase of loading alone."""
        run = self.backupd(
            "restore", SOURCE, "--to", "latest", "--tables", f"{SCHEMA}.*", "--as", f"{BACK}.*", "--into", TARGET
        )
        seconds = {phase["name"]: phase["seconds"] for phase in json.loads(run.stdout)["phases"]}
        if check and sums(self.server, SCHEMA) != sums(self.target, BACK):
            raise SystemExit("what was loaded is not what was dumped")
        self._dropped()
        return run, Run(seconds["loaded"], run.peak, "")

    def _dropped(self) -> None:
        self.target.execute(f"DROP DATABASE {BACK}")


def sums(server: Server, schema: str) -> list[int]:
    return [int(server.query(f"CHECKSUM TABLE {schema}.sbtest{number}")[0][1]) for number in range(1, TABLES + 1)]


def measure(bench: Bench, rounds: int) -> tuple[list[dict[str, Any]], str]:
    """Rows of the table, and a line of what else there is to say."""
    bare, slow, wide, first, second, loader, opened, whole, load = (Series() for _ in range(9))
    cores = os.cpu_count() or 1
    new_share = size_share = 0.0
    size = 0
    for number in range(rounds):
        dumped = bench.mydumper()
        bare.runs.append(dumped)
        size = weight(bench.dump)
        slow.runs.append(dumped.and_then(bench.seal_dump(3, 1)))
        stored_by_pipe = weight(bench.sealed)
        wide.runs.append(dumped.and_then(bench.seal_dump(LEVEL, cores)))
        bench.fresh_repository()
        ours = bench.take()
        first.runs.append(ours)
        size_share = json.loads(ours.stdout)["bytes_stored"] / stored_by_pipe
        loaded = bench.myloader()
        loader.runs.append(loaded)
        shutil.rmtree(bench.dump)
        opened.runs.append(bench.unseal_dump(cores).and_then(loaded))
        shutil.rmtree(bench.opened)
        for series, run in zip((whole, load), bench.load(check=not number), strict=True):
            series.runs.append(run)
        again = bench.take()
        second.runs.append(again)
        record = json.loads(again.stdout)
        new_share = max(new_share, record["bytes_new"] / record["bytes_stored"])
    rows = [
        compared("logical backup, against bare `mydumper`, plain files", first, bare, None),
        compared("the same, against `mydumper`, then `zstd \\| gpg` of each file", first, slow, None),
        compared(
            f"the same, against `mydumper`, then `zstd -{LEVEL} \\| gpg` of {cores} files at a time", first, wide, None
        ),
        share("its stored bytes (level 1), against `zstd` (level 3)", size_share, None),
        compared("nothing changed, against `mydumper`, then `zstd \\| gpg`", second, slow, None),
        share("new bytes of the unchanged backup", new_share, 0.02),
        compared("tables loaded (phase `loaded`), against bare `myloader`", load, loader, None),
        compared(
            f"the whole restore, against `gpg -d \\| zstd -d` of {cores} files at a time, then `myloader`",
            whole,
            opened,
            None,
        ),
        {
            "work": "peak memory of backupd, dump",
            "ours": format_size(peak := max(first.peak, second.peak)),
            "yardstick": "200 MiB",
            "ratio": round(peak / MEMORY, 2),
            "goal": 1.0,
        },
        {
            "work": "peak memory of backupd, load",
            "ours": format_size(whole.peak),
            "yardstick": "200 MiB",
            "ratio": round(whole.peak / MEMORY, 2),
            "goal": 1.0,
        },
    ]
    cpu = (
        f"{format_size(size)} of dump in {TABLES} tables. Processor seconds without those of the servers: backup "
        f"{first.cpu:.1f} (mydumper {bare.cpu:.1f}, with `zstd | gpg` {slow.cpu:.1f}, at level {LEVEL} "
        f"{wide.cpu:.1f}); restore {whole.cpu:.1f} (myloader {loader.cpu:.1f}, with `gpg -d | zstd -d` "
        f"{opened.cpu:.1f})."
    )
    return rows, cpu


def share(work: str, ratio: float, goal: float | None) -> dict[str, Any]:
    return {"work": work, "ours": f"{ratio:.1%}", "yardstick": "100%", "ratio": round(ratio, 4), "goal": goal}


def weight(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def runs_of(rows: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(
        f"- {row['work']}: backupd {row['runs']['ours']}, yardstick {row['runs']['yardstick']}"
        for row in rows
        if "runs" in row
    )


def main(size: int = SIZE, rounds: int = ROUNDS) -> str:
    with (
        operator_keys() as keys,
        PrivateServer(binlog=False, options=OPTIONS) as server,
        PrivateServer(binlog=False, options=OPTIONS) as target,
        short_directory() as base,
    ):
        base.chmod(0o755)
        make_tables(server, SCHEMA, TABLES, size // ROW_BYTES // TABLES)
        server.settle()
        rows, cpu = measure(Bench(base, server, target, keys), rounds)
    return f"{table(rows)}\n\n{cpu}\n\n{runs_of(rows)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=parse_size, default=SIZE, help="at least 2GiB to count")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    print(main(given.size, given.rounds))
