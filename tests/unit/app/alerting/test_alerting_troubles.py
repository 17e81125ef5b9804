"""Troubles of alerts people: who hears of them, and what is sent in spite of them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from backupd.alerts.channels import TRIES
from backupd.app.alerting.notifier import AlertNotifier, Pace
from backupd.app.alerting.sender import due, findings, send_one, usable_channels
from backupd.app.alerting.service import report_if_due, send_test
from backupd.app.context.wiring import Wiring
from backupd.app.service.facade import Alerts
from backupd.backup.finding import Severity as Grade
from backupd.model.errors import NotFoundError
from backupd.model.event import Message, MessageState
from tests.support.service.house import Clock
from tests.support.service.mail_server import MailBox, mail_server
from tests.unit.app.alerting.test_threads import ADMIN, HOUR, MAIL, NOW, go, happen, one_message, opened, subjects

NIGHT = "night@example.com"
NO_SERVER = "smtp://localhost:1"


@pytest.fixture
def clock() -> Clock:
    return Clock(NOW)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A file of channels that others can read, so that it is not read."""
    file = tmp_path / "chats"
    file.write_text("json://localhost:1/s3cret\n")
    file.chmod(0o644)
    return file


def begun(wiring: Wiring, clock: Clock) -> AlertNotifier:
    desk = AlertNotifier(wiring, Pace(), clock.passing)
    desk.begin()
    return desk


def open_kinds(wiring: Wiring) -> set[tuple[str, str]]:
    return {(one.kind, one.subject) for one in wiring.catalog.incidents.open()}


def test_a_clock_that_is_ahead_for_a_minute_gives_no_mail_up(tmp_path: Path, clock: Clock) -> None:
    with opened(tmp_path, clock, MAIL.format(url=NO_SERVER)) as wiring:
        message = one_message(wiring, clock, begun(wiring, clock))
        send_one(wiring, message)
        clock.now += timedelta(days=700)
        for one in due(wiring, "email"):
            send_one(wiring, one)
        clock.now -= timedelta(days=700)
        assert [one.id for one in due(wiring, "email")] == [message.id]


def test_a_file_of_channels_that_cannot_be_read_is_mailed_and_holds_back_neither_report_nor_test(
    tmp_path: Path, clock: Clock, chats: Path
) -> None:
    with mail_server() as box:
        extra = MAIL.format(url=box.url) + f'  channels_file: {chats}\n  report: {{schedule: "0 7 * * *"}}\n'
        with opened(tmp_path, clock, extra) as wiring:
            desk = begun(wiring, clock)
            for _ in range(3):
                usable_channels(wiring)
                go(desk, clock, 10)
            (subject,) = subjects(wiring)
            assert "messages by channels cannot be delivered" in subject

            mail, file = send_test(wiring, "eve")
            assert (mail.state, file.state) == (MessageState.SENT, MessageState.FAILED)
            assert "chmod 600" in file.error
            assert file in wiring.catalog.messages.list()

            report_if_due(wiring, clock.now)
            clock.sleep(20 * HOUR)
            assert report_if_due(wiring, clock.now)
            assert "report of" in subjects(wiring)[-1]

            chats.chmod(0o600)
            usable_channels(wiring)
            go(desk, clock, 3600, 10)
            assert not wiring.catalog.incidents.open()


def test_a_recipient_who_is_refused_for_good_is_told_to_the_others_once_and_is_over_when_taken_again(
    tmp_path: Path, clock: Clock
) -> None:
    box = MailBox(answers={NIGHT: "550 no such user"})
    with mail_server(box), opened(tmp_path, clock, MAIL.format(url=box.url)) as wiring:
        desk = begun(wiring, clock)
        happen(wiring)
        for _ in range(4):
            go(desk, clock, 10)
            for message in due(wiring, "email"):
                send_one(wiring, message)
        assert open_kinds(wiring) == {("job-failed", "physical.full"), ("alerts-undeliverable", f"email to {NIGHT}")}
        assert sum(NIGHT in subject for subject in subjects(wiring)) == 1
        assert set(box.recipients) == {("dba@example.com",)}
        (found,) = findings(wiring)
        assert (found.severity, NIGHT in found.message) == (Grade.ERROR, True)
        box.answers.clear()
        send_test(wiring)
        go(desk, clock, 3600, 10)
        assert open_kinds(wiring) == {("job-failed", "physical.full")}


def test_trouble_of_a_recipient_who_is_asked_for_no_more_is_over(tmp_path: Path, clock: Clock) -> None:
    box = MailBox(answers={NIGHT: "550 no such user"})
    with mail_server(box), opened(tmp_path, clock, MAIL.format(url=box.url)) as wiring:
        desk = begun(wiring, clock)
        send_test(wiring)
        go(desk, clock, 60)
        assert open_kinds(wiring) == {("alerts-undeliverable", f"email to {NIGHT}")}
        with opened(tmp_path, clock, MAIL.format(url=box.url).replace(f", {NIGHT}", "")) as other:
            desk.reload(other)
            go(desk, clock, 60)
        assert open_kinds(wiring) == set()


def test_a_channel_that_fails_is_told_by_the_others_and_not_by_itself(
    tmp_path: Path, clock: Clock, chats: Path
) -> None:
    chats.chmod(0o600)
    extra = MAIL.format(url=NO_SERVER) + f"  channels_file: {chats}\n"
    with opened(tmp_path, clock, extra) as wiring:
        desk = begun(wiring, clock)
        happen(wiring)
        go(desk, clock, 10)
        for _ in range(2):
            (message,) = due(wiring, "email")
            send_one(wiring, message)
            clock.sleep(2 * HOUR)
        go(desk, clock, 10)
        found = [one.channel for one in wiring.catalog.messages.list() if "messages by email" in one.subject]
        assert [channel.partition("-")[0] for channel in found] == ["json"]


def test_a_test_is_not_sent_by_the_service_while_the_command_sends_it_and_is_if_the_command_dies(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile: list[tuple[Message, ...]] = []

    def slow(wiring: Wiring, _message: Message) -> None:
        wiring.catalog.messages.hurry(clock.now, "email")  # another message was sent
        meanwhile.append(due(wiring, "email"))

    with opened(tmp_path, clock, MAIL.format(url=NO_SERVER)) as wiring:
        monkeypatch.setattr("backupd.app.alerting.service.send_one", slow)
        (message,) = send_test(wiring)
        assert meanwhile == [()]
        clock.sleep(HOUR)
        assert [one.id for one in due(wiring, "email")] == [message.id]


def test_a_message_that_is_refused_for_now_is_given_up_after_days_of_tries(tmp_path: Path, clock: Clock) -> None:
    box = MailBox(answers={NIGHT: "450 grey"})
    with mail_server(box), opened(tmp_path, clock, MAIL.format(url=box.url)) as wiring:
        message = replace(one_message(wiring, clock, begun(wiring, clock)), attempts=TRIES)
        clock.sleep(timedelta(days=4))
        send_one(wiring, message)
        assert wiring.catalog.messages.get(message.id).state is MessageState.SENT
        (event,) = [one for one in wiring.catalog.events.list() if one.kind == "alerts-undeliverable"]
        assert (event.subject, event.detail) == (f"email to {NIGHT}", f"{NIGHT}: 450 grey")


def test_the_alerts_of_a_server_that_nobody_knows_are_an_error_and_not_none(tmp_path: Path, clock: Clock) -> None:
    with opened(tmp_path, clock, "") as wiring:
        alerts = Alerts(wiring, ADMIN)
        assert alerts.list("db1") == ()
        with pytest.raises(NotFoundError, match="no server 'frob'"):
            alerts.list("frob")


def test_a_check_says_that_nobody_is_told_and_what_cannot_be_read_of_what_is_needed_to_tell(
    tmp_path: Path, clock: Clock
) -> None:
    with opened(tmp_path, clock, "") as wiring:
        (found,) = findings(wiring)
        assert (found.severity, "no alert channel is configured" in found.message) == (Grade.WARNING, True)
    with opened(tmp_path, clock, MAIL.format(url=NO_SERVER)) as wiring:
        (found,) = findings(wiring)
        assert (found.severity, found.message) == (
            Grade.OK,
            "alert channels: email (not probed: `backupd alerts test` sends a message to each)",
        )
    word, chats, url = tmp_path / "word", tmp_path / "chats", tmp_path / "url"
    extra = MAIL.format(url=NO_SERVER).replace("timeout: 4m", f"user: ops, password_file: {word}") + (
        f"  channels_file: {chats}\n  heartbeat: {{url_file: {url}}}\n"
    )
    with opened(tmp_path, clock, extra) as wiring:
        assert [str(found.severity) for found in findings(wiring)] == ["error"] * 3
        word.write_text("geheim\n")
        url.write_text("http://localhost/s3cret\n")
        for file in (word, url):
            file.chmod(0o644)
        chats.write_text("# none yet\n")
        chats.chmod(0o600)
        told = [(str(found.severity), found.message.removeprefix(f"{tmp_path}/")) for found in findings(wiring)]
        assert told == [
            ("warning", "word holds a secret and is open to others (mode 0644)"),
            ("error", "chats names no channel"),
            ("warning", "url holds a secret and is open to others (mode 0644)"),
        ]
