from __future__ import annotations

from datetime import UTC, datetime, timedelta

from backupd.binlog.purge_alarm import purge_alarm
from backupd.engine.server.binary_logs import Expiry, ListedLog, SourceState
from backupd.model.server_facts import Flavour, Position, Version

NOW = datetime(2026, 11, 21, 4, 0, tzinfo=UTC)
STATE = SourceState(
    NOW,
    "",
    1,
    Flavour.MARIADB,
    Version(10, 11),
    "binlog",
    tuple(ListedLog(f"binlog.{number:06d}", number, 1000) for number in range(3, 8)),
    Position("binlog.000007", 1000),
    None,
)
MONTH = Expiry(timedelta(days=30), None)


def test_a_tenth_of_the_servers_patience_before_it_removes_a_file_there_is_an_alarm() -> None:
    assert purge_alarm(4, NOW - timedelta(days=26), STATE, MONTH) is None
    alarm = purge_alarm(4, NOW - timedelta(days=28), STATE, MONTH)
    assert alarm is not None
    assert (alarm.file, alarm.at, alarm.gone) == ("binlog.000004", NOW + timedelta(days=2), False)


def test_an_hour_before_is_the_least() -> None:
    short = Expiry(timedelta(hours=3), None)
    assert purge_alarm(4, NOW - timedelta(minutes=110), STATE, short) is None
    assert purge_alarm(4, NOW - timedelta(minutes=121), STATE, short) is not None


def test_the_file_that_is_written_to_is_never_removed() -> None:
    assert purge_alarm(7, NOW - timedelta(days=99), STATE, MONTH) is None


def test_a_limit_on_all_files_together_counts_too() -> None:
    assert purge_alarm(4, NOW, STATE, Expiry(None, 5000)) is None
    alarm = purge_alarm(3, NOW, STATE, Expiry(None, 5500))
    assert alarm is not None
    assert alarm.at is None
    assert "5500 bytes" in alarm.message


def test_a_file_that_is_gone_is_told_as_such() -> None:
    alarm = purge_alarm(2, NOW, STATE, MONTH)
    assert alarm is not None
    assert alarm.gone


def test_a_server_that_removes_nothing_gives_no_alarm() -> None:
    assert purge_alarm(3, NOW - timedelta(days=999), STATE, Expiry(None, None)) is None
