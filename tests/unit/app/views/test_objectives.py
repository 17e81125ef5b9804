"""Promises against what is: one event when one is broken, one when it is kept again for good."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.alerts.ledger import Ledger
from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.app.schedule.calendar import due_times, legs
from backupd.app.views.objectives import ObjectivesWatch, first_to_come
from backupd.catalog.session import open_catalog
from backupd.model.binlog import Branch, BranchReason
from backupd.model.errors import CatalogError
from backupd.model.job import JobKind, JobState, Schedule
from backupd.recovery.timeline import Objectives, Reach, Timeline
from backupd.recovery.windows import Window
from tests.support.catalog import samples
from tests.support.service.house import GOLD, Office

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


@dataclass
class Desk:
    wiring: Wiring
    watch: ObjectivesWatch = field(init=False)
    now: datetime = NOW
    latest: datetime | None = NOW
    predicted: timedelta | None = None
    far: datetime | None = None
    empty: tuple[str, ...] = ()
    streamed: bool = True

    def __post_init__(self) -> None:
        self.watch = ObjectivesWatch(self.read)
        if self.streamed:
            self.stream(NOW - timedelta(days=1))

    def stream(self, at: datetime) -> None:
        """The binary log was streamed for the first time."""
        self.wiring.catalog.binlogs.add_branch(
            Branch(
                server="db1",
                id="b",
                noticed_at=at,
                reason=BranchReason.FIRST,
                server_uuid="",
                flavour="mariadb",
                basename="bin",
                first_number=1,
            )
        )

    def read(self, wiring: Wiring, server: str) -> Timeline:
        if self.latest is None:
            return Timeline(server, self.now, (), (), (), (), first_due=first_to_come(wiring, server, self.now))
        window = replace(_WINDOW, end=self.latest)
        reach = Reach("local", self.latest, timedelta(0), self.now - self.latest)
        others = [Reach("far", self.far, timedelta(0), self.now - self.far)] if self.far else []
        others += [Reach(name, None, None, None) for name in self.empty]
        return Timeline(
            server, self.now, (window,), (), (reach, *others), (), predicted_rto=self.predicted, objectives=Objectives()
        )

    def look(self, after: timedelta = timedelta(0)) -> list[str]:
        """The kinds of events that this look added."""
        self.now += after
        before = len(self.wiring.catalog.events.list())
        self.watch.step(self.wiring, self.now)
        events = self.wiring.catalog.events.list()
        return [event.kind for event in reversed(events[: len(events) - before])]


_WINDOW = Window(begin=NOW, end=NOW, reason_end="now", branch="b", base=samples.backup(), run=None)


@pytest.fixture
def desk(short_tmp: Path) -> Iterator[Desk]:
    settings = Office(short_tmp).write(gold=GOLD + "binlog: {}\nobjectives: {rpo: 2m, rto: 1h}\n")
    with open_catalog(settings.catalog) as catalog:
        yield Desk(Wiring(settings, catalog))


def test_what_could_be_lost_is_told_when_it_is_too_much_and_when_it_is_little_again(desk: Desk) -> None:
    assert desk.look() == []
    assert desk.look(3 * MINUTE) == ["rpo-broken"]
    (event,) = desk.wiring.catalog.events.list()
    assert "data loss if db1 failed now: 3m; objectives.rpo is 2m" in event.message
    assert "local: 2026-11-21T12:00:00" in event.detail
    assert desk.look(MINUTE) == []
    desk.latest = desk.now
    assert desk.look() == ["rpo-kept"], "what is over is over, however long the promise is"
    assert desk.look(MINUTE) == []
    assert desk.wiring.catalog.lags.worst("db1", NOW) == {"local": 240.0}


def test_a_log_that_is_streamed_for_the_first_time_has_two_minutes_to_begin(short_tmp: Path) -> None:
    settings = Office(short_tmp).write(gold=GOLD + "binlog: {}\nobjectives: {rpo: 2m}\n")
    with open_catalog(settings.catalog) as catalog:
        desk = Desk(Wiring(settings, catalog), streamed=False)
        desk.now += 10 * MINUTE  # the first backup, on the command line, was then; now the service is started
        assert desk.look() == []
        assert desk.look(MINUTE) == []
        desk.stream(desk.now)
        assert desk.look(MINUTE) == ["rpo-broken"]
        desk.watch = ObjectivesWatch(desk.read)
        desk.latest = desk.now
        assert desk.look() == ["rpo-kept"]
        assert desk.look(3 * MINUTE) == ["rpo-broken"], "no grace for the next start of the service"


@pytest.mark.parametrize("places", ["{required: [local, far]}", "{required: [local], others: [far]}"])
def test_a_place_that_alone_would_lose_too_much_is_told_whether_required_or_not(short_tmp: Path, places: str) -> None:
    office = Office(short_tmp)
    office.write()
    text = office.file.read_text()
    office.file.write_text(text.replace("destinations:\n", "destinations:\n  far: {type: filesystem, path: /far}\n"))
    (short_tmp / "policies" / "gold.yaml").write_text(
        GOLD.replace("{required: [local]}", places) + "binlog: {}\nobjectives: {rpo: 2m}\n"
    )
    settings = load_settings(office.file)
    with open_catalog(settings.catalog) as catalog:
        desk = Desk(Wiring(settings, catalog), far=NOW - 5 * MINUTE)
        assert desk.look() == ["destination-rpo-broken"]
        (event,) = catalog.events.list()
        assert event.subject == "far"
        assert "if only far survived: 5m;" in event.message
        desk.far = desk.latest = NOW + 5 * MINUTE
        assert desk.look(5 * MINUTE) == ["destination-rpo-kept"]
        assert desk.look(3 * MINUTE) == ["rpo-broken"], "by all of them: that far has no more says nothing new"


def test_an_incident_says_what_is_so_now_and_its_event_what_was_then(desk: Desk) -> None:
    assert desk.look(3 * MINUTE) == ["rpo-broken"]
    (event,) = desk.wiring.catalog.events.list()
    incidents = desk.wiring.catalog.incidents
    ledger = Ledger((), ())
    ledger.take(event)
    incidents.record(ledger.changed, (), {})
    assert desk.look(4 * MINUTE) == []
    (incident,) = incidents.open()
    assert "failed now: 7m;" in incident.message
    assert incident.opened_at == event.at
    assert "failed now: 3m;" in desk.wiring.catalog.events.list()[0].message


def test_a_server_that_cannot_be_recovered_at_all_breaks_its_promise_once_its_first_backup_was_due(desk: Desk) -> None:
    desk.latest = None
    assert desk.look() == [], "it was added just now"
    full = next(leg for leg in legs(desk.wiring.settings, "db1") if leg.kind == JobKind.FULL)
    (due,) = due_times(full, NOW, count=1)
    desk.wiring.catalog.schedules.settle(
        {},
        [Schedule(*leg.key, cadence=leg.rhythm, since=NOW, handled=NOW) for leg in legs(desk.wiring.settings, "db1")],
    )
    assert desk.look(due - NOW - MINUTE) == []
    assert desk.look(5 * MINUTE) == ["rpo-broken"]
    assert "is not recoverable at all" in desk.wiring.catalog.events.list()[0].message
    desk.latest = desk.now
    assert desk.look(MINUTE) == ["rpo-kept"]


def test_a_first_backup_that_failed_ends_the_grace_of_a_new_server(desk: Desk) -> None:
    desk.latest = None
    job = samples.job(server="db1")
    desk.wiring.catalog.jobs.add(job)
    assert desk.look(MINUTE) == []
    desk.wiring.catalog.jobs.finish(job.id, JobState.FAILED, desk.now, token=job.token)
    assert desk.look(MINUTE) == ["rpo-broken"]


@pytest.mark.parametrize(
    ("places", "grace"), [("{required: [local, far]}", None), ("{required: [local], others: [far]}", timedelta(days=1))]
)
def test_a_destination_that_was_added_is_no_incident_until_its_first_copies_are_due(
    short_tmp: Path, places: str, grace: timedelta | None
) -> None:
    office = Office(short_tmp)
    office.write()
    text = office.file.read_text()
    office.file.write_text(text.replace("destinations:\n", "destinations:\n  far: {type: filesystem, path: /far}\n"))
    (short_tmp / "policies" / "gold.yaml").write_text(
        GOLD.replace("{required: [local]}", places) + "binlog: {}\nobjectives: {rpo: 2m}\n"
    )
    settings = load_settings(office.file)
    with open_catalog(settings.catalog) as catalog:
        desk = Desk(Wiring(settings, catalog), empty=("far",))
        assert desk.look() == []
        if grace is not None:
            desk.latest = NOW + grace
            assert desk.look(grace) == ["destination-rpo-broken"]
            assert "if only far survived: everything;" in catalog.events.list()[0].message


def test_a_restore_that_would_take_too_long_is_told_and_nothing_is_said_where_nothing_is_known(desk: Desk) -> None:
    assert desk.look() == []
    desk.predicted = timedelta(hours=2)
    desk.latest = desk.now
    assert desk.look() == ["rto-broken"]
    desk.predicted = None
    assert desk.look() == []
    desk.predicted = timedelta(minutes=10)
    assert desk.look() == ["rto-kept"]


def test_a_server_whose_timeline_cannot_be_read_stops_no_other(short_tmp: Path) -> None:
    settings = Office(short_tmp, servers={"db1": "gold", "db2": "gold"}).write(gold=GOLD + "objectives: {rpo: 2m}\n")
    with open_catalog(settings.catalog) as catalog:
        seen = []

        def read(_wiring: Wiring, server: str) -> Timeline:
            seen.append(server)
            raise CatalogError("locked")

        ObjectivesWatch(read).step(Wiring(settings, catalog), NOW)
        assert seen == ["db1", "db2"]
        assert catalog.events.list() == ()
