"""Backups of before manifests listed their tables: what one of them lacks is found by its own witness."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backupd.alerts.rules import PARTIAL
from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import JobRun, Result, Wiring
from backupd.app.metacopies.catalog_copies import keep_proofs
from backupd.app.restores import test_restore as proving
from backupd.app.restores.execution import restore
from backupd.app.restores.request import RestoreRequest
from backupd.app.service.dispatch import of_proof, perform
from backupd.app.verify import missing_tables
from backupd.app.verify.verification import verify
from backupd.catalog.session import open_catalog, upgrade
from backupd.model.errors import BackupdError, ToolError, UnrestorableError
from backupd.model.job import JobKind, JobRecord, JobState, silent
from backupd.model.manifest import Body
from backupd.model.table import BaseTable, TableName
from backupd.model.text import new_id
from backupd.recovery.chains import restorable
from backupd.transfer.records import proofs as proofdoc
from backupd.transfer.records.encryption import Sealer
from backupd.transfer.records.manifests import load_body
from restore.datadir.checks import DEFINITIONS
from restore.fetch import chain as build
from restore.fetch import sources
from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys

LOST = "archive/postcards."
"""Of the small sample: its table of MyISAM."""


@pytest.fixture
def wiring(house: House, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wiring]:
    monkeypatch.setenv("BACKUPD_RUNTIME", str(house.base / "run"))
    house.write()
    settings = load_settings(house.config)
    upgrade(settings.catalog)
    with open_catalog(settings.catalog) as catalog:
        yield Wiring(settings, catalog)


def run(wiring: Wiring, kind: JobKind) -> Result:
    now = wiring.clock()
    return perform(wiring, JobRun(JobRecord(new_id(now), str(kind), SERVER, JobState.RUNNING, now), silent))


def as_before(body: Body) -> Body:
    """As the program of before stored it: without a list of tables, and without the files of one."""
    entries = tuple(entry for entry in body.entries if not entry.path.startswith(LOST))
    return replace(body, facts=replace(body.facts, inventory=None, missing=()), entries=entries)


def test_a_table_that_is_not_in_a_proved_backup_is_found_by_verify_proof_and_restore(
    wiring: Wiring, keys: Keys, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup_id = run(wiring, JobKind.FULL).id
    good = proving.test_restore(wiring, SERVER, f"backup:{backup_id}", silent)
    assert (good.outcome, good.not_looked_at) == ("proved", 0), good.error
    assert verify(wiring, SERVER, 0.01, silent).ok

    def loaded(*how: Any) -> Body:
        return as_before(load_body(*how))

    for module in (missing_tables, sources):
        monkeypatch.setattr(module, "load_body", loaded)
    witness = wiring.catalog.witnesses.of_backup(backup_id)
    assert witness is not None
    old = replace(
        witness,
        definitions=None,
        version="",
        rows={},
        checksums={name: value for name, value in witness.checksums.items() if "archive" not in name},
        uncovered={"`archive`.`postcards`": "engine MyISAM: not part of a snapshot"},
    )
    wiring.catalog.witnesses.add(new_id(wiring.clock()), replace(old, taken_at=wiring.clock()), backup_id=backup_id)
    wiring.catalog.backups._change(backup_id, missing=None)  # as an upgrade leaves it

    outcome = verify(wiring, SERVER, 0.01, silent)
    assert not outcome.ok
    assert [(one.backup, one.tables, one.doubtful) for one in outcome.lacking] == [
        (backup_id, ("archive.postcards",), "")
    ]
    record = wiring.catalog.backups.get(backup_id)
    assert (record.is_partial, record.missing) == (True, ("archive.postcards",))
    proof = wiring.catalog.proofs.get(good.id)
    assert (proof.outcome, proof.is_good) == ("withdrawn", False)
    assert "archive.postcards" in proof.withdrawn
    events = [event for event in wiring.catalog.events.list() if event.kind == PARTIAL.broken]
    assert len(events) == 1
    assert "archive.postcards" in events[0].message
    assert "--kind full" in events[0].hint
    verify(wiring, SERVER, 0.01, silent)
    assert len([event for event in wiring.catalog.events.list() if event.kind == PARTIAL.broken]) == 1

    place = wiring.destination("local")
    keep_proofs(wiring, place, Sealer([keys.fingerprint], keys.public_home))
    kept = proofdoc.load(place, SERVER, good.id, wiring.unsealer())
    assert kept is not None
    assert kept[0].outcome == "withdrawn", "a rebuilt catalog does not believe it, either"  # type: ignore[union-attr]

    bad = proving.test_restore(wiring, SERVER, f"backup:{backup_id}", silent)
    assert bad.outcome == "failed"
    assert "table `archive`.`postcards` is not there" in {check.name: check.detail for check in bad.checks}[DEFINITIONS]

    whole = run(wiring, JobKind.FULL).id
    assert not wiring.catalog.backups.get(whole).missing
    monkeypatch.setattr(sources, "load_body", lambda *how: lacking(load_body(*how)))
    refused = proving.test_restore(wiring, SERVER, f"backup:{whole}", silent)
    assert refused.outcome == "failed"
    assert "1 tables that backup" in refused.error
    assert "archive.nowhere" in refused.error
    for again in (False, True):
        record = wiring.catalog.backups.get(whole)
        assert record.doubtful == "a restore of it failed: archive.nowhere"
        assert whole not in [one.id for one in restorable(wiring.catalog.backups.list(SERVER))], "latest is another one"
        if not again:
            wiring.catalog.backups.set_missing(whole, (), "")
            with pytest.raises(UnrestorableError):
                restore(
                    wiring,
                    RestoreRequest(SERVER, f"backup:{whole}", datadir=str(short_tmp / "restored")),
                    JobRun(
                        JobRecord(
                            new_id(wiring.clock()), str(JobKind.RESTORE), SERVER, JobState.RUNNING, wiring.clock()
                        ),
                        silent,
                    ),
                )


def lacking(body: Body) -> Body:
    """Of a manifest that lists its tables."""
    inventory = (*(body.facts.inventory or ()), BaseTable(TableName("archive", "nowhere"), "MyISAM"))
    return replace(body, facts=replace(body.facts, inventory=inventory))


def test_a_doubtful_backup_is_promised_by_nobody_until_a_test_restore_worked(
    wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup_id = run(wiring, JobKind.FULL).id
    wiring.catalog.backups.set_missing(backup_id, (), "it may not be prepared")
    assert restorable(wiring.catalog.backups.list(SERVER)) == ()
    assert proving.test_restore(wiring, SERVER, f"backup:{backup_id}", silent).is_good
    assert [one.id for one in restorable(wiring.catalog.backups.list(SERVER))] == [backup_id]

    def fails(error: BackupdError) -> tuple[str, str]:
        def prepare(*_: Any, **_more: Any) -> None:
            raise error

        monkeypatch.setattr(build, "prepare", prepare)
        proof = proving.test_restore(wiring, SERVER, f"backup:{backup_id}", silent)
        return proof.outcome, str(of_proof(proof).problem)

    outcome, said = fails(ToolError("the disk is full"))
    assert (outcome, "the state of the backup is unknown" in said) == ("undecided", True)
    outcome, said = fails(UnrestorableError("mariadb-backup exited with 1", ["page 4 is corrupted"]))
    assert (outcome, "page 4 is corrupted" in said, "says nothing" in said) == ("failed", True, False)
