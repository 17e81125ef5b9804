"""A destination that is full: the rules make room as if the run that failed did not exist, and never too much."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backupd.app.retention.deletion import delete
from backupd.app.retention.retention import make_room, relieve
from backupd.catalog.session import Catalog
from backupd.model.errors import DestinationFullError
from tests.support.catalog.installation import SERVER, Installation

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")

MIB = 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB of its own."""
    point = tmp_path / "disk"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(point)], check=True)
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


@pytest.fixture
def full(tmp_path: Path, catalog: Catalog, disk: Path) -> Callable[[str], Installation]:
    """Makes an installation whose only destination holds three backups of 2 MiB each and has no room for a fourth."""

    def make(rules: str) -> Installation:
        one = Installation(tmp_path, catalog, rules, roots={"local": disk})
        for number, days in ((1, 3), (2, 2), (3, 1)):
            one.add(number, days=days, content=bytes([number]) * 2 * MIB)
        return one

    return make


def attempt(one: Installation, number: int) -> DestinationFullError | None:
    try:
        one.add(number, days=0, content=bytes([number]) * 2 * MIB)
    except DestinationFullError as error:
        return error
    return None


def test_a_backup_fails_room_is_made_and_the_next_attempt_succeeds(full: Callable[[str], Installation]) -> None:
    one = full("{local: {keep_fulls: 2}}")
    error = attempt(one, 9)
    assert error is not None
    assert error.destination == "local"
    relieve(one.wiring, error, one.run())
    assert attempt(one, 9) is None
    assert {name[-1] for name in one.present()} == {"2", "3", "9"}
    (event,) = one.events("grace-waived")
    assert "removed 1 expired backups" in event.message
    assert event.detail.endswith("00000001")


def test_no_more_goes_than_is_needed(full: Callable[[str], Installation]) -> None:
    one = full("{local: {keep_fulls: 1}}")
    assert make_room(one.wiring, "local", 3 * MIB, one.run())
    assert {name[-1] for name in one.present()} == {"2", "3"}
    assert {name[-1] for name in one.marked()} == {"2"}, "it expired, but nobody needs its room: it can come back"


def test_with_nothing_but_what_must_stay_the_error_says_what_to_do(full: Callable[[str], Installation]) -> None:
    one = full("{local: {keep_fulls: 3}}")
    error = attempt(one, 9)
    assert error is not None
    with pytest.raises(DestinationFullError) as told:
        relieve(one.wiring, error, one.run())
    assert "nothing there may be deleted" in told.value.message
    assert "keep_fulls: full backup 1 of the newest 3" in told.value.detail
    assert "more room" in told.value.hint
    assert len(one.present()) == 3


def test_the_last_restorable_and_the_newest_proved_backup_never_make_room(full: Callable[[str], Installation]) -> None:
    one = full("{local: {keep_fulls: 1}}")
    oldest = min(one.present())
    one.prove(oldest)
    assert make_room(one.wiring, "local", 0, one.run())
    assert one.present() == {oldest, max(one.present())}
    assert not make_room(one.wiring, "local", 0, one.run())


def test_what_a_person_deleted_can_still_be_undeleted_on_a_full_disk(full: Callable[[str], Installation]) -> None:
    one = full("{local: {keep_fulls: 3}}")
    oldest = min(one.present())
    delete(one.wiring, oldest, now=False)
    assert not make_room(one.wiring, "local", 0, one.run())
    assert oldest in one.present()


def test_other_servers_rules_make_room_too(full: Callable[[str], Installation]) -> None:
    one = full("{local: {keep_fulls: 3}}")
    one.write("{local: {keep_fulls: 1}}", servers=["zoo"])
    older = one.add(20, days=3, server="zoo")
    newer = one.add(21, days=2, server="zoo")
    assert make_room(one.wiring, "local", 0, one.run())
    assert one.present(server="zoo") == {newer}
    assert older not in {record.id for record in one.catalog.backups.every()}
    assert len(one.present(server=SERVER)) == 3, "it is not configured any more, so nothing of it goes"
