"""A restore that waits for an archive, part by part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from backupd.model.errors import ArchivedError, DamagedError
from backupd.model.job import Report
from backupd.model.proof import Phase
from backupd.process.run_context import RunContext, Stopwatch
from restore.fetch.chain import fetch_members
from restore.fetch.objects import fetch
from restore.fetch.sources import Loaded, Sources, ThawWait
from storage import layout
from storage.destination import Tier
from tests.support.keys import Keys
from tests.support.restores.builder import Builder, GpgOpener, files_below
from tests.support.stores.cold import ColdPlace
from tests.support.stores.stock import FakeClock

FULL, INCREMENT = "20261121T020000Z-00000001", "20261121T030000Z-00000002"


class Attendant(ThawWait):
    """Thaws a part when it is waited for."""

    def __init__(self, place: ColdPlace, clock: FakeClock, chain: list[Loaded]) -> None:
        self._place, self._clock = place, clock
        self._keys = {
            one.header.backup_id: [layout.object_key(item.name) for item in one.header.objects] for one in chain
        }
        self.waited: list[str] = []
        self.reopened: list[str] = []
        self.willing = True

    def is_open(self, part: str) -> bool:
        return part in self.waited

    def wait(self, part: str, report: Report, cancelled: Callable[[], bool]) -> None:
        del report, cancelled
        self.waited.append(part)
        if part not in self.reopened and part == INCREMENT:
            return  # as if it had been there, and went away in this moment
        for key in self._keys[part]:
            self._place.thaw(key, Tier.STANDARD, 1)
        self._clock.move(hours=13)

    def reopen(self, part: str) -> bool:
        self.reopened.append(part)
        return self.willing


@pytest.fixture
def chain(keys: Keys) -> tuple[Builder, list[Loaded]]:
    builder = Builder(keys)
    loaded = []
    for number, (name, parent) in enumerate(((FULL, None), (INCREMENT, FULL))):
        made = builder.manifest(
            builder.entries({"shop/t.ibd": b"%d" % number * 70_000, "ibdata1": b"i" * 1000}),
            backup_id=name,
            parent=parent,
        )
        loaded.append(Loaded(*made))
    return builder, loaded


def test_each_member_is_read_when_its_part_is_there_and_again_when_it_went_away(
    chain: tuple[Builder, list[Loaded]], keys: Keys, tmp_path: Path
) -> None:
    builder, loaded = chain
    clock = FakeClock()
    place = ColdPlace("vault", clock)
    for one in loaded:
        builder.put(place, one.header)
    gate = Attendant(place, clock, loaded)
    phases: list[Phase] = []
    opener = GpgOpener(keys)
    context = RunContext(workers=2, watch=Stopwatch(phases.append))
    fetch_members(loaded, tmp_path, Sources([place], opener, thaw=gate), context)
    assert gate.waited == [FULL, INCREMENT, INCREMENT]
    assert gate.reopened == [INCREMENT]
    assert files_below(tmp_path)["data/shop/t.ibd"] == b"0" * 70_000
    assert files_below(tmp_path)["increment-1/shop/t.ibd"] == b"1" * 70_000
    assert [phase.name for phase in phases] == ["fetched"]
    place.expire()
    gate = Attendant(place, clock, loaded)
    gate.willing = False
    with pytest.raises(ArchivedError, match="are in an archive class"):
        fetch_members(loaded, tmp_path / "other", Sources([place], opener, thaw=gate), context)


def test_an_archived_copy_is_what_is_told_where_the_other_copy_is_damaged(
    chain: tuple[Builder, list[Loaded]], keys: Keys, tmp_path: Path
) -> None:
    builder, (full, _increment) = chain
    cold, bare = ColdPlace("vault", FakeClock()), ColdPlace("bare", FakeClock())
    builder.put(cold, full.header)

    def restore(*places: ColdPlace) -> None:
        fetch(full, Sources(places, GpgOpener(keys)), tmp_path, RunContext(workers=2))

    with pytest.raises(ArchivedError, match="3 stored objects are in an archive class") as told:
        restore(bare, cold)
    assert "it is missing" in told.value.detail
    assert "thaw them first" in told.value.hint
    cold.delete(layout.object_key(full.header.objects[0].name))
    with pytest.raises(DamagedError):
        restore(bare, cold)


def test_time_that_was_only_waited_is_no_phases_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 10.0, 110.0, 115.0])
    monkeypatch.setattr(
        "backupd.process.run_context.time", SimpleNamespace(monotonic=lambda: next(seconds))
    )  # nobody else's
    phases: list[Phase] = []
    watch = Stopwatch(phases.append)
    with watch.phase("fetched", 7), watch.waiting():
        pass
    assert phases == [Phase("fetched", 15.0, 7)]
