"""Tables that the physical tool leaves out: in the logical leg by themselves, or missing in the physical backup."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import JobRun, Result, Wiring
from backupd.app.service.dispatch import perform
from backupd.catalog.session import open_catalog, upgrade
from backupd.engine.physical import streaming
from backupd.engine.server import probe
from backupd.model.errors import TablesChangedError
from backupd.model.job import JobKind, JobRecord, JobState, silent
from backupd.model.manifest import decode_header
from backupd.model.server_facts import Flavour
from backupd.model.table import BaseTable
from backupd.model.text import new_id
from restore.fetch.sources import Sources, load_dump
from tests.support.e2e.house import SERVER, House

LEFT_OUT = "archive.postcards"
"""Of the small sample: its table of MyISAM."""


@pytest.fixture
def wiring(house: House, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wiring]:
    """The physical tool is taken for one that leaves out MyISAM, as CLONE does and mariadb-backup does not."""
    monkeypatch.setitem(probe._COPIED, Flavour.MARIADB, frozenset(probe._COPIED[Flavour.MARIADB] - {"MyISAM"}))
    monkeypatch.setenv("BACKUPD_RUNTIME", str(house.base / "run"))
    house.policy_extra = "witness: {enabled: false}\n"
    house.write()
    settings = load_settings(house.config)
    upgrade(settings.catalog)
    with open_catalog(settings.catalog) as catalog:
        yield Wiring(settings, catalog)


def run(wiring: Wiring, kind: JobKind) -> Result:
    now = wiring.clock()
    return perform(wiring, JobRun(JobRecord(new_id(now), str(kind), SERVER, JobState.RUNNING, now), silent))


def test_a_physical_backup_without_tables_that_no_dump_takes_is_partial_and_names_them(
    house: House, wiring: Wiring
) -> None:
    result = run(wiring, JobKind.FULL)
    assert (result.partial, result.accepted) == (True, True), "another one would lack them, too"
    assert result.problem is not None
    assert "1 table is missing in the physical backup" in result.problem.message
    assert LEFT_OUT in result.problem.detail
    assert "logical schedule" in result.problem.hint
    record = wiring.catalog.backups.get(result.id)
    assert (record.tables_missing, record.not_dumped) == (1, 0)
    assert result.problem.detail in record.warnings
    assert decode_header(house.manifest(result.id).read_bytes()).tables_missing == 1
    assert "1 tables come back without rows" in house.manifest(result.id).with_name("RUNBOOK.md").read_text()


def test_the_logical_leg_takes_them_though_nothing_includes_them_and_then_nothing_is_missing(
    house: House, wiring: Wiring
) -> None:
    house.policy_extra += 'logical: {schedule: "0 4 * * *", tables: {include: [shop.orders], max_size: 1}}\n'
    house.write()
    wiring = Wiring(load_settings(house.config), wiring.catalog)
    dumped = run(wiring, JobKind.LOGICAL)
    assert dumped.problem is None
    places = wiring.required(wiring.settings.server(SERVER))
    loaded, _said = load_dump(SERVER, dumped.id, Sources(places, wiring.unsealer()))
    assert loaded.body.facts.dump is not None
    assert {table.name.shown for table in loaded.body.facts.dump.dumped} == {LEFT_OUT}
    result = run(wiring, JobKind.FULL)
    assert (result.problem, result.partial) == (None, False)
    assert wiring.catalog.backups.get(result.id).tables_missing == 0


@pytest.mark.parametrize("witnessed", [True, False])
def test_a_backup_that_loses_a_table_each_time_is_taken_three_times_and_is_partial(
    house: House, wiring: Wiring, monkeypatch: pytest.MonkeyPatch, witnessed: bool
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("BACKUPD_RUNTIME", str(house.base / "run"))
    if witnessed:
        house.policy_extra = "witness: {max_duration: 1m}\n"
        house.write()
        wiring = Wiring(load_settings(house.config), wiring.catalog)
    attempts: list[int] = []

    def lost(tables: Iterable[BaseTable], *_args: object) -> tuple[BaseTable, ...]:
        attempts.append(1)
        return tuple(table for table in tables if table.name.shown == LEFT_OUT)

    monkeypatch.setattr(streaming, "absent", lost)
    result = run(wiring, JobKind.FULL)
    assert len(attempts) == 3
    assert (result.partial, result.accepted) == (True, False), "another attempt may have it"
    assert result.problem is not None
    assert "1 table is missing" in result.problem.message
    assert LEFT_OUT in result.problem.detail
    record = wiring.catalog.backups.get(result.id)
    assert (record.tables_missing, record.missing) == (1, (LEFT_OUT,))
    assert sum("was taken again" in warning for warning in record.warnings) == 2
    assert decode_header(house.manifest(result.id).read_bytes()).tables_missing == 1
    assert "1 tables are missing" in house.manifest(result.id).with_name("RUNBOOK.md").read_text()
    assert house.fsck() == []


def test_a_backup_that_loses_a_table_of_innodb_each_time_fails_and_leaves_nothing(
    house: House, wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        streaming,
        "absent",
        lambda tables, *_args: tuple(table for table in tables if table.name.shown == "shop.orders"),
    )
    with pytest.raises(TablesChangedError, match=r"left out 1 table .*: shop\.orders"):
        run(wiring, JobKind.FULL)
    assert wiring.catalog.backups.list(SERVER) == ()
    assert house.fsck() == []
