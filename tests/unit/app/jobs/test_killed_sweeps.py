"""The job of a sweep is killed before each change that it makes, at the destination and in the catalog: the next one
finishes, and nothing that was needed is gone."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backupd.app.context.wiring import Wiring
from backupd.app.jobs.jobs import abandon_dead, sweep_of
from backupd.app.retention.deletion import delete
from backupd.app.service.facade import Service
from backupd.app.views.examination import fsck
from backupd.catalog.database import WANTED, Database
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.job import JobKind, JobState
from backupd.transfer.deletion import is_whole
from storage.filesystem import FilesystemDestination
from tests.support.catalog.installation import SERVER, Installation
from tests.support.stores.stock import Stock, everything, pool

CHANGES: tuple[tuple[type, str], ...] = (
    (FilesystemDestination, "put"),
    (FilesystemDestination, "delete"),
    (FilesystemDestination, "remove_tree"),
    (Database, "write"),
)


def stocked(base: Path, catalog: Catalog) -> tuple[Installation, set[str], set[str]]:
    """A chain and a full backup that shares an object with one that stays, all of them due, and what a dead run left.
    Which are due, and which stay."""
    one = Installation(base, catalog)
    due = {one.add(1, days=9), one.add(2, days=8, parent=1)}
    due.add(one.add(4, days=6, content=b"shared"))
    stay = {one.add(8, days=2, content=b"shared"), one.add(9, days=1)}
    Stock(one.at(), SERVER).add(7, {"t": b"of a dead run"}, commit=False)
    for name in sorted(due, reverse=True):
        delete(one.wiring, name, now=False)
    one.clock.move(days=2)
    return one, due, stay


def swept(wiring: Wiring) -> None:
    """The sweep that waits, as a command without a service does it."""
    assert list(Service(wiring, WANTED).follow_ups.run(())) == []


def killed_before(change: int, opened: Callable[[Catalog], Wiring], address: str) -> bool:
    """Was the process that does the sweep killed before so many changes were made? False: it made fewer."""
    child = os.fork()
    if child == 0:
        try:
            with open_catalog(address) as catalog:
                wiring = opened(catalog)
                arm(change)
                swept(wiring)
            os._exit(0)
        finally:
            os._exit(1)
    _pid, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


def arm(change: int) -> None:
    """This process is killed when it begins its ``change``-th change."""
    lock, numbers = threading.Lock(), itertools.count(1)

    def counted(before: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            with lock:
                if next(numbers) == change:
                    os.kill(os.getpid(), signal.SIGKILL)
            return before(*args, **named)

        return call

    for owner, name in CHANGES:
        setattr(owner, name, counted(getattr(owner, name)))


def test_a_sweep_that_is_killed_before_any_of_its_changes_is_finished_by_the_next(tmp_path: Path) -> None:
    base, pristine = tmp_path / "one", tmp_path / "pristine"
    base.mkdir()
    address = f"sqlite:///{base}/catalog.db"
    with open_catalog(address) as catalog:
        one, due, stay = stocked(base, catalog)
        catalog.jobs.enqueue(sweep_of(one.wiring, "local"))
    settings, clock = one.wiring.settings, one.clock
    shutil.move(base, pristine)

    def opened(catalog: Catalog) -> Wiring:
        return Wiring(settings, catalog, clock)

    def fresh() -> None:
        shutil.rmtree(base, ignore_errors=True)
        subprocess.run(["cp", "-a", pristine, base], check=True)

    fresh()
    with open_catalog(address) as catalog:
        swept(opened(catalog))
        clean = everything(opened(catalog).destination("local"))
        objects = pool(opened(catalog).destination("local"))
    assert len(objects) == 2

    change = 1
    while True:
        fresh()
        if not killed_before(change, opened, address):
            break
        with open_catalog(address) as catalog:
            wiring, where = opened(catalog), f"killed before change {change}"
            place = wiring.destination("local")
            assert all(is_whole(place, SERVER, name) for name in stay), where
            clock.move(minutes=1)
            ended = abandon_dead(wiring)
            assert all(job.kind == JobKind.SWEEP for job in ended), where
            (newest, *_others) = catalog.jobs.list(kind=JobKind.SWEEP)
            assert newest.state in (JobState.QUEUED, JobState.SUCCEEDED), where  # else its end was recorded
            swept(wiring)
            assert everything(place) == clean, where
            assert pool(place) == objects, where
            assert all(is_whole(place, SERVER, name) for name in stay), where
            assert fsck(wiring, mend=False).findings == (), where
            assert {record.id for record in catalog.backups.every()} == stay, where
            told = [entry.subject for entry in catalog.audit.list(action="backup-removed")]
            assert sorted(told) == sorted(due), where
            (last, *_others) = catalog.jobs.list(kind=JobKind.SWEEP)
            assert last.state is JobState.SUCCEEDED, where
            clock.move(minutes=-1)
        change += 1
    assert change > 40, "more than the steps of one backup"
