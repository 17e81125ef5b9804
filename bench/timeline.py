"""Deciding over very much archived binary log: the timeline, and plans to any kind of target. Seconds and memory.

Part of ``make bench``. 100,000 backups over eleven years; a million segments at three destinations, folded into runs
without a hole as the catalog keeps them; now and then the history forks. Each row is measured in its own process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

from backupd.model.backup_record import BackupRecord, Copy
from backupd.model.binlog import Branch, BranchReason, Ending, FilePosition, Run, SegmentKey, Stop
from backupd.model.server_facts import Position
from backupd.model.text import format_size
from backupd.recovery.timeline import timeline
from backupd.recovery.windows import RouteLeg
from bench.measure import timed
from bench.solving import BACKUPS, NOW, RUNS, SEGMENTS, STEP, records
from bench.solving import measure as measured
from restore.planning.planner import Preferences, make_plan
from restore.planning.target import parse_target
from restore.planning.target_resolution import History, Material

DESTINATIONS = ("local", "offsite", "vault")
BRANCHES = 10
FILES = SEGMENTS // len(DESTINATIONS)
FIRST = NOW - STEP * (BACKUPS + 1)
SPAN = STEP * (BACKUPS + 1)


def _moment(number: float) -> datetime:
    """When a file begins."""
    return FIRST + SPAN * (number / FILES)


def _state(number: float) -> str:
    return f"0-1-{int(number * 100) + 1}"


def branches() -> tuple[Branch, ...]:
    found: list[Branch] = []
    for index in range(BRANCHES):
        first = FILES * index // BRANCHES
        at = _moment(first) - timedelta(seconds=1)
        fork = Position(f"bin.{first - 1:06d}", 2**20, _state(first)) if index else None
        found.append(
            Branch(
                "shop",
                f"{at:%Y%m%dT%H%M%SZ}-{index:08x}",
                at,
                BranchReason.LOST_TAIL if index else BranchReason.FIRST,
                "",
                "mariadb",
                "bin",
                first,
                at - timedelta(seconds=1) if index else None,
                found[-1].id if index else None,
                fork,
                bool(index),
            )
        )
    return tuple(found)


def runs() -> tuple[Run, ...]:
    """A thousand at each destination, with one file missing between two of them at each place in turn."""
    found = []
    for place, name in enumerate(DESTINATIONS):
        for index in range(RUNS):
            first = FILES * index // RUNS
            last = FILES * (index + 1) // RUNS - 1
            torn = index % len(DESTINATIONS) == place or index % 20 == 0
            last -= torn
            branch = branches_by_file(first)
            found.append(
                Run(
                    "shop",
                    branch,
                    name,
                    first,
                    0,
                    last,
                    2**20,
                    _state(first),
                    _state(last + 1),
                    _moment(first),
                    _moment(last + 1),
                    _moment(last + 1),
                    2**20 * (last - first + 1),
                    2**18,
                    last - first + 1,
                    100,
                    ending=Ending.ROTATED,
                )
            )
    return tuple(found)


_LIST = branches()


def branches_by_file(number: int) -> str:
    return _LIST[min(number * BRANCHES // FILES, BRANCHES - 1)].id


def backups() -> list[BackupRecord]:
    found = []
    for record in records():
        number = FILES * ((record.finished_at - FIRST) / SPAN)
        position = Position(f"bin.{int(number):06d}", 400, _state(int(number)))
        copies = tuple(Copy(name, "complete", record.finished_at) for name in DESTINATIONS)
        found.append(replace(record, position=position, copies=copies))
    return found


class Sizes:
    """A resolver that knows everything at once: what the catalog takes is not measured here."""

    def stop_for_time(
        self, branch: str, start: FilePosition, end: FilePosition, moment: datetime, _since: datetime
    ) -> Stop | None:
        number = int(FILES * ((moment - FIRST) / SPAN))
        return self._at(branch, number, 500, moment) if start <= (number, 500) < end else None

    def later_before(self, *_asked: object) -> Stop | None:
        return None

    def stop_for_gtid(self, branch: str, gtid: str, *, before: bool) -> Stop | None:
        number = int(gtid.rpartition("-")[2]) // 100
        return self._at(branch, number, 400 + before) if branches_by_file(number) == branch else None

    def stop_for_position(self, branch: str, number: int, pos: int) -> Stop | None:
        return self._at(branch, number, pos) if branches_by_file(number) == branch else None

    def doubts(self, *_asked: object) -> tuple[str, ...]:
        return ()

    def repeats(self, _leg: RouteLeg) -> bool:
        return False

    def material(self, leg: RouteLeg, _stop: Stop) -> Material:
        keys = [
            SegmentKey(span.branch, number, 0, 2**20)
            for span in leg.spans
            for number in range(span.first[0], span.last[0] + (span.last[1] > 0))
        ]
        return Material(tuple(keys), 2**20 * len(keys), 100 * len(keys), (1,))

    def _at(self, branch: str, number: int, pos: int, at: datetime | None = None) -> Stop:
        return Stop(branch, f"bin.{number:06d}", pos, _state(number), at)


def _timeline() -> Callable[[], object]:
    known, folded = backups(), runs()
    return lambda: timeline("shop", known, _LIST, folded, now=NOW)


def _document() -> Callable[[], object]:
    found = timeline("shop", backups(), _LIST, runs(), now=NOW)
    return lambda: json.dumps(found.as_json())


def _planning(target: str) -> Callable[[], object]:
    known, history = backups(), History(_LIST, runs(), (), Sizes())
    return lambda: make_plan("shop", known, parse_target(target), Preferences(), now=NOW, history=history)


_OLD = FIRST + SPAN * 0.31
WORK: dict[str, Callable[[], Callable[[], object]]] = {
    "timeline": _timeline,
    "its JSON document": _document,
    "plan, latest": lambda: _planning("latest"),
    "plan, a time eight years ago": lambda: _planning(_OLD.isoformat()),
    "plan, a GTID": lambda: _planning(f"gtid:{_state(int(FILES * 0.313))}"),
}


def main() -> str:
    subject = f"over {BACKUPS:,} backups, {SEGMENTS:,} segments in {RUNS * len(DESTINATIONS):,} runs"
    lines = [f"| {subject} | seconds | ratio to 1 s | memory |", "|---|---|---|---|"]
    for name in WORK:
        found = json.loads(timed([sys.executable, "-m", "bench.timeline", name]).stdout)
        lines.append(f"| {name} | {found['seconds']:.2f} | {found['seconds']:.2f} | {format_size(found['bytes'])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1], WORK)) if len(sys.argv) > 1 else main())
