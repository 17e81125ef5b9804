"""`backupd serve`: one process that follows the policies until it is asked to stop.

The main thread keeps the time and the service's own state; jobs run in processes of their own, which the worker
starts and watches. All that happens is decided from the catalog, so a service that was killed goes on where it was.
Once a day it keeps house: old rows and logs go, every destination is swept by a job, and who paused something is
reminded of it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from backupd.alerts.conditions import Key
from backupd.alerts.rules import REFUSED
from backupd.app.alerting.service import AlertWatch, forget_old_alerts
from backupd.app.backups.physical import forget_old
from backupd.app.backups.rotation_hooks import AbsenceWatch
from backupd.app.binlogs.stream_supervisor import StreamWatch, acknowledged
from backupd.app.context.access import audit, service_actor
from backupd.app.context.logging_setup import say
from backupd.app.context.settings import Settings, load_settings
from backupd.app.context.settings_problems import (
    left_out,
    refuse_lost_files,
    refuse_newly_broken,
    report_policies,
    report_transport,
)
from backupd.app.context.wiring import Opening, Wiring, catalog_of
from backupd.app.copies.missing_copies import ReplicaWatch
from backupd.app.jobs.admission import QueueWatch
from backupd.app.jobs.jobs import abandon_dead, prune, sweep_of
from backupd.app.metacopies.catalog_copies import after_job
from backupd.app.metacopies.copy_check import of_today
from backupd.app.metacopies.signed_heads import HeadWatch
from backupd.app.restores.thaw_jobs import ThawWatch
from backupd.app.retention.holds import remind
from backupd.app.runtime.clock_check import ClockWatch, Jump, note_step
from backupd.app.runtime.fork_server import ForkServer
from backupd.app.runtime.service_manager import (
    Leader,
    LeadershipLostError,
    SignalRequests,
    Signals,
    SystemdNotifier,
    Waker,
)
from backupd.app.schedule.calendar import AlarmClock, next_runs
from backupd.app.schedule.timetable import BUSY, CLOCK_MOVED, NOT_RUNNING, Timetable
from backupd.app.service.api_process import ApiWatch
from backupd.app.service.worker import Worker
from backupd.app.verify.consistency import resume_paused
from backupd.app.verify.missing_tables import look_back
from backupd.app.views.capacity import FillingWatch
from backupd.app.views.clusters import ClusterWatch
from backupd.app.views.objectives import ObjectivesWatch
from backupd.app.views.standings import StandingsWatch, glances
from backupd.app.views.timeline import timeline
from backupd.model.errors import BackupdError, CatalogError, Problem, RefusedError
from backupd.model.event import Event, Severity
from backupd.model.job import HOST, JobRecord
from backupd.model.text import few, format_duration, format_time
from backupd.process.runtime import share_arenas

TICK = 5.0
"""Seconds between looks at the clock when nothing happens."""
REFRESH = 20.0
"""Seconds between looks at what others changed in the catalog."""
STANDBY = 1.0
"""Seconds between tries to take over."""
WRITES = 60.0
"""Seconds between proofs that the catalog can be written."""
WRITTEN = "written"
"""The cursor that is moved for that."""
DAILY = "30 4 * * *"
_SERVICE = "service"
"""The subject of its events."""
_NAMED = 5
"""Servers and files that a message names."""
EVENTS_KEPT = timedelta(days=400)
"""How long events, and how far destinations were behind, stay in the catalog."""
GRACE = 30.0
"""Seconds that running jobs have to end by themselves when the service stops."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How to serve: ``standby`` waits for another service to end; ``grace`` seconds for running jobs at the end;
    ``new_catalog``: as ``new`` of ``catalog_of``."""

    standby: bool = False
    grace: float = GRACE
    new_catalog: bool = False


def serve(config: Path, manner: Manner) -> int:
    """Follow the policies until a signal ends it; gives the exit code. Raises what keeps it from beginning:
    ConfigurationError for the configuration file, CatalogError, RefusedError when another service is at work. Servers
    whose policy is broken, and files of servers with mistakes, are left out, and reported."""
    notifier = SystemdNotifier()
    share_arenas()  # before there are threads
    with Waker() as waker:
        asked = SignalRequests(waker)
        with Signals(asked.handlers()):  # before anything that takes its time: a reload may be asked for at once
            settings = load_settings(config, strict=False, whole=False)
            with catalog_of(settings, Opening.WORKS, new=manner.new_catalog) as catalog:
                return Daemon(Wiring(settings, catalog), manner, notifier, waker, asked).run()


Watch = StreamWatch | ApiWatch | AlertWatch | HeadWatch
"""What works beside the service, in its own threads."""


class Daemon:
    """One run of the service."""

    def __init__(
        self, wiring: Wiring, manner: Manner, notifier: SystemdNotifier, waker: Waker, asked: SignalRequests
    ) -> None:
        self._wiring = wiring
        self._manner = manner
        self._notifier = notifier
        self._waker = waker
        self._asked = asked
        self._timetable = Timetable(wiring.catalog, self._here)
        self._clockwatch = ClockWatch(wiring.clock)
        self._steps: list[timedelta] = []
        self._housekeeper = Housekeeper(wiring.clock(), wiring.settings.configuration.timezone)
        self._queue = QueueWatch()
        self._thaws = ThawWatch()
        self._absences = AbsenceWatch()
        self._objectives = ObjectivesWatch(timeline, glances)
        self._filling = FillingWatch()
        self._clusters = ClusterWatch()
        self._standings = StandingsWatch()
        self._replicas = ReplicaWatch()
        self._refreshed = 0.0
        self._trouble = ""
        self._well_at = self._written_at = time.monotonic()
        self._parts: tuple[AlertWatch | Worker, ...] = ()
        self._why = NOT_RUNNING
        self._incomplete: BackupdError | None = None

    def run(self) -> int:
        """Until a signal or another service ends it; gives the exit code."""
        with ExitStack() as stack:
            watch = stack.enter_context(Leader(self._wiring))
            if not self._go_on_watch(watch):
                return 0
            self._incomplete = self._left_out()  # what nobody could read is not gone, for whoever is started here
            alerts = stack.enter_context(AlertWatch(self._wiring, self._well))  # before anything happens
            forks = stack.enter_context(ForkServer())
            worker = stack.enter_context(Worker(self._wiring, starter=forks.start))
            heads = stack.enter_context(HeadWatch(self._wiring))
            self._parts = (alerts, worker)
            watches = (
                stack.enter_context(StreamWatch(self._wiring, starter=forks.start)),
                stack.enter_context(ApiWatch(self._wiring)),
                alerts,
                heads,
            )
            alarm = stack.enter_context(AlarmClock(self._waker.wake))
            self._begin()
            while not self._asked.stops:
                try:
                    self._round(worker, watches, alarm, watch)
                except LeadershipLostError as lost:
                    return self._lost(worker, watches, lost)
                self._waker.wait(min(TICK, (self._notifier.watchdog_seconds or TICK * 2) / 2))
            return self._end(worker, watches)

    # -- the beginning

    def _go_on_watch(self, watch: Leader) -> bool:
        """Become the one service; False when asked to stop before it came to that. Raises RefusedError, and without
        ``standby`` CatalogError."""
        reported = ""
        while not self._asked.stops:
            try:
                watch.begin()
            except (RefusedError, CatalogError) as error:
                if not self._manner.standby:
                    raise
                if reported != error.message:
                    waits = isinstance(error, RefusedError)
                    say(
                        "daemon-standby" if waits else "daemon-trouble",
                        str(error),
                        level=logging.INFO if waits else logging.ERROR,
                    )
                    self._notifier.ready(f"standing by: {error.message}")
                    reported = error.message
            else:
                if reported:  # what was read then may be long out of date
                    self._reload(None)
                return True
            self._notifier.alive()
            self._waker.wait(STANDBY)
            if self._asked.take_reload():
                self._reload(None)
        return False

    def _begin(self) -> None:
        wiring = self._wiring
        wiring.catalog.events.add(self._event("daemon-started", Severity.INFO, "the service has started"))
        self._serve_here()
        self._report_left_out(self._incomplete)
        report_policies(wiring)
        report_transport(wiring)
        abandon_dead(wiring)
        made = self._timetable.follow(wiring.settings, wiring.clock(), NOT_RUNNING)
        say("daemon-started", f"process {os.getpid()}, {len(wiring.settings.servers)} servers")
        self._log_jobs(made)
        self._refreshed = time.monotonic()
        self._notifier.ready(self._status())

    def _left_out(self) -> BackupdError | None:
        """What is to be said of servers that are not in force, though they are written somewhere or were followed
        before. Until a reload has read all files, ``unread`` of the settings says so, too. Raises CatalogError."""
        settings = self._wiring.settings
        followed = {row.server for row in self._wiring.catalog.schedules.all().values() if row.cadence}
        gone = sorted(followed.difference(settings.servers, {""}))
        names, folder = few(gone, _NAMED), settings.configuration.servers_folder
        if settings.unread:
            files = few(dict.fromkeys(one.file for one in settings.unread), _NAMED)
            said = f" (the service backed up {names} before)" if gone else ""
            return BackupdError(
                f"the service has started without the servers of {files}{said}: none of them is backed up, and streams "
                "of theirs that run go on",
                detail="\n".join(map(str, settings.unread)),
                hint="correct the file, then reload: systemctl reload backupd",
            )
        if gone and not settings.files and folder.is_dir():
            empty = Problem(str(folder), None, "", "holds no file of servers")
            self._wiring = replace(self._wiring, settings=replace(settings, unread=(empty,)))
            return BackupdError(
                f"{names}, which the service backed up before, are not configured any more, and {folder} holds no file "
                "of servers",
                hint="mount the folder if they were in it, then reload: systemctl reload backupd; where they were "
                "removed on purpose, a reload confirms that",
            )
        return None

    def _report_left_out(self, left_out: BackupdError | None) -> None:
        """An incident; where nothing is left out, one of before is over."""
        if left_out is None:
            self._wiring.settle(looked={Key(REFUSED, subject=_SERVICE): "the service has read every file at its start"})
            return
        say(REFUSED.broken, str(left_out), level=logging.ERROR)
        words = {"detail": left_out.detail, "hint": left_out.hint}
        self._record(self._event(REFUSED.broken, Severity.ERROR, left_out.message, **words))

    # -- the rounds

    def _round(self, worker: Worker, watches: Sequence[Watch], alarm: AlarmClock, watch: Leader) -> None:
        """Look at everything once. Raises LeadershipLostError when another service has taken over."""
        if self._asked.take_reload():
            self._reload(worker, watches)
        jump = self._clockwatch.look()
        if jump is not None:
            self._report_jump(jump)
            self._why = CLOCK_MOVED
            self._steps.append(jump.step)
        try:
            while self._steps:
                note_step(self._wiring.catalog, self._wiring.clock(), self._steps[0])
                del self._steps[0]
            if time.monotonic() - self._refreshed >= REFRESH:
                watch.stay()
                self._prove_writing()
                self._serve_here()
                self._refreshed = time.monotonic()
                self._timetable.refresh(self._wiring.clock())
                self._notifier.status(self._status())
                self._queue.look(self._wiring, self._wiring.clock())
                self._thaws.look(self._wiring, self._wiring.clock())
                self._absences.look(self._wiring)
                resume_paused(self._wiring)
            self._keep_time(worker, alarm)
            self._trouble = ""
            self._well_at = time.monotonic()
        except LeadershipLostError:
            raise
        except BackupdError as error:
            # Nothing was written. It is tried again until it works: the due times wait in the catalog.
            self._report_trouble(error.message, str(error))
        except Exception as error:  # noqa: BLE001  a service that ended would start nothing at all any more; all is reported
            self._report_trouble(f"internal error: {type(error).__name__}", "".join(traceback.format_exception(error)))
        self._notifier.alive()

    def _prove_writing(self) -> None:
        """A catalog that can only be read (a full disk, say) is of no use. Raises CatalogError."""
        if self._trouble or time.monotonic() - self._written_at >= WRITES:
            self._wiring.catalog.cursors.move({WRITTEN: int(self._wiring.clock().timestamp())})
            self._written_at = time.monotonic()

    def _well(self) -> float:
        """The monotonic time at which all that the service is dead without was well the last time."""
        return min([self._well_at, *(part.well_at for part in self._parts)])

    def _report_trouble(self, status: str, text: str) -> None:
        """Once, until it is another one or over."""
        if self._trouble != status:
            say("daemon-trouble", text, level=logging.ERROR)
            self._notifier.status(status)
        self._trouble = status
        self._refreshed = 0.0

    def _keep_time(self, worker: Worker, alarm: AlarmClock) -> None:
        now = self._clockwatch.now  # a clock that was set since then has not been looked at
        worker.hold(self._clockwatch.doubtful)
        if self._clockwatch.doubtful:
            return
        made = self._timetable.handle(now, self._why, settled=self._clockwatch.settled)
        self._why = BUSY
        if made:
            self._log_jobs(made)
            worker.wake()
        alarm.set(self._timetable.coming())
        self._housekeeper.look(self._wiring, now)
        self._objectives.look(self._wiring, now)
        self._filling.look(self._wiring, now)
        self._clusters.look(self._wiring, now)
        self._standings.look(self._wiring, now)
        self._replicas.look(self._wiring, now)

    def _report_jump(self, jump: Jump) -> None:
        if jump.slept and not jump.step:
            message = f"this machine slept for {format_duration(jump.slept.total_seconds())}"
        else:
            way = "back" if jump.step < timedelta(0) else "forward"
            message = f"this machine's clock was set {way} by {format_duration(abs(jump.step.total_seconds()))}"
        hint = (
            "nothing new starts until the clock has run without a step for five minutes"
            if self._clockwatch.doubtful
            else "runs that were missed are caught up once, none runs twice"
        )
        say("clock-jump", message, level=logging.WARNING)
        self._record(self._event("clock-jump", Severity.WARNING, message, hint=hint))

    # -- settings

    def _reload(self, worker: Worker | None, watches: Sequence[Watch] = ()) -> None:
        """Go by the files as they are now, or say why not and go on as before. Without ``worker``: not on watch yet, or
        only just."""
        self._notifier.reloading()
        old = self._wiring.settings
        try:
            new = load_settings(old.file, strict=False)
            refuse_newly_broken(old, new)
            refuse_lost_files(old, new)
            _require_same_folders(old, new)
            if worker is not None:
                self._log_jobs(self._timetable.follow(new, self._wiring.clock(), self._why))
        except BackupdError as error:
            self._report_refused(error, str(error))
        except Exception as error:  # noqa: BLE001  no file may end the service; all is reported
            first = (str(error).splitlines() or [""])[0]
            self._report_refused(
                BackupdError(
                    f"internal error: {type(error).__name__}: {first}",
                    hint=(
                        "the previous configuration stays active; undo the last change, and see journalctl -u "
                        "backupd for the traceback"
                    ),
                ),
                "".join(traceback.format_exception(error)),
            )
        else:
            self._wiring = replace(self._wiring, settings=new)
            if worker is not None:
                self._rename_here()
                worker.reload(self._wiring)
            for one in watches:
                one.reload(self._wiring)
            message = f"the configuration was reloaded: {difference(old, new)}"
            say("config-reloaded", message)
            audit(self._wiring, service_actor(), "config-reloaded", detail=message)
            self._record(self._event("config-reloaded", Severity.INFO, message))
            if worker is not None:
                self._report_settings()
        self._notifier.ready(self._status() if worker is not None else "standing by")

    def _report_settings(self) -> None:
        try:
            report_policies(self._wiring)
            report_transport(self._wiring)
        except CatalogError as error:
            say("daemon-trouble", f"the problems of the settings could not be recorded: {error}", level=logging.ERROR)

    def _report_refused(self, error: BackupdError, text: str) -> None:
        say("config-refused", text, level=logging.ERROR)
        audit(self._wiring, service_actor(), "config-reloaded", outcome="refused", detail=error.message)
        self._record(
            self._event(
                "config-refused",
                Severity.ERROR,
                f"the configuration was not reloaded: {error.message}; the previous one stays active",
                detail=error.detail,
                hint=error.hint or "correct it, then reload again",
            )
        )

    # -- the end

    def _lost(self, worker: Worker, watches: Sequence[Watch], lost: LeadershipLostError) -> int:
        """The catalog is another service's: what runs here is ended, and the rest is left to the other one."""
        say("daemon-stopped", str(lost), level=logging.ERROR)
        self._notifier.stopping(str(lost))
        for one in watches:
            one.stop()
        worker.stop()
        return 1

    def _end(self, worker: Worker, watches: Sequence[Watch]) -> int:
        worker.hold(True)
        self._notifier.stopping("waiting for running jobs")
        if self._asked.ends_streams and (servers := acknowledged(self._wiring.settings)):
            say(
                "streams-end",
                f"the streams of {', '.join(servers)} end with the service: commits there wait once for the server's "
                "timeout (10 s where nothing else is set), or for nothing, and are not acknowledged until a service "
                "runs again; after SIGTERM (systemctl restart) they go on",
                level=logging.WARNING,
            )
        say("daemon-stopping", f"{worker.running()} jobs are running")
        deadline = time.monotonic() + self._manner.grace
        while worker.running() and self._asked.stops < 2 and time.monotonic() < deadline:
            self._waker.wait(min(0.5, deadline - time.monotonic()))
            self._notifier.alive()
        for one in watches:
            if isinstance(one, StreamWatch) and not self._asked.ends_streams:
                self._leave(one)
            else:
                one.stop()
        if not worker.stop():
            say("daemon-stopped", "the catalog did not respond during the stop", level=logging.ERROR)
            return 1
        self._record(self._event("daemon-stopped", Severity.INFO, "the service was stopped"))
        with suppress(BackupdError):  # then nobody reports here any more, and five minutes show as much
            self._wiring.catalog.hosts.stops(self._wiring.here.removeprefix(HOST))
        say("daemon-stopped", "bye")
        return 0

    def _leave(self, streams: StreamWatch) -> None:
        if servers := streams.leave():
            say(
                "streams-go-on",
                f"the processes that stream the binary logs of {', '.join(servers)} go on, and the next service adopts "
                "them; SIGINT (systemctl stop) ends them, too",
            )

    # -- small things

    def _here(self) -> str:
        return self._wiring.here

    def _serve_here(self) -> None:
        """This host is served: by this service, which alone acts."""
        hosts, name, now = self._wiring.catalog.hosts, self._wiring.join(leads=True), self._wiring.clock()
        hosts.serves(name, now)
        if moved := [host for host in hosts.take_over(name, now) if host]:
            say("jobs-moved", f"queued jobs of {', '.join(moved)}, on which no service runs, go to {self._wiring.here}")

    def _rename_here(self) -> None:
        """This host may be called otherwise by the settings that are followed now. Where the catalog cannot take that,
        or the spool does not say who this host is, the next round tries again, and until then everything goes by the
        former name."""
        try:
            self._serve_here()
        except BackupdError as error:
            self._report_trouble(error.message, str(error))

    def _log_jobs(self, made: Iterable[JobRecord]) -> None:
        for job in made:
            say(
                f"job-{job.state}",
                f"{job.leg}{', ' + job.message if job.message else ''}",
                server=job.server,
                job=job.id,
            )

    def _status(self) -> str:
        coming = min(self._timetable.coming(), default=None)
        text = f"{len(self._wiring.settings.servers)} servers"
        if broken := len(left_out(self._wiring.settings)):
            text += f", {broken} with a broken policy"
        return f"{text}; next: {format_time(coming)}" if coming else text

    def _event(self, kind: str, severity: Severity, message: str, *, detail: str = "", hint: str = "") -> Event:
        return Event(self._wiring.clock(), kind, severity, message, subject=_SERVICE, detail=detail, hint=hint)

    def _record(self, event: Event) -> None:
        try:
            self._wiring.catalog.events.add(event)
        except BackupdError as error:
            say(event.kind, f"the event could not be recorded: {error}", level=logging.ERROR)


def _require_same_folders(old: Settings, new: Settings) -> None:
    """Raises RefusedError for changes that a running service cannot follow."""
    for name in ("catalog", "spool"):
        if getattr(old, name) != getattr(new, name):
            raise RefusedError(f"`{name}` cannot change while the service runs", hint="restart it instead")


def difference(old: Settings, new: Settings) -> str:
    """What a reload changes, for the log and the audit."""
    added, gone = sorted(set(new.servers) - set(old.servers)), sorted(set(old.servers) - set(new.servers))
    parts = [f"{len(new.servers)} servers"]
    if added:
        parts.append(f"new: {', '.join(added)}")
    if gone:
        parts.append(f"gone: {', '.join(gone)}")
    names = sorted({*old.policies, *new.policies})
    policies = [name for name in names if old.policies.get(name) != new.policies.get(name)]
    if policies:
        parts.append(f"other policies: {', '.join(policies)}")
    changed = [
        name
        for name in type(new.configuration).model_fields
        if getattr(old.configuration, name) != getattr(new.configuration, name)
    ]
    if changed:
        parts.append(f"other settings: {', '.join(changed)}")
    return "; ".join(parts)


# -- once a day


def keep_house(wiring: Wiring) -> None:
    """Do it now. What fails is logged, and tried again tomorrow."""
    try:
        gone = prune(wiring)
        wiring.catalog.thaws.forget()
        wiring.catalog.events.forget(wiring.clock() - EVENTS_KEPT)
        wiring.catalog.lags.forget(wiring.clock() - EVENTS_KEPT)
        remind(wiring)
        forget_old(wiring)
        look_back(wiring)
        forget_old_alerts(wiring)
        say("housekeeping", f"{len(gone)} old jobs were removed from the catalog")
    except BackupdError as error:
        say("housekeeping-failed", str(error), level=logging.WARNING)
    after_job(wiring, turn=of_today(wiring.clock()))
    for name in wiring.settings.destinations:
        try:
            wiring.catalog.jobs.enqueue(sweep_of(wiring, name))
        except BackupdError as error:
            say("housekeeping-failed", f"destination {name}: {error}", level=logging.WARNING)


class Housekeeper:
    """Keeps house once a day, in its own thread, so that the service goes on meanwhile."""

    def __init__(self, now: datetime, zone: str) -> None:
        self._due = _next_day(now, zone)
        self._thread: threading.Thread | None = None

    def look(self, wiring: Wiring, now: datetime) -> None:
        """Begin, if it is time for it and the last time is over."""
        zone = wiring.settings.configuration.timezone
        if self._due - now > timedelta(days=2):
            self._due = _next_day(now, zone)  # the clock was ahead when this was computed
        if now < self._due or (self._thread is not None and self._thread.is_alive()):
            return
        self._due = _next_day(now, zone)
        # A daemon thread: the service may end in the middle; whatever it left is swept the next time.
        self._thread = threading.Thread(target=keep_house, args=(wiring,), name="housekeeping", daemon=True)
        self._thread.start()


def _next_day(now: datetime, zone: str) -> datetime:
    return next(next_runs(DAILY, zone, now, count=1))
