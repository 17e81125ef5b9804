"""The page of one server: its timeline as a drawing, with a moment to choose and its plan; its backups and what comes
next. And its page of retention: what the rules keep and what they expire, with reasons; administrators apply them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from api.auth import Acting, allowed
from api.web.drawing import EVERYTHING, SPAN_NAMES, View, backup_moment, draw, view_of
from api.web.site import Sent, link, moment_of, render
from api.web.words import Shown, problem_of
from backupd.app.restores.request import RestoreRequest
from backupd.app.retention.rules import BYTES_NOTE
from backupd.app.service.facade import Service
from backupd.model.access import Role
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState
from backupd.model.errors import BackupdError
from backupd.model.text import format_time, parse_time
from backupd.recovery.restorable import members_of
from backupd.recovery.timeline import Timeline
from restore.planning.plan import Plan
from restore.planning.target import AtBackup, AtTime, Latest, parse_target

_PROOFS = 300
_JOBS = 6
_FAMILIES = 6
"""So many chains are listed unless more are asked for."""
CHAINS_OF_A_PAGE = 60
"""So many then."""

router = APIRouter(include_in_schema=False, dependencies=[Depends(allowed(Role.VIEWER))])


@dataclass(frozen=True, slots=True)
class Choice:
    """A moment that was chosen: ``target`` as it was asked for, ``moment`` where that is known, and what came of
    planning a restore to it. ``near``: where that cannot be done, the nearest moments before and after to which it can.
    """

    target: str
    moment: datetime | None = None
    plan: Plan | None = None
    problem: Shown | None = None
    near: tuple[datetime, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """Backups that stand and fall together: a full one with everything that builds on it, by age; dumps of one set of
    tables; increments whose full one is gone."""

    title: str
    members: tuple[BackupRecord, ...]

    @property
    def bytes_source(self) -> int:
        return self.members[-1].stats.bytes_source

    @property
    def bytes_new(self) -> int:
        return sum(member.stats.bytes_new for member in self.members)

    @property
    def newest(self) -> datetime:
        return max(member.finished_at for member in self.members)

    @property
    def is_damaged(self) -> bool:
        return any(member.state is BackupState.DAMAGED for member in self.members)


@router.get("/servers/{server}")
def server_page(
    request: Request,
    service: Acting,
    server: str,
    to: str = "",
    at: str = "",
    span: str = "",
    begin: str = "",
    end: str = "",
    chains: str = "",
) -> HTMLResponse:
    """``to``: a target; ``at``: a time of the form's field, UTC without saying so; ``begin`` and ``end`` of what is
    drawn; ``chains``: ``all``, or how many are left out, as the pages before have them. What cannot be read of these is
    left out or reported, never an error of the page."""
    (shown,) = service.servers.overview([server])
    timeline = service.servers.timeline(server)
    backups = service.backups.list(server)
    choice = _choice(service, timeline, backups, to, at)
    view = view_of(timeline, backups, span=span, between=_between(begin, end), around=choice.moment if choice else None)
    proofs = service.listings.proofs(server, limit=_PROOFS).items
    families = families_of(backups)
    first = int(chains) if chains.isdecimal() and len(chains) < 10 else 0
    more = bool(first) or chains == EVERYTHING
    last = first + (CHAINS_OF_A_PAGE if more else _FAMILIES)
    return render(
        request,
        "server.html",
        server=server,
        shown=shown,
        timeline=timeline,
        choice=choice,
        drawing=draw(timeline, backups, proofs, view, choice.moment if choice else None),
        spans=SPAN_NAMES,
        earlier=_moved(view, -1),
        later=_moved(view, 1) if view.end < timeline.now else None,
        field=_field(choice.moment if choice and choice.moment else timeline.latest or timeline.now),
        families=families[first:last],
        family_count=len(families),
        newer=f"{link('servers', server, chains=EVERYTHING)}#chains" if first else "",
        older=f"{link('servers', server, chains=str(last))}#chains" if more and last < len(families) else "",
        largest=max((record.stats.bytes_new for record in backups), default=0) or 1,
        jobs=service.listings.jobs(server, limit=_JOBS).items,
        holds=service.retention.holds(),
        moment_of=backup_moment,
        ends=list(timeline.branch_ends()),
    )


def _field(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%S}"


def _between(begin: str, end: str) -> tuple[datetime, datetime] | None:
    try:
        one, other = parse_time(begin), parse_time(end)
    except ValueError:
        return None
    return (one, other) if one <= other and other.year < 9000 and one.year > 1000 else None


def _moved(view: View, direction: int) -> tuple[datetime, datetime]:
    """The half before or after what is shown."""
    step = view.length / 2 * direction
    return view.begin + step, view.end + step


def _choice(
    service: Service, timeline: Timeline, backups: Iterable[BackupRecord], target: str, field: str
) -> Choice | None:
    """Of a target, else of what is in the form's field."""
    if not target and not field:
        return None
    moment = None
    try:
        target = target or format_time(moment_of(field))
        wanted = parse_target(target)
        moment = _moment(wanted.goal, timeline, backups)
        plan = service.restores.plan(RestoreRequest(timeline.server, str(wanted), accept_older=True))
    except BackupdError as error:
        return Choice(target or field, moment, problem=problem_of(error), near=_near(timeline, moment))
    if moment is None and plan.until is not None:
        moment = plan.until.at
    return Choice(str(wanted), moment, plan)


def _near(timeline: Timeline, moment: datetime | None) -> tuple[datetime, ...]:
    """Nothing where ``moment`` itself is in a window: then something else is wrong."""
    if moment is None or any(window.holds(moment) for window in timeline.windows):
        return ()
    before = max((window.end for window in timeline.windows if window.end < moment), default=None)
    after = min((window.begin for window in timeline.windows if window.begin > moment), default=None)
    return tuple(found for found in (before, after) if found is not None)


def _moment(goal: object, timeline: Timeline, backups: Iterable[BackupRecord]) -> datetime | None:
    match goal:
        case Latest():
            return timeline.latest
        case AtTime(moment=moment):
            return moment
        case AtBackup(backup_id=wanted):
            return next((backup_moment(record) for record in backups if record.id == wanted), None)
        case _:
            return None


def families_of(backups: Sequence[BackupRecord]) -> list[Family]:
    """The newest first; those that are marked as deleted are in none."""
    there = [record for record in backups if record.state is not BackupState.DELETED]
    by_id = {record.id: record for record in there}
    chains: dict[str, list[BackupRecord]] = {}
    sets: dict[str, list[BackupRecord]] = {}
    lost = []
    for record in there:
        first = members_of(record, by_id)[0]
        if record.kind is BackupKind.LOGICAL:
            sets.setdefault(record.table_set, []).append(record)
        elif first.kind is BackupKind.PHYSICAL_FULL:
            chains.setdefault(first.id, []).append(record)
        else:
            lost.append(record)
    found = [Family(_chain_title(members), _by_age(members)) for members in chains.values()]
    found += [
        Family(
            f"{len(members)} logical backup{'s' if len(members) != 1 else ''}" + (f" of set {name}" if name else ""),
            _by_age(members),
        )
        for name, members in sets.items()
    ]
    if lost:
        found.append(Family("increments whose full backup is not there: they cannot be restored", _by_age(lost)))
    return sorted(found, key=lambda family: family.newest, reverse=True)


def _chain_title(members: Sequence[BackupRecord]) -> str:
    count = len(members) - 1
    return f"full backup and {count} increment{'s' if count != 1 else ''}" if count else "full backup"


def _by_age(members: Iterable[BackupRecord]) -> tuple[BackupRecord, ...]:
    return tuple(sorted(members, key=lambda record: (record.started_at, record.id)))


retention_routes = APIRouter(include_in_schema=False)


@retention_routes.get("/servers/{server}/retention", dependencies=[Depends(allowed(Role.VIEWER))])
def preview(request: Request, server: str, service: Acting) -> Response:
    """Changes nothing."""
    return _shown(request, service, server)


@retention_routes.post("/servers/{server}/retention", dependencies=[Depends(allowed(Role.ADMIN))])
def apply(request: Request, server: str, service: Acting, sent: Sent) -> Response:
    """Apply them as a job. The rules are asked again then, so what is marked may differ from what was shown."""
    try:
        job = service.requests.retention(server, really=sent.has("really"))
    except BackupdError as error:
        return _shown(request, service, server, error)
    return RedirectResponse(link("jobs", job.id), status_code=303)


def _shown(request: Request, service: Service, server: str, error: BackupdError | None = None) -> Response:
    found = service.retention.preview(server)
    return render(
        request,
        "retention.html",
        refused=error,
        server=server,
        decisions=found,
        expired=sum(len(one.expired) for one in found),
        note=BYTES_NOTE,
        holds=service.retention.holds(),
    )
