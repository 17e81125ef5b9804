"""What an operator forbids for a while: deleting (hold), and starting by itself (pause); the kill switch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backupd.app import jobs
from backupd.app.wiring import Wiring
from backupd.model.errors import BackupdError, RefusedError, UsageError
from backupd.model.event import Event, Severity
from backupd.model.hold import EVERY_SERVER, Hold, HoldKind
from backupd.model.job import JobRecord, JobState

_WORDS = {HoldKind.HOLD: ("held", "released"), HoldKind.PAUSE: ("paused", "resumed")}


@dataclass(frozen=True, slots=True)
class Paused:
    """``stopped``: jobs that were asked to stop; they end within seconds, as cancelled. ``problems``: those that could
    not be asked, with why."""

    pause: Hold
    stopped: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {**self.pause.as_json(), "stopped": list(self.stopped), "problems": list(self.problems)}


def hold(wiring: Wiring, server: str, reason: str, by: str) -> Hold:
    """Delete nothing of ``server`` (``*``: of any) until it is released: neither by rule nor by hand, and no sweep
    takes what is marked already. Raises NotFoundError, UsageError."""
    # A sweep that runs right now goes by what it read before; with its lock, this takes hold when it returns.
    with wiring.removing():
        return _set(wiring, server, HoldKind.HOLD, reason, by)


def pause(wiring: Wiring, server: str, reason: str, by: str, *, stop_running: bool = False) -> Paused:
    """Start no job of ``server`` (``*``: of any) by itself; ``stop_running`` also stops those that run and takes those
    that wait out of the queue. Raises NotFoundError, UsageError."""
    found = _set(wiring, server, HoldKind.PAUSE, reason, by)
    stopped: list[str] = []
    problems: list[str] = []
    if stop_running:
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


def release(wiring: Wiring, server: str, kind: HoldKind, by: str) -> None:
    """Take a hold or pause back. Raises RefusedError where there is none of exactly this name."""
    if not wiring.catalog.holds.release(server, kind):
        others = wiring.catalog.holds.of(server, kind)
        word = _WORDS[kind][0]
        command = "hold --all --release" if kind is HoldKind.HOLD else "resume --all"
        hint = f"every server is: backupd {command}" if others else "`backupd hold` lists what there is"
        raise RefusedError(f"{_named(server)} is not {word} by itself", hint=hint)
    _tell(wiring, kind, server, _WORDS[kind][1], f"by {by}")


def _set(wiring: Wiring, server: str, kind: HoldKind, reason: str, by: str) -> Hold:
    if not reason.strip():
        raise UsageError("a reason is needed: others will ask", hint='--reason "audit until March"')
    if server != EVERY_SERVER and server not in wiring.catalog.backups.servers():
        wiring.settings.server(server)
    found = wiring.catalog.holds.set(server, kind, reason.strip(), by, wiring.clock())
    _tell(wiring, kind, server, _WORDS[kind][0], f"by {by}: {found.reason}")
    return found


def _open_jobs(wiring: Wiring, server: str) -> list[JobRecord]:
    whose = None if server == EVERY_SERVER else server
    states = (JobState.QUEUED, JobState.RUNNING)
    return [job for state in states for job in wiring.catalog.jobs.list(whose, state=state)]


def _tell(wiring: Wiring, kind: HoldKind, server: str, word: str, detail: str) -> None:
    wiring.catalog.events.add(Event(
        at=wiring.clock(), kind=word, severity=Severity.WARNING, server="" if server == EVERY_SERVER else server,
        subject=str(kind), message=f"{_named(server)} was {word}", detail=detail))


def _named(server: str) -> str:
    return "every server" if server == EVERY_SERVER else f"server {server}"
