"""What the checks of replicas mean for whoever comes after them: members of a group, incidents, and an applier that was
left paused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pymysql
import pytest

from backupd.alerts.conditions import Condition, Key
from backupd.alerts.rules import ERRANT_TRANSACTIONS, INCONSISTENT_REPLICA
from backupd.app.context import members
from backupd.app.context.members import candidates, choices
from backupd.app.context.settings import ServerSettings, load_settings
from backupd.app.context.wiring import JobRun, Result, Wiring
from backupd.app.verify.consistency import (
    check_consistency,
    findings,
    pass_gate,
    perform_check,
    resume_paused,
    state_of,
    view,
)
from backupd.catalog.session import open_catalog
from backupd.engine.binlog.errant_statements import ErrantReport
from backupd.engine.consistency import Compared as TablesCompared
from backupd.engine.sql.client import Connection
from backupd.model.backup_record import BackupKind
from backupd.model.consistency import NOBODY, ComparedServer, ConsistencyCheck
from backupd.model.errors import RefusedError, ServerError, ToolError
from backupd.model.event import Severity
from backupd.model.job import JobRecord, JobState, silent
from backupd.model.server_facts import Identity as MetIdentity
from backupd.model.server_facts import Role, Verdict
from backupd.recovery.members import Candidate, Compared, Identity
from tests.support.servers import mysql
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.replica import catch_up, replica_of

GROUP = """
  shop: {members: [db1, db2, db3], policy: gold}
  db1: {socket: /run/1.sock, user: b}
  db2: {socket: /run/2.sock, user: b}
  db3: {socket: /run/3.sock, user: b}
"""
PAUSES = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.app.verify.consistency import _noted
from backupd.engine import consistency
from backupd.process.run_context import RunContext

wiring = Wiring(load_settings(Path(sys.argv[1])), None)

def paused(*_args):
    print("paused", flush=True)
    time.sleep(600)

consistency._Applier.go_on_until = paused
here, there = (wiring.settings.server(name).connection() for name in ("db1", "db2"))
consistency.at_one_gtid(here, there, RunContext(), seconds=600, pausing=lambda: _noted(wiring, "db2"))
"""


def configured(folder: Path, servers: str) -> Path:
    policies = folder / "policies"
    policies.mkdir()
    (policies / "gold.yaml").write_text(
        'physical: {full: "0 2 * * *"}\ndestinations: {required: [local]}\n'
        "consistency: {checksum: {schedule: 'every 24h', max_age: 7d}}\n"
    )
    file = folder / "backupd.yaml"
    file.write_text(
        f"catalog: sqlite:///{folder}/catalog.db\nspool: {folder}/spool\npolicies: {policies}\n"
        f"servers:{servers}destinations:\n  local: {{type: filesystem, path: {folder}/repository}}\n"
        f"encryption: {{gnupg_home: {folder}, recipients: [ops@example.com]}}\n"
    )
    return file


def check(replica: str, server: str = "shop", **found: Any) -> ConsistencyCheck:
    now = datetime.now(UTC)
    values = {"equal": ("`shop`.`a`",), **found}
    return ConsistencyCheck(f"check-{replica}", server, replica, "db1", "witness", now, now, **values)


def test_a_member_that_was_found_equal_is_taken_before_one_of_which_that_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(_server: object, name: str) -> Candidate:
        number = int(name[-1])
        role = Role.SOURCE if number == 1 else Role.REPLICA
        return Candidate(name, identity=Identity(f"u{number}", number, "h", name), role=role, follows=frozenset({1}))

    monkeypatch.setattr(members, "_asked", asked)
    monkeypatch.setattr(members, "_heard", lambda _server, _members, one: one)
    settings = load_settings(configured(tmp_path, GROUP))
    with open_catalog(settings.catalog) as catalog:
        wiring = Wiring(settings, catalog)
        catalog.consistency_checks.add(check("db3"))
        catalog.consistency_checks.add(check("db2", equal=(), different={"`shop`.`a`": "1 of 1 chunks differ"}))
        catalog.consistency_checks.add(check("db1"))
        found = choices(wiring, settings.server("shop"), BackupKind.LOGICAL, "job")
        assert [one.name for one in found] == ["db3", "db2", "db1"]
        assert "its rows equal the source's" in found[0].reason
        assert "its rows differ from the source's" in found[1].reason
        assert "equal" not in found[2].reason, "what it was found to be as a replica says nothing of a source"
    (source, *_others) = candidates(settings.server("shop"))
    assert source.compared is Compared.UNKNOWN


@pytest.fixture
def silent_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the server but what a test says."""
    room = "backupd.app.verify.consistency"
    monkeypatch.setattr(f"{room}.read_dialect", lambda _session: None)
    monkeypatch.setattr(f"{room}.compared_server", lambda _session, _dialect: NOBODY)
    monkeypatch.setattr(f"{room}.unordered", lambda _session, _dialect: "")


class Replicas:
    """The members of the group as replicas of db1: ``down`` cannot be asked, and ``compared`` is what a check finds."""

    def __init__(self, wiring: Wiring, monkeypatch: pytest.MonkeyPatch) -> None:
        self.down: set[str] = set()
        self.breaks: set[str] = set()
        self.alone = {"db1"}
        self.wiring = wiring
        self.server = wiring.settings.server("shop")
        room = "backupd.app.verify.consistency"
        monkeypatch.setattr(f"{room}._only_source", self._source)
        monkeypatch.setattr(f"{room}.compare", self._compare)
        monkeypatch.setattr(f"{room}._server_at", lambda connection: ComparedServer(f"uuid-{connection.socket[5]}"))
        monkeypatch.setattr(f"{room}.look_for_errant", lambda _one, _sources: ErrantReport())

    def _source(self, _wiring: Wiring, one: ServerSettings) -> list[ServerSettings]:
        if one.member in self.down:
            raise ServerError(f"cannot connect to {one.member}")
        return [] if one.member in self.alone else [self.server.through("db1")]

    def _compare(self, _source: object, replica: Connection, _context: object, **_how: object) -> TablesCompared:
        if f"db{replica.socket[5]}" in self.breaks:
            raise ToolError("pt-table-checksum failed")
        return TablesCompared(("`shop`.`a`",), {}, {}, "pt-table-checksum")

    def check(self) -> Result:
        job = JobRecord("job", "consistency", "shop", JobState.RUNNING, datetime.now(UTC))
        return perform_check(self.wiring, JobRun(job, silent))

    def verdicts(self) -> dict[str, str]:
        return {one.replica: str(one.verdict) for one in view(self.wiring, "shop").replicas}


def test_a_member_that_cannot_be_compared_is_named_and_unchecked_and_the_others_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings(configured(tmp_path, GROUP))
    with open_catalog(settings.catalog) as catalog:
        group = Replicas(Wiring(settings, catalog), monkeypatch)
        assert group.check().problem is None
        assert group.verdicts() == {"db2": "clean", "db3": "clean"}
        assert view(group.wiring, "shop").is_clean

        for group.down, group.breaks, why in (
            ({"db3"}, set(), "cannot connect to db3"),
            (set(), {"db3"}, "pt-table-checksum failed"),
        ):
            problem = group.check().problem
            assert problem is not None
            assert "0 tables differ from the source's and 0 were not compared" in problem.message
            assert problem.message.endswith("not compared at all: db3")
            assert f"db3 was not compared: {why}" in problem.detail
            assert group.verdicts() == {"db2": "clean", "db3": "unchecked"}
            assert why in view(group.wiring, "shop").replicas[1].why
            assert not view(group.wiring, "shop").is_clean

        group.down, group.breaks = {"db1", "db3"}, {"db2"}
        with pytest.raises(ServerError, match="no member of shop could be compared") as failed:
            group.check()
        assert "db2: pt-table-checksum failed" in failed.value.detail
        assert set(group.verdicts().values()) == {"unchecked"}

        group.down, group.breaks = set(), set()
        assert group.check().problem is None
        assert group.verdicts() == {"db2": "clean", "db3": "clean"}, "db1 replicates from nobody: it is no replica"


def test_a_member_that_was_made_anew_is_unchecked_until_it_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings(configured(tmp_path, GROUP))
    with open_catalog(settings.catalog) as catalog:
        group = Replicas(Wiring(settings, catalog), monkeypatch)
        group.check()
        (kept, *_others) = catalog.consistency_checks.list("shop")
        assert kept.replica_uuid == f"uuid-{kept.replica[2]}"
        db2 = group.server.through("db2")
        assert state_of(group.wiring, db2).verdict == "clean"
        assert state_of(group.wiring, db2, ComparedServer("uuid-2", "2026-11-01")).verdict == "clean"
        assert state_of(group.wiring, db2, ComparedServer("uuid-8")).verdict == "unchecked"
        compared = members.members_compared(group.wiring, group.server)
        assert compared(Candidate("db2", data=ComparedServer("uuid-2"))) is Compared.EQUAL
        assert compared(Candidate("db2", data=ComparedServer("uuid-8"))) is Compared.UNKNOWN

        later = datetime.now(UTC)
        for uuid, at in (("uuid-2", later), ("uuid-8", later + timedelta(seconds=1))):
            met = MetIdentity("shop", uuid, Verdict.OWN, since=at, seen_at=at, address="/run/2.sock")
            catalog.identities.put(met)
        assert group.verdicts() == {"db2": "unchecked", "db3": "clean"}, "another one was seen there since"


@pytest.mark.usefixtures("silent_server")
def test_what_was_found_of_a_replica_ends_when_it_is_one_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backupd.app.verify.consistency._statuses", lambda _session: ())
    settings = load_settings(configured(tmp_path, "\n  db2: {socket: /run/2.sock, user: b, policy: gold}\n"))
    with open_catalog(settings.catalog) as catalog:
        wiring, run, session = Wiring(settings, catalog), Run(), None
        catalog.consistency_checks.add(check("db2", server="db2"))
        keys = [Key(kind, "db2", "db2") for kind in (ERRANT_TRANSACTIONS, INCONSISTENT_REPLICA)]
        for key in keys:
            wiring.settle(Condition(key, Severity.ERROR, "it differs"))
        for _twice in range(2):
            gate = pass_gate(wiring, settings.server("db2"), session, Role.SOURCE, run)  # type: ignore[arg-type]
            assert (gate.flags, gate.warnings) == ((), ())
        kinds = [one.kind for one in catalog.events.list(limit=10)]
        assert sorted(kinds[:2]) == ["errant-transactions-gone", "replica-consistent"]
        assert len(kinds) == 4


@pytest.mark.usefixtures("silent_server")
@pytest.mark.parametrize("role", [Role.REPLICA, Role.STANDALONE])
def test_tables_that_differ_are_flagged_though_the_account_may_not_ask_whose_replica_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Role
) -> None:
    """Without that right a replica whose threads are stopped seems to be none."""

    def denied(_session: object) -> None:
        raise ServerError("denied", detail="(1227, 'Access denied')") from pymysql.err.OperationalError(1227, "no")

    monkeypatch.setattr("backupd.app.verify.consistency._statuses", denied)
    settings = load_settings(configured(tmp_path, "\n  db2: {socket: /run/2.sock, user: b, policy: gold}\n"))
    with open_catalog(settings.catalog) as catalog:
        wiring, run, session = Wiring(settings, catalog), Run(), None
        catalog.consistency_checks.add(check("db2", server="db2", different={"`shop`.`b`": "differs"}))
        key = Key(INCONSISTENT_REPLICA, "db2", "db2")
        wiring.settle(Condition(key, Severity.ERROR, "it differs"))
        gate = pass_gate(wiring, settings.server("db2"), session, role, run)  # type: ignore[arg-type]
        assert gate.flags == ("inconsistent-source",)
        assert any("is not known" in text for text in gate.warnings)
        assert [one.kind for one in catalog.events.list(limit=10)] == ["replica-inconsistent"], "it is still open"


def test_a_replica_of_several_sources_is_not_compared_with_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of the other source would be "on the replica only"."""
    servers = "".join(f"\n  {name}: {{socket: /run/{name}, user: b, policy: gold}}" for name in ("db1", "db2", "db3"))
    settings = load_settings(configured(tmp_path, f"{servers}\n"))
    both = [settings.server(name) for name in ("db1", "db3")]
    monkeypatch.setattr("backupd.app.verify.consistency._sources", lambda _wiring, _one: iter(both))
    run: Any = SimpleNamespace(job=SimpleNamespace(server="db2"))
    with open_catalog(settings.catalog) as catalog:
        wiring = Wiring(settings, catalog)
        with pytest.raises(RefusedError, match=r"several servers \(db1, db3\)"):
            check_consistency(wiring, run)
        (said,) = findings(wiring, settings.server("db2"))
        assert "several servers" in said.message


def test_a_replica_that_was_made_anew_is_unchecked_but_what_differed_is_not_forgotten(tmp_path: Path) -> None:
    settings = load_settings(configured(tmp_path, "\n  db2: {socket: /run/2.sock, user: b, policy: gold}\n"))
    with open_catalog(settings.catalog) as catalog:
        wiring, server = Wiring(settings, catalog), settings.server("db2")
        now = datetime.now(UTC)
        before, after = now - timedelta(days=9), now + timedelta(seconds=1)
        catalog.identities.put(MetIdentity("db2", "old", Verdict.OWN, since=before, seen_at=now))
        catalog.consistency_checks.add(check("db2", server="db2", different={"`shop`.`b`": "differs"}))
        assert list(state_of(wiring, server).different) == ["`shop`.`b`"]
        assert not state_of(wiring, server).unchecked
        catalog.identities.put(MetIdentity("db2", "new", Verdict.OWN, since=after, seen_at=after))
        found = state_of(wiring, server)
        assert "another server that was compared" in found.unchecked["`shop`.`a`"]
        assert list(found.different) == ["`shop`.`b`"]
        assert not view(wiring, "db2").is_clean


class Run:
    class job:  # noqa: N801 - as the job of a run is named
        id = "job"


@pytest.mark.skipif(bool(mysql.why_not()), reason=mysql.why_not() or "there is one")
def test_an_applier_that_a_killed_check_left_paused_is_started_and_check_names_what_the_accounts_lack(
    tmp_path: Path,
) -> None:
    with MySQLServer(tcp=True) as source, replica_of(source) as replica:
        servers = "".join(
            f"\n  {name}: {{socket: {one.socket}, defaults_file: {one.client_file('root', '')}, policy: gold}}"
            for name, one in (("db1", source), ("db2", replica))
        )
        file = configured(tmp_path, f"{servers}\n")
        wiring = Wiring(load_settings(file), None)  # type: ignore[arg-type]
        with subprocess.Popen([sys.executable, "-c", PAUSES, str(file)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"paused\n"
            source.execute("CREATE DATABASE later")
            resume_paused(wiring)
            assert not is_applying(replica), "the check goes on: it is left alone"
            os.kill(process.pid, signal.SIGKILL)
        assert not is_applying(replica)
        resume_paused(wiring)
        assert is_applying(replica)
        catch_up(source, replica)
        replica.execute("STOP REPLICA SQL_THREAD")
        resume_paused(wiring)
        assert not is_applying(replica), "it was started once: whoever stops it now means it"
        replica.execute("START REPLICA SQL_THREAD")

        source.execute("CREATE USER few@localhost", "GRANT RELOAD ON *.* TO few@localhost")
        catch_up(source, replica)
        file.write_text(file.read_text().replace(str(replica.client_file("root", "")), few(replica)))
        settings = load_settings(file)
        with open_catalog(settings.catalog) as catalog:
            said = [str(one.message) for one in findings(Wiring(settings, catalog), settings.server("db2"))]
            assert any("SHOW REPLICA STATUS" in one or "REPLICATION CLIENT" in one for one in said), said
            source.execute("GRANT REPLICATION CLIENT ON *.* TO few@localhost")
            catch_up(source, replica)
            said = [str(one.message) for one in findings(Wiring(settings, catalog), settings.server("db2"))]
        lacks = "SELECT ON *.*, REPLICATION_SLAVE_ADMIN ON *.*"
        assert said == [
            "the account on db1 (the source) may do a consistency check",
            f"the account on db2 (the replica) lacks what a consistency check needs: {lacks}",
        ]


def few(server: MySQLServer) -> str:
    return str(server.client_file("few", ""))


def is_applying(server: MySQLServer) -> bool:
    state = server.scalar("SELECT SERVICE_STATE FROM performance_schema.replication_applier_status")
    return str(state) == "ON"
