"""Timing a command: wall seconds, processor time, the peak memory of that one process; and tables of what came out."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Run:
    """``seconds`` of wall time, ``peak`` bytes of resident memory of the process itself (not of what it started);
    ``cpu``: processor seconds of it and of what it started and waited for."""

    seconds: float
    peak: int
    stdout: str
    cpu: float = 0.0

    def and_then(self, other: Run) -> Run:
        return Run(self.seconds + other.seconds, max(self.peak, other.peak), other.stdout, self.cpu + other.cpu)


@dataclass(slots=True)
class Series:
    """Repeated runs of one thing; reports medians."""

    runs: list[Run] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(run.seconds for run in self.runs)

    @property
    def cpu(self) -> float:
        return statistics.median(run.cpu for run in self.runs)

    @property
    def peak(self) -> int:
        return max(run.peak for run in self.runs)


def timed(argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Run:
    """Run ``argv`` to its end. Raises RuntimeError with its stderr when it fails."""
    before = os.times()
    started = time.perf_counter()
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, peak_of(process.pid))
            time.sleep(0.05)
        seconds = time.perf_counter() - started
        stdout, stderr = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{argv[0]} exited with {process.returncode}: {stderr[-3000:]}")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Run(seconds, peak, stdout, cpu)


def compared(work: str, ours: Series, yardstick: Series, goal: float | None) -> dict[str, Any]:
    """A row of ``table``."""
    return {
        "work": work,
        "ours": f"{ours.seconds:.1f} s",
        "yardstick": f"{yardstick.seconds:.1f} s",
        "ratio": round(ours.seconds / yardstick.seconds, 2),
        "goal": goal,
        "runs": {
            "ours": [round(run.seconds, 1) for run in ours.runs],
            "yardstick": [round(run.seconds, 1) for run in yardstick.runs],
        },
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| work | backupd | yardstick | ratio | goal | met |", "|---|---|---|---|---|---|"]
    for r in rows:
        goal, met = ("", "") if r["goal"] is None else (f"≤ {r['goal']}", "yes" if r["ratio"] <= r["goal"] else "NO")
        lines.append(f"| {r['work']} | {r['ours']} | {r['yardstick']} | {r['ratio']} | {goal} | {met} |")
    return "\n".join(lines)


def peak_of(pid: int) -> int:
    """Bytes of resident memory that a process had at most; 0 when it is over."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
