from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backupd.model.errors import UsageError
from restore.planning.target import AtBackup, AtGtid, AtPosition, AtTime, Latest, Target, parse_target

UUID = "3e11fa47-71ca-11e1-9e33-c80aa9429562"


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("latest", Latest()),
        ("2026-11-21T09:41:03.250Z", AtTime(datetime(2026, 11, 21, 9, 41, 3, 250000, UTC))),
        ("2026-11-21T10:41:03+01:00", AtTime(datetime(2026, 11, 21, 9, 41, 3, tzinfo=UTC))),
        ("gtid:0-1-100", AtGtid("0-1-100")),
        ("gtid:0-1-100,1-7-3", AtGtid("0-1-100,1-7-3")),
        (f"gtid:{UUID}:1-5:7,{UUID}:tag:1", AtGtid(f"{UUID}:1-5:7,{UUID}:tag:1")),
        ("before-gtid:0-1-100", AtGtid("0-1-100", before=True)),
        (f"before-gtid:{UUID}:17", AtGtid(f"{UUID}:17", before=True)),
        ("mysql-bin.000042:1234", AtPosition("mysql-bin.000042", 1234)),
        ("backup:20261121T020000Z-7f3a9c01", AtBackup("20261121T020000Z-7f3a9c01")),
    ],
)
def test_every_form_of_the_grammar_is_read_with_and_without_a_branch(text: str, goal: object) -> None:
    assert parse_target(text).goal == goal
    assert parse_target(text).branch is None
    branched = parse_target(f"{text}@after-restore.2")
    assert (branched.goal, branched.branch) == (goal, "after-restore.2")
    assert parse_target(str(branched)) == branched


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("newest", "not understood"),
        ("2026-11-21", "time zone"),
        ("2026-11-21T09:41:03", "time zone"),
        ("2026-13-41T09:41:03Z", "not a time"),
        ("gtid:", "not a GTID"),
        ("gtid:0-1", "not a GTID"),
        ("before-gtid:0-1-100,1-1-4", "more than one transaction"),
        (f"before-gtid:{UUID}:1-9", "more than one transaction"),
        ("mysql-bin.000042:0", "starts at byte 4"),
        ("mysql-bin.000042", "not understood"),
        ("../bin.000001:400", "not understood"),
        ("backup:yesterday", "not a backup id"),
        ("latest@", "not the name of a branch"),
        ("latest@../x", "not the name of a branch"),
    ],
)
def test_a_wrong_target_says_what_is_wrong_and_what_would_be_right(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse_target(text)
    assert caught.value.hint
    assert caught.value.exit_code == 2


@given(st.text(max_size=60))
def test_any_text_is_a_target_or_a_usage_error(text: str) -> None:
    try:
        target = parse_target(text)
    except UsageError:
        return
    assert parse_target(str(target)) == target


@given(st.datetimes(timezones=st.just(UTC)))
def test_times_survive_being_written_and_read(moment: datetime) -> None:
    assert parse_target(str(Target(AtTime(moment)))).goal == AtTime(moment)
