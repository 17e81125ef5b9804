"""One incident for each trouble, one turn for each change of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count

import pytest

from backupd.alerts.ledger import LONGEST_QUIET, Ledger, Turn, grouped
from backupd.model.event import Event, Incident, MessageKind, Severity
from tests.support.dice import thrown

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
REMINDERS = (4 * HOUR, DAY, 3 * DAY)
LEG = "physical.full"


def ledger(known: Iterable[Incident] = (), reminders: tuple[timedelta, ...] = REMINDERS) -> Ledger:
    numbers = count(1)
    return Ledger(known, reminders, lambda _now: f"incident-{next(numbers)}")


def event(
    kind: str,
    *,
    minutes: float = 0,
    server: str = "db1",
    subject: str = LEG,
    job: str = "",
    severity: Severity = Severity.ERROR,
) -> Event:
    return Event(
        NOW + timedelta(minutes=minutes),
        kind,
        severity,
        f"{kind} at {minutes:g}",
        server=server,
        subject=subject,
        hint="do this",
        job_id=job,
    )


def said(turns: Iterable[Turn]) -> list[tuple[str, str]]:
    return [(str(turn.kind), turn.incident.id) for turn in turns]


def test_a_job_that_hangs_fails_is_repeated_and_fails_again_is_told_once_and_once_when_it_is_well() -> None:
    book = ledger()
    told = [
        said(book.take(one))
        for one in (
            event("job-hanging", job="j1"),
            event("job-failed", minutes=1, job="j1"),
            event("job-failed", minutes=6, job="j2"),
            event("job-abandoned", minutes=9, job="j3"),
        )
    ]
    assert told == [[("alert", "incident-1")], [], [], []]
    (incident,) = book.open
    assert (incident.kind, incident.count, incident.message, incident.job_id) == (
        "job-hanging",
        4,
        "job-abandoned at 9",
        "j3",
    )
    (turn,) = book.take(event("job-recovered", minutes=30, severity=Severity.INFO))
    assert (turn.kind, turn.incident.closed_at, turn.news) == (
        MessageKind.RECOVERY,
        NOW + timedelta(minutes=30),
        "job-recovered at 30",
    )
    assert book.open == ()
    assert book.take(event("job-recovered", minutes=31, severity=Severity.INFO)) == []
    assert said(book.take(event("job-failed", minutes=40))) == [("alert", "incident-2")]


def test_another_server_another_leg_and_another_trouble_are_incidents_of_their_own() -> None:
    book = ledger()
    for one in (
        event("job-failed"),
        event("job-failed", server="db2"),
        event("job-failed", subject="verify"),
        event("rpo-broken", subject=""),
    ):
        assert len(book.take(one)) == 1
    assert len(book.open) == 4
    assert said(book.take(event("rpo-kept", subject="", severity=Severity.INFO))) == [("recovery", "incident-4")]


def test_what_gets_worse_is_told_again_and_what_gets_better_is_not() -> None:
    book = ledger()
    assert said(book.take(event("job-missed", severity=Severity.WARNING))) == [("alert", "incident-1")]
    (turn,) = book.take(event("job-failed", minutes=5))
    assert (turn.kind, turn.incident.kind, turn.incident.severity, turn.begins) == (
        MessageKind.ALERT,
        "job-failed",
        Severity.ERROR,
        False,
    )
    assert book.take(event("job-skipped", minutes=6, severity=Severity.WARNING)) == []
    assert book.open[0].severity is Severity.ERROR


def test_routine_and_good_news_open_nothing() -> None:
    book = ledger()
    for one in (
        event("job-skipped", severity=Severity.INFO),
        event("job-cancelled", severity=Severity.INFO),
        event("branch-begun", severity=Severity.INFO),
        event("daemon-started", severity=Severity.INFO),
        event("removal-locked", severity=Severity.INFO),
    ):
        assert book.take(one) == []
    assert book.changed == ()


def test_runs_that_do_not_start_because_of_a_pause_are_told_with_the_pause_only() -> None:
    book = ledger()
    assert len(book.take(event("paused", server="", subject="pause", severity=Severity.WARNING))) == 1
    assert book.take(event("job-skipped", severity=Severity.WARNING)) == []
    assert said(book.take(event("resumed", server="", subject="pause", severity=Severity.WARNING))) == [
        ("recovery", "incident-1")
    ]
    assert len(book.take(event("job-skipped", severity=Severity.WARNING))) == 1


def test_retention_that_was_refused_and_its_job_that_failed_are_one_incident() -> None:
    book = ledger()
    refused = event("retention-refused", subject="local", job="j1", severity=Severity.WARNING)
    assert said(book.take(refused)) == [("alert", "incident-1")]
    assert book.take(event("job-failed", subject="retention", job="j1")) == []
    well = event("job-recovered", subject="retention", minutes=60, job="j2", severity=Severity.INFO)
    assert said(book.take(well)) == [("recovery", "incident-1")]


def test_reminders_come_with_growing_pauses_until_somebody_is_at_it() -> None:
    book = ledger()
    book.take(event("job-failed"))
    at = [hour for hour in range(1, 24 * 12) if book.pass_time(NOW + hour * HOUR)]
    assert at == [4, 4 + 24, 4 + 24 + 72, 4 + 24 + 144, 4 + 24 + 216]
    (incident,) = book.open
    assert incident.reminders == 5
    taken = ledger([replace(incident, acknowledged_by="eve", acknowledged_at=NOW, next_reminder=None)])
    assert taken.pass_time(NOW + 99 * DAY) == []
    assert said(taken.take(event("job-recovered", minutes=9999))) == [("recovery", "incident-1")]


def test_without_reminders_there_are_none() -> None:
    book = ledger(reminders=())
    book.take(event("job-failed"))
    assert book.due() is None
    assert book.pass_time(NOW + 99 * DAY) == []


def test_what_nothing_makes_undone_is_told_once_and_is_over_without_a_word() -> None:
    book = ledger()
    assert len(book.take(event("clock-jump", server="", subject="service", severity=Severity.WARNING))) == 1
    assert book.take(event("clock-jump", server="", subject="service", minutes=5, severity=Severity.WARNING)) == []
    assert book.pass_time(NOW + 23 * HOUR) == []
    assert book.open
    assert book.pass_time(NOW + 25 * HOUR) == []
    assert not book.open
    assert book.changed[0].closed_at == NOW + 25 * HOUR


def test_what_is_told_again_while_it_lasts_is_over_when_it_is_not() -> None:
    book = ledger(reminders=())
    book.take(event("retention-refused", subject="local", severity=Severity.WARNING))
    book.take(event("retention-refused", subject="local", minutes=24 * 60, severity=Severity.WARNING))
    assert book.pass_time(NOW + 2 * DAY) == []
    assert said(book.pass_time(NOW + 3 * DAY)) == [("recovery", "incident-1")]


def test_a_channel_that_does_not_work_is_an_incident_as_any_other() -> None:
    book = ledger()
    assert said(book.take(event("alerts-undeliverable", server="", subject="email"))) == [("alert", "incident-1")]
    assert said(
        book.take(event("alerts-delivered", server="", subject="email", minutes=9, severity=Severity.INFO))
    ) == [("recovery", "incident-1")]
    assert not book.open


def test_a_server_with_much_trouble_and_a_destination_with_much_trouble_get_one_letter_each() -> None:
    book = ledger()
    events = [event("destination-behind", server=f"db{n}", subject="s3") for n in range(5)]
    events += [
        event("job-failed", server="web", subject=leg)
        for leg in (LEG, "verify", "test_restore", "replicate/s3", "logical.schedule")
    ]
    events += [event("rpo-broken", server="x"), event("job-failed", server="x", subject="verify")]
    groups = grouped([turn for one in events for turn in book.take(one)], {"s3", "local"})
    assert [len(group) for group in groups] == [5, 5, 1, 1]


def test_the_same_trouble_of_many_servers_is_one_letter() -> None:
    book = ledger()
    turns = [turn for n in range(200) for turn in book.take(event("job-missed", server=f"db{n}"))]
    assert len(grouped(turns, {"local"})) == 1


@pytest.mark.parametrize(("troubles", "letters"), [(5, 5), (6, 1)])
def test_very_many_letters_at_once_are_one(troubles: int, letters: int) -> None:
    book = ledger()
    turns = [turn for n in range(troubles) for turn in book.take(event(f"unknown-{n}", server=f"db{n}"))]
    assert len(grouped(turns, {"local"})) == letters


@pytest.mark.parametrize(("kind", "subject"), [("hook-failed", "after"), ("rot-found", "local")])
def test_a_job_that_failed_is_told_whatever_else_it_told_of_and_ends_by_itself(kind: str, subject: str) -> None:
    book = ledger()
    assert said(book.take(event(kind, subject=subject, job="j1"))) == [("alert", "incident-1")]
    assert said(book.take(event("job-failed", minutes=1, job="j1"))) == [("alert", "incident-2")]
    assert [one.message for one in book.open] == [f"{kind} at 0", "job-failed at 1"]
    assert book.take(event("hook-recovered", subject="after", minutes=2, severity=Severity.INFO)) == [] or kind == (
        "hook-failed"
    )
    assert book.open[-1].kind == "job-failed"


def stream(book: Ledger, at: datetime, *, broken: bool) -> list[Turn]:
    return book.take(
        Event(
            at,
            "stream-failed" if broken else "stream-recovered",
            Severity.ERROR if broken else Severity.INFO,
            "stream",
            server="db1",
            subject="stream",
        )
    )


def test_what_comes_and_goes_is_told_twice_then_it_is_one_incident_until_it_stays_well() -> None:
    book = ledger()
    told = [
        (minute, turn)
        for minute in range(0, 24 * 60, 2)
        for turn in [
            *stream(book, NOW + timedelta(minutes=minute), broken=minute % 4 == 0),
            *book.pass_time(NOW + timedelta(minutes=minute)),
        ]
    ]
    assert [(minute, str(turn.kind)) for minute, turn in told] == [
        (0, "alert"),
        (2, "recovery"),
        (4, "alert"),
        (6, "recovery"),
        (8, "alert"),
        (8 + 240, "reminder"),
    ]
    assert [turn.often for _minute, turn in told] == [0, 0, 0, 0, 2, 0]
    assert not book.open
    last = NOW + timedelta(minutes=24 * 60 - 2)
    assert book.due() == last + timedelta(minutes=30)
    assert book.pass_time(last + timedelta(minutes=29)) == []
    assert book.pass_time(last + timedelta(minutes=30), muted=True) == []
    (turn,) = book.pass_time(last + timedelta(minutes=30))
    assert (turn.kind, turn.incident.closed_at, turn.incident.count) == (MessageKind.RECOVERY, last, 358)
    assert book.pass_time(last + DAY) == []


@pytest.mark.parametrize("reminders", [REMINDERS, ()])
def test_people_know_of_whatever_is_broken_and_hear_of_few_ends_however_it_comes_and_goes(
    reminders: tuple[timedelta, ...],
) -> None:
    dice = thrown("comings and goings")
    for _round in range(8):
        now, broken, since, kept = NOW, False, NOW, dict[str, Incident]()
        heard = MessageKind.RECOVERY
        ends: list[datetime] = []
        scale = dice.choice((2, 20, 90, 600))
        change = NOW
        for _step in range(600):
            book = Ledger(kept.values(), reminders)  # a new process each time
            turns = []
            if now >= change:
                broken, since = not broken, now
                turns += stream(book, now, broken=broken)
                change = now + timedelta(minutes=dice.uniform(1, scale))
            turns += book.pass_time(now)
            kept |= {one.id: one for one in book.changed}
            for turn in turns:
                heard = turn.kind
                ends += [now] if heard is MessageKind.RECOVERY else []
            assert not broken or heard is not MessageKind.RECOVERY
            assert broken or now - since < LONGEST_QUIET or heard is MessageKind.RECOVERY
            assert sum(one.is_open for one in kept.values()) == broken
            now += timedelta(minutes=dice.uniform(1, scale))
        assert max(sum(end <= one < end + DAY for one in ends) for end in ends) <= 11


def test_what_a_clock_wrote_that_was_ahead_is_set_right() -> None:
    book = ledger()
    for subject in ("a", "b"):
        book.take(event("stream-failed", subject=subject, minutes=700 * 24 * 60))
    for minute in range(5):
        stream(book, NOW + timedelta(days=700, minutes=minute), broken=minute % 2 == 0)
    stream(book, NOW + timedelta(days=700, minutes=9), broken=False)
    book.set_right(NOW)
    assert {(one.opened_at, one.last_at, one.next_reminder) for one in book.open} == {(NOW, NOW, NOW + 4 * HOUR)}
    (later,) = [one for one in book.changed if one.settles]
    assert (later.closed_at, later.next_reminder) == (NOW, NOW + HOUR / 2)
    changed = book.changed
    book.set_right(NOW + HOUR / 4)
    assert book.changed == changed


def test_what_nobody_looks_after_any_more_is_over_at_once_and_not_well() -> None:
    book = ledger()
    for minute in range(5):
        stream(book, NOW + timedelta(minutes=minute), broken=minute % 2 == 0)
    (turn,) = book.take(event("stream-failed-unwatched", subject="stream", minutes=6, severity=Severity.INFO))
    assert (turn.kind, turn.well, book.open) == (MessageKind.RECOVERY, False, ())


def test_a_hold_is_told_once_and_is_over_without_a_word_when_it_is_released() -> None:
    book = ledger()
    for minutes in (0, 10, 20, 30):
        assert [kind for kind, _ in said(book.take(event("held", minutes=minutes, subject="hold")))] == ["alert"]
        assert [one.kind for one in book.open] == ["held"]
        assert book.take(event("released", minutes=minutes + 5, subject="hold")) == []
        assert book.open == ()
    assert book.pass_time(NOW + DAY) == []
