"""What is kept of a server says what a look finds, whatever becomes of its backups and logs, and whoever dies
meanwhile; and a row never tells more than there is without saying that it is behind."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import text

from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.app.views import standings
from backupd.app.views.examination import examined
from backupd.app.views.overview import overview
from backupd.app.views.standings import Bases, Standing, StandingsWatch, look, read, seen
from backupd.catalog.session import Catalog, open_catalog
from backupd.catalog.standings import Standings
from backupd.catalog.tables import backups as of_backups
from backupd.model.backup_record import BackupState, Copy
from backupd.model.binlog import Branch, BranchReason, Ending, Gap, Segment, SegmentKey
from backupd.model.errors import NotFoundError
from backupd.model.server_facts import Position
from tests.support.catalog import samples
from tests.support.catalog.postgresql import PostgreSQL, private_postgresql
from tests.support.service.house import GOLD, Clock, Office

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
POLICY = GOLD + "binlog: {stream: true}\nprotection: {copies: 1, off_site: 0}\n"
PLACES = ("local", "other")
STATES = ("complete", "complete", "damaged", "deleted")


class Killed(BaseException):
    """A process that is gone leaves nothing behind."""


@dataclass
class Life:
    """Random changes of db1, as its jobs and its stream would make them."""

    wiring: Wiring
    clock: Clock
    drawn: random.Random
    file: int = 1
    branch: str = ""

    @property
    def catalog(self) -> Catalog:
        return self.wiring.catalog

    def step(self) -> None:
        self.clock.now += self.drawn.randrange(1, 90) * MINUTE
        backups, at = self.catalog.backups, self.clock.now
        known = sorted(one.id for one in backups.list("db1"))
        one, place = self.drawn.choice(known or ["-"]), self.drawn.choice(PLACES)
        what = self.drawn.randrange(14)
        with suppress(NotFoundError):
            if what < 4 or not self.branch:
                self.log()
            elif what == 4:
                self.backup(len(known))
            elif what == 5:
                backups.set_copy_state(one, place, self.drawn.choice(STATES))
            elif what == 6:
                backups.mark_copy_verified(one, place, at)
            elif what == 7:
                backups.mark_copy_damaged(one, place)
            elif what == 8:
                backups.remove(one)
            elif what == 9:
                backups.add_copy(one, Copy(place, self.drawn.choice(STATES), at))
            elif what == 10:
                backups.set_state(one, self.drawn.choice(list(BackupState)))
            elif what == 11:
                self.file += self.drawn.randrange(2)  # a file that nobody got
                self.branched() if self.drawn.random() < 0.3 else self.log()
            elif what == 12:
                gone = SegmentKey(self.branch, self.drawn.randrange(1, self.file + 1), 0, 1000)
                self.catalog.binlogs.drop_segments("db1", [gone], place)
            else:
                after = Position(f"binlog.{self.file:06d}", 1000)
                self.catalog.binlogs.add_gap(Gap("db1", self.branch, place, after, None, at, None, "lost", at))

    def branched(self) -> None:
        self.branch = f"{self.clock.now:%Y%m%dT%H%M%SZ}-{self.drawn.randrange(2**32):08x}"
        begun = BranchReason.FIRST
        self.catalog.binlogs.add_branch(
            Branch("db1", self.branch, self.clock.now, begun, "uuid", "mariadb", "binlog", self.file)
        )

    def log(self) -> None:
        if not self.branch:
            self.branched()
        self.file += 1
        at = self.clock.now
        gtids = f"0-1-{self.file * 10}", f"0-1-{self.file * 10 + 10}"
        segment = Segment(
            "db1",
            self.branch,
            f"binlog.{self.file:06d}",
            self.file,
            0,
            1000,
            Ending.ROTATED,
            *gtids,
            10,
            at - 30 * MINUTE,
            at - MINUTE,
            False,
            (1,),
            "mariadb",
            "10.11",
            "0" * 64,
        )
        for place in PLACES[: self.drawn.randrange(1, 3)]:
            self.catalog.binlogs.add_segment(segment, place, 40, at)
            if self.drawn.random() < 0.8:
                self.catalog.binlogs.confirm("db1", place, self.branch, (self.file, 1000), at)

    def backup(self, number: int) -> None:
        at = self.clock.now
        held = tuple(Copy(place, "complete", at, self.drawn.choice([None, at])) for place in PLACES)
        record = samples.backup(number, server="db1", copies=held[: self.drawn.randrange(1, 3)])
        position = Position(f"binlog.{self.file:06d}", 500, f"0-1-{self.file * 10 + 5}")
        self.catalog.backups.add(
            replace(record, started_at=at - MINUTE, finished_at=at, server_uuid="uuid", position=position), replace=True
        )

    def kept(self) -> tuple[Standing, bool]:
        """What the row says now, and whether it is behind."""
        rows, confirmed = self.catalog.standings.rows(["db1"])
        standing = read(self.catalog.standings.documents(["db1"])["db1"])
        assert standing is not None
        status = Bases(self.wiring).status(rows["db1"], standing, confirmed.get("db1", {}), self.clock.now)
        return status.found, status.behind


_numbers = itertools.count()


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgreSQL]:
    with private_postgresql() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def life(request: pytest.FixtureRequest, short_tmp: Path) -> Iterator[Life]:
    url = f"sqlite:///{short_tmp}/catalog.db"
    if request.param == "postgresql":
        server: PostgreSQL = request.getfixturevalue("postgresql")
        url = server.create(f"standings{next(_numbers)}")
    office = Office(short_tmp, policies={"gold": POLICY}, catalog=url)
    office.write()
    other = f"destinations:\n  other: {{type: filesystem, path: {short_tmp}/other}}\n"
    office.file.write_text(office.file.read_text().replace("destinations:\n", other))
    with open_catalog(url) as catalog:
        clock = Clock(NOW)
        yield Life(Wiring(load_settings(office.file), catalog, clock), clock, random.Random(16))


def _told(one: Standing) -> Standing:
    """But for when holes that nobody recorded were noticed, which is when one looks."""
    return replace(one, gaps=tuple(replace(gap, noticed_at=NOW) for gap in one.gaps), confirmed={})


def test_a_row_is_what_a_look_finds_and_tells_no_more_whoever_dies(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = Standings.keep
    killed = followed = 0
    for number in range(150):
        life.step()
        rows, _confirmed = life.catalog.standings.rows(["db1"])
        fresh = seen(life.wiring, "db1")
        if rows:
            kept, behind = life.kept()
            if not behind:
                followed += 1
                assert (kept.backups, kept.protected) == (fresh.backups, fresh.protected)
                assert kept.latest is None or (fresh.latest is not None and kept.latest <= fresh.latest), number
                assert kept.first is None or (fresh.first is not None and kept.first >= fresh.first), number
                assert not examined(life.wiring, mend=False), number
        if life.drawn.random() < 0.2:
            killed += 1
            monkeypatch.setattr(Standings, "keep", _dies)
            with pytest.raises(Killed):
                look(life.wiring, "db1", life.clock.now)
            monkeypatch.setattr(Standings, "keep", keep)
            assert life.catalog.standings.rows(["db1"])[0] == rows
        elif life.drawn.random() < 0.6:
            assert look(life.wiring, "db1", life.clock.now) is not None
            kept, behind = life.kept()
            assert not behind
            assert _told(kept) == _told(seen(life.wiring, "db1")), number
    assert killed > 10
    assert followed > 5


def _dies(*_arguments: object) -> None:
    raise Killed


def test_a_change_that_is_undone_is_not_counted(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    life.log()
    life.backup(1)
    look(life.wiring, "db1", life.clock.now)
    before, stock = life.catalog.standings.count("db1"), life.catalog.backups.stock("db1")
    monkeypatch.setattr(of_backups, "_restock", _dies)
    (record,) = life.catalog.backups.list("db1")
    changes: list[Callable[[], None]] = [lambda: life.catalog.backups.remove(record.id), lambda: life.backup(2)]
    for change in changes:
        with pytest.raises(Killed):
            change()
        assert life.catalog.standings.count("db1") == before
        assert life.catalog.backups.stock("db1") == stock
    assert not life.kept()[1]


def test_what_was_lost_is_not_followed_any_more_and_is_looked_at_first(life: Life) -> None:
    life.log()
    life.backup(1)
    for place in PLACES:
        life.catalog.binlogs.confirm("db1", place, life.branch, (life.file, 1000), life.clock.now)
    look(life.wiring, "db1", life.clock.now)
    latest = life.kept()[0].latest
    watch, calm = StandingsWatch(), standings.CALM
    assert watch._names(life.wiring) == []
    life.backup(2)
    assert watch._names(life.wiring) == [], "a server that keeps changing is left alone for a moment"
    life.clock.now += calm
    assert watch._names(life.wiring) == ["db1"]
    life.catalog.binlogs.mark_damaged("db1", SegmentKey(life.branch, life.file, 0, 1000), "local")
    for place in PLACES:
        with suppress(NotFoundError):
            life.catalog.binlogs.confirm("db1", place, life.branch, (life.file, 1000), life.clock.now)
    kept, behind = life.kept()
    assert behind
    assert kept.latest == latest
    assert watch._names(life.wiring) == ["db1"]
    watch.step(life.wiring, life.clock.now)
    assert not life.kept()[1]
    assert watch._names(life.wiring) == []


def test_a_row_of_another_configuration_or_form_is_made_anew(life: Life) -> None:
    life.log()
    life.backup(1)
    look(life.wiring, "db1", life.clock.now)
    assert not life.kept()[1]
    office = life.wiring.settings.file.parent / "policies" / "gold.yaml"
    office.write_text(office.read_text().replace("copies: 1", "copies: 2"))
    life.wiring = replace(life.wiring, settings=load_settings(life.wiring.settings.file))
    assert life.kept()[1]
    (found,) = overview(life.wiring, life.clock.now)
    assert found.looked_at == life.clock.now
    assert not life.kept()[1]
    with life.catalog.database.write() as connection:
        connection.execute(text("UPDATE server_standings SET document = '{}'"))
    assert StandingsWatch()._names(life.wiring) == []
    (found,) = overview(life.wiring, life.clock.now + MINUTE)
    assert found.latest is not None, "who asks looks again where a row cannot be read"


def test_fsck_names_the_server_of_which_something_else_is_kept_and_repairs_it(life: Life) -> None:
    life.log()
    life.backup(1)
    look(life.wiring, "db1", life.clock.now)
    assert examined(life.wiring, mend=False) == []
    with life.catalog.database.write() as connection:
        connection.execute(text("UPDATE server_stock SET backups = backups + 1 WHERE server = 'db1'"))
        document = life.catalog.standings.documents()["db1"].replace('"backups": 1', '"backups": 7')
        connection.execute(text("UPDATE server_standings SET document = :it"), {"it": document})
    found = examined(life.wiring, mend=False)
    assert [(one.invariant, one.subject, one.repairable) for one in found] == [
        ("standing-matches-rows", "db1", True),
        ("stock-matches-copies", "db1", True),
    ]
    assert "7 instead of 1" in found[0].message
    examined(life.wiring, mend=True)
    assert examined(life.wiring, mend=False) == []
    assert life.kept()[0].backups == 1
