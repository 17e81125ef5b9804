"""How each server stands: looked at once, and kept in the catalog while nothing changed that it was made of.

Looking takes milliseconds, and there may be a thousand servers, so what was found is a row of the catalog, which says
up to which change it was made. Whoever reads all servers gets rows; what was overtaken is looked at anew by the
service, or by whoever asks for that server. Until then it is shown as it was, and is said to be behind.

Between two looks only the end of the archived binary log moves on. That is followed without a new look: as long as
nothing was lost, and no branch, run or gap came or went, a recoverable past that reached as far as the present branch
was archived goes on to what was confirmed last.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from backupd.app.context.destination_identity import identities
from backupd.app.context.logging_setup import say
from backupd.app.context.settings import ServerSettings, Settings
from backupd.app.context.wiring import Wiring
from backupd.app.copies.protection import is_protected, protection_of, sites_of, verified
from backupd.app.runtime.periodic import PeriodicCheck
from backupd.app.schedule.calendar import Leg, due_times, start_of
from backupd.app.views.growth import Share, shares
from backupd.app.views.objectives import Glance
from backupd.app.views.server_status import LastBackup, ServerOverview, Status
from backupd.app.views.timeline import timeline
from backupd.catalog.session import Catalog
from backupd.catalog.standings import Branches, Confirmed, Count, StandingRow
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState
from backupd.model.binlog import Gap
from backupd.model.document import Document, made_of, parsed
from backupd.model.errors import BackupdError, CatalogError
from backupd.recovery.timeline import Reach
from backupd.recovery.windows import believed

FORM = 3
"""Of what is kept: rows of another form are made anew."""
KEPT = timedelta(minutes=5)
"""Then a server that is asked for by name is looked at again though nothing changed: time itself changes what a restore
takes. So is one of which something was confirmed that cannot be followed."""
OLD = timedelta(hours=1)
"""The same of every other server."""
CALM = timedelta(seconds=5)
"""A server that keeps changing is not looked at more often, as long as nothing was lost."""
EVERY = timedelta(seconds=1)
"""From one search for rows that were overtaken to the next."""
BUDGET = 0.5
"""Seconds that somebody may wait for servers that nobody has looked at since they changed."""
PATIENCE = 20.0
"""The same of a forecast, which nobody waits for."""
SHARED = 1.0
"""Seconds for which one answer serves everybody, while nothing is written into the catalog."""
SCOPES = 64
"""So many answers, for tokens that see different servers, are kept."""
ROUND = 50
"""Servers that the service looks at before it searches again, so that what was lost is soon known."""
_MANY = 400
"""So many documents are read by their names; beyond that, all."""


@dataclass(frozen=True, slots=True)
class Standing(Document):
    """What a look found. ``branch``: the present one, where ``latest`` is followed by what is confirmed of it; "" where
    it is not. ``onward``: the destinations of which that is so for what each of them holds alone. ``confirmed``: what
    was confirmed of that branch before the look, by destination; it counts only as far as the look says so.
    ``trouble``: what kept it from being looked at; then nothing else is known. ``bare``: there is no backup that
    counts. ``doubts``: as of a timeline. The others: as of ``ServerOverview``."""

    latest: datetime | None = None
    first: datetime | None = None
    windows: int = 0
    gaps: tuple[Gap, ...] = ()
    reach: tuple[Reach, ...] = ()
    rto: timedelta | None = None
    last_backups: tuple[LastBackup, ...] = ()
    backups: int = 0
    protected: int = 0
    bytes_stored: int = 0
    tables_only: bool = False
    unprotected_since: datetime | None = None
    branch: str = ""
    onward: tuple[str, ...] = ()
    confirmed: Mapping[str, datetime] = field(default_factory=dict)
    trouble: str = ""
    bare: bool = False
    doubts: tuple[str, ...] = ()
    shares: tuple[Share, ...] = ()

    def moved(self, confirmed: Branches, now: datetime) -> Standing:
        """The same with what is ``confirmed`` by ``now``."""
        ends = {
            destination: end
            for destination, at in confirmed.get(self.branch, {}).items()
            if at != self.confirmed.get(destination) and (end := believed(at, now)) is not None
        }
        latest = self.latest
        if latest is not None:
            latest = max([latest, *ends.values()])
        reach = tuple(self._reached(one, ends, latest, now) for one in self.reach)
        return replace(self, latest=latest, reach=reach)

    def _reached(self, one: Reach, ends: Confirmed, latest: datetime | None, now: datetime) -> Reach:
        end = one.latest
        if end is None or latest is None:
            return one
        if one.name in self.onward:
            end = max(end, ends.get(one.name, end))
        zero = timedelta()
        return replace(one, latest=end, behind=max(latest - end, zero), rpo=max(now - end, zero))

    def misses(self, confirmed: Branches, since: datetime) -> bool:
        """Was something ``confirmed`` later than ``since`` that it does not follow?"""
        moving = {name for by_destination in confirmed.values() for name, at in by_destination.items() if at > since}
        return bool(moving) and not (self.branch and moving <= {*self.onward})


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """``at``: when it was looked at; ``behind``: something changed since."""

    at: datetime
    found: Standing
    behind: bool = False

    @property
    def view(self) -> ServerOverview:
        """What it says of the server."""
        gaps = self.found.gaps
        return made_of(
            ServerOverview,
            self.found,
            name="",
            policy="",
            status=Status.GOOD,
            gaps=len(gaps),
            gap_noticed_at=max((gap.noticed_at for gap in gaps), default=None),
        )


UNSEEN = ServerStatus(datetime.min.replace(tzinfo=UTC), Standing())
"""Of a server that nobody has looked at yet."""


@dataclass(frozen=True, slots=True)
class _Answer:
    mark: tuple[int, int] | None
    made: float
    at: datetime
    servers: tuple[ServerOverview, ...]

    def serves(self, mark: tuple[int, int] | None, now: datetime) -> bool:
        return (
            self.mark == mark
            and time.monotonic() - self.made < SHARED
            and abs(now - self.at) < timedelta(seconds=SHARED)
        )


class StatusCache:
    """Of one catalog. Threads may share it: of those who ask at once one looks, and the others get the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._basis: tuple[object, object] = (None, None)
        self._known: dict[str, tuple[StandingRow, Standing]] = {}
        self._coming: dict[tuple[str, str], tuple[Leg, datetime | None]] = {}
        self._thread: threading.Thread | None = None
        self._trouble = ""
        self._answers: dict[tuple[str, ...], _Answer] = {}

    def shared(
        self, wiring: Wiring, now: datetime, names: tuple[str, ...], make: Callable[[], tuple[ServerOverview, ...]]
    ) -> tuple[ServerOverview, ...]:
        """What ``make`` gives, or gave a moment ago, for the servers of these names."""
        with self._lock:
            if not self._is_same(wiring.settings):
                self._basis = wiring.settings.policies, wiring.settings.destinations
                for memory in (self._known, self._coming, self._answers):
                    memory.clear()
            mark = wiring.catalog.glances.mark()
            last = self._answers.get(names)
            if last is not None and last.serves(mark, now):
                return last.servers
            begun = time.monotonic()
            answer = _Answer(mark, begun, now, make())
            if len(self._answers) >= SCOPES:
                self._answers.clear()
            self._answers[names] = answer
            return answer.servers

    def _is_same(self, settings: Settings) -> bool:
        """Were these read in one go with those that all here was found by? They may be narrowed to some servers."""
        policies, destinations = self._basis
        return policies is settings.policies and destinations is settings.destinations

    def of(
        self, wiring: Wiring, names: Iterable[str], now: datetime, only: Collection[str] | None = None
    ) -> dict[str, ServerStatus]:
        """What is kept of these servers. Those that came or changed are looked at now, as far as BUDGET allows; the
        rest in the background, and one that nobody has looked at yet is missing meanwhile. ``only``: whose rows are
        read, None: those of every server. Raises CatalogError."""
        rows, confirmed = wiring.catalog.standings.rows(only)
        self._read(wiring, rows)
        bases = Bases(wiring)
        busy = self._thread is not None and self._thread.is_alive()
        deadline = time.monotonic() + (BUDGET / 4 if busy else BUDGET)
        found: dict[str, ServerStatus] = {}
        later: list[str] = []
        for name in sorted(names, key=lambda one: one not in rows or not rows[one].has_lost):
            row = rows.get(name) if name in self._known else None
            overtaken = row is None or row.made != row.now or not bases.is_of(name, row, now)
            if overtaken and time.monotonic() < deadline:
                new = looked(wiring, name, now)
                found[name] = ServerStatus(now, new.found)
                if not self._is_kept(wiring, new):
                    deadline = 0.0
                continue
            if row is not None:
                standing, ends = self._known[name][1], confirmed.get(name, {})
                found[name] = bases.status(row, standing, ends, now)
                kept = KEPT if only is not None or standing.misses(ends, row.made_at) else OLD
                overtaken = overtaken or not timedelta(0) <= now - row.made_at < kept
            if overtaken or row is None:
                later.append(name)
        if later and not busy:
            # A daemon thread: whoever asks next begins where it was.
            self._thread = threading.Thread(target=self._catch_up, args=(wiring, later), name="standing", daemon=True)
            self._thread.start()
        return found

    def kept(self, wiring: Wiring, now: datetime) -> dict[str, ServerStatus]:
        """What is kept of every configured server; nobody is looked at. Raises CatalogError."""
        rows, confirmed = wiring.catalog.standings.rows()
        self._read(wiring, rows)
        bases = Bases(wiring)
        return {
            name: bases.status(rows[name], self._known[name][1], confirmed.get(name, {}), now)
            for name in wiring.settings.servers
            if name in rows and name in self._known
        }

    def _is_kept(self, wiring: Wiring, new: Look) -> bool:
        """A catalog that takes nothing (its disk is full, say) can still be read, and whoever asks gets an answer."""
        trouble = ""
        try:
            new.keep(wiring.catalog)
        except CatalogError as error:
            trouble = str(error)
            if trouble != self._trouble:
                say("standing-trouble", f"{new.server}: {error}", level=logging.WARNING)
        self._trouble = trouble
        return not trouble

    def _read(self, wiring: Wiring, rows: Mapping[str, StandingRow]) -> None:
        """The documents of rows that are others than before."""
        new = [name for name, row in rows.items() if name not in self._known or not self._known[name][0].is_same(row)]
        if not new:
            return
        for name, document in wiring.catalog.standings.documents(None if len(new) > _MANY else new).items():
            self._known.pop(name, None)
            if name in rows and (standing := read(document)) is not None:
                self._known[name] = rows[name], standing

    def _catch_up(self, wiring: Wiring, names: Sequence[str]) -> None:
        """Work at half speed: those who ask meanwhile come first."""
        for name in names:
            begun = time.monotonic()
            if not self._is_same(wiring.settings):
                return
            try:
                look(wiring, name, wiring.clock())
            except BackupdError as error:  # whoever asks next learns of it, where it is more than a moment's trouble
                say("standing-trouble", f"{name}: {error}", level=logging.WARNING)
                return
            time.sleep(time.monotonic() - begun)

    def coming(self, leg: Leg, now: datetime) -> datetime | None:
        """When the next run of ``leg`` starts."""
        known = self._coming.get(leg.key)
        if known is None or known[0] != leg or (known[1] is not None and known[1] <= now):
            starts = (start_of(leg, due) for due in due_times(leg, now - leg.jitter))
            known = (leg, next((start for start in starts if start > now), None))
            self._coming[leg.key] = known
        return known[1]


_ALL: weakref.WeakKeyDictionary[Catalog, StatusCache] = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


def status_cache(catalog: Catalog) -> StatusCache:
    """Those of an open catalog, the same ones each time."""
    with _MAKING:
        return _ALL.setdefault(catalog, StatusCache())


def glances(wiring: Wiring, now: datetime) -> dict[str, Glance]:
    """Of the servers that nothing changed since somebody looked. Raises CatalogError."""
    return {
        name: made_of(Glance, one.found)
        for name, one in status_cache(wiring.catalog).kept(wiring, now).items()
        if not one.behind and not one.found.trouble
    }


class Bases:
    """What of the configuration each standing is made of, as a digest."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._digests: dict[str, str] = {}
        repositories, configured = identities(wiring), wiring.settings.destinations
        # Not which repository it is, which each host has to see for itself: only which names are of one.
        first = {repository: name for name, repository in sorted(repositories.items(), reverse=True)}
        self._shared = json.dumps(
            [
                FORM,
                {
                    name: [first[repositories[name]] if name in repositories else None, one.is_off_site]
                    for name, one in sorted(configured.items())
                },
            ]
        )

    def of(self, name: str) -> str:
        """Of a configured server."""
        server = self._wiring.settings.server(name)
        key = server.policy_name if server.usable else ""
        if key not in self._digests:
            self._digests[key] = hashlib.sha256(f"{self._shared}{_policy(server)}".encode()).hexdigest()
        return self._digests[key]

    def is_of(self, name: str, row: StandingRow, now: datetime) -> bool:
        """Was it made of this configuration, and by a clock that can be right? A look that failed counts for a while,
        so that it is not repeated all the time."""
        if believed(row.made_at, now) is None:
            return False  # what is not recoverable yet may have been the past then
        basis = self.of(name)
        return row.basis == basis or (row.basis == _of_failed(basis) and timedelta(0) <= now - row.made_at < KEPT)

    def status(self, row: StandingRow, found: Standing, confirmed: Branches, now: datetime) -> ServerStatus:
        """What goes on is followed only while nothing was lost since the look: a row must not show more than there
        is."""
        same = self.is_of(row.server, row, now)
        follows = same and not row.has_lost
        found = found.moved(_configured(self._wiring, confirmed) if follows else {}, now)
        return ServerStatus(row.made_at, found, behind=not same or row.made != row.now)


def _of_failed(basis: str) -> str:
    return f"-{basis[1:]}"


def _policy(server: ServerSettings) -> str:
    return server.policy.model_dump_json() if server.usable else ""


def _configured(wiring: Wiring, confirmed: Branches) -> Branches:
    known = wiring.settings.destinations
    return {
        branch: {name: at for name, at in by_destination.items() if name in known}
        for branch, by_destination in confirmed.items()
    }


def read(document: str) -> Standing | None:
    """None for what another version of this program kept."""
    try:
        return Standing.from_json(parsed(document))
    except (KeyError, TypeError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Look:
    """What was found, of which changes and of which configuration."""

    server: str
    at: datetime
    count: Count
    basis: str
    found: Standing

    def keep(self, catalog: Catalog) -> Standing:
        """Gives what was found. Raises CatalogError."""
        catalog.standings.keep(self.server, self.count, self.basis, self.at, json.dumps(self.found.as_json()))
        return self.found


def looked(wiring: Wiring, name: str, now: datetime) -> Look:
    """Look at a server. Raises CatalogError; any other trouble is that of this server alone."""
    standings, basis = wiring.catalog.standings, Bases(wiring).of(name)
    count, before = standings.count(name), standings.confirmed(name)
    try:
        found = seen(wiring, name)
        return Look(name, now, count, basis, replace(found, confirmed=before.get(found.branch, {})))
    except CatalogError:
        raise
    except BackupdError as error:
        trouble = str(error)
    except Exception as error:  # noqa: BLE001  what is wrong with one must not hide the others; all is reported
        say("standing-trouble", f"{name}: {''.join(traceback.format_exception(error))}", level=logging.ERROR)
        trouble = f"internal error: {type(error).__name__}: {error}"
    return Look(name, now, count, _of_failed(basis), Standing(trouble=trouble))


def look(wiring: Wiring, name: str, now: datetime) -> Standing:
    """Look at a server, and keep what was found. Raises CatalogError; any other trouble is that of this server
    alone."""
    return looked(wiring, name, now).keep(wiring.catalog)


def seen(wiring: Wiring, name: str) -> Standing:
    """What a look at all that is recorded of a server finds, but for what is confirmed."""
    records = wiring.catalog.backups.list(name)
    found = timeline(wiring, name, records)
    complete = [one for one in records if one.state is BackupState.COMPLETE]
    wanted, sites = protection_of(wiring, name), sites_of(wiring)
    walk = verified(records, sites)
    good = [one for one in complete if is_protected(one, walk, wanted, sites)]
    newest = max((one.finished_at for one in good), default=None)
    later = [one.finished_at for one in complete if newest is None or one.finished_at > newest]
    alive = [one for one in records if one.state is not BackupState.DELETED]
    return Standing(
        latest=found.latest,
        first=min((window.begin for window in found.windows), default=None),
        windows=len(found.windows),
        gaps=found.gaps,
        reach=found.destinations,
        rto=found.predicted_rto,
        last_backups=_last(complete),
        backups=len(complete),
        protected=len(good),
        bytes_stored=max(
            sum(one.stats.bytes_new for one in alive), max((one.stats.bytes_stored for one in alive), default=0)
        ),
        tables_only=found.tables_only,
        unprotected_since=min(later, default=None),
        branch=found.branches[-1].id if found.goes_on else "",
        onward=found.onward,
        bare=all(one.apart for one in records),
        doubts=found.doubts,
        shares=shares(records, wiring.catalog.binlogs.runs(name), wiring.clock()),
    )


def shares_of_all(wiring: Wiring, now: datetime) -> Sequence[tuple[str, tuple[Share, ...]]]:
    """Of every server that the catalog knows; none as long as there are servers that nobody has looked at. Raises
    CatalogError."""
    catalog, bases = wiring.catalog, Bases(wiring)
    rows, _confirmed = catalog.standings.rows()
    documents = catalog.standings.documents()
    deadline = time.monotonic() + PATIENCE
    found = []
    for name in catalog.standings.servers():
        row = rows.get(name)
        known = read(documents[name]) if name in documents else None
        if name not in wiring.settings.servers:
            found.append((name, shares(catalog.backups.list(name), catalog.binlogs.runs(name), now)))
            continue
        overtaken = row is None or known is None or row.made != row.now or not bases.is_of(name, row, now)
        if overtaken and time.monotonic() < deadline:
            known = look(wiring, name, now)
        if known is None:
            return ()
        found.append((name, known.shares))
    return found


def _last(complete: Iterable[BackupRecord]) -> tuple[LastBackup, ...]:
    """By kind, then by set of tables."""
    newest: dict[tuple[int, str], BackupRecord] = {}
    for one in complete:
        key = list(BackupKind).index(one.kind), one.table_set
        if key not in newest or newest[key].finished_at < one.finished_at:
            newest[key] = one
    return tuple(
        made_of(
            LastBackup,
            one,
            bytes_source=one.stats.bytes_source,
            bytes_stored=one.stats.bytes_stored,
            bytes_new=one.stats.bytes_new,
        )
        for _key, one in sorted(newest.items(), key=lambda item: item[0])
    )


def _is_recent(row: StandingRow, now: datetime) -> bool:
    """Is it too early to look again?"""
    return timedelta(0) <= now - row.made_at < (OLD if row.made == row.now else CALM)


class StandingsWatch(PeriodicCheck):
    """Of the service: looks at servers whose rows were overtaken."""

    def __init__(self) -> None:
        super().__init__("standings", EVERY)

    def _names(self, wiring: Wiring) -> Sequence[str]:
        rows, _confirmed = wiring.catalog.standings.rows()
        bases, now = Bases(wiring), wiring.clock()
        lost, other = [], []
        for name in wiring.settings.servers:
            row = rows.get(name)
            if row is not None and row.has_lost:
                lost.append(name)
            elif row is None or not bases.is_of(name, row, now) or not _is_recent(row, now):
                other.append(name)
        return [*lost, *other][:ROUND]

    def _look(self, wiring: Wiring, name: str, now: datetime) -> None:  # noqa: ARG002  it is when the round began
        begun = time.monotonic()
        look(wiring, name, wiring.clock())
        time.sleep(time.monotonic() - begun)  # at half speed: others come first
