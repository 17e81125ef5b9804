"""Timing a command: wall seconds and the peak memory of that one process."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Run:
    """``seconds`` of wall time, ``peak`` bytes of resident memory of the process itself (not of what it started)."""

    seconds: float
    peak: int
    stdout: str


@dataclass(slots=True)
class Series:
    """Repeated runs of one thing; reports medians."""

    runs: list[Run] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(run.seconds for run in self.runs)

    @property
    def peak(self) -> int:
        return max(run.peak for run in self.runs)


def timed(argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Run:
    """Run ``argv`` to its end. Raises RuntimeError with its stderr when it fails."""
    started = time.perf_counter()
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        peak = 0
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            peak = max(peak, _high_water(status))
            time.sleep(0.05)
        seconds = time.perf_counter() - started
        stdout, stderr = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{argv[0]} exited with {process.returncode}: {stderr[-3000:]}")
    return Run(seconds, peak, stdout)


def _high_water(status: Path) -> int:
    try:
        lines = status.read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
