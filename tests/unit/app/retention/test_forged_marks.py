"""Marks that somebody put who may only put files: with any time in them, saying that a person wanted them."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from backupd.app.retention import deletion
from backupd.app.retention.deletion import delete, sweep_destination, unconfirmed, undelete
from backupd.app.retention.retention import REASON, make_room
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.backup_record import BackupState
from backupd.model.text import format_time
from backupd.transfer.deletion import mark
from storage import layout
from storage.destination import Destination
from tests.support.catalog.installation import SERVER, Installation
from tests.support.service.shop import apply
from tests.support.stores.stock import pool

Make = Callable[..., Installation]


def forge(one: Installation, *names: str, reason: str = "", ahead: float = -300) -> None:
    """As whoever may only put files would: an old mark, confirmed, and the file looks as old where that can be."""
    at = one.clock() + timedelta(days=ahead)
    for name in names:
        note = {"server": SERVER, "backup": name, "at": format_time(at), "reason": reason, "confirmed": True}
        key = layout.mark_key(SERVER, name)
        one.at().put(key, io.BytesIO(json.dumps(note).encode()))
        file = one.base / "local" / key
        os.utime(file, (at.timestamp(), at.timestamp()))


@pytest.fixture
def second(installation: Make, tmp_path: Path) -> Iterator[Callable[[Installation], Installation]]:
    """Another installation with a catalog of its own at the same place."""
    catalogs: list[Catalog] = []

    def make(one: Installation) -> Installation:
        base = tmp_path / f"second{len(catalogs)}"
        base.mkdir()
        catalogs.append(open_catalog(f"sqlite:///{base}/catalog.db"))
        return Installation(base, catalogs[-1], "", roots={"local": tmp_path / "local"}, clock=one.clock)

    yield make
    for catalog in catalogs:
        catalog.close()


def test_a_forged_mark_waits_for_its_grace_from_when_it_is_first_seen_here(installation: Make) -> None:
    one = installation()
    ids = one.daily(6)
    forge(one, *ids[3:])
    sweep_destination(one.wiring, one.at())
    assert one.present() == set(ids)
    one.clock.move(hours=23)
    sweep_destination(one.wiring, one.at())
    assert one.present() == set(ids)
    assert undelete(one.wiring, ids[3]) == [ids[3]]
    forge(one, ids[3])
    one.clock.move(hours=2)
    sweep_destination(one.wiring, one.at())
    assert one.present() == set(ids[:4]), "few of them go as anybody's would; the one put back begins anew"


def test_forged_confirmations_do_not_release_the_brake_and_are_told_while_there_is_time(installation: Make) -> None:
    one = installation()
    ids = one.daily(14)
    forge(one, *ids, reason=REASON)
    sweep_destination(one.wiring, one.at())
    (event,) = one.events("removal-braked")
    assert "14 of these marks were not written by this installation" in event.detail
    for _day in range(3):
        one.clock.move(days=1, hours=1)
        sweep_destination(one.wiring, one.at())
    assert one.present() == set(ids)
    assert not make_room(one.wiring, "local", 1 << 60, one.run()), "a full place waives no grace for them"
    assert one.present() == set(ids)
    undelete(one.wiring, ids[0])
    delete(one.wiring, ids[1], now=False)
    one.clock.move(days=1, hours=1)
    sweep_destination(one.wiring, one.at())
    assert one.present() == {*ids} - {ids[1]}, "what a person here wants goes all the same"


def test_forged_times_that_are_spread_over_the_future_or_many_days_do_not_pass_the_brake(installation: Make) -> None:
    one = installation()
    ids = one.daily(14)
    for number, name in enumerate(ids):
        forge(one, name, ahead=-3.0 * number)
    one.clock.move(hours=1)
    sweep_destination(one.wiring, one.at())
    one.clock.move(days=2)
    sweep_destination(one.wiring, one.at())
    assert one.present() == set(ids)


@pytest.mark.parametrize("ahead", [-300.0, 3.0])
@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("withdrawn", [False, True])
def test_strange_marks_explain_no_missing_manifest_before_they_are_due(
    installation: Make, ahead: float, seen: bool, withdrawn: bool
) -> None:
    one = installation()
    ids = one.daily(6)
    before = pool(one.at())
    forge(one, *ids[1:], ahead=ahead)
    if seen:
        sweep_destination(one.wiring, one.at())
    for name in ids[1:]:
        one.at().delete(layout.manifest_key(SERVER, name))
        if withdrawn:
            one.at().delete(layout.mark_key(SERVER, name))
    for _look in range(3):
        assert any("the catalog expects 5 backups" in line for line in sweep_destination(one.wiring, one.at()))
        one.clock.move(hours=7)
    assert pool(one.at()) == before
    assert all(list(one.at().list(layout.backup_folder(SERVER, name))) for name in ids)
    assert {one.state(name) for name in ids[1:]} <= {BackupState.COMPLETE, BackupState.DAMAGED}
    assert not {name for name in ids if one.copies(name)["local"] == "deleted"}


@pytest.mark.parametrize("ours", [False, True])
def test_what_a_killed_sweep_left_of_a_backup_that_was_due_goes_with_the_next_one(
    installation: Make, ours: bool
) -> None:
    one = installation()
    ids = one.daily(6)
    if ours:
        delete(one.wiring, ids[3], now=False)
    else:
        forge(one, ids[3])
    sweep_destination(one.wiring, one.at())
    one.clock.move(days=1, hours=1)
    one.at().delete(layout.manifest_key(SERVER, ids[3]))
    assert sweep_destination(one.wiring, one.at()) == []
    assert len(pool(one.at())) == 5
    assert not one.marked()
    assert one.agrees()


def test_a_time_in_the_future_neither_passes_the_brake_nor_keeps_ones_own_mark_from_being_due(
    installation: Make,
) -> None:
    one = installation()
    ids = one.daily(14)
    for number, name in enumerate(ids):
        forge(one, name, ahead=1.1 * number)
    sweep_destination(one.wiring, one.at())
    assert set(unconfirmed(one.wiring, one.at()).values()) == {one.clock()}
    one.clock.move(days=30)
    sweep_destination(one.wiring, one.at())
    assert one.present() == set(ids)
    undelete(one.wiring, ids[0])
    delete(one.wiring, ids[13], now=False)
    one.clock.move(days=1, hours=1)
    sweep_destination(one.wiring, one.at())
    assert one.present() == set(ids[:13])


def test_ones_own_mark_of_a_clock_that_was_ahead_is_due_by_the_clock_of_now(installation: Make) -> None:
    one = installation()
    ids = one.daily(3)
    one.catalog.marks.take("local", (SERVER, ids[2]), one.clock(), stored=None, confirmed=True)
    mark(one.at(), SERVER, ids[2], one.clock() + timedelta(days=3000))
    sweep_destination(one.wiring, one.at())
    one.clock.move(days=1, hours=1)
    sweep_destination(one.wiring, one.at())
    assert one.present() == set(ids[:2])


def test_really_releases_what_the_brake_told_of_and_nothing_that_came_just_now(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 14}}")
    ids = one.daily(14)
    forge(one, *ids[2:13], reason=REASON)
    apply(one.wiring, SERVER, one.run(), really=True)
    assert {name for _server, name in unconfirmed(one.wiring, one.at())} == set(ids[2:13])
    one.clock.move(days=1, hours=1)
    apply(one.wiring, SERVER, one.run(), really=True)
    assert not unconfirmed(one.wiring, one.at()), "a day later somebody has looked"
    assert not one.present() & set(ids[2:13])


def test_marks_of_another_installation_go_by_the_brake_of_whoever_sweeps_and_ones_own_by_ones_word(
    installation: Make, second: Callable[[Installation], Installation]
) -> None:
    one = installation()
    two = second(one)
    ids = one.daily(14)
    for name in ids[3:]:
        delete(one.wiring, name, now=False)
    sweep_destination(two.wiring, two.at())
    one.clock.move(days=1, hours=1)
    sweep_destination(two.wiring, two.at())
    assert one.present() == set(ids), "eleven at once: the other one asks first"
    assert "not written by this installation" in two.events("removal-braked")[0].detail
    sweep_destination(one.wiring, one.at())
    assert one.present() == set(ids[:3])


def test_a_catalog_made_anew_lets_every_grace_begin_anew_and_counts_all_with_the_brake(
    installation: Make, second: Callable[[Installation], Installation]
) -> None:
    one = installation()
    ids = one.daily(5)
    delete(one.wiring, ids[4], now=False)
    one.clock.move(days=9)
    anew = second(one)
    sweep_destination(anew.wiring, anew.at())
    assert one.present() == set(ids)
    assert unconfirmed(anew.wiring, anew.at()) == {(SERVER, ids[4]): one.clock()}
    one.clock.move(days=1)
    sweep_destination(anew.wiring, anew.at())
    assert one.present() == set(ids[:4])


def test_a_mark_that_takes_the_place_of_one_that_was_confirmed_is_another_one(installation: Make) -> None:
    one = installation()
    ids = one.daily(14)
    for name in ids[3:]:
        delete(one.wiring, name, now=False)
    sweep_destination(one.wiring, one.at())
    for name in ids[3:]:  # another installation's person wants them back, and somebody marks them again
        one.at().delete(layout.mark_key(SERVER, name))
    forge(one, *ids[3:])
    one.clock.move(days=2)
    sweep_destination(one.wiring, one.at())
    one.clock.move(days=2)
    sweep_destination(one.wiring, one.at())
    assert one.present() == set(ids)


@pytest.mark.parametrize("late", [False, True])
def test_a_mark_that_another_host_did_not_see_yet_stays_our_own(
    installation: Make, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Hosts share a catalog and no lock: one lists the marks before the other puts one, and looks at the list between
    the row of the other and its mark, or after both."""
    one = installation()
    ids = one.daily(3)

    def put(destination: Destination, server: str, backup_id: str, now: datetime, *, reason: str = "") -> datetime:
        if not late:
            one.catalog.marks.look("local", {}, now)
        return mark(destination, server, backup_id, now, reason=reason)

    monkeypatch.setattr(deletion, "mark", put)
    delete(one.wiring, ids[2], now=False)
    if late:
        one.catalog.marks.look("local", {}, one.clock())
    assert unconfirmed(one.wiring, one.at()) == {}
    assert set(deletion.own(one.wiring, one.at())) == {(SERVER, ids[2])}


def test_a_deletion_that_died_before_its_mark_was_put_frees_nobody_elses_mark_later(installation: Make) -> None:
    one = installation()
    ids = one.daily(3)
    one.catalog.marks.take("local", (SERVER, ids[2]), one.clock(), stored=None, confirmed=True)
    sweep_destination(one.wiring, one.at())
    mark(one.at(), SERVER, ids[2], one.clock())
    assert set(unconfirmed(one.wiring, one.at())) == {(SERVER, ids[2])}
