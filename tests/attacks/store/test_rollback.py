"""Whoever turns a store back to an older state of its own: every byte is true, and signed, only the newest are gone."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from backupd.alerts.conditions import Key
from backupd.alerts.rules import ROLLED_BACK
from backupd.app.alerting.service import report_now
from backupd.app.context.access import audit, command_line
from backupd.app.context.incidents import Incidents
from backupd.app.context.trust import signing
from backupd.app.context.wiring import Wiring
from backupd.app.metacopies import signed_heads as heads
from backupd.app.metacopies.catalog_copies import after_job
from backupd.app.metacopies.signed_heads import HeadWatch, compare, noted
from backupd.app.service.facade import Service
from backupd.app.verify.scrubbing import Rotation, scrub_server
from backupd.catalog.session import open_catalog
from backupd.model.backup_record import Copy
from backupd.model.job import silent
from backupd.model.manifest import encode_header
from backupd.model.text import format_time
from backupd.transfer.records.authenticity import digest, read
from backupd.transfer.scrub_and_repair import Damage
from storage import layout
from storage.filesystem import FilesystemDestination
from tests.support.catalog.samples import backup
from tests.support.keys import Keys
from tests.support.logs.log_store import BRANCH, SERVER, key_of, store, wired
from tests.support.logs.real_logs import real_logs
from tests.support.service.house import Clock, at
from tests.support.stores.signed import signing as signing_house
from tests.support.stores.stock import Stock, backup_id

DESTINATIONS = ("local", "offsite")


@pytest.fixture
def house(tmp_path: Path, keys: Keys) -> Iterator[Wiring]:
    with wired(tmp_path, keys) as plain, signing_house(replace(plain, clock=Clock(at("2026-11-21T12:00Z")))) as wiring:
        yield wiring


def taken(wiring: Wiring, number: int) -> None:
    """A signed backup at both places, and what follows each job."""
    for place in DESTINATIONS:
        header = Stock(wiring.destination(place), server=SERVER).add(number, {"a": b"%d" % number})
    wiring.catalog.backups.add(replace(backup(number, server=SERVER), id=header.backup_id))
    after_job(wiring)


def later(wiring: Wiring, minutes: int) -> None:
    clock = wiring.clock
    assert isinstance(clock, Clock)
    clock.now += timedelta(minutes=minutes)


def turned_back(wiring: Wiring, tmp_path: Path, places: tuple[str, ...]) -> str:
    """A day with two backups, at whose end ``places`` are brought back to what they were after the first; when that
    was. Head, manifests, objects and signatures are all of then."""
    taken(wiring, 1)
    then = format_time(wiring.clock())
    for place in places:
        shutil.copytree(tmp_path / place, tmp_path / f"{place}.then", symlinks=True)
    later(wiring, 120)
    taken(wiring, 2)
    for place in places:
        shutil.rmtree(tmp_path / place)
        (tmp_path / f"{place}.then").rename(tmp_path / place)
    later(wiring, 10)
    return then


def rebuilt(wiring: Wiring, tmp_path: Path, **more: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a new catalog is told by a rebuild from ``local``: heads, problems."""
    with open_catalog(f"sqlite:///{tmp_path}/new.db") as catalog:
        service = Service(Wiring(wiring.settings, catalog, wiring.clock), "")
        done = service.maintenance.rebuild("local", silent, **more)
    return done.heads, done.problems


def test_a_head_is_put_with_each_backup_signed_counted_and_chained(house: Wiring) -> None:
    signer = signing(house.settings).key
    assert signer
    audit(house, command_line(), "token-created")
    taken(house, 1)
    first = read(house.destination("local"), SERVER)
    assert first is not None
    (newest,) = house.catalog.audit.list(limit=1)
    assert (first.audit.entries, first.audit.digest) == (newest.number, newest.digest), "in a signed copy"
    assert (first.counter, first.before, first.backups, first.at) == (1, "", 1, house.clock())
    taken(house, 2)
    assert read(house.destination("local"), SERVER) == first, "at most once a minute"
    later(house, 1)
    after_job(house)
    second = read(house.destination("offsite"), SERVER)
    assert second is not None
    assert (second.counter, second.before, second.backups) == (2, digest(first), 2)
    assert read(house.destination("local"), SERVER) == second
    for place in DESTINATIONS:
        house.destination(place).stat(layout.signature_key(layout.head_key(SERVER)))


def test_what_a_renewal_costs_at_each_place(house: Wiring, monkeypatch: pytest.MonkeyPatch) -> None:
    taken(house, 1)
    later(house, 15)
    asked: list[str] = []
    for name in ("put", "get"):
        before = getattr(FilesystemDestination, name)

        def counted(
            self: FilesystemDestination, key: str, *args: Any, _name: str = name, _before: Any = before, **more: Any
        ) -> Any:
            asked.append(f"{_name} {self.name}")
            return _before(self, key, *args, **more)

        monkeypatch.setattr(FilesystemDestination, name, counted)
    heads.renew(house)
    assert {one: asked.count(one) for one in asked} == {
        f"{what} {place}": count for place in DESTINATIONS for what, count in (("put", 3), ("get", 4))
    }


def test_the_service_renews_it_every_quarter_of_an_hour(house: Wiring) -> None:
    watch = HeadWatch(house)
    watch.step()
    for minutes, counter in ((10, 1), (5, 2), (14, 2), (1, 3)):
        later(house, minutes)
        watch.step()
        assert noted(house)[SERVER].counter == counter


def test_one_place_that_was_turned_back_is_known_by_the_other(house: Wiring, tmp_path: Path) -> None:
    then = turned_back(house, tmp_path, ("local",))
    lines, problems = rebuilt(house, tmp_path)
    assert any(line.startswith(f"head of {SERVER} at local: counter 1, of {then}, 2h 10m ago") for line in lines), lines
    (said,) = [problem for problem in problems if "rolled back" in problem]
    assert said.startswith(
        f"local was possibly rolled back to {then}: its head of {SERVER} has counter 1, that of offsite 2"
    )
    assert "rebuild from offsite" in said


def test_a_store_that_was_turned_back_as_a_whole_is_known_by_the_time_and_by_the_report(
    house: Wiring, tmp_path: Path
) -> None:
    then = turned_back(house, tmp_path, DESTINATIONS)
    quiet = compare(house)
    assert (len(quiet.lines), quiet.suspicions) == (2, ()), "nothing in the store says so"
    noted_rows = {str(row[0]): str(row[1]) for grid in report_now(house, house.clock()).grids for row in grid.rows}
    counter = noted_rows[f"head of {SERVER}"]
    assert counter.startswith("counter 2, of ")
    _lines, problems = rebuilt(house, tmp_path, failed_at=house.clock(), counters={SERVER: 2})
    assert sum(f"the store was possibly rolled back to {then}" in problem for problem in problems) == 2
    just_then = compare(house, failed_at=house.clock() - timedelta(minutes=130 - 15), counters={SERVER: 1})
    assert just_then.suspicions == (), "who failed then has lost nothing"


def test_the_newest_that_is_gone_while_its_head_was_left_is_known(house: Wiring, tmp_path: Path, keys: Keys) -> None:
    """Nothing is forged or turned back: only the newest backup and the end of the logs are taken away, or a mark that
    anybody can write says that the backup is deleted."""
    first, second = real_logs()[:2]
    store(house, keys, (first, second))
    rowed(house, 1)
    later(house, 120)
    rowed(house, 2)
    assert compare(house).suspicions == ()
    (tmp_path / "local" / layout.mark_key(SERVER, backup_id(2))).parent.mkdir(parents=True)
    (tmp_path / "local" / layout.mark_key(SERVER, backup_id(2))).write_text("{}")
    shutil.rmtree(tmp_path / "offsite" / layout.backup_folder(SERVER, backup_id(2)))
    shutil.rmtree(tmp_path / "offsite" / layout.segment_folder(SERVER, key_of(second)))
    _lines, problems = rebuilt(house, tmp_path)
    told = [problem for problem in problems if "somebody deleted" in problem]
    assert [problem.partition(",")[0] for problem in told] == [
        *(f"{place} does not hold backup {backup_id(2)} of {SERVER}" for place in DESTINATIONS),
        f"binary logs of {SERVER} at offsite end at byte {first.size} of file {first.number} of branch {BRANCH.id}",
    ]


def test_a_head_of_another_server_of_nobody_or_without_signature_is_not_believed(house: Wiring, tmp_path: Path) -> None:
    taken(house, 1)
    file = tmp_path / "local" / layout.head_key(SERVER)
    file.write_bytes(file.read_bytes().replace(b'"counter": 1', b'"counter": 9'))
    (said,) = compare(house).suspicions
    assert f"the head of {SERVER} at local is not trusted" in said
    assert "altered after it was signed" in said
    Path(f"{file}.sig").unlink()
    assert "has no signature" in compare(house).suspicions[0]
    later(house, 2)
    assert heads.renew(house) == 1
    assert (compare(house).suspicions, noted(house)[SERVER].counter) == ((), 2)


def test_a_counter_goes_on_where_the_spool_was_lost(house: Wiring) -> None:
    taken(house, 1)
    (house.settings.spool / "heads.json").unlink()
    later(house, 2)
    heads.renew(house)
    assert noted(house)[SERVER].counter == 2


def rowed(wiring: Wiring, number: int) -> None:
    """As ``taken``, with the row that a run writes."""
    for place in DESTINATIONS:
        header = Stock(wiring.destination(place), server=SERVER).add(number, {"a": b"%d" % number})
    wiring.catalog.backups.add(
        replace(
            backup(number, server=SERVER),
            id=header.backup_id,
            manifest=hashlib.sha256(encode_header(header)).hexdigest(),
            copies=tuple(Copy(place, "complete", header.finished_at) for place in DESTINATIONS),
        )
    )
    heads.renew(wiring)


def rolled_back(wiring: Wiring) -> list[str]:
    """The places of which an incident is open."""
    return [place for place in DESTINATIONS if Incidents(wiring.catalog).is_open(Key(ROLLED_BACK, SERVER, place))]


def scrubbed(wiring: Wiring) -> tuple[Damage, ...]:
    """What `backupd verify` finds at ``local``."""
    return scrub_server(wiring, wiring.destination("local"), SERVER, Rotation(None, None), silent).damages


def copied(tmp_path: Path, place: str) -> None:
    shutil.copytree(tmp_path / place, tmp_path / f"{place}.then", symlinks=True)


def brought_back(tmp_path: Path, place: str) -> None:
    shutil.rmtree(tmp_path / place)
    (tmp_path / f"{place}.then").rename(tmp_path / place)


def test_a_place_that_is_rolled_back_is_an_incident_until_all_is_there_again(house: Wiring, tmp_path: Path) -> None:
    rowed(house, 1)
    copied(tmp_path, "local")
    later(house, 120)
    rowed(house, 2)
    assert rolled_back(house) == []
    brought_back(tmp_path, "local")
    later(house, 15)
    HeadWatch(house).step()
    assert rolled_back(house) == ["local"]
    (told,) = house.catalog.events.list(kind=ROLLED_BACK.broken)
    assert (
        f"it acknowledged head 2 of {SERVER}; now it holds the one with counter 1, of 2026-11-21T12:00:00Z"
        in told.message
    )
    later(house, 15)
    HeadWatch(house).step()
    assert rolled_back(house) == ["local"], "the new head that we put hides nothing"
    (tmp_path / "offsite").rename(tmp_path / "away")
    assert [one.repaired_from for one in scrubbed(house)] == [""]
    assert rolled_back(house) == ["local"], "a backup is missing there, and nowhere else to be had"
    (tmp_path / "away").rename(tmp_path / "offsite")
    folder = f"{layout.SERVERS}{SERVER}/{backup_id(2)}"
    shutil.copytree(tmp_path / "offsite" / folder, tmp_path / "local" / folder, symlinks=True)
    shutil.copytree(tmp_path / "offsite" / "objects", tmp_path / "local" / "objects", dirs_exist_ok=True)
    assert scrubbed(house) == ()
    assert rolled_back(house) == []


def test_verify_tells_it_before_a_renewal_is_due_and_a_head_that_is_gone_is_one_too(
    house: Wiring, tmp_path: Path
) -> None:
    rowed(house, 1)
    runbook = f"{backup_id(1)}, SHA-256 {hashlib.sha256(b'runbook').hexdigest()}"
    assert [f"runbook of {SERVER}", runbook] in [
        list(map(str, row)) for grid in report_now(house, house.clock()).grids for row in grid.rows
    ]
    (tmp_path / "local" / layout.head_key(SERVER)).unlink()
    scrubbed(house)
    assert [one.message for one in house.catalog.events.list(kind=ROLLED_BACK.broken)] == [
        f"possible rollback at local: it acknowledged head 1 of {SERVER}; now it holds none"
    ]


def test_a_place_that_was_away_when_heads_were_put_was_not_turned_back(house: Wiring, tmp_path: Path) -> None:
    rowed(house, 1)
    (tmp_path / "offsite").rename(tmp_path / "away")
    later(house, 15)
    heads.renew(house)
    (tmp_path / "away").rename(tmp_path / "offsite")
    later(house, 15)
    heads.renew(house)
    assert house.catalog.events.list(kind=ROLLED_BACK.broken) == ()
    assert noted(house)[SERVER].counters == {"local": 3, "offsite": 3}
