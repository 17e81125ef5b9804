"""What people may ask about incidents and messages, and do about them.

Servers: checked, accepted, and shown at a glance with their destinations and policies.

Planning restores in the process that asks, thawing for them, and what unfinished ones left.

Looking after what the rest is based on: the catalog, its copies, signatures, and what is stored at the destinations.

The whole application behind one door: what the command line, the REST interface and the page may ask for.

Each part is an object of its room. What its methods need they import themselves, and a part of a room that loads much
is made when it is asked for: a command that only lists backups need not load what restores them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from backupd.app.context.access import Access, Facade, command_line, require_all, require_known, scoped, see, seen
from backupd.app.context.settings import held_settings, load_settings
from backupd.app.context.wiring import Opening, Wiring, catalog_of
from backupd.catalog.database import WANTED
from backupd.catalog.row_mapping import EVER, Span
from backupd.catalog.session import open_catalog
from backupd.model.access import Actor
from backupd.model.backup_record import BackupKind
from backupd.model.errors import UsageError
from backupd.model.event import Event, Incident, Message, MessageState, Severity
from backupd.model.job import Report
from backupd.model.text import format_time

if TYPE_CHECKING:
    from backupd.app.backup_records import Adopted
    from backupd.app.context.keys import Issued, KeyState
    from backupd.app.context.trust import RecoveryPage
    from backupd.app.metacopies.catalog_copies import Copied
    from backupd.app.metacopies.signing_keys import Made, Rotation, Vouched
    from backupd.app.restores.catalog_rebuild import Rebuilt, RecoveredVersions
    from backupd.app.restores.execution import Leftover
    from backupd.app.restores.jobs import Thawed
    from backupd.app.restores.request import RestoreRequest
    from backupd.app.service.backups import Backups, Binlogs, Retention
    from backupd.app.service.dispatch import Foreground
    from backupd.app.service.follow_ups import FollowUps
    from backupd.app.service.requests import Jobs, Requests
    from backupd.app.verify.verification import FsckOutcome
    from backupd.app.views.clusters import Cluster
    from backupd.app.views.destinations import DestinationView
    from backupd.app.views.listing import Listings
    from backupd.app.views.policies import Explanation
    from backupd.app.views.server_status import ServerOverview
    from backupd.backup.finding import Finding
    from backupd.catalog.hosts import KnownHost
    from backupd.metrics import Values
    from backupd.model.access import Challenge
    from backupd.model.consistency import ServerConsistency
    from backupd.model.job import JobRecord
    from backupd.model.server_facts import Identity
    from backupd.model.thaw import Thawing
    from backupd.recovery.timeline import Timeline
    from restore.planning.plan import Plan
    from restore.planning.table_plan import TablePlan


PAGE = 100
"""Rows of a list when nobody says how many."""


class Alerts(Facade):
    """Incidents and the messages about them."""

    def list(
        self,
        server: str | None = None,
        *,
        is_open: bool | None = True,
        severity: Severity | None = None,
        span: Span = EVER,
        before: str | None = None,
        limit: int = PAGE,
    ) -> tuple[Incident, ...]:
        """Newest first. ``is_open`` None: those that are over, too; ``before``: only those older than the one with this
        id. Raises NotFoundError for a server that the actor may not see, and for one that is neither configured nor in
        the list."""
        found = self._wiring.catalog.incidents.list(
            seen(self._actor, server), is_open=is_open, severity=severity, span=span, before=before, limit=limit
        )
        if not found and server is not None and before is None:
            self._wiring.settings.server(server)
        return found

    def messages(
        self,
        *,
        state: MessageState | None = None,
        incident: str | None = None,
        span: Span = EVER,
        before: str | None = None,
        limit: int = PAGE,
    ) -> tuple[Message, ...]:
        """Newest first. One message may be about many servers, so they are for those who see all. Raises
        ForbiddenError."""
        require_all(self._actor)
        return self._wiring.catalog.messages.list(state=state, incident=incident, span=span, before=before, limit=limit)

    def test(self, *, wait: bool = True) -> tuple[Message, ...]:
        """Send a test by every channel; how each fared. Without ``wait`` the service sends it. Raises ForbiddenError,
        RefusedError without any, DeliveryError."""
        from backupd.app.alerting.service import send_test

        require_all(self._actor)
        with self._audited("alerts-tested") as action:
            sent = send_test(self._wiring, self._actor.name, wait=wait)
            action.detail = ", ".join(f"{one.channel} {one.state}" for one in sent)
            return sent

    def acknowledge(self, incident_id: str) -> Incident:
        """No reminders any more. Raises NotFoundError, RefusedError when it is over or acknowledged."""
        with self._audited("alert-acknowledged", subject=incident_id) as action:
            incident = self._wiring.catalog.incidents.get(incident_id)
            see(self._actor, incident.server, f"incident {incident_id}")
            action.concerns(incident.server)
            return self._wiring.catalog.incidents.acknowledge(incident_id, self._actor.name, self._wiring.clock())


class Servers(Facade):
    """The configured servers."""

    def check(self, server: str | None, labels: Collection[str] = ()) -> Sequence[Finding]:
        """What would make backups fail or worthless, the worst first; of every server without ``server``, of those with
        ``labels`` if there are any."""
        from backupd.app.service.check import check

        return check(self._wiring, server, self._wiring.settings.labelled(labels, server) if labels else None)

    def accept(self, server: str) -> Identity:
        """The other server that answers under the name of ``server`` is the right one from now on."""
        from backupd.app.context import server_identity as identity

        with self._audited("server-accepted", server=server) as action:
            self._see_server(server)
            found = identity.accept(self._wiring, server, self._actor.name)
            action.subject = found.uuid
            return found

    def usual_kind(self, server: str) -> BackupKind:
        """A full backup, where its policy takes physical ones, else a logical one. Raises NotFoundError, and
        ConfigurationError where the policy is broken."""
        policy = self._wiring.settings.server(server).policy
        dumps_only = policy.physical is None and policy.logical is not None
        return BackupKind.LOGICAL if dumps_only else BackupKind.PHYSICAL_FULL

    def overview(self, servers: Collection[str] | None = None) -> tuple[ServerOverview, ...]:
        """Every server at a glance, or those of ``servers``. Raises NotFoundError."""
        from backupd.app.views.overview import overview

        return overview(self._wiring, self._wiring.clock(), servers)

    def cluster(self, server: str) -> Cluster:
        """The Galera cluster that it is a node of, asked now, and how a restored node would come back. Raises
        NotFoundError, RefusedError where no node of one answers."""
        from backupd.app.views.clusters import cluster

        self._see_server(server)
        return cluster(self._wiring, server)

    def consistency(self, server: str) -> ServerConsistency:
        """Whether it holds what its source does, by the checks that there were. Raises NotFoundError."""
        from backupd.app.verify.consistency import view

        self._see_server(server)
        return view(self._wiring, server)

    def timeline(self, server: str) -> Timeline:
        """Which moments are recoverable, by branch, with gaps. Raises NotFoundError."""
        from backupd.app.views.timeline import timeline

        self._see_server(server)
        return timeline(self._wiring, server)

    def explain(self, policy: Path, server: str | None) -> Explanation:
        """What a policy file, in use or not yet, does to a server of this installation."""
        from backupd.app.views.policies import explain_here

        return explain_here(self._wiring, policy, server)


class Installation(Facade):
    """What concerns all servers together."""

    def destinations(self) -> tuple[DestinationView, ...]:
        """Every destination at a glance; waits for none."""
        from backupd.app.views.destinations import destination_views

        return destination_views(self._wiring, self._wiring.clock())

    def hosts(self) -> tuple[KnownHost, ...]:
        """Every host that uses this catalog, by name."""
        return self._wiring.catalog.hosts.all(self._wiring.clock())

    def forget_host(self, name: str) -> None:
        """Forget a host that is no more. Raises NotFoundError, RefusedError while it is needed."""
        with self._audited("host-forgotten", subject=name):
            require_all(self._actor)
            self._wiring.catalog.hosts.forget(name, self._wiring.clock())

    def zone(self) -> ZoneInfo | None:
        """In which people may write times without an offset, and are shown them beside UTC; None where the
        configuration names none."""
        configuration = self._wiring.settings.configuration
        return ZoneInfo(configuration.timezone) if "timezone" in configuration.model_fields_set else None

    def moment(self, text: str) -> datetime:
        """The moment that a time without an offset means in that zone. Raises UsageError."""
        from backupd.model.local_time import read_local

        zone = self.zone()
        if zone is None:
            raise UsageError(
                f"{text!r} has no offset, and the configuration names no time zone",
                hint="write 2026-11-21T09:41:03Z or 2026-11-21T10:41:03+01:00; or set `timezone: Europe/Berlin` in "
                f"{self._wiring.settings.file}, to write times as they are there",
            )
        return read_local(text, zone, self._wiring.clock())

    def reload(self) -> Event:
        """Let the service of this host read its configuration anew; gives its answer. Raises RefusedError where no
        service runs here, BackupdError where it does not answer."""
        from backupd.app.service.reload import reload

        require_all(self._actor)
        with self._audited("policies-reloaded"):
            return reload(self._wiring)

    def measure(self) -> Values:
        """Everything that is measured of what the actor sees."""
        from backupd.app.views.metrics import measure

        return measure(self._wiring, self._wiring.clock(), everything=self._actor.servers is None)


class Restores(Facade):
    """Restores of servers and of tables."""

    def plan(self, request: RestoreRequest) -> Plan:
        """What a restore of a whole server would do. Moves nothing."""
        from backupd.app.restores.plan import plan

        if request.replicate_from:
            from backupd.app.restores.new_replica import planned_whole

            return planned_whole(self._wiring, request)[0]
        datadir = Path(request.datadir) if request.datadir else None
        found = plan(self._wiring, request.server, request.target, datadir, options=request.options)
        if not request.of_node:
            return found
        from backupd.app.restores.donors import with_forecast

        return with_forecast(self._wiring, request.server, found)

    def plan_tables(self, request: RestoreRequest) -> TablePlan:
        """What a restore of tables would do. Moves nothing."""
        from backupd.app.restores.table_sources import chosen_way

        return chosen_way(self._wiring, request.server, request.target, request.table_options)[0]

    def thaw(
        self, server: str, target: str, *, tier: str | None = None, days: int | None = None, tables: Sequence[str] = ()
    ) -> Thawed:
        """Ask for what a restore to ``target`` (of ``tables`` only, where some are named) needs out of archives."""
        from backupd.app.restores.jobs import thaw_for
        from backupd.app.restores.request import RestoreOptions

        options = RestoreOptions(thaw=tier or "", days=days or 0)
        with self._audited("thaw-requested", server=server, detail=target):
            return thaw_for(self._wiring, server, target, options, tables, self._actor.name)

    def thaws(self, server: str | None) -> Sequence[tuple[JobRecord, Thawing]]:
        """Every thaw that the catalog remembers, newest first; those that wait are looked at where it is time."""
        from backupd.app.restores.jobs import thaws

        if server is not None:
            require_known(self._wiring, server)
        return [(job, thawing) for job, thawing in thaws(self._wiring, server) if self._actor.sees(job.server)]

    def raise_thaw(self, job_id: str, tier: str) -> tuple[JobRecord, Thawing]:
        """Ask for what has not come yet at a faster tier."""
        from backupd.app.restores.jobs import raised

        with self._audited("thaw-raised", server=self._job(job_id).server, subject=job_id, detail=tier):
            return raised(self._wiring, job_id, tier)

    def leftovers(self, server: str, drop: str | None = None) -> tuple[Leftover, ...]:
        """What unfinished restores of tables left on a server; ``drop``: the id of one, or ``all``."""
        from backupd.app.restores.execution import leftovers

        if drop is None:
            return leftovers(self._wiring, server)
        with self._audited("leftovers-dropped", server=server, subject=drop):
            return leftovers(self._wiring, server, drop=drop)


class Maintenance(Facade):
    """The catalog, its copies, and what is at the destinations."""

    def rebuild(
        self,
        destination: str,
        report: Report,
        *,
        merge: bool = False,
        adopt: bool = False,
        failed_at: datetime | None = None,
        counters: Mapping[str, int] | None = None,
    ) -> Rebuilt:
        """The catalog from what is stored at one destination; ``merge``: into one that is not empty; ``adopt``: what
        that did not know counts as ours, too; ``failed_at``, ``counters``: what shows whether the destination was
        turned back (see ``heads.compare``)."""
        from backupd.app.metacopies.signed_heads import compare, lists_compared
        from backupd.app.restores.catalog_rebuild import rebuild

        with self._audited("catalog-rebuilt", subject=destination, detail="merged" if merge else ""):
            seen = compare(self._wiring, failed_at=failed_at, counters=counters)
            done = rebuild(self._wiring, destination, report, merge=merge, adopt=adopt)
            return replace(
                done,
                heads=seen.lines,
                problems=(*done.problems, *seen.suspicions),
                elsewhere=lists_compared(self._wiring),
            )

    def adopt(self, names: Sequence[str]) -> tuple[Adopted, ...]:
        """Foreign backups, or all those of servers: they count as ours from now on."""
        from backupd.app.backup_records import adopt

        with self._audited("backups-adopted", subject=", ".join(names)):
            return adopt(self._wiring, names)

    def copy(self) -> tuple[Copied, ...]:
        """Catalog, configuration, proofs and RECOVER.md to every destination, now."""
        from backupd.app.metacopies.catalog_copies import write_copies

        return write_copies(self._wiring, now=True)

    def sign(self, destination: str, *, unproven: bool = False) -> Vouched:
        """Sign what is stored there unsigned and is what the runs of this catalog stored; ``unproven``: also what
        merely agrees with the catalog."""
        from backupd.app.metacopies.signing_keys import vouch

        with self._audited("documents-signed", subject=destination, detail="unproven" if unproven else ""):
            return vouch(self._wiring, destination, unproven=unproven)

    def look_back(self, destination: str, since: datetime) -> RecoveredVersions:
        """What was hidden or overwritten there since then and can be brought back."""
        from backupd.app.restores.catalog_rebuild import versions_to_recover

        return versions_to_recover(self._wiring, destination, since)

    def bring_back(self, destination: str, since: datetime, report: Report) -> RecoveredVersions:
        """Undo deletions and overwrites made there after ``since``, where the store keeps versions."""
        from backupd.app.restores.catalog_rebuild import recover_versions

        with self._audited("brought-back", subject=destination, detail=f"since {format_time(since)}"):
            return recover_versions(self._wiring, destination, since, report)

    def fsck(self, *, repair: bool) -> FsckOutcome:
        """Compare catalog, manifests and objects; ``repair``: remove leftovers and correct what can be."""
        from backupd.app.views.examination import fsck

        if not repair:
            return fsck(self._wiring, mend=False)
        with self._audited("repaired"):
            return fsck(self._wiring, mend=True)


class Keys(Facade):
    """The keys of the backups."""

    def list(self) -> Sequence[KeyState]:
        """Configured keys and those that backups are sealed for. Raises KeyUnusableError, ToolError."""
        from backupd.app.context.keys import keys

        return keys(self._wiring)

    def challenge(self, recipient: str | None) -> Sequence[Issued]:
        """Ask the holder of ``recipient``, or of every key, to prove it. Raises NotFoundError."""
        from backupd.app.context.keys import challenge

        return challenge(self._wiring, recipient)

    def get_challenge(self, challenge_id: str) -> Challenge:
        """Raises NotFoundError."""
        return self._wiring.catalog.challenges.get(challenge_id)

    def answer(self, challenge_id: str, phrase: str) -> Challenge:
        """Record the phrase that the holder decrypted. Raises NotFoundError, RefusedError for a wrong one."""
        from backupd.app.context.keys import answer

        with self._audited("key-answered", subject=challenge_id):
            return answer(self._wiring, challenge_id, phrase, self._actor.name)

    def recovery_page(self) -> RecoveryPage:
        """The page to keep on paper. Raises RefusedError where nothing is signed."""
        from backupd.app.context.trust import recovery_page
        from backupd.app.metacopies.signing_keys import replaced

        return recovery_page(self._wiring.settings, replaced(self._wiring))

    def make_signing(self) -> Made:
        """A first key that signs; the configuration has to name it."""
        from backupd.app.metacopies.signing_keys import make_signing

        with self._audited("signing-key-made") as action:
            done = make_signing(self._wiring)
            action.subject = done.key
            return done

    def rotate_signing(self, *, to: str | None = None, former: str | None = None, unproven: bool = False) -> Rotation:
        """Another key that signs, in two steps; see ``signingkeys.rotate_signing``."""
        from backupd.app.metacopies.signing_keys import rotate_signing

        with self._audited("signing-key-rotated", detail="unproven" if unproven else "") as action:
            done = rotate_signing(self._wiring, to=to, former=former, unproven=unproven)
            action.subject = done.key
            action.detail = f"{'in the place of' if done.finished else 'beside'} {done.former}"
            return done


class Service:
    """Use as ``with Service.open(path) as service``. Methods of its parts raise errors of backupd.model.errors."""

    def __init__(self, wiring: Wiring, revision: str, actor: Actor | None = None) -> None:
        """``actor``: who asks; without one it is whoever calls this program.
        ``revision``: of the catalog's tables, which opening the service brought there."""
        self.actor = actor or command_line()
        self._wiring = scoped(wiring, self.actor)
        self.revision = revision
        self.access = Access(self._wiring, self.actor)
        self.alerts = Alerts(self._wiring, self.actor)
        self.installation = Installation(self._wiring, self.actor)
        self.keys = Keys(self._wiring, self.actor)
        self.maintenance = Maintenance(self._wiring, self.actor)
        self.restores = Restores(self._wiring, self.actor)
        self.servers = Servers(self._wiring, self.actor)

    @classmethod
    @contextmanager
    def open(
        cls, config_path: Path, held: Path | None = None, opening: Opening = Opening.MAKES, *, new_catalog: bool = False
    ) -> Iterator[Service]:
        """Read the configuration and open the catalog. ``held``: the settings that a service has in force, which then
        count instead of the files. ``opening``: what becomes of a catalog that is not there; ``new_catalog``: as
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
        # A service has its catalog open: where it is gone, an empty one must not replace it.
        with open_catalog(settings.catalog, make=False) as catalog:
            yield cls(Wiring(settings, catalog), WANTED)

    def acting(self, actor: Actor) -> Service:
        """The same for ``actor``: what it asks for and changes is recorded under its name, and servers that it may not
        see are not there."""
        return Service(self._wiring, self.revision, actor)

    def labelled(self, labels: Collection[str], server: str | None = None) -> Service:
        """The same for lists, as if there were no servers but those with all of these labels (KEY=VALUE); itself
        without labels. Raises UsageError where they are given beside a ``server``, UnknownNameError."""
        if not labels:
            return self
        return self.acting(replace(self.actor, servers=frozenset(self._wiring.settings.labelled(labels, server))))

    @property
    def backups(self) -> Backups:
        """Stored backups."""
        from backupd.app.service.backups import Backups

        return Backups(self._wiring, self.actor)

    @property
    def binlogs(self) -> Binlogs:
        """Archived binary logs."""
        from backupd.app.service.backups import Binlogs

        return Binlogs(self._wiring, self.actor)

    @property
    def foreground(self) -> Foreground:
        """Work that this process does itself, while somebody waits."""
        from backupd.app.service.dispatch import Foreground

        return Foreground(self._wiring, self.actor)

    @property
    def follow_ups(self) -> FollowUps:
        """What follows from the work of this process, once that has ended."""
        from backupd.app.service.follow_ups import FollowUps

        return FollowUps(self._wiring, self.actor)

    @property
    def jobs(self) -> Jobs:
        """Jobs of every state."""
        from backupd.app.service.requests import Jobs

        return Jobs(self._wiring, self.actor)

    @property
    def listings(self) -> Listings:
        """Long lists by pages, and policies."""
        from backupd.app.views.listing import Listings

        return Listings(self._wiring, self.actor)

    @property
    def requests(self) -> Requests:
        """Work to be queued, plans to be started by their id, and restores by jobs."""
        from backupd.app.service.requests import Requests

        return Requests(self._wiring, self.actor)

    @property
    def retention(self) -> Retention:
        """What the rules and holds keep."""
        from backupd.app.service.backups import Retention

        return Retention(self._wiring, self.actor)
