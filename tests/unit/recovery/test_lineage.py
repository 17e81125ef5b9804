"""Whose backups lie under a server's name."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from backupd.model.backup_record import BackupKind, BackupRecord, BackupState, Stats
from backupd.model.server_facts import Position
from backupd.recovery.chains import lineages, standing_aside, strangers

AT = datetime(2026, 11, 21, tzinfo=UTC)


def backup(name: str, hours: int, uuid: str, *, made: bool = False) -> BackupRecord:
    at = AT + timedelta(hours=hours)
    return BackupRecord(
        name,
        "shop",
        BackupKind.PHYSICAL_FULL,
        BackupState.COMPLETE,
        None,
        at,
        at,
        Stats(1, 1, 1, 1, 0),
        Position(),
        "",
        "",
        "",
        server_uuid=uuid,
        manifest="m" if made else "",
    )


def test_a_server_with_another_uuid_that_goes_on_beside_ours_is_a_stranger() -> None:
    records = [backup("a1", 1, "A"), backup("b1", 2, "B", made=True), backup("a2", 3, "A")]
    (found,) = strangers(records)
    assert (found.uuid, found.ours, found.backups, found.former) == ("A", "B", ("a1", "a2"), False)
    assert lineages(records) == {"a1": "A", "b1": "", "a2": "A"}
    assert standing_aside(records, latest=False) == (found,)


def test_a_server_that_was_replaced_under_us_is_ours_before_and_after() -> None:
    records = [backup("a1", 1, "A", made=True), backup("b1", 2, "B", made=True), backup("b2", 3, "B")]
    assert strangers(records) == ()
    assert set(lineages(records).values()) == {""}


def test_after_a_rebuild_what_was_before_our_first_backup_is_a_moment_but_never_the_latest() -> None:
    records = [backup("a1", 1, "A"), backup("b1", 2, "B", made=True)]
    assert strangers(records)[0].former
    assert standing_aside(records, latest=False) == ()
    assert standing_aside(records, latest=True)[0].uuid == "A"


def test_nobody_is_a_stranger_where_nothing_was_made_here_but_uuids_are_kept_apart() -> None:
    records = [backup("a1", 1, "A"), backup("b1", 2, "B"), backup("x", 3, "")]
    assert strangers(records) == ()
    assert lineages(records) == {"a1": "A", "b1": "B", "x": ""}
    assert set(lineages([replace(one, server_uuid="A") for one in records]).values()) == {""}
    assert set(lineages([records[0], records[2]]).values()) == {""}
