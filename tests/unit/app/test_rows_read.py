"""What is done for one server reads rows of that server: however many others there are, and however many backups each
of them has, not a row more is fetched from the catalog. A sweep is about a destination; it reads rows of the servers
that are there.
"""

from __future__ import annotations

import gc
import itertools
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from backupd.app.context import destination_identity
from backupd.app.context.access import command_line
from backupd.app.context.incidents import Incidents
from backupd.app.copies import missing_copies, protection
from backupd.app.restores.plan import plan
from backupd.app.retention.deletion import delete, keep, remove_marked, sweep_destination, undelete
from backupd.app.retention.holds import kept_by_catalog
from backupd.app.retention.preview import preview
from backupd.app.retention.retention import apply
from backupd.app.verify.verification import verify
from backupd.app.views.listing import Listings
from backupd.app.views.overview import overview
from backupd.app.views.timeline import timeline
from backupd.catalog.session import open_catalog
from backupd.model.backup_record import HoldKind
from backupd.model.errors import DamagedError, RefusedError
from backupd.model.job import JobKind, JobRecord, JobState, silent
from tests.support.catalog.bulk import fill
from tests.support.catalog.fleet import Fleet
from tests.support.catalog.installation import SERVER
from tests.support.catalog.postgresql import PostgreSQL, private_postgresql
from tests.support.catalog.rows import Fetched, counted
from tests.support.service.shop import Shop
from tests.support.stores.stock import START, FakeClock

SMALL, LARGE = (3, 30), (12, 54)
"""Servers beside the one that is asked, and backups of each; the newest has a chain of the same length in both."""
_numbers = itertools.count()


@dataclass
class Town:
    """``shop``: a server among others, with a full backup, two increments and a newer full one, all at ``local``."""

    shop: Shop
    increment: str
    newest: str


def _refused(one: Town) -> None:
    one.shop.catalog.backups.pin(one.newest)
    with pytest.raises(RefusedError, match="is kept"):
        delete(one.shop.wiring, one.newest, now=False)


def _deleted(one: Town) -> None:
    delete(one.shop.wiring, one.increment, now=False)


def _removed_at_once(one: Town) -> None:
    delete(one.shop.wiring, one.increment, now=False)
    remove_marked(one.shop.wiring, [one.increment])


def _undeleted(one: Town) -> None:
    delete(one.shop.wiring, one.increment, now=False)
    undelete(one.shop.wiring, one.increment)


def _applied(one: Town) -> None:
    with suppress(DamagedError):  # of the others nothing lies there, and while a place lacks so much all of it is kept
        apply(one.shop.wiring, SERVER, one.shop.run())


def _claimed(one: Town) -> None:
    now, jobs = one.shop.clock(), one.shop.catalog.jobs
    job = jobs.claim("somebody", now)
    assert job is not None
    jobs.finish(job.id, JobState.SUCCEEDED, now, token=job.token)


def _listings(one: Town) -> Listings:
    return Listings(one.shop.wiring, command_line())


USES: dict[str, Callable[[Town], object]] = {
    "retention, shown": lambda one: preview(one.shop.wiring, SERVER, now=one.shop.clock()),
    "retention, applied": _applied,
    "replicate": lambda one: one.shop.replicate(),
    "verify": lambda one: verify(one.shop.wiring, SERVER, None, silent),
    "delete": _deleted,
    "delete, refused": _refused,
    "remove at once": _removed_at_once,
    "undelete": _undeleted,
    "keep": lambda one: keep(one.shop.wiring, one.newest, pinned=True),
    "what is kept": lambda one: kept_by_catalog(one.shop.wiring, [SERVER]),
    "holds": lambda one: one.shop.catalog.holds.of(SERVER, HoldKind.HOLD),
    "protection of a backup": lambda one: _listings(one).backup(one.newest),
    "protection, looked at": lambda one: protection.look(
        one.shop.wiring, Incidents(one.shop.catalog), SERVER, one.shop.clock()
    ),
    "page of backups": lambda one: _listings(one).backups(limit=3),
    "page of backups of one server": lambda one: _listings(one).backups(SERVER, limit=3),
    "page of jobs of one server": lambda one: _listings(one).jobs(SERVER, limit=3),
    "view of a server": lambda one: overview(one.shop.wiring, one.shop.clock(), [SERVER]),
    "timeline": lambda one: timeline(one.shop.wiring, SERVER),
    "plan": lambda one: plan(one.shop.wiring, SERVER, "latest", None),
    "identities of a server": lambda one: one.shop.catalog.identities.of(SERVER),
    "does a destination hold backups": lambda one: one.shop.wiring.holds_backups("local"),
    "does a destination hold binary logs": lambda one: one.shop.catalog.binlogs.any_at("local"),
    "does a destination hold anything": lambda one: one.shop.wiring.holds_anything("nowhere"),
    "check of destinations": lambda one: destination_identity.findings(one.shop.wiring),
    "check of what waits to be copied": lambda one: missing_copies.findings(
        one.shop.wiring, one.shop.wiring.settings.server(SERVER)
    ),
    "sweep of a destination": lambda one: sweep_destination(one.shop.wiring, one.shop.at()),
    "claim and finish a job": _claimed,
}


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgreSQL]:
    with private_postgresql() as server:
        yield server


@pytest.fixture(scope="module")
def templates() -> dict[tuple[str, tuple[int, int]], str]:
    """Catalogs of other servers, made once: the file or the database, by engine and size."""
    return {}


@pytest.fixture(params=["sqlite", "postgresql"])
def copied(
    request: pytest.FixtureRequest,
    templates: dict[tuple[str, tuple[int, int]], str],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Fleet], str]:
    """The address of a catalog of its own that knows this fleet."""

    def of_file(fleet: Fleet) -> str:
        key = ("sqlite", (fleet.servers, fleet.backups))
        if key not in templates:
            templates[key] = str(tmp_path_factory.mktemp("fleet") / "catalog.db")
            fill(f"sqlite:///{templates[key]}", fleet)
        shutil.copyfile(templates[key], tmp_path / f"{fleet.servers}.db")
        return f"sqlite:///{tmp_path}/{fleet.servers}.db"

    def of_database(fleet: Fleet) -> str:
        server: PostgreSQL = request.getfixturevalue("postgresql")
        key = ("postgresql", (fleet.servers, fleet.backups))
        if key not in templates:
            templates[key] = f"fleet{fleet.servers}"
            fill(server.create(templates[key]), fleet)
        return server.create(f"rows{next(_numbers)}", template=templates[key])

    return of_file if request.param == "sqlite" else of_database


def _fetched(
    base: Path, copied: Callable[[Fleet], str], size: tuple[int, int], use: Callable[[Town], object]
) -> Fetched:
    """By ``use``, beside so many others."""
    base.mkdir()
    now = FakeClock(START + timedelta(days=400))
    fleet = Fleet(now(), *size, segments=10, jobs=100, proofs=60, events=10, restores=20)
    with open_catalog(copied(fleet)) as catalog:
        shop = Shop(base, catalog, "{local: {keep_fulls: 3}, offsite: {keep_fulls: 3}}", clock=now)
        shop.write(shop.rules, servers=(SERVER, *fleet.names))
        shop.add(1, days=4)
        shop.add(2, days=3, parent=1)
        one = Town(shop, shop.add(3, days=2, parent=2), shop.add(4, days=1))
        shop.prove(one.newest)
        for number, name in enumerate((SERVER, *fleet.names) * 4):
            job = f"20261121T040000Z-{number:08x}"
            catalog.jobs.add(JobRecord(job, JobKind.VERIFY, name, JobState.QUEUED, now()))
        with counted() as fetched:
            use(one)
    gc.collect()  # a connection that was in use when its catalog was closed goes here, not in somebody else's test
    return fetched


def _by_statement(fetched: Fetched) -> Counter[str]:
    """Rows of each statement, however many values it was asked with."""
    found: Counter[str] = Counter()
    for text, rows in fetched.by.items():
        found[re.sub(r"\?(, \?)+", "?", re.sub(r"%\(\w+\)s(::\w+)?", "?", text))] += rows
    return found


@pytest.mark.filterwarnings("ignore:.*was deleted while still open:ResourceWarning")
@pytest.mark.parametrize("name", USES)
def test_no_row_of_another_server_is_read(copied: Callable[[Fleet], str], tmp_path: Path, name: str) -> None:
    few = _by_statement(_fetched(tmp_path / "few", copied, SMALL, USES[name]))
    many = _by_statement(_fetched(tmp_path / "many", copied, LARGE, USES[name]))
    more = {text: rows - few[text] for text, rows in many.items() if rows > few[text]}
    assert more == {}, f"rows beside {LARGE} that were not read beside {SMALL}"
