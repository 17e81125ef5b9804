"""Holds (delete nothing), keeps (of one backup) and pauses (start nothing), set by an operator.

What the catalog says and what is written at the destinations, by any installation, both count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from backupd.app.context.access import require_known
from backupd.app.context.wiring import Wiring
from backupd.backup.finding import Finding, warning
from backupd.model.backup_record import EVERY_SERVER, Hold, HoldKind
from backupd.model.document import Document, json_key
from backupd.model.errors import BackupdError, DestinationError, RefusedError, UsageError
from backupd.model.event import Severity
from backupd.model.job import JobRecord, JobState
from backupd.model.text import format_duration
from backupd.transfer.holds_and_locks import Kept, kept_at, put_hold, remove_hold
from backupd.transfer.leases import await_sweeps
from storage.destination import Destination

_REMINDED = timedelta(hours=12)
"""A hold or pause that is younger needs no reminder yet."""

_WORDS = {HoldKind.HOLD: ("held", "released"), HoldKind.PAUSE: ("paused", "resumed")}


@dataclass(frozen=True, slots=True)
class Paused(Document):
    """``stopped``: jobs that were asked to stop; they end within seconds, as cancelled. ``problems``: those that could
    not be asked, with why."""

    pause: Hold = field(metadata=json_key(inline=True))
    stopped: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Held(Document):
    """``problems``: destinations where it could not be written, with why: another installation may still delete
    there."""

    hold: Hold = field(metadata=json_key(inline=True))
    problems: tuple[str, ...] = ()


def hold(wiring: Wiring, server: str, reason: str, by: str) -> Held:
    """Delete nothing of ``server`` (``*``: of any) until it is released: neither by rule nor by hand, and no sweep
    takes what is marked already. It is written at the destinations, too, so that it binds every installation and
    outlives the catalog. Raises NotFoundError, UsageError."""
    # A sweep that runs right now goes by what it read before; with its lock, and once those of other hosts have ended,
    # this takes hold when it returns.
    with wiring.removing():
        found = _set(wiring, server, HoldKind.HOLD, reason, by)

        def write(there: Destination) -> None:
            put_hold(there, found)
            await_sweeps(there, clock=wiring.clock)

        return Held(found, written(wiring, _destinations(wiring, server), write))


def listed(wiring: Wiring) -> tuple[Hold, ...]:
    """Every hold and pause, with the holds of others that are only written at a destination."""
    known = wiring.catalog.holds.all()
    ours = {one.server for one in known if one.kind is HoldKind.HOLD}
    found: dict[str, Hold] = {}
    for kept in _kept_at_destinations(wiring):
        found = {**kept.holds, **found}
    return known + tuple(one for name, one in sorted(found.items()) if name not in ours)


def pause(wiring: Wiring, server: str, reason: str, by: str, *, stop_running: bool = False) -> Paused:
    """Start no job of ``server`` (``*``: of any) by schedule; ``stop_running`` also stops those that run and takes
    those that wait out of the queue. Raises NotFoundError, UsageError."""
    found = _set(wiring, server, HoldKind.PAUSE, reason, by)
    stopped: list[str] = []
    problems: list[str] = []
    if stop_running:
        from backupd.app.jobs import jobs

        for job in _open_jobs(wiring, server):
            try:
                jobs.cancel(wiring, job.id, by)
            except RefusedError:
                continue  # it ended meanwhile
            except BackupdError as error:
                problems.append(f"{job.id}: {error.message}")
            else:
                stopped.append(job.id)
    return Paused(found, tuple(stopped), tuple(problems))


def release(wiring: Wiring, server: str, kind: HoldKind, by: str) -> tuple[str, ...]:
    """Take a hold or pause back; gives the destinations where a hold may still be written, with why. Raises
    RefusedError where there is none of exactly this name, UnknownNameError where no server is called so."""
    found = [wiring.catalog.holds.release(server, kind)]
    problems: tuple[str, ...] = ()
    if kind is HoldKind.HOLD:
        problems = written(
            wiring, _destinations(wiring, server), lambda there: found.append(remove_hold(there, server))
        )
    if not any(found):
        if server != EVERY_SERVER:
            require_known(wiring, server)
        others = (
            holds_of(kept_anywhere(wiring, server), server)
            if kind is HoldKind.HOLD
            else wiring.catalog.holds.of(server, kind)
        )
        word = _WORDS[kind][0]
        command = "hold --all --release" if kind is HoldKind.HOLD else "resume --all"
        if others:
            raise RefusedError(
                f"{_named(server)} is not {word} itself; the {kind} covers every server",
                hint=f"to release it: backupd {command}",
            )
        raise RefusedError(f"{_named(server)} is not {word}", hint="to list holds and pauses: backupd hold")
    word = _WORDS[kind][1]
    _record(wiring, kind, server, word, f"{_named(server)} was {word}", detail=f"by {by}")
    return problems


def findings(wiring: Wiring, servers: Collection[str]) -> list[Finding]:
    """What `backupd check` says about holds and pauses of these servers and of all."""
    return [
        warning(str(one.kind), _lasting(one, wiring.clock()), _end(one))
        for one in wiring.catalog.holds.all()
        if one.server in (EVERY_SERVER, *servers)
    ]


def remind(wiring: Wiring) -> None:
    """An event for each hold and pause that is still there, so that none is forgotten."""
    for one in wiring.catalog.holds.all():
        now = wiring.clock()
        if now - one.since >= _REMINDED:
            _record(wiring, one.kind, one.server, _WORDS[one.kind][0], _lasting(one, now), hint=_end(one))


def _lasting(one: Hold, now: datetime) -> str:
    age = format_duration((now - one.since).total_seconds())
    effect = "nothing is deleted" if one.kind is HoldKind.HOLD else "scheduled jobs are suspended"
    return f"{_named(one.server)} has been {_WORDS[one.kind][0]} for {age}, {effect}: {one.text}"


def _end(one: Hold) -> str:
    whose = "--all" if one.server == EVERY_SERVER else one.server
    return f"backupd hold {whose} --release" if one.kind is HoldKind.HOLD else f"backupd resume {whose}"


def _set(wiring: Wiring, server: str, kind: HoldKind, reason: str, by: str) -> Hold:
    if server != EVERY_SERVER:
        require_known(wiring, server)
    if not reason.strip():
        raise UsageError("--reason is required", hint='--reason "audit until March"')
    found = wiring.catalog.holds.set(server, kind, reason.strip(), by, wiring.clock())
    word = _WORDS[kind][0]
    _record(wiring, kind, server, word, f"{_named(server)} was {word}", detail=f"by {by}: {found.reason}")
    return found


def _destinations(wiring: Wiring, server: str) -> tuple[str, ...]:
    """Every configured destination, and where else the catalog knows backups of ``server``."""
    known = wiring.catalog.backups.destinations_of(None if server == EVERY_SERVER else server)
    return tuple(dict.fromkeys([*wiring.settings.destinations, *known]))


def _open_jobs(wiring: Wiring, server: str) -> list[JobRecord]:
    whose = None if server == EVERY_SERVER else server
    states = (JobState.QUEUED, JobState.RUNNING)
    return [job for state in states for job in wiring.catalog.jobs.list(whose, state=state)]


def _record(
    wiring: Wiring, kind: HoldKind, server: str, word: str, message: str, *, detail: str = "", hint: str = ""
) -> None:
    wiring.note(
        word,
        Severity.WARNING,
        message,
        server="" if server == EVERY_SERVER else server,
        subject=str(kind),
        detail=detail,
        hint=hint,
    )


def _named(server: str) -> str:
    return "every server" if server == EVERY_SERVER else f"server {server}"


def kept_by_catalog(wiring: Wiring, servers: Collection[str]) -> Kept:
    """The holds and keeps of this catalog that concern these servers, and the backups of theirs that are foreign to it.
    Raises CatalogError."""
    catalog = wiring.catalog
    return Kept(
        {hold.server: hold for server in servers for hold in catalog.holds.of(server, HoldKind.HOLD)},
        frozenset((server, name) for server in servers for name in catalog.backups.pinned(server)),
        frozenset((server, record.id) for server in servers for record in catalog.backups.foreign(server)),
    )


def kept_anywhere(wiring: Wiring, server: str) -> Kept:
    """What concerns ``server`` by the catalog, and all by any destination that can be asked; no sweep goes against what
    another one says."""
    known = kept_by_catalog(wiring, [server])
    holds, backups = dict(known.holds), set(known.backups)
    for found in _kept_at_destinations(wiring):
        holds = {**found.holds, **holds}
        backups |= found.backups
    return Kept(holds, frozenset(backups), known.foreign)


def _kept_at_destinations(wiring: Wiring) -> Iterator[Kept]:
    """What each destination says; nothing can be removed either where one cannot be asked."""
    for destination in wiring.usable_destinations():
        with suppress(DestinationError):
            yield kept_at(destination)


def holds_of(kept: Kept, server: str) -> tuple[Hold, ...]:
    """The holds that concern ``server``, its own before that of every server."""
    return tuple(kept.holds[name] for name in dict.fromkeys((server, EVERY_SERVER)) if name in kept.holds)


def written(wiring: Wiring, names: Iterable[str], act: Callable[[Destination], None]) -> tuple[str, ...]:
    """Do ``act`` at each destination of these names; gives where it could not be done, and why."""
    problems = []
    for name in names:
        try:
            destination = wiring.destination(name)
            if destination.is_initialised():
                act(destination)
                continue
            problem = "it is not mounted, or no repository yet"
        except BackupdError as error:
            problem = error.message
        problems.append(f"{name}: {problem}")
    return tuple(problems)
