"""A day on which much breaks, at a real mail server: one mail for each cause, and one when it is well, though the
service is killed again and again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.app.alerting.notifier import AlertNotifier, Pace
from backupd.app.alerting.sender import due, send_one
from backupd.app.binlogs.stream_report import CatalogRecorder, StreamReport
from backupd.app.context.wiring import Wiring
from backupd.app.jobs.jobs import close
from backupd.app.runtime import child_process
from backupd.app.runtime.child_process import CatalogWriter
from backupd.app.views.capacity import FillingWatch
from backupd.app.views.destinations import ReachWatch, destination_views
from backupd.binlog.spool_files import Spool
from backupd.binlog.stream_status import StreamState, StreamStatus
from backupd.catalog.session import open_catalog
from backupd.model.backup_record import Copy
from backupd.model.errors import BackupdError
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.model.text import new_id
from storage.destination import Space
from tests.support.catalog import samples
from tests.support.service.house import GOLD, Clock, Office
from tests.support.service.mail_server import MailBox, mail_server

DAWN = datetime(2026, 11, 21, 0, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)
STEP = timedelta(minutes=5)
GB = 10**9
MAIL = "alerts: {{email: {{smtp: '{url}', from: b@example.com, to: [dba@example.com]}}}}\n"
POLICY = GOLD + "binlog: {checkpoint: 5s}\n"
SERVER_DOWN, DISK_FULL, AWAY, PROOF = (
    "db1: binary log is not streamed",
    "destination local fills up",
    "destination local cannot be reached",
    "db1: test-restore failed",
)
TROUBLES: dict[str, tuple[float, ...]] = {SERVER_DOWN: (1, 14), DISK_FULL: (4, 19), AWAY: (7, 14), PROOF: (10,)}
"""The hours at which each begins; it lasts for one and a half. At 14 the host of server and destination is down."""
LASTS = 1.5


@dataclass
class Service:
    """What of a service watches, decides and mails; all of it is made anew when it was killed."""

    wiring: Wiring
    clock: Clock
    writer: CatalogWriter
    dice: random.Random
    space: Space = field(default_factory=lambda: Space(1000 * GB, 500 * GB))

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        server = self.wiring.settings.server("db1")
        recorder = CatalogRecorder("db1", self.writer, self.clock)
        spool = Spool(self.wiring.settings.spool / "db1")
        self.report = StreamReport(server, self.writer, recorder, spool, self.clock)
        self.reach, self.filling = ReachWatch(), FillingWatch()
        self.notifier = AlertNotifier(self.wiring, Pace(settle=0.0), self.clock.passing)

    def step(self, broken: set[str]) -> None:
        """One round of everything; it may be killed after each part of it."""
        parts: list[Callable[[], object]] = [
            lambda: self.stream(SERVER_DOWN in broken),
            lambda: self.filling.step(self.wiring, self.clock.now),
            self.look_at_destination,
            self.notifier.begin,
            self.notifier.step,
            self.send,
            self.notifier.step,
            self.send,
        ]
        for part in parts:
            part()
            if self.dice.random() < 0.05:
                self.start()
                return

    def stream(self, down: bool) -> None:
        state = StreamState.WAITING if down else StreamState.STREAMING
        since = self.clock.now - STEP
        self.report.beat(StreamStatus(state, since, error="db1 does not answer" if down else ""), {}, {})

    def look_at_destination(self) -> None:
        deadline = time.monotonic() + 240
        while destination_views(self.wiring, self.clock.now)[0].checked_at != self.clock.now:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        self.reach.step(self.wiring, self.clock.now)

    def send(self) -> None:
        for message in due(self.wiring, "email"):
            send_one(self.wiring, message)

    def prove(self, *, fails: bool) -> None:
        now = self.clock.now
        job = JobRecord(
            new_id(now), JobKind.TEST_RESTORE, "db1", JobState.RUNNING, now, started_at=now, token=1, leg="test-restore"
        )
        self.wiring.catalog.jobs.add(job)
        error = BackupdError("table shop.orders differs") if fails else None
        close(self.wiring, job, JobState.FAILED if fails else JobState.SUCCEEDED, error=error)


@pytest.fixture
def box() -> Iterator[MailBox]:
    with mail_server() as found:
        yield found


@pytest.mark.parametrize("seed", range(2))
def test_a_day_of_troubles_is_one_mail_for_each_and_one_when_it_is_well(
    short_tmp: Path, box: MailBox, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(child_process, "PATIENCE", 240)  # a slow machine is no catalog that does not answer
    office, clock = Office(short_tmp), Clock(DAWN)
    mail = MAIL.format(url=box.url)
    settings = office.write(extra=mail, gold=POLICY)
    with CatalogWriter(settings.catalog) as writer, open_catalog(settings.catalog) as catalog:
        wiring = Wiring(settings, catalog, clock)
        service = Service(wiring, clock, writer, random.Random(seed))
        destination = wiring.destination("local")
        destination.initialise(DAWN)
        monkeypatch.setattr(type(destination), "space", lambda _self: service.space)
        at = DAWN - HOUR
        record = samples.backup(server="db1", copies=(Copy("local", "complete", at, at),))
        catalog.backups.add(replace(record, started_at=at - HOUR, finished_at=at))
        marker = short_tmp / "repository" / "repository.json"
        expected: list[str] = []
        broken: set[str] = set()
        while clock.now < DAWN + 24 * HOUR:
            hour = (clock.now - DAWN) / HOUR
            now_broken = {name for name, begins in TROUBLES.items() if any(at <= hour < at + LASTS for at in begins)}
            expected += [f"ERROR {name}" for name in now_broken - broken]
            expected += [f"RECOVERED {name}" for name in broken - now_broken]
            service.space = Space(1000 * GB, (20 if DISK_FULL in now_broken else 500) * GB)
            if (AWAY in now_broken) is not (AWAY in broken):
                away = marker.with_name("away")
                (marker.rename(away) if AWAY in now_broken else away.rename(marker))
            if (PROOF in now_broken) is not (PROOF in broken):
                service.prove(fails=PROOF in now_broken)
            broken = now_broken
            service.step(broken)
            clock.sleep(STEP)
        assert not catalog.incidents.open()
        assert sorted(subject.removeprefix("[backupd] ") for subject in box.subjects()) == sorted(expected)
        assert len(expected) == 14
