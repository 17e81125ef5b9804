"""Long lists for users: page by page, newest first, and only of what they may see; and what changed in the catalog
since the last look (``CatalogChanges``), for pages that are open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Protocol, TypedDict, Unpack

from backupd.app.context.access import Facade, require_known, see, seen
from backupd.app.context.wiring import Wiring
from backupd.catalog.jobs import OPEN
from backupd.catalog.row_mapping import Listed, Span
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState
from backupd.model.errors import NotFoundError
from backupd.model.event import Event, Severity
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.model.proof import Proof
from backupd.model.thaw import Thawing

if TYPE_CHECKING:
    from backupd.app.restores.progress import RestoreView
    from backupd.app.views.policies import PolicyView, Validation
    from backupd.app.views.server_status import ServerOverview


_LOOKED_AT = 1000
_NEARLY = 0.85
"""Of 25 characters up to three are wrong or missing."""


class Paging(TypedDict, total=False):
    """``span``: of the times by which the list is sorted; ``limit``: the most rows, 100 when nobody says how many;
    ``after``: the cursor of the page before."""

    span: Span
    limit: int
    after: str | None


class Named(Protocol):
    """What the catalog calls by an id."""

    @property
    def id(self) -> str:
        """Its id."""


class Listings(Facade):
    """For one actor. Servers that are not configured any more still have rows."""

    def servers(self) -> tuple[str, ...]:
        """Those of the configuration, by name."""
        return tuple(sorted(self._wiring.settings.servers))

    def overview(
        self, *, status: str | None = None, limit: int | None = None, after: str | None = None
    ) -> Listed[ServerOverview]:
        """Servers at a glance, in the order of the configuration, with this status; all of them without ``limit``.
        Where no status is asked for, only those of the page are looked at. Raises UsageError for what is no cursor."""
        from backupd.app.views.overview import FEW, overview

        names = Listed.part(tuple(self._wiring.settings.servers), None, after, str).items
        now, most = self._wiring.clock(), len(names) if limit is None else limit
        if status is None:
            part = Listed.of(names, most, str)
            return Listed(overview(self._wiring, now, part.items), part.next)
        found: list[ServerOverview] = []
        step = FEW if most < len(names) else max(most, 1)
        for start in range(0, len(names), step):
            found += (one for one in overview(self._wiring, now, names[start : start + step]) if one.status == status)
            if len(found) > most:
                break
        return Listed.of(found, most, lambda one: one.name)

    def backups(
        self,
        server: str | None = None,
        *,
        kind: BackupKind | None = None,
        state: BackupState | None = None,
        **page: Unpack[Paging],
    ) -> Listed[BackupRecord]:
        """Deleted ones (within their grace period) too."""
        from backupd.app.copies.protection import with_protection

        found = self._wiring.catalog.backups.page(self._seen(server), kind=kind, state=state, **page)
        return Listed(tuple(with_protection(self._wiring, list(found.items))), found.next)

    def backup(self, backup_id: str) -> BackupRecord:
        """As the catalog has it: no destination is asked. Raises NotFoundError."""
        from backupd.app.copies.protection import with_protection

        return with_protection(self._wiring, [self._backup(backup_id)])[0]

    def family(self, record: BackupRecord) -> tuple[BackupRecord, ...]:
        """Of a backup that the actor was shown: what it builds on, itself, and what was built on it directly."""
        return self._wiring.catalog.backups.family(record)

    def jobs(
        self,
        server: str | None = None,
        *,
        kind: str | None = None,
        state: JobState | None = None,
        **page: Unpack[Paging],
    ) -> Listed[JobRecord]:
        """Of every state and kind, newest first. Raises NotFoundError for an unknown server."""
        return self._wiring.catalog.jobs.page(self._seen(server), kind=kind, state=state, **page)

    def thaws(self, server: str | None = None, **page: Unpack[Paging]) -> Listed[tuple[JobRecord, Thawing]]:
        """As they were when the service looked last: nobody is asked."""
        found = self.jobs(server, kind=JobKind.THAW, **page)
        count = self._wiring.catalog.thaws.count
        return Listed(tuple((job, count(job.id)) for job in found.items), found.next)

    def proofs(
        self,
        server: str | None = None,
        *,
        backup: str | None = None,
        outcome: str | None = None,
        **page: Unpack[Paging],
    ) -> Listed[Proof]:
        """Test restores, newest first. Raises NotFoundError for an unknown server."""
        return self._wiring.catalog.proofs.page(self._seen(server), backup_id=backup, outcome=outcome, **page)

    def proof(self, proof_id: str) -> Proof:
        """Raises NotFoundError."""
        found = self._wiring.catalog.proofs.get(proof_id)
        see(self._actor, found.server, f"proof {proof_id}")
        return found

    def restores(
        self, server: str | None = None, *, state: JobState | None = None, **page: Unpack[Paging]
    ) -> Listed[RestoreView]:
        """Restores with how far each is, newest first. Raises NotFoundError for an unknown server."""
        from backupd.app.restores.progress import view

        found = self._wiring.catalog.restores.page(self._seen(server), state=state, **page)
        return Listed(tuple(view(self._wiring, record) for record in found.items), found.next)

    def events(
        self,
        server: str | None = None,
        *,
        kind: str | None = None,
        job: str | None = None,
        severity: Severity | None = None,
        **page: Unpack[Paging],
    ) -> Listed[Event]:
        """Newest first. Raises NotFoundError for an unknown server."""
        return self._wiring.catalog.events.page(self._seen(server), kind=kind, job_id=job, severity=severity, **page)

    def server_is_present(self, name: str) -> tuple[bool, str]:
        """Is the server in rotation, as far as backups are concerned? Else why not. Raises NotFoundError."""
        from backupd.app.backups.rotation_hooks import presence

        self._wiring.settings.server(name)
        return presence(self._wiring, name)

    def policies(self) -> tuple[PolicyView, ...]:
        """Each that there is, by name; for who sees some servers only, those that these follow."""
        from backupd.app.views.policies import policies

        return policies(self._wiring, every=self._actor.servers is None)

    def policy(self, name: str) -> PolicyView:
        """Raises NotFoundError."""
        found = next((one for one in self.policies() if one.name == name), None)
        if found is None:
            raise NotFoundError(f"there is no policy {name[:80]!r}", hint="GET /v1/policies lists them")
        return found

    def validate_policy(self, text: str, name: str = "policy") -> Validation:
        """What is wrong with a policy file of this text, with lines, and what a careful operator would change."""
        from backupd.app.views.policies import validate

        return validate(self._wiring, text, name)

    def resembling(self, kind: str, name: str) -> str:
        """``; did you mean `...`?`` where something of this kind is called nearly so, among the newest; else ""."""
        catalog = self._wiring.catalog
        newest: dict[str, Callable[[], Iterable[Named]]] = {
            "backup": lambda: catalog.backups.page(limit=_LOOKED_AT).items,
            "job": lambda: catalog.jobs.list(limit=_LOOKED_AT),
            "proof": lambda: catalog.proofs.page(limit=_LOOKED_AT).items,
            "incident": lambda: catalog.incidents.list(limit=_LOOKED_AT),
            "token": catalog.tokens.list,
            "challenge": catalog.challenges.list,
        }
        close = get_close_matches(name, [one.id for one in newest[kind]()], n=1, cutoff=_NEARLY)
        return f"; did you mean `{close[0]}`?" if close else ""

    def _seen(self, server: str | None) -> tuple[str, ...] | None:
        found = seen(self._actor, server)
        if server is not None:
            require_known(self._wiring, server)
        return found


_PATIENCE = timedelta(seconds=30)
"""How long an event may take from its number to its commit; other numbers may be seen before."""
_FRESH = timedelta(minutes=1)
"""A job that was queued, and over, between two looks is found for so long."""


@dataclass(frozen=True, slots=True)
class Change:
    """``events`` in the order of their numbers; ``jobs`` as they are now."""

    events: tuple[Event, ...]
    jobs: tuple[JobRecord, ...]


class CatalogChanges:
    """What is there when it is made is no news. Used by one thread at a time; raises CatalogError."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._newest = wiring.catalog.events.newest()
        self._missing: dict[int, datetime] = {}
        self._known = {job.id: _shown(job) for job in self._jobs()}

    def look(self) -> Change:
        """What came or changed since the look before. Raises CatalogError."""
        return Change(self._events(), self._changed())

    def _events(self) -> tuple[Event, ...]:
        """Numbers are given before the commit, so one may come after a higher one: it is waited for."""
        now = self._wiring.clock()
        self._missing = {number: since for number, since in self._missing.items() if now - since < _PATIENCE}
        before = min(self._missing, default=self._newest + 1) - 1
        found = [
            event
            for event in self._wiring.catalog.events.since(before)
            if event.number > self._newest or event.number in self._missing
        ]
        for event in found:
            if event.number > self._newest:
                self._missing |= dict.fromkeys(range(self._newest + 1, event.number), now)
                self._newest = event.number
            else:
                del self._missing[event.number]
        return tuple(found)

    def _changed(self) -> tuple[JobRecord, ...]:
        before = self._known
        now = {job.id: _shown(job) for job in self._jobs()}
        gone = [_shown(job) for job in self._still(before.keys() - now.keys())]
        self._known = now
        return tuple(job for job in (*gone, *now.values()) if before.get(job.id) != job)

    def _jobs(self) -> Iterable[JobRecord]:
        """Those that are not over, and the newest."""
        jobs = self._wiring.catalog.jobs
        found = {job.id: job for job in jobs.list(since=self._wiring.clock() - _FRESH)}
        return (found | {job.id: job for job in jobs.list(state=OPEN)}).values()

    def _still(self, ids: Iterable[str]) -> Iterable[JobRecord]:
        for job_id in sorted(ids):
            try:
                yield self._wiring.catalog.jobs.get(job_id)
            except NotFoundError:
                continue


def _shown(job: JobRecord) -> JobRecord:
    """Without what changes all the time and nobody is shown."""
    return replace(job, heartbeat_at=None, token=0, owner="")
