"""Every destination at a glance: reachable, its room, and what is stored there."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest

from backupd.app.views.destinations import DestinationLook, DestinationView, ReachWatch, destination_views
from backupd.app.views.server_status import Status
from backupd.model.errors import DestinationError
from storage.destination import Space
from tests.support.service.desk import HOUR, MINUTE, NOW, Desk


def _settled(desk: Desk) -> DestinationView:
    """What is known once the background has looked."""
    deadline = time.monotonic() + 240
    while (found := destination_views(desk.wiring, desk.clock.now)[0]).checked_at is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def test_a_destination_is_told_with_its_room_and_what_lies_there(desk: Desk) -> None:
    desk.wiring.destination("local").initialise(NOW)
    record = desk.backup()
    found = _settled(desk)
    assert (found.name, found.type, found.off_site, found.servers, found.backups) == (
        "local",
        "filesystem",
        False,
        1,
        1,
    )
    assert (found.reachable, found.initialised, found.trouble, found.checked_at) == (True, True, "", NOW)
    assert found.free is not None
    assert found.total is not None
    assert found.bytes_stored == record.stats.bytes_stored
    assert found.behind_backups == 0
    desk.catalog.replications.expect("local", {"a": 100, "b": 50}, NOW - HOUR)
    desk.catalog.replications.failing("a", "local", NOW, not_before=NOW + HOUR, message="no such bucket")
    desk.catalog.lags.note("db1", "local", 77.0, NOW)
    found = destination_views(desk.wiring, NOW)[0]
    assert (found.behind_backups, found.behind_bytes, found.behind, found.behind_error, found.lag) == (
        2,
        150,
        HOUR,
        "no such bucket",
        timedelta(seconds=77),
    )
    assert any("2 backups (150 B) are not there yet: no such bucket" in one.text for one in found.reasons)


def test_a_destination_that_lost_its_marker_or_does_not_answer_is_bad(
    desk: Desk,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk.backup()
    found = _settled(desk)
    assert (found.status, found.initialised) == (Status.BAD, False)
    assert "should hold 1 backups, but it is empty" in found.reasons[0].text
    glimpse = DestinationLook("local")

    def fail(_self: object) -> bool:
        raise DestinationError("destination local does not answer")

    monkeypatch.setattr(type(desk.wiring.destination("local")), "is_initialised", fail)
    glimpse.step(desk.wiring, NOW)
    assert (glimpse.reachable, glimpse.trouble) == (False, "destination local does not answer")


def test_a_place_that_is_not_mounted_any_more_is_told_and_when_it_is_there_again(desk: Desk) -> None:
    desk.backup()
    watch = ReachWatch()
    _settled(desk)

    def look(minute: int) -> list[str]:
        at = NOW + minute * MINUTE
        deadline = time.monotonic() + 240
        while destination_views(desk.wiring, at)[0].checked_at != at:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        watch.step(desk.wiring, at)
        return [event.kind for event in desk.catalog.events.list()]

    assert [look(minute) for minute in (2, 4)] == [[], []]
    assert look(6) == ["destination-unreachable"]
    (told,) = desk.catalog.events.list()
    assert told.message == ("destination local should hold 1 backups, but it is empty or not a repository")
    assert "mounted" in told.hint
    desk.wiring.destination("local").initialise(NOW)
    assert look(8) == ["destination-reachable", "destination-unreachable"]


def test_a_folder_whose_parent_is_not_there_does_not_count_as_reachable(desk: Desk) -> None:
    config = desk.wiring.settings.configuration
    local = config.destinations["local"].model_copy(update={"path": desk.office.base / "gone" / "repository"})
    changed = config.model_copy(update={"destinations": {"local": local}})
    glimpse = DestinationLook("local")
    glimpse.step(replace(desk.wiring, settings=replace(desk.wiring.settings, configuration=changed)), NOW)
    assert (glimpse.reachable, glimpse.trouble) == (False, f"there is no folder {desk.office.base / 'gone'}")


def test_nobody_waits_for_a_destination_that_hangs(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def hang(_self: object) -> bool:
        go_on.wait(600)
        return False

    monkeypatch.setattr(type(desk.wiring.destination("local")), "is_initialised", hang)
    begun = time.monotonic()
    found = destination_views(desk.wiring, NOW)[0]
    assert (found.reachable, found.status, found.reasons) == (None, Status.GOOD, ())
    assert time.monotonic() - begun < 240
    watch = ReachWatch()
    watch.step(desk.wiring, NOW + 2 * MINUTE)
    assert not desk.catalog.events.list(kind="destination-unreachable"), "it may be slow"
    found = destination_views(desk.wiring, NOW + 4 * MINUTE)[0]
    assert (found.reachable, found.status, found.checked_at) == (False, Status.BAD, None)
    assert "no response for 4m" in found.reasons[0].text
    for _ in range(2):
        watch.step(desk.wiring, NOW + 4 * MINUTE)
    (told,) = desk.catalog.events.list(kind="destination-unreachable")
    assert "no response for 4m" in told.message
    go_on.set()
    assert _settled(desk).initialised is False


def test_a_destination_that_is_nearly_full_is_bad(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = desk.wiring.destination("local")
    destination.initialise(NOW)
    monkeypatch.setattr(type(destination), "space", lambda _self: Space(100 << 30, 4 << 30))
    found = _settled(desk)
    assert (found.status, found.reasons[0].text) == (Status.BAD, "it is nearly full: 4.0 GiB of 100.0 GiB are free")
