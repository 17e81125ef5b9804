"""From events in a catalog to mails at a real mail server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email import message_from_string
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from backupd.alerts.channels import TRIES, DeliveryError
from backupd.alerts.conditions import Condition, Key
from backupd.alerts.ledger import MANY
from backupd.alerts.rules import INCONSISTENT_REPLICA
from backupd.app.alerting import notifier
from backupd.app.alerting import sender as heartbeat
from backupd.app.alerting.notifier import AlertNotifier, Pace
from backupd.app.alerting.sender import Heartbeat, due, names, send_one
from backupd.app.alerting.service import AlertWatch, forget_old_alerts, report_if_due, send_test
from backupd.app.context.wiring import Wiring
from backupd.app.service.facade import Alerts
from backupd.catalog.session import open_catalog
from backupd.model.access import Actor, Role, Via
from backupd.model.errors import CatalogError, ForbiddenError, NotFoundError, RefusedError
from backupd.model.event import Event, Message, MessageState, Severity
from backupd.model.job import JobKind, JobRecord, JobState
from tests.support.service.house import Clock, Office
from tests.support.service.mail_server import MailBox, mail_server
from tests.support.service.serving import held_port

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)
MAIL = """\
alerts:
  email: {{smtp: "{url}", from: backupd@example.com, to: [dba@example.com, night@example.com], timeout: 4m}}
"""
ADMIN = Actor("eve", Role.ADMIN, Via.API)


@pytest.fixture
def clock() -> Clock:
    return Clock(NOW)


@contextmanager
def opened(folder: Path, clock: Clock, extra: str, servers: int = 1) -> Iterator[Wiring]:
    settings = Office(folder).write(extra=extra, servers={f"db{n}": "gold" for n in range(1, servers + 1)})
    with open_catalog(settings.catalog) as catalog:
        yield Wiring(settings, catalog, clock)


@pytest.fixture
def wiring(tmp_path: Path, clock: Clock) -> Iterator[Wiring]:
    """Twenty servers, and mail to a server that is not there."""
    with opened(tmp_path, clock, MAIL.format(url="smtp://localhost:1"), servers=20) as found:
        yield found


@pytest.fixture
def desk(wiring: Wiring, clock: Clock) -> AlertNotifier:
    found = AlertNotifier(wiring, Pace(), clock.passing)
    found.begin()
    return found


def happen(
    wiring: Wiring,
    kind: str = "job-failed",
    *,
    server: str = "db1",
    subject: str = "physical.full",
    severity: Severity = Severity.ERROR,
) -> None:
    wiring.catalog.events.add(
        Event(wiring.clock(), kind, severity, f"{kind} happened", server=server, subject=subject, hint="do this")
    )


def well(wiring: Wiring, server: str = "db1") -> None:
    happen(wiring, "job-recovered", server=server, severity=Severity.INFO)


def go(desk: AlertNotifier, clock: Clock, seconds: float = 60, step: float = 1) -> None:
    for _ in range(int(seconds / step)):
        desk.step()
        clock.sleep(timedelta(seconds=step))


def subjects(wiring: Wiring) -> list[str]:
    """Oldest first."""
    return [message.subject for message in sorted(wiring.catalog.messages.list(), key=lambda one: one.created_at)]


def test_a_replica_that_differs_is_one_mail_however_often_it_is_found_and_one_when_it_is_well(
    wiring: Wiring, desk: AlertNotifier, clock: Clock
) -> None:
    key = Key(INCONSISTENT_REPLICA, "db1", "db1")
    for _found in range(3):
        wiring.settle(Condition(key, Severity.ERROR, "db1 differs from its source: 1 table differs"))
        go(desk, clock)
    assert subjects(wiring) == ["[backupd] ERROR db1: db1 differs from its source"]
    for _well in range(2):
        wiring.settle(looked={key: "no table of db1 is known to differ any more"})
        go(desk, clock)
    assert subjects(wiring)[1:] == ["[backupd] RECOVERED db1: db1 differs from its source"]


def test_one_mail_when_it_fails_and_one_when_it_is_well(wiring: Wiring, desk: AlertNotifier, clock: Clock) -> None:
    happen(wiring)
    desk.step()
    assert subjects(wiring) == []  # it waits a moment for what belongs to it
    go(desk, clock, 5)
    for _ in range(3):
        happen(wiring)
        go(desk, clock)
    assert subjects(wiring) == ["[backupd] ERROR db1: physical.full failed"]
    well(wiring)
    go(desk, clock)
    assert subjects(wiring)[1:] == ["[backupd] RECOVERED db1: physical.full failed"]
    (incident,) = wiring.catalog.incidents.list()
    assert (incident.count, incident.is_open) == (4, False)
    assert {message.incident_id for message in wiring.catalog.messages.list()} == {incident.id}


def test_whatever_is_told_later_of_one_of_several_answers_a_mail_that_there_is(
    wiring: Wiring, desk: AlertNotifier, clock: Clock
) -> None:
    servers = tuple(f"db{number}" for number in range(1, MANY + 1))
    for server in servers:
        happen(wiring, server=server)
    go(desk, clock, 70)
    (first,) = wiring.catalog.messages.list()
    named = message_from_string(first.content)["Message-ID"]
    for server in reversed(servers):
        well(wiring, server)
        go(desk, clock, 20)
        later = message_from_string(wiring.catalog.messages.list(limit=1)[0].content)
        assert f"RECOVERED {server}" in later["Subject"]
        assert later["In-Reply-To"] == named
        assert named in later["References"].split()
    happen(wiring, server="db2")
    go(desk, clock)
    alone = message_from_string(wiring.catalog.messages.list(limit=1)[0].content)
    assert (alone["In-Reply-To"], "ERROR db2" in alone["Subject"]) == (None, True), "it is new"


def test_whoever_is_killed_between_neither_loses_nor_repeats_a_mail(
    wiring: Wiring, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fresh() -> AlertNotifier:
        return AlertNotifier(wiring, Pace(), clock.passing)

    fresh().begin()
    happen(wiring)
    for _ in range(3):  # each dies before it has written anything
        fresh().step()
    assert subjects(wiring) == []
    go(fresh(), clock, 5)
    for _ in range(3):
        go(fresh(), clock, 5)
    assert len(subjects(wiring)) == 1

    desk = fresh()
    record = wiring.catalog.incidents.record

    def fail(*_args: object) -> None:
        raise CatalogError("its disk is full")

    happen(wiring, server="db2")
    monkeypatch.setattr(wiring.catalog.incidents, "record", fail)
    with pytest.raises(CatalogError):
        go(desk, clock, 9)
    monkeypatch.setattr(wiring.catalog.incidents, "record", record)
    go(desk, clock, 9)
    assert len(subjects(wiring)) == 2


def test_what_happened_before_there_was_such_a_service_is_shown_and_not_mailed(wiring: Wiring, clock: Clock) -> None:
    happen(wiring)
    happen(wiring, server="db2")
    well(wiring, "db2")
    desk = AlertNotifier(wiring, Pace(), clock.passing)
    go(desk, clock)
    assert subjects(wiring) == []
    assert [one.server for one in wiring.catalog.incidents.open()] == ["db1"]
    well(wiring)
    go(desk, clock)
    assert subjects(wiring) == ["[backupd] RECOVERED db1: physical.full failed"]


def test_a_storm_is_few_mails(wiring: Wiring, desk: AlertNotifier, clock: Clock) -> None:
    for number in range(1, 21):  # a destination goes away, and all that needs it fails
        happen(wiring, "destination-behind", server=f"db{number}", subject="local")
        happen(wiring, server=f"db{number}")
        go(desk, clock, 1)
    go(desk, clock, 180)
    found = subjects(wiring)
    assert len(found) <= 4, found
    assert len(wiring.catalog.incidents.open()) == 40
    before = len(found)
    for number in range(1, 21):
        well(wiring, f"db{number}")
        happen(wiring, "destination-caught-up", server=f"db{number}", subject="local", severity=Severity.INFO)
    go(desk, clock, 120)
    assert len(subjects(wiring)) - before <= 2
    assert not wiring.catalog.incidents.open()


def test_too_many_mails_within_an_hour_end_with_one_that_says_so_and_one_afterwards(
    wiring: Wiring, desk: AlertNotifier, clock: Clock
) -> None:
    for number in range(200):  # one after the other breaks and is mended
        server = f"db{number // 2 % 20 + 1}"
        if number % 2:
            well(wiring, server)
        else:
            happen(wiring, server=server)
        go(desk, clock, 60, 20)
        if clock.now - NOW > 1.2 * HOUR:
            break
    found = subjects(wiring)
    (place,) = (number for number, subject in enumerate(found) if "TOO MANY ALERTS" in subject)
    assert place == 29
    assert found[place + 1 :] == []
    go(desk, clock, 3600, 60)
    (after,) = subjects(wiring)[place + 1 :]
    assert "summary since" in after
    go(desk, clock, 3600, 300)
    assert len(subjects(wiring)) == place + 2
    happen(wiring, server="db7")
    go(desk, clock)
    assert "db7" in subjects(wiring)[-1]


def test_reminders_come_until_somebody_acknowledges(wiring: Wiring, desk: AlertNotifier, clock: Clock) -> None:
    happen(wiring)
    go(desk, clock)
    go(desk, clock, 5 * 3600, 300)
    assert subjects(wiring)[1:] == ["[backupd] STILL ERROR db1: physical.full failed"]
    (incident,) = wiring.catalog.incidents.open()
    alerts = Alerts(wiring, ADMIN)
    alerts.acknowledge(incident.id)
    with pytest.raises(RefusedError, match="eve has acknowledged"):
        alerts.acknowledge(incident.id)
    go(desk, clock, 10 * 86400, 3600)
    happen(wiring)
    go(desk, clock)
    assert len(subjects(wiring)) == 2
    assert wiring.catalog.incidents.get(incident.id).acknowledged_by == "eve"
    well(wiring)
    go(desk, clock)
    assert len(subjects(wiring)) == 3


def test_a_gap_is_over_with_the_next_full_backup(wiring: Wiring, desk: AlertNotifier, clock: Clock) -> None:
    happen(wiring, "binlog-gap", subject="branch")
    go(desk, clock)
    clock.sleep(HOUR)
    start = clock.now
    wiring.catalog.jobs.add(JobRecord("j1", JobKind.FULL, "db1", JobState.RUNNING, start, started_at=start, token=1))
    go(desk, clock)
    assert len(subjects(wiring)) == 1
    wiring.catalog.jobs.finish("j1", JobState.SUCCEEDED, clock.now, token=1, result="backup-7")
    go(desk, clock)
    assert subjects(wiring)[1:] == ["[backupd] RECOVERED db1: binary logs are missing"]


def test_trouble_of_a_server_that_is_configured_no_more_is_over(
    wiring: Wiring, desk: AlertNotifier, clock: Clock
) -> None:
    happen(wiring, server="gone")
    go(desk, clock)
    assert not wiring.catalog.incidents.open()


def test_an_event_whose_transaction_ends_late_is_not_lost(
    wiring: Wiring, desk: AlertNotifier, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    happen(wiring, "daemon-started", severity=Severity.INFO)
    happen(wiring)
    happen(wiring, server="db2")
    first, second, third = wiring.catalog.events.since(0)
    shown = [first, third]
    monkeypatch.setattr(
        wiring.catalog.events, "since", lambda number, limit: [one for one in shown if one.number > number]
    )
    go(desk, clock, 10)
    assert subjects(wiring) == []
    shown.insert(1, second)
    go(desk, clock, 10)
    assert len(subjects(wiring)) == 2
    shown.append(replace(third, number=third.number + 5, server="db3", at=clock.now))  # what is missing never came
    go(desk, clock, notifier.IN_FLIGHT.total_seconds() + 70)
    assert len(subjects(wiring)) == 3


def one_message(wiring: Wiring, clock: Clock, desk: AlertNotifier) -> Message:
    happen(wiring)
    go(desk, clock, 10)
    (message,) = wiring.catalog.messages.list()
    return message


def test_mail_that_cannot_be_delivered_waits_with_growing_pauses_is_visible_and_goes_when_it_can(
    tmp_path: Path, clock: Clock
) -> None:
    with held_port() as port, opened(tmp_path, clock, MAIL.format(url=f"smtp://localhost:{port}")) as wiring:
        desk = AlertNotifier(wiring, Pace(), clock.passing)
        desk.begin()
        message = one_message(wiring, clock, desk)
        pauses = []
        for _ in range(8):
            (message,) = due(wiring, "email")
            assert not send_one(wiring, message)
            assert due(wiring, "email") == ()
            message = wiring.catalog.messages.get(message.id)
            assert message.next_try is not None
            pauses.append(int((message.next_try - clock.now).total_seconds() / 60))
            clock.sleep(message.next_try - clock.now)
        assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
        assert (message.state, message.attempts) == (MessageState.QUEUED, 8)
        assert "does not answer" in message.error
        go(desk, clock, 10)
        (undeliverable,) = [one for one in wiring.catalog.incidents.open() if one.kind == "alerts-undeliverable"]
        assert undeliverable.subject == "email"
        assert len(wiring.catalog.messages.list()) == 1  # nobody is mailed that mail does not work
        with mail_server(port=port) as box:
            assert send_one(wiring, message)
        assert box.subjects() == ["[backupd] ERROR db1: physical.full failed"]
        assert wiring.catalog.messages.get(message.id).state is MessageState.SENT
        go(desk, clock, 10)
        assert [one.kind for one in wiring.catalog.incidents.open()] == ["job-failed"]


def test_mail_is_given_up_after_three_days_of_tries_or_when_it_is_refused_for_good(
    wiring: Wiring, desk: AlertNotifier, clock: Clock, tmp_path: Path
) -> None:
    message = replace(one_message(wiring, clock, desk), attempts=TRIES)
    clock.sleep(timedelta(days=3, minutes=1))
    assert not send_one(wiring, message)
    given_up = wiring.catalog.messages.get(message.id)
    assert (given_up.state, given_up.next_try) == (MessageState.FAILED, None)
    with mail_server(MailBox(answer="550 no")) as box, opened(tmp_path, clock, MAIL.format(url=box.url)) as other:
        fresh = replace(message, id="m2", created_at=clock.now)
        other.catalog.messages.add(fresh)
        send_one(other, fresh)
        assert other.catalog.messages.get("m2").state is MessageState.FAILED


def test_recipients_who_are_refused_for_now_get_it_later_and_nobody_gets_it_twice(tmp_path: Path, clock: Clock) -> None:
    box = MailBox(answers={"night@example.com": "450 grey"})
    with mail_server(box), opened(tmp_path, clock, MAIL.format(url=box.url)) as wiring:
        desk = AlertNotifier(wiring, Pace(), clock.passing)
        desk.begin()
        message = one_message(wiring, clock, desk)
        assert send_one(wiring, message)
        message = wiring.catalog.messages.get(message.id)
        assert (message.state, message.recipients) == (MessageState.QUEUED, ("night@example.com",))
        box.answers.clear()
        assert send_one(wiring, message)
    assert box.recipients == [("dba@example.com",), ("night@example.com",)]


def test_the_report_comes_when_it_is_due_and_once_for_many_that_were_missed(tmp_path: Path, clock: Clock) -> None:
    extra = MAIL.format(url="smtp://localhost:1") + '  report: {schedule: "0 7 * * *"}\n'
    with opened(tmp_path, clock, extra) as wiring:
        assert not report_if_due(wiring, clock.now)  # it begins now
        clock.sleep(18 * HOUR)
        assert not report_if_due(wiring, clock.now)
        clock.sleep(72 * HOUR + HOUR)
        assert [report_if_due(wiring, clock.now) for _ in range(3)] == [True, False, False]
        (message,) = wiring.catalog.messages.list()
        assert "report of" in message.subject
        assert "db1" in message.content


def test_the_watch_sends_what_happens_and_follows_new_settings(tmp_path: Path) -> None:
    with mail_server() as box, opened(tmp_path, Clock(NOW), "", servers=2) as held:
        wiring = Wiring(held.settings, held.catalog)
        with AlertWatch(wiring, pace=Pace(settle=0.0)) as watch:
            happen(wiring)
            until(lambda: bool(wiring.catalog.incidents.open()))
            watch.reload(
                replace(
                    wiring,
                    settings=Office(tmp_path).write(
                        extra=MAIL.format(url=box.url), servers={"db1": "gold", "db2": "gold"}
                    ),
                )
            )
            well(wiring)
            box.wait(lambda: len(box.mails) == 1)
        assert box.subjects() == ["[backupd] RECOVERED db1: physical.full failed"]
        assert not [thread for thread in threading.enumerate() if thread.name in {"alerts", "heartbeat"}]


def test_a_test_is_sent_at_once_and_says_how_it_fared(tmp_path: Path, clock: Clock, wiring: Wiring) -> None:
    (failed,) = send_test(wiring, "eve")
    assert (failed.state, failed.attempts, "does not answer" in failed.error) == (MessageState.QUEUED, 1, True)
    (tmp_path / "other").mkdir()
    with mail_server() as box, opened(tmp_path / "other", clock, MAIL.format(url=box.url)) as other:
        (sent,) = Alerts(other, ADMIN).test()
        assert sent.state is MessageState.SENT
        assert other.catalog.audit.list()[0].action == "alerts-tested"
    assert [subject.startswith("[backupd] TEST from") for subject in box.subjects()] == [True]
    (tmp_path / "none").mkdir()
    with (
        opened(tmp_path / "none", clock, "") as silent,
        pytest.raises(RefusedError, match="no alert channel is configured"),
    ):
        send_test(silent)


def test_a_test_that_nobody_waits_for_is_sent_by_the_service(tmp_path: Path) -> None:
    with mail_server() as box, opened(tmp_path, Clock(NOW), MAIL.format(url=box.url)) as held:
        wiring = Wiring(held.settings, held.catalog)
        with AlertWatch(wiring, pace=Pace(settle=0.0)):
            (queued,) = Alerts(wiring, ADMIN).test(wait=False)
            assert (queued.state, queued.attempts) == (MessageState.QUEUED, 0)
            box.wait(lambda: len(box.mails) == 1)
            until(lambda: wiring.catalog.messages.get(queued.id).state is MessageState.SENT)
        assert len(box.mails) == 1


def test_who_sees_some_servers_sees_their_incidents_only(wiring: Wiring, desk: AlertNotifier, clock: Clock) -> None:
    happen(wiring)
    happen(wiring, server="db2")
    go(desk, clock, 10)
    some = Alerts(wiring, Actor("ann", Role.OPERATOR, Via.API, frozenset({"db2"})))
    (seen,) = some.list()
    assert seen.server == "db2"
    with pytest.raises(NotFoundError):
        some.list("db1")
    hidden = next(one.id for one in wiring.catalog.incidents.open() if one.server == "db1")
    with pytest.raises(NotFoundError):
        some.acknowledge(hidden)
    with pytest.raises(ForbiddenError):
        some.messages()
    assert some.acknowledge(seen.id).acknowledged_by == "ann"
    newest, oldest = Alerts(wiring, ADMIN).list()
    assert Alerts(wiring, ADMIN).list(before=newest.id) == (oldest,)


def test_what_is_over_for_long_is_forgotten(wiring: Wiring, desk: AlertNotifier, clock: Clock) -> None:
    message = one_message(wiring, clock, desk)
    wiring.catalog.messages.update(replace(message, state=MessageState.SENT))
    clock.sleep(timedelta(days=500))
    forget_old_alerts(wiring)
    assert wiring.catalog.messages.list() == ()
    assert len(wiring.catalog.incidents.list()) == 1  # it is still open
    well(wiring)
    go(desk, clock, 10)
    clock.sleep(timedelta(days=500))
    forget_old_alerts(wiring)
    assert wiring.catalog.incidents.list() == ()


# -- other channels, and the heartbeat


class Watcher(BaseHTTPRequestHandler):
    """Counts who calls; answers with what the server's ``answer`` says."""

    def do_GET(self) -> None:  # the library's name
        self.server.calls.append(self.path)  # type: ignore[attr-defined]  # given to the server by ``watcher``
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.bodies.append(body)  # type: ignore[attr-defined]  # as above
        self.send_response(self.server.answer)  # type: ignore[attr-defined]  # as above
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET  # noqa: N815  the library's name

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the library's name
        """Quiet."""


@contextmanager
def watcher() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Watcher) as server:
        server.calls, server.bodies, server.answer = [], [], 200  # type: ignore[attr-defined]  # see Watcher
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")  # Apprise loads it
def test_other_channels_get_the_same_words_and_their_urls_are_nowhere(tmp_path: Path, clock: Clock) -> None:
    pytest.importorskip("apprise")
    file = tmp_path / "channels"
    with watcher() as server:
        file.write_text(f"# chats\njson://127.0.0.1:{server.server_address[1]}/hook-s3cret\n")
        with opened(tmp_path, clock, f"alerts: {{channels_file: {file}}}\n") as wiring:
            with pytest.raises(DeliveryError, match="users other than its owner"):
                names(wiring.settings)
            file.chmod(0o600)
            desk = AlertNotifier(wiring, Pace(), clock.passing)
            desk.begin()
            message = one_message(wiring, clock, desk)
            assert message.channel.startswith("json-")
            assert send_one(wiring, message)
            assert b"db1: physical.full failed" in server.bodies[0]  # type: ignore[attr-defined]  # see Watcher
            server.answer = 500  # type: ignore[attr-defined]  # see Watcher
            assert not send_one(wiring, message)
            file.write_text("")
            assert send_one(wiring, message)  # given up: nothing is wrong with the channel, it is gone
            assert wiring.catalog.messages.get(message.id).state is MessageState.FAILED
            told = str(wiring.catalog.events.list()) + str(wiring.catalog.messages.list())
            assert "s3cret" not in told


def test_the_heartbeat_goes_only_while_the_rounds_go_on_and_its_failure_is_told_once(
    tmp_path: Path, clock: Clock
) -> None:
    file = tmp_path / "url"
    last = [time.monotonic()]
    with watcher() as server, opened(tmp_path, clock, f"alerts: {{heartbeat: {{url_file: {file}}}}}\n") as wiring:
        pulse = Heartbeat(wiring, lambda: last[0])
        file.write_text(f"http://127.0.0.1:{server.server_address[1]}/s3cret\n")
        pulse.step()
        last[0] -= heartbeat.STALE + 1
        pulse.step()
        assert server.calls == ["/s3cret"]  # type: ignore[attr-defined]  # see Watcher
        last[0] = time.monotonic()
        server.answer = 404  # type: ignore[attr-defined]  # see Watcher
        for _ in range(5):
            pulse.step()
        server.answer = 200  # type: ignore[attr-defined]  # see Watcher
        pulse.step()
        file.write_text("file:///etc/passwd\n")
        for _ in range(5):
            pulse.step()
        events = wiring.catalog.events.list()
        assert [one.kind for one in events] == ["heartbeat-failed", "heartbeat-sent", "heartbeat-failed"]
        assert "s3cret" not in str(events)


def until(condition: object, seconds: float = 240) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
