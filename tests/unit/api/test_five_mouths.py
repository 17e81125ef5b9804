"""One state of an installation, told by five mouths: command line, REST, page, metrics, mail. In each state they say
the same, and when everything has healed all of them say so."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.alerts.conditions import Condition, Key
from backupd.alerts.rules import CHANGED, STREAM
from backupd.app.alerting.notifier import AlertNotifier, Pace
from backupd.app.alerting.service import report_now
from backupd.app.backup_records import report_foreign
from backupd.app.context.incidents import Incidents
from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import JobRun, Result, Wiring, owner
from backupd.app.service.dispatch import run_here
from backupd.app.views.destinations import ReachWatch, destination_views
from backupd.app.views.objectives import ObjectivesWatch
from backupd.app.views.timeline import timeline
from backupd.catalog.session import Catalog
from backupd.cli.main import main
from backupd.model.access import Role
from backupd.model.backup_record import BackupKind, BackupRecord, Copy, Stats
from backupd.model.binlog import Branch, BranchReason, Ending, Gap, Segment
from backupd.model.errors import BackupdError, RefusedError
from backupd.model.event import Event, Severity
from backupd.model.job import JobKind, Progress
from backupd.model.proof import FAILED, PROVED
from backupd.model.server_facts import Identity, Position, Verdict
from backupd.model.text import new_id
from tests.support.catalog import samples
from tests.support.service.house import GOLD, Office
from tests.support.service.mouths import Mouths, State, mailed, words
from tests.support.service.rig import Rig, rig

SERVER = "db1"
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
POLICY = (
    GOLD.replace("required: [local]", "required: [local], others: [offsite]")
    + "binlog: {stream: true}\nobjectives: {rpo: 10m, rto: 30d}\nretry: {attempts: 1}\n"
    "protection: {copies: 2, off_site: 1}\n"
)
MAIL = 'alerts:\n  email: {smtp: "smtp://localhost:1", from: backupd@example.com, to: [dba@example.com]}\n'
FILE = "binlog.000001"


def silent(_progress: Progress) -> None:
    pass


@dataclass
class Installation:
    """``mouths`` say what has come of what is done to it here."""

    site: Rig
    mouths: Mouths
    objectives: ObjectivesWatch = field(default_factory=lambda: ObjectivesWatch(timeline))
    desk: AlertNotifier = field(init=False)
    branch: str = field(default_factory=lambda: new_id(datetime.now(UTC) - 30 * DAY))
    pos: int = 1000

    def __post_init__(self) -> None:
        self.incidents = Incidents(self.catalog)
        self.desk = AlertNotifier(self.site.wiring, Pace(settle=0.0, bursts=100), time.monotonic)
        self.desk.begin()

    @property
    def catalog(self) -> Catalog:
        return self.site.catalog

    @property
    def wiring(self) -> Wiring:
        return self.site.wiring

    def now(self) -> datetime:
        return self.wiring.clock()

    def say(self) -> State:
        """Let the watches look, and everybody say what is so."""
        self.objectives.step(self.wiring, self.now())
        self.desk._covered = None  # a look for backups that end incidents is due
        self.desk.step()
        state = self.mouths.agree()
        letter = report_now(self.wiring, self.now()).as_text()
        line = next(line for line in letter.splitlines() if line.startswith(f"{SERVER} "))
        assert state.status in line, letter
        if state.reasons:  # of which a letter gives the beginning
            assert words(state.reasons[0])[:60] in words(letter)
        mailed(
            [message.subject for message in self.catalog.messages.list(limit=500)],
            self.catalog.incidents.list(limit=500),
        )
        return state

    def clean(self) -> None:
        """And that nothing is wrong."""
        self.say()
        self.mouths.clean()

    # -- what there is

    def backup(self, *, ago: timedelta = timedelta(0), uuid: str = "uuid", **others: object) -> BackupRecord:
        at = self.now() - ago
        copies = tuple(Copy(name, "complete", at, at) for name in ("local", "offsite"))
        record = replace(
            samples.backup(server=SERVER, copies=copies),
            id=new_id(at),
            started_at=at - timedelta(milliseconds=1),
            finished_at=at,
            server_uuid=uuid,
            stats=Stats(10**9, 10**8, 10**8, 10, 0),
            warnings=(),
            manifest="a" * 64,
            position=Position(FILE, 100, "0-1-100"),
            **others,  # type: ignore[arg-type]  # of its fields
        )
        self.catalog.backups.add(record)
        return record

    def logs(self, until: datetime) -> None:
        """Binary logs up to ``until``, at both places."""
        begun = self.now() - 30 * DAY
        self.catalog.binlogs.add_branch(
            Branch(SERVER, self.branch, begun, BranchReason.FIRST, "uuid", "mariadb", "binlog", 1)
        )
        for place in ("local", "offsite"):
            self.catalog.binlogs.add_segment(
                Segment(
                    SERVER,
                    self.branch,
                    FILE,
                    1,
                    0,
                    self.pos,
                    Ending.OPEN,
                    "",
                    "0-1-500",
                    500,
                    begun,
                    until - MINUTE,
                    False,
                    (1,),
                    "mariadb",
                    "10.11.19",
                    "0" * 64,
                ),
                place,
                500,
                self.now(),
            )
        self.confirm(until)

    def confirm(self, until: datetime) -> None:
        for place in ("local", "offsite"):
            self.catalog.binlogs.confirm(SERVER, place, self.branch, (1, self.pos), until)

    def stream(self, state: str = "streaming", error: str = "", **places: dict[str, str]) -> None:
        self.catalog.binlogs.set_stream_state(
            SERVER,
            {
                "state": state,
                "since": "2026-11-21T10:00:00Z",
                "error": error,
                "trouble": "",
                "destinations": places,
                "owner": owner(),
                "spool_bytes": 7,
                "max_spool_bytes": 9,
            },
            self.now(),
        )

    def job(self, kind: JobKind, work: Callable[[JobRun], Result] = lambda _run: Result()) -> None:
        with suppress(BackupdError):
            run_here(self.wiring, kind, SERVER, work, report=silent)

    def proof(self, outcome: str) -> None:
        at = self.now()
        self.catalog.proofs.add(
            replace(
                samples.proof(outcome=outcome),
                id=new_id(at),
                server=SERVER,
                target="latest",
                started_at=at - MINUTE,
                finished_at=at,
            )
        )


@pytest.fixture
def office(short_tmp: Path) -> Office:
    made = Office(short_tmp, {SERVER: "gold"}, {"gold": POLICY})
    for name in ("repository", "offsite"):
        (short_tmp / name).mkdir()
    with suppress(BackupdError):  # the second place comes with the next line
        made.write(extra=MAIL)
    away = f"  offsite: {{type: filesystem, path: {short_tmp}/offsite, off_site: true}}\n"
    made.file.write_text(made.file.read_text().replace("destinations:\n", f"destinations:\n{away}"))
    return made


@pytest.fixture
def young(
    office: Office, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Installation]:
    """Where nothing has been done yet."""
    monkeypatch.setenv("BACKUPD_CONFIG", str(office.file))
    monkeypatch.setenv("BACKUPD_RUNTIME", str(office.base / "run"))

    def command(*words: str) -> object:
        capsys.readouterr()
        main([*words, "--json"])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return json.loads(out)

    with rig(load_settings(office.file)) as site:
        for name in ("local", "offsite"):
            site.wiring.destination(name).initialise(site.wiring.clock())
        yield Installation(site, Mouths(command, site.client(Role.VIEWER), SERVER))


@pytest.fixture
def home(young: Installation) -> Installation:
    """Where all is well: backups at both places, proved, and a stream."""
    young.job(JobKind.FULL)
    young.backup(ago=HOUR)
    young.logs(young.now())
    young.stream()
    young.proof(PROVED)
    young.clean()
    return young


def test_before_the_first_backup_is_due_nobody_promises_anything_and_nobody_is_alarmed(young: Installation) -> None:
    young.stream()
    state = young.say()
    assert (state.status, state.told, state.server["latest"]) == ("warning", [], None)
    assert "no backup has been taken yet" in state.reasons[0]
    assert state.timeline["first_due"] is not None
    young.job(JobKind.FULL, lambda run: _cancelled(young, run))
    assert (young.say().told, young.catalog.jobs.list(SERVER)[0].state) == ([], "cancelled")
    young.job(JobKind.FULL, _fails)
    state = young.say()
    assert (state.status, state.timeline["first_due"]) == ("bad", None)
    assert state.kinds == {"job-failed", "rpo-broken"}
    young.backup()
    young.job(JobKind.FULL)
    young.logs(young.now())
    young.clean()


def _cancelled(home: Installation, run: JobRun) -> Result:
    home.catalog.jobs.request_cancel(run.job.id, "anna", home.now())
    raise KeyboardInterrupt


def _fails(_run: JobRun) -> Result:
    raise RefusedError("no room left on the planet", hint="find another planet")


def test_a_failed_job(home: Installation) -> None:
    home.job(JobKind.FULL, _fails)
    state = home.say()
    assert (state.status, state.kinds) == ("warning", {"job-failed"})
    assert "no room left on the planet" in state.reasons
    home.job(JobKind.FULL)
    home.clean()


def test_a_partial_backup(home: Installation) -> None:
    home.backup(kind=BackupKind.LOGICAL, tables_missing=1)
    home.job(JobKind.LOGICAL, lambda _run: Result(problem=BackupdError("1 table is missing"), partial=True))
    state = home.say()
    assert (state.status, state.kinds) == ("warning", {"job-partial"})
    home.backup(kind=BackupKind.LOGICAL, tables_missing=0)
    home.job(JobKind.LOGICAL)
    home.clean()


def test_a_proof_that_failed(home: Installation) -> None:
    home.proof(FAILED)
    home.job(JobKind.TEST_RESTORE, lambda _run: Result(problem=BackupdError("rows differ")))
    state = home.say()
    assert (state.status, state.kinds) == ("bad", {"job-failed"})
    assert state.timeline["last_proof"]["outcome"] == state.server["last_proof"]["outcome"] == FAILED
    home.proof(PROVED)
    home.job(JobKind.TEST_RESTORE)
    home.clean()


def test_an_exceeded_rpo(young: Installation) -> None:
    young.job(JobKind.FULL)
    young.backup(ago=HOUR)
    young.logs(young.now() - 20 * MINUTE)
    young.stream()
    state = young.say()
    assert (state.status, state.kinds) == ("bad", {"rpo-broken"})
    assert re.search(r"data loss if the server failed now: \d.*; objectives\.rpo is 10m$", state.reasons[0])
    young.confirm(young.now())
    young.clean()


def test_a_stream_that_failed(home: Installation) -> None:
    home.stream("failed", "access denied")
    key = Key(STREAM, SERVER, "stream")
    message = f"the binary log of {SERVER} is not streamed: access denied"
    home.incidents.settle(home.now(), Condition(key, Severity.ERROR, message))
    state = home.say()
    assert (state.status, state.kinds) == ("bad", {"stream-failed"})
    home.stream()
    home.incidents.settle(home.now(), looked={key: "it is streamed again"})
    home.clean()


def test_a_stream_that_takes_no_logs_to_a_place(home: Installation) -> None:
    late = {"error": "the disk is full", "behind_since": "2026-11-21T10:00:00Z"}
    home.stream(offsite=late)
    state = home.say()
    assert state.status == "warning"
    assert any("the disk is full" in reason for reason in state.reasons)
    home.stream()
    home.clean()


def test_a_stream_whose_archive_is_in_trouble(home: Installation) -> None:
    row = home.catalog.binlogs.stream_state(SERVER)
    assert row is not None
    home.catalog.binlogs.set_stream_state(
        SERVER, {**row[0], "trouble": "binlog.000001 is damaged in the spool"}, home.now()
    )
    state = home.say()
    assert state.status == "warning"
    assert any("binlog.000001 is damaged in the spool" in reason for reason in state.reasons)
    home.stream()
    home.clean()


def test_a_gap_in_the_log(home: Installation) -> None:
    at = home.now()
    gap = Gap(SERVER, home.branch, "", Position(FILE, home.pos, "0-1-500"), None, at, None, "the server purged it", at)
    home.catalog.binlogs.add_gap(gap)
    home.catalog.events.add(Event(at, "binlog-gap", Severity.ERROR, "binary logs of db1 are missing", server=SERVER))
    state = home.say()
    assert state.kinds == {"binlog-gap"}
    assert state.status == "bad"
    time.sleep(0.01)  # the backup begins behind it
    home.job(JobKind.FULL)
    home.backup(ago=timedelta(0))
    home.desk._covered = None
    home.say()
    assert home.mouths.agree().told == []
    assert not any("binary logs are missing" in reason for reason in home.mouths.agree().reasons)


def test_a_place_that_was_emptied(home: Installation, office: Office) -> None:
    marker = office.base / "offsite" / "repository.json"
    watch = ReachWatch()

    def look(minutes: int) -> None:
        at = home.now() + minutes * MINUTE
        deadline = time.monotonic() + 300
        while any(place.checked_at != at for place in destination_views(home.wiring, at)):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        watch.step(home.wiring, at)

    away = marker.rename(marker.with_name("away"))
    for minutes in (2, 4, 6):
        look(minutes)
    state = home.say()
    assert state.kinds == {"destination-unreachable"}
    assert state.server["protected"] == 0
    assert "+protected" not in str(state.backups)
    away.rename(marker)
    look(8)
    home.clean()


def test_a_stranger_under_its_name(home: Installation) -> None:
    at = home.now()
    home.catalog.identities.put(Identity(SERVER, "uuid", Verdict.OWN, at - DAY, at - DAY))
    home.clean()
    other = Identity(SERVER, "other", Verdict.STRANGER, at, at, evidence="it has no GTID of ours")
    home.catalog.identities.put(other)
    home.incidents.settle(at, Condition(Key(CHANGED, SERVER), Severity.ERROR, "another server answers"))
    home.backup(uuid="other")
    state = home.say()
    assert state.kinds == {"server-changed"}
    assert state.status == "bad"
    home.site.service.servers.accept(SERVER)
    home.clean()


def test_a_foreign_backup(home: Installation) -> None:
    home.backup(foreign=True)
    report_foreign(home.wiring, SERVER)
    state = home.say()
    assert (state.status, state.kinds) == ("warning", {"backups-foreign"})
    (foreign,) = [one for one in state.backups if one["foreign"]]
    home.catalog.backups.adopt(foreign["id"])
    report_foreign(home.wiring, SERVER)
    home.clean()
