"""Taking a server out of rotation while it is backed up, and bringing it back whatever happens.

The catalog says that it is away before the program that takes it out is started, and until the one that brings it
back has succeeded. If the process of the backup dies, the service runs that program, again where necessary. A node of
a Galera cluster is brought back only when it is Synced: until then what it answers is old, and it catches up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from backupd.alerts.conditions import Key
from backupd.alerts.rules import HOOK
from backupd.app.context.logging_setup import redacted, say
from backupd.app.context.settings import ServerSettings
from backupd.app.context.wiring import JobRun, Wiring
from backupd.catalog.backups import Absence
from backupd.engine.server.wsrep import probe_wsrep
from backupd.model.errors import BackupdError, CatalogError, ServerError, ToolError
from backupd.model.event import Severity
from backupd.model.job import JobState
from backupd.model.text import format_time
from backupd.process.command import Command
from backupd.process.pipeline import run as run_program

BEFORE, AFTER = "before", "after"
FIRST_PAUSE = timedelta(seconds=10)
LONGEST_PAUSE = timedelta(minutes=10)
"""Between two tries to bring a server back; each pause is twice as long as the one before."""
_DEFAULT_TIMEOUT = timedelta(minutes=5)
SYNCING = timedelta(seconds=30)
"""How long a backup waits until its node is Synced; then the service goes on waiting."""
_LOOK_SECONDS = 0.5


def presence(wiring: Wiring, server: str) -> tuple[bool, str]:
    """Is it, a server or a member of a group, in rotation, as far as backups are concerned? Else why not."""
    away = wiring.catalog.absences.of(server)
    if away is None:
        return True, ""
    return False, f"backup job {away.job_id} has taken {server} out of rotation since {format_time(away.since)}"


@contextmanager
def away(wiring: Wiring, server: ServerSettings, run: JobRun) -> Iterator[None]:
    """Around a backup: the policy's program ``before``, and ``after``, however the block ends. Raises ToolError where
    ``before`` fails; where ``after`` does, an event reports it, and the service runs it again."""
    hooks = server.policy.hooks
    if hooks is None:
        yield
        return
    job = run.job
    absence = Absence(server.way, job.id, wiring.clock(), str(hooks.after or ""))
    wiring.catalog.absences.begin(absence)
    try:
        if hooks.before is not None:
            _run_hook(hooks.before, BEFORE, absence, job.kind, hooks.timeout, run)
        yield
    finally:
        try:
            bring_back(wiring, absence, job.kind, hooks.timeout, log=run.log)
        except CatalogError as error:  # it is recorded as away: the service brings it back again
            say("hook-trouble", str(error), level=logging.ERROR, server=server.way, job=job.id)


def bring_back(wiring: Wiring, absence: Absence, kind: str, timeout: timedelta, *, log: Path | None = None) -> bool:
    """Run the program that brings the server back, and end its absence; False, and an event, when it fails."""
    server, job_id = absence.server, absence.job_id
    key = Key(HOOK, server, AFTER)
    if why := _not_synced(wiring, server):
        say("hook-waits", why, level=logging.WARNING, server=server, job=job_id)
        wiring.alert(
            key,
            Severity.WARNING,
            f"{server} is not back in rotation: {why}",
            hint=f"it returns by itself when it is Synced; to see its cluster: backupd cluster {server}",
            job_id=job_id,
        )
        return False
    if absence.after:
        try:
            _run_hook(Path(absence.after), AFTER, absence, kind, timeout, None, log=log)
        except BackupdError as error:
            say("hook-failed", str(error), level=logging.ERROR, server=server, job=job_id)
            wiring.alert(
                key,
                Severity.ERROR,
                f"{server} is not back in rotation: {error.message}",
                detail=error.detail,
                hint=f"the service runs {absence.after} again until it succeeds; return {server} to rotation by "
                "hand if that takes too long",
                job_id=job_id,
            )
            return False
    if wiring.catalog.absences.end(server, job_id):
        wiring.settle(looked={key: f"{server} is back in rotation"}, job_id=job_id)
    return True


def _not_synced(wiring: Wiring, server: str, *, wait: timedelta = SYNCING) -> str:
    """Why a node cannot be sent clients yet; "" of one that is Synced, and of a server that is no node. Raises
    CatalogError."""
    deadline = time.monotonic() + wait.total_seconds()
    while True:
        try:
            with wiring.settings.reached(server).connection().connect() as session:
                state = probe_wsrep(session)
        except ServerError as error:
            return f"the node does not answer: {error.message}" if server in wiring.catalog.nodes.servers() else ""
        except BackupdError:
            return ""  # a server or policy that is gone, or is broken by now
        if state is None or state.is_synced:
            return ""
        if time.monotonic() >= deadline:
            return state.words
        time.sleep(_LOOK_SECONDS)


def _run_hook(
    program: Path,
    moment: str,
    absence: Absence,
    kind: str,
    timeout: timedelta,
    run: JobRun | None,
    *,
    log: Path | None = None,
) -> None:
    """Raises ToolError, CancelledError."""
    env = {
        "BACKUPD_SERVER": absence.server,
        "BACKUPD_JOB": absence.job_id,
        "BACKUPD_KIND": kind,
        "BACKUPD_MOMENT": moment,
    }
    say("hook-started", f"{moment}: {program}", server=absence.server, job=absence.job_id)
    begun = time.monotonic()
    try:
        run_program(
            Command((str(program),), env=env),
            timeout=timeout.total_seconds(),
            log=run.log if run is not None else log,
            cancel=run.cancel if run is not None else None,
        )
    except ToolError as error:
        raise type(error)(
            f"the hook `{moment}` of {absence.server} failed: {redacted(error.message)}",
            detail=redacted(error.detail),
            hint=f"run {program} by hand with BACKUPD_SERVER={absence.server}, and correct it; its time limit is "
            f"{timeout.total_seconds():g} s (hooks.timeout)",
        ) from error
    say("hook-ended", f"{moment}: after {time.monotonic() - begun:.1f} s", server=absence.server, job=absence.job_id)


@dataclass(slots=True)
class _Try:
    """When the next one is due (monotonic), how long to pause after it, and the one that is going on."""

    due: float = 0.0
    pause: timedelta = FIRST_PAUSE
    thread: threading.Thread | None = None


class AbsenceWatch:
    """The service's watch on servers that nobody brings back any more: their backup is over, and they are still
    away. Each is brought back in its own thread, so that a program which hangs delays nothing else."""

    def __init__(self) -> None:
        self._tries: dict[tuple[str, str], _Try] = {}

    def look(self, wiring: Wiring) -> None:
        """Begin with those whose time it is. Raises CatalogError."""
        left = [one for one in wiring.catalog.absences.all() if _is_over(wiring, one)]
        known = {(one.server, one.job_id) for one in left}
        for gone in [key for key in self._tries if key not in known and not self._busy(key)]:
            del self._tries[gone]
        for one in left:
            key = (one.server, one.job_id)
            attempt = self._tries.setdefault(key, _Try())
            if self._busy(key) or time.monotonic() < attempt.due:
                continue
            # A daemon thread: the service may end in the middle; the next one runs the program again.
            attempt.thread = threading.Thread(
                target=self._try, args=(wiring, one, attempt), daemon=True, name=f"hook {one.server}"
            )
            attempt.thread.start()

    def join(self, seconds: float) -> None:
        """Wait for the tries that are going on."""
        for attempt in list(self._tries.values()):
            if attempt.thread is not None:
                attempt.thread.join(seconds)

    def _busy(self, key: tuple[str, str]) -> bool:
        thread = self._tries[key].thread
        return thread is not None and thread.is_alive()

    def _try(self, wiring: Wiring, absence: Absence, attempt: _Try) -> None:
        timeout = _DEFAULT_TIMEOUT
        with suppress(BackupdError):  # of a server or policy that is gone, or is broken by now
            hooks = wiring.settings.reached(absence.server).policy.hooks
            timeout = hooks.timeout if hooks is not None else timeout
        try:
            job = wiring.catalog.jobs.find(absence.job_id)
            bring_back(wiring, absence, job.kind if job is not None else "", timeout)
        except CatalogError as error:
            say("hook-trouble", str(error), level=logging.WARNING, server=absence.server, job=absence.job_id)
        finally:
            attempt.due = time.monotonic() + attempt.pause.total_seconds()
            attempt.pause = min(attempt.pause * 2, LONGEST_PAUSE)


def _is_over(wiring: Wiring, absence: Absence) -> bool:
    """Does nobody work at its backup any more?"""
    job = wiring.catalog.jobs.find(absence.job_id)
    return job is None or job.state is not JobState.RUNNING
