"""The whole application behind one door: what the command line (and later the REST interface) may ask for.

What a method needs it imports itself: a command that only lists backups need not load what restores them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from backupd.app.settings import held_settings, load_settings
from backupd.app.wiring import Wiring
from backupd.catalog.session import open_catalog, upgrade
from backupd.model.backup import BackupDetail, BackupKind, BackupRecord
from backupd.model.binlog import ChangeKind
from backupd.model.challenge import Challenge
from backupd.model.errors import BackupdError
from backupd.model.hold import Hold, HoldKind
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.model.progress import Report
from backupd.model.proof import Proof
from backupd.model.thaw import Thawing

if TYPE_CHECKING:
    from backupd.app import config, verification
    from backupd.app.bootstrap import Copied
    from backupd.app.deletion import Deleted
    from backupd.app.explain import Explanation
    from backupd.app.holds import Held, Paused
    from backupd.app.keys import Issued, KeyState
    from backupd.app.logstatus import LogStatus
    from backupd.app.rebuild import Rebuilt
    from backupd.app.replication import Replicated
    from backupd.app.retention import Applied
    from backupd.app.search import Found
    from backupd.app.tables import Leftover
    from backupd.app.thawing import Thawed
    from backupd.app.vouching import Vouched
    from backupd.backup.finding import Finding
    from backupd.recovery.timeline import Timeline
    from backupd.retention.decisions import Decisions
    from restore.executor import RestoreOutcome
    from restore.plan import Plan
    from restore.tableoutcome import TablesOutcome
    from restore.tableplan import TablePlan
    from restore.tablerestore import Confirm


class Service:
    """Use as ``with Service.open(path) as service``. Every method raises errors of backupd.model.errors."""

    def __init__(self, wiring: Wiring, revision: str) -> None:
        self._wiring = wiring
        self._revision = revision

    @classmethod
    @contextmanager
    def open(cls, config_path: Path, held: Path | None = None) -> Iterator[Service]:
        """Read the configuration and open the catalog. ``held``: the settings that a service has in force, which then
        count in place of the files.

        Raises ConfigurationError with every problem at once. A policy that is broken keeps from work only what needs
        it: whoever has to pause, cancel or restore at night must not have to mend it first.
        """
        settings = load_settings(config_path, strict=False) if held is None else held_settings(held)
        _before, revision = upgrade(settings.catalog)
        with open_catalog(settings.catalog) as catalog:
            yield cls(Wiring(settings, catalog), revision)

    def upgrade_catalog(self) -> str:
        """The revision the catalog's tables have now; opening the service brought them there."""
        return self._revision

    def rebuild_catalog(self, destination: str, report: Report, *, merge: bool = False) -> Rebuilt:
        """From what lies at one destination; ``merge``: into a catalog that is not empty."""
        from backupd.app.rebuild import rebuild

        return rebuild(self._wiring, destination, report, merge=merge)

    def copy_catalog(self) -> tuple[Copied, ...]:
        """Catalog, configuration, proofs and RECOVER.md to every destination, now."""
        from backupd.app.bootstrap import write_copies

        return write_copies(self._wiring, now=True)

    def sign_documents(self, destination: str, *, unproven: bool = False) -> Vouched:
        """Sign what lies there unsigned and is what the runs of this catalog stored; ``unproven``: also what merely
        agrees with the catalog."""
        from backupd.app.vouching import vouch

        return vouch(self._wiring, destination, unproven=unproven)

    def check(self, server: str | None) -> list[Finding]:
        from backupd.app.checkup import check

        return check(self._wiring, server)

    def backup(self, server: str, kind: BackupKind, report: Report, *, table_set: str = "",
               tables: Sequence[str] = ()) -> BackupRecord:
        """``table_set`` of the policy, or patterns of ``tables``: what a logical backup takes, without them what the
        policy says. Raises whatever keeps it from being taken; a backup with tables missing is taken."""
        from backupd.app.actions import perform
        from backupd.app.jobs import run_here
        from backupd.app.protection import with_protection

        asked = {"set": table_set, "tables": list(tables)}
        done = run_here(self._wiring, JobKind(kind), server, lambda run: perform(self._wiring, run), report=report,
                        arguments={name: value for name, value in asked.items() if value},
                        result=lambda result: result)
        return with_protection(self._wiring, [self._wiring.catalog.backups.get(done.id)])[0]

    def jobs(self, server: str | None, *, kind: str | None = None, state: JobState | None = None,
             limit: int | None = None) -> tuple[JobRecord, ...]:
        """Newest first. Jobs of servers that are not configured any more are still told."""
        return self._wiring.catalog.jobs.list(server, kind=kind, state=state, limit=limit)

    def job(self, job_id: str) -> JobRecord:
        return self._wiring.catalog.jobs.get(job_id)

    def job_log(self, job_id: str) -> str:
        from backupd.app import logs

        return logs.read_log(self._wiring.settings, self._wiring.catalog.jobs.get(job_id).id)

    def cancel_job(self, job_id: str) -> JobRecord:
        from backupd.app import jobs

        return jobs.cancel(self._wiring, job_id, jobs.user())

    def run_job(self, job_id: str, token: int) -> None:
        """Do a job that a worker has claimed for this process."""
        from backupd.app.actions import run_claimed

        run_claimed(self._wiring, job_id, token)

    def backups(self, server: str | None) -> list[BackupRecord]:
        """Every backup that the catalog knows, deleted ones (within their grace period) too."""
        from backupd.app.protection import with_protection

        if server is not None:
            self._wiring.settings.server(server)
        return with_protection(self._wiring, self._wiring.catalog.backups.list(server))

    def show(self, backup_id: str) -> BackupDetail:
        from backupd.app.protection import with_protection
        from backupd.transfer.manifestio import load_header

        (record,) = with_protection(self._wiring, [self._wiring.catalog.backups.get(backup_id)])
        errors: list[BackupdError] = []
        for copy in record.copies:
            try:
                header = load_header(self._wiring.destination(copy.destination), record.server, record.id)
            except BackupdError as error:
                errors.append(error)
                continue
            return BackupDetail(record, len(header.objects), header.recipients, header.codec)
        raise errors[0]

    def keep(self, backup_id: str, *, pinned: bool) -> tuple[str, ...]:
        """Gives the destinations that could not be told, with why."""
        from backupd.app import deletion

        return deletion.keep(self._wiring, backup_id, pinned=pinned)

    def delete(self, backup_id: str, *, now: bool = False, with_increments: bool = False) -> Deleted:
        """``held`` of the answer is empty when it is gone (or only marked, without ``now``)."""
        from backupd.app import deletion

        return deletion.delete(self._wiring, backup_id, now=now, with_increments=with_increments)

    def undelete(self, backup_id: str) -> list[str]:
        """Gives the ids that came back: what it builds on comes with it."""
        from backupd.app import deletion

        return deletion.undelete(self._wiring, backup_id)

    def retention(self, server: str) -> tuple[Decisions, ...]:
        """What the rules say of every backup of the server, for each destination; changes nothing."""
        from backupd.app import retention

        return retention.preview(self._wiring, server, now=self._wiring.clock())

    def apply_retention(self, server: str, report: Report, *, really: bool = False) -> Applied:
        from backupd.app import retention
        from backupd.app.jobs import run_here

        return run_here(self._wiring, JobKind.RETENTION, server,
                        lambda run: retention.apply(self._wiring, server, run, really=really), report=report)

    def holds(self) -> tuple[Hold, ...]:
        """Every hold and pause."""
        from backupd.app import holds

        return holds.listed(self._wiring)

    def hold(self, server: str, reason: str) -> Held:
        """``server`` may be ``*`` here and below: every one."""
        from backupd.app import holds, jobs

        return holds.hold(self._wiring, server, reason, jobs.user())

    def pause(self, server: str, reason: str, *, stop_running: bool = False) -> Paused:
        from backupd.app import holds, jobs

        return holds.pause(self._wiring, server, reason, jobs.user(), stop_running=stop_running)

    def release(self, server: str, kind: HoldKind) -> tuple[str, ...]:
        """Gives the destinations where a hold may still be written, with why."""
        from backupd.app import holds, jobs

        return holds.release(self._wiring, server, kind, jobs.user())

    def explain(self, policy: Path, server: str | None) -> Explanation:
        """What a policy file, in use or not yet, does to a server of this installation."""
        from backupd.app.explain import explain_here

        return explain_here(self._wiring, policy, server)

    def plan(self, server: str, target: str, datadir: Path | None, *, exclude: Sequence[str] = (),
             replay_with: str | None = None, thaw: str | None = None) -> Plan:
        """``thaw``: the tier that the plan counts with, where something has to be thawed."""
        from backupd.app.restores import Wishes, plan

        return plan(self._wiring, server, target, datadir, wishes=Wishes.of(exclude, replay_with, thaw))

    def restore(self, server: str, target: str, datadir: Path, start: bool, report: Report,
                mode: str = "new-server", *, exclude: Sequence[str] = (), replay_with: str | None = None,
                thaw: str | None = None) -> RestoreOutcome:
        """``exclude``: GTIDs of transactions to leave out; ``replay_with``: ``applier`` or ``pipe``; ``thaw``: thaw
        what is archived at this tier, and wait for it."""
        from backupd.app.restores import Wishes, restore

        return restore(self._wiring, server, target, datadir, start=start, mode=mode, report=report,
                       wishes=Wishes.of(exclude, replay_with, thaw))

    def plan_tables(self, server: str, target: str, tables: Sequence[str], *, rename: str | None = None,
                    exclude: Sequence[str] = (), source: str | None = None, thaw: str | None = None) -> TablePlan:
        """``tables``: patterns; ``rename``: as ``restore_tables`` takes it."""
        from backupd.app.restores import Wishes
        from backupd.app.tables import plan_tables
        from backupd.app.tableways import TableWishes

        return plan_tables(self._wiring, server, target,
                           TableWishes.of(tables, rename, Wishes.of(exclude, None, thaw), source))

    def restore_tables(self, server: str, target: str, tables: Sequence[str], *, into: str | None = None,
                       rename: str | None = None, sql: Path | None = None, confirm: str | None = None,
                       compare: bool = False, ask: Confirm | None = None, triggers: str = "backup",
                       exclude: Sequence[str] = (), source: str | None = None, thaw: str | None = None,
                       report: Report) -> TablesOutcome:
        """``into``: the server that gets them; ``rename``: other names for them; ``sql``: a folder for SQL files
        instead; ``confirm``: the name of ``into`` where live tables are replaced, or ``ask`` is asked; ``source``:
        ``logical`` or ``physical``."""
        from backupd.app.restores import Wishes
        from backupd.app.tables import restore_tables
        from backupd.app.tableways import TableWishes
        from restore.handover import Triggers

        wanted = TableWishes.of(tables, rename, Wishes.of(exclude, None, thaw), source)
        return restore_tables(self._wiring, server, target, wanted, into=into, sql=sql, confirm=confirm,
                              compare=compare, ask=ask, triggers=Triggers(triggers), report=report)

    def thaw(self, server: str, target: str, *, tier: str | None = None, days: int | None = None,
             tables: Sequence[str] = ()) -> Thawed:
        """Ask for what a restore to ``target`` (of ``tables`` only, where some are named) needs out of archives."""
        from backupd.app.restores import Wishes
        from backupd.app.thawing import thaw_for

        wishes = Wishes.of((), None, tier, days)
        return thaw_for(self._wiring, server, target, wishes, tables)

    def thaws(self, server: str | None) -> list[tuple[JobRecord, Thawing]]:
        """Every thaw that the catalog remembers, newest first; those that wait are looked at where it is time."""
        from backupd.app.thawing import thaws

        return thaws(self._wiring, server)

    def raise_thaw(self, job_id: str, tier: str) -> tuple[JobRecord, Thawing]:
        """Ask for what has not come yet at a faster tier."""
        from backupd.app.thawing import raised

        return raised(self._wiring, job_id, tier)

    def leftovers(self, server: str, drop: str | None = None) -> tuple[Leftover, ...]:
        """What unfinished restores of tables left on a server; ``drop``: the id of one, or ``all``."""
        from backupd.app.tables import leftovers

        return leftovers(self._wiring, server, drop=drop)

    def test_restore(self, server: str, target: str, report: Report) -> Proof:
        from backupd.app.actions import of_proof
        from backupd.app.jobs import run_here
        from backupd.app.proving import test_restore

        self._wiring.settings.server(server)
        return run_here(self._wiring, JobKind.TEST_RESTORE, server,
                        lambda run: test_restore(self._wiring, server, target, run.report), report=report,
                        arguments={"target": target}, result=of_proof)

    def verify(self, server: str | None, subset: float | None, report: Report) -> verification.VerifyOutcome:
        from backupd.app import verification
        from backupd.app.actions import of_verification
        from backupd.app.jobs import run_here

        if server is not None:
            self._wiring.settings.server(server)
        return run_here(self._wiring, JobKind.VERIFY, server or "",
                        lambda run: verification.verify(self._wiring, server, subset, run.report), report=report,
                        arguments={"subset": subset} if subset else {}, result=of_verification)

    def replicate(self, server: str | None, place: str | None, report: Report) -> tuple[Replicated, ...]:
        """Bring destinations up to date, for one server or all of them: ``place``, or all that their policies name."""
        from backupd.app.actions import of_replication
        from backupd.app.jobs import run_here
        from backupd.app.replication import bring_up_to_date

        wiring = self._wiring
        done = []
        for name in [server] if server is not None else list(wiring.settings.servers):
            found = wiring.settings.server(name)
            known = [*found.required, *found.others]
            if place is not None and place not in known and server is None:
                continue  # of those that go there
            for one in [place] if place is not None else known:
                done.append(run_here(
                    wiring, JobKind.REPLICATE, name, lambda run: bring_up_to_date(
                        wiring, run.job.server, str(run.job.arguments["destination"]), run), report=report,
                    arguments={"destination": one}, result=of_replication))
        return tuple(done)

    def fsck(self, *, repair: bool) -> verification.FsckOutcome:
        from backupd.app import verification

        return verification.fsck(self._wiring, mend=repair)

    def kept_configuration(self, backup_id: str, out: Path | None) -> config.Contents:
        """What was kept of the server's host with a backup; written to ``out`` where that is given."""
        from backupd.app import config

        return config.show(self._wiring, backup_id, out)

    def keys(self) -> list[KeyState]:
        from backupd.app.keys import keys as list_keys

        return list_keys(self._wiring)

    def challenge_keys(self, recipient: str | None) -> list[Issued]:
        from backupd.app.keys import challenge

        return challenge(self._wiring, recipient)

    def answer_challenge(self, challenge_id: str, phrase: str) -> Challenge:
        from backupd.app import jobs
        from backupd.app.keys import answer

        return answer(self._wiring, challenge_id, phrase, jobs.user())

    def runbook(self, backup_id: str) -> str:
        """The text beside the backup, from the first copy where it is what was written."""
        from backupd.transfer.manifestio import load_header, load_side_file

        record = self._wiring.catalog.backups.get(backup_id)
        errors: list[BackupdError] = []
        for copy in record.copies:
            try:
                destination = self._wiring.destination(copy.destination)
                header = load_header(destination, record.server, record.id)
                return load_side_file(destination, header, header.runbook).decode()
            except BackupdError as error:
                errors.append(error)
        raise errors[0]

    def binlog_status(self, server: str | None) -> tuple[LogStatus, ...]:
        """Of all servers that stream or ever did, without ``server``."""
        from backupd.app.logstatus import status

        return status(self._wiring, server)

    def search_binlogs(self, server: str, *, tables: Sequence[str] = (), kinds: Sequence[ChangeKind] = (),
                       since: datetime | None = None, until: datetime | None = None, gtid: str | None = None,
                       limit: int | None = None, branch: str | None = None) -> Iterator[Found]:
        from backupd.app.search import search

        return search(self._wiring, server, tables=tables, kinds=kinds, since=since, until=until, gtid=gtid,
                      limit=limit, branch=branch)

    def timeline(self, server: str) -> Timeline:
        from backupd.app.timeline import timeline

        return timeline(self._wiring, server)
