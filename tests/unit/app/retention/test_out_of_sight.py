"""A destination of which a part is out of sight: rules, sweeps and repairs let go of nothing there, and say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backupd.app.retention.deletion import delete, sweep_destination
from backupd.app.retention.retention import make_room
from backupd.app.verify.verification import fsck, verify
from backupd.cli.output import Screen
from backupd.cli.render import show_damages
from backupd.model.errors import DamagedError, DestinationError
from backupd.model.job import silent
from tests.support.catalog.installation import SERVER, Installation
from tests.support.service.shop import apply
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.stock import pool

Make = Callable[..., Installation]


def unmounted(one: Installation, place: str = "local") -> Path:
    """The folder of all backups is an empty mount point now; where its content is."""
    servers = one.base / place / "servers"
    servers.rename(one.base / "elsewhere")
    servers.mkdir()
    return one.base / "elsewhere"


def test_an_unmounted_folder_of_backups_costs_no_object_and_fails_retention(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 2}}")
    ids = one.daily(4)
    elsewhere = unmounted(one)
    for _day in range(3):
        one.clock.move(days=1, minutes=1)
        with pytest.raises(DamagedError, match="4 backups that the catalog expects") as caught:
            apply(one.wiring, SERVER, one.run())
        assert ids[0] in caught.value.detail
        assert not make_room(one.wiring, "local", 10, one.run())
        assert any("mounted" in line for line in sweep_destination(one.wiring, one.at()))
        assert not fsck(one.wiring, mend=True).ok
    assert len(pool(one.at())) == 4
    assert {record.id for record in one.catalog.backups.every()} == set(ids), "nothing is forgotten"
    assert len(one.events("manifests-missing")) == 1
    (one.base / "local" / "servers").rmdir()
    elsewhere.rename(one.base / "local" / "servers")
    apply(one.wiring, SERVER, one.run())
    assert (len(one.marked()), len(one.events("manifests-found"))) == (2, 1)


def test_a_repair_forgets_nothing_while_most_of_a_server_is_out_of_sight_though_another_place_has_it(
    installation: Make,
) -> None:
    one = installation("", "local", "offsite")
    one.daily(3)
    unmounted(one)
    assert not fsck(one.wiring, mend=True).ok
    assert len(pool(one.at())) == 3
    assert all(set(one.copies(record.id)) == {"local", "offsite"} for record in one.catalog.backups.every())


def test_a_person_who_deletes_what_is_gone_settles_it(installation: Make) -> None:
    one = installation("")
    ids = one.daily(3)
    for path in sorted((one.base / "local" / "servers" / SERVER / ids[2]).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(DamagedError):
        apply(one.wiring, SERVER, one.run())
    assert len(pool(one.at())) == 3
    delete(one.wiring, ids[2], now=True)
    assert len(pool(one.at())) == 2
    assert apply(one.wiring, SERVER, one.run()).held == ()


def test_a_linked_server_folder_fails_the_rules_instead_of_looking_empty(installation: Make) -> None:
    one = installation("")
    one.daily(2)
    folder = one.base / "local" / "servers" / SERVER
    folder.rename(one.base / "elsewhere")
    folder.symlink_to(one.base / "elsewhere")
    with pytest.raises(DestinationError, match="failed") as caught:
        apply(one.wiring, SERVER, one.run())
    assert f"{folder} is a symbolic link" in caught.value.detail
    assert len(pool(one.at())) == 2


class Unreachable(MemoryDestination):
    def is_initialised(self) -> bool:
        raise DestinationError(
            "destination local: its host key is another one",
            detail="known: aa, now: bb",
            hint="compare it with the host's, then write it down",
        )


def test_a_place_that_cannot_be_read_is_not_called_damaged_and_says_why(
    installation: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = installation("")
    one.daily(1)
    monkeypatch.setitem(one.wiring._opened, "local", Unreachable("local"))
    outcome = verify(one.wiring, SERVER, None, silent)
    assert not outcome.ok
    show_damages(Screen(as_json=False), outcome.as_json())
    shown = " ".join(capsys.readouterr().out.split())
    assert "0 damaged; NOT READ: local" in shown
    assert "its host key is another one: known: aa, now: bb" in shown
    assert "marked as damaged" not in shown
    assert "full backup" not in shown
    assert "host key" in fsck(one.wiring, mend=False).findings[0][1].message
