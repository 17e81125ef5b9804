"""What a change costs: two checkouts do the same work on the same server in turn, by processor time.

    python -m bench.versions --before ../old [--now .] [--size 512MiB] [--rounds 7]

``--before``, ``--now``: checkouts with an environment of their own (``scripts/setup``). Work: a full backup into an
empty repository, the restore of it with its checks, and binary logs from the server to the repository. Counted are
processor seconds (user and system) of the command and of all that it starts, agents that outlive it included; not those
of the server. Other work on the machine makes them more, so both do theirs in turn.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import shutil
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from backupd.model.text import format_size, parse_size
from bench.house import POLICY, SOURCE, House
from bench.measure import timed
from tests.support.keys import operator_keys, stop_agent
from tests.support.sample import create
from tests.support.servers.mariadb import PrivateServer
from tests.support.stores.folders import short_directory

GOAL = 1.05
SMALL, LARGE = 10_000, 60
"""Transactions of one row, and of some thousand rows, that a round's binary logs hold."""
WORKS = ("full backup", "restore of it, checked", "streaming of binary logs")
_PR_SET_CHILD_SUBREAPER = 36
_POLICY = f"{POLICY}binlog: {{stream: true}}\n"


@dataclass
class Version:
    """A checkout with an installation of its own, and the processor seconds of each round, by work."""

    house: House
    spent: dict[str, list[float]] = field(default_factory=lambda: {work: [] for work in WORKS})
    stored: int = 0

    def run(self, work: str, argv: list[str]) -> str:
        before = _children()
        out = timed(argv).stdout
        stop_agent(self.house.keys.secret_home)
        _reap()
        self.spent[work].append(_children() - before)
        return out


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _reap() -> None:
    """Count those, too, whose parents have ended: they are ours since, and end by themselves within moments."""
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        if os.waitpid(-1, os.WNOHANG) == (0, 0):
            time.sleep(0.1)


def write_logs(server: PrivateServer) -> None:
    server.execute(
        "DROP DATABASE IF EXISTS logs",
        "CREATE DATABASE logs",
        "CREATE TABLE logs.t (id INT AUTO_INCREMENT PRIMARY KEY, c CHAR(120), pad CHAR(60))",
        f"BEGIN NOT ATOMIC FOR i IN 1..{SMALL} DO INSERT INTO logs.t (c, pad) "
        "VALUES (SHA2(i, 256), MD5(i)); END FOR; END",
        "CREATE TABLE logs.u LIKE logs.t",
        *["INSERT INTO logs.u (c, pad) SELECT c, pad FROM logs.t"] * LARGE,
        "FLUSH BINARY LOGS",
    )


def measure(versions: list[Version], server: PrivateServer, rounds: int) -> None:
    for number in range(rounds):
        turns = versions if number % 2 == 0 else versions[::-1]
        for one in turns:
            one.house.fresh_repository()
            taken = one.run(WORKS[0], one.house.command("backup", SOURCE, "--kind", "full"))
            one.stored = json.loads(taken)["bytes_stored"]
        for one in turns:
            target = one.house.base / "whole"
            one.run(WORKS[1], one.house.command("restore", SOURCE, "--to", "latest", "--datadir", str(target)))
            shutil.rmtree(target)
        write_logs(server)
        for one in turns:
            one.run(
                WORKS[2], [str(one.house.program), "--config", str(one.house.config), "run-stream", SOURCE, "--once"]
            )
        print(
            f"round {number + 1}:",
            *(f"{work}: " + ", ".join(f"{one.spent[work][-1]:.2f}" for one in versions) for work in WORKS),
            sep="  ",
            flush=True,
        )


def rows(before: Version, now: Version) -> str:
    lines = [
        "| work | before | now | ratio of medians | before, least to most | now, least to most | goal | met |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for work in WORKS:
        old, new = before.spent[work], now.spent[work]
        ratio = statistics.median(new) / statistics.median(old)
        lines.append(
            f"| {work} | {statistics.median(old):.2f} s | {statistics.median(new):.2f} s | {ratio:.3f} | "
            f"{min(old):.2f} to {max(old):.2f} | {min(new):.2f} to {max(new):.2f} | ≤ {GOAL} | "
            f"{'yes' if ratio <= GOAL else 'NO'} |"
        )
    return "\n".join([*lines, "", f"Stored bytes of the full backup: {now.stored / before.stored:.3f} times."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--now", type=Path, default=Path.cwd())
    parser.add_argument("--size", type=parse_size, default=parse_size("512MiB"))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    # A checkout that may not keep what it compiled would compile itself in each command. The first round does it.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise SystemExit("orphans cannot be counted: prctl failed")
    quick: dict[str, str | int | None] = {
        "innodb_flush_log_at_trx_commit": 0,
        "sync_binlog": 0,
        "innodb_buffer_pool_size": "512M",
    }
    with operator_keys() as keys, PrivateServer(options=quick) as server, short_directory() as base:
        create(server, options.size, binlog=False)
        versions: list[Version] = []
        for checkout in (options.before, options.now):
            folder = base / str(len(versions))
            folder.mkdir()
            folder.chmod(0o755)
            versions.append(
                Version(House(folder, server, keys, policy=_POLICY, program=checkout.absolute() / ".venv/bin/backupd"))
            )
        measure(versions, server, options.rounds)
    print(f"\n{format_size(options.size)} of sample data, {options.rounds} rounds\n\n{rows(*versions)}")


if __name__ == "__main__":
    main()
