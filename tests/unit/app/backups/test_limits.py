"""The brake by itself, on a clock that only moves when somebody waits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest

from backupd.app.backups.limits import PressureThrottle
from backupd.app.context.wiring import JobRun
from backupd.model.errors import CancelledError, ServerError
from backupd.model.job import JobKind, JobRecord, JobState, Progress
from policies.policy import Limits


@dataclass
class Stage:
    """Reasons to wait, one for each look; then none. Each wait takes its time."""

    reasons: list[str]
    now: float = 0.0
    reported: list[str] = field(default_factory=list)
    reports: list[Progress] = field(default_factory=list)

    def __post_init__(self) -> None:
        job = JobRecord("1", str(JobKind.FULL), "db1", JobState.RUNNING, datetime(2026, 11, 21, tzinfo=UTC))
        self.run = JobRun(job, self.reports.append)
        self.looks: Iterator[str] = iter(self.reasons)

    def brake(self, **limits: Any) -> PressureThrottle:
        return PressureThrottle(
            Limits.model_validate(limits),
            self.run,
            pressure=lambda: next(self.looks, ""),
            report=self.reported.append,
            clock=lambda: self.now,
            wait=self.wait,
        )

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return self.run.cancel.is_set()


def test_without_pressure_nothing_waits_and_nothing_is_told() -> None:
    stage = Stage([])
    brake = stage.brake()
    for _ in range(10):
        brake.take(1000)
    assert (brake.taken, brake.paused, brake.pauses, brake.warnings) == (10_000, 0, 0, ())
    assert stage.now == 0
    assert stage.reported == []
    assert stage.reports == []


def test_work_pauses_while_there_is_pressure_and_then_goes_on() -> None:
    stage = Stage(["lag 93 s > 60 s", "lag 70 s > 60 s", "lag 40 s, more than half of 60 s"])
    brake = stage.brake()
    brake.take(500)
    assert stage.now == brake.paused == 3
    brake.take(500)
    assert brake.taken == 1000
    assert stage.reported == ["lag 93 s > 60 s"]
    assert brake.warnings == ("limits: the backup paused once, 3.0s in all, the first time because lag 93 s > 60 s",)


def test_progress_says_that_it_pauses_and_changes_with_each_tick() -> None:
    stage = Stage(["", "slow", "slow", "slow"])
    brake = stage.brake()
    brake.take(700)
    brake.take(1)
    assert [(one.phase, one.bytes_done, one.note) for one in stage.reports] == [
        ("paused", 700, f"slow; {seconds}s of at most 30m") for seconds in ("0.0", "1.0", "2.0")
    ]


def test_pauses_add_up_and_too_much_of_them_ends_the_run() -> None:
    stage = Stage([*(["slow disk"] * 6), "", *(["lag 93 s > 60 s"] * 50)])
    brake = stage.brake(max_pause="10s")
    brake.take(1)
    assert brake.paused == 6
    with pytest.raises(ServerError) as caught:
        brake.take(1)
    assert caught.value.message == "gave up after 11.0s of pauses: lag 93 s > 60 s"
    assert caught.value.retryable
    assert "limits.max_pause is 10.0s" in caught.value.detail
    assert stage.reported == ["slow disk", "lag 93 s > 60 s"]
    assert brake.pauses == 2


def test_a_pause_ends_when_somebody_cancels() -> None:
    stage = Stage(["slow"] * 100)
    brake = stage.brake()

    def cancel(_text: str) -> None:
        stage.run.cancel.set()

    brake = PressureThrottle(
        Limits.model_validate({}),
        stage.run,
        pressure=lambda: "slow",
        report=cancel,
        clock=lambda: stage.now,
        wait=stage.wait,
    )
    with pytest.raises(CancelledError):
        brake.take(1)
    assert stage.now == 1
    with pytest.raises(CancelledError):
        brake.take(1)


def test_each_destination_gets_a_throttle_of_its_own() -> None:
    stage = Stage([])
    brake = stage.brake(send="1KiB")
    first, second = brake.send(), brake.send()
    first.take(1024)
    second.take(1024)
    stage.run.cancel.set()
    with pytest.raises(CancelledError):
        first.take(1024)
    free = stage.brake().send()
    free.take(2**40)
