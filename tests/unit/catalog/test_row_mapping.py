"""What goes into the catalog comes out the same, on both databases."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backupd.catalog.restores import rates
from backupd.catalog.session import Catalog
from backupd.model.backup_record import BackupKind, BackupState, Copy
from backupd.model.errors import CatalogError, NotFoundError, RefusedError, ToolError
from backupd.model.job import JobState
from backupd.model.proof import Phase
from backupd.model.server_facts import Position
from tests.support.catalog import samples


def test_a_backup_comes_back_exactly_as_it_was_recorded(catalog: Catalog) -> None:
    copies = (Copy("local", "complete", samples.NOON), Copy("offsite", "damaged", samples.NOON, samples.NOON))
    record = samples.backup(copies=copies)
    catalog.backups.add(record)
    assert catalog.backups.get(record.id) == record
    assert catalog.backups.get(record.id).finished_at.tzinfo is UTC


def test_moments_keep_their_microseconds_and_come_back_in_utc(catalog: Catalog) -> None:
    elsewhere = datetime(2026, 3, 29, 2, 30, 0, 1, tzinfo=timezone(timedelta(hours=12, minutes=45)))
    catalog.backups.add(replace(samples.backup(), started_at=elsewhere))
    read = next(catalog.backups.every()).started_at
    assert read == elsewhere
    assert (read.tzinfo, read.microsecond) == (UTC, 1)


def test_a_moment_without_a_zone_is_refused(catalog: Catalog) -> None:
    with pytest.raises(CatalogError, match="failed"):
        catalog.backups.add(replace(samples.backup(), started_at=datetime(2026, 1, 1)))  # noqa: DTZ001  the point
    assert tuple(catalog.backups.every()) == ()


def test_the_same_backup_is_not_added_twice_unless_it_replaces(catalog: Catalog) -> None:
    record = samples.backup(copies=(Copy("local", "complete", samples.NOON),))
    catalog.backups.add(record)
    with pytest.raises(RefusedError):
        catalog.backups.add(record)
    other = replace(record, pinned=True, copies=(Copy("offsite", "complete", samples.NOON),))
    catalog.backups.add(other, replace=True)
    assert tuple(catalog.backups.every()) == (other,)


def test_a_dump_comes_back_with_its_set_and_what_is_missing_in_it(catalog: Catalog) -> None:
    record = samples.backup(kind=BackupKind.LOGICAL)
    catalog.backups.add(record)
    assert catalog.backups.get(record.id) == record
    assert (record.table_set, record.tables_missing) == ("money", 2)


def test_lists_are_newest_first_and_filtered(catalog: Catalog) -> None:
    for number in range(1, 4):
        catalog.backups.add(samples.backup(number))
    catalog.backups.add(samples.backup(4, server="other"))
    catalog.backups.add(samples.backup(5, kind=BackupKind.LOGICAL))
    catalog.backups.add(samples.backup(6, state=BackupState.DELETED))

    def numbers(**wanted: object) -> list[int]:
        return [int(record.id[-8:], 16) for record in catalog.backups.list(**wanted)]  # type: ignore[arg-type]  # any filter

    assert [int(record.id[-8:], 16) for record in catalog.backups.every()] == [6, 5, 4, 3, 2, 1]
    assert numbers(server="shop-db1", kind=BackupKind.PHYSICAL_FULL, state=BackupState.COMPLETE) == [3, 2, 1]
    assert numbers(server="shop-db1", limit=2) == [6, 5]
    assert catalog.backups.servers() == ("other", "shop-db1")


def test_thousands_of_backups_are_listed_with_their_copies(catalog: Catalog) -> None:
    for number in range(1_100):
        catalog.backups.add(samples.backup(number, copies=(Copy("local", "complete", samples.NOON),)))
    listed = tuple(catalog.backups.every())
    assert len(listed) == 1_100
    assert all(len(record.copies) == 1 for record in listed)


def test_states_pins_and_copies_change_one_by_one(catalog: Catalog) -> None:
    record = samples.backup(copies=(Copy("local", "complete", samples.NOON),))
    catalog.backups.add(record)
    catalog.backups.set_state(record.id, BackupState.DAMAGED)
    catalog.backups.pin(record.id)
    later = samples.NOON + timedelta(days=1)
    catalog.backups.mark_copy_verified(record.id, "local", later)
    catalog.backups.add_copy(record.id, Copy("offsite", "complete", later))
    catalog.backups.mark_copy_damaged(record.id, "offsite")
    read = catalog.backups.get(record.id)
    assert (read.state, read.pinned) == (BackupState.DAMAGED, True)
    assert read.copies == (Copy("local", "complete", samples.NOON, later), Copy("offsite", "damaged", later))
    catalog.backups.pin(record.id, pinned=False)
    catalog.backups.remove_copy(record.id, "local")
    assert not catalog.backups.get(record.id).pinned
    assert [copy.destination for copy in catalog.backups.get(record.id).copies] == ["offsite"]
    catalog.backups.remove_copy(record.id, "offsite")
    assert tuple(catalog.backups.every()) == (), "no row is left without a copy"
    catalog.backups.remove(record.id)


def test_what_is_not_there_is_named(catalog: Catalog) -> None:
    catalog.backups.add(samples.backup())
    for attempt in (
        lambda: catalog.backups.get("nix"),
        lambda: catalog.backups.set_state("nix", BackupState.DAMAGED),
        lambda: catalog.backups.pin("nix"),
        lambda: catalog.jobs.get("nix"),
        lambda: catalog.jobs.finish("nix", JobState.FAILED, samples.NOON, token=1),
        lambda: catalog.restores.get("nix"),
        lambda: catalog.restores.take_up("nix", "job", "me"),
        lambda: catalog.proofs.get("nix"),
        lambda: catalog.witnesses.get("nix"),
        lambda: catalog.backups.add_copy("nix", Copy("local", "complete", samples.NOON)),
        lambda: catalog.backups.mark_copy_damaged(samples.backup().id, "nix"),
    ):
        with pytest.raises(NotFoundError, match="nix"):
            attempt()


def test_a_restore_keeps_its_phases_and_can_be_taken_up_again(catalog: Catalog) -> None:
    catalog.restores.start(samples.restore())
    catalog.restores.phase_done("restore-1", Phase("fetched", 2.0, 100))
    catalog.restores.phase_done("restore-1", Phase("fetched", 3.0, 100))
    assert catalog.restores.abandon_dead(lambda _owner: False, samples.NOON)[0].state is JobState.ABANDONED
    with pytest.raises(RefusedError):
        catalog.restores.phase_done("restore-1", Phase("prepared", 1.0))
    again = catalog.restores.take_up("restore-1", "job-1", "me")
    assert (again.state, again.owner, again.finished_at, again.error) == (JobState.RUNNING, "me", None, "")
    with pytest.raises(RefusedError):
        catalog.restores.take_up("restore-1", "job-1", "me")
    catalog.restores.phase_done("restore-1", Phase("prepared", 1.0, 0))
    done = catalog.restores.finish("restore-1", JobState.SUCCEEDED, samples.NOON)
    assert done.phases == (Phase("fetched", 3.0, 100), Phase("prepared", 1.0, 0))
    assert catalog.restores.list(datadir="/srv/new", state=JobState.SUCCEEDED) == (done,)
    with pytest.raises(RefusedError):
        catalog.restores.take_up("restore-1", "job-1", "me")


def test_proofs_come_back_newest_first(catalog: Catalog) -> None:
    for number, outcome in enumerate(("proved", "failed", "restored")):
        catalog.proofs.add(samples.proof(number, outcome=outcome))
    assert catalog.proofs.get("proof-1") == samples.proof(1, outcome="failed")
    assert [proof.id for proof in catalog.proofs.list("shop-db1")] == ["proof-2", "proof-1", "proof-0"]
    assert catalog.proofs.latest("shop-db1") == samples.proof(2, outcome="restored")
    assert catalog.proofs.latest("other") is None
    catalog.proofs.add(samples.proof(1))
    assert catalog.proofs.get("proof-1").outcome == "proved"
    counted = replace(samples.proof(1), tables_present=3, not_looked_at=1)
    catalog.proofs.add(counted)
    assert catalog.proofs.get("proof-1") == counted
    catalog.proofs.withdraw("proof-1", "its backup lacks a table")
    assert catalog.proofs.get("proof-1") == replace(counted, outcome="withdrawn", withdrawn="its backup lacks a table")


def test_what_a_backup_lacks_comes_back_and_nobody_looked_is_not_nothing(catalog: Catalog) -> None:
    catalog.backups.add(samples.backup())
    assert catalog.backups.get(samples.backup().id).missing is None
    catalog.backups.set_missing(samples.backup().id, ["shop.`o``rders`"], "it may not be prepared")
    found = catalog.backups.get(samples.backup().id)
    assert (found.missing, found.doubtful, found.is_partial) == (("shop.`o``rders`",), "it may not be prepared", True)
    catalog.backups.set_missing(found.id, [], "")
    assert catalog.backups.get(found.id).missing == ()


def test_witnesses_are_found_by_id_backup_and_server(catalog: Catalog) -> None:
    here, there = samples.witness(1), samples.witness(2, position=Position("mysql-bin.000043", 4, ""))
    bare = samples.witness(3, position=Position(gtid="0-1-9"))
    catalog.witnesses.add("w1", here, backup_id="b1")
    catalog.witnesses.add("w2", there)
    catalog.witnesses.add("w3", bare)
    assert catalog.witnesses.get("w1") == here
    assert catalog.witnesses.of_backup("b1") == here
    assert catalog.witnesses.latest("shop-db1") == bare
    catalog.witnesses.forget("b1")
    assert catalog.witnesses.of_backup("b1") is None


def test_witnesses_between_two_moments_are_listed_and_old_ones_of_no_backup_forgotten(catalog: Catalog) -> None:
    one, two, three, four = (samples.witness(number) for number in (1, 2, 3, 4))
    for name, witness in (("w1", one), ("w2", two), ("w4", four)):
        catalog.witnesses.add(name, witness)
    catalog.witnesses.add("w3", three, backup_id="b3")
    assert catalog.witnesses.between("shop-db1", two.taken_at, three.taken_at) == (three, two)
    assert catalog.witnesses.between("shop-db1", one.taken_at, four.taken_at, limit=1) == (four,)
    assert catalog.witnesses.between("other", one.taken_at, four.taken_at) == ()
    catalog.witnesses.forget_before("shop-db1", four.taken_at)
    assert catalog.witnesses.between("shop-db1", one.taken_at, four.taken_at) == (four, three)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(text=st.text(st.characters(exclude_categories=()), max_size=50))
def test_no_text_of_a_tool_prevents_recording_its_failure(catalog: Catalog, text: str) -> None:
    job = replace(samples.job(), id="job-x")
    if not catalog.jobs.list():
        catalog.jobs.add(job)
        catalog.jobs.finish(
            "job-x", JobState.FAILED, samples.NOON, token=1, error=ToolError(text, detail=text, hint=text)
        )
    proof = replace(samples.proof(), error=text, checks=(replace(samples.proof().checks[0], detail=text),))
    catalog.proofs.add(proof)
    read = catalog.proofs.get(proof.id)
    assert read.checks == proof.checks
    if "\x00" not in text and text.isprintable():
        assert read.error == text


def test_what_an_applier_takes_to_begin_is_no_speed() -> None:
    mib = 1024 * 1024
    little = [Phase("rolled_forward", 12.0, 500), Phase("rolled_forward", 14.0, 0)]
    found = rates(little, "db1")["rolled_forward"]
    assert (found.bytes_per_second, found.start, found.samples) == (None, 13.0, 2)
    found = rates([*little, Phase("rolled_forward", 23.0, 100 * mib)], "db1")["rolled_forward"]
    assert (found.bytes_per_second, found.start) == (10 * mib, 13.0)
    assert rates([Phase("rolled_forward", 10.0, 100 * mib)], "db1")["rolled_forward"].start is None


def test_rates_are_medians_of_a_servers_own_good_runs_first(catalog: Catalog) -> None:
    for number, seconds in enumerate((1.0, 2.0, 40.0)):
        catalog.proofs.add(samples.proof(number, seconds=seconds))
    catalog.proofs.add(samples.proof(9, outcome="failed", seconds=0.01))
    catalog.jobs.add(samples.job(1, server="other"))
    catalog.jobs.finish(
        "job-1", JobState.SUCCEEDED, samples.NOON, token=1, phases=[Phase("copy", 2.0, 1_000), Phase("fetched", 1.0, 1)]
    )
    found = catalog.rates.of("shop-db1")
    assert found["fetched"].bytes_per_second == 2_000
    assert (found["fetched"].samples, found["fetched"].server) == (3, "shop-db1")
    assert found["fetched"].estimate(10_000) == 5.0
    assert found["started"].bytes_per_second is None
    assert found["started"].estimate(10_000) == 1.23456789
    assert (found["copy"].bytes_per_second, found["copy"].server) == (500, None)
    assert set(catalog.rates.of("other")) == {"copy", "fetched", "started"}
    assert catalog.rates.of("other")["fetched"].bytes_per_second == 1
