"""The whole application behind one door: what the command line (and later the REST interface) may ask for.

What a method needs it imports itself: a command that only lists backups need not load what restores them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from backupd.app.alerting.service import Telling
from backupd.app.context.access import require_all, require_known, scoped, see
from backupd.app.context.audit import Deed, command_line, deed
from backupd.app.context.settings import held_settings, load_settings
from backupd.app.context.wiring import Opening, Wiring, catalog_of
from backupd.app.runtime.clock_check import careful
from backupd.app.service.maintenance import Upkeep
from backupd.app.service.requests import Requests
from backupd.app.views.listing import Listings
from backupd.catalog.base.database import WANTED
from backupd.catalog.session import open_catalog, upgrade
from backupd.model.access import Actor, Challenge
from backupd.model.backup_record import BackupDetail, BackupRecord
from backupd.model.binlog import ChangeKind
from backupd.model.errors import BackupdError
from backupd.model.event import Incident, Message, MessageState
from backupd.model.hold import EVERY_SERVER, Hold, HoldKind
from backupd.model.job import JobRecord, JobState
from backupd.model.server_facts import Identity
from backupd.model.thaw import Thawing

if TYPE_CHECKING:
    from backupd.app.binlogs.search import Found
    from backupd.app.binlogs.status import LogStatus
    from backupd.app.context.access import Access
    from backupd.app.context.keys import Issued, KeyState
    from backupd.app.context.trust import RecoveryPage
    from backupd.app.restores import server_configuration as config
    from backupd.app.restores.request import RestoreRequest
    from backupd.app.restores.table_restore import Leftover
    from backupd.app.restores.thaw_for_restore import Thawed
    from backupd.app.retention.deletion import Deleted
    from backupd.app.retention.holds import Held, Paused
    from backupd.app.service.dispatch import Foreground
    from backupd.app.views.destinations import PlaceView
    from backupd.app.views.policy_explanation import Explanation
    from backupd.app.views.server import ServerOverview
    from backupd.backup.checks.finding import Finding
    from backupd.metrics import Values
    from backupd.recovery.timeline import Timeline
    from backupd.retention.decisions import Decisions
    from restore.planning.plan import Plan
    from restore.planning.table_plan import TablePlan


class Service:
    """Use as ``with Service.open(path) as service``. Every method raises errors of backupd.model.errors."""

    def __init__(self, wiring: Wiring, revision: str, actor: Actor | None = None) -> None:
        """``actor``: who asks; without one it is whoever calls this program."""
        self.actor = actor or command_line()
        self._wiring = scoped(wiring, self.actor)
        self._revision = revision

    @classmethod
    @contextmanager
    def open(
        cls, config_path: Path, held: Path | None = None, opening: Opening = Opening.MAKES, *, new_catalog: bool = False
    ) -> Iterator[Service]:
        """Read the configuration and open the catalog. ``held``: the settings that a service has in force, which then
        count in place of the files. ``opening``: what becomes of a catalog that is not there; ``new_catalog``: as
        ``new`` of ``catalog_of``.

        Raises ConfigurationError with every problem at once. A policy that is broken keeps from work only what needs
        it: whoever has to pause, cancel or restore at night must not have to mend it first.
        """
        if held is None:
            settings = load_settings(config_path, strict=False)
            with catalog_of(settings, opening, new=new_catalog) as catalog:
                yield cls(Wiring(settings, catalog), WANTED)
            return
        settings = held_settings(held)
        # A service has its catalog open: where it is gone, an empty one must not take its place.
        _before, revision = upgrade(settings.catalog, make=False)
        with open_catalog(settings.catalog, make=False) as catalog:
            yield cls(Wiring(settings, catalog), revision)

    def acting(self, actor: Actor) -> Service:
        """The same for ``actor``: what it asks for and changes is recorded under its name, and servers that it may not
        see are not there."""
        return Service(self._wiring, self._revision, actor)

    @property
    def requests(self) -> Requests:
        """Work to be queued, plans to be started by their id, and restores by jobs."""
        return Requests(self._wiring, self.actor)

    @property
    def listings(self) -> Listings:
        """Long lists by pages, and policies."""
        return Listings(self._wiring, self.actor)

    @property
    def access(self) -> Access:
        """Tokens and the audit."""
        from backupd.app.context.access import Access

        return Access(self._wiring, self.actor)

    @property
    def telling(self) -> Telling:
        """Incidents, and the messages about them."""
        return Telling(self._wiring, self.actor)

    def alerts(
        self, server: str | None = None, *, is_open: bool | None = True, before: str | None = None, limit: int = 100
    ) -> tuple[Incident, ...]:
        return self.telling.alerts(server, is_open=is_open, before=before, limit=limit)

    def messages(
        self,
        *,
        state: MessageState | None = None,
        incident: str | None = None,
        before: str | None = None,
        limit: int = 100,
    ) -> tuple[Message, ...]:
        return self.telling.messages(state=state, incident=incident, before=before, limit=limit)

    def test_alerts(self) -> tuple[Message, ...]:
        return self.telling.test()

    def acknowledge(self, incident_id: str) -> Incident:
        return self.telling.acknowledge(incident_id)

    @property
    def foreground(self) -> Foreground:
        """Work that this process does itself, while somebody waits."""
        from backupd.app.service.dispatch import Foreground

        return Foreground(self._wiring, self.actor)

    @property
    def upkeep(self) -> Upkeep:
        """Looking after the catalog, its copies, and what lies at the destinations."""
        return Upkeep(self._wiring, self.actor)

    def upgrade_catalog(self) -> str:
        """The revision the catalog's tables have now; opening the service brought them there."""
        return self._revision

    def check(self, server: str | None) -> list[Finding]:
        from backupd.app.service.check import check

        return check(self._wiring, server)

    def jobs(
        self, server: str | None, *, kind: str | None = None, state: JobState | None = None, limit: int | None = None
    ) -> tuple[JobRecord, ...]:
        """Newest first. Jobs of servers that are not configured any more are still told. Raises UnknownNameError."""
        if server is not None:
            require_known(self._wiring, server)
        most = limit if self.actor.servers is None else None
        found = self._wiring.catalog.jobs.list(server, kind=kind, state=state, limit=most)
        return tuple(job for job in found if self.actor.sees(job.server))[:limit]

    def job(self, job_id: str) -> JobRecord:
        found = self._wiring.catalog.jobs.get(job_id)
        see(self.actor, found.server, f"job {job_id}")
        return found

    def job_log(self, job_id: str) -> str:
        from backupd.app.context import logging_setup as logs

        return logs.read_log(self._wiring.settings, self.job(job_id).id)

    def cancel_job(self, job_id: str) -> JobRecord:
        from backupd.app.jobs import jobs

        with self._deed("job-cancelled", subject=job_id) as told:
            found = self.job(job_id)
            told.concerns(found.server, found.kind)
            return jobs.cancel(self._wiring, job_id, self.actor.name)

    def run_job(self, job_id: str, token: int) -> None:
        """Do a job that a worker has claimed for this process."""
        from backupd.app.service.dispatch import run_claimed

        run_claimed(self._wiring, job_id, token)

    def backups(self, server: str | None) -> list[BackupRecord]:
        """Every backup that the catalog knows, deleted ones (within their grace period) too."""
        from backupd.app.copies.protection import with_protection

        if server is not None:
            self._wiring.settings.server(server)
        found = self._wiring.catalog.backups.list(server, foreign=True)
        return with_protection(self._wiring, [record for record in found if self.actor.sees(record.server)])

    def show(self, backup_id: str) -> BackupDetail:
        from backupd.app.copies.protection import detail

        self._backup(backup_id)
        return detail(self._wiring, backup_id)

    def keep(self, backup_id: str, *, pinned: bool) -> tuple[str, ...]:
        """Gives the destinations that could not be told, with why."""
        from backupd.app.retention import deletion

        with self._of_backup("backup-kept" if pinned else "backup-unkept", backup_id):
            return deletion.keep(self._wiring, backup_id, pinned=pinned)

    def delete(self, backup_id: str, *, now: bool = False, with_increments: bool = False) -> Deleted:
        """``held`` of the answer is empty when it is gone (or only marked, without ``now``)."""
        from backupd.app.metacopies.catalog_copies import after_job
        from backupd.app.retention import deletion

        how = [word for word, wanted in (("at once", now), ("with its increments", with_increments)) if wanted]
        with self._of_backup("backup-deleted", backup_id, detail=", ".join(how)):
            done = deletion.delete(self._wiring, backup_id, now=now, with_increments=with_increments)
            after_job(self._wiring)  # what destinations say of themselves may name it
            return done

    def undelete(self, backup_id: str) -> list[str]:
        """Gives the ids that came back: what it builds on comes with it."""
        from backupd.app.metacopies.catalog_copies import after_job
        from backupd.app.retention import deletion

        with self._of_backup("backup-undeleted", backup_id):
            back = deletion.undelete(self._wiring, backup_id)
            after_job(self._wiring)
            return back

    def retention(self, server: str) -> tuple[Decisions, ...]:
        """What the rules say of every backup of the server, for each destination; changes nothing."""
        from backupd.app.retention import retention

        self._concern(server)
        return retention.preview(self._wiring, server, now=careful(self._wiring.catalog, self._wiring.clock()))

    def holds(self) -> tuple[Hold, ...]:
        """Every hold and pause."""
        from backupd.app.retention import holds

        return tuple(
            one for one in holds.listed(self._wiring) if one.server == EVERY_SERVER or self.actor.sees(one.server)
        )

    def hold(self, server: str, reason: str) -> Held:
        """``server`` may be ``*`` here and below: every one."""
        from backupd.app.retention import holds

        with self._deed("hold-set", server=server, detail=reason):
            self._concern(server)
            return holds.hold(self._wiring, server, reason, self.actor.name)

    def pause(self, server: str, reason: str, *, stop_running: bool = False) -> Paused:
        from backupd.app.retention import holds

        with self._deed("pause-set", server=server, detail=reason):
            self._concern(server)
            return holds.pause(self._wiring, server, reason, self.actor.name, stop_running=stop_running)

    def release(self, server: str, kind: HoldKind) -> tuple[str, ...]:
        """Gives the destinations where a hold may still be written, with why."""
        from backupd.app.retention import holds

        with self._deed(f"{kind}-released", server=server):
            self._concern(server)
            return holds.release(self._wiring, server, kind, self.actor.name)

    def accept(self, server: str) -> Identity:
        """The other server that answers under the name of ``server`` is the right one from now on."""
        from backupd.app.context import server_identity as identity

        with self._deed("server-accepted", server=server) as told:
            self._concern(server)
            found = identity.accept(self._wiring, server, self.actor.name)
            told.subject = found.uuid
            return found

    def explain(self, policy: Path, server: str | None) -> Explanation:
        """What a policy file, in use or not yet, does to a server of this installation."""
        from backupd.app.views.policy_explanation import explain_here

        return explain_here(self._wiring, policy, server)

    def plan(self, request: RestoreRequest) -> Plan:
        """What a restore of a whole server would do. Moves nothing."""
        from backupd.app.restores.whole_server import plan

        datadir = Path(request.datadir) if request.datadir else None
        return plan(self._wiring, request.server, request.target, datadir, options=request.options)

    def plan_tables(self, request: RestoreRequest) -> TablePlan:
        """What a restore of tables would do. Moves nothing."""
        from backupd.app.restores.table_restore import plan_tables

        return plan_tables(self._wiring, request.server, request.target, request.table_options)

    def thaw(
        self, server: str, target: str, *, tier: str | None = None, days: int | None = None, tables: Sequence[str] = ()
    ) -> Thawed:
        """Ask for what a restore to ``target`` (of ``tables`` only, where some are named) needs out of archives."""
        from backupd.app.restores.request import RestoreOptions
        from backupd.app.restores.thaw_for_restore import thaw_for

        options = RestoreOptions(thaw=tier or "", days=days or 0)
        with self._deed("thaw-requested", server=server, detail=target):
            return thaw_for(self._wiring, server, target, options, tables, self.actor.name)

    def thaws(self, server: str | None) -> list[tuple[JobRecord, Thawing]]:
        """Every thaw that the catalog remembers, newest first; those that wait are looked at where it is time."""
        from backupd.app.restores.thaw_for_restore import thaws

        if server is not None:
            require_known(self._wiring, server)
        return [(job, thawing) for job, thawing in thaws(self._wiring, server) if self.actor.sees(job.server)]

    def raise_thaw(self, job_id: str, tier: str) -> tuple[JobRecord, Thawing]:
        """Ask for what has not come yet at a faster tier."""
        from backupd.app.restores.thaw_for_restore import raised

        with self._deed("thaw-raised", server=self.job(job_id).server, subject=job_id, detail=tier):
            return raised(self._wiring, job_id, tier)

    def leftovers(self, server: str, drop: str | None = None) -> tuple[Leftover, ...]:
        """What unfinished restores of tables left on a server; ``drop``: the id of one, or ``all``."""
        from backupd.app.restores.table_restore import leftovers

        if drop is None:
            return leftovers(self._wiring, server)
        with self._deed("leftovers-dropped", server=server, subject=drop):
            return leftovers(self._wiring, server, drop=drop)

    def kept_configuration(self, backup_id: str, out: Path | None) -> config.Contents:
        """What was kept of the server's host with a backup; written to ``out`` where that is given."""
        from backupd.app.restores import server_configuration as config

        self._backup(backup_id)
        return config.show(self._wiring, backup_id, out)

    def keys(self) -> list[KeyState]:
        from backupd.app.context.keys import keys as list_keys

        return list_keys(self._wiring)

    def recovery_page(self) -> RecoveryPage:
        from backupd.app.context.trust import recovery_page
        from backupd.app.metacopies.signing_keys import replaced

        return recovery_page(self._wiring.settings, replaced(self._wiring))

    def challenge_keys(self, recipient: str | None) -> list[Issued]:
        from backupd.app.context.keys import challenge

        return challenge(self._wiring, recipient)

    def challenge(self, challenge_id: str) -> Challenge:
        return self._wiring.catalog.challenges.get(challenge_id)

    def answer_challenge(self, challenge_id: str, phrase: str) -> Challenge:
        from backupd.app.context.keys import answer

        with self._deed("key-answered", subject=challenge_id):
            return answer(self._wiring, challenge_id, phrase, self.actor.name)

    def runbook_digest(self, backup_id: str) -> str:
        """SHA-256 of the runbook of a backup that was just taken, "" where no copy can be read by now."""
        from backupd.app.copies.protection import detail

        try:
            return detail(self._wiring, backup_id).runbook_sha256
        except BackupdError:
            return ""

    def runbook(self, backup_id: str) -> str:
        """The text beside the backup, from the first copy where it is what was written."""
        from backupd.app.copies.protection import runbook

        self._backup(backup_id)
        return runbook(self._wiring, backup_id)

    def binlog_status(self, server: str | None) -> tuple[LogStatus, ...]:
        """Of all servers that stream or ever did, without ``server``."""
        from backupd.app.binlogs.status import status

        return tuple(one for one in status(self._wiring, server) if self.actor.sees(one.server))

    def search_binlogs(
        self,
        server: str,
        *,
        tables: Sequence[str] = (),
        kinds: Sequence[ChangeKind] = (),
        since: datetime | None = None,
        until: datetime | None = None,
        gtid: str | None = None,
        limit: int | None = None,
        branch: str | None = None,
        after: str | None = None,
        seconds: float | None = None,
    ) -> Iterator[Found]:
        """``after``: the cursor of one that was found; ``seconds``: so long may it take."""
        from backupd.app.binlogs.search import search

        self._concern(server)
        return search(
            self._wiring,
            server,
            tables=tables,
            kinds=kinds,
            since=since,
            until=until,
            gtid=gtid,
            limit=limit,
            branch=branch,
            after=after,
            seconds=seconds,
        )

    def timeline(self, server: str) -> Timeline:
        from backupd.app.views.timeline import timeline

        self._concern(server)
        return timeline(self._wiring, server)

    def overview(self, servers: Collection[str] | None = None) -> tuple[ServerOverview, ...]:
        """Every server at a glance, or those of ``servers``. Raises NotFoundError."""
        from backupd.app.views.overview import overview

        return overview(self._wiring, self._wiring.clock(), servers)

    def places(self) -> tuple[PlaceView, ...]:
        """Every destination at a glance; waits for none."""
        from backupd.app.views.destinations import places

        return places(self._wiring, self._wiring.clock())

    def measure(self) -> Values:
        """Everything that is measured of what the actor sees."""
        from backupd.app.views.metrics import measure

        return measure(self._wiring, self._wiring.clock(), everything=self.actor.servers is None)

    # -- inside

    def _deed(
        self, action: str, *, server: str = "", subject: str = "", detail: str = ""
    ) -> AbstractContextManager[Deed]:
        return deed(self._wiring, self.actor, action, server=server, subject=subject, detail=detail)

    @contextmanager
    def _of_backup(self, action: str, backup_id: str, *, detail: str = "") -> Iterator[Deed]:
        """What is done to a backup. Raises NotFoundError."""
        with self._deed(action, subject=backup_id, detail=detail) as told:
            told.concerns(self._backup(backup_id).server)
            yield told

    def _backup(self, backup_id: str) -> BackupRecord:
        found = self._wiring.catalog.backups.get(backup_id)
        see(self.actor, found.server, f"backup {backup_id}")
        return found

    def _concern(self, server: str) -> None:
        """Raises ForbiddenError for every server, NotFoundError for one, where the actor may not see it."""
        if server == EVERY_SERVER:
            require_all(self.actor)
        else:
            see(self.actor, server, f"server {server!r}")
