"""The service's part of the streams: a process for each server whose policy asks for its binary log, or for several
on which hardly anything comes.

They are started, restarted with growing pauses when they end, and replaced when settings change that they go by. A
server that is paused has none. The catalog is needed only to learn of pauses and to report failures: one that hangs
keeps no stream from running.

They outlive the service, unless it is asked to end them: the next service knows them by what they say in their spools
(``stream_holder``), adopts those that go by the present settings and program files, and replaces the others, one
server after the other. Whatever replaces a process is started first, gets ready, and takes over from it
(``stream_process``): a server that waits for acknowledgements waits for that moment only, and settings with which no
stream can begin end none.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from backupd.alerts.conditions import Condition, Key
from backupd.alerts.rules import SHARING, STREAM
from backupd.app.binlogs.quiet import HEAVY, STILL
from backupd.app.binlogs.stream_holder import Holder, basis_of, code, log_of, log_of_shared, streamed
from backupd.app.binlogs.stream_member import StreamMember
from backupd.app.context.logging_setup import say
from backupd.app.context.settings import ServerSettings, Settings
from backupd.app.context.wiring import Wiring
from backupd.app.runtime.child_process import ChildProcess, ProcessWatch, Starter, open_log, start
from backupd.app.runtime.other_process import OtherProcess
from backupd.binlog.acknowledgement import OFF
from backupd.model.backup_record import EVERY_SERVER, HoldKind
from backupd.model.errors import BackupdError
from backupd.model.event import Severity
from backupd.process.pipeline import describe_exit
from policies.lint import streams

TICK = 1.0
"""Seconds between two looks."""
GRACE = 12.0
"""Seconds that a process has to unwind before it is killed with all that it started."""
LONGEST_PAUSE = 60.0
"""Seconds between two tries at the most."""
REPEATED = 3
"""So many failures in a row are an incident."""
HEALTHY = 60.0
"""Seconds after which a process counts as well: the next failure is the first one again."""
HANDOVER = 15.0
"""Seconds after which a process that is being replaced holds up no other replacement."""
SHARED_BY = 10
"""Streams of one process at the most, where hardly anything comes."""
BEGIN_ALONE = 10
"""So many streams may begin in a process of their own within ``HEALTHY``; what begins besides shares processes from
the start: 1,000 of them would take 32 GB until they were gathered."""
GATHERING = 10.0
"""Seconds between two looks which streams share a process."""
LONGEST_APART = 3600.0
"""Seconds at the most before one that has ended in a shared process is put into one again."""
SUBJECT = "process"

Process = ChildProcess | OtherProcess | StreamMember


@dataclass(slots=True)
class _Stream:
    """Of one server. ``basis``: the settings that its process goes by; ``leaving``: those that it replaces, until they
    have ended; times are monotonic. ``well``: it has lived for long enough, and that was reported. ``unshared``: how
    often in a row it could not share a process, ``apart_until``: when that is tried again."""

    process: Process | None = None
    basis: str = ""
    leaving: list[Process] = field(default_factory=list)
    began: float = 0.0
    well: bool = False
    failures: int = 0
    next_start: float = 0.0
    last_words: str = ""
    unshared: int = 0
    apart_until: float = 0.0


class StreamWatch(ProcessWatch):
    """A process for each stream, which ``starter`` starts. What they had not stored when they end waits in the
    spool."""

    def __init__(self, wiring: Wiring, *, grace: float = GRACE, starter: Starter = start) -> None:
        super().__init__("streams", wiring, grace=grace)
        self._start_process = starter
        self._streams: dict[str, _Stream] = {}
        self._paused: frozenset[str] = frozenset()
        self._leaves_them = False
        self._gather_due = time.monotonic() + GATHERING
        self._shared: list[ChildProcess] = []
        self._due: list[str] = []
        """Streams that are to begin in this round, and have not failed lately."""
        self._outdated: list[tuple[str, Process]] = []
        """Streams whose processes are to be replaced."""
        self._unshared: tuple[str, ...] | None = None
        """Streams of which it is reported that they cannot share a process; None: not known yet."""
        code()  # as it is now: what is exchanged from now on, no process of this service goes by

    def running(self) -> dict[str, int]:
        """Process ids by server."""
        return {
            name: _pid(process)
            for name, one in list(self._streams.items())  # the thread goes on meanwhile
            if (process := one.process) is not None
        }

    def leave(self) -> tuple[str, ...]:
        """Stop, and let the streams go on; gives the servers that have one."""
        self._leaves_them = True
        self.stop()
        return tuple(sorted(self.running()))

    def __exit__(self, *error: object) -> None:
        self._leaves_them = self._leaves_them or error[0] is not None  # the next service finds them
        super().__exit__(*error)

    def step(self) -> None:
        """One round. Raises CatalogError at the end where pauses could not be read, or an event not be written."""
        troubles: list[Exception] = []
        self._safely(self._look_at_pauses, troubles)
        wiring = self._wiring
        wanted = _wanted(wiring.settings, self._paused)
        self._due, self._outdated = [], []
        for name in dict.fromkeys([*wanted, *self._streams, *streamed(wiring.settings.spool)]):
            one = self._streams.setdefault(name, _Stream())
            stays = wiring.settings.is_unread(name) and self._paused.isdisjoint({name, EVERY_SERVER})
            self._safely(partial(self._look, name, one, wanted.get(name), stays=stays), troubles)
        self._safely(partial(self._begin_due, wanted), troubles)
        self._safely(partial(self._replace_outdated, wanted), troubles)
        self._safely(partial(self._gather, wanted), troubles)
        self._safely(self._report_unshared, troubles)
        self._look_at_shared(time.monotonic())
        self._held.let_go(
            process.settings
            for one in self._streams.values()
            for process in (one.process, *one.leaving)
            if isinstance(process, ChildProcess | StreamMember)
        )
        for name in [name for name, one in self._streams.items() if name not in wanted and not _processes(one)]:
            del self._streams[name]
        if troubles:
            raise troubles[0]

    # -- one stream

    def _look(self, name: str, one: _Stream, basis: str | None, *, stays: bool) -> None:
        """``stays``: nobody knows whether it is wanted, since a file of servers could not be read: one that runs goes
        on by the settings that it has."""
        now = time.monotonic()
        self._look_at_leaving(name, one, now, end=basis is None and not stays)
        process = one.process
        if process is None and now >= one.next_start:
            process = self._adopt(name, one, basis, now)
        how = _end_of(process) if process is not None else ""
        if process is not None and not how:
            if process.asked is not None or (basis is None and not stays):
                process.end(now, self._grace)
            elif basis is not None and basis != one.basis:
                self._outdated.append((name, process))
            elif not one.well and now - one.began >= HEALTHY:
                self._recovered(name, one)
            return
        if process is not None:
            self._ended(name, one, process, how, now)
        if basis is None or now < one.next_start:
            return
        if one.failures:
            self._begin(name, one, basis, now)
        else:
            self._due.append(name)

    def _begin_due(self, wanted: Mapping[str, str]) -> None:
        """Those for which commits wait begin alone, and of the others a bounded number."""
        now = time.monotonic()
        settings = self._wiring.settings
        together: list[str] = []
        room = BEGIN_ALONE - sum(
            isinstance(one.process, ChildProcess) and now - one.began < HEALTHY for one in self._streams.values()
        )
        for name in self._due:
            if _commits_wait(settings.server(name)):
                self._begin(name, self._streams[name], wanted[name], now)
            elif room > 0:
                room -= 1
                self._begin(name, self._streams[name], wanted[name], now)
            else:
                together.append(name)
        for first in range(0, len(together), SHARED_BY):
            names = together[first : first + SHARED_BY]
            if len(names) == 1 or not self._share(names, wanted, now):
                for name in names:
                    self._begin(name, self._streams[name], wanted[name], now)

    def _look_at_leaving(self, name: str, one: _Stream, now: float, *, end: bool) -> None:
        for process in list(one.leaving):
            if end or process.asked is not None:
                process.end(now, self._grace)
            if _end_of(process):
                one.leaving.remove(process)
                say("stream-ended", f"process {_pid(process)} was replaced", server=name)

    def _adopt(self, name: str, one: _Stream, basis: str | None, now: float) -> Process | None:
        """The process that streams the server already, and that another service has started; None where there is
        none."""
        holder = Holder.of(self._wiring, name)
        process: OtherProcess | StreamMember | None = holder.process() if holder is not None else None
        if holder is None or process is None:
            return None
        if process.pid in map(_pid, one.leaving):
            process.close()
            return None
        fits = basis is not None and holder.goes_by(basis)
        if holder.shared and isinstance(process, OtherProcess):
            process = StreamMember(process, self._wiring, name, holds=True)
        one.process, one.basis, one.began, one.well = process, basis or "" if fits else "", now, False
        after = "" if fits else "; its settings or program files are not the present ones"
        say("stream-adopted", f"process {process.pid} goes on with the binary log{after}", server=name)
        return process

    def _replace_outdated(self, wanted: Mapping[str, str]) -> None:
        """One process after the other is replaced, one of several streams by another one for all of them; where one is
        being replaced just now, in a later round."""
        now = time.monotonic()
        if not self._outdated or self._is_handing_over(now):
            return
        name, process = self._outdated[0]
        names = [
            one
            for one, other in self._outdated
            if other is process or (isinstance(process, StreamMember) and _pid(other) == process.pid)
        ]
        if len(names) == 1 or not self._share(names, wanted, now):
            self._replace(name, self._streams[name], process, wanted[name], now)

    def _is_handing_over(self, now: float) -> bool:
        """Is a process being replaced just now? One that does not end holds up no other replacement for long."""
        return any(one.leaving and now - one.began < HANDOVER for one in self._streams.values())

    def _replace(self, name: str, one: _Stream, process: Process, basis: str, now: float) -> None:
        """Start the next process, which takes over from this one."""
        holder = Holder.of(self._wiring, name)
        if holder is None or holder.pid != _pid(process):
            process.end(now, self._grace)  # it streams nothing yet
        one.leaving.append(process)
        one.process, one.failures = None, 0
        self._begin(name, one, basis, now)

    def _gather(self, wanted: Mapping[str, str]) -> None:
        """Streams on which hardly anything comes share a process, and one on which much comes gets its own: each is
        replaced by one that is ready first. Those that begin, fail, or are replaced have their own until then."""
        now = time.monotonic()
        if now < self._gather_due or self._is_handing_over(now):
            return
        self._gather_due = now + GATHERING
        settled = {
            name: one.process
            for name, one in self._streams.items()
            if one.process is not None
            and one.process.asked is None
            and not one.leaving
            and one.basis == wanted.get(name)
        }
        together = Counter(map(_pid, settled.values()))
        still: list[str] = []
        for name, process in settled.items():
            holder = Holder.of(self._wiring, name)
            if holder is None or holder.pid != _pid(process):
                continue
            if holder.activity == HEAVY and together[holder.pid] > 1:
                say("stream-alone", "much comes: it gets a process of its own", server=name)
                self._replace(name, self._streams[name], process, wanted[name], now)
                return
            apart = now < self._streams[name].apart_until
            if holder.activity == STILL and together[holder.pid] * 2 <= SHARED_BY and not apart:
                still.append(name)
        chosen = sorted(still, key=lambda name: (_pid(settled[name]), name))[:SHARED_BY]
        if len({_pid(settled[name]) for name in chosen}) > 1:
            self._share(chosen, wanted, now)
        else:
            self._report_unshared(well=True)

    def _share(self, names: Sequence[str], wanted: Mapping[str, str], now: float) -> bool:
        """One process begins with the streams of ``names``, and takes over from those that they have. False where none
        could be started."""
        settings = self._wiring.settings
        others = [word for name in names[1:] for word in ("--with", name)]
        try:
            process = self._start_process(
                settings,
                self._held.file(settings),
                "run-stream",
                names[0],
                *others,
                log=open_log(log_of_shared(settings)),
                outlives=True,
            )
        except (BackupdError, OSError, RuntimeError) as error:
            say("stream-shared", f"no process can be started: {error}; each goes on alone", level=logging.WARNING)
            for name in names:
                self._stays_apart(self._streams[name], str(error), now)
            return False
        self._shared.append(process)
        for name in names:
            one = self._streams[name]
            if one.process is not None:
                one.leaving.append(one.process)
            one.process, one.failures, one.began = StreamMember(process, self._wiring, name, holds=False), 0, now
            one.basis, one.well = wanted[name], False
        say("stream-shared", f"process {process.child.pid} streams the binary logs of {', '.join(names)}")
        return True

    def _stays_apart(self, one: _Stream, why: str, now: float) -> None:
        """It could not share a process, and is not put into one again at once."""
        one.unshared += 1
        one.apart_until = now + min(LONGEST_APART, HEALTHY * 2.0**one.unshared)
        one.last_words = why

    def _report_unshared(self, *, well: bool = False) -> None:
        """Report which streams cannot share a process, where others than before cannot: each takes the memory of a
        process of its own. ``well``: some can, or there is nothing to share."""
        names = tuple(sorted(name for name, one in self._streams.items() if one.unshared >= REPEATED))
        known = (
            self._unshared is not None or names or (well and not any(one.unshared for one in self._streams.values()))
        )
        if names == self._unshared or not known:
            return
        key = Key(SHARING, "", SUBJECT)
        if names:
            words = self._streams[names[0]].last_words
            self.settle(
                Condition(
                    key,
                    Severity.WARNING,
                    f"the binary logs of {', '.join(names)} cannot be streamed by a process that several share: that "
                    f"has failed {REPEATED} times in a row; each is streamed by a process of its own, and takes about "
                    "32 MiB of memory",
                    detail=words,
                    hint=f"the log of such processes is {log_of_shared(self._wiring.settings)}; it is tried again at "
                    "least every hour",
                )
            )
        else:
            self.settle(looked={key: "quiet streams share processes again"})
        self._unshared = names

    def _look_at_shared(self, now: float) -> bool:
        """Are there processes that were started for several? One without any left ends by itself, or is ended."""
        used = [
            process.process
            for one in self._streams.values()
            for process in _processes(one)
            if isinstance(process, StreamMember)
        ]
        for process in list(self._shared):
            if process.ended() is not None:
                self._shared.remove(process)
            elif all(one is not process for one in used):
                process.end(now, self._grace)
        return bool(self._shared)

    def _begin(self, name: str, one: _Stream, basis: str, now: float) -> None:
        settings = self._wiring.settings
        one.basis, one.began, one.well = basis, now, False
        try:
            process = one.process = self._start_process(
                settings,
                self._held.file(settings),
                "run-stream",
                name,
                log=open_log(log_of(settings, name)),
                outlives=True,
            )
        except (BackupdError, OSError, RuntimeError) as error:
            one.last_words = str(error)
            self._failed(name, one, f"cannot be started: {error}", now)
        else:
            say("stream-process", f"process {process.child.pid} streams the binary log", server=name)

    def _ended(self, name: str, one: _Stream, process: Process, how: str, now: float) -> None:
        one.process = None
        if process.asked is not None:
            one.next_start, one.failures = now, 0
            say("stream-ended", "as requested", server=name)
            return
        lived = now - one.began >= HEALTHY
        if lived:
            one.failures = 0
        one.last_words = process.last_words()
        if isinstance(process, StreamMember) and not lived:
            self._stays_apart(one, one.last_words, now)
        self._failed(name, one, how, now)

    def _failed(self, name: str, one: _Stream, how: str, now: float) -> None:
        one.failures += 1
        pause = min(LONGEST_PAUSE, 2.0 ** (one.failures - 1))
        one.next_start = now + pause
        say(
            "stream-ended",
            f"its process {how}; the next one starts in {pause:g} s\n{one.last_words}",
            level=logging.WARNING,
            server=name,
        )
        if one.failures >= REPEATED:
            self.settle(
                Condition(
                    Key(STREAM, name, SUBJECT),
                    Severity.ERROR,
                    f"the binary log of {name} is not streamed: its process has ended {one.failures} times in a "
                    f"row, and {how} the last time",
                    detail=one.last_words,
                    hint=f"its log is {log_of(self._wiring.settings, name)}; it is started again every minute, and "
                    "continues where it was",
                )
            )

    def _recovered(self, name: str, one: _Stream) -> None:
        one.failures = 0
        self.settle(looked={Key(STREAM, name, SUBJECT): f"the binary log of {name} is streamed again"})
        one.well = True
        if isinstance(one.process, StreamMember):
            one.unshared = 0
            self._report_unshared(well=True)

    # -- the thread

    def _pause(self) -> float:
        return TICK

    def _wind_down(self) -> bool:
        if self._leaves_them:
            return False
        for name, one in self._streams.items():
            self._guarded(partial(self._see_to_its_end, name, one))
        left = self._look_at_shared(time.monotonic())
        return left or any(_processes(one) for one in self._streams.values())

    def _see_to_its_end(self, name: str, one: _Stream) -> None:
        now = time.monotonic()
        self._look_at_leaving(name, one, now, end=True)
        if (process := one.process) is None:
            return
        process.end(now, self._grace)
        if how := _end_of(process):
            self._ended(name, one, process, how, now)

    def _look_at_pauses(self) -> None:
        holds = self._scribe.ask(lambda catalog: catalog.holds.all())
        self._paused = frozenset(hold.server for hold in holds if hold.kind is HoldKind.PAUSE)

    def _safely(self, work: Callable[[], None], troubles: list[Exception]) -> None:
        """One stream's trouble must not be the others'."""
        try:
            work()
        except Exception as error:  # noqa: BLE001  raised by the caller once every stream was looked at
            troubles.append(error)


def acknowledged(settings: Settings) -> list[str]:
    """Servers whose commits wait for the stream."""
    found = [settings.server(name) for name in settings.servers]
    return [server.name for server in found if server.usable and streams(server.policy) and _commits_wait(server)]


def _commits_wait(server: ServerSettings) -> bool:
    """By the policy: do commits at the server wait for the stream?"""
    return server.policy.binlog is not None and server.policy.binlog.acknowledge != OFF


def _wanted(settings: Settings, paused: frozenset[str]) -> dict[str, str]:
    """Servers that have a stream, each with all of the settings that it goes by."""
    if EVERY_SERVER in paused:
        return {}
    found = {}
    for name in settings.servers:
        server = settings.server(name)
        if name not in paused and server.usable and streams(server.policy):
            found[name] = basis_of(settings, name)
    return found


def _processes(one: _Stream) -> tuple[Process, ...]:
    return (*one.leaving, *((one.process,) if one.process is not None else ()))


def _pid(process: Process) -> int:
    return process.child.pid if isinstance(process, ChildProcess) else process.pid


def _end_of(process: Process) -> str:
    """How it ended; empty as long as it lives."""
    if isinstance(process, StreamMember):
        return _end_of(process.process) or process.ended()
    if isinstance(process, OtherProcess):
        return "has ended" if process.ended() else ""
    code = process.ended()
    return describe_exit(code) if code is not None else ""
