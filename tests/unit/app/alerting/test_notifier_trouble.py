"""What used to be reported wrongly: things that come and go, clocks ahead, what is taken out of the configuration
while it is broken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.alerts.conditions import Condition, Key, Need
from backupd.alerts.rules import KINDS, PLACE_RPO, RPO, RTO, RULES, STREAM, topic_of
from backupd.app.alerting.notifier import AlertNotifier, Pace
from backupd.app.context.incidents import Incidents
from backupd.app.context.wiring import Wiring
from backupd.app.jobs.jobs import close
from backupd.catalog.backups import Absence
from backupd.catalog.session import open_catalog
from backupd.model.errors import BackupdError
from backupd.model.event import Event, Severity
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.model.text import new_id
from tests.support.service.house import GOLD, Clock, Office

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)
AHEAD = timedelta(days=700)
MAIL = "alerts: {{email: {{smtp: 'smtp://localhost:1', from: b@example.com, to: [dba@example.com]}}{more}}}\n"
PROMISES = GOLD + "binlog: {}\nobjectives: {rpo: 2m, rto: 1h}\n"


@dataclass
class Desk:
    office: Office
    wiring: Wiring
    clock: Clock
    desk: AlertNotifier
    seen: set[str] = field(default_factory=set)

    def happen(self, kind: str, subject: str = "", *, server: str = "db1", severity: Severity = Severity.ERROR) -> None:
        self.wiring.catalog.events.add(
            Event(self.clock.now, kind, severity, f"{kind} happened", server=server, subject=subject)
        )

    def go(self, time: timedelta = timedelta(minutes=1), looks: int = 4) -> None:
        for _ in range(looks):
            self.desk.step()
            self.clock.sleep(time / looks)
        self.desk.step()

    def configure(self, *, more: str = "", servers: tuple[str, ...] = ("db1", "db2"), gold: str = PROMISES) -> None:
        settings = self.office.write(extra=MAIL.format(more=more), servers=dict.fromkeys(servers, "gold"), gold=gold)
        self.wiring = replace(self.wiring, settings=settings)
        self.desk.reload(self.wiring)

    def notified(self) -> list[str]:
        """Subjects of messages since the last time, oldest first."""
        found = [one for one in reversed(self.wiring.catalog.messages.list()) if one.id not in self.seen]
        self.seen |= {one.id for one in found}
        return [one.subject.removeprefix("[backupd] ") for one in found]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    office, clock = Office(tmp_path), Clock(NOW)
    settings = office.write(extra=MAIL.format(more=""), servers={"db1": "gold", "db2": "gold"}, gold=PROMISES)
    with open_catalog(settings.catalog) as catalog:
        wiring = Wiring(settings, catalog, clock)
        news = AlertNotifier(wiring, Pace(settle=0.0), clock.passing)
        news.begin()
        clock.sleep(HOUR)
        yield Desk(office, wiring, clock, news)


def test_a_stream_that_comes_and_goes_all_day_is_few_mails_and_mutes_nobody(desk: Desk) -> None:
    for number in range(200):
        desk.happen(
            STREAM.mended if number % 2 else STREAM.broken,
            "stream",
            severity=Severity.INFO if number % 2 else Severity.ERROR,
        )
        desk.go(timedelta(minutes=2), 2)
    found = desk.notified()
    assert len(found) == 6, found
    assert found[-1].startswith("STILL ERROR")
    assert any("flapping" in one.content for one in desk.wiring.catalog.messages.list())
    desk.happen(RPO.broken)
    desk.go()
    assert desk.notified() == ["ERROR db1: recovery point objective (RPO) is not met"]
    desk.go(HOUR)
    assert desk.notified() == ["RECOVERED db1: binary log is not streamed"]


def test_a_clock_that_is_ahead_for_a_minute_ends_nothing_and_puts_off_nothing(desk: Desk) -> None:
    desk.happen("retention-refused", "local")
    desk.happen("key-expiring", "K", server="")
    desk.go()
    assert len(desk.notified()) == 2
    desk.clock.now += AHEAD
    desk.happen(STREAM.broken, "stream")
    desk.happen("binlog-gap", "branch")
    desk.go()
    assert sorted(word.split()[0] for word in desk.notified()) == ["ERROR", "ERROR"]
    desk.clock.now -= AHEAD
    desk.go(6 * HOUR, 24)
    assert "STILL ERROR db1: binary log is not streamed" in desk.notified()
    assert len(desk.wiring.catalog.incidents.open()) == 4
    assert all(one.opened_at < desk.clock.now for one in desk.wiring.catalog.incidents.open())
    start = desk.clock.now
    desk.wiring.catalog.jobs.add(
        JobRecord("j1", JobKind.FULL, "db1", JobState.RUNNING, start, started_at=start, token=1)
    )
    desk.wiring.catalog.jobs.finish("j1", JobState.SUCCEEDED, start, token=1, result="backup-7")
    desk.go()
    assert desk.notified() == ["RECOVERED db1: binary logs are missing"]


def test_a_server_that_is_taken_out_is_not_called_well_and_is_told_again_when_it_is_back(desk: Desk) -> None:
    incidents = Incidents(desk.wiring.catalog)  # of a process that goes on
    broken = Condition(Key(RPO, "db1"), Severity.ERROR, "too much would be lost")
    assert incidents.settle(NOW, broken).opened
    desk.go()
    assert desk.notified() == ["ERROR db1: recovery point objective (RPO) is not met"]
    desk.configure(servers=("db2",))
    desk.go()
    assert desk.notified() == ["NOT WATCHED db1: recovery point objective (RPO) is not met"]
    desk.configure()
    assert incidents.settle(desk.clock.now, broken).opened
    desk.go()
    assert desk.notified() == ["ERROR db1: recovery point objective (RPO) is not met"]
    assert not incidents.settle(NOW, broken).opened


def test_a_server_that_is_taken_out_while_it_is_out_of_rotation_stays_away_until_it_is_back(desk: Desk) -> None:
    desk.wiring.catalog.absences.begin(Absence("db1", "j1", NOW, "/bin/false"))
    desk.happen("hook-failed", "after")
    desk.go()
    desk.configure(servers=("db2",))
    desk.go()
    assert desk.notified() == ["ERROR db1: the hook after fails"]
    desk.wiring.catalog.absences.end("db1", "j1")
    desk.happen("hook-recovered", "after", severity=Severity.INFO)
    desk.go()
    assert desk.notified() == ["RECOVERED db1: the hook after fails"]


def test_what_leaves_the_configuration_is_over(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "url").write_text("http://127.0.0.1:1/\n")
    desk.configure(more=f", heartbeat: {{url_file: {tmp_path}/url}}")
    for pair in (RPO, RTO):
        desk.happen(pair.broken)
    desk.happen(STREAM.broken, "stream")
    desk.happen("heartbeat-failed", "heartbeat", server="")
    desk.happen(PLACE_RPO.broken, "nas")
    desk.happen("destination-unreachable", "gone", server="")
    desk.happen("destination-unreachable", "local", server="")
    desk.happen("job-failed", "replicate/nas")
    for subject in ("json-1", "email to boss@example.com"):
        desk.happen("alerts-undeliverable", subject, server="")
    desk.go(looks=1)
    desk.configure(gold=GOLD)
    desk.go(timedelta(minutes=3))
    assert [(one.kind, one.subject) for one in desk.wiring.catalog.incidents.open()] == [
        ("destination-unreachable", "local")
    ]
    assert not [word for word in desk.notified() if "RECOVERED" in word]


def test_every_topic_that_may_be_left_is_one(desk: Desk) -> None:
    left = [kind for kind in KINDS if kind.needs is not Need.NOTHING]
    assert {kind.needs for kind in left} == set(Need) - {Need.NOTHING}
    for kind in left:
        desk.happen(kind.broken, "gone")
    desk.go(looks=1)
    told = {topic_of(one.kind) for one in desk.wiring.catalog.incidents.list()}
    assert told == {RULES[kind.broken].topic for kind in left}
    desk.configure(gold=GOLD)
    desk.go()
    assert not desk.wiring.catalog.incidents.open()


def test_what_ends_while_no_mail_goes_is_told_afterwards(desk: Desk) -> None:
    for number in range(5):
        desk.happen(
            STREAM.mended if number % 2 else STREAM.broken,
            "stream",
            severity=Severity.INFO if number % 2 else Severity.ERROR,
        )
        desk.go()
    desk.wiring.catalog.incidents.record((), (), {"alerts-muted": int(desk.clock.now.timestamp())})
    desk.clock.sleep(timedelta(minutes=1))
    desk.happen(STREAM.mended, "stream", severity=Severity.INFO)
    desk.notified()
    desk.desk = AlertNotifier(desk.wiring, Pace(settle=0.0), desk.clock.passing)  # a new process
    desk.go(HOUR, 30)
    desk.go(HOUR, 30)
    assert sorted(word.split(" db1")[0].split(" since")[0] for word in desk.notified()) == [
        "ERROR summary",
        "RECOVERED",
    ]


def restored(desk: Desk, folder: str, state: JobState) -> None:
    job = JobRecord(
        new_id(desk.clock.now),
        JobKind.RESTORE,
        "db1",
        JobState.RUNNING,
        desk.clock.now,
        started_at=desk.clock.now,
        token=1,
        arguments={"target": "latest", "datadir": folder},
    )
    desk.wiring.catalog.jobs.add(job)
    close(desk.wiring, job, state, error=None if state is JobState.SUCCEEDED else BackupdError("rot"))
    desk.go()


def test_a_restore_that_goes_well_says_nothing_about_another_one(desk: Desk) -> None:
    restored(desk, "/srv/a", JobState.FAILED)
    restored(desk, "/srv/b", JobState.SUCCEEDED)
    assert desk.notified() == ["ERROR db1: restore failed"]
    restored(desk, "/srv/a", JobState.SUCCEEDED)
    assert desk.notified() == ["RECOVERED db1: restore failed"]


def test_what_goes_on_being_told_though_nobody_should_look_is_no_storm(desk: Desk) -> None:
    for _ in range(30):
        desk.happen("job-failed", "verify", server="gone")
        desk.go(timedelta(minutes=2))
    assert len(desk.notified()) == 5
