"""Witnesses between the backups: a job of its own on a schedule of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from backupd.app.backups.physical import forget_old
from backupd.app.context.server_identity import accept
from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import JobRun, Wiring
from backupd.app.schedule.calendar import former_leg, legs
from backupd.app.service.dispatch import perform
from backupd.catalog.session import open_catalog
from backupd.model.errors import RefusedError
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.model.server_facts import Identity, Verdict
from tests.support.catalog import samples
from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.servers.mariadb import PrivateServer

SCHEDULED = 'witness: {schedule: "0 */6 * * *"}\n'


@pytest.fixture
def wiring(short_tmp: Path, shared_server: PrivateServer, keys: Keys) -> Iterator[Wiring]:
    house = House(short_tmp, shared_server, keys, policy_extra=SCHEDULED)
    settings = load_settings(house.config)
    with open_catalog(settings.catalog) as catalog:
        yield Wiring(settings, catalog)


def job(wiring: Wiring) -> JobRun:
    return JobRun(JobRecord("1", str(JobKind.WITNESS), SERVER, JobState.RUNNING, wiring.clock(), leg="witness"))


def test_the_schedule_is_a_leg_and_the_job_records_what_the_tables_held(
    wiring: Wiring,
    shared_server: PrivateServer,
) -> None:
    (leg,) = (leg for leg in legs(wiring.settings, SERVER) if leg.leg == "witness")
    assert (leg.kind, leg.cadence) == (JobKind.WITNESS, "0 */6 * * *")
    assert former_leg(SERVER, "witness", leg.rhythm, None).kind is JobKind.WITNESS
    result = perform(wiring, job(wiring))
    witness = wiring.catalog.witnesses.get(result.id)
    assert [phase.name for phase in result.phases] == ["witness"]
    file, pos = shared_server.query("SHOW MASTER STATUS")[0][:2]
    assert (witness.position.file, witness.position.pos) == (file, pos)
    assert witness.position.gtid
    assert witness.checksums
    assert wiring.catalog.witnesses.between(SERVER, witness.taken_at, witness.taken_at) == (witness,)


def test_a_server_without_a_binary_log_has_no_moments_to_come_back_to(short_tmp: Path, keys: Keys) -> None:
    with PrivateServer(binlog=False) as server:
        server.create_backup_users()
        house = House(short_tmp, server, keys, policy_extra=SCHEDULED)
        settings = load_settings(house.config)
        with open_catalog(settings.catalog) as catalog:
            wiring = Wiring(settings, catalog)
            with pytest.raises(RefusedError, match="writes no binary log"):
                perform(wiring, job(wiring))
            assert catalog.witnesses.latest(SERVER) is None


def test_of_another_server_no_witness_is_taken(wiring: Wiring) -> None:
    identities = wiring.catalog.identities
    identities.put(Identity(SERVER, "that one", Verdict.OWN, wiring.clock(), wiring.clock(), server_id=77))
    with pytest.raises(RefusedError, match="another server answers under this name: no witness") as refused:
        perform(wiring, job(wiring))
    assert f"backupd server accept {SERVER}" in refused.value.hint
    assert wiring.catalog.witnesses.latest(SERVER) is None
    assert [one.verdict for one in identities.of(SERVER) if one.uuid != "that one"] == [Verdict.STRANGER]
    accept(wiring, SERVER, "ops")
    assert wiring.catalog.witnesses.get(perform(wiring, job(wiring)).id)


def test_witnesses_from_before_the_oldest_backup_are_forgotten(wiring: Wiring) -> None:
    old, new = replace(samples.witness(1), server=SERVER), replace(samples.witness(3), server=SERVER)
    catalog = wiring.catalog
    catalog.witnesses.add("w1", old)
    catalog.witnesses.add("w3", new)
    forget_old(wiring)
    assert catalog.witnesses.get("w1") == old, "without any backup nothing tells what is old"
    catalog.backups.add(replace(samples.backup(), server=SERVER, started_at=old.taken_at + timedelta(seconds=1)))
    forget_old(wiring)
    assert catalog.witnesses.between(SERVER, old.taken_at, new.taken_at) == (new,)
