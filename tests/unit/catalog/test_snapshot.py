"""The catalog as one file, from either database, and the history in it taken into another catalog."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

import backupd.catalog
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.backup_record import Copy, HoldKind
from backupd.model.event import Event, Severity
from backupd.model.job import JobState
from tests.support.catalog.samples import NOON, backup, job, proof, witness


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Catalog]:
    with open_catalog(f"sqlite:///{tmp_path}/fresh.db") as catalog:
        yield catalog


def fill(catalog: Catalog) -> None:
    catalog.backups.add(replace(backup(), copies=(Copy("local", "complete", NOON, NOON),)))
    for number in (1, 2):
        catalog.jobs.add(job(number))
    catalog.jobs.finish("job-1", JobState.SUCCEEDED, NOON, token=1)
    catalog.proofs.add(proof())
    catalog.witnesses.add("w1", witness(), backup_id="b")
    catalog.lags.note("shop-db1", "local", 3.5, NOON)
    catalog.holds.set("*", HoldKind.PAUSE, "storage move", "anna", NOON)
    catalog.holds.set("shop-db1", HoldKind.HOLD, "audit", "bert", NOON)
    for number in range(600):
        catalog.events.add(Event(NOON + timedelta(seconds=number), "x", Severity.INFO, f"event {number}"))


def test_a_snapshot_holds_every_row_in_one_file_that_opens_as_a_catalog(catalog: Catalog, tmp_path: Path) -> None:
    fill(catalog)
    (tmp_path / "copy").mkdir()
    file = tmp_path / "copy" / "catalog.db"
    catalog.write_snapshot(file)
    assert list(file.parent.iterdir()) == [file]
    with open_catalog(f"sqlite:///{file}") as copy:
        assert tuple(copy.backups.every()) == tuple(catalog.backups.every())
        assert copy.jobs.list() == catalog.jobs.list()
        assert copy.proofs.list() == catalog.proofs.list()
        assert copy.witnesses.get("w1") == catalog.witnesses.get("w1")
        assert copy.holds.all() == catalog.holds.all()
        assert copy.events.list() == catalog.events.list()
        assert copy.integrity() == []


def test_a_snapshot_can_be_taken_while_somebody_writes(catalog: Catalog, tmp_path: Path) -> None:
    fill(catalog)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            catalog.events.add(Event(NOON, "noise", Severity.INFO, "noise"))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        catalog.write_snapshot(tmp_path / "copy.db")
    finally:
        stop.set()
        writer.join()
    with open_catalog(f"sqlite:///{tmp_path}/copy.db") as copy:
        assert copy.integrity() == []
        assert tuple(copy.backups.every()) == tuple(catalog.backups.every())


def test_history_is_taken_once_and_what_was_running_or_held_is_left(catalog: Catalog, fresh: Catalog) -> None:
    fill(fresh)
    catalog.events.add(Event(NOON + timedelta(days=1), "catalog-rebuilt", Severity.INFO, "newer"))
    assert catalog.take_history(fresh) == 600 + 1 + 1 + 1 + 1 + 1
    assert [one.id for one in catalog.jobs.list()] == ["job-1"]
    assert [hold.kind for hold in catalog.holds.all()] == [HoldKind.PAUSE]
    assert catalog.proofs.list() == fresh.proofs.list()
    assert tuple(catalog.backups.every()) == (), "destinations tell of those"
    assert catalog.take_history(fresh) == 0
    catalog.events.add(Event(NOON + timedelta(days=2), "after", Severity.INFO, "numbers go on"))
    assert len(catalog.events.list()) == 602


def test_a_snapshot_knows_every_table_whatever_else_is_imported() -> None:
    """Beside what the modules of the catalog declare."""
    sources = Path(backupd.catalog.__file__).parent.rglob("*.py")
    text = "".join(source.read_text() for source in sources)
    declared = re.findall(r"^(\w+) = Table\(", text, re.MULTILINE)
    script = "from backupd.catalog.snapshot import every_table; print(*every_table.tables)"
    known = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert sorted(known) == sorted(declared)
