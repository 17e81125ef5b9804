"""The service's part of the streams: one process for each server whose policy asks for its binary log.

They are started, restarted with growing pauses when they end, and restarted when settings change that they go by. A
server that is paused has none. The catalog is needed only to learn of pauses and to report failures: one that hangs
keeps no stream from running.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from backupd.alerts.conditions import Condition, Key
from backupd.alerts.rules import STREAM
from backupd.app.context.logging_setup import log_folder, say
from backupd.app.context.settings import Settings
from backupd.app.context.wiring import Wiring
from backupd.app.runtime.child_process import ChildProcess, ProcessWatch, Starter, open_log, start
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
SUBJECT = "process"


@dataclass(slots=True)
class _Stream:
    """Of one server. ``basis``: the settings that its process goes by; times are monotonic. ``well``: it has lived for
    long enough, and that was told."""

    process: ChildProcess | None = None
    basis: str = ""
    began: float = 0.0
    well: bool = False
    failures: int = 0
    next_start: float = 0.0
    last_words: str = ""


class StreamWatch(ProcessWatch):
    """A process for each stream, which ``starter`` starts. What they had not stored when they end waits in the
    spool."""

    def __init__(self, wiring: Wiring, *, grace: float = GRACE, starter: Starter = start) -> None:
        super().__init__("streams", wiring, grace=grace)
        self._start_process = starter
        self._streams: dict[str, _Stream] = {}
        self._paused: frozenset[str] = frozenset()

    def running(self) -> dict[str, int]:
        """Process ids by server."""
        return {
            name: process.child.pid
            for name, one in list(self._streams.items())  # the thread goes on meanwhile
            if (process := one.process) is not None
        }

    def step(self) -> None:
        """One round. Raises CatalogError at the end where pauses could not be read, or an event not be written."""
        troubles: list[Exception] = []
        self._safely(self._look_at_pauses, troubles)
        wiring = self._wiring
        wanted = _wanted(wiring.settings, self._paused)
        for name in [*wanted, *(name for name in self._streams if name not in wanted)]:
            one = self._streams.setdefault(name, _Stream())
            self._safely(partial(self._look, name, one, wanted.get(name)), troubles)
        self._held.let_go(one.process.settings for one in self._streams.values() if one.process is not None)
        for name in [name for name, one in self._streams.items() if name not in wanted and one.process is None]:
            del self._streams[name]
        if troubles:
            raise troubles[0]

    # -- one stream

    def _look(self, name: str, one: _Stream, basis: str | None) -> None:
        now = time.monotonic()
        process = one.process
        code = process.ended() if process is not None else None
        if process is not None and code is None:
            if basis != one.basis:
                process.end(now, self._grace)
            elif not one.well and now - one.began >= HEALTHY:
                self._recovered(name, one)
            return
        if process is not None and code is not None:
            self._ended(name, one, process, code, now)
        if basis is not None and now >= one.next_start:
            self._begin(name, one, basis, now)

    def _begin(self, name: str, one: _Stream, basis: str, now: float) -> None:
        settings = self._wiring.settings
        one.basis, one.began, one.well = basis, now, False
        try:
            one.process = self._start_process(
                settings, self._held.file(settings), "run-stream", name, log=open_log(_log(settings, name))
            )
        except (BackupdError, OSError, RuntimeError) as error:
            one.last_words = str(error)
            self._failed(name, one, f"cannot be started: {error}", now)
        else:
            say("stream-process", f"process {one.process.child.pid} streams the binary log", server=name)

    def _ended(self, name: str, one: _Stream, process: ChildProcess, code: int, now: float) -> None:
        one.process = None
        if process.asked is not None:
            one.next_start, one.failures = now, 0
            say("stream-ended", "as requested", server=name)
            return
        if now - one.began >= HEALTHY:
            one.failures = 0
        one.last_words = process.last_words()
        self._failed(name, one, describe_exit(code), now)

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
                    hint=f"its log is {_log(self._wiring.settings, name)}; it is started again every minute, and "
                    "continues where it was",
                )
            )

    def _recovered(self, name: str, one: _Stream) -> None:
        one.failures = 0
        self.settle(looked={Key(STREAM, name, SUBJECT): f"the binary log of {name} is streamed again"})
        one.well = True

    # -- the thread

    def _pause(self) -> float:
        return TICK

    def _wind_down(self) -> bool:
        for name, one in self._streams.items():
            self._guarded(partial(self._see_to_its_end, name, one))
        return any(one.process is not None for one in self._streams.values())

    def _see_to_its_end(self, name: str, one: _Stream) -> None:
        if (process := one.process) is None:
            return
        process.end(time.monotonic(), self._grace)
        if (code := process.ended()) is not None:
            self._ended(name, one, process, code, time.monotonic())

    def _look_at_pauses(self) -> None:
        holds = self._scribe.ask(lambda catalog: catalog.holds.all())
        self._paused = frozenset(hold.server for hold in holds if hold.kind is HoldKind.PAUSE)

    def _safely(self, work: Callable[[], None], troubles: list[Exception]) -> None:
        """One stream's trouble must not be the others'."""
        try:
            work()
        except Exception as error:  # noqa: BLE001  raised by the caller once every stream was looked at
            troubles.append(error)


def _wanted(settings: Settings, paused: frozenset[str]) -> dict[str, str]:
    """Servers that have a stream, each with all of the settings that it goes by."""
    if EVERY_SERVER in paused:
        return {}
    found = {}
    for name in settings.servers:
        server = settings.server(name)
        if name not in paused and server.usable and streams(server.policy):
            found[name] = _basis(settings, name)
    return found


def _basis(settings: Settings, name: str) -> str:
    server, configuration = settings.server(name), settings.configuration
    policy = server.policy
    parts = [
        server.config,
        policy.binlog,
        policy.destinations,
        policy.objectives,
        policy.limits,
        *server.required.values(),
        *server.others.values(),
        configuration.encryption,
    ]
    texts = [part.model_dump_json() for part in parts if part is not None]
    return json.dumps([*texts, str(settings.spool), settings.catalog, dict(settings.programs)])


def _log(settings: Settings, name: str) -> Path:
    """Where a stream says what happens to it."""
    return log_folder(settings).with_name("streams") / f"{name}.log"
