"""Deciding over very much history: what to keep, and where a restore begins. Seconds and the memory that it takes.

Part of ``make bench``. A million binary log segments are a thousand runs without a gap: they are folded when they are
recorded, which is not measured here. Each row is measured in a process of its own.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from backupd.app.retention.decisions import solve
from backupd.app.retention.rules import BinlogRun, Stored, View
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState, Copy, Stats
from backupd.model.server_facts import Position
from backupd.model.text import format_size
from bench.measure import timed
from policies.policy import Keep
from restore.planning.planner import Preferences, make_plan
from restore.planning.target import parse_target

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
BACKUPS, RUNS, SEGMENTS = 100_000, 1_000, 1_000_000
CHAIN = 15
STEP = timedelta(hours=1)
GOLD = {"recovery_window": "30d", "keep_fulls": 20, "hourly": 48, "daily": 30, "weekly": 26, "monthly": 36, "yearly": 7}
EVERYTHING = {
    "recovery_window": "9999d",
    "keep_fulls": 10**9,
    "hourly": 10**9,
    "daily": 10**9,
    "weekly": 10**9,
    "monthly": 10**9,
    "yearly": 10**9,
}


def _name(number: int) -> str:
    return f"{NOW - STEP * (BACKUPS - number):%Y%m%dT%H%M%SZ}-{number:08x}"


def history() -> View:
    """Hourly backups over eleven years, a full one and then increments; some rotted, some proved."""
    backups = []
    for number in range(BACKUPS):
        at = NOW - STEP * (BACKUPS - number)
        full = number % CHAIN == 0
        backups.append(
            Stored(
                _name(number),
                BackupKind.PHYSICAL_FULL if full else BackupKind.PHYSICAL_INCREMENTAL,
                None if full else _name(number - 1),
                at - STEP / 4,
                at,
                usable=number % 997 != 0,
                proved_at=at if number % 24 == 0 else None,
                bytes=10**9,
            )
        )
    span = STEP * BACKUPS / RUNS
    runs = tuple(
        BinlogRun(f"run {number}", NOW - span * (RUNS - number), NOW - span * (RUNS - number - 1) - STEP / 60)
        for number in range(RUNS)
    )
    return View("shop", "local", tuple(backups), runs)


def records() -> list[BackupRecord]:
    """The same history as the planner gets it."""
    return [
        BackupRecord(
            id=backup.id,
            server="shop",
            kind=backup.kind,
            state=BackupState.COMPLETE,
            parent=backup.parent,
            started_at=backup.started_at,
            finished_at=backup.finished_at,
            stats=Stats(1, 1, 1, 1, 0),
            position=Position(f"binlog.{number:06}", 4, f"0-1-{number}"),
            flavour="mariadb",
            server_version="10.11.6",
            tool_version="10.11.6",
            copies=(Copy("local", "complete", backup.finished_at),),
            from_lsn=0 if backup.parent is None else number,
            to_lsn=number + 1,
        )
        for number, backup in enumerate(history().backups)
    ]


def _solving(keep: dict[str, object]) -> Callable[[], object]:
    view, rules = history(), Keep.model_validate(keep)
    return lambda: solve(view, rules, now=NOW, zone=ZoneInfo("Europe/Berlin"))


def _explaining() -> Callable[[], object]:
    decisions = solve(history(), Keep.model_validate(GOLD), now=NOW, zone=ZoneInfo("Europe/Berlin"))
    return lambda: json.dumps(decisions.as_json())


def _planning(target: str) -> Callable[[], object]:
    backups = records()
    return lambda: make_plan("shop", backups, parse_target(target), Preferences(), now=NOW)


WORK: dict[str, Callable[[], Callable[[], object]]] = {
    "retention, gold policy": lambda: _solving(dict(GOLD)),
    "retention, rules that keep everything": lambda: _solving(dict(EVERYTHING)),
    "its whole document with every reason": _explaining,
    "plan, latest": lambda: _planning("latest"),
    "plan, an old backup by id": lambda: _planning(f"backup:{_name(CHAIN * 7 - 1)}"),
}


def measure(name: str, works: Mapping[str, Callable[[], Callable[[], object]]]) -> dict[str, float]:
    """In this process: seconds of the work itself, and by how much it raised the peak of the memory."""
    work = works[name]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024}


def main() -> str:
    lines = [
        f"| over {BACKUPS:,} backups, {SEGMENTS:,} segments in {RUNS:,} runs | seconds | ratio to 1 s | memory |",
        "|---|---|---|---|",
    ]
    for name in WORK:
        found = json.loads(timed([sys.executable, "-m", "bench.solving", name]).stdout)
        lines.append(f"| {name} | {found['seconds']:.2f} | {found['seconds']:.2f} | {format_size(found['bytes'])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], WORK)) if len(sys.argv) > 1 else main())
