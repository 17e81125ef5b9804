"""What letters say, and what they never do."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email import message_from_string
from email.policy import default

import pytest

from backupd.alerts.email import Envelope, as_mail
from backupd.alerts.ledger import Turn
from backupd.alerts.message import (
    DestinationLine,
    Letter,
    ServerLine,
    Site,
    letter_about,
    letter_after_silence,
    letter_of_silence,
    report,
)
from backupd.model.event import Incident, MessageKind, Severity
from policies.alerts import Email
from tests.support.dice import thrown

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
SITE = Site("backup1", "https://backup.example.com/")
HASH = "*2470C0C06DEE42FD1618BBB99005ADCA2EC9D1E1"
MAIL = Email.model_validate(
    {"smtp": "smtp://localhost", "from": "backupd@example.com", "to": ["dba@example.com", "night@example.com"]}
)


def incident(number: int = 1, **changes: object) -> Incident:
    values: dict[str, object] = {
        "id": f"20261121T120000Z-0000000{number}",
        "kind": "job-failed",
        "server": f"db{number}",
        "subject": "physical.full",
        "severity": Severity.ERROR,
        "message": "gpg exited with 2",
        "detail": "gpg: no room left",
        "hint": "make room on /srv, then: backupd backup db1",
        "opened_at": NOW,
        "last_at": NOW,
        "job_id": "20261121T115900Z-0badf00d",
        "next_reminder": NOW + timedelta(hours=4),
    }
    return Incident(**{**values, **changes})  # type: ignore[arg-type]  # the values of a test


def mail_of(letter: Letter, *thread: str, begins: bool = False, email: Email = MAIL) -> str:
    return as_mail(letter, email, Envelope("message-1", NOW, thread, begins), "backup1")


def test_a_letter_says_what_happened_and_what_to_do_next_with_a_link() -> None:
    letter = letter_about([Turn(MessageKind.ALERT, incident(), begins=True)], SITE, NOW)
    assert letter.subject_line == "[backupd] ERROR db1: physical.full failed"
    text = letter.as_text()
    for part in (
        "gpg exited with 2",
        "make room on /srv, then: backupd backup db1",
        "gpg: no room left",
        "backupd jobs log 20261121T115900Z-0badf00d",
        "backupd alerts acknowledge 20261121T120000Z-00000001",
        "https://backup.example.com/jobs/20261121T115900Z-0badf00d",
        "backupd on backup1",
    ):
        assert part in text, part
        assert part in letter.as_html(), part


def test_reminders_and_recoveries_say_so_and_answer_the_first_mail() -> None:
    one = incident()
    first = message_from_string(
        mail_of(letter_about([Turn(MessageKind.ALERT, one, begins=True)], SITE, NOW), one.id, begins=True),
        policy=default,
    )
    later = NOW + timedelta(hours=4)
    again = letter_about([Turn(MessageKind.REMINDER, one)], SITE, later)
    over = letter_about([Turn(MessageKind.RECOVERY, incident(closed_at=later), "it succeeded again")], SITE, later)
    assert again.subject_line == "[backupd] STILL ERROR db1: physical.full failed"
    assert "open for: 4h" in again.as_text()
    assert over.subject_line == "[backupd] RECOVERED db1: physical.full failed"
    assert "it succeeded again" in over.as_text()
    for letter in (again, over):
        answer = message_from_string(mail_of(letter, one.id), policy=default)
        assert answer["In-Reply-To"] == answer["References"] == first["Message-ID"]
        assert answer["Message-ID"] != first["Message-ID"]
    assert (first["In-Reply-To"], first["Auto-Submitted"]) == (None, "auto-generated")
    assert first["To"] == "dba@example.com, night@example.com"


def test_a_letter_about_several_belongs_to_the_thread_of_each() -> None:
    turns = [Turn(MessageKind.ALERT, incident(number), begins=True) for number in (1, 2, 3)]
    letter = letter_about(turns, SITE, NOW)
    assert letter.subject_line.startswith("[backupd] ERROR physical.full, 3 servers: 3 alerts: ")
    mail = message_from_string(mail_of(letter, *(turn.incident.id for turn in turns), begins=True), policy=default)
    assert mail["Message-ID"] == "<20261121T120000Z-00000001@example.com>"
    assert str(mail["References"]).split() == [
        "<20261121T120000Z-00000002@example.com>",
        "<20261121T120000Z-00000003@example.com>",
    ]


def test_of_very_many_incidents_a_letter_shows_some_and_counts_the_others() -> None:
    turns = [Turn(MessageKind.ALERT, incident(1, id=f"i{number}", server=f"db{number}")) for number in range(400)]
    letter = letter_about(turns, SITE, NOW)
    assert len(letter.blocks) == 25
    assert "and 375 more: `backupd alerts`" in letter.as_text()
    assert len(letter.as_text()) < 20_000


def test_silence_is_announced_and_what_happened_meanwhile_is_told_afterwards() -> None:
    until = NOW + timedelta(hours=1)
    before = letter_of_silence([Turn(MessageKind.ALERT, incident())], SITE, NOW, limit=30, until=until)
    assert "TOO MANY ALERTS" in before.subject
    assert "2026-11-21T13:00:00Z" in before.as_text()
    after = letter_after_silence([incident(), incident(2, closed_at=until, next_reminder=None)], SITE, until, NOW)
    assert after.subject_line == "[backupd] ERROR summary since 12:00 UTC on backup1: 1 alert and 1 recovered"


INJECTIONS = (
    "x\r\nBcc: eve@example.com",
    "x\nBcc: eve@example.com\n\nbody",
    "x\x0bBcc: eve@example.com",
    "x\x85Bcc: eve@example.com",
    "x\u2028Bcc: eve@example.com",
    "x\0Bcc: eve@example.com",
    "=?utf-8?q?=0D=0ABcc:_eve?=",
    "\u202egnp.exe",
    "a" * 5000,
    "\udcff\udcfe",
    "🐬" * 300,
)


@pytest.mark.parametrize("evil", INJECTIONS)
def test_nothing_in_a_name_becomes_a_header(evil: str) -> None:
    letter = letter_about(
        [Turn(MessageKind.ALERT, incident(subject=evil, message=evil, detail=evil, hint=evil, server=evil))],
        Site(evil, SITE.url),
        NOW,
    )
    mail = message_from_string(as_mail(letter, MAIL, Envelope("m", NOW, ("i",), True), evil), policy=default)
    assert mail["Bcc"] is None
    assert mail.defects == []
    assert sorted(mail.keys()) == [
        "Auto-Submitted",
        "Content-Type",
        "Date",
        "From",
        "MIME-Version",
        "Message-ID",
        "Subject",
        "To",
        "X-Auto-Response-Suppress",
    ]
    assert len(letter.subject_line) <= 160
    assert letter.subject_line.isprintable()


def test_random_text_never_breaks_a_mail() -> None:
    dice: random.Random = thrown("letters")
    alphabet = "\r\n\t\0\x1b :;=?<>&\"'@,ä\u2029\u202e🐬\ud800abc"
    for _round in range(40):
        evil = "".join(dice.choice(alphabet) for _ in range(dice.randrange(1, 200)))
        letter = letter_about([Turn(MessageKind.ALERT, incident(subject=evil, message=evil, hint=evil))], SITE, NOW)
        mail = message_from_string(mail_of(letter, "i"), policy=default)
        assert len(mail.keys()) == 11
        body = mail.get_body(("plain",))
        assert body is not None
        assert "Since" in body.get_content() or "since" in body.get_content()


def test_markup_in_names_is_text_and_secrets_are_hidden() -> None:
    evil = f'<script>alert(1)</script><img src=x onerror="x">\npassword=hunter2 {HASH}'
    letter = letter_about(
        [Turn(MessageKind.ALERT, incident(message=evil, detail=evil, hint=evil, subject=evil))],
        Site("h", 'javascript:alert("x")'),
        NOW,
    )
    page = letter.as_html()
    assert "<script" not in page
    assert "<img" not in page
    assert "javascript:" not in page
    for shown in (page, letter.as_text(), letter.subject_line):
        assert "hunter2" not in shown
        assert HASH not in shown


def test_addresses_beyond_ascii_are_written_as_they_are() -> None:
    email = Email.model_validate({"smtp": "smtp://localhost", "from": "bäckup@example.com", "to": ["dbä@example.com"]})
    assert "dbä@example.com" in mail_of(letter_about([Turn(MessageKind.ALERT, incident())], SITE, NOW), email=email)


def test_the_report_begins_with_what_is_wrong_and_names_what_can_be_restored() -> None:
    servers = [
        ServerLine(
            "good1",
            "good",
            "",
            "",
            NOW - timedelta(days=30),
            NOW - timedelta(minutes=2),
            "proved",
            NOW - timedelta(days=2),
        ),
        ServerLine(
            "bad1", "bad", "nothing can be restored", "take a full backup: backupd backup bad1", None, None, "", None
        ),
    ]
    letter = report(servers, [DestinationLine("local", "warning", "nearly full", "")], [incident(3)], SITE, NOW)
    assert letter.subject_line == "[backupd] BAD report of backup1: 2 servers, 1 bad, 1 good"
    text = letter.as_text()
    assert text.index("nothing can be restored") < text.index("good1")
    for part in (
        "take a full backup: backupd backup bad1",
        "proved 2d ago",
        "never",
        "2026-11-21T11:58:00Z",
        "db3: physical.full failed",
        "nearly full",
    ):
        assert part in text, part
    dumps = replace(servers[0], server="remote1", tables_only=True)
    assert "good, tables only" in report([dumps], [], [], SITE, NOW).as_text()
    assert report([], [], [], SITE, NOW).subject_line == "[backupd] GOOD report of backup1: 0 servers, 0 good"
