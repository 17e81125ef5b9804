"""New replicas out of backups: how long until one has caught up with a source under load, and its lag at hand-over.

The yardstick is the pipe that a careful administrator would type for the same: ``mariadb-backup --stream | mbstream``
of the running source, prepare, start, CHANGE MASTER, and waiting until the replica is where the source is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from backupd.model.text import format_size, parse_size
from bench.house import SOURCE, House
from bench.measure import Run, Series, compared, table, timed
from tests.support.keys import Keys, operator_keys
from tests.support.sample import create
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import Server, query
from tests.support.stores.folders import DATABASE_USER, short_directory

SIZE, ROUNDS, RATE = parse_size("2GiB"), 2, 200
PASSWORD = "Repl-s3cret-77"


class Bench(House):
    """And the pipe."""

    def __init__(self, base: Path, server: Server, keys: Keys) -> None:
        super().__init__(base, server, keys)
        server.execute(
            "CREATE SCHEMA IF NOT EXISTS load_of_bench",
            "CREATE TABLE load_of_bench.t (id INT PRIMARY KEY AUTO_INCREMENT, v VARCHAR(100))",
            f"CREATE USER repl@'127.0.0.1' IDENTIFIED BY '{PASSWORD}'",
            "GRANT REPLICATION SLAVE ON *.* TO repl@'127.0.0.1'",
        )
        account = base / "replication.cnf"
        account.touch(0o600)
        account.write_text(f"[client]\nuser=repl\npassword={PASSWORD}\n")
        written = self.config.read_text()
        line = f"policy: bench, replication_defaults_file: {account}}}"
        self.config.write_text(written.replace("policy: bench}", line))

    def replica(self) -> tuple[Run, dict[str, Any]]:
        target = self.base / "replica"
        words = ("--mode", "replica", "--source", SOURCE, "--datadir", str(target), "--start")
        try:
            run = self.backupd("restore", SOURCE, "--to", "latest", *words)
            outcome: dict[str, Any] = json.loads(run.stdout)
            timed(["mariadb-admin", "--no-defaults", f"--socket={outcome['started']['socket']}", "shutdown"])
            return run, outcome
        finally:
            shutil.rmtree(target, ignore_errors=True)

    def pipe(self) -> Run:
        target, socket = self.base / "plain", self.base / "plain.sock"
        ask = f"mariadb --no-defaults --socket={socket} -N -B -e"
        there = f"mariadb --defaults-file={self.server.client_file()} -N -B -e"
        script = (
            f"( mkdir {target} && mariadb-backup --defaults-file={self.server.client_file()} --backup "
            f"--stream=xbstream --target-dir={self.base}/tool --socket={self.server.socket} | "
            f"mbstream -x -C {target} && "
            f"mariadb-backup --prepare --use-memory=1G --target-dir={target} && chown -R {DATABASE_USER}: {target} && "
            f"setpriv --reuid {DATABASE_USER} --regid {DATABASE_USER} --init-groups mariadbd --no-defaults "
            f"--datadir={target} --socket={socket} --skip-networking --server-id=77 --pid-file={target}/pid "
            f") >{self.base}/plain.log 2>&1 & "
            f"until mariadb-admin --no-defaults --socket={socket} ping >/dev/null 2>&1; "
            "do kill -0 $! || exit 1; sleep 0.02; done; "
            f"{ask} \"SET GLOBAL gtid_slave_pos='$(cut -f3 {target}/xtrabackup_binlog_info)'; "
            f"CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={self.server.port}, MASTER_USER='repl', "
            f"MASTER_PASSWORD='{PASSWORD}', MASTER_USE_GTID=slave_pos; START SLAVE\" && "
            f'{ask} "SELECT MASTER_GTID_WAIT(\'$({there} "SELECT @@gtid_binlog_pos")\')"'
        )
        try:
            return timed(["bash", "-o", "pipefail", "-c", script])
        finally:
            timed(["mariadb-admin", "--no-defaults", f"--socket={socket}", "shutdown"])
            for path in (target, self.base / "tool"):
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def writers(server: Server, rate: int) -> Iterator[None]:
    """One that commits about ``rate`` times a second."""
    over = threading.Event()

    def write() -> None:
        with server.connect() as connection:
            due = time.monotonic()
            while not over.is_set():
                query(connection, "INSERT INTO load_of_bench.t (v) VALUES (REPEAT('x', 90))")
                due += 1 / rate
                time.sleep(max(0.0, due - time.monotonic()))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure(bench: Bench, rounds: int, rate: int) -> list[dict[str, Any]]:
    ours, pipe, lags = Series(), Series(), []
    phases: dict[str, float] = {}
    bench.backupd("backup", SOURCE, "--kind", "full")
    with writers(bench.server, rate):
        for _ in range(rounds):
            pipe.runs.append(bench.pipe())
            run, outcome = bench.replica()
            ours.runs.append(run)
            lags.append(outcome["replica"]["lag"])
            phases = {one["name"]: one["seconds"] for one in outcome["phases"]}
    return [
        compared("new replica until caught up, CHECK TABLE included, against the pipe", ours, pipe, None)
        | {"phases": phases},
        {
            "work": "lag at hand-over",
            "ours": f"{max(lags):.1f} s",
            "yardstick": "3 s",
            "ratio": round(max(lags) / 3, 2),
            "goal": 1.0,
        },
    ]


def main(size: int = SIZE, rounds: int = ROUNDS, rate: int = RATE) -> str:
    before = os.getloadavg()[0]
    with operator_keys() as keys, short_directory("bench-") as base:
        base.chmod(0o755)
        with PrivateServer(tcp=True) as server:
            create(server, size)
            server.restart()
            rows = measure(Bench(base, server, keys), rounds, rate)
    print(json.dumps({"size": size, "rounds": rounds, "rows": rows}))
    about = (
        f"{format_size(size)} of sample data, {rate} commits a second; source and replica on {os.cpu_count()} cores. "
        f"Load of the machine (one minute): {before:.1f} before, {os.getloadavg()[0]:.1f} after."
    )
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in rows[0]["phases"].items())
    return f"{about}\n\n{table(rows)}\n\n- phases of the last one: {phases}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=parse_size, default=SIZE, help="at least 2GiB to count")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--rate", type=int, default=RATE, help="commits a second")
    options = parser.parse_args()
    print(main(options.size, options.rounds, options.rate))
