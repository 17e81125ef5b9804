"""Increment or full: decided with a real server, real backups and a real catalog; only the answer is asked for."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from backupd.app.backup_records import adopt_unknown
from backupd.app.backups.chains import Circumstances, Decision
from backupd.app.backups.physical import take_backup
from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import JobRun, Wiring
from backupd.catalog.session import open_catalog, upgrade
from backupd.engine.physical.capture import PhysicalTool
from backupd.engine.server.probe import examine
from backupd.engine.toolset import physical_tool
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState
from backupd.model.errors import RefusedError
from backupd.model.job import JobRecord, JobState, Progress, Report, silent
from backupd.model.manifest import decode_header, encode_header
from backupd.model.proof import Phase, Proof
from backupd.model.server_facts import Role, ServerInfo, Version
from backupd.model.text import new_id
from backupd.process.run_context import utc_now
from backupd.transfer.deletion import mark, unmark
from backupd.transfer.fsck import repair
from backupd.transfer.leases import intents
from backupd.transfer.records.manifests import backup_ids, load_header
from restore.datadir.staging import MARKER, State, write_marker
from storage import layout
from tests.support.e2e.house import SERVER, House
from tests.support.imports import import_tablespace
from tests.support.keys import Keys
from tests.support.servers.mariadb import PrivateServer, query
from tests.support.stores.folders import short_directory

INCREMENT = BackupKind.PHYSICAL_INCREMENTAL


class Desk:
    """A house asked from within: ``records`` are a full backup and two increments."""

    def __init__(self, house: House, wiring: Wiring) -> None:
        self.house, self.wiring = house, wiring
        self.records: list[BackupRecord] = []

    @property
    def destination(self) -> Any:
        return self.wiring.destination("local")

    def take(self, kind: BackupKind = INCREMENT, report: Report = silent) -> BackupRecord:
        now = utc_now()
        job = JobRecord(id=new_id(now), kind=str(kind), server=SERVER, state=JobState.RUNNING, queued_at=now)
        return take_backup(self.wiring, SERVER, kind, JobRun(job, report)).record

    def decide(
        self,
        *,
        kind: BackupKind = INCREMENT,
        increments: bool = True,
        info: Callable[[ServerInfo], ServerInfo] = lambda info: info,
        policy: str = "",
        tool: str = "",
        recipients: Collection[str] | None = None,
    ) -> Decision:
        self.house.policy_extra = policy
        self.house.write()
        wiring = Wiring(load_settings(self.house.config), self.wiring.catalog)
        server = wiring.settings.server(SERVER)
        with server.connection().connect() as session:
            found = examine(session).info
            asked: Any = _Other(physical_tool(found), tool, takes_increments=increments)
            sealed_for = recipients or wiring.recipients()[1]
            there = Circumstances(wiring, server, info(found), asked, session, (self.destination,), sealed_for)
            return there.decide(kind)

    @contextmanager
    def recorded(self, record: BackupRecord, **changes: Any) -> Iterator[None]:
        """The catalog says something else of ``record`` for a while."""
        backups = self.wiring.catalog.backups
        before = backups.get(record.id)
        backups.add(replace(before, **changes), replace=True)
        try:
            yield
        finally:
            backups.add(before, replace=True)


class _Other:
    """A tool of another ``name``, or one that takes no increments, as CLONE does not."""

    def __init__(self, tool: PhysicalTool, name: str, *, takes_increments: bool) -> None:
        self.tool = replace(tool.tool, name=name or tool.tool.name)
        self.takes_increments = takes_increments


@pytest.fixture(scope="module")
def desk(keys: Keys) -> Iterator[Desk]:
    with short_directory() as base, PrivateServer() as server, pytest.MonkeyPatch.context() as patch:
        server.create_backup_users()
        server.execute("CREATE DATABASE d", "CREATE TABLE d.t (id INT PRIMARY KEY AUTO_INCREMENT)")
        house = House(base, server, keys, policy_extra="witness: {enabled: false}\n")
        for name, value in house.environment().items():
            patch.setenv(name, value)
        settings = load_settings(house.config)
        upgrade(settings.catalog)
        with open_catalog(settings.catalog) as catalog:
            found = Desk(house, Wiring(settings, catalog))
            for _ in range(3):
                server.execute("INSERT INTO d.t VALUES ()")
                found.records.append(found.take())
            yield found


def test_the_first_increment_is_a_full_backup_and_each_next_one_builds_on_the_newest(desk: Desk) -> None:
    full, first, second = desk.records
    assert (full.kind, full.reason) == (BackupKind.PHYSICAL_FULL, "there is no full backup yet")
    assert any("a full backup was taken instead of an increment" in text for text in full.warnings)
    for parent, child in ((full, first), (first, second)):
        assert (child.kind, child.parent, child.reason) == (INCREMENT, parent.id, "")
        assert (child.from_lsn, child.server_uuid) == (parent.to_lsn, full.server_uuid)
        header = load_header(desk.destination, SERVER, child.id)
        assert (header.kind, header.parent, header.to_lsn) == (str(INCREMENT), parent.id, child.to_lsn)
        assert header.server_uuid == child.server_uuid != ""
    assert desk.decide() == Decision(INCREMENT, tuple(desk.records))
    assert desk.decide(kind=BackupKind.PHYSICAL_FULL) == Decision(BackupKind.PHYSICAL_FULL)


def test_rows_of_increments_are_made_again_from_their_manifests(desk: Desk) -> None:
    record = desk.records[2]
    desk.wiring.catalog.backups.remove(record.id)
    assert adopt_unknown(desk.wiring, desk.destination) == [record.id]
    found = desk.wiring.catalog.backups.get(record.id)
    # Which tables it lacks is not known again before somebody with the private key looks at it.
    assert found == replace(record, warnings=found.warnings, manifest="", found=record.manifest, missing=None)
    assert desk.decide().parent == desk.wiring.catalog.backups.get(record.id)


def refused(decision: Decision, *words: str) -> None:
    assert (decision.kind, decision.chain) == (BackupKind.PHYSICAL_FULL, ())
    for word in words:
        assert word in decision.reason, decision.reason


@contextmanager
def rewritten(desk: Desk, **changes: Any) -> Iterator[None]:
    """The manifest of the last member says something else for a while."""
    path = desk.house.manifest(desk.records[2].id)
    before = path.read_bytes()
    after = encode_header(replace(decode_header(before), **changes))
    path.write_bytes(after)
    try:
        with desk.recorded(desk.records[2], manifest=hashlib.sha256(after).hexdigest()):
            yield
    finally:
        path.write_bytes(before)


@contextmanager
def recorded_landmarks(desk: Desk, **changes: Any) -> Iterator[None]:
    landmarks = load_header(desk.destination, SERVER, desk.records[2].id).landmarks
    assert landmarks is not None
    with rewritten(desk, landmarks=replace(landmarks, **changes)):
        yield


def test_a_chain_of_the_policys_length_ends(desk: Desk) -> None:
    physical = desk.house.base / "policies/gold.yaml"
    for most, kind in ((3, INCREMENT), (2, BackupKind.PHYSICAL_FULL), (0, BackupKind.PHYSICAL_FULL)):
        desk.house.policy_extra = ""
        desk.house.write()
        text = physical.read_text().replace('full: "0 2 * * *"', f'full: "0 2 * * *", max_chain: {most}')
        physical.write_text(text)
        server = load_settings(desk.house.config).server(SERVER)
        with server.connection().connect() as session:
            info = examine(session).info
            tool, sealed_for = physical_tool(info), desk.wiring.recipients()[1]
            there = Circumstances(desk.wiring, server, info, tool, session, (desk.destination,), sealed_for)
            found = there.decide(INCREMENT)
        assert found.kind is kind, most
        if kind is not INCREMENT:
            refused(found, f"max_chain is {most}")


def test_increments_as_large_as_the_full_backup_end_the_chain(desk: Desk) -> None:
    full, first, _second = desk.records
    large = replace(first.stats, bytes_new=max(full.stats.bytes_stored, 33 * 1024 * 1024))
    with desk.recorded(first, stats=large):
        refused(desk.decide(), "2 increments", "as large as the full backup")
    with desk.recorded(first, stats=replace(first.stats, bytes_new=full.stats.bytes_stored)):
        assert desk.decide().kind is INCREMENT, "of a few megabytes nothing can be saved"


def test_a_restore_that_would_take_longer_than_the_objective_ends_the_chain(desk: Desk) -> None:
    # Without any speed measured, a full backup of this size is assumed to take 5 s and each increment adds to that.
    large = replace(desk.records[-1].stats, bytes_source=10**10)
    with desk.recorded(desk.records[-1], stats=large):
        refused(desk.decide(policy="objectives: {rto: 1m}\n"), "3 increments", "the objective (rto) is 1m")
    assert desk.decide(policy="objectives: {rto: 1h}\n").kind is INCREMENT
    assert desk.decide(policy="objectives: {rto: 1s}\n").kind is INCREMENT, "full backups alone take longer than that"


def test_an_increment_is_not_sealed_for_other_keys_than_what_it_builds_on(desk: Desk) -> None:
    refused(desk.decide(recipients=["0" * 40]), "sealed for other keys")


def test_another_server_tool_or_series_is_noticed(desk: Desk) -> None:
    refused(desk.decide(increments=False), "takes no increments")
    refused(desk.decide(info=lambda info: replace(info, server_uuid="somebody-else")), "another server")
    refused(desk.decide(info=lambda info: replace(info, version=Version(11, 4, 2))), "mariadb 11.4", "mariadb 10.11")
    last = desk.records[2]
    assert load_header(desk.destination, SERVER, last.id).tool == "mariadb-backup"
    refused(desk.decide(tool="clone"), "was taken with mariadb-backup, now it is clone")
    with desk.recorded(last, tool_version="10.6.1"):
        refused(desk.decide(), "taken with 10.6")
    with desk.recorded(last, flavour="", server_version=""):
        refused(desk.decide(), "does not record which server series")


def test_a_server_that_was_restored_or_lost_its_log_is_noticed(desk: Desk) -> None:
    last = desk.records[2]
    datadir = desk.house.server.datadir
    write_marker(datadir, State("20200101T000000Z-0badcafe", SERVER, "latest", (last.id,)))
    os.utime(datadir / MARKER, (0, 0))  # what tells is which restore it was, not when
    refused(desk.decide(), "the server was restored after", last.id, "20200101T000000Z-0badcafe")
    with recorded_landmarks(desk, restore="20200101T000000Z-0badcafe"):
        assert desk.decide().kind is INCREMENT
    (datadir / MARKER).write_text("{")
    refused(desk.decide(), f"{MARKER} cannot be read")
    (datadir / MARKER).unlink()
    with recorded_landmarks(desk, restore="20200101T000000Z-0badcafe"):
        refused(desk.decide(), "not the data directory", last.id)
    with desk.recorded(last, position=replace(last.position, pos=last.position.pos + 10**6)):
        refused(desk.decide(), "was reset", last.id)


def test_without_evidence_in_the_binary_log_a_full_backup_is_taken(desk: Desk) -> None:
    last = desk.records[2]
    refused(desk.decide(info=lambda info: replace(info, log_bin=False)), "without a binary log", last.id)
    mute = {"log_slave_updates": "OFF"}
    refused(
        desk.decide(info=lambda info: replace(info, role=Role.REPLICA, variables={**info.variables, **mute})),
        "without log_slave_updates",
    )
    refused(
        desk.decide(info=lambda info: replace(info, variables={**info.variables, "log_bin_basename": "/no/log"})),
        "cannot be read",
    )
    with recorded_landmarks(desk, log="0" * 64):
        refused(desk.decide(), f"before {last.position.file}:{last.position.pos} the binary log holds other events")
    with recorded_landmarks(desk, log=""):
        refused(desk.decide(), "could not be read at the backup")
    with rewritten(desk, landmarks=None):
        refused(desk.decide(), "an earlier version took it")
    assert desk.decide().kind is INCREMENT


def test_a_server_that_stands_before_its_backup_is_noticed(desk: Desk) -> None:
    last = desk.records[2]
    with recorded_landmarks(desk, last_lsn=10**12):
        refused(desk.decide(), "log sequence number is", f"goes to {10**12}: it was rolled back")
    desk.house.server.settle()
    with desk.house.server.connect() as connection:
        [(_, now)] = query(connection, "SHOW GLOBAL STATUS LIKE 'Innodb_lsn_current'")
    with rewritten(desk, to_lsn=int(now)), desk.recorded(last, to_lsn=int(now)):
        refused(desk.decide(), "checkpoint is", f"goes to {now}")


def test_another_layout_of_the_files_is_noticed(desk: Desk) -> None:
    for name in ("innodb_data_file_path", "innodb_undo_tablespaces", "innodb_page_size"):

        def elsewhere(info: ServerInfo, name: str = name) -> ServerInfo:
            return replace(info, variables={**info.variables, name: "other"})

        refused(desk.decide(info=elsewhere), f"{name} changed since {desk.records[2].id}")
    plugins = ("file_key_management=file_key_management.so",)
    refused(desk.decide(info=lambda info: replace(info, plugins=(*info.plugins, *plugins))), "encryption plugins")
    assert desk.decide(info=lambda info: replace(info, plugins=(*info.plugins, "x=auth_x.so"))).kind is INCREMENT


def test_a_chain_whose_test_restore_failed_ends_until_a_later_one_succeeds(desk: Desk) -> None:
    full, first, second = desk.records
    proofs = desk.wiring.catalog.proofs

    def prove(record: BackupRecord, outcome: str, *phases: str) -> None:
        now = utc_now()
        ended = tuple(Phase(name, 1.0, 1) for name in phases)
        proofs.add(Proof(new_id(now), SERVER, record.id, "latest", outcome, now, now, ended, (), 0))

    prove(second, "proved")
    prove(first, "failed")
    refused(desk.decide(), f"the test restore of {first.id}", "failed")
    prove(full, "proved")
    refused(desk.decide(), f"the test restore of {first.id}", "failed")
    prove(second, "restored")
    assert desk.decide().kind is INCREMENT
    prove(first, "undecided")
    assert desk.decide().kind is INCREMENT, "a missing key says nothing about the data"
    prove(first, "undecided", "fetched")
    refused(desk.decide(), f"the test restore of {first.id}", "failed")
    prove(second, "restored")


def test_an_imported_tablespace_is_in_no_increment(desk: Desk) -> None:
    server = desk.house.server
    server.execute(
        "CREATE TABLE d.made (id INT PRIMARY KEY)", "INSERT INTO d.made VALUES (1)", "CREATE TABLE d.came LIKE d.made"
    )
    assert desk.decide().kind is INCREMENT, "not a page of these is written"
    server.settle()
    assert desk.decide().kind is INCREMENT, "made here"
    import_tablespace(server, "d", "made", "came", on_the_way=lambda: refused(desk.decide(), "DISCARD TABLESPACE"))
    refused(desk.decide(), "imported since", "d/came")
    server.settle()
    server.execute("INSERT INTO d.came VALUES (2)")
    server.settle()
    refused(desk.decide(), "imported since", "d/came")
    with recorded_landmarks(desk, table=None):
        refused(desk.decide(), "cannot determine")
    server.execute("DROP TABLE d.came, d.made")
    assert desk.decide().kind is INCREMENT


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_member_that_is_gone_damaged_or_marked_at_a_destination_is_noticed(
    desk: Desk, number: int, short_tmp: Path
) -> None:
    record = desk.records[number]
    folder = desk.house.manifest(record.id).parent
    shutil.copytree(folder, short_tmp / "kept", copy_function=os.link)  # the tree is made of links to objects

    def back() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(short_tmp / "kept", folder, copy_function=os.link)

    def write(name: str, content: bytes) -> None:
        (folder / name).unlink()
        (folder / name).write_bytes(content)

    shutil.rmtree(folder)
    refused(desk.decide(), record.id, "is missing")
    back()
    write("manifest.json", b"{}")
    refused(desk.decide(), record.id, "manifest cannot be read")
    back()
    write(layout.BODY, b"short")
    refused(desk.decide(), record.id, "objects of it are missing")
    back()
    mark(desk.destination, SERVER, record.id, utc_now())
    refused(desk.decide(), record.id, "marked as deleted")
    unmark(desk.destination, SERVER, record.id, now=utc_now(), grace=timedelta.max)
    for state, word in ((BackupState.DAMAGED, "known to be damaged"), (BackupState.DELETED, "marked as deleted")):
        with desk.recorded(record, state=state):
            refused(desk.decide(), record.id, word)
    with desk.recorded(record, to_lsn=record.to_lsn + 1):
        refused(desk.decide(), record.id, "differs from the catalog")
    assert desk.decide().kind is INCREMENT


def test_a_row_that_is_gone_in_the_middle_is_noticed(desk: Desk) -> None:
    first = desk.records[1]
    desk.wiring.catalog.backups.remove(first.id)
    refused(desk.decide(), f"builds on {first.id}, which is missing")
    desk.wiring.catalog.backups.add(first)


def test_a_parent_that_is_deleted_while_its_child_runs_keeps_that_from_its_commit(desk: Desk) -> None:
    parent = desk.records[2]
    before = backup_ids(desk.destination)

    def report(progress: Progress) -> None:
        if progress.phase == "commit":
            [intent] = intents(desk.destination)
            assert intent.parents == tuple(record.id for record in desk.records)
            mark(desk.destination, SERVER, parent.id, utc_now())

    with pytest.raises(RefusedError, match="builds on was deleted meanwhile"):
        desk.take(report=report)
    assert backup_ids(desk.destination) == before
    assert intents(desk.destination) == []
    unmark(desk.destination, SERVER, parent.id, now=utc_now(), grace=timedelta.max)
    assert repair(desk.destination, None, clock=utc_now).left == (), "a sweep takes what it had stored"
