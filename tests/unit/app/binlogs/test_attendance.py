"""A stream's process that no service keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from backupd.app.binlogs import attendance
from backupd.app.binlogs.attendance import Attendance
from backupd.app.context.wiring import Wiring
from backupd.app.runtime.child_process import CatalogWriter
from backupd.catalog.session import open_catalog
from backupd.model.errors import RefusedError
from tests.support.service.house import GOLD, Office


@pytest.fixture
def wiring(short_tmp: Path) -> Iterator[Wiring]:
    settings = Office(short_tmp, policies={"gold": GOLD + "binlog: {checkpoint: 5s}\n"}).write()
    with open_catalog(settings.catalog) as catalog:
        yield Wiring(settings, catalog)


@pytest.mark.parametrize("begins", [True, False])
def test_a_service_that_begins_here_is_not_taken_for_one_with_another_spool(
    wiring: Wiring, monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    answers = iter([False, begins])
    monkeypatch.setattr(attendance, "is_served", lambda _spool: next(answers))
    monkeypatch.setattr(attendance, "EVERY", 0.0)
    monkeypatch.setattr(attendance, "NOTICED", 0.0)
    monkeypatch.setattr(Attendance, "_is_taken", lambda _self: True)
    with CatalogWriter(wiring.settings.catalog) as writer:
        found = Attendance(wiring.settings, "db1", writer, wiring.clock, kept=True)
        if begins:
            found.look()
        else:
            with pytest.raises(RefusedError, match="another backupd service uses the catalog"):
                found.look()
