"""The process that streams one server's binary log: copies it into the spool, and from there to every destination.

One thread copies (``Streamer``), this one archives (``Archiver``), one writes into the catalog (``CatalogWriter``), and
one for each of the other destinations copies what the required ones have (``LogFollower``). All that has to outlive the
process is in the spool, so it may be killed at any moment and started again. Neither a catalog nor a destination that
does not answer keeps it from copying.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from backupd.app.binlogs.attendance import Attendance
from backupd.app.binlogs.log_follower import LogFollower
from backupd.app.binlogs.log_member import MemberWatch, log_member
from backupd.app.binlogs.log_records import CatalogBackfill
from backupd.app.binlogs.quiet import Activity, Rest, seldom
from backupd.app.binlogs.stream_holder import Holder, log_of
from backupd.app.binlogs.stream_member import StreamMember
from backupd.app.binlogs.stream_report import CatalogRecorder, StreamReport
from backupd.app.context.logging_setup import say
from backupd.app.context.members import refuse_left_history
from backupd.app.context.server_identity import meet_stream
from backupd.app.context.settings import ServerSettings, held_settings, load_settings, spool_folder
from backupd.app.context.wiring import Opening, Wiring, catalog_of
from backupd.app.runtime.child_process import CatalogWriter, renew_log
from backupd.app.runtime.other_process import OtherProcess
from backupd.app.runtime.service_manager import Signals, Waker
from backupd.binlog.acknowledgement import OFF, Evidence
from backupd.binlog.archiver import Archiver, Shipped
from backupd.binlog.session import answered
from backupd.binlog.spool_files import Spool
from backupd.binlog.stream_status import StreamEvent, StreamEventKind, StreamState, StreamStatus
from backupd.binlog.supervisor import Pace, Streamer
from backupd.engine.server.binary_logs import BinlogSource, SourceState
from backupd.model.backup_record import BackupState
from backupd.model.errors import (
    BackupdError,
    BusyError,
    CatalogError,
    DestinationError,
    RefusedError,
    ServerError,
)
from backupd.model.server_facts import Position
from backupd.process.throttle import TokenBucket
from backupd.recovery.runs import file_position
from backupd.transfer.records.encryption import Sealer
from policies.lint import streams
from policies.policy import Binlog
from restore.datadir.staging import restored_by
from storage.destination import Destination
from storage.throttle_and_breaker import throttled

BEAT = 1.0
"""Seconds between two looks at what has come."""
REPORT = 3.0
"""Seconds between two rows of status."""
RENEW = 120.0
"""Seconds that a stream may be failing for a reason of ours (an account, a program) before the process ends: the next
one reads passwords and looks for programs anew."""
PATIENCE = 2.0
"""Seconds that one step of the archive waits for the destinations, and its end for what is under way there. With
whatever else is waited for that must be less than a stream may take to leave a process of several."""
UNWIND = 6.0
"""Seconds for the copying to end."""
DEADLINE = 9.0
"""Seconds after which a process that was asked to end does, whatever it is at."""
OPENING = 35.0
"""Seconds that the catalog may take at the beginning, where its answer is needed."""
TAKING_OVER = 20.0
"""Seconds that a process waits for the one that it replaces."""
LETTING_GO = 4.0
"""Seconds that this one has to end: less than a server waits for an acknowledgement."""
LOOKING = 5.0
"""Seconds that a server may take to say where it stands before the process that streams it is replaced."""
MOMENT = 0.02
"""Seconds between two looks whether it has."""
ONCE_TROUBLE = 60.0
"""Seconds after which `--once` gives up on a destination or a server that does not take part."""


def run_stream(config: Path, server: str, *, held: Path | None = None, once: bool = False) -> None:
    """Stream until a signal ends it; with ``once`` until everything that the server has by now is stored. Main thread.

    ``held``: the settings of the service that has started it. Then it takes over from a process that a service has
    started before, and outlives the service.

    Raises ConfigurationError, NotFoundError; RefusedError where the policy asks for no stream; BusyError when another
    process streams this server; and whatever no new try of this process would mend.
    """
    if held is None:
        settings = load_settings(config, strict=False)
        # Made, or refused beside backups that it does not know; one that is out of reach keeps nothing from copying.
        with suppress(CatalogError), catalog_of(settings, Opening.WORKS):
            pass
    else:
        settings = held_settings(held)
    with ExitStack() as stack:
        waker = stack.enter_context(Waker())
        stop = threading.Event()

        def end() -> None:
            stop.set()
            waker.wake()
            signal.setitimer(signal.ITIMER_REAL, DEADLINE)

        # Whatever still waits then (a slow destination, a dead disk) is given up: it can be killed at any moment.
        stack.enter_context(
            Signals({**dict.fromkeys((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), end), signal.SIGALRM: give_up})
        )
        stack.callback(signal.setitimer, signal.ITIMER_REAL, 0.0)
        writer = stack.enter_context(CatalogWriter(settings.catalog, make=held is None))
        StreamRun(Wiring(settings, writer.catalog), server, writer, waker, stop, kept=held is not None).run(once=once)


class StreamRun:
    """The stream of one server. ``kept``: by a service; ``shared``: its process has others."""

    def __init__(
        self,
        wiring: Wiring,
        server: str,
        writer: CatalogWriter,
        waker: Waker,
        stop: threading.Event,
        *,
        kept: bool = False,
        shared: bool = False,
    ) -> None:
        self._wiring, self._writer, self._waker, self._stop = wiring, writer, waker, stop
        self._server = wiring.settings.server(server)
        self._policy = _binlog_policy(self._server)
        self._spool = Spool(spool_folder(wiring.settings, server))
        self._broken: BaseException | None = None
        self._failing_since: float | None = None
        self._troubles: Mapping[str, str] = {}
        self._noted: datetime | None = None
        self._met = ""
        self._member: MemberWatch | None = None
        self._meeting: tuple[str, Future[SourceState]] | None = None
        self._known: SourceState | None = None
        self._holder = Holder.current(wiring, server, kept=kept, shared=shared)
        self._attendance = Attendance(wiring.settings, server, writer, wiring.clock, kept=kept)

    def run(self, *, once: bool) -> None:
        """Stream until ``stop`` is set, or with ``once`` until all that the server had at the beginning is stored.
        Raises what ``run_stream`` does."""
        name, wiring = self._server.name, self._wiring
        with ExitStack() as stack:
            destinations = self._destinations()
            _keys, recipients = wiring.recipients()
            encryption = wiring.settings.encryption
            sealer = Sealer(recipients, encryption.gnupg_home, level=encryption.compression_level)
            recorder = CatalogRecorder(name, self._writer, wiring.clock)
            if self._server.is_group:
                group = self._server
                self._writer.ask(lambda catalog: refuse_left_history(catalog, group), patience=OPENING)
                known = self._writer.ask(lambda catalog: catalog.identities.of(name), patience=OPENING)
                self._server, switch = log_member(group, self._spool, known, wiring.clock())
                if switch is not None:
                    self._writer.ask(lambda _catalog: switch.note(wiring), patience=OPENING)
                self._member = stack.enter_context(MemberWatch(group, self._server, self._spool, wiring.clock))
            source = BinlogSource(
                self._server.connection(),
                marker=lambda datadir: restored_by(Path(datadir)),
                semi_sync=self._policy.acknowledge != OFF,
            )
            stack.enter_context(self._sole_stream(source))
            if self._stop.is_set():
                return
            followers = [LogFollower(wiring, self._server, name, self._stop) for name in self._server.others]
            report = StreamReport(self._server, self._writer, recorder, self._spool, wiring.clock, followers)
            wanted, given_up = self._wanted(), self._given_up()

            def urge() -> None:
                archiver.urge()
                self._waker.wake()

            archiver = stack.enter_context(
                Archiver(
                    self._spool,
                    destinations,
                    sealer,
                    recorder,
                    checkpoint=self._policy.checkpoint,
                    clock=wiring.clock,
                    patience=PATIENCE,
                    letting_go=PATIENCE,
                )
            )
            streamer = Streamer(
                name,
                source,
                self._spool,
                installation=wiring.identity_key().hex(),
                wanted=wanted,
                max_spool_bytes=self._policy.max_spool,
                clock=wiring.clock,
                on_event=lambda event: self._heard(event, report),
                archived_to=archiver.archived_to,
                given_up=lambda: given_up,
                ours=self._ours,
                acknowledge=self._policy.acknowledge,
                evidence=self._evidence(),
                committed=archiver.committed,
                on_asked=urge,
                known=self._known,
                pace=Pace(seldom=seldom(self._server.policy)),
            )
            archiver.on_committed = lambda _committed: streamer.rouse()
            thread = threading.Thread(target=self._copy, args=(streamer,), name="streamer", daemon=True)
            say("stream-started", f"process {os.getpid()}, to {', '.join(destinations)}", server=name)
            backfill = CatalogBackfill(
                name, wiring.settings.catalog, destinations, self._spool, self._stop, wiring.clock
            )
            backfill.start()
            for follower in report.followers:
                follower.start()
            thread.start()  # the last one: where no further thread may be started, nothing writes to the spool
            try:
                self._keep_going(streamer, archiver, recorder, report, backfill, once=once)
            finally:
                try:
                    last = streamer.status()
                finally:
                    self._end(thread)
                given_up_at = time.monotonic() + PATIENCE
                backfill.join(PATIENCE)  # all of them were asked to end; a destination may hang
                for follower in report.followers:
                    follower.join(max(0.0, given_up_at - time.monotonic()))
                report.over(
                    replace(streamer.status(), state=last.state, error=last.error, away=last.away), archiver.behind()
                )
            say("stream-stopped", "bye", server=name)

    # -- the beginning

    @contextmanager
    def _sole_stream(self, source: BinlogSource) -> Iterator[None]:
        """Be the one stream of the server. A process that a service has started replaces the one before it,
        which is asked to end now that this one is ready, and killed where it does not. While commits wait for nobody,
        ``source`` may not answer, so it is asked before. Raises BusyError where another one
        streams the server, or the one before does not end in time."""
        deadline, before = time.monotonic() + TAKING_OVER, None
        with ExitStack() as stack:
            while not self._stop.is_set():
                try:
                    stack.enter_context(self._spool.locked(self._holder.note()))
                    break
                except BusyError:
                    if before is None and (before := self._predecessor()) is not None:
                        self._known = self._look(source)
                    if before is None or time.monotonic() > deadline:
                        raise
                before.end(time.monotonic(), LETTING_GO)
                self._stop.wait(MOMENT)
            if before is not None:
                say("stream-taken-over", f"process {os.getpid()} from process {before.pid}", server=self._server.name)
                before.close()
            yield

    def _look(self, source: BinlogSource) -> SourceState | None:
        """The server whose commits wait, as it is now; None where it does not answer soon."""
        if self._policy.acknowledge == OFF:
            return None
        with suppress(BackupdError, OSError, TimeoutError):
            return answered(source.look).result(LOOKING)
        return None

    def _predecessor(self) -> OtherProcess | StreamMember | None:
        """The process that streams the server, where a service of this installation started it, before this one."""
        if not self._holder.kept:
            return None
        found = Holder.of(self._wiring, self._server.name)
        if found is None or found.pid == os.getpid() or not found.began_before(self._holder):
            return None
        process = found.process()
        if process is not None and found.shared:
            return StreamMember(process, self._wiring, self._server.name, holds=True)
        return process

    def _destinations(self) -> dict[str, Destination]:
        """Every destination that must hold the backups; one that cannot be used now is tried again and again. Raises
        RefusedError for a type that this version cannot open."""
        opened = {name: self._wiring.destination(name) for name in self._server.required}
        for name, destination in opened.items():
            try:
                if not destination.is_initialised() and not self._was_used(name):
                    destination.initialise(self._wiring.clock())
            except (DestinationError, CatalogError) as error:
                say("stream-trouble", f"{name}: {error}", level=logging.WARNING, server=self._server.name)
        send = self._server.policy.limits.send
        return {
            name: throttled(destination, put=TokenBucket(send, cancel=self._stop)) if send else destination
            for name, destination in opened.items()
        }

    def _was_used(self, destination: str) -> bool:
        """One that was used and is bare now is most likely not mounted."""
        return self._writer.ask(lambda _catalog: self._wiring.holds_anything(destination), patience=OPENING)

    def _wanted(self) -> Position | None:
        """The position of the oldest restorable backup: a first stream begins there. Raises CatalogError."""
        if self._spool.branches():
            return None
        name = self._server.name
        physical = [
            record
            for record in self._writer.ask(lambda catalog: catalog.backups.list(name), patience=OPENING)
            if record.state is BackupState.COMPLETE and record.position.file
        ]
        return min(physical, key=lambda record: record.finished_at).position if physical else None

    def _given_up(self) -> Sequence[tuple[str, int]]:
        """Files with a recorded gap behind them that no destination can fill."""
        try:
            gaps = self._writer.ask(lambda catalog: catalog.binlogs.gaps(self._server.name), patience=PATIENCE)
        except CatalogError:
            return ()  # the next process asks again
        return [
            (gap.branch, position[0])
            for gap in gaps
            if not gap.destination and (position := file_position(gap.after)) is not None
        ]

    def _evidence(self) -> Evidence | None:
        """What the process before this one showed of acknowledged commits."""
        if self._policy.acknowledge == OFF:
            return None
        try:
            said = self._writer.ask(lambda catalog: catalog.binlogs.stream_state(self._server.name), patience=PATIENCE)
            known = said[0].get("acknowledgement") if said is not None else None
            found = Evidence.from_json(known) if known else None
        except (CatalogError, KeyError, ValueError, TypeError):
            return None  # not claimed
        return found if found is not None and found.mode == self._policy.acknowledge else None

    def _ours(self) -> Collection[str]:
        """Of those that answered under this name. Raises ServerError where the catalog does not say."""
        try:
            known = self._writer.ask(lambda catalog: catalog.identities.of(self._server.name), patience=PATIENCE)
        except CatalogError as error:
            raise ServerError(
                f"cannot verify the identity of the server at {self._server.connection().address}: {error.message}",
                hint="backupd repeats the check and draws no conclusion until then",
            ) from error
        return {one.uuid for one in known if not one.is_stranger}

    # -- the work

    def _copy(self, streamer: Streamer) -> None:
        try:
            streamer.run(self._stop)
        except BaseException as error:  # noqa: BLE001  not hidden: the main thread raises it
            self._broken = error
        self._waker.wake()

    def _keep_going(
        self,
        streamer: Streamer,
        archiver: Archiver,
        recorder: CatalogRecorder,
        report: StreamReport,
        backfill: CatalogBackfill,
        *,
        once: bool,
    ) -> None:
        begun = time.monotonic()
        wanted_at: datetime | None = None
        reported = 0.0
        rest, activity = Rest(seldom(self._server.policy)), Activity()
        while not self._stop.is_set():
            if self._broken is not None:
                raise self._broken
            self._spool.check_lock()
            if self._holder.shared and self._spool.is_asked_to_leave():
                return
            status = streamer.status()
            self._note_activity(activity.look(status))
            if not (once or rest.is_due(status, archiver.behind(), self._troubles)):
                self._waker.wait(min(BEAT, self._policy.checkpoint.total_seconds()))
                continue
            self._note_position(archiver, status)
            self._report_trouble(archiver.step(self._wiring.clock()))
            if status.state is StreamState.STREAMING and status.server_position is not None:
                self._meet(status.branch)
            wanted_at = wanted_at or status.server_time
            if time.monotonic() - reported >= REPORT:
                found = [self._attendance.trouble, self._member.trouble if self._member is not None else ""]
                own = {"": "; ".join(filter(None, found))} if any(found) else {}
                report.beat(status, archiver.behind(), {**own, **self._troubles})
                reported = time.monotonic()
                if self._holder.kept:
                    renew_log(log_of(self._wiring.settings, self._server.name))
            if (
                once
                and wanted_at is not None
                and self._everything_by(wanted_at, recorder)
                and backfill.was_tried
                and self._met == status.branch
            ):
                return
            self._attendance.look()
            if self._member is not None:
                self._look_for_another(self._member, status)
            self._give_up(status, begun, once=once)
            self._waker.wait(min(BEAT, archiver.due_in()))

    def _end(self, streamer: threading.Thread) -> None:
        """Where others share the process: as long as ``streamer``, which writes to the spool, waits for a server or a
        disk, the lock is held, and the process is asked to end, since a thread cannot be. It would write beside the
        next stream."""
        whole = self._stop.is_set()
        self._stop.set()
        streamer.join(UNWIND)
        if self._holder.shared:
            streamer.join(DEADLINE)  # who wants its place asks the process before that
        if self._holder.shared and streamer.is_alive():
            say(
                "stream-stuck",
                f"process {os.getpid()} ends, with all of its streams: this one has not in {UNWIND + DEADLINE:.0f} s",
                level=logging.WARNING,
                server=self._server.name,
            )
            if not whole:
                os.kill(os.getpid(), signal.SIGTERM)
            streamer.join()

    def _note_activity(self, found: str) -> None:
        """How much comes, for the service: streams on which hardly anything does share processes, but for those that
        commits wait for."""
        if self._holder.kept and found != self._holder.activity and self._policy.acknowledge == OFF:
            self._holder = replace(self._holder, activity=found)
            self._spool.say(self._holder.note())

    def _look_for_another(self, member: MemberWatch, status: StreamStatus) -> None:
        """Raises ServerError where the stream is to go on with another member of the group."""
        if not member.is_due(status):
            return
        with suppress(CatalogError):  # asked again
            known = self._writer.ask(lambda catalog: catalog.identities.of(self._server.name))
            member.look(known)

    def _note_position(self, archiver: Archiver, status: StreamStatus) -> None:
        """Where the server stood after the clocks were last read: what is stored up to there is confirmed."""
        position, moment = status.server_position, status.server_time
        if moment is not None and self._member is not None:
            moment = self._member.sure_until(moment)
        if position is not None and moment is not None and moment != self._noted and status.branch:
            number = position.file.rpartition(".")[2]
            archiver.note_position(status.branch, int(number), position.pos, moment)
            self._noted = moment

    def _meet(self, branch_id: str) -> None:
        """Compare who answers with those that answered before, once for each branch. What keeps it from that now is
        reported by the stream itself; until then nothing that is streamed counts as of the server.

        It is never waited for: MariaDB does not say where it is while commits wait for an acknowledgement, and what
        this thread stores may be what they wait for."""
        branch = next((one for one in self._spool.branches() if one.id == branch_id), None)
        if branch is None or branch_id == self._met:
            return
        connection = self._server.connection()
        if self._meeting is None:
            source = BinlogSource(connection, marker=lambda datadir: restored_by(Path(datadir)))
            self._meeting = branch_id, answered(lambda: source.look(files=False))
        about, looked = self._meeting
        if not looked.done():
            return
        self._meeting = None
        if about != branch_id:
            return
        try:
            state = looked.result()
            self._writer.ask(
                lambda _catalog: meet_stream(
                    self._wiring, self._server.name, state, branch, connection.address, member=self._server.member
                )
            )
        except (ServerError, RefusedError, CatalogError) as error:
            say(
                "stream-trouble",
                f"the identity of the server could not be verified: {error}",
                level=logging.WARNING,
                server=self._server.name,
            )
            return
        self._met = branch_id

    def _everything_by(self, moment: datetime, recorder: CatalogRecorder) -> bool:
        standing = recorder.standing()
        return all(name in standing and standing[name].at >= moment for name in self._server.required)

    def _give_up(self, status: StreamStatus, begun: float, *, once: bool) -> None:
        """Raises what another process may do better."""
        if status.state is not StreamState.FAILED:
            self._failing_since = None
        elif self._failing_since is None:
            self._failing_since = time.monotonic()
        failing = self._failing_since is not None and time.monotonic() - self._failing_since
        if failing and failing > (ONCE_TROUBLE if once else RENEW) and not self._attendance.alone:
            raise ServerError(
                f"the binary log of {self._server.name} cannot be streamed: {status.error}",
                hint="`backupd check` names what this account or this host lacks",
            )
        if once and time.monotonic() - begun > ONCE_TROUBLE and (self._troubles or status.error):
            lines = [f"{name}: {why}" for name, why in self._troubles.items()]
            raise DestinationError(
                f"part of {self._server.name}'s binary log could not be stored",
                detail="\n".join([*lines, *([status.error] if status.error else [])]),
                hint="the next run stores what is in the spool",
            )

    def _report_trouble(self, shipped: Shipped) -> None:
        """What is new of trouble, once."""
        for name, why in shipped.trouble.items():
            if self._troubles.get(name) != why:
                say("stream-trouble", f"{name or 'archive'}: {why}", level=logging.WARNING, server=self._server.name)
        for name in self._troubles.keys() - shipped.trouble.keys():
            say("stream-trouble-over", f"{name or 'archive'}: it continues", server=self._server.name)
        self._troubles = dict(shipped.trouble)

    def _heard(self, event: StreamEvent, report: StreamReport) -> None:
        """From the streamer's thread."""
        bad = event.kind in (
            StreamEventKind.FAILED,
            StreamEventKind.GAP,
            StreamEventKind.PURGE_ALARM,
            StreamEventKind.UNACKNOWLEDGED,
        )
        text = "\n".join(filter(None, (event.message, event.detail, event.hint)))
        say(f"stream-{event.kind}", text, level=logging.ERROR if bad else logging.INFO, server=self._server.name)
        report.heard(event)
        self._waker.wake()


def give_up() -> None:
    """Whatever the main thread is at."""
    raise KeyboardInterrupt


def _binlog_policy(server: ServerSettings) -> Binlog:
    policy = server.policy.binlog
    if policy is not None and policy.acknowledge != OFF and server.is_group:
        raise RefusedError(
            f"{server.name} is a group: commits of a group wait for no stream",
            detail=f"binlog.acknowledge of policy {server.policy_name} is {policy.acknowledge}: that is for one server",
            hint="leave acknowledge out of the policy, or name the source as a server without members",
        )
    if policy is None or not streams(server.policy):
        raise RefusedError(
            f"policy {server.policy_name} does not stream the binary log of {server.name}",
            hint="add `binlog: {stream: true}` to it",
        )
    return policy
