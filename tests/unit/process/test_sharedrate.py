from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from backupd.model.errors import RefusedError
from backupd.process.throttle import SharedBucket
from tests.unit.process.test_throttle import Clock


def test_two_of_one_name_have_one_rate_together(tmp_path: Path) -> None:
    clock = Clock()
    one, other, apart = (
        SharedBucket(100, name, folder=tmp_path, clock=clock, wait=clock.wait) for name in ("x", "x", "y")
    )
    one.take(100)  # the burst
    assert clock.waits == []
    other.take(50)
    one.take(100)
    assert clock.waits == [0.5, 1.0]
    apart.take(100)
    assert clock.waits == [0.5, 1.0]


def test_after_a_restart_of_the_machine_it_begins_afresh(tmp_path: Path) -> None:
    clock = Clock()
    SharedBucket(100, "x", folder=tmp_path, clock=clock, wait=clock.wait).take(1_000)
    assert clock.waits == [9.0]
    clock.now -= 900
    SharedBucket(100, "x", folder=tmp_path, clock=clock, wait=clock.wait).take(100)
    assert clock.waits == [9.0]


_TAKER = """
import sys
from pathlib import Path
from backupd.process.throttle import SharedBucket
bucket = SharedBucket(1e6, "x", folder=Path(sys.argv[1]), clock=lambda: 5.0, wait=lambda _seconds: False)
for _ in range(3000):
    bucket.take(1)
"""


def test_nothing_is_taken_twice_by_processes_at_once(tmp_path: Path) -> None:
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", _TAKER, str(tmp_path)],
            env=dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
        )
        for _ in range(3)
    ]
    assert [taker.wait(300) for taker in takers] == [0, 0, 0]
    clock = Clock(Fraction(5))
    last = SharedBucket(1e6, "x", folder=tmp_path, clock=clock, wait=clock.wait)
    last.take(1_000_000 - 9_000)
    assert clock.waits == [], "what is left of the burst"
    last.take(1)
    assert clock.waits == [pytest.approx(1e-6)]


def test_a_file_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to("/etc/passwd")
    with pytest.raises(RefusedError, match="by which processes share a rate"):
        SharedBucket(100, "x", folder=tmp_path).take(1)
